"""Many requests in virtual time: what comes of them can be worked out by hand where the costs are simple."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from click.testing import CliRunner

from pipeinfer.cli.bench import bench
from pipeinfer.cli.simulate import simulate_command
from pipeinfer.core.batch_planner import BatchBudget
from pipeinfer.observe.summary import falls_behind
from pipeinfer.policies import make_policy
from pipeinfer.virtual.choices import ranks_for
from pipeinfer.virtual.costs import HeadCost, HostWork, LinkCost, ModelCost, Profile, Work
from pipeinfer.virtual.profile import load_profile
from pipeinfer.virtual.simulation import Load, simulate_load, synthetic_texts
from tests.support.cases import in_long
from tests.support.jobs import finish

STAGE = ModelCost("stage", 10, Work((1.0, 64.0), (0.001, 0.001)))  # 10 ms a run, whatever its rows
EVEN = Profile("even", 8, (STAGE,) * 4, (), LinkCost(1e-9, 1e15), HeadCost())


def carry(profile: Profile, load: Load, policy: str = "iterative") -> dict[str, Any]:
    return simulate_load(profile, make_policy(policy), load, synthetic_texts(load, ranks_for(0.7)))


def test_as_many_runs_as_stages_each_of_as_many_roots() -> None:
    """64 requests, 4 stages: 16 tokens every 10 ms, and each request one every 40."""
    found = carry(EVEN, Load(64, 2, 200, 64))
    assert found["predicted_per_second"] == pytest.approx(1600, rel=0.05)
    assert found["tpot_p50_s"] == pytest.approx(0.040, rel=0.02)
    assert min(found["busy"]) > 0.95


def test_host_work_costs_what_it_is_worth_and_can_be_hidden() -> None:
    """5 ms of input, and 0.25 ms for each of 16 rows: the last stage takes 10 + 5 + 4 ms, the others 15."""
    load, work = Load(64, 2, 200, 64), HostWork(prepare_s=0.005, sample_s=0.00025, ahead=False)

    def period_s(host: HostWork) -> float:
        return 16 / carry(replace(EVEN, host=host), load)["predicted_per_second"]

    assert period_s(work) == pytest.approx(0.019, rel=0.06)
    assert period_s(replace(work, samplers=16)) == pytest.approx(0.015, rel=0.06)
    # 10 ms a stage; but with a run a stage each waits for its first input and its tokens in turn: (40 + 5 + 0.25) / 4
    assert period_s(replace(work, samplers=16, ahead=True)) == pytest.approx(0.01131, rel=0.06)
    met = replace(work, prepare_s=0.0, sample_s=0.0, meet_s=0.002, posted=False)
    assert period_s(met) == pytest.approx(0.012, rel=0.06), "the later stages wait for what they receive"


def test_samplers_and_early_input_weigh_as_in_sipipes_figure_16() -> None:
    """As the paper adds them, with what its section 3.1 measures. Expected messages weigh more than there."""
    load, profile = Load(512, 2, 16, 512), load_profile("sipipe").lay_out(has_draft=False)
    host = replace(profile.host, ahead=False, posted=False)
    ways = [host, replace(host, samplers=8), replace(host, samplers=8, ahead=True)]
    speeds = [carry(replace(profile, host=way), load)["predicted_per_second"] for way in ways]
    samplers, early = (speed / before for before, speed in pairwise(speeds))
    assert 1.16 < samplers < 1.38 and 1.10 < early < 1.24


def test_requests_that_come_one_by_one_are_answered_one_by_one() -> None:
    found = carry(EVEN, Load(40, 2, 20, 40, rate=0.5))
    assert found["tpot_p50_s"] == pytest.approx(0.040, rel=0.02)
    assert found["requests_per_second"] == pytest.approx(0.5, rel=0.4)
    crowded = carry(EVEN, Load(40, 2, 20, 2, rate=100.0))
    assert crowded["ttft_p50_s"] > 20 * found["ttft_p50_s"], "two at a time: most wait for others"


def test_offered_and_served_tell_whether_a_rate_was_kept_up_with() -> None:
    calm, hurried = (carry(EVEN, Load(24, 2, 20, parallel=4, rate=rate)) for rate in (0.5, 50.0))
    assert calm["served_per_second"] > 0.95 * calm["offered_per_second"] and not falls_behind(calm)
    assert falls_behind(hurried) and 20 < hurried["offered_per_second"] < 100
    asked = carry(EVEN, Load(4, 2, 20, parallel=4, concurrency=2))
    assert math.isnan(asked["offered_per_second"]) and not falls_behind(asked)


def test_clients_keep_as_many_open_and_do_not_wait_for_others() -> None:
    """The same work as of requests that all come at once; each comes when the one before it has its text."""
    clients, at_once = carry(EVEN, Load(40, 2, 20, 8, concurrency=8)), carry(EVEN, Load(40, 2, 20, 8))
    assert clients["predicted_per_second"] == pytest.approx(at_once["predicted_per_second"])
    assert clients["itl_p99_s"] == pytest.approx(at_once["itl_p99_s"])
    assert clients["ttft_p99_s"] < 0.2 * at_once["ttft_p99_s"]
    assert clients["tpot_p50_s"] == pytest.approx(0.040, rel=0.02) == clients["itl_p50_s"]


def test_prompts_hold_a_long_pipeline_up_for_small_chunks_only() -> None:
    """64 rows cost a stage 27 times one: whole, such prompts would take 6.7 s, and what comes behind them as long."""
    profile = load_profile("pipeinfer-c").lay_out(has_draft=False)
    alone, many = carry(profile, Load(1, 64, 8, 1)), carry(profile, Load(24, 64, 32, 8, rate=0.3))
    assert alone["ttft_p50_s"] < 1.0 and many["ttft_p99_s"] < 2.0
    assert many["tpot_p50_s"] < 1.2 * alone["tpot_p50_s"]


@pytest.mark.parametrize(
    ("cluster", "load", "gain"),
    [
        ("sipipe", Load(32, 4000, 96, 16, concurrency=16), 1.05),
        ("pipedec-14", Load(128, 512, 32, 64, concurrency=64), 1.03),
        ("pipeinfer-c", Load(32, 64, 48, 16, concurrency=16), 0.995),
    ],
)
def test_roots_share_fewer_runs_while_prompts_are_read(
    cluster: str, load: Load, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows are dear, chunks are small, and so are these runs: little changes there."""
    profile = load_profile(cluster).lay_out()
    shared = carry(profile, load)
    monkeypatch.setattr(BatchBudget, "beside_chunks", lambda budget, n_chunks, n_chunk_rows: budget)
    apart = carry(profile, load)
    assert shared["predicted_per_second"] > gain * apart["predicted_per_second"]
    assert shared["ttft_mean_s"] < 1.01 * apart["ttft_mean_s"]
    assert shared["itl_mean_s"] < 1.01 * apart["itl_mean_s"]


