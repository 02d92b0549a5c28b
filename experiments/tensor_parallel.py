"""Tensor parallelism beside a pipeline on the same hosts, by the speed of their links.

`python experiments/tensor_parallel.py` simulates it all in virtual time, some minutes of two cores, and writes
docs/results/tensor-parallel.md with its picture. Needs no MPI and no model.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from experiments.cells import N_PROMPT, N_TOKENS, SEEDS, Setting, run
from pipeinfer.core.run_cost import interpolate
from pipeinfer.policies import Auto, Iterative, Speculative
from pipeinfer.text import markdown_table
from pipeinfer.virtual.choices import SyntheticChoices, ranks_for
from pipeinfer.virtual.costs import LinkCost, ModelCost, Profile, Work
from pipeinfer.virtual.profile import Machine, Model, load_profile
from pipeinfer.virtual.simulation import simulate

VALUE_BYTES = 2
"""Of an activation in an all-reduce: vLLM reduces bfloat16."""
LOGIT_BYTES = 8
"""Of a row after the output: each host's likeliest token and its logit."""
N_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 24, 32, 64, 128)


def allreduce_s(link: LinkCost, n_hosts: int, n_bytes: float) -> float:
    """Seconds of an all-reduce of `n_bytes` over `n_hosts`, a power of two: the faster of recursive doubling and
    Rabenseifner's recursive halving and doubling (Thakur, Rabenseifner, Gropp, "Optimization of Collective
    Communication Operations in MPICH", 2005, section 4.5), without the additions themselves. A ring takes as many
    bytes as the latter and more messages."""
    steps = n_hosts.bit_length() - 1
    if n_hosts != 1 << steps:
        raise ValueError(f"{n_hosts} hosts: the formulas are those of a power of two")
    doubling_s = steps * (link.latency_s + link.transfer_s(n_bytes))
    halving_s = 2 * steps * link.latency_s + 2 * (n_hosts - 1) / n_hosts * link.transfer_s(n_bytes)
    return min(doubling_s, halving_s)


def tensor_stage(machines: Sequence[Machine], model: Model, link: LinkCost, software_s: float = 0.0) -> ModelCost:
    """A model whose every tensor is cut over all machines, as one stage: each layer takes the slowest machine's part of
    it and two all-reduces. `software_s`: added to each all-reduce."""
    n_hosts = len(machines)
    slowest = Machine(
        f"{n_hosts} hosts",
        min(each.bytes_per_s for each in machines),
        min(each.flop_per_s for each in machines),
        max(each.layer_s for each in machines),
        max(each.run_s for each in machines),
        math.inf,
    )
    sizes = ("layer_bytes", "layer_params", "output_bytes", "output_params", "kv_bytes")
    part = slowest.slice_of(
        replace(model, **{name: getattr(model, name) / n_hosts for name in sizes}), model.layers, True
    )

    def reduced(work: Work, times: int, row_bytes: float) -> Work:
        rows = sorted({*N_ROWS, *work.rows})
        seconds = (
            interpolate(work.rows, work.seconds, n) + times * (software_s + allreduce_s(link, n_hosts, n * row_bytes))
            for n in rows
        )
        return Work(tuple(rows), tuple(seconds), work.context_s)

    return replace(
        part, layer=reduced(part.layer, 2, VALUE_BYTES * model.n_embd), output=reduced(part.output, 1, LOGIT_BYTES)
    )


@dataclass(frozen=True, slots=True)
class Network:
    """Links as a shipped profile has them. `software_s`: what each all-reduce takes beside its messages."""

    name: str
    link: LinkCost
    software_s: float = 0.0


PUBLISHED = {2: 56.39e-3, 4: 75.34e-3}
"""Hosts -> seconds of transfers a token that distributed-llama measured (its pull request 64, May 2024, "This PR"):
Llama 3 8B on Raspberry Pi 5 with Gigabit Ethernet."""
PUBLISHED_REDUCES = 2 * 32
PUBLISHED_BYTES = 4096 * 34 / 32
"""Its activations in Q80: 34 bytes for 32 values."""


def published_software_s(n_hosts: int, link: LinkCost) -> float:
    """What each of its all-reduces took beside what the model has for it."""
    return PUBLISHED[n_hosts] / PUBLISHED_REDUCES - allreduce_s(link, n_hosts, PUBLISHED_BYTES)


