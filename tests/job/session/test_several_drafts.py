"""`-md` more than once, as a user does it: real ranks, a small draft that guesses and a larger one that refines, on one
rank or cut over several."""

from __future__ import annotations

import json
import os
import random
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from pipeinfer.cluster.hosts.host import this_host
from pipeinfer.core.runs import GuessVerdict, Opening, Row, Run
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.options.values import Pace
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.observe.table import RESULTS
from pipeinfer.policies import PipeInfer
from plots.timeline import draw_timelines
from tests.job.run.test_run import PROMPT, SOON_S, pid_of_rank, wait_for_text
from tests.support.cases import in_long
from tests.support.jobs import finish, plain_tokens_after, run_json, start
from tests.support.paces import slow_target, with_refiner
from tests.support.planned import deploy, options_of
from tests.support.toy import ToyDraftPipeline

# the best larger draft is the target itself; the order of the flags says nothing
TEAM = ["-m", str(TARGET), "-md", str(TARGET), "-md", str(DRAFT)]
GREEDY = ["-p", PROMPT, "-n", "96", "--temp", "0", "--ignore-eos", "-t", "1"]


@pytest.fixture(scope="module")
def plain() -> list[int]:
    return plain_tokens_after(TARGET, run_json(1, ["-p", PROMPT, "-n", "1"]), 96)


@pytest.mark.parametrize(
    ("n_ranks", "policy"), [(1, "pipeinfer"), in_long(3, "speculative"), (4, "pipeinfer"), (3, "pipespec")]
)
def test_the_text_is_that_of_the_target(n_ranks: int, policy: str, plain: list[int]) -> None:
    result = run_json(n_ranks, [*TEAM, *GREEDY, "--policy", policy])
    assert result["tokens"] == plain
    assert result["model_draft"]["name"] == "draft.gguf+target.gguf"
    roles = [rank["role"] for rank in result["ranks"]]
    assert roles[:2] == (["draft 1", "draft 2"] if n_ranks > 1 else ["draft 1, draft 2, stage 0, layers 0-8"])
    for rank in result["ranks"][1:]:
        used_s = rank["busy_s"] + rank["waiting_s"] + rank["idle_s"] + rank["cancelled_s"]
        assert used_s == pytest.approx(rank["wall_s"], rel=0.02), rank


def test_three_drafts_and_sampling_and_penalties() -> None:
    common = ["-p", PROMPT, "-n", "48", "--temp", "0.8", "-s", "5", "--repeat-penalty", "1.2", "-t", "1"]
    alone = run_json(1, [*common, "--policy", "iterative"])
    assert run_json(4, [*TEAM, "-md", str(DRAFT), *common])["tokens"] == alone["tokens"]
    traced = run_json(3, [*TEAM, *common, "--no-cancel", "--width", "8"])
    assert traced["tokens"] == alone["tokens"]
    cut = run_json(5, [*TEAM, "-md", str(DRAFT), "--draft-split", "1,2", *common])
    assert cut["tokens"] == alone["tokens"]
    assert [rank["role"].split(",")[0] for rank in cut["ranks"]] == [
        "draft 1",
        "draft 2",
        "draft 3 stage 0",
        "draft 3 stage 1",
        "stage 0",
    ]


def share_of_first_guesses_right(result: dict[str, Any]) -> float:
    """Of the tokens that were guessed: how often the likeliest guess was the target's token."""
    by_depth = result["speculation"]["by_depth"].values()
    return float(sum(found["right"] for found in by_depth) / sum(found["n"] for found in by_depth))


