"""How each policy looks, the same in every figure, and what settings or ablations tell apart from it. Draws nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from matplotlib.colors import to_hex, to_rgb

from pipeinfer.observe.facets import Series, clean

Dashes = str | tuple[float, tuple[float, ...]]


class Look(NamedTuple):
    """`hatch`: of bars; `marker`: of points; `dashes`: of a distribution's line."""

    colour: str
    hatch: str = ""
    marker: str = "o"
    dashes: Dashes = "-"


# Okabe and Ito's palette: told apart with any colour vision; hatches serve those who print in grey
POLICY_LOOKS = {
    "iterative": Look("#999999", "", "o"), "speculative": Look("#E69F00", "//", "s", "--"),
    "pipeinfer": Look("#0072B2", "", "D"), "pipedec": Look("#009E73", "\\\\", "^"),
    "flowspec": Look("#CC79A7", "..", "v"), "pipespec": Look("#56B4E9", "xx", "P"), "auto": Look("#D55E00", "", "*"),
}  # fmt: skip
OTHER = Look("#000000", "", "x")

TONES = (0.5, -0.35, 0.75, -0.6)
"""How far a colour goes towards white, below 0 towards black."""
HATCHES = ("///", "\\\\\\", "...", "xxx", "---")
MARKERS = "Xp<>dh8"
DASHES: tuple[Dashes, ...] = ("--", "-.", ":", (0.0, (6.0, 1.0, 1.0, 1.0, 1.0, 1.0)), (0.0, (3.0, 3.0)))

VARIANT_LOOKS = (Look("#333333"), Look("#BBBBBB", "//"), Look("#666666", ".."), Look("#DDDDDD", "\\\\"),
                 Look("#555555", "xx"), Look("#CCCCCC", "--"), Look("#444444", "oo"))  # fmt: skip
"""Of ablations, where all that stands side by side is one policy's: no policy's colours."""


def looks(panels: Iterable[Series]) -> dict[str, Look]:
    """Of all lines or bars of a figure, by label. What is not a policy alone has its colour in another tone."""
    found, numbers = dict[str, Look](), Counter[str]()
    for series in panels:
        for label, rows in series.items():
            policy = rows[0]["policy"]
            name = policy if policy in POLICY_LOOKS else ""
            if label not in found:
                plain = name and label == clean(policy)
                found[label] = _toned(POLICY_LOOKS.get(name, OTHER), 0 if plain else numbers[name] + 1)
                numbers[name] += not plain
    return found


def _toned(own: Look, number: int) -> Look:
    """The `number`th that is told apart from a policy; 0: itself."""
    if not number:
        return own
    at = number - 1
    tone = TONES[at % len(TONES)]
    towards = 1.0 if tone > 0 else 0.0
    red, green, blue = (part + abs(tone) * (towards - part) for part in to_rgb(own.colour))
    return Look(
        to_hex((red, green, blue)), HATCHES[at % len(HATCHES)], MARKERS[at % len(MARKERS)], DASHES[at % len(DASHES)]
    )
