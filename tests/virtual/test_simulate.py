"""The virtual pipeline: exact small cases, every policy's text, determinism, speed, and the command."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
from click.testing import CliRunner
from matplotlib import pyplot as plt

from experiments import reproduced_pipeinfer
from pipeinfer.cli.simulate import simulate_command
from pipeinfer.cluster.wire import encode
from pipeinfer.core.runs import Row, Run
from pipeinfer.errors import UserError
from pipeinfer.observe.columns import COLUMNS, KEY
from pipeinfer.observe.figures import itl_s, ttft_s
from pipeinfer.observe.table import LOADS, RESULTS
from pipeinfer.policies import POLICIES, USUAL, Auto, Iterative, PipeInfer, make_policy
from pipeinfer.virtual.choices import SyntheticChoices, ranks_for, synthetic_team
from pipeinfer.virtual.costs import HeadCost, LinkCost, ModelCost, Profile, Work
from pipeinfer.virtual.pipeline import SimPipeline, SimWaiter, VirtualClock
from pipeinfer.virtual.profile import load_profile
from pipeinfer.virtual.simulation import Simulated, simulate
from plots.frames import frame_of
from plots.results import FIGURES
from tests.support.cases import in_long
from tests.support.jobs import ROOT

LAYER_S, N_LAYERS = 0.01, 4


def even_profile(
    n_stages: int, draft_s: float | None = 0.002, latency_s: float = 0.001, head: HeadCost | None = None
) -> Profile:
    """Stages of 4 layers of 10 ms whatever the rows; links without a bandwidth worth the name."""
    stage = ModelCost("stage", N_LAYERS, Work((1.0,), (LAYER_S,)))
    drafts = () if draft_s is None else (ModelCost("draft", 2, Work((1.0,), (draft_s / 2,))),)
    return Profile("even", 64, (stage,) * n_stages, drafts, LinkCost(latency_s, math.inf), head or HeadCost())


def generate(
    policy: str, profile: Profile, acceptance: float = 0.7, seed: int = 0, n: int = 200, cancel: bool = True
) -> Simulated:
    choices = SyntheticChoices(ranks_for(acceptance), seed, n_prompt=4)
    return simulate(profile, choices, make_policy(policy), n, cancel=cancel)


def a_run(run_id: int, position: int) -> Run:
    return Run(run_id, [Row(0, 1, position, (0,))])


def a_pipeline(n_stages: int) -> SimPipeline:
    return SimPipeline(even_profile(n_stages), [SyntheticChoices((1.0,), n_prompt=4)], VirtualClock())


def wait(pipeline: SimPipeline, timeout_s: float | None = None) -> None:
    SimWaiter(pipeline.clock).wait([pipeline], timeout_s)


def test_only_parked_cells_run_out() -> None:
    """Rows are free, runs wide: where rejected cells stay taken the pipeline runs empty now and then to pack them."""
    profile = even_profile(14)
    assert not profile.parked
    freed, parked = (generate("auto", replace(profile, parked=each), 0.9).metrics.token_s for each in (False, True))
    assert freed[-1] < 0.95 * parked[-1]


def test_a_chunk_of_the_prompt_pays_for_the_tokens_before_it_alone() -> None:
    """128 rows as they were timed, at an empty cache; then 72, each after 128 tokens; single rows after 200."""
    stage = ModelCost("stage", 2, Work((1.0, 128.0), (0.001, 0.1), (1e-4, 1e-5)))
    profile = Profile("one", 64, (stage,), (), LinkCost(0.0, math.inf), HeadCost(), head_is_first=True)
    choices = SyntheticChoices((1.0,), n_prompt=200)
    found = simulate(profile, choices, Iterative(), 2)
    per_row_s = 1e-4 + (1e-5 - 1e-4) * 71 / 127
    chunks_s = 2 * 0.1 + 2 * (0.001 + 0.099 * 71 / 127 + 72 * 128 * per_row_s)
    assert ttft_s(found.metrics) == pytest.approx(chunks_s)
    assert itl_s(found.metrics) == pytest.approx([2 * (0.001 + 200 * 1e-4)])


def test_a_prompt_in_blocks_has_its_last_token_in_a_run_of_its_own() -> None:
    stage = ModelCost("stage", 2, Work((1.0, 127.0), (0.001, 0.1)))
    profile = Profile("one", 64, (stage,), (), LinkCost(0.0, math.inf), HeadCost(), head_is_first=True, blocks=True)
    choices = SyntheticChoices((1.0,), n_prompt=128)
    found = simulate(profile, choices, Iterative(), 1)
    assert found.metrics.n_runs == 2 and ttft_s(found.metrics) == pytest.approx(2 * 0.1 + 2 * 0.001)


def test_only_the_first_of_a_prompts_blocks_pays_for_its_context() -> None:
    """299 rows in chunks of 128, 64 and 107, and the root: the prompt's own context is made once, not at all for rows
    that are in no blocks."""
    stage = ModelCost("stage", 2, Work((1.0,), (0.001,)), prompt_s=0.005)
    profile = Profile("one", 64, (stage,), (), LinkCost(0.0, math.inf), HeadCost(), head_is_first=True, blocks=True)
    choices = SyntheticChoices((1.0,), n_prompt=300)
    for blocks, runs_s in ((True, [0.007, 0.002, 0.002, 0.002]), (False, [0.002] * 3)):
        found = simulate(replace(profile, blocks=blocks), choices, Iterative(), 1)
        took_s = [end_s - start_s for _, _, start_s, end_s, _ in found.pipeline.stages[0].ledger.moved(0.0)]
        assert took_s == pytest.approx(runs_s)


def test_a_draft_that_is_not_the_heads_is_asked_over_the_link() -> None:
    """The head has the lone stage, to which nothing travels. A step of the draft takes two ways, a run none."""
    stage, draft = ModelCost("stage", 1, Work((1.0,), (0.1,))), ModelCost("draft", 1, Work((1.0,), (0.001,)))
    for latency_s in (0.0, 0.004):
        link = LinkCost(latency_s, math.inf)
        profile = Profile("two", 64, (stage,), (draft,), link, HeadCost(), head_is_first=True)
        assert (profile.n_ranks, profile.drafts_elsewhere) == (2, True)
        choices = SyntheticChoices((1.0,), n_prompt=8)
        plain, guessed = (simulate(profile, choices, policy, 40) for policy in (Iterative(), PipeInfer()))
        assert itl_s(plain.metrics) == pytest.approx([0.1] * 39)
        steps = guessed.pipeline.neighbours[1].stages[0].ledger.moved(0.0)
        assert len(steps) > 10 and all(end_s - start_s == pytest.approx(0.001) for _, _, start_s, end_s, _ in steps)
        between = [second[2] - first[3] for first, second in pairwise(steps)]
        assert min(between) == pytest.approx(2 * latency_s)
        ranks = guessed.result(defaultdict(str)).data["ranks"]
        assert [(rank["rank"], rank["role"]) for rank in ranks] == [(1, "draft 1"), (0, "stage")]


def test_only_a_stage_that_had_nothing_to_do_pays_for_the_rest() -> None:
    pipeline = a_pipeline(1)
    stage = pipeline.stages[0]
    stage.cost = replace(stage.cost, rest_s=0.005)
    for run_id in (1, 2):
        pipeline.submit(a_run(run_id, run_id))
    times = []
    for _ in range(2):
        wait(pipeline)
        times.append(pipeline.clock())
        pipeline.poll()
    assert times == pytest.approx([0.002 + 0.005 + N_LAYERS * LAYER_S, 0.002 + 0.005 + 2 * N_LAYERS * LAYER_S])


def test_a_run_takes_its_stages_and_hops() -> None:
    pipeline = a_pipeline(3)
    pipeline.submit(a_run(1, 3))
    wait(pipeline)
    assert pipeline.clock() == pytest.approx(3 * N_LAYERS * LAYER_S + 4 * 0.001)
    verdict = pipeline.poll()
    assert verdict and verdict.run_id == 1 and not verdict.cancelled
    assert verdict.tokens == (pipeline.choices[0].target(4),)


def test_runs_follow_one_another_at_the_pace_of_a_stage() -> None:
    pipeline = a_pipeline(3)
    for run_id in range(1, 6):
        pipeline.submit(a_run(run_id, run_id + 2))
    times = []
    for _ in range(5):
        wait(pipeline)
        assert pipeline.poll()
        times.append(pipeline.clock())
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps == pytest.approx([N_LAYERS * LAYER_S] * 4)


def test_a_cancelled_run_is_left_between_layers_and_travels_on() -> None:
    pipeline = a_pipeline(2)
    pipeline.submit(a_run(1, 3))
    pipeline.clock.advance(0.001 + 1.5 * LAYER_S)  # in the second layer of the first stage
    pipeline.cancel([1])
    wait(pipeline)
    verdict = pipeline.poll()
    assert verdict and verdict.cancelled and verdict.tokens == ()
    # the word arrives 1 ms later, still in the second layer; the second stage does not begin at all
    assert pipeline.clock() == pytest.approx(2 * LAYER_S + 3 * 0.001)
    assert [stage.n_stopped for stage in pipeline.stages] == [1, 0]
    assert [stage.n_skipped for stage in pipeline.stages] == [0, 1]


def test_the_word_of_a_cancellation_needs_its_time() -> None:
    pipeline = a_pipeline(1)
    pipeline.submit(a_run(1, 3))
    pipeline.clock.advance(0.001 + N_LAYERS * LAYER_S - 0.0005)
    pipeline.cancel([1])  # it will be done before it hears of it
    wait(pipeline)
    verdict = pipeline.poll()
    assert verdict and not verdict.cancelled


def test_waiting_for_nothing_raises() -> None:
    pipeline = a_pipeline(2)
    with pytest.raises(RuntimeError, match="nothing is in flight"):
        wait(pipeline)
    wait(pipeline, 0.5)
    assert pipeline.clock() == 0.5


def test_a_wait_ends_at_its_time() -> None:
    pipeline = a_pipeline(2)
    pipeline.submit(a_run(1, 3))
    wait(pipeline, 0.01)
    assert pipeline.clock() == pytest.approx(0.01) and pipeline.poll() is None
    wait(pipeline, 1.0)
    assert pipeline.clock() == pytest.approx(2 * N_LAYERS * LAYER_S + 3 * 0.001)


def test_bandwidth_takes_its_time_and_head_overheads_theirs() -> None:
    stage = ModelCost("stage", 1, Work((1.0,), (0.01,)))
    profile = Profile("slow", 1000, (stage, stage), (), LinkCost(0.0, 1e6), HeadCost(run_s=0.1, verdict_s=0.2))
    pipeline = SimPipeline(profile, [SyntheticChoices((1.0,), n_prompt=4)], VirtualClock())
    pipeline.submit(a_run(1, 3))
    wait(pipeline)
    pipeline.poll()
    bare_s = len(encode(a_run(1, 3))) / 1e6
    assert pipeline.clock() == pytest.approx(0.1 + bare_s + 0.01 + (bare_s + 4e-3) + 0.01 + 28e-6 + 0.2)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("acceptance", [in_long(0.0), 0.66, 1.0])
def test_every_policy_gives_the_targets_text(policy: str, acceptance: float) -> None:
    for n_stages in (1, 2, 7):
        profile = even_profile(n_stages, None if policy == "iterative" else 0.002)
        done = generate(policy, profile, acceptance, n=100, seed=n_stages)
        choices = SyntheticChoices(ranks_for(acceptance), n_stages, n_prompt=4)
        assert done.request.tokens == [choices.target(position) for position in range(104)]


@pytest.mark.parametrize("policy", ["iterative", "pipeinfer", "pipespec"])
def test_all_time_of_a_rank_is_accounted_for(policy: str) -> None:
    ranks = generate(policy, even_profile(4), n=20).result(defaultdict(str)).data["ranks"]
    for rank in ranks:
        parts = (rank[name] for name in ("busy_s", "cancelled_s", "waiting_s", "idle_s"))
        assert sum(parts) == pytest.approx(rank["wall_s"]), rank["rank"]


def test_iterative_is_the_sum_of_stages_and_hops() -> None:
    done = generate("iterative", even_profile(4, None), n=50)
    token_s = 4 * N_LAYERS * LAYER_S + 5 * 0.001
    assert itl_s(done.metrics) == pytest.approx([token_s] * 49)


def test_the_same_seed_gives_the_same_times_and_another_seed_others() -> None:
    first, again, other = (generate("pipeinfer", even_profile(5), seed=seed) for seed in (3, 3, 4))
    assert first.metrics.token_s == again.metrics.token_s
    assert first.metrics.token_s != other.metrics.token_s


def test_cancelling_never_costs_and_mostly_saves() -> None:
    told, untold = (generate("pipeinfer", even_profile(7), 0.5, cancel=cancel) for cancel in (True, False))
    assert told.metrics.token_s[-1] < untold.metrics.token_s[-1]
    assert told.metrics.n_saved > 0 and untold.metrics.n_saved == 0


def test_asynchronous_guesses_pay_in_a_deep_pipeline() -> None:
    speeds = {
        policy: 199 / generate(policy, even_profile(7, None if policy == "iterative" else 0.002)).metrics.token_s[-1]
        for policy in POLICIES
    }
    assert speeds["pipeinfer"] > 1.3 * speeds["speculative"] > 1.3 * speeds["iterative"]


def test_simulating_takes_milliseconds_a_token() -> None:
    """Some 2 on an idle machine; the limit is for a busy one, and for what grows with the length of the text."""
    for _ in range(3):  # what a host takes away may count as this process's
        start_s = time.process_time()
        generate("pipeinfer", even_profile(8), 0.6, n=1000)
        if (token_ms := 1e3 * (time.process_time() - start_s) / 1000) < 12:
            break
    assert token_ms < 12


# -- choices


def test_synthetic_choices_have_the_right_token_as_often_as_said() -> None:
    by_rank = (0.6, 0.2, 0.1)
    choices, n = SyntheticChoices(by_rank, seed=5), 20_000
    found = [0] * 4
    surest = 0.0
    for position in range(n):
        guesses = choices.guesses(position, (), 4)
        surest += guesses[0].probability
        tokens = [guess.token for guess in guesses]
        assert len(set(tokens)) == 4
        assert [guess.probability for guess in guesses[1:]] == sorted(
            (guess.probability for guess in guesses[1:]), reverse=True
        )
        right = choices.target(position + 1)
        if right in tokens:
            found[tokens.index(right)] += 1
    assert [count / n for count in found[:3]] == pytest.approx(by_rank, abs=0.015)
    assert found[3] < 0.001 * n
    assert surest / n == pytest.approx(0.6, abs=0.015), "the draft is calibrated"


def test_ranks_for_an_acceptance_reach_nearly_all() -> None:
    assert sum(ranks_for(0.52)[:8]) > 0.94 and sum(ranks_for(0.8)[:8]) > 0.99
    assert sum(ranks_for(0.05)) < 0.5, "a poor draft does not know the second guess either"
    with pytest.raises(UserError, match="no probability"):
        ranks_for(1.5)
    with pytest.raises(UserError, match="whose sum"):
        SyntheticChoices((0.9, 0.2))


def test_choices_after_a_wrong_token_are_a_function_of_the_branch() -> None:
    first, second = SyntheticChoices((0.5,), seed=1), SyntheticChoices((0.5,), seed=1)
    assert first.guesses(9, (3, 4), 3) == second.guesses(9, (3, 4), 3)
    assert first.guesses(9, (3, 4), 3) != first.guesses(9, (3, 5), 3)


def test_a_draft_that_ages_is_right_less_often_the_longer_it_knows_nothing() -> None:
    choices = SyntheticChoices((0.8, 0.1), seed=2, n_prompt=4, ageing=(0.9,))
    found = [[choices.guesses(start, (), 2, age) for start in range(4, 4004)] for age in range(4)]
    for age, lists in enumerate(found):
        right = sum(first.token == choices.target(start) for start, (first, _) in enumerate(lists, 5)) / len(lists)
        assert right == pytest.approx(0.8 * 0.9**age, abs=0.02)
        assert fmean(first.probability for first, _ in lists) == pytest.approx(right, abs=0.02), "it knows"
    assert found[0] == [SyntheticChoices((0.8, 0.1), seed=2, n_prompt=4).guesses(n, (), 2, 3) for n in range(4, 4004)]


def test_each_further_token_may_age_a_draft_by_a_factor_of_its_own() -> None:
    choices = SyntheticChoices((0.8, 0.1), seed=2, n_prompt=4, ageing=(0.7, 0.9, 0.8))
    for age, kept in enumerate((1.0, 0.7, 0.63, 0.504, 0.4032)):
        lists = [choices.guesses(start, (), 2, age) for start in range(4, 4004)]
        right = sum(first.token == choices.target(start) for start, (first, _) in enumerate(lists, 5)) / len(lists)
        assert right == pytest.approx(0.8 * kept, abs=0.02)


def test_ageing_costs_who_guesses_far_ahead() -> None:
    words = ["--profile", "pipedec-14", "--policy", "speculative,pipedec", "-n", "64", "--acceptance", "0.8"]
    speeds = []
    for more in ([], ["--ageing", "0.9"]):
        done = command(*words, *more, "--json")
        assert done.returncode == 0, done.stderr
        speeds.append([json.loads(line)["timings"]["predicted_per_second"] for line in done.stdout.splitlines()])
    (chain, tree), (aged_chain, aged_tree) = speeds
    assert aged_chain < chain and aged_tree / tree < 0.9 * aged_chain / chain
    assert "--ageing" in command(*words[:-2], "--ageing", "0.9", "--choices", __file__).stderr


# -- the command

BLOCKED = """
import sys
for name in ("mpi4py", "llama_cpp", "gguf"):
    sys.modules[name] = None
