"""SiPipe's many requests, and speculation as the pipeline fills, as lines of Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from pipeinfer.policies import make_policy
from pipeinfer.text import markdown_table
from pipeinfer.virtual.choices import ranks_for
from pipeinfer.virtual.profile import load_profile
from pipeinfer.virtual.simulation import Load, simulate_load, synthetic_texts

SAMPLERS = 8
NONE, ALL = "none: plain pipeline parallelism", "all three"
WAYS = {  # what of the stages' host work holds nobody up
    NONE: (0, False, False),
    "samplers": (SAMPLERS, False, False),
    "samplers, early input": (SAMPLERS, True, False),
    ALL: (SAMPLERS, True, True),
    "all but samplers": (0, True, True),
    "all but early input": (SAMPLERS, False, True),
}
SETUPS = {  # profile -> what it is, requests at a time, the paper's gains in throughput and TPOT
    "sipipe": ("Qwen 2.5 72B, 8 GPUs", 512, "1.6 … 1.7", "-31% at most"),
    "sipipe-16": ("DeepSeek V3, 16 GPUs", 1024, "1.4 … 1.7", "-43% at most"),
}
AT_A_TIME = (64, 128, 256, 512, 1024)


def sipipe() -> Iterator[str]:
    yield "\n## SiPipe: many requests\n"
    yield (
        "Iterations of decoding: all requests at once, 40 tokens of text each, hardly a prompt, since runs of\n"
        "prompts sample nothing. What the stages' processors do besides is what the paper's section 3.1 finds of\n"
        "vLLM: 12 to 19% of an iteration for the input, 22 to 40% more for sampling on the last stage, 1 to 2 ms\n"
        "for a transmission. A stage keeps its run until the next one is ready to receive, which waits for it to\n"
        "arrive. In the paper's ablation (figure 16, one after the other) samplers bring 16 to 38%, early input\n"
        "10 to 24%, expected messages 3 to 6%.\n"
    )
    columns = (
        "set-up",
        "what holds nobody up",
        "tokens/s",
        "over none",
        "paper",
        "TPOT",
        "paper",
        "busiest stage",
        "stages evaluate",
    )
    yield from markdown_table(columns, (_sipipe_row(name, way) for name in SETUPS for way in WAYS))
    yield (
        "\n**What does not agree.** The order of the three is not shown here: samplers and early input bring what\n"
        "the paper reports, expected messages bring several times as much if a transmission takes the 1.5 ms of\n"
        "its section 3.1, and as much as there with 0.5 ms. Nothing in the paper says that stages lose only a\n"
        "third of it (section 5.3 has 2 to 5 ms, and less than 0.5 with expected messages). So the gain of all\n"
        "three, which may look like the paper's, has other parts than there:\n"
    )
    gains = ("ms a transmission", "samplers", "early input", "expected messages", "all three")
    yield from markdown_table(gains, (_meeting_row(meet_ms) for meet_ms in (0.0, 0.5, 1.0, 1.5, 2.0)))
    yield (
        "\nQwen 2.5 72B, what each of the three adds. vLLM and SGLang are modelled, not run; all GPUs of a stage\n"
        "act as one, so that its formulas of the time by stages and GPUs a stage, T(p, t), D(p, t) and C(p, t),\n"
        "have nothing to be compared with. The stages have two GPUs each (figure 3), as the paper's default has;\n"
        "it prefers four for some models. Not compared: A100, Llama 70B and 405B, Mixtral, V2.5, and the\n"
        "utilisation of processors (figure 15), of which profiles have only what holds stages up.\n"
    )
    yield "### Figure 9: requests at a time\n"
    yield (
        "Tokens a second of all three over none. The paper: 1.6 to 1.7 (Qwen), 1.4 to 1.7 (DeepSeek) at all of its\n"
        "batch sizes, small ones too.\n"
    )
    yield from markdown_table(
        ("set-up", *map(str, AT_A_TIME)), ([what, *_batch_row(name)] for name, (what, *_) in SETUPS.items())
    )
    yield "\n### Figure 10: stages\n"
    yield (
        "Twice the stages over half of them, requests at a time for each stage as above. The paper: 1.4 to 1.7\n"
        "(vLLM) and 1.8 to 2.0 (SiPipe), with the greater memory for KV in it, which is not simulated.\n"
    )
    columns = ("set-up", "what holds nobody up", "2 stages, tokens/s", "4 stages, tokens/s", "4 over 2")
    yield from markdown_table(columns, (_stages_row(name, way) for name in SETUPS for way in (NONE, ALL)))
    yield (
        "\n**What does not agree.** With fewer requests the gain is smaller here; the paper's is alike at all sizes.\n"
        "Sampling takes a time by the row in the profile, so that samplers have less to take away.\n"
    )


def _batch_row(name: str) -> Iterator[str]:
    for n in AT_A_TIME:
        speeds = [_carried(name, way, n=n)["predicted_per_second"] for way in (NONE, ALL)]
        yield f"{speeds[1]:.0f} / {speeds[0]:.0f} = {speeds[1] / speeds[0]:.2f}"


def _stages_row(name: str, way: str) -> list[str]:
    what, n, *_ = SETUPS[name]
    few, many = (_carried(name, way, n=n // part, n_nodes=4 // part)["predicted_per_second"] for part in (2, 1))
    return [what, way, f"{few:.0f}", f"{many:.0f}", f"{many / few:.2f}"]


def _meeting_row(meet_ms: float) -> list[str]:
    order = list(WAYS)[:4]
    speeds = [_carried("sipipe", way, 1e-3 * meet_ms)["predicted_per_second"] for way in order]
    gains = (f"{speed / before - 1:+.0%}" for before, speed in pairwise(speeds))
    return [f"{meet_ms:g}", *gains, f"**{speeds[-1] / speeds[0]:.2f}**"]


@lru_cache(maxsize=64)
def _carried(name: str, way: str, meet_s: float | None = None, n: int = 0, n_nodes: int = 0) -> dict[str, Any]:
    """`n`: requests at a time; 0: the set-up's. `n_nodes`: 0: all."""
    samplers, ahead, posted = WAYS[way]
    profile = load_profile(name).lay_out(n_nodes, has_draft=False)
    meet_s = profile.host.meet_s if meet_s is None else meet_s
    host = replace(profile.host, samplers=samplers, ahead=ahead, posted=posted, meet_s=meet_s)
    n = n or SETUPS[name][1]
    load = Load(n, 2, 40, n)
    texts = synthetic_texts(load, ranks_for(0.5))
    return simulate_load(replace(profile, host=host), make_policy("iterative"), load, texts)


