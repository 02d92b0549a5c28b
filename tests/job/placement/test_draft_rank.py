"""Which rank drafts: what is chosen among unequal ranks, what is refused, and jobs in which it is not rank 0."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.cluster.assignment import Sizes, assign
from pipeinfer.cluster.hosts.host import Host, LayerSpeed
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO_LAYERS
from pipeinfer.job.options.values import Pace
from pipeinfer.job.planning.deploy import CLEAR_GAIN, choose_draft_rank
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.policies import PipeInfer
from tests.support.jobs import finish, plain_tokens_after, run_json
from tests.support.planned import lay_out, options_of, timed_ranks

LAYERS, SMALL = Sizes((100,) * 12, 50), Sizes((1,) * 2, 1)
ASKED = options_of(model=TARGET, drafts=(DRAFT,), policy=PipeInfer())


def ranks(*s_per_byte: float) -> list[Host]:
    hosts = [Host(f"h{rank}", frozenset(range(4)), 4) for rank in range(len(s_per_byte))]
    return [replace(host, speed=LayerSpeed(each)) for host, each in zip(hosts, s_per_byte, strict=True)]


def chosen(*s_per_byte: float, draft: Sizes = SMALL) -> int:
    hosts = ranks(*s_per_byte)
    speeds = [host.speed for host in hosts]
    assign_with = partial(assign, len(hosts), [draft], LAYERS, None, None, (), speeds)
    return choose_draft_rank(hosts, LAYERS, draft, assign_with)


def test_the_rank_that_is_missed_least_drafts() -> None:
    assert chosen(1.0, 1.0, 3.0, 1.0) == 2
    assert chosen(3.0, 1.0, 1.0) == 0, "it is rank 0 as it is"
    assert chosen(1.0, 1.0, 1.0) == 0, "they are alike"
    assert chosen(1.0, 1.0, 1.01) == 0, "nearly alike: rank 0 has the engine beside its layers then"
    assert chosen(1.0, 9.0) == 1, "the whole target on the better one of two"


def test_a_rank_that_is_too_slow_for_the_draft_does_not_get_it() -> None:
    """One that guesses more slowly than stages verify would hold all of them up."""
    heavy = Sizes((90,) * 3, 10)
    assert chosen(1.0, 1.0, 5.0, 1.0) == chosen(1.0, 1.0, 5.0, 1.0, draft=SMALL) == 2
    assert chosen(1.0, 1.0, 5.0, 1.0, draft=heavy) == 0


def test_numerics_are_those_of_the_ranks_that_have_the_target() -> None:
    """Rank 0 has a GPU, is the fastest, and therefore no draft."""
    target, drafts, asked = (
        read_model_info(TARGET),
        [read_model_info(DRAFT)],
        ASKED.changed(n_gpu_layers=(AUTO_LAYERS,)),
    )
    first, *others = ranks(1e-12, 2e-12, 4e-12)
    hosts = [replace(first, offloads=True, gpus=(("CUDA0", 8 << 30),), exact_rows=((4, "abcdef"),)), *others]
    plan = lay_out(asked, hosts, target, drafts, 512, 100)
    assert [stages[0].rank for stages in plan.assignment.drafts] == [1] and not plan.numerics.blocks
    assert plan == lay_out(asked.changed(draft_rank=1), hosts, target, drafts, 512, 100)
    assert plan.numerics.name == "exact-gpu-abcd" and plan.numerics.at_once == 4


def test_cache_types_are_those_of_the_ranks_that_have_the_target() -> None:
    first, *others = ranks(1.0, 1.0, 1.0)
    hosts = [replace(first, offloads=True, gpu_names=("CUDA0",), gpus=(("CUDA0", 8 << 30),)), *others]
    asked = ASKED.changed(n_gpu_layers=(ALL_LAYERS, 0, 0), cache_type_k="q8_0", cache_type_v="q8_0")
    with pytest.raises(UserError, match="--numerics exact needs types of its own"):
        lay_out(asked, hosts, read_model_info(TARGET), [read_model_info(DRAFT)], 512, 100)


def test_what_was_said_stands() -> None:
    target, draft = read_model_info(TARGET), read_model_info(DRAFT)

    def planned(**options: Any) -> int:
        plan = lay_out(ASKED.changed(**options), ranks(1.0, 1.0, 2.0), target, [draft], 512, 100)
        return plan.assignment.drafts[0][0].rank

    assert planned() == 2 and planned(draft_rank=1) == 1 and planned(draft_rank=0) == 0
    for options in (
        {"layer_split": "4,5"},
        {"lookup": True},
        {"pace": Pace.parse("pipeinfer-c")},
        {"n_gpu_layers": (9, 0, 0)},
    ):
        assert not ASKED.changed(**options).may_choose_draft_rank and planned(**options) == 0
    assert ASKED.changed(threads=(1, 2, 4)).may_choose_draft_rank, "threads come with a rank, whatever it does"


@pytest.mark.parametrize("seed", range(60))
def test_no_other_rank_would_leave_a_clearly_faster_slowest_stage(seed: int) -> None:
    rng = random.Random(seed)
    speeds = [rng.choice([1.0, 1.5, 2.0, 4.0]) for _ in range(rng.randint(2, 6))]

    def slowest(rank: int) -> float:
        hosts = ranks(*speeds)
        plan = assign(len(hosts), [SMALL], LAYERS, None, None, (), [host.speed for host in hosts], rank)
        seconds = [LayerSpeed(each).seconds(LAYERS.layer_bytes, LAYERS.output_bytes) for each in speeds]
        assert rank not in {stage.rank for stage in plan.stages} and plan.drafts[0][0].rank == rank
        return max(sum(seconds[stage.rank][stage.first : stage.last]) for stage in plan.stages)

    found = chosen(*speeds)
    assert slowest(found) <= CLEAR_GAIN * min(map(slowest, range(len(speeds))))
    assert found == 0 or slowest(0) >= CLEAR_GAIN * slowest(found)


def test_ranks_that_are_not_alike_are_all_timed() -> None:
    hosts = [replace(host, name="a") for host in ranks(1.0, 1.0, 1.0)]
    for threads, expected in (((1, 2, 2), [0, 1, 2]), ((2, 2, 2), [])):
        assert timed_ranks(ASKED.changed(threads=threads), hosts) == expected
    assert timed_ranks(ASKED.changed(threads=(1, 2, 2), draft_rank=0), hosts) == []
    assert timed_ranks(ASKED.changed(threads=(1, 2, 2), draft_rank=1), hosts) == [0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_rank": 3}, "--draft-rank 3: the highest rank is 2; give one up to that, or start more"),
        ({"draft_rank": 1, "drafts": (DRAFT, DRAFT)}, "--draft-rank 1 is for one draft .* here is 2 drafts"),
        ({"draft_rank": 2, "lookup": True}, "here is --lookup"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    asked, info = ASKED.changed(**options), read_model_info(DRAFT)
    with pytest.raises(UserError, match=message):
        lay_out(asked, ranks(1.0, 1.0, 1.0), read_model_info(TARGET), [info] * len(asked.models.drafts), 512, 100)


WORDS = ["-p", "def fibonacci(n):", "-n", "40", "-t", "1", "--ignore-eos"]


@pytest.mark.parametrize(("n_ranks", "rank"), [(2, 1), (3, 1)])
def test_a_job_whose_draft_is_elsewhere(tmp_path: Path, n_ranks: int, rank: int) -> None:
    trace = tmp_path / "trace.json"
    found = run_json(
        n_ranks, [*WORDS, "--temp", "0", "--policy", "speculative", "--draft-rank", str(rank), "--trace", str(trace)]
    )
    assert found["tokens"] == plain_tokens_after(TARGET, found, 40)
    assert [each["role"] for each in found["ranks"]][rank] == "draft" and found["ranks"][0]["role"][:7] == "stage 0"
    assert found["settings"].endswith(f"draft-rank {rank}")
    assert found["speculation"]["acceptance_rate"] > 0.1
    names = {
        event["args"]["name"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert f"rank {rank}: draft" in names


def test_many_texts_with_a_draft_elsewhere(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{i}(x):", "seed": i}) + "\n" for i in range(6)))
    texts = []
    for n_ranks, words in ((1, ["-md", "none"]), (3, ["--draft-rank", "2"])):
        out = tmp_path / f"{n_ranks}.jsonl"
        done = finish(
            n_ranks, ["batch", str(prompts), "-o", str(out), "-n", "16", "-t", "1", "--parallel", "3", *words]
        )
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        texts.append(sorted(json.dumps([row["index"], row["text"]]) for row in rows))
    assert texts[0] == texts[1]