from pipeinfer.cli import main
main(sys.argv[1:])
"""


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`pipeinfer simulate` where neither mpi4py nor llama_cpp is installed."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, "simulate", *arguments], capture_output=True, text=True, timeout=120
    )


def test_the_command_prints_a_table_and_writes_results_and_trace(tmp_path: Path) -> None:
    results, trace = tmp_path / "results.csv", tmp_path / "trace.json"
    done = command(
        "--profile",
        "pipeinfer-c",
        "--nodes",
        "8",
        "-n",
        "64",
        "--policy",
        ",".join(USUAL),
        "--results",
        str(results),
        "--trace",
        str(trace),
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2 + len(USUAL) and "0 B" not in done.stdout, "a profile has no size"
    assert len(results.read_text().splitlines()) == 1 + len(USUAL)
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"draft", "evaluate", "cancelled", "settle"} <= names


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--profile", "nowhere"], "pipeinfer-c"),
        (["--profile", "pipeinfer-c", "--nodes", "40"], "has 32"),
        (["--profile", "pipeinfer-c", "--pair", "x"], "dolphin-tinyllama"),
        (["--profile", "pipeinfer-c", "--policy", "x"], "iterative"),
        (["--profile", "pipeinfer-c", "--acceptance", "2"], "0 to 1"),
        (["--profile", "pipeinfer-c", "--no-repack"], "--no-repack"),
        (["--profile", "pipeinfer-c", "--ranks", "a,b"], "'a,b'"),
        (["--profile", "pipeinfer-c", "--ranks", "0.5", "--acceptance", "0.5"], "one of"),
        (["--profile", "pipeinfer-c", "--json", "-o", "csv"], "give one of them"),
        ([], "--profile"),
    ],
)
def test_bad_options_give_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and words in done.stderr, done.stderr


def test_loads_of_which_some_have_a_notice_are_one_table() -> None:
    words = "--profile ethernet --nodes 4 -n 4 -p 8 --policy auto,iterative --requests 1 --max-delay 1.385 -o csv"
    result = CliRunner().invoke(simulate_command, words.split())
    assert result.exit_code == 0, result.output
    head, *rows = [line for line in result.output.splitlines() if line.count(",") > 5]
    assert "notice" in head.split(",") and len(rows) == 2


def test_a_row_of_the_reproduction_table() -> None:
    row = reproduced_pipeinfer._speed_row("pipeinfer-c", 8, "goliath-xwin7")
    assert row[:3] == ["pipeinfer-c", "8", "goliath-xwin7"]
    iterative, speculative, theirs = map(float, row[6:9])
    assert float(row[9].partition(" ")[0].strip("*")) == pytest.approx(theirs / speculative, abs=0.02), (
        "over speculative"
    )
    assert float(row[14]) == pytest.approx(float(row[13]) / iterative, abs=0.02), "ours over iterative"
    page = (ROOT / "docs" / "results" / "reproduction.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")[1:4]] for line in page.splitlines()]
    assert row[:3] in lines and "| over speculative " in page and "| ours over iterative " in page
    assert not re.search(r"\b(ahead|behind)\b", page), "the baselines are not the same"
    *_, ours = reproduced_pipeinfer._poor_row("pipeinfer-c", 8, "goliath-xwin7")
    assert float(ours.strip("*")) > 0.97, "a poor draft must not cost much"


def test_a_larger_draft_pays_where_the_paper_says_so() -> None:
    """PipeSpec's three models against its two, on its four GPUs (table 1): with a draft between them it is faster."""
    file, speeds = load_profile("pipespec"), []
    for pair, nodes in (("llama-70b-1b", 3), ("llama-70b-8b", 3), ("llama-70b-8b-1b", 4)):
        profile, token_s = file.lay_out(nodes, pair), 0.0
        for seed in range(2):
            choices, *larger = synthetic_team([ranks_for(share) for share in profile.acceptance], seed, 16)
            found = simulate(profile, choices, Auto(), 256, larger=larger)
            assert found.request.tokens[16:] == [choices.target(position) for position in range(16, 272)]
            assert bool(found.metrics.n_refined) == bool(larger)
            token_s += (found.metrics.token_s[-1] - found.metrics.token_s[0]) / 255
        speeds.append(2 / token_s)
    assert speeds[2] > 1.03 * max(speeds[:2]), speeds