def networks() -> Iterator[Network]:
    gigabit = load_profile("ethernet").link()
    yield Network("1 Gbit/s Ethernet, 50 µs, all-reduces as measured", gigabit, published_software_s(4, gigabit))
    yield Network("1 Gbit/s Ethernet, 50 µs", gigabit)
    yield Network("10 Gbit/s Ethernet, 30 µs", load_profile("pipedec-14").link())
    yield Network("InfiniBand QDR through the hosts, 20 µs", load_profile("pipeinfer-gpu").link())
    yield Network("InfiniBand EDR, 1.5 µs", load_profile("pipeinfer-c").link())


NETWORKS = tuple(networks())


@dataclass(frozen=True, slots=True)
class OnNetwork(Setting):
    """Nodes of a profile on another network; `is_cut`: tensors are cut, over all nodes, and layers are not."""

    network: Network = NETWORKS[0]
    is_cut: bool = False

    def lay_out(self, has_draft: bool) -> Profile:
        """Where tensors are cut the draft is on the same hosts, whole on one of them, and waits busily for nobody: both
        are to the good of tensor parallelism. The policy has to let it and the target take turns."""
        profile = replace(Setting.lay_out(self, has_draft), link=self.network.link)
        if not self.is_cut:
            return profile
        file = load_profile(self.profile)
        machines, (target, *_) = list(file.machines())[: self.nodes], file.models_of(self.pair)
        stage = tensor_stage(machines, target, self.network.link, self.network.software_s)
        return replace(profile, stages=(stage,), link=LinkCost(0.0, math.inf), head_is_first=False, sleeps=False)


@dataclass(frozen=True, slots=True)
class Cell:
    """A model pair on the nodes of a profile; `machines`: what they are."""

    machines: str
    profile: str
    pair: str
    nodes: int

    @property
    def title(self) -> str:
        return f"{self.machines}, {self.pair}"


CELLS = (
    Cell("4 office computers", "ethernet", "llama-70b-1b", 4),
    Cell("8 office computers", "ethernet", "llama-70b-1b", 8),
    Cell("4 office computers", "ethernet", "qwen-32b-0.5b", 4),
    Cell("8 office computers", "ethernet", "qwen-32b-0.5b", 8),
    Cell("8 servers of two Xeon Gold", "pipeinfer-c", "dolphin-tinyllama", 8),
    Cell("4 hosts of one A100", "pipespec", "llama-70b-1b", 4),
)
SHOWN = (CELLS[1], CELLS[4], CELLS[5])
"""Those in the picture and in the findings."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens a second of one cell on one network, and seconds to the first token after a prompt."""

    plain: float
    auto: float
    cut: float
    cut_turns: float
    first_s: float
    cut_first_s: float

    @property
    def over_cut(self) -> float:
        """The pipeline with `auto` over tensor parallelism, with guesses where these help."""
        return self.auto / max(self.cut, self.cut_turns)


TURNS = tuple(Speculative(n_draft=n, width=width) for n in (2, 4, 8, 12) for width in (1, 4))
"""Settings of guesses that take turns with the target, the best of which counts in each cell."""


def speeds(cell: Cell) -> list[Speeds]:
    """On each of NETWORKS."""
    found = []
    for network in NETWORKS:
        layers = OnNetwork(cell.profile, cell.pair, cell.nodes, network=replace(network, name="", software_s=0.0))
        cut = replace(layers, network=network, is_cut=True)
        found.append(
            Speeds(
                run(layers, Iterative()).speed,
                run(layers, Auto()).speed,
                run(cut, Iterative()).speed,
                in_turns(cut),
                _first_s(layers),
                _first_s(cut),
            )
        )
    return found


def in_turns(setting: Setting) -> float:
    return max(run(setting, policy).speed for policy in TURNS)


def _first_s(setting: Setting) -> float:
    profile = setting.lay_out(False)
    text = SyntheticChoices(ranks_for(profile.acceptance[0]), 0, N_PROMPT)
    return simulate(profile, text, Iterative(), 1).metrics.token_s[0]


Results = Mapping[tuple[Cell, Network], Speeds]

PAGE = """# Tensor parallelism or a pipeline

Simulated in virtual time by `python experiments/tensor_parallel.py`; we measured nothing here. The same hosts hold
the same model in two ways: a pipeline gives each host some layers, tensor parallelism a part of every layer. Tensor
parallelism reads all hosts' memories at once and waits for two all-reduces a layer; a pipeline sends one message a
host, and needs guesses to keep its hosts busy. Machines, models and acceptance rates are those of the shipped
[profiles](../reference/profiles.md), put on each network: {n_seeds} texts of {n_tokens} tokens after a prompt of
{n_prompt}, one text at a time.

{findings}

![Tokens a second by network](tensor-parallel.png)
"""

