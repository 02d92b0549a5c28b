"""Every policy, at the best of a few settings, beside `auto` on the shipped clusters and from poor drafts to good ones.

`python benchmarks/policies.py [-o docs/results/policies.md]` simulates it all in virtual time, some three hours of one
core, and writes the page "Which policy when"; each policy's best setting is chosen for each cell after the fact, the
papers' presets among them. Speeds are kept in --folder, and of a new policy only its own are simulated. Beside them the
bound: `auto` if it knew every probability, which synthetic drafts say exactly.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path

from pipeinfer.core.policy import Policy
from pipeinfer.core.runs import Guess
from pipeinfer.core.tree import Node
from pipeinfer.policies import POLICIES, Auto, FlowSpec, PipeDec, PipeInfer, PipeSpec, Speculative, Ssd
from pipeinfer.policies.auto import LEAST
from pipeinfer.text import markdown_table
from pipeinfer.virtual.choices import Choices, n_predicted, ranks_for, synthetic_team
from pipeinfer.virtual.costs import Profile
from pipeinfer.virtual.profile import load_profile
from pipeinfer.virtual.simulation import simulate

GPUS = (
    ("pipedec-7", "", 0),
    ("pipedec-14", "", 0),
    ("pipedec-21", "", 0),
    ("flowspec", "llama2-7b", 0),
    ("flowspec", "llama2-13b", 0),
    ("pipespec", "llama-70b-8b", 3),
    ("pipespec", "llama-70b-1b", 3),
)
CPUS = (
    ("pipeinfer-c", "dolphin-tinyllama", 2),
    ("pipeinfer-c", "dolphin-tinyllama", 4),
    ("pipeinfer-c", "goliath-xwin7", 8),
    ("pipeinfer-c", "falcon-7", 15),
    ("pipeinfer-a", "dolphin-tinyllama", 4),
    ("pipeinfer-a", "goliath-xwin7", 8),
    ("pipeinfer-b", "falcon-7", 13),
)


class Knowing(Auto):
    """It takes the draft at its word: here that is how often such guesses are right, with nothing to learn."""

    def keep(self, node: Node, guesses: list[Guess], draft: int = 0) -> list[Guess]:
        return [guess for guess in guesses if guess.probability >= LEAST]


BOUND = "probabilities known"
ACCEPTANCES = (0.05, 0.3, 0.52, 0.66, 0.79, 0.9, 0.95)
TUNED: dict[str, Sequence[Policy]] = {
    **{name: [policy()] for name, policy in POLICIES.items()},
    "speculative": [
        Speculative.from_paper(),
        *(Speculative(n_draft=n, width=4) for n in (2, 4, 12)),
        Speculative(n_draft=4, width=1),
    ],
    "pipeinfer": [
        PipeInfer.from_paper(),
        PipeInfer(),
        *(PipeInfer(microbatch=n) for n in (1, 2, 8, 16)),
        PipeInfer(microbatch=16, width=8, split_cutoff=0.02),
        PipeInfer(microbatch=32, width=16, split_cutoff=0.005),
    ],
    "pipedec": [PipeDec(), PipeDec(layer_width=16), *(PipeDec(layer_width=n, children=n) for n in (2, 4, 8))],
    "flowspec": [
        FlowSpec.from_paper(),
        FlowSpec(),
        FlowSpec(segment=4, tree_size=20, width=4, expansion_size=16),
        FlowSpec(segment=2, tree_size=8, width=4, expansion_size=8),
    ],
    "pipespec": [PipeSpec(), PipeSpec(asynchronous=False)],
    "ssd": [Ssd.from_paper(), *(Ssd(n_draft=n) for n in (2, 4, 12)), Ssd(backup="none")],
    BOUND: [Knowing()],
}
N_PROMPT = 128
NEAR = 0.93
"""A setting that is slower than so much of its policy's best on a first text is not tried on the others."""
BELOW, N_OTHERS = 0.99, 3
"""A cell where `auto` is below that of the best other is simulated again, on so many times as many other texts."""