def test_runs_beside_chunks_are_no_larger_than_these() -> None:
    budget = BatchBudget.for_load(64, 4, 8, 40, 128)
    assert [budget.beside_chunks(n, 128).n_roots for n in range(6)] == [16, 22, 32, 40, 40, 40]
    assert [budget.beside_chunks(2, n).n_roots for n in (8, 20, 64)] == [16, 20, 32]
    assert BatchBudget.for_load(1, 4, 8, 40, 128).beside_chunks(3, 64).n_roots == 1


@pytest.mark.parametrize(
    ("cluster", "acceptance", "n"), [("pipedec-14", 0.8, 64), ("sipipe", 0.6, 64), in_long("pipeinfer-c", 0.7, 64)]
)
def test_speculation_fills_what_is_empty_and_no_more(cluster: str, acceptance: float, n: int) -> None:
    profile = load_profile(cluster).lay_out()

    def speed(policy: str, n_at_once: int) -> float:
        load = Load(2 * n_at_once, 32, 48, n_at_once)
        texts = synthetic_texts(load, ranks_for(acceptance))
        return float(simulate_load(profile, make_policy(policy), load, texts)["predicted_per_second"])

    assert speed("auto", 1) > 2 * speed("iterative", 1)
    assert speed("auto", n) >= 0.99 * speed("iterative", n)