MODEL = """
## The model

* An all-reduce of n bytes over p hosts takes the less of log2(p) (α + n/β) and 2 log2(p) α + 2 (p - 1)/p n/β, with α
  the latency of a message and β the bandwidth: recursive doubling, and recursive halving and doubling (R. Thakur, R.
  Rabenseifner, W. Gropp, *Optimization of Collective Communication Operations in MPICH*, 2005, section 4.5), without
  the additions. A ring has the bytes of the second and more messages.
* A layer takes its roofline time for a p-th of its weights, arithmetic and cache, the machine's fixed time for a
  layer, and two all-reduces of 2 bytes a value (vLLM reduces bfloat16; our pipeline sends float32). The output table
  is cut too. The A100s' fixed time, 150 µs a layer, is that of PyTorch's launches, as in their paper; with CUDA
  graphs both ways would be faster, tensor parallelism by more.
* What is unknown is in favour of tensor parallelism: no jitter, no late host, no wait that sleeps. Its draft is on
  the same hosts, and takes turns with the target; its guesses (`speculative`) have the best of {n_settings} settings,
  chosen after the fact. In the pipeline the draft takes a host of its own.
* *As measured*: {software_ms:.1f} ms more for each all-reduce, which is what distributed-llama's took beside the
  formula. Llama 3 8B on 4 Raspberry Pi 5 needed 75.3 ms of transfers a token ([pull request
  64](https://github.com/b4rtaz/distributed-llama/pull/64), May 2024), the formula says {ours_4:.0f} ms; on 2 of them
  56.4 and {ours_2:.0f} ms.

Speed is not all: tensor parallelism needs equal hosts, in a number that divides the heads; each host has to be on
time twice a layer; and sums, and so texts, depend on the number of hosts. A pipeline takes unequal hosts in any
number, and its text is the same on all.

## Published figures of guesses in pipelines

vLLM's guesses take turns with the pipeline, `auto`'s do not. Models and hardware differ: only the ratios can be
compared, and with care.
"""


def findings(results: Results) -> Iterator[str]:
    """Which is faster, with the tables' numbers."""
    measured, gigabit, ten, *_, fastest = NETWORKS
    office, servers, gpus = SHOWN
    slow, late, fast = (results[office, network] for network in (gigabit, measured, fastest))
    yield (
        f"Slow machines and a large model: tensor parallelism is faster, over Gigabit Ethernet too. {office.machines} "
        f"write {slow.cut_turns:.1f} tokens a second of a 70B model with guesses and {slow.cut:.1f} without, "
        f"{late.cut_turns:.1f} and {late.cut:.1f} if all-reduces take what was measured; a pipeline with `auto` writes "
        f"{slow.auto:.1f}, without guesses {slow.plain:.1f}."
    )
    server, gpu = results[servers, gigabit], results[gpus, ten]
    yield (
        f"Fast machines on a slow network: the pipeline with guesses is faster. {servers.machines} on Gigabit Ethernet "
        f"write {server.auto:.1f} against {server.cut_turns:.1f}, {gpus.machines} on 10 Gbit/s {gpu.auto:.0f} against "
        f"{gpu.cut_turns:.0f}."
    )
    plain = sum(each.plain > max(each.cut, each.cut_turns) for each in results.values())
    auto = sum(each.over_cut > 1 for each in results.values())
    yield (
        f"Of {len(results)} cells tensor parallelism wins {len(results) - auto} and the pipeline with `auto` {auto}; "
        f"without guesses the pipeline wins {plain}."
    )
    yield (
        f"A prompt of {N_PROMPT} tokens makes large all-reduces: {office.machines} have the 70B model's first token "
        f"after {slow.cut_first_s:.0f} s over Gigabit Ethernet, as a pipeline after {slow.first_s:.0f} s; over "
        f"InfiniBand EDR after {fast.cut_first_s:.0f} s and {fast.first_s:.0f} s."
    )


COLUMNS = (
    "network",
    "pipeline",
    "pipeline, `auto`",
    "tensor parallel",
    "tensor parallel, guesses",
    "`auto` over it",
    "first token s: pipeline, tensor parallel",
)


