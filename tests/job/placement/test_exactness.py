"""Whether a job with exact numerics repacks weights, and computes rows in groups: what ranks must agree on, what the
plan counts, and its texts."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.cluster.hosts.host import FreeMemory, Host
from pipeinfer.errors import UserError
from pipeinfer.job.placement.job_plan import CELLS_PADDING, N_CELLS_SPARE, JobPlan
from pipeinfer.job.placement.numerics import NumericsPlan
from pipeinfer.job.planning.deploy import NOT_REPACKED, OTHER_NUMERICS, DoesNotFit
from pipeinfer.models.demo import DRAFT
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.gguf.slice import slice_bytes
from pipeinfer.models.llama.params import GROUP, GROUP_CELLS, MANY, MANY_TILED, TILED_ROWS, TypeRows, matrix_bytes
from pipeinfer.models.llama.repacking import grouped_types, repacked_types
from pipeinfer.policies import Iterative, PipeInfer
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import finish, run_json, start
from tests.support.planned import deploy, lay_out, options_of

Q4_0, Q4_K, Q6_K = 2, 12, 14
HERE = Host("a", frozenset(range(8)), 8, repacked=((Q4_0, 32, "x"), (Q4_K, 3, "y")))
GROUPED = replace(HERE, grouped=tuple((type, n, f"z{type}{n}") for type in range(31) for n in (GROUP, TILED_ROWS)))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(n_layer=6, n_embd=512, n_ff=1024, n_vocab=2048)
    return write_model(tmp_path_factory.mktemp("repack") / "model.gguf", shape, "Q4_K_M")


@pytest.fixture(scope="module")
def info(path: Path) -> ModelInfo:
    return read_model_info(path)


def plan(info: ModelInfo, *hosts: Host, **options: Any) -> JobPlan:
    return lay_out(options_of(model=info.path, policy=Iterative(), **options), hosts, info, [], 512, 100)


def test_all_ranks_must_repack_alike(info: ModelInfo) -> None:
    assert plan(info, HERE, replace(HERE, name="b")).numerics.repacked == (TypeRows(Q4_K, 3),)
    other = replace(HERE, repacked=((Q4_0, 32, "x"), (Q4_K, 3, "z")))
    for hosts in ((HERE, other), (HERE, replace(HERE, repacked=()))):
        assert plan(info, *hosts).numerics.repacked == ()
    for changed in ({"repack": False}, {"numerics": "fast"}):
        assert plan(info, HERE, **changed).numerics.repacked == ()


def test_a_rank_that_drafts_alone_may_repack_otherwise(info: ModelInfo) -> None:
    other = replace(HERE, repacked=((Q4_0, 32, "x"), (Q4_K, 3, "z")))
    options = options_of(model=info.path, drafts=(DRAFT,), policy=PipeInfer())
    drafts = [read_model_info(DRAFT)]
    alike, mixed = (lay_out(options, [first, HERE, HERE], info, drafts, 512, 100) for first in (HERE, other))
    assert alike.numerics == mixed.numerics and mixed.numerics.repacked


def test_repacked_weights_are_counted(info: ModelInfo) -> None:
    repacked, mapped = plan(info, HERE).memory[0], plan(info, HERE, repack=False).memory[0]
    assert mapped.mapped == repacked.weights == info.n_bytes and mapped.weights == repacked.mapped == 0
    cut = plan(info, HERE, HERE)
    apart, last, head = cut.memory, cut.assignment.stages[-1], info.tensor("output.weight")
    assert all(0 < each.loading <= each.weights for each in apart), "a slice is in memory too while it is loaded"
    assert head and apart[1].weights == slice_bytes(info, last.first, last.last) + head.n_bytes, "as the table too"
    fast, no_repack = (plan(info, HERE, numerics="fast", repack=repack).memory[0] for repack in (True, False))
    assert fast.weights == no_repack.mapped == info.n_bytes


def test_weights_are_mapped_where_memory_is_short(info: ModelInfo) -> None:
    options, needed = options_of(model=info.path, policy=Iterative()), plan(info, HERE).memory[0].needed
    enough, short = (
        deploy(options, [replace(HERE, memory=FreeMemory(n, n))], info, 512, 100) for n in (needed, needed - 1)
    )
    name = enough.numerics.name
    assert enough.numerics.repacked and not enough.notes and name.startswith("exact-q4_k.")
    assert not short.numerics.repacked and short.numerics.name == "exact"
    assert short.notes == (NOT_REPACKED.format(name, "exact"),)


def test_what_goes_on_has_the_numerics_with_which_it_was_begun(info: ModelInfo) -> None:
    needed = plan(info, HERE).memory[0].needed
    enough, short = (replace(HERE, memory=FreeMemory(n, n)) for n in (needed, needed - 1))
    options = options_of(model=info.path, policy=Iterative())
    name = deploy(options, [enough], info, 512, 100).numerics.name

    def go_on(kept: str, host: Host, **more: Any) -> JobPlan:
        return deploy(options.changed(resumed=kept, **more), [host], info, 512, 100)

    exact = go_on("exact", enough).numerics
    assert exact.name == "exact" and not exact.repacked
    assert go_on(name, enough).numerics.name == name
    with pytest.raises(DoesNotFit, match=f"begun with numerics {name}, --allow-other-numerics goes on") as caught:
        go_on(name, short)
    assert caught.value.plan.numerics.repacked, "its numbers are those of what is missing"
    other = go_on(name, short, allow_other_numerics=True)
    assert other.numerics.name == "exact" and OTHER_NUMERICS.format(name, "exact") in other.notes
    with pytest.raises(UserError, match="begun with numerics fast, and here they are"):
        go_on("fast", enough)


def test_many_requests_have_rows_in_groups(info: ModelInfo) -> None:
    types = sorted(matrix_bytes(info))
    groups, parts = plan(info, GROUPED, n_expected=MANY), plan(info, GROUPED, n_expected=MANY - 1)
    assert groups.numerics.repacked == tuple(TypeRows(type, GROUP, True) for type in types) and Q6_K in types
    assert groups.numerics.name.startswith("exact-q4_k.x4-q6_k.x4-"), "a name of its own"
    assert parts.numerics.repacked == plan(info, HERE, n_expected=MANY).numerics.repacked == (TypeRows(Q4_K, 3),)
    assert parts.numerics == plan(info, HERE).numerics == plan(info, GROUPED).numerics
    more = groups.memory[0].kv - plan(info, HERE, n_expected=MANY).memory[0].kv
    assert more == GROUP_CELLS * sum(info.kv_bytes_per_cell), "rows that fill groups up have cells"
    tiled = plan(info, GROUPED, n_expected=MANY_TILED).numerics
    assert tiled.repacked == tuple(TypeRows(type, TILED_ROWS, True) for type in types)
    assert tiled.name.startswith("exact-q4_k.x8-q6_k.x8-") and groups.numerics.name.split("-")[-1] not in tiled.name
    for n_expected, name in ((MANY, groups.numerics.name), (MANY_TILED, tiled.name), (200, tiled.name)):
        assert {plan(info, *[GROUPED] * n, n_expected=n_expected).numerics.name for n in (1, 2, 3)} == {name}
    untiled = replace(GROUPED, grouped=tuple(each for each in GROUPED.grouped if each[:2] != (Q6_K, TILED_ROWS)))
    assert plan(info, untiled, n_expected=200).numerics.name == groups.numerics.name
    repacked = replace(GROUPED, repacked=(*GROUPED.repacked, (Q6_K, 3, "b")))
    assert ".x4-" in plan(info, repacked, n_expected=200).numerics.name, "no weights are left that tiled kernels take"
    for hosts in ((GROUPED, HERE), (GROUPED, replace(GROUPED, grouped=GROUPED.grouped[:-1]))):
        found = plan(info, *hosts, n_expected=MANY).numerics
        assert found.repacked == parts.numerics.repacked, "not all hosts add up alike"
    other = replace(GROUPED, grouped=tuple((type, n, "other") for type, n, _ in GROUPED.grouped))
    assert plan(info, other, n_expected=MANY).numerics.name != groups.numerics.name
    for options in ({"repack": False}, {"numerics": "fast"}):
        assert plan(info, GROUPED, n_expected=MANY, **options).numerics.repacked == ()


def test_what_goes_on_keeps_groups_or_parts(info: ModelInfo) -> None:
    def go_on(kept: str, n_requests: int, host: Host = GROUPED, **more: Any) -> NumericsPlan:
        options = options_of(model=info.path, policy=Iterative(), n_expected=n_requests, resumed=kept, **more)
        return deploy(options, [host], info, 512, 100).numerics

    groups, small, parts = (go_on("", n_requests).name for n_requests in (16, 8, 1))
    assert len({groups, small, parts, "exact"}) == 4
    for name in (groups, small, parts, "exact"):
        assert [go_on(name, n_requests).name for n_requests in (1, 16)] == [name, name]
    with pytest.raises(UserError, match=f"begun with numerics {groups}, and here they are {parts}"):
        go_on(groups, 16, HERE)
    assert go_on(groups, 16, HERE, allow_other_numerics=True).name == parts
    needed = plan(info, GROUPED, n_expected=16).memory[0].needed
    short = replace(GROUPED, memory=FreeMemory(needed - 1, needed - 1))
    assert go_on("", 16, short).name == "exact" and not go_on("", 16, short).repacked


def test_without_memory_for_groups_rows_come_as_in_the_file(tmp_path: Path) -> None:
    """Also of types that libggml does not repack: rows in groups are computed from copies of the weights."""
    found = read_model_info(write_model(tmp_path / "f16.gguf", Shape(), "F16"))
    options = options_of(model=found.path, policy=Iterative(), n_expected=MANY)
    groups = deploy(options, [GROUPED], found, 512, 100)
    needed = groups.memory[0].needed
    short = deploy(options, [replace(GROUPED, memory=FreeMemory(needed - 1, needed - 1))], found, 512, 100)
    assert groups.numerics.repacked and not short.numerics.repacked and short.numerics.name == "exact"
    assert short.notes == (NOT_REPACKED.format(groups.numerics.name, "exact"),)


def test_prompts_that_are_read_at_a_time_share_the_planned_cells(info: ModelInfo) -> None:
    cell_bytes = sum(info.kv_bytes_per_cell)
    options, n_ctx = options_of(model=info.path, policy=Iterative()), 4096

    def kv(n_parallel: int, **changes: Any) -> int:
        asked = options.changed(parallel=n_parallel, **changes)
        return lay_out(asked, [HERE], info, [], n_ctx, n_ctx).memory[0].kv // cell_bytes

    assert kv(4, numerics="fast") == n_ctx + N_CELLS_SPARE
    assert kv(1) == 2 * n_ctx + N_CELLS_SPARE, "one prompt may fill the context"
    assert kv(1) < kv(4) <= 2 * (n_ctx + N_CELLS_SPARE) + 4 * CELLS_PADDING, "a cache for each, of all rows together"


@pytest.mark.ranks
@pytest.mark.parametrize("repack", ["--repack", "--no-repack"])
def test_texts_are_the_same_under_every_policy_and_split(path: Path, info: ModelInfo, repack: str) -> None:
    if not {type for type, _, _ in repacked_types()} & matrix_bytes(info).keys():
        pytest.skip("this libggml repacks nothing of the model")
    prompt = ["-m", str(path), "-p", "def fibonacci(n):", "-n", "24", "--temp", "0", "--ignore-eos", "-t", "1", repack]
    asked: list[tuple[int, list[str]]] = [
        (1, ["-md", "none"]),
        (2, ["-md", "none"]),
        (3, ["-md", "none", "--layer-split", "1,3,2"]),
        *((3, ["-md", str(path), "--policy", policy]) for policy in ("pipeinfer", "pipedec", "flowspec")),
    ][:: 1 if repack == "--repack" else 3]  # rows that are repacked are what may differ
    texts = [run_json(n_ranks, [*prompt, *words])["tokens"] for n_ranks, words in asked]
    assert all(text == texts[0] for text in texts)


def write_requests(path: Path, n_tokens: int) -> Path:
    """16 requests, greedy and sampled, of short prompts and of some that are read in blocks."""
    requests = [
        {
            "prompt": f"def f{n}(a):" + " return the sum of all that is in the list" * (6 * (n % 5 == 2)),
            "seed": n,
            "temperature": 0.9 * (n % 2),
            "max_tokens": n_tokens + n % 4,
            "ignore_eos": True,
            "logprobs": 0,
        }
        for n in range(16)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in requests))
    return path


def texts_of(output: Path) -> dict[int, tuple[str, ...]]:
    """By request: its text and its tokens' log probabilities; a text alone hides bytes that are no UTF-8."""
    found = map(json.loads, output.read_text().splitlines())
    return {each["index"]: (each["text"], *map(str, each["logprobs"]["token_logprobs"])) for each in found}


