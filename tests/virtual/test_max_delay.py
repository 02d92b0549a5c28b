"""How long prompts hold other texts up, where that is limited: in virtual time, and what is said where it cannot be."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeinfer.cli.bench import bench
from pipeinfer.cli.simulate import simulate_command
from pipeinfer.core.batch_planner import ONE_CHUNK
from pipeinfer.core.engine import Engine
from pipeinfer.core.levels import Level
from pipeinfer.core.requests import Request
from pipeinfer.core.run_cost import RunCost
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.job.session.result import ExperimentSettings
from pipeinfer.models.demo import TARGET
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.policies import Iterative
from pipeinfer.virtual.choices import SyntheticChoices
from pipeinfer.virtual.costs import HeadCost, LinkCost, ModelCost, Profile, Work, row_costs
from pipeinfer.virtual.pipeline import SimPipeline, SimWaiter, VirtualClock
from tests.support.jobs import finish
from tests.support.planned import options_of

STAGE = ModelCost("stage", 10, Work((1.0, 8.0, 64.0), (0.001, 0.0012, 0.006)))  # a row 10 ms, a block of 64 rows 60 ms
N_PROMPT, N_CHUNK, BLOCK_S = 4000, 256, 0.060


def hold_up(
    n_stages: int, n_open: int, max_delay_s: float, n_prompts: int = 1, blocks: bool = False
) -> tuple[float, float]:
    """While `n_open` texts are written, prompts come in: by how much the longest gap between tokens is longer than
    before, and how long the first prompt takes. Every text is checked."""
    profile = Profile("even", 4096, (STAGE,) * n_stages, (), LinkCost(50e-6, 1.25e9), HeadCost())
    lengths, clock = [20] * n_open + [N_PROMPT] * n_prompts, VirtualClock()
    choices = [SyntheticChoices((0.7,), seed, n_prompt) for seed, n_prompt in enumerate(lengths)]
    pipeline = SimPipeline(profile, choices, clock)
    engine = Engine(
        Level(pipeline, SequencePool(64, 80_000, parked=True), n_chunk=N_CHUNK, blocks=blocks),
        None,
        SimWaiter(clock),
        clock,
        run_cost=RunCost(row_costs(profile), chunk=(64, BLOCK_S)),
        max_delay_s=max_delay_s,
    )
    requests = [
        Request(number, found.prompt, 400 if number < n_open else 3, SamplingParams(temp=0.0), 5000)
        for number, found in enumerate(choices)
    ]
    metrics = [RequestMetrics() for _ in requests]
    for request, observer in zip(requests[:n_open], metrics, strict=False):
        engine.add(request, Iterative(), observer)
    come_s = math.inf
    while engine.busy:
        engine.step()
        if come_s == math.inf and min(len(each.token_s) for each in metrics[:n_open]) > 30:
            come_s = clock.now
            for request, observer in zip(requests[n_open:], metrics[n_open:], strict=True):
                engine.add(request, Iterative(), observer)
    for request, found in zip(requests, choices, strict=True):
        n_prompt = len(request.prompt)
        assert request.tokens[n_prompt:] == [found.target(at) for at in range(n_prompt, len(request.tokens))]
        assert request.n_generated == request.n_predict
    last_s = max(each.token_s[0] for each in metrics[n_open:])
    before_s, while_s = (longest_gap(metrics[:n_open], *window) for window in ((come_s / 2, come_s), (come_s, last_s)))
    return while_s - before_s, metrics[n_open].token_s[0] - come_s


def longest_gap(metrics: Sequence[RequestMetrics], start_s: float, end_s: float) -> float:
    return max(
        later - sooner for each in metrics for sooner, later in pairwise(each.token_s) if start_s < later <= end_s
    )


@pytest.mark.parametrize(("n_stages", "n_open", "n_prompts"), [(1, 4, 3), (2, 4, 1), (4, 1, 1), (4, 12, 3)])
def test_a_long_prompt_delays_no_token_by_more_than_the_limit(n_stages: int, n_open: int, n_prompts: int) -> None:
    """However many prompts are read, and stages they go through."""
    limits_s = [n_stages * each for each in (0.2, 0.1, 0.04)]
    found = [hold_up(n_stages, n_open, limit_s, n_prompts) for limit_s in (math.inf, *limits_s)]
    delays_s, ttft_s = zip(*found, strict=True)
    assert delays_s[0] > 1.05 * limits_s[0], "nothing is limited unasked"
    for limit_s, delay_s in zip(limits_s, delays_s[1:], strict=True):
        assert 0.4 * limit_s < delay_s < 1.05 * limit_s + 0.01  # and a row that was in a run already
    assert list(delays_s) == sorted(delays_s, reverse=True)
    assert ttft_s[1] < 2.5 * ttft_s[0]


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("n_stages", "n_open", "n_prompts"), [(1, 4, 3), (2, 4, 3), (4, 1, 1), (4, 12, 3), (4, 4, 4)])
def test_no_token_waits_for_more_than_one_chunk(n_stages: int, n_open: int, n_prompts: int, blocks: bool) -> None:
    """As long as chunks may be, through all stages; without a limit somewhat longer."""
    chunk_s = n_stages * STAGE.seconds(N_CHUNK, 0)
    delay_s, _ = hold_up(n_stages, n_open, ONE_CHUNK, n_prompts, blocks)
    assert 0.8 * chunk_s < delay_s < 1.03 * chunk_s
    free_s, _ = hold_up(n_stages, n_open, math.inf, n_prompts, blocks)
    assert 1.15 * chunk_s < free_s < 3.1 * chunk_s


def test_blocks_are_whole() -> None:
    """The last of 3999 rows is one of 95; more than a limit has room for is no less."""
    delay_s, _ = hold_up(2, 4, 2 * 2.05 * BLOCK_S, blocks=True)
    assert 2 * BLOCK_S < delay_s < 2 * 2.1 * BLOCK_S
    shortest_s, _ = hold_up(2, 4, 0.001, blocks=True)
    assert 2 * 0.9 * BLOCK_S < shortest_s < 2 * 95 / 64 * BLOCK_S + 0.02


def test_prompts_by_themselves_are_read_as_without_a_limit() -> None:
    def ttft_s(max_delay_s: float) -> float:
        profile, clock = Profile("even", 4096, (STAGE,) * 3, (), LinkCost(50e-6, 1.25e9), HeadCost()), VirtualClock()
        choices = [SyntheticChoices((0.7,), seed, N_PROMPT) for seed in range(2)]
        level = Level(SimPipeline(profile, choices, clock), SequencePool(8, 9000, parked=True))
        engine = Engine(
            level, None, SimWaiter(clock), clock, run_cost=RunCost(row_costs(profile)), max_delay_s=max_delay_s
        )
        for number, found in enumerate(choices):
            engine.add(Request(number, found.prompt, 1, SamplingParams(temp=0.0), 5000), Iterative())
        engine.complete()
        return clock.now

    assert ttft_s(0.05) == pytest.approx(ttft_s(math.inf), rel=0.1), "but for the end of the one, when the other writes"


def test_what_chunks_take_is_learned() -> None:
    cost = RunCost({1: 0.01, 32: 0.32})
    assert cost.chunk_seconds(64, 0) == pytest.approx(0.64)
    assert RunCost({1: 0.01, 32: 0.32}, chunk=(64, 0.2)).chunk_seconds(128, 0) == pytest.approx(0.4)
    for _ in range(12):
        cost.learn_chunk(64, 0, 0.16)
    assert cost.chunk_seconds(128, 0) == pytest.approx(0.32, rel=0.1)
    cost.learn_chunk(64, 0, 60.0)
    assert cost.chunk_seconds(128, 0) < 0.6, "a rank was interrupted"
    assert cost.seconds(64, 0) == pytest.approx(0.64), "runs of guesses are not what is learned of"


# -- the command line

SIMULATE = "--profile sipipe --requests 6 --concurrency 3 -n 8 -p 600 --policy iterative --json".split()


def simulated(words: Sequence[str]) -> tuple[dict[str, Any], str]:
    done = CliRunner().invoke(simulate_command, [*SIMULATE, *words])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found, done.stderr


def test_it_is_simulated_and_a_limit_that_cannot_be_held_is_named() -> None:
    (free, _), (held, silent), (short, said) = (
        simulated(words) for words in ((), ("--max-delay", "0.2"), ("--max-delay", "1e-5"))
    )
    assert held["itl_p99_s"] < free["itl_p99_s"] and not silent
    assert free["max_delay_s"] is None and held["max_delay_s"] == 0.2
    assert "--max-delay 1e-05 cannot be held: a single row of a prompt takes" in said and said.count("\n") == 1
    assert short["itl_p99_s"] <= held["itl_p99_s"]


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "1e7"])
def test_a_limit_is_a_positive_number(value: str) -> None:
    done = CliRunner().invoke(simulate_command, [*SIMULATE, "--max-delay", value])
    assert done.exit_code == 2 and f"{value!r} is not a number above 0 and up to 1000000.0" in done.output


@pytest.mark.parametrize(("command", "words"), [(simulate_command, ["--profile", "sipipe"]), (bench, [])])
def test_it_is_of_many_requests(command: Any, words: list[str]) -> None:
    done = CliRunner().invoke(command, [*words, "--max-delay", "0.1"])
    assert done.exception and "--max-delay are of" in str(done.exception)


def test_loads_with_other_limits_are_other_loads() -> None:
    options = options_of(model=Path("m.gguf"))
    of = ExperimentSettings.of
    assert of(options).options == "" and of(options.changed(max_delay_s=0.25)).options == "max-delay 0.25"
    assert of(options.changed(max_delay_s=ONE_CHUNK)).options == "max-delay chunk"


def test_real_ranks_write_the_same_texts_and_say_what_a_block_takes(tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    prompts = [("def main():\n    " * (1 + 60 * (number % 2)), number) for number in range(6)]
    asked.write_text(
        "".join(
            json.dumps({"prompt": prompt + str(number), "max_tokens": 24, "ignore_eos": True}) + "\n"
            for prompt, number in prompts
        )
    )

    def answers(name: str, *words: str) -> tuple[dict[int, str], str]:
        output = tmp_path / name
        done = finish(2, ["batch", str(asked), "-o", str(output), "-m", str(TARGET), "-t", "1", "--temp", "0", *words])
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, output.read_text().splitlines())
        return {line["index"]: line["text"] for line in lines}, done.stderr

    free, silent = answers("free.jsonl")
    held, said = answers("held.jsonl", "--max-delay", "1e-6")
    assert len(free) == 6 and free == held
    assert "--max-delay 1e-06 cannot be held: exact numerics read prompts in blocks of 64 rows" in said
    assert "2 stages" in said and "--max-delay" not in silent