def page(results: Results) -> Iterator[str]:
    gigabit = NETWORKS[1].link
    bullets = (textwrap.fill(f"* {text}", 120, subsequent_indent="  ") for text in findings(results))
    yield PAGE.format(n_seeds=len(SEEDS), n_tokens=N_TOKENS, n_prompt=N_PROMPT, findings="\n".join(bullets)).rstrip()
    for cell in CELLS:
        acceptance = load_profile(cell.profile).models_of(cell.pair)[2][0]
        yield f"\n## {cell.title}\n"
        yield f"Profile `{cell.profile}`, the draft's best guess right at {acceptance:g}; tokens a second, simulated.\n"
        yield from markdown_table(COLUMNS, (_row(network, results[cell, network]) for network in NETWORKS), COLUMNS[1:])
    ours = [PUBLISHED_REDUCES * 1e3 * allreduce_s(gigabit, n_hosts, PUBLISHED_BYTES) for n_hosts in PUBLISHED]
    yield MODEL.format(n_settings=len(TURNS), software_ms=1e3 * NETWORKS[0].software_s, ours_2=ours[0], ours_4=ours[1])
    columns = "what", "setting", "tokens/s without", "with", "ratio"
    yield from markdown_table(columns, _guesses(results), columns[2:])


def _row(network: Network, each: Speeds) -> list[str]:
    values = (each.plain, each.auto, each.cut, each.cut_turns)
    marked = (f"**{value:.2f}**" if value == max(values) else f"{value:.2f}" for value in values)
    return [network.name, *marked, f"{each.over_cut:.2f}", f"{each.first_s:.1f}, {each.cut_first_s:.1f}"]


def _guesses(results: Results) -> Iterator[list[str]]:
    yield [
        "vLLM, MTP, measured ([comment](https://github.com/vllm-project/vllm/issues/44697), September 2026)",
        "Qwen3.8-Flash-Next, PP 4, four SM80 GPUs on PCIe Gen2 x4, 2 guesses, 93% right at the first; one stream",
        "61.2",
        "43.7",
        "0.71",
    ]
    yield [
        "vLLM, EAGLE-3, measured ([comment](https://github.com/vllm-project/vllm/pull/50514), August 2026)",
        "Llama 3.3 70B FP8, TP 2 x PP 2 over two hosts, 2 x 100G RoCE with TCP sockets; one stream",
        "",
        "",
        "2.34",
    ]
    for cell, network in ((CELLS[5], NETWORKS[2]), (CELLS[1], NETWORKS[1])):
        each, setting = results[cell, network], f"{cell.title}, {network.name}"
        turns = in_turns(OnNetwork(cell.profile, cell.pair, cell.nodes, network=network))
        for what, speed in (("in turns (`speculative`, best setting)", turns), ("`auto`", each.auto)):
            yield [
                f"pipeinfer, {what}, simulated",
                setting,
                f"{each.plain:.2f}",
                f"{speed:.2f}",
                f"{speed / each.plain:.2f}",
            ]


LINES = {
    "plain": ("pipeline", "#999999", "o", ":"),
    "auto": ("pipeline, auto", "#D55E00", "D", "-"),
    "cut": ("tensor parallel", "#56B4E9", "s", ":"),
    "cut_turns": ("tensor parallel, guesses", "#0072B2", "^", "-"),
}
TICKS = ("1 Gbit/s\nas measured", "1 Gbit/s", "10 Gbit/s", "IB QDR", "IB EDR")


def draw(results: Results, path: Path) -> None:
    """Tokens a second by network, a panel for each cell of SHOWN."""
    from plots.charts import STYLE, plt

    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, len(SHOWN), figsize=(9, 3.4), layout="constrained")
        for axes, cell in zip(panels, SHOWN, strict=True):
            for name, (label, colour, marker, dashes) in LINES.items():
                values = [getattr(results[cell, network], name) for network in NETWORKS]
                axes.plot(range(len(NETWORKS)), values, dashes, color=colour, marker=marker, label=label)
            axes.set(title=f"{cell.machines},\n{cell.pair}", ylim=(0, None))
            axes.set_xticks(range(len(TICKS)), TICKS, rotation=45, ha="right", rotation_mode="anchor")
        panels[0].set_ylabel("tokens/s, simulated")
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(LINES), frameon=False
        )
        figure.savefig(path, dpi=150)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/results/tensor-parallel.md"), help="The page.")
    parser.add_argument("--jobs", type=int, default=2, help="Processes that share the work.")
    asked = parser.parse_args()
    with ProcessPoolExecutor(asked.jobs) as processes:
        results = dict(zip(product(CELLS, NETWORKS), chain(*processes.map(speeds, CELLS)), strict=True))
    draw(results, asked.output.with_suffix(".png"))
    asked.output.write_text("\n".join(page(results)) + "\n")
    print(asked.output)


if __name__ == "__main__":
    main()
