"""Which rows of results.csv belong into one bar and one panel, and what a figure must say about them. Draws nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipeinfer.observe.columns import ASKED
from pipeinfer.observe.table import Record

Series = dict[str, list[Record]]
Bar = Sequence[Record]

POLICIES = ("iterative", "speculative", "pipeinfer", "pipedec", "flowspec", "pipespec", "auto")
SHOWN = (
    "policy", "variant", "settings", "model", "model_bytes", "model_hash", "quantisation", "model_draft",
    "model_draft_bytes", "model_draft_hash", "quantisation_draft", "ranks", "layers", "threads", "prompt",
    "prompt_hash", "prompt_n", "seed", "repetition",
)  # fmt: skip
"""What figures show as bars, groups and titles, or pool and say so. Nothing else that was asked is ever pooled."""

FACETS = tuple(name for name in ASKED if name not in SHOWN)
LABELS = {"predicted_n": "{} tokens", "temp": "temperature {}", "numerics": "{}", "options": "{}", "pace": "on {}",
          "predict": "{} tokens", "n_requests": "{} requests", "parallel": "loaded for {}"}  # fmt: skip
LONGEST_NAME = 34
HASH_SHOWN = 4


def clean(text: str) -> str:
    """A name as a label: no mathematics, no control characters, not longer than fits."""
    shown = "".join(character if character.isprintable() else "?" for character in without_suffixes(text))
    return (shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 1]}…").replace("$", r"\$")


def in_full(text: str) -> str:
    """What rows are told apart by, as a label: in as many lines as it takes, nothing left out."""
    return "\n".join(clean(line) for line in textwrap.wrap(text, LONGEST_NAME))


def without_suffixes(names: str) -> str:
    """Of one model, or of several joined with +."""
    return "+".join(name.removesuffix(".gguf") for name in names.split("+"))


def grouped(rows: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    groups: dict[Any, list[Record]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


# -- panels


def panels_of(rows: Sequence[Record], facets: Sequence[str] = FACETS) -> dict[str, list[Record]]:
    """Rows by title: of one model pair and alike in all that must not be pooled, `facets`; those without a draft join
    every pair of their target."""
    names = _differing(rows, facets)
    found = grouped(rows, lambda row: (_model(row, "model"), _model(row, "model_draft"), _facets(row, names)))
    drafted = {(target, facets) for target, draft, facets in found if draft[0]}
    models = {model for target, draft, _ in found for model in (target, draft)}
    panels = {}
    for (target, draft, facets), members in found.items():
        if draft[0] or (target, facets) not in drafted:
            parts = " + ".join(_title(model, models) for model in (target, draft) if model[0])
            alone = found.get((target, ("", ""), facets), []) if draft[0] else []
            panels[", ".join(filter(None, (parts, *map(_facet_label, names, facets))))] = alone + members
    return panels


def _model(row: Record, role: str) -> tuple[str, str]:
    return str(row.get(role, "")), str(row.get(f"{role}_hash", ""))


def _title(model: tuple[str, str], models: Iterable[tuple[str, str]]) -> str:
    """A model's name, with its hash where another one's looks the same, as long ones may."""
    name, digest = model
    alike = [other for other in models if clean(other[0]) == clean(name)]
    return clean(name) + (f" #{digest[:HASH_SHOWN]}" if len(alike) > 1 else "")


def _differing(rows: Sequence[Record], facets: Sequence[str]) -> list[str]:
    names = [name for name in facets if len({_comparable(row, name) for row in rows}) > 1]
    bars = grouped(rows, lambda row: (*map(str, _bar(row)), *_facets(row, names)))
    # the ranks of different bars may well have other threads
    differ = any(len({row.get("threads") for row in bar}) > 1 for bar in bars.values())
    return names + (["threads"] if differ else [])


def _bar(row: Record) -> list[Any]:
    names = ("model", "model_hash", "model_draft", "model_draft_hash", "policy", "variant", "settings", "ranks",
             "layers")  # fmt: skip
    return [row.get(name) for name in names]


def _facets(row: Record, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(_comparable(row, name) for name in names)


def _comparable(row: Record, name: str) -> Any:
    value = row.get(name)
    if name == "threads" and value and len(set(value)) == 1:
        return value[:1]  # so many on each rank, however many ranks
    return None if value != value else value


def _facet_label(name: str, value: Any) -> str:
    if name == "threads":
        shown = ",".join(map(str, value or ()))
        return f"{shown} threads a rank" if len(value or ()) == 1 else f"threads {shown}"
    if name == "pace_hash":
        return f"#{value[:HASH_SHOWN]}" if value else ""
    unset = value in (None, "")
    return "" if unset else in_full(LABELS.get(name, f"{name.replace('_', ' ')} {{}}").format(value))


# -- bars


def series_of(rows: Sequence[Record]) -> Series:
    """Rows by policy, and by what an ablation switched off; by settings and layers too where one policy comes with
    several on as many ranks."""
    ordered = sorted(rows, key=lambda row: (_place(row["policy"]), bool(row.get("variant"))))
    several = {
        name: {key[0] for key, found in grouped(rows, lambda row: (row["policy"], row.get("ranks"))).items()
               if len({row.get(name) for row in found}) > 1}
        for name in ("settings", "layers")
    }  # fmt: skip

    def label(row: Record) -> str:
        parts = [", ".join(filter(None, (clean(row["policy"]), in_full(row.get("variant") or ""))))]
        if row["policy"] in several["settings"]:
            parts.append(in_full(row["settings"]))
        if row["policy"] in several["layers"]:
            parts.append(f"layers {','.join(map(str, row['layers']))}")
        return "\n".join(parts)

    return grouped(ordered, label)


def _place(policy: str) -> int:
    return POLICIES.index(policy) if policy in POLICIES else len(POLICIES)


def by_ranks(rows: Sequence[Record], facets: Sequence[str] = FACETS) -> dict[str, list[Record]]:
    """Rows of each panel and number of ranks, by a title."""
    return {
        f"{title}, {ranks} {'rank' if ranks == 1 else 'ranks'}": found
        for title, members in panels_of(rows, facets).items()
        for ranks, found in sorted(grouped(members, lambda row: row["ranks"]).items())
    }


def prompt_labels(rows: Sequence[Record]) -> Callable[[Record], str]:
    """What names a row's prompt: all questions of a set are one; texts of one name that differ get their hashes."""
    hashes = grouped(rows, lambda row: row["prompt"])
    several = {name for name, found in hashes.items() if len({row["prompt_hash"] for row in found}) > 1}

    def label(row: Record) -> str:
        name, slash, _ = row["prompt"].partition("/")
        return f"{name} #{row['prompt_hash'][:HASH_SHOWN]}" if name in several and not slash else str(name)

    return label


