"""The table of architectures, for the reference page architectures.md, from the records of the code."""

from __future__ import annotations

from pipeinfer.models.gguf.architecture import Architecture
from pipeinfer.models.gguf.architectures import ARCHITECTURES


def table() -> str:
    known = {name: each for name, each in sorted(ARCHITECTURES.items()) if not each.refused}
    refused = {name: each.refused for name, each in sorted(ARCHITECTURES.items()) if each.refused}
    lines = [f"{len(known)} architectures can be cut:\n", "| architecture | slices | layers keep | may be cut |",
             "|---|---|---|---|"]  # fmt: skip
    for name, each in known.items():
        status = "exact" if each.exact else "works"
        status += f" up to `{each.selects}` tokens" if each.selects else ""
        status += "" if each.flash else ", prompts without blocks"
        lines.append(f"| `{name}` | {status} | {kept(each)} | {cuts(each)} |")
    lines += [f"\n{len(refused)} are refused:\n", "| architecture | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in refused.items()]
    return "\n".join(lines) + "\n"


def kept(known: Architecture) -> str:
    if known.states is None:
        return "keys and values"
    return "states" if known.states.all and known.headless else "keys and values, and states"


def cuts(known: Architecture) -> str:
    said = []
    if known.step != 1:
        is_number = isinstance(known.step, int)
        said.append(f"before layers {known.step}, {2 * int(known.step)}, …" if is_number else f"by `{known.step}`")
    said += [f"before layers with `{key}`" for key in known.first_with]
    said += [f"after layers with `{key}`" for key in known.last_with]
    if known.least > 1:
        said.append(f"{known.least} layers a slice at least")
    if known.windows and known.windows.always:
        said.append("each slice with a layer that has a sliding window")
    if known.windows and known.windows.leads:
        said.append("before layers that see all tokens")
    if known.states and not known.states.all:
        said.append("each slice with layers of both kinds")
    said += [f"with {known.rescaled.n_layer} layers (27B) it works" for _ in [0] if known.rescaled]
    said += [f"not {each.models}: {each.why}" for each in known.refusals]
    return "; ".join(said) or "anywhere"