def test_the_busiest_stage_of_sipipe_has_no_time_to_spare() -> None:
    """Nothing holds its processors up: what is left are messages, and the first and the last run."""
    profile = load_profile("sipipe").lay_out(has_draft=False)
    profile = replace(profile, host=replace(profile.host, samplers=8, ahead=True, posted=True))
    found = carry(profile, Load(512, 256, 64, 512))
    assert max(found["busy"]) >= 0.95


def test_a_small_run_waits_for_the_roots_to_come() -> None:
    budget = BatchBudget.for_load(64, 4, 8, 32, 128)
    assert budget.n_roots == 16
    assert budget.can_dispatch(2, True, 3) and not budget.can_dispatch(2, True, 4)
    assert budget.can_dispatch(16, True, 4) and not budget.can_dispatch(16, True, 5)
    assert budget.can_dispatch(0, True, 4, reads=True) and not budget.can_dispatch(0, True, 5, reads=True)
    assert not budget.can_dispatch(0, False, 3), "guesses alone would take a root's place"
    assert BatchBudget.for_load(3, 4, 8, 32, 128).can_dispatch(0, False, 3)


def test_the_command() -> None:
    words = ["simulate", "--profile", "sipipe", "--requests", "12", "-p", "8", "-n", "16", "--policy", "iterative,auto"]
    done = finish(1, words)
    assert done.returncode == 0 and done.stdout.count("\n") == 4 and "busiest stage" in done.stdout, done.stderr
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["policy", ":----------", "iterative", "auto"], "a line says whose it is"
    done = finish(1, [*words, "--rate", "5", "--parallel", "3", "--sampler-threads", "2", "--json"])
    loads = [json.loads(line) for line in done.stdout.splitlines()]
    assert [load["policy"] for load in loads] == ["iterative", "auto"]
    assert all(load["predicted_n"] == 12 * 16 and load["rate"] == 5.0 for load in loads)
    done = finish(1, [*words, "--concurrency", "3", "--json"])
    assert [json.loads(line)["rate"] for line in done.stdout.splitlines()] == [None, None], done.stderr
    asked = ["-p", "8", "-n", "2", "--policy", "iterative", "--concurrency", "1,4", "--rate", "9", "--json"]
    done = finish(1, [*words[:3], *asked])
    loads = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(load["concurrency"], load["rate"], load["n_requests"], load["parallel"]) for load in loads] == [
        (1, None, 64, 32),
        (4, None, 64, 32),
        (0, 9.0, 64, 32),
    ]
    for refused in (["--max-delay", "5"], ["--parallel", "2"], ["--requests", "4", "--trace", "/tmp/never.json"]):
        done = finish(1, ["simulate", "--profile", "sipipe", *refused])
        assert done.returncode == 2 and "--requests" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--concurrency 4 --parallel 2", "--parallel 2 is less than --concurrency 4"),
        ("--concurrency 4 --requests 2", "--requests 2 are fewer than the clients of --concurrency 4"),
        ("--rate 2,2", "--rate has 2.0 twice"),
        ("--parallel 300 --rate 1", "from 1 to 254"),
        ("--concurrency 300", "from 1 to 254"),
        ("--rate 0", "not a number from 1e-06"),
        ("--concurrency 1,,2", "has an empty part"),
    ],
)
def test_loads_are_asked_for_by_the_same_rules(words: str, told: str) -> None:
    for command, before in ((simulate_command, ["--profile", "sipipe"]), (bench, [])):
        found = CliRunner().invoke(command, [*before, *words.split()])
        assert found.exit_code and told in f"{found.output} {found.exception}"