@pytest.mark.parametrize("policy", [in_long("speculative"), "pipeinfer"])
def test_a_larger_draft_that_is_right_makes_better_guesses(tmp_path: Path, policy: str, plain: list[int]) -> None:
    (tmp_path / "alone.toml").write_text(slow_target(20.0))
    (tmp_path / "team.toml").write_text(with_refiner(slow_target(20.0), 1.0, 8))
    common = [*GREEDY, "-n", "24", "--policy", policy, "--pace"]
    alone = run_json(3, [*common, str(tmp_path / "alone.toml")])
    helped = run_json(4, [*TEAM, *common, str(tmp_path / "team.toml")])
    assert alone["tokens"] == helped["tokens"] == plain[:24]
    assert helped["speculation"]["refined_n"] > 0
    assert share_of_first_guesses_right(helped) > share_of_first_guesses_right(alone) + 0.1


def test_too_few_ranks_say_so() -> None:
    done = finish(2, ["run", *TEAM, *GREEDY])
    assert done.returncode == 2 and "2 drafts and the target need 3 ranks, here are 2" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("n_ranks", "extra", "rank", "role"),
    [(3, [], 1, "draft 2"), (4, ["--draft-split", "2"], 2, "draft 2 stage 1, layers 5-8")],
)
def test_a_killed_draft_is_named(n_ranks: int, extra: list[str], rank: int, role: str) -> None:
    job = start(n_ranks, ["run", *TEAM, *extra, "-p", PROMPT, "-n", "6000", "-c", "7000", "--ignore-eos", "-t", "1"])
    wait_for_text(job)
    os.kill(pid_of_rank(job, rank), signal.SIGKILL)
    _, errors = job.communicate(timeout=SOON_S)
    assert job.returncode != 0
    (line,) = [line for line in errors.splitlines() if "died" in line]
    assert f"rank {rank} (" in line and role in line, errors


def test_a_cut_draft_guesses_what_the_whole_one_does() -> None:
    info = read_model_info(TARGET)
    params = LlamaParams(n_cells=256, n_seq_max=2, n_batch=32, n_outputs_max=32, n_threads=1, exact=False)
    rows = [Row(0, token, position, (0,), n_wanted=3) for position, token in enumerate(range(300, 308))]

    def answers(*bounds: int) -> GuessVerdict:
        models = [LlamaStage(open_slice(info, first, last), params) for first, last in pairwise(bounds)]
        pipeline = ToyDraftPipeline(models, random.Random(1))
        pipeline.submit(Run(1, rows, opens={0: Opening(SamplingParams(seed=0, temp=0.0), 1)}))
        while (verdict := pipeline.poll()) is None:
            pass
        for model in models:
            model.close()
        assert isinstance(verdict, GuessVerdict) and all(len(guesses) == 3 for guesses in verdict.guesses)
        return verdict

    whole = [
        [(guess.token, pytest.approx(guess.probability, rel=1e-3)) for guess in row] for row in answers(0, 9).guesses
    ]
    assert [[(guess.token, guess.probability) for guess in row] for row in answers(0, 4, 9).guesses] == whole


def test_a_cut_draft_keeps_the_text_and_has_a_track_for_each_rank(tmp_path: Path, plain: list[int]) -> None:
    path = tmp_path / "trace.json"
    result = run_json(5, [*TEAM, *GREEDY, "--draft-split", "2", "--trace", str(path)])
    assert result["tokens"] == plain
    for rank in result["ranks"][1:]:
        used_s = rank["busy_s"] + rank["waiting_s"] + rank["idle_s"] + rank["cancelled_s"]
        assert used_s == pytest.approx(rank["wall_s"], rel=0.02), rank
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert (names[1], names[2]) == ("rank 1: draft 2 stage 0, layers 0-4", "rank 2: draft 2 stage 1, layers 5-8")
    work = [event for event in events if event["name"] in ("evaluate", "cancelled")]
    asked = [{event["args"]["question"] for event in work if event["tid"] == tid} for tid in (1, 2)]
    assert asked[0] and asked[0] == asked[1], "every question goes through both stages"
    assert any(event["name"] == "evaluate" and event["tid"] == 2 for event in work)
    ends = {(event["tid"], event["ph"]) for event in events if event["name"] == "message" and event["tid"] in (1, 2)}
    assert ends == {(1, "s"), (1, "f"), (2, "s"), (2, "f")}, "from the head to the first stage, the second, and back"