PAGE = """# Which policy when

Simulated in virtual time on the shipped profiles by `python benchmarks/policies.py`: the same texts, guesses and costs
for every policy, {n_seeds} texts of {n_tokens} tokens a cell. `acceptance` is how often the draft's best guess is
right. A policy's column says how many times as fast as `iterative` it is with the setting that is best in that very
cell, chosen after the fact out of {settings}; `auto` has none. The papers' presets ([theirs beside
ours](reproduction.md)) are among them; `pipedec`'s and `pipespec`'s are the defaults.
`probabilities known` is `auto` without anything to learn, as the synthetic drafts say exactly how often their guesses
are right: the bound of what better estimates could bring it.
`of the limit`: beside a pipeline that emits a token whenever its slowest stage has done a single row; runs that bring
several tokens can pass it.

* Leave it to `auto`. Of the best of all others, each at its best setting, it reaches {geo:.3f} in the geometric mean of
  all cells ({gpu:.3f} on the clusters of GPUs, {cpu:.3f} on those of CPUs), {least:.3f} in the worst; {bound:.3f} of
  what it would reach if it knew every probability. Each is a maximum over settings of means of a few texts: what luck
  gave the best of them is in it. On other texts, [with the settings chosen before](#on-other-texts), `auto` reaches
  {below} in {n_enough} of the {n_below} cells in which it is below that.
* Where rows are free, as on GPUs, wide trees win: `pipedec` with a poor draft, `pipeinfer` with wide runs with a good
  one.
* Where every row costs, as on CPUs, `pipeinfer` with narrow runs of the likeliest guesses wins, and `pipedec` and
  `flowspec` are fast only with their widths cut down.
* `ssd` reaches {ssd_gpu:.2f} of `speculative` on the clusters of GPUs and {ssd_cpu:.2f} on those of CPUs in the
  geometric mean: what it prepares costs rows. One request and one chain at a time leave most stages of a long pipeline
  without work.
* With a draft that is right one time in twenty CPUs gain {poor_least:.0f} to {poor_most:.0f} percent, the longer the
  pipeline the more.
* The drafts here are synthetic. [On what real models chose](recorded.md), where acceptance changes from line to line
  and one setting has to do for a whole text, `auto` leads by more.

![PipeDec's 14 stages](policies.png)

*PipeDec's 14 stages with the draft of its profile, each policy with its defaults on one text: `speed.png` of `pipeinfer
simulate --profile pipedec-14 --results results.csv` and `python plot.py`.*
"""

AGAIN = """
## On other texts

The cells in which `auto` is below {below} of the best other policy are simulated again, on {n_others} other texts each.
The other policy has the setting that was best on the first texts, so luck has no part in it.
"""


@dataclass(frozen=True)
class Cell:
    """A cluster and a draft; tokens a second of each policy at its best there, and the limit."""

    profile: str
    pair: str
    nodes: int
    acceptance: float
    speeds: dict[str, float]
    limit: float

    @property
    def kind(self) -> str:
        """Of its machines."""
        return "cpu" if self.profile.startswith("pipeinfer") else "gpu"

    @property
    def auto_of_best(self) -> float:
        return self.speeds["auto"] / max(self.others)

    @property
    def others(self) -> list[float]:
        return [speed for name, speed in self.speeds.items() if name not in ("auto", BOUND)]


def measure(cluster: tuple[str, str, int], acceptance: float, seeds: int, n_tokens: int, folder: Path | None) -> Cell:
    name, pair, nodes = cluster
    kept = folder / f"{name}-{pair}-{nodes}-{acceptance:g}-{seeds}-{n_tokens}.json" if folder else None
    known = json.loads(kept.read_text())["speeds"] if kept and kept.exists() else {}
    speeds, limit = {}, 0.0
    texts = texts_of(acceptance, range(seeds))
    for policy_name, variants in TUNED.items():
        profile = load_profile(name).lay_out(nodes, pair, variants[0].drafts)
        speeds[policy_name] = known.get(policy_name) or best_speed(variants, profile, texts, n_tokens)
        limit = profile.limit_per_s(N_PROMPT)
    cell = Cell(name, pair, nodes or profile.n_ranks, acceptance, speeds, limit)
    if kept:
        kept.write_text(json.dumps(asdict(cell)))
    return cell


def texts_of(acceptance: float, seeds: range) -> list[Choices]:
    return [*chain(*(synthetic_team([ranks_for(acceptance)], seed, N_PROMPT) for seed in seeds))]


def on_other_texts(cluster: tuple[str, str, int], cell: Cell, seeds: int, n_tokens: int) -> tuple[str, float]:
    """The best other policy, and `auto` over its setting that was best on the first texts, on others."""
    name, pair, nodes = cluster
    best_name = max((speed, name) for name, speed in cell.speeds.items() if name not in ("auto", BOUND))[1]
    profile = load_profile(name).lay_out(nodes, pair, TUNED[best_name][0].drafts)
    first = texts_of(cell.acceptance, range(seeds))
    others = texts_of(cell.acceptance, range(seeds, (1 + N_OTHERS) * seeds))
    best = max(TUNED[best_name], key=lambda policy: speed(policy, profile, first, n_tokens))
    return best_name, speed(Auto(), profile, others, n_tokens) / speed(best, profile, others, n_tokens)


def best_speed(variants: Sequence[Policy], profile: Profile, texts: Sequence[Choices], n_tokens: int) -> float:
    """That of the fastest setting; one that is far behind on the first text is given up."""
    firsts = [speed(policy, profile, texts[:1], n_tokens) for policy in variants] if len(variants) > 1 else [1.0]
    near = (policy for policy, first in zip(variants, firsts, strict=True) if first >= NEAR * max(firsts))
    return max(speed(policy, profile, texts, n_tokens) for policy in near)


