"""Rows of a table as a data frame: the panel and the bar or line of each row, and what a figure says about them. Draws
nothing."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Number
from typing import Any

import numpy as np
import pandas as pd

from pipeinfer.observe.columns import Column, Record
from pipeinfer.observe.figures import LATE
from pipeinfer.policies import POLICIES
from pipeinfer.text import count_text, without_suffixes

SHOWN = (
    "policy",
    "variant",
    "settings",
    "model",
    "model_bytes",
    "model_hash",
    "quantisation",
    "model_draft",
    "model_draft_bytes",
    "model_draft_hash",
    "quantisation_draft",
    "ranks",
    "layers",
    "threads",
    "prompt",
    "prompt_hash",
    "prompt_n",
    "seed",
    "repetition",
)
"""Columns that figures show as bars, groups and titles, or average over and say so. All others that were asked are
facets: rows that differ in them are in different panels."""

BAR = ["model", "model_hash", "model_draft", "model_draft_hash", "policy", "variant", "settings", "ranks", "layers"]
LABELS = {
    "predicted_n": "{} tokens",
    "temp": "temperature {}",
    "numerics": "{}",
    "options": "{}",
    "pace": "on {}",
    "pace_hash": "#{:.6}",
    "predict": "{} tokens",
    "n_requests": "{} requests",
    "parallel": "loaded for {}",
    "policy": "{}",
    "load": "{}",
}
LONGEST_NAME = 34
VIRTUAL = "virtual"
"""The numerics of what was simulated."""

EMPTY: dict[str, Any] = {"text": "", "integers": (), "numbers": ()}


def frame_of(rows: Sequence[Record], columns: Sequence[Column]) -> pd.DataFrame:
    """All of `columns`, which are "", () or NaN (ranks: 0) where rows lack them; `text` identifies a prompt. Rows of
    one `sample` differ by chance: generations of one prompt, and all that was simulated, where only another text gives
    other times. What was simulated again, which gives the same, counts once."""
    cells = {each.name: [row.get(each.name, EMPTY.get(each.kind, math.nan)) for row in rows] for each in columns}
    frame = pd.DataFrame(cells).fillna({"ranks": 0}).astype({"ranks": int})
    again = (frame.numerics == VIRTUAL) & frame.duplicated([each.name for each in columns if each.is_key], keep="last")
    frame = frame[~again].reset_index(drop=True)
    text = frame.prompt + "\0" + frame.prompt_hash
    return frame.assign(text=text, sample=text.mask(frame.numerics == VIRTUAL, VIRTUAL))


def is_simulated(frame: pd.DataFrame) -> bool:
    """Whether all rows are."""
    return bool((frame.numerics == VIRTUAL).all())


def what_text(frame: pd.DataFrame, what: str) -> str:
    """What a row is."""
    return f"simulated {what}" if is_simulated(frame) else what


def ranks_text(frame: pd.DataFrame) -> str:
    """What the column `ranks` counts."""
    return "nodes" if is_simulated(frame) else "MPI ranks"


def clean(text: str) -> str:
    """A label without file suffixes, mathematics or control characters, and not longer than fits."""
    shown = "".join(character if character.isprintable() else "?" for character in without_suffixes(text))
    return (shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 1]}…").replace("$", r"\$")


def in_full(text: str) -> str:
    """A label of as many lines as the text needs."""
    return "\n".join(clean(line) for line in textwrap.wrap(text, LONGEST_NAME))


def facet_text(labels: Mapping[str, str], name: str, value: Any) -> str:
    if value in ("", ()) or value != value:
        return ""
    if name == "threads" and len(set(value)) == 1:
        return f"{count_text(value[0], 'thread')} a rank"
    shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
    shown = f"{shown:.12g}" if isinstance(shown, Number) else shown
    return in_full(labels.get(name, f"{name.replace('_', ' ')} {{}}").format(shown))


def layout(frame: pd.DataFrame, facets: Sequence[str], always: Sequence[str] = ()) -> pd.DataFrame:
    """The rows in the order of panels, with `panel` (its title) and `series` (the label of a bar or line).

    A panel is one model pair and one value of each facet, and of each column in `always`, which all titles have. Rows
    without a draft belong to every pair of their target.
    """
    names = [name for name in facets if frame[name].nunique(dropna=False) > 1]
    # different bars may have different threads, the rows of one bar may not
    if (frame.groupby([*BAR, *names], dropna=False)["threads"].nunique() > 1).any():
        names.append("threads")
    names += always
    models = {role: list(zip(frame[role], frame[f"{role}_hash"], strict=True)) for role in ("model", "model_draft")}
    several = Counter(clean(name) for name, _ in {pair for pairs in models.values() for pair in pairs})
    target, draft = (
        [clean(name) + (f" #{digest[:6]}" if several[clean(name)] > 1 else "") for name, digest in each]
        for each in models.values()
    )
    label = partial(facet_text, LABELS | {"ranks": f"{ranks_text(frame)}: {{}}"})
    facet = [", ".join(filter(None, map(label, names, row))) for row in zip(*map(frame.get, names), strict=True)]
    frame = frame.assign(target=target, draft=draft, facet=facet or "")
    pairs = frame.loc[frame.draft != "", ["target", "facet", "draft"]].drop_duplicates()
    frame = frame.merge(pairs.rename(columns={"draft": "pair"}), on=["target", "facet"], how="left")
    frame = frame.fillna({"pair": ""})[lambda each: (each.draft == "") | (each.draft == each.pair)]
    models_text = frame.target + (" + " + frame.pair).where(frame.pair != "", "")
    frame = frame.assign(panel=models_text + (", " + frame.facet).where(frame.facet != "", ""))
    order = np.lexsort((frame.ranks if "ranks" in always else frame.index, pd.factorize(models_text)[0]))
    return _with_series(frame.iloc[order].reset_index(drop=True))


def _with_series(frame: pd.DataFrame) -> pd.DataFrame:
    """A series is a policy, with what an ablation switched off, and with its settings or layers where one panel has
    several of them on as many ranks. Policies are in their order, each before its ablations."""
    groups = frame.groupby(["panel", "policy", "ranks"])
    several = {name: set(frame.policy[groups[name].transform("nunique") > 1]) for name in ("settings", "layers")}

    def label(policy: str, variant: str, settings: str, layers: Sequence[int]) -> str:
        lines = [", ".join(filter(None, (clean(policy), in_full(variant))))]
        lines += [in_full(settings)] if policy in several["settings"] else []
        lines += [f"layers {','.join(map(str, layers))}"] if policy in several["layers"] else []
        return "\n".join(lines)

    labels = [label(*row) for row in frame[["policy", "variant", "settings", "layers"]].itertuples(index=False)]
    places = [[*POLICIES, policy].index(policy) for policy in frame.policy]
    order = dict.fromkeys(labels[at] for at in np.lexsort((frame.variant != "", places)))
    return frame.assign(series=pd.Categorical(labels, list(order)))


def prompt_labels(frame: pd.DataFrame) -> pd.Series:
    """All questions of a set are one prompt; texts of one name that differ have their hashes."""
    several = frame.groupby("prompt")["prompt_hash"].transform("nunique") > 1
    hashes = (" #" + frame.prompt_hash.str[:6]).where(several & ~frame.prompt.str.contains("/"), "")
    return frame.prompt.str.split("/").str[0].map(clean) + hashes


# -- means and what they average over


def mean(values: Any, samples: pd.Series) -> Any:
    """Of a series, or of each column of a frame, over the means of each sample: what was repeated more often weighs no
    more."""
    return values.groupby(samples).mean().mean()


def means_by(frame: pd.DataFrame, by: str, value: str) -> pd.Series:
    """By `by`, as `mean`."""
    return frame.groupby([by, "sample"])[value].mean().groupby(level=0).mean()


def spread(frame: pd.DataFrame, by: str, value: str) -> pd.Series:
    """By `by`, the sample standard deviation within each `sample`, pooled over the samples; NaN where each has one
    row."""
    samples = frame.groupby([by, "sample"])[value]
    freedom = samples.count() - 1
    squares = (samples.var() * freedom).groupby(level=0).sum()
    return (squares / freedom.groupby(level=0).sum()) ** 0.5


def n_text(sizes: pd.Series) -> str:
    return f"n = {sizes.min()}" + (f" to {sizes.max()}" if sizes.max() > sizes.min() else "")


def pooled_text(groups: Any, what: str) -> str:
    """How many rows each bar or line has and what they differ in: `n = 6 generations (3 prompts, 2 repetitions)`."""
    frame = groups.obj.assign(group=groups.ngroup())
    kinds = {"text": "texts" if is_simulated(frame) else "prompts", "repetition": "repetitions", "seed": "seeds"}
    names = ["repetition", "seed", "text"] if what == "loads" else list(kinds)
    most, shown = groups[names].nunique().max(), list[str]()
    for name in names:
        known = ["group", *shown]
        # what those before it decide would read as a further factor
        if most[name] > 1 and len(frame[[*known, name]].drop_duplicates()) > len(frame[known].drop_duplicates()):
            shown.append(name)
    over = ", ".join(f"{most[name]} {kinds[name]}" for name in shown)
    return f"{n_text(groups.size())} {what_text(frame, what)}" + (f" ({over})" if over else "")


def pace_text(frame: pd.DataFrame) -> str:
    """A sentence about rows of paced jobs, whose times are not those of the machines that they ran on."""
    paces = [pace for pace in frame.pace.unique() if pace]
    if not paces:
        return ""
    which = "Paced" if (frame.pace != "").all() else "Paced where a title names a profile"
    text = f" {which}: stages, drafts and links take the times of {' and of '.join(map(_one_pace_text, paces))}."
    spans_s = frame.total_s if "total_s" in frame else frame.wall_s
    is_late = frame.late_s.map(lambda late_s: max(late_s, default=0.0)) > LATE * spans_s
    return text + (f" In {is_late.sum()} of {len(frame)} a rank was late by over {LATE:.0%}." if any(is_late) else "")


def _one_pace_text(pace: str) -> str:
    name, star, factor = pace.rpartition("*")
    return f"{clean(name)} ({factor} real seconds count as one)" if star else clean(pace)


def means_text(groups: Any, bar: str, what: str, alike: bool = True) -> str:
    """What bars or points and their whiskers are. `what`: what a row is. `alike`: all should have the same prompts."""
    if groups.size().max() == 1:
        return f"Each {bar} is one {what_text(groups.obj, what)}."
    text = f"{bar.capitalize()}s: means over {pooled_text(groups, f'{what}s')}"
    if groups["sample"].agg(lambda samples: samples.value_counts().nunique() > 1).any():
        text += ", each prompt weighed alike"
    repeated = groups.obj[groups["sample"].transform(lambda samples: samples.duplicated(keep=False)).astype(bool)]
    if len(repeated):
        text += f"; whiskers: one sample standard deviation over {_repeated_text(repeated, what)}"
    prompts = groups["text"].agg(lambda texts: "\0".join(sorted(set(texts))))
    unlike = alike and prompts.nunique() > 1
    return f"{text}.{f' Not all {bar}s average over the same prompts.' if unlike else ''}"


def _repeated_text(repeated: pd.DataFrame, what: str) -> str:
    """What rows of one sample differ in."""
    if what == "load":
        return "repetitions of the load"
    if is_simulated(repeated):
        return "texts"
    of_prompts = "repetitions of the same prompt" if (repeated["text"] != "\0").any() else "these"  # the original's
    return of_prompts + (", of what was simulated over texts" if (repeated.numerics == VIRTUAL).any() else "")


def points(percentiles: Any, n_values: float) -> tuple[np.ndarray, np.ndarray]:
    """(values, weights) of the distribution that has these interpolated percentiles, 0 to 100: its `n_values` values
    where the percentiles determine them, otherwise the percentiles."""
    array = np.asarray(percentiles, float)
    if 1 <= n_values <= len(array):
        n = int(n_values)
        shares = np.maximum(0.0, 1.0 - np.abs(np.linspace(0, n - 1, len(array))[:, None] - np.arange(n)))
        values = np.linalg.lstsq(shares, array, rcond=None)[0]
        if np.allclose(shares @ values, array, rtol=1e-3, atol=1e-4 * array.max()):
            return np.maximum.accumulate(values.clip(0.0)), np.ones(n)
    return array, np.full(len(array), max(1.0, n_values) / max(1, len(array)))