def test_drafts_of_one_target_find_the_same_tokens_easy() -> None:
    small, large = synthetic_team([ranks_for(0.6), ranks_for(0.8)], seed=3, n_prompt=4)
    right = [
        [team.guesses(start, (), 1)[0].token == small.target(start + 1) for start in range(4, 2004)]
        for team in (small, large)
    ]
    assert [sum(hits) / 2000 for hits in right] == pytest.approx([0.6, 0.8], abs=0.03)
    both = sum(one and other for one, other in zip(*right, strict=True))
    assert both > 0.99 * sum(right[0]), "the better draft is right wherever the other is"
    assert [small.target(position) for position in range(3000)] == [large.target(position) for position in range(3000)]


def test_rows_that_were_simulated_otherwise_are_told_apart(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    common = ["--profile", "pipeinfer-c", "--policy", "pipeinfer", "-n", "8", "--results", str(results)]
    questions: list[list[str]] = [
        [],
        ["--gbit", "0.1"],
        ["--acceptance", "0.3"],
        ["--width", "1"],
        ["--decay", "0.5"],
        ["-s", "3"],
        ["--nodes", "3"],
        ["--pair", "falcon-7"],
        ["--no-cancel"],
        ["-p", "9"],
    ]
    for question in questions:
        done = CliRunner().invoke(simulate_command, [*common, *question])
        assert done.exception is None, done.output
    rows = RESULTS.read(results)
    assert len({RESULTS.key_of(row) for row in rows}) == len(rows) == len(questions)
    assert [column for column in KEY if column not in rows[0]] == []
    assert {row["numerics"] for row in rows} == {"virtual"}


def test_rows_say_what_was_changed(tmp_path: Path) -> None:
    """In the words of `bench`; the profile is the same, so that panels are named by what was changed."""
    single, loads = tmp_path / "results.csv", tmp_path / "load.csv"
    common = ["--profile", "sipipe", "--policy", "iterative", "-n", "8", "--results"]
    questions = {
        "": [],
        "sampler-threads 2": ["--sampler-threads", "2"],
        "no-prepare-ahead, no-post-ahead": ["--no-prepare-ahead", "--no-post-ahead"],
        "gbit 10, wire-type bf16": ["--gbit", "10", "--wire-type", "bf16"],
        "max-delay 0.5": ["--max-delay", "0.5"],
    }
    for text, question in questions.items():
        for results, more in ((single, []), (loads, ["--requests", "4"])):
            if results == loads or "max-delay" not in text:
                done = CliRunner().invoke(simulate_command, [*common, str(results), *more, *question])
                assert done.exception is None, done.output
    rows = RESULTS.read(single), LOADS.read(loads)
    assert [row["options"] for row in rows[1]] == list(questions)
    assert [row["options"] for row in rows[0]] == list(questions)[:-1]
    assert len({row["model_hash"] for each in rows for row in each}) == 1


def test_numbers_of_nodes_share_a_panel_and_edited_profiles_do_not(tmp_path: Path) -> None:
    text = (ROOT / "pipeinfer" / "virtual" / "profiles" / "ethernet.toml").read_text()
    results, profile = tmp_path / "results.csv", tmp_path / "office.toml"
    common = ["--profile", str(profile), "--policy", "iterative,auto", "-n", "8", "--results", str(results)]
    for content, nodes in ((text, 4), (text, 8), (text.replace("layer_mb = 37", "layer_mb = 40"), 8)):
        profile.write_text(content)
        done = CliRunner().invoke(simulate_command, [*common, "--nodes", str(nodes)])
        assert done.exception is None, done.output
    rows = RESULTS.read(results)
    assert {row["model"] for row in rows} == {"office, llama-70b-1b"}
    first, second, edited = ({row["model_hash"] for row in rows[at : at + 2]} for at in (0, 2, 4))
    assert first == second != edited and len(first) == 1
    figure = FIGURES["speed"](frame_of(rows[:4], COLUMNS))
    assert figure and [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["4", "8"]
    plt.close(figure)
