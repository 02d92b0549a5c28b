"""Markdown tables of the code's records: architectures, columns, checks, fields of requests, profiles."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import settings_of
from pipeinfer.job.doctor.checks import CHECKS
from pipeinfer.job.doctor.findings import Severity
from pipeinfer.job.requests.fields import ALIASES, IN_EFFECT, ONLY, WITHOUT_EFFECT
from pipeinfer.models.gguf.architectures import ARCHITECTURES, Architecture
from pipeinfer.observe.columns import Column
from pipeinfer.virtual.profile import load_profile, shipped_profiles


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n" for cells in lines)


def code(values: Iterable[str], separator: str = ", ") -> str:
    return separator.join(f"`{value}`" for value in values)


def architectures() -> str:
    allowed = {name: each for name, each in sorted(ARCHITECTURES.items()) if not each.refused}
    refused = {name: each.refused for name, each in sorted(ARCHITECTURES.items()) if each.refused}
    rows = [[f"`{name}`", _status(each), _memory(each), _cuts(each)] for name, each in allowed.items()]
    whys = [[f"`{name}`", why] for name, why in refused.items()]
    return "\n".join(
        [
            f"{len(allowed)} architectures can be cut:\n",
            table(["architecture", "slices", "layers keep", "may be cut"], rows),
            f"{len(refused)} are refused:\n",
            table(["architecture", "why"], whys),
        ]
    )


def _status(known: Architecture) -> str:
    status = "exact" if known.exact else "works"
    status += f" up to `{known.selects}` tokens" if known.selects else ""
    return status + ("" if known.flash else " alone, prompts without blocks")


def _memory(known: Architecture) -> str:
    if known.states is None:
        return "keys and values"
    return "states" if known.states.all and known.headless else "keys and values, and states"


def _cuts(known: Architecture) -> str:
    parts = []
    if known.step != 1:
        is_number = isinstance(known.step, int)
        parts.append(f"before layers {known.step}, {2 * int(known.step)}, …" if is_number else f"by `{known.step}`")
    parts += [f"before layers with `{key}`" for key in known.first_with]
    parts += [f"after layers with `{key}`" for key in known.last_with]
    if known.least > 1:
        parts.append(f"{known.least} layers a slice at least")
    if known.windows and known.windows.always:
        parts.append("each slice with a layer that has a sliding window")
    if known.windows and known.windows.leads:
        parts.append("before layers that see all tokens")
    if known.states and not known.states.all:
        parts.append("each slice with layers of both kinds")
    parts += [f"with {known.rescaled.n_layer} layers (27B) it works" for _ in [0] if known.rescaled]
    parts += [f"not {each.models}: {each.why}" for each in known.refusals]
    return "; ".join(parts) or "anywhere"


def columns(of_table: Iterable[Column]) -> str:
    rows = ([f"`{each.name}`", each.kind, "yes" if each.is_key else "", each.meaning] for each in of_table)
    return table(["column", "kind", "asked", "meaning"], rows)


EXAMPLES = {
    "host": "node2",
    "first": "node1",
    "other": "node3",
    "at": "ssh node2 ",
    "copy": "if /srv/pipeinfer is not shared: tar -C /srv -c pipeinfer | ssh node2 'tar -C /srv -x'",
    "replace": "if /srv/pipeinfer is not shared: ssh node2 mv -T --backup=t /srv/pipeinfer /srv/pipeinfer.old; "
    "tar -C /srv -c pipeinfer | ssh node2 'tar -C /srv -x'",
    "copy_file": "if the folder is not shared: scp /srv/models/target.gguf node2:/srv/models/target.gguf",
    "path": "/srv/models/target.gguf",
}


def doctor_checks() -> str:
    """The checks of `pipeinfer doctor`, and the remedy of each fault, for the tutorial two-machines.md."""
    rows = [
        [f"{check.name}: {check.meaning}" if fault is check.faults[0] else "", *map(_example, (text, fault.fix))]
        for check in CHECKS
        for fault in check.faults
        for text in [f"{'warning: ' if fault.level < Severity.ERROR else ''}{fault.text}"]
    ]
    return table(["check", "what is said", "what mends it"], rows)


def _example(text: str) -> str:
    """A text with examples for its fields; … for values that are not known before."""
    shown = re.sub(r"\{(\w+)[^}]*\}", lambda field: EXAMPLES.get(field[1], "…"), text)
    return f"`{' '.join(shown.split())}`"


def http_fields() -> str:
    def values(fields: Mapping[str, Iterable[Any]]) -> str:
        rows = [[f"`{name}`", code(map(json.dumps, allowed), " or ")] for name, allowed in fields.items()]
        return table(["field", "values"], rows)

    return "\n".join(
        [
            "### Sampling\n",
            table(["field", "default", "from", "to", "option"], _sampling()),
            "### With these values alone\n",
            "Other values would change the text, and are refused.",
            "The server also takes other values of `n`, `best_of` and `stream`; a batch does not.\n",
            values(ONLY),
            "### Accepted without effect\n",
            "Other values of these are passed over:\n",
            values(IN_EFFECT),
            f"{code(WITHOUT_EFFECT)}. The server reads `cache_prompt` and `stream_options`.\n",
        ]
    )


def _sampling() -> Iterable[list[str]]:
    for name, default, setting in settings_of(SamplingParams):
        names = [*(alias for alias, meaning in ALIASES.items() if meaning == name), name]
        most = "" if setting.most == math.inf else f"{setting.most:.10g}"
        yield [code(names), f"{default:g}", f"{setting.least:g}", most, f"`{setting.flag}`"]


def profiles() -> str:
    heads = ["profile", "machines", "Gbit/s", "latency (µs)", "model pairs"]
    return table(heads, map(_profile, shipped_profiles()))


def _profile(name: str) -> list[str]:
    top = load_profile(name).top.values
    machines = ", ".join(f"{each.get('count', 1)} × {each['node']}" for each in top["cluster"])
    link = top["link"]
    return [f"`{name}`", machines, f"{link['gbit_per_s']}", f"{link['latency_us']}", code(top["pairs"])]
