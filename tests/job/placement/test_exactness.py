"""Whether a job with exact numerics repacks weights: what ranks must agree on, what the plan counts, and its texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.hosts.free_memory import FreeMemory
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deploy import NOT_REPACKED, OTHER_NUMERICS, DoesNotFit, deploy
from pipeinfer.job.placement.deployment import N_CELLS_SPARE, Deployment, lay_out
from pipeinfer.job.placement.memory import CELLS_PADDING
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.llama.params import TypeRows, matrix_bytes
from pipeinfer.models.llama.repacking import repacked_types
from pipeinfer.policies import Iterative
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import run_json

Q4_0, Q4_K = 2, 12
HERE = Host("a", frozenset(range(8)), 8, repacked=((Q4_0, 32, "x"), (Q4_K, 3, "y")))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(n_layer=6, n_embd=512, n_ff=1024, n_vocab=2048)
    return write_model(tmp_path_factory.mktemp("repack") / "model.gguf", shape, "Q4_K_M")


@pytest.fixture(scope="module")
def info(path: Path) -> ModelInfo:
    return read_model_info(path)


def plan(info: ModelInfo, *hosts: Host, **options: Any) -> Deployment:
    return lay_out(RunOptions(model=info.path, policy=Iterative(), **options), hosts, info, [], 512, 100)


def test_all_ranks_must_repack_alike(info: ModelInfo) -> None:
    assert plan(info, HERE, replace(HERE, name="b")).repacked == (TypeRows(Q4_K, 3),)
    other = replace(HERE, repacked=((Q4_0, 32, "x"), (Q4_K, 3, "z")))
    for hosts in ((HERE, other), (HERE, replace(HERE, repacked=()))):
        assert plan(info, *hosts).repacked == ()
    assert plan(info, HERE, repack=False).repacked == () == plan(info, HERE, numerics="fast").repacked


def test_repacked_weights_are_counted(info: ModelInfo) -> None:
    repacked, mapped = plan(info, HERE).memory[0], plan(info, HERE, repack=False).memory[0]
    assert mapped.mapped == repacked.weights == info.n_bytes and mapped.weights == repacked.mapped == 0
    apart = plan(info, HERE, HERE).memory
    assert all(0 < each.loading <= each.weights for each in apart), "a slice is in memory too while it is loaded"
    fast, no_repack = (plan(info, HERE, numerics="fast", repack=repack).memory[0] for repack in (True, False))
    assert fast.weights == no_repack.mapped == info.n_bytes


def test_weights_are_mapped_where_memory_is_short(info: ModelInfo) -> None:
    options, needed = RunOptions(model=info.path, policy=Iterative()), plan(info, HERE).memory[0].needed
    enough, short = (
        deploy(options, [replace(HERE, memory=FreeMemory(n, n))], info, 512, 100) for n in (needed, needed - 1)
    )
    name = enough.numerics
    assert enough.repacked and not enough.notes and name.startswith("exact-q4_k.")
    assert not short.repacked and short.numerics == "exact"
    assert short.notes == (NOT_REPACKED.format(name, "exact"),)


def test_what_goes_on_has_the_numerics_with_which_it_was_begun(info: ModelInfo) -> None:
    needed = plan(info, HERE).memory[0].needed
    enough, short = (replace(HERE, memory=FreeMemory(n, n)) for n in (needed, needed - 1))
    options = RunOptions(model=info.path, policy=Iterative())
    name = deploy(options, [enough], info, 512, 100).numerics

    def go_on(kept: str, host: Host, **more: Any) -> Deployment:
        return deploy(replace(options, kept_numerics=kept, **more), [host], info, 512, 100)

    assert go_on("exact", enough).numerics == "exact" and not go_on("exact", enough).repacked
    assert go_on(name, enough).numerics == name
    with pytest.raises(DoesNotFit, match=f"begun with numerics {name}, --allow-other-numerics goes on") as caught:
        go_on(name, short)
    assert caught.value.deployment.repacked, "its numbers are those of what is missing"
    other = go_on(name, short, allow_other_numerics=True)
    assert other.numerics == "exact" and OTHER_NUMERICS.format(name, "exact") in other.notes
    with pytest.raises(UserError, match="begun with numerics fast, and here they are"):
        go_on("fast", enough)


def test_prompts_that_are_read_at_a_time_share_the_planned_cells(info: ModelInfo) -> None:
    cell_bytes = sum(info.kv_bytes_per_cell)
    options, n_ctx = RunOptions(model=info.path, policy=Iterative()), 4096

    def kv(n_parallel: int, **changes: Any) -> int:
        asked = replace(options, parallel=n_parallel, **changes)
        return lay_out(asked, [HERE], info, [], n_ctx, n_ctx).memory[0].kv // cell_bytes

    assert kv(4, numerics="fast") == n_ctx + N_CELLS_SPARE
    assert kv(1) == 2 * n_ctx + N_CELLS_SPARE, "one prompt may fill the context"
    assert kv(1) < kv(4) <= 2 * (n_ctx + N_CELLS_SPARE) + 4 * CELLS_PADDING, "a cache for each, of all rows together"


@pytest.mark.ranks
@pytest.mark.parametrize("repack", ["--repack", "--no-repack"])
def test_texts_are_the_same_under_every_policy_and_split(path: Path, info: ModelInfo, repack: str) -> None:
    if not {type for type, _, _ in repacked_types()} & matrix_bytes(info).keys():
        pytest.skip("this libggml repacks nothing of the model")
    prompt = ["-m", str(path), "-p", "def fibonacci(n):", "-n", "48", "--temp", "0", "--ignore-eos", "-t", "1", repack]
    asked: list[tuple[int, list[str]]] = [
        (1, ["-md", "none"]), (2, ["-md", "none"]), (3, ["-md", "none", "--layer-split", "1,3,2"]),
        *((3, ["-md", str(path), "--policy", policy]) for policy in ("pipeinfer", "pipedec", "flowspec")),
    ]  # fmt: skip
    texts = [run_json(n_ranks, [*prompt, *words])["tokens"] for n_ranks, words in asked]
    assert all(text == texts[0] for text in texts)