def test_what_a_cut_draft_cannot_be_part_of_is_said(tmp_path: Path) -> None:
    said = "a profile has each draft on 1 rank, --draft-split is 2; leave that out"
    (tmp_path / "slow.toml").write_text(with_refiner(slow_target(20.0), 1.0, 8))
    options = options_of(
        model=TARGET,
        drafts=(TARGET, DRAFT),
        policy=PipeInfer(),
        draft_split=(2,),
        pace=Pace.parse(str(tmp_path / "slow.toml")),
    )
    with pytest.raises(UserError, match=said):
        deploy(options, [this_host("a")] * 4, read_model_info(TARGET), 256, 1)
    done = finish(1, ["bench", "-m", str(TARGET), "-md", str(DRAFT), "-p", "8", "--draft-split", "2"])
    assert done.returncode == 2 and "--draft-split 2 cuts larger drafts, and there is none" in done.stderr, done.stderr


def test_the_trace_has_a_track_of_each_draft(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_json(4, [*TEAM, *GREEDY, "--trace", str(path)])
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert list(names)[:2] == ["rank 0: draft 1", "rank 1: draft 2"]
    assert any(event["tid"] == 1 and event["name"] == "evaluate" for event in events)
    asked, run = (
        [event["args"] for event in events if event["tid"] == tid and event["name"] == "evaluate"] for tid in (1, 2)
    )
    assert all("question" in args and "run" not in args for args in asked), "they are counted by themselves"
    assert all("run" in args and "question" not in args for args in run)
    arrows = [event for event in events if event["name"] == "message" and event["tid"] == 1]
    assert all("question" in event["args"] for event in arrows)
    assert {event["ph"] for event in arrows} == {"s", "f"}, "questions and answers"
    plt.close(draw_timelines([path], None, None))


def test_bench_measures_a_team_beside_a_lone_draft(tmp_path: Path) -> None:
    table = tmp_path / "results.csv"
    teams = ["-md", f"{DRAFT},{TARGET}", "-md", str(DRAFT), "--draft-split", "2"]
    arguments = ["bench", "-m", str(TARGET), *teams, "-p", "8", "-n", "16", "-r", "1", "-t", "1"]
    done = finish(4, [*arguments, "--policy", "iterative,pipeinfer", "--results", str(table)])
    assert done.returncode == 0, done.stderr
    rows = RESULTS.read(table)
    found = [
        (row["model_draft"], row["policy"], len(row["layers"]), "draft-split 2" in row["settings"]) for row in rows
    ]
    assert ("draft.gguf+target.gguf", "pipeinfer", 1, True) in found, found
    assert ("draft.gguf", "pipeinfer", 3, False) in found and ("", "iterative", 4, False) in found, found


def test_measure_times_every_draft_and_simulate_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "team.toml"
    done = finish(3, ["measure", *TEAM, "-o", str(path), "-t", "1", "--tolerance", "9"])
    assert done.returncode == 0, done.stderr
    told = finish(1, ["simulate", "--profile", str(path), "-n", "32", "--acceptance", "0.5"])
    assert told.returncode == 2 and "has 2 drafts, and --acceptance" in told.stderr, told.stderr
    told = finish(1, ["simulate", "--profile", str(path), "-n", "32", "--acceptance", "0.5", "--acceptance", "0.9"])
    assert told.returncode == 0, told.stderr


def test_bench_refuses_a_team_with_an_empty_name() -> None:
    done = finish(1, ["bench", "-m", str(TARGET), "-md", f"{DRAFT},", "-n", "4"], timeout_s=20)
    assert done.returncode == 2 and "empty part" in done.stderr, done.stderr