def speed(policy: Policy, profile: Profile, texts: Sequence[Choices], n_tokens: int) -> float:
    """Tokens a second after the first ones, of all texts together, which share what was learned, and no more."""
    took_s, n_emitted, policy = 0.0, 0, deepcopy(policy)
    for choices in texts:
        token_s = simulate(profile, choices, policy.begin(), n_predicted(choices, n_tokens)).metrics.token_s
        took_s += token_s[-1] - token_s[0]
        n_emitted += len(token_s) - 1
    return n_emitted / took_s


def page(cells: Sequence[Cell], again: Sequence[tuple[Cell, str, float]], seeds: int, n_tokens: int) -> Iterator[str]:
    on = defaultdict(list)
    for cell in cells:
        on[cell.kind].append(cell.auto_of_best)
    every = [share for shares in on.values() for share in shares]
    settings = ", ".join(f"{len(variants)} of {name}" for name, variants in TUNED.items() if len(variants) > 1)
    gains = [
        100 * (cell.speeds["auto"] / cell.speeds["iterative"] - 1)
        for cell in cells
        if cell.acceptance == ACCEPTANCES[0] and cell.kind == "cpu"
    ]
    ssd = {
        f"ssd_{kind}": statistics.geometric_mean(
            cell.speeds["ssd"] / cell.speeds["speculative"] for cell in cells if cell.kind == kind
        )
        for kind in on
    }
    yield PAGE.format(
        **ssd,
        n_seeds=seeds,
        n_tokens=n_tokens,
        settings=settings,
        bound=statistics.geometric_mean(cell.speeds["auto"] / cell.speeds[BOUND] for cell in cells),
        geo=statistics.geometric_mean(every),
        least=min(every),
        below=BELOW,
        n_below=len(again),
        n_enough=sum(share >= BELOW for *_, share in again),
        poor_least=min(gains),
        poor_most=max(gains),
        **{kind: statistics.geometric_mean(on[kind]) if on[kind] else math.nan for kind in ("gpu", "cpu")},
    )
    columns = (
        "cluster",
        "pair",
        "nodes",
        "acceptance",
        "iterative tokens/s",
        *list(TUNED)[1:],
        "auto / best other",
        "auto of the limit",
    )
    yield from markdown_table(columns, map(_row, cells), columns[2:])
    yield AGAIN.format(below=BELOW, n_others=N_OTHERS * seeds)
    columns = "cluster", "pair", "nodes", "acceptance", "best other", "auto / best other", "on other texts"
    rows = (
        [
            cell.profile,
            cell.pair,
            str(cell.nodes),
            f"{cell.acceptance:g}",
            name,
            f"{cell.auto_of_best:.3f}",
            f"{share:.3f}",
        ]
        for cell, name, share in again
    )
    yield from markdown_table(columns, rows, columns[2:])


def _row(cell: Cell) -> list[str]:
    plain = cell.speeds["iterative"]
    ratios = []
    for speed in list(cell.speeds.values())[1:]:
        ratio = f"{speed / plain:.2f}"
        ratios.append(f"**{ratio}**" if speed == max(cell.others) else ratio)
    return [
        cell.profile,
        cell.pair,
        str(cell.nodes),
        f"{cell.acceptance:g}",
        f"{plain:.2f}",
        *ratios,
        f"{cell.auto_of_best:.3f}",
        f"{cell.speeds['auto'] / cell.limit:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("-n", "--predict", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="Keep what was simulated here, and use it again.")
    parser.add_argument("--jobs", type=int, default=1, help="Processes that share the work.")
    asked = parser.parse_args()
    if asked.folder:
        asked.folder.mkdir(parents=True, exist_ok=True)
    cells = []
    places = [*product((*GPUS, *CPUS), ACCEPTANCES)]
    with ProcessPoolExecutor(asked.jobs) as processes:
        work = partial(measure, seeds=asked.seeds, n_tokens=asked.predict, folder=asked.folder)
        for cell in processes.map(work, *zip(*places, strict=True)):
            cells.append(cell)
            print(cell.profile, cell.pair, cell.acceptance, f"{cell.auto_of_best:.3f}", file=sys.stderr, flush=True)
        below = [(place, cell) for (place, _), cell in zip(places, cells, strict=True) if cell.auto_of_best < BELOW]
        look = partial(on_other_texts, seeds=asked.seeds, n_tokens=asked.predict)
        again = [
            (cell, *found)
            for (_, cell), found in zip(below, processes.map(look, *zip(*below, strict=True)), strict=True)
        ]
    text = "\n".join(page(cells, again, asked.seeds, asked.predict)) + "\n"
    if asked.output:
        asked.output.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