def skip_without_groups(info: ModelInfo) -> None:
    if not {type for type, *_ in grouped_types()} >= matrix_bytes(info).keys():
        pytest.skip("this libggml gives rows other bits in other groups")


@pytest.mark.ranks
def test_many_requests_have_the_same_texts_under_every_policy_and_split(
    path: Path, info: ModelInfo, tmp_path: Path
) -> None:
    """With 16 and more of them open at a time."""
    skip_without_groups(info)
    source = write_requests(tmp_path / "asked.jsonl", 12)
    asked: list[tuple[int, list[str]]] = [
        (1, ["-np", "16"]),
        (2, ["-np", "16"]),
        (3, ["-np", "16", "--layer-split", "1,3,2"]),
        *((3, ["-np", "16", "-md", str(path), "--policy", policy]) for policy in ("auto", "pipeinfer")),
    ]
    found: list[tuple[list[str], dict[int, tuple[str, ...]]]] = []
    for n_ranks, words in asked:
        output = tmp_path / f"{len(found)}.jsonl"
        draft = [] if "-md" in words else ["-md", "none"]
        done = finish(
            n_ranks, ["batch", str(source), "-o", str(output), "-m", str(path), "-t", "1", "-v", *draft, *words]
        )
        assert done.returncode == 0, done.stderr
        assert len(output.read_text().splitlines()) == 16
        found.append((re.findall(r"exact-[-.\w]+", done.stderr)[:1], texts_of(output)))
    name, texts = found[0]
    assert all(each == (name, texts) for each in found) and len(set(texts.values())) > 12
    in_parts = any(type == Q4_K and n_rows < GROUP for type, n_rows, _ in repacked_types())
    assert (".x" in str(name)) == in_parts