def _sipipe_row(name: str, way: str) -> list[str]:
    what, _, paper_speed, paper_tpot = SETUPS[name]
    plain, found = _carried(name, NONE), _carried(name, way)
    is_all, evaluating = way == ALL, found["evaluating"]
    return [
        what,
        way,
        f"{found['predicted_per_second']:.0f}",
        f"{found['predicted_per_second'] / plain['predicted_per_second']:.2f}",
        paper_speed if is_all else "",
        f"{found['tpot_mean_s'] / plain['tpot_mean_s'] - 1:+.0%}",
        paper_tpot if is_all else "",
        f"{max(found['busy']):.0%}",
        f"{sum(evaluating) / len(evaluating):.0%}",
    ]


FILLED = (1, 4, 16, 64, 128)
CLUSTERS = {"pipedec-14": 0.8, "sipipe": 0.6, "pipeinfer-c": 0.7}


def filler() -> Iterator[str]:
    yield "\n## Speculation as filler\n"
    yield (
        "So many requests at a time, twice as many in all, 64 tokens of prompt and 96 of text each: `auto` over\n"
        "`iterative` on the same stages, in tokens a second of all together. Guesses get the rows that roots leave.\n"
    )
    columns = ("cluster", "acceptance", *(f"{n} at a time" for n in FILLED))
    yield from markdown_table(columns, (_filler_row(name, share) for name, share in CLUSTERS.items()))


def _filler_row(name: str, acceptance: float) -> list[str]:
    profile = load_profile(name).lay_out()
    cells = []
    for n in FILLED:
        load = Load(2 * n, 64, 96, n)
        texts = synthetic_texts(load, ranks_for(acceptance))
        plain, auto = (
            simulate_load(profile, make_policy(policy), load, texts)["predicted_per_second"]
            for policy in ("iterative", "auto")
        )
        cells.append(f"{auto:.1f} / {plain:.1f} = {auto / plain:.2f}")
    return [name, f"{acceptance:g}", *cells]