# -- what is said below


def count_text(bars: Sequence[Bar]) -> str:
    counts = sorted({len(bar) for bar in bars})
    return f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"


def pooled_text(bars: Sequence[Bar]) -> str:
    """What the generations of a bar differ in: `3 prompts, 2 repetitions`."""
    kinds = {"prompt": ("prompt", "prompt_hash"), "repetition": ("repetition",), "seed": ("seed",)}
    most = {
        kind: max(len({tuple(row.get(name) for name in names) for row in bar}) for bar in bars)
        for kind, names in kinds.items()
    }
    return ", ".join(f"{number} {kind}s" for kind, number in most.items() if number > 1)


def note_on(bars: Sequence[Bar]) -> str:
    """What bars and whiskers are, and what they pool."""
    if not bars:
        return ""
    if all(len(bar) == 1 for bar in bars):
        return "Each bar is one generation."
    pooled = pooled_text(bars)
    over = f"Bars: means over generations, {count_text(bars)}" + (f" ({pooled})" if pooled else "")
    prompts = [frozenset((row.get("prompt"), row.get("prompt_hash")) for row in bar) for bar in bars]
    # bars of single prompts are meant to differ
    unlike = " Not all bars pool the same prompts." if len(set(prompts)) > 1 and max(map(len, prompts)) > 1 else ""
    return f"{over}; whiskers: one sample standard deviation of these.{unlike}"