@pytest.mark.ranks
def test_many_requests_go_on_in_groups_when_few_are_open(path: Path, info: ModelInfo, tmp_path: Path) -> None:
    skip_without_groups(info)
    source, notes = write_requests(tmp_path / "asked.jsonl", 60), tmp_path / "notes"
    common = ["batch", str(source), "-m", str(path), "-md", "none", "-t", "1"]
    slow = ["--pace", "ethernet:qwen-1.5b-0.5b*2"]  # no text is complete when the job is killed
    job = start(1, [*common, *slow, "-np", "16", "-o", str(tmp_path / "again.jsonl"), "--resume", str(notes)])
    end_s = time.monotonic() + 60
    while not (notes.exists() and notes.stat().st_size > 3000):
        assert job.poll() is None and time.monotonic() < end_s
        time.sleep(0.005)
    os.kill(job.pid, signal.SIGKILL)
    job.communicate(timeout=30)
    assert not texts_of(tmp_path / "again.jsonl"), "no text was complete"
    again = finish(2, [*common, "-np", "2", "-o", str(tmp_path / "again.jsonl"), "--resume", str(notes)])
    whole = finish(1, [*common, "-np", "16", "-o", str(tmp_path / "whole.jsonl")])
    assert (again.returncode, whole.returncode) == (0, 0), again.stderr + whole.stderr
    assert texts_of(tmp_path / "again.jsonl") == texts_of(tmp_path / "whole.jsonl")
