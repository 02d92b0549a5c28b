"""--fit: what a plan gives up where it does not fit, in which order, and what stays as it was asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeinfer.cli.plan import plan_command
from pipeinfer.cluster.hosts.host import FreeMemory, Host
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO_LAYERS
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.deploy import DoesNotFit, deploy
from pipeinfer.job.planning.fit import UNPROVEN, Fitted, fewest
from pipeinfer.job.planning.prepare import deploy_largest, with_trained_context
from pipeinfer.job.requests.request import GenerationRequest, least_context
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from tests.support.gguf_factory import Shape, write_model
from tests.support.planned import options_of

MIB = 1 << 20
TRAINED = 8192
SPARE = 16  # MiB


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    """Its keys and values take more than its weights."""
    shape = Shape(n_layer=8, n_embd=512, n_head=8, n_head_kv=8, n_ff=1024)
    return read_model_info(write_model(tmp_path_factory.mktemp("models") / "dense.gguf", shape))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    """Most of it is experts."""
    shape = Shape(n_layer=6, n_embd=256, n_head=4, n_head_kv=4, n_ff=1024, n_expert=8)
    return read_model_info(write_model(tmp_path_factory.mktemp("models") / "experts.gguf", shape))


def host(name: str = "a", memory: int = 1 << 40, gpu: int = 0, **more: Any) -> Host:
    """`gpu`: bytes that are free on its GPU; 0: it has none."""
    if gpu:
        more |= {"offloads": True, "gpu_names": ("CUDA0",), "gpus": (("CUDA0", gpu),)}
    return Host(name, frozenset(range(4)), 4, FreeMemory(memory), **more)


def asked(info: ModelInfo, **values: Any) -> RunOptions:
    return options_of(info.path, **{"fit_target": SPARE, "fit": True} | values)


def plan_of(
    options: RunOptions, hosts: Sequence[Host], info: ModelInfo, n_ctx: int = TRAINED, least: int = 0
) -> JobPlan:
    return deploy(options, hosts, info, [], n_ctx, 100, least)


def note(plan: JobPlan) -> str:
    (line,) = [line for line in plan.warnings if line.startswith("--fit chose")]
    return line


def placed(plan: JobPlan) -> list[tuple[int, int]]:
    """Of each rank, layers on GPUs and layers whose experts are not."""
    return [(rank.target.n_gpu_layers, rank.target.places.n_cpu_moe) for rank in plan.ranks]


def on_gpus(info: ModelInfo, n_ctx: int = TRAINED, **values: Any) -> int:
    """Bytes that one rank puts on its GPU."""
    options = asked(info, n_gpu_layers=(ALL_LAYERS,), **values)
    return plan_of(options, [host(gpu=1 << 40)], info, n_ctx).ranks[0].gpu_bytes


# -- the context


def test_what_fits_is_as_it_was_without_memory_to_spare(dense: ModelInfo) -> None:
    plain = plan_of(asked(dense, fit=False), [host()], dense)
    tight = [host(memory=plain.memory[0].needed)]
    for options in (asked(dense), asked(dense, fit_target=None), asked(dense, fit=None)):
        plan = plan_of(options, tight, dense, least=4096)
        assert plan.decisions == plain.decisions and not plan.fitted and "--fit" not in str(plan.warnings)


def test_the_largest_context_that_leaves_memory_is_chosen_and_said(dense: ModelInfo) -> None:
    whole, small = (plan_of(asked(dense), [host()], dense, n_ctx).memory[0].needed for n_ctx in (TRAINED, 4096))
    tight = [host(memory=(whole + small) // 2 + SPARE * MIB)]
    plan = plan_of(asked(dense), tight, dense, least=4096)
    n_ctx, (spare,) = plan.capacity.n_ctx, plan.spare_memory
    assert 4096 < n_ctx < TRAINED and n_ctx % 256 == 0 and spare is not None and spare >= SPARE * MIB
    more = plan_of(asked(dense), [host()], dense, n_ctx + 256).memory[0].needed
    assert more + SPARE * MIB > tight[0].memory.host, "the largest"
    assert f"-c {n_ctx} (of {TRAINED})" in note(plan) and f"{SPARE} MiB of each" in note(plan)
    assert plan.hosts == tuple(tight), "its hosts have what they have"
    roomy = plan_of(asked(dense, fit_target=0), tight, dense, least=4096)
    assert roomy.capacity.n_ctx > n_ctx


def test_less_than_the_least_context_is_refused_as_before_and_with_what_was_tried(dense: ModelInfo) -> None:
    small = plan_of(asked(dense), [host()], dense, 4096).memory[0].needed
    tight = [host(memory=small + SPARE * MIB - 1)]
    with pytest.raises(DoesNotFit) as plain:
        plan_of(asked(dense, fit=False), tight, dense, least=4096)
    with pytest.raises(DoesNotFit) as refused:
        plan_of(asked(dense), tight, dense, least=4096)
    assert str(refused.value) == f"{plain.value}; {refused.value.tried}"
    assert re.match(rf"--fit found nothing: with -c 4096 \(of {TRAINED}\) .* missing", refused.value.tried)
    with pytest.raises(DoesNotFit) as as_before:
        plan_of(asked(dense, fit=None, ctx_size=TRAINED), tight, dense, least=4096)
    assert str(as_before.value) == str(plain.value), "-c N is what the user wants"
    assert plan_of(asked(dense), tight, dense, least=3000).capacity.n_ctx == 3840
    with pytest.raises(DoesNotFit) as whole:
        plan_of(asked(dense), tight, dense)
    assert not whole.value.tried, "nothing can be given up"


def test_a_gibibyte_or_a_20th_part_stays_free_by_default(dense: ModelInfo) -> None:
    needed = plan_of(asked(dense), [host()], dense, TRAINED).memory[0].needed
    options = asked(dense, fit_target=None)
    with pytest.raises(DoesNotFit, match="1 GiB or 5% are to stay free"):
        plan_of(options, [host(memory=needed - 1)], dense, least=4096)
    whole = plan_of(options, [host()], dense, 200_000).memory[0].needed
    plan = plan_of(options, [host(memory=whole - 1)], dense, 200_000, least=4096)
    (spare,) = plan.spare_memory
    assert spare is not None and 1 << 30 <= spare < (1 << 30) + 50 * MIB


def test_ranks_of_several_hosts_are_split_so_that_each_has_memory_to_spare(dense: ModelInfo) -> None:
    needed = [memory.needed for memory in plan_of(asked(dense), [host("a"), host("b")], dense, 6000).memory]
    tight = [host("a", needed[0] + SPARE * MIB), host("b", needed[1] + SPARE * MIB)]
    plan = plan_of(asked(dense), tight, dense, least=4096)
    assert 5600 <= plan.capacity.n_ctx < TRAINED and all((n or 0) >= SPARE * MIB for n in plan.spare_memory)


def test_a_ranks_own_limit_cuts_the_context_too(dense: ModelInfo) -> None:
    needed = plan_of(asked(dense), [host()], dense, 6000).memory[0].needed
    limited = replace(host(), memory=FreeMemory(1 << 40, process=needed))
    plan = plan_of(asked(dense), [limited], dense, least=4096)
    assert 5632 <= plan.capacity.n_ctx <= 6144 and plan.memory[0].needed <= needed


def test_c_0_is_what_the_model_was_trained_for_and_may_be_cut(dense: ModelInfo) -> None:
    options = with_trained_context(options_of(dense.path, ctx_size=0), dense)
    assert options.context.ctx_size == TRAINED and options.context.may_fit
    assert not with_trained_context(options_of(dense.path, ctx_size=0, fit=False), dense).context.may_fit
    assert with_trained_context(options_of(dense.path), dense).context.ctx_size is None
    assert not options_of(dense.path, ctx_size=100).context.may_fit


def test_the_least_context_has_room_for_what_is_asked() -> None:
    def least(n_ctx: int, n_prompt: int, **values: Any) -> int:
        return least_context(options_of(**values).context, n_ctx, n_prompt)

    assert least(131072, 10) == 4096 and least(2000, 10) == 2000
    assert least(131072, 10, predict=6000) == 6010 and least(131072, 10, fit_ctx=512) == 512
    assert least(131072, 8000) == 8256 and least(8010, 10, predict=8000) == 8010


def test_a_request_is_cut_to_the_context_and_keeps_what_n_says() -> None:
    sampling = SamplingParams()
    open_end = GenerationRequest((1, 2, 3), 97, 100, sampling, frozenset())
    assert (open_end.within(50).n_ctx, open_end.within(50).n_predict) == (50, 47) and open_end.within(200) == open_end
    assert replace(open_end, n_predict=20).within(50).n_predict == 20


# -- devices


def test_layers_leave_a_gpu_that_is_too_small_and_the_context_stays(dense: ModelInfo) -> None:
    whole = on_gpus(dense)
    plan = plan_of(asked(dense, n_gpu_layers=(ALL_LAYERS,)), [host(gpu=whole // 2 + SPARE * MIB)], dense, least=4096)
    ((n_on, n_moved),) = placed(plan)
    assert 0 < n_on < 8 and not n_moved and plan.capacity.n_ctx == TRAINED
    assert f"-ngl {n_on}:" in note(plan) and (plan.spare_on_gpus[0] or 0) >= SPARE * MIB
    options = asked(dense, n_gpu_layers=(n_on + 1,))
    one_more = plan_of(options, [host(gpu=1 << 40)], dense).ranks[0].gpu_bytes
    assert one_more > whole // 2, "the most"
    for given in (AUTO_LAYERS, 7):
        again = plan_of(asked(dense, n_gpu_layers=(given,)), [host(gpu=whole // 2 + SPARE * MIB)], dense)
        assert placed(again) == placed(plan)


def test_experts_leave_before_layers_do(experts: ModelInfo) -> None:
    whole, without = on_gpus(experts), on_gpus(experts, cpu_moe=True)
    assert without < 2 * whole // 3

    def fitted(gpu: int) -> tuple[int, int]:
        options = asked(experts, n_gpu_layers=(ALL_LAYERS,))
        return placed(plan_of(options, [host(gpu=gpu + SPARE * MIB)], experts))[0]

    n_on, n_moved = fitted((whole + without) // 2)
    assert n_on == ALL_LAYERS and 0 < n_moved < 6
    assert fitted(without) == (ALL_LAYERS, 6)
    n_on, n_moved = fitted(without - 1)
    assert 0 < n_on <= 6 and n_moved >= 5, "all experts are gone when a layer goes"


def test_a_rank_with_a_larger_gpu_keeps_all(experts: ModelInfo) -> None:
    whole = on_gpus(experts)
    hosts = [host("a", gpu=whole), host("b", gpu=whole // 5 + SPARE * MIB)]
    options = asked(experts, n_gpu_layers=(ALL_LAYERS,), layer_split="3,3")
    plan = plan_of(options, hosts, experts)
    (_, first), (_, second) = placed(plan)
    assert first == 0 < second and f"-ncmoe 0,{second}" in note(plan)


def test_the_context_gets_smaller_where_hosts_lack_memory_too(dense: ModelInfo) -> None:
    whole = on_gpus(dense)
    on_host = plan_of(asked(dense, n_gpu_layers=(0,)), [host()], dense).memory[0].needed
    hosts = [host(memory=on_host * 2 // 3, gpu=whole // 4 + SPARE * MIB)]
    plan = plan_of(asked(dense, n_gpu_layers=(ALL_LAYERS,)), hosts, dense, least=1024)
    ((n_on, _),) = placed(plan)
    assert 0 < n_on < 8 and 1024 <= plan.capacity.n_ctx < TRAINED
    assert min(filter(None, (*plan.spare_memory, *plan.spare_on_gpus))) >= SPARE * MIB


def test_a_device_that_is_named_keeps_a_layer(dense: ModelInfo) -> None:
    options = asked(dense, n_gpu_layers=(ALL_LAYERS,), device=(("CUDA0",),))
    assert placed(plan_of(options, [host(gpu=on_gpus(dense) // 3 + SPARE * MIB)], dense))[0][0] > 0
    with pytest.raises(DoesNotFit, match=r"-ngl 1 .* are missing"):
        plan_of(options, [host(gpu=SPARE * MIB + 1)], dense)
    plan = plan_of(asked(dense, n_gpu_layers=(ALL_LAYERS,)), [host(gpu=SPARE * MIB + 1)], dense)
    assert placed(plan) == [(0, 0)] and not plan.ranks[0].gpu_bytes


def test_exact_numerics_are_not_claimed_for_devices_that_were_not_tried(dense: ModelInfo) -> None:
    gpu, proof = on_gpus(dense) // 2 + SPARE * MIB, ((4, "abc"),)
    plan = plan_of(asked(dense, n_gpu_layers=(ALL_LAYERS,)), [host(gpu=gpu, exact_rows=proof)], dense)
    assert plan.numerics.at_once == 0 and plan.numerics.name == "exact-gpu" and plan.hosts[0].exact_rows == UNPROVEN
    tried = plan_of(asked(dense, n_gpu_layers=(7,)), [host(gpu=gpu, exact_rows=proof)], dense)
    assert tried.numerics.at_once == 4 and tried.numerics.name == "exact-gpu-abc", "-ngl 7 has tried the CPU too"


# -- cells on disk


def test_cells_that_wait_for_the_disk_are_counted(dense: ModelInfo) -> None:
    options = asked(dense, kv_disk=1 << 30)
    needed = plan_of(asked(dense, kv_disk=0), [host()], dense).memory[0].needed
    plan = plan_of(options, [host(memory=needed + SPARE * MIB)], dense, least=1024)
    assert plan.capacity.n_ctx < TRAINED and plan.kv_disk and (plan.spare_memory[0] or 0) >= SPARE * MIB
    cell_bytes, n_ctx = sum(dense.kv_bytes_per_cell), plan.capacity.n_ctx
    without = plan_of(asked(dense), [host()], dense, n_ctx).memory[0]
    assert plan.memory[0].buffers - without.buffers == (plan.capacity.n_cells + n_ctx) * cell_bytes


# -- many requests


def test_contexts_that_are_halved_are_as_before_and_none_is_below_the_longest_request(dense: ModelInfo) -> None:
    def largest(options: RunOptions, memory: int, least: int) -> JobPlan:
        return deploy_largest(options, [host(memory=memory)], dense, [], 4 * TRAINED, least, TRAINED)

    options = asked(dense, fit=None, parallel=4)
    needed = deploy_largest(options, [host()], dense, [], TRAINED, TRAINED, TRAINED).memory[0].needed
    for least in (100, 5000, TRAINED):
        plan, plain = (largest(each, needed, least) for each in (options, options.changed(fit=False)))
        assert plan.decisions == plain.decisions and plan.capacity.n_ctx == TRAINED and not plan.fitted
    with pytest.raises(DoesNotFit) as plain_error:
        largest(options.changed(fit=False), needed - SPARE * MIB, TRAINED)
    with pytest.raises(DoesNotFit) as error:
        largest(options, needed - SPARE * MIB, TRAINED)
    assert str(error.value).startswith(str(plain_error.value))


def test_many_requests_run_with_fewer_layers_on_a_gpu(dense: ModelInfo) -> None:
    options = asked(dense, fit=None, parallel=4, n_gpu_layers=(ALL_LAYERS,))
    hosts = [host(gpu=on_gpus(dense, 4096, parallel=4) - 1)]
    with pytest.raises(DoesNotFit):
        deploy_largest(options.changed(fit=False), hosts, dense, [], 4 * 4096, 4096, TRAINED)
    plan = deploy_largest(options, hosts, dense, [], 4 * 4096, 4096, TRAINED)
    assert plan.capacity.n_ctx == 4 * 4096 and 0 < placed(plan)[0][0] < 8


# -- jobs that go on


def test_a_job_that_goes_on_has_the_same_layers_experts_and_context(experts: ModelInfo) -> None:
    gpu = on_gpus(experts) // 4 + SPARE * MIB
    options = asked(experts, n_gpu_layers=(ALL_LAYERS,))
    hosts = [host("a", gpu=gpu), host("b", gpu=gpu)]
    first = plan_of(options, hosts, experts, least=4096)
    assert first.fitted and Fitted.parse(first.fitted)
    going_on = options.changed(fitted=first.fitted, resumed=first.numerics.name)
    for change in (-MIB, 0, 3 * MIB, 1 << 30):
        others = [host("a", gpu=gpu + change), host("b", gpu=gpu)]
        plan = plan_of(going_on, others, experts, least=4096)
        assert (
            plan.decisions == first.decisions and plan.fitted == first.fitted and plan.hosts[0].gpus == others[0].gpus
        )
        assert "for the job that goes on" in note(plan)


def test_a_text_that_goes_on_elsewhere_keeps_its_context_or_is_refused(dense: ModelInfo) -> None:
    needed = plan_of(asked(dense), [host()], dense, 6000).memory[0].needed
    first = plan_of(asked(dense), [host(memory=needed + SPARE * MIB)], dense, least=4096)
    going_on = asked(dense, fitted=first.fitted, resumed=first.numerics.name)
    plan = plan_of(going_on, [host("a"), host("b")], dense, least=4096)
    assert plan.capacity.n_ctx == first.capacity.n_ctx < TRAINED and len(plan.ranks) == 2
    with pytest.raises(DoesNotFit):
        plan_of(going_on, [host(memory=needed - 16 * MIB)], dense, least=4096)
    unfitted = asked(dense, resumed=first.numerics.name)
    with pytest.raises(DoesNotFit):
        plan_of(unfitted, [host(memory=needed)], dense, least=4096)


def test_the_fewest_are_found_from_every_expectation_and_nothing_is_tried_twice() -> None:
    for most, needed, near in product(range(9), range(11), range(11)):
        tried = list[int]()

        def lacks(n: int, needed: int = needed, tried: list[int] = tried) -> bool:
            tried.append(n)
            return n < needed

        assert fewest(lacks, most, near) == (needed if needed <= most else None)
        assert len(set(tried)) == len(tried) and set(tried) <= set(range(most + 1))
        assert len(tried) <= 2 or near != needed or needed > most


def test_what_is_no_choice_is_none() -> None:
    choice = Fitted(5120, (3, ALL_LAYERS), (), "4,4", 1)
    assert Fitted.parse(choice.text) == choice
    assert [Fitted.parse(text) for text in ("", "{}", "[1]", '["x",[],[],"",null]', "[1,2,3,4,5]")] == [None] * 5


# -- the command


def call(*words: object) -> tuple[str, str]:
    result = CliRunner().invoke(plan_command, [*map(str, words)], standalone_mode=False)
    if result.exception and not isinstance(result.exception, UserError):
        raise result.exception
    return result.stdout, str(result.exception or "")


def test_plan_says_what_run_would_choose(dense: ModelInfo, tmp_path: Path) -> None:
    needed = plan_of(asked(dense), [host()], dense, 6000).memory[0].needed + SPARE * MIB
    (hosts := tmp_path / "hosts").write_text(f"a cores=4 memory={needed / 1e6:.6f}M gb_per_s=50 gflop_per_s=500\n")
    words = ["--hosts", hosts, "-m", dense.path, "-md", "none", "--no-repack", "-fitt", SPARE]
    out, error = call(*words, "-c", 0)
    (n_ctx,) = re.findall(r"note: --fit chose -c (\d+) \(of 8192\): as asked for, .* missing; 16 MiB", out)
    assert not error and f"context {n_ctx}," in out and 5600 <= int(n_ctx) <= 6144
    for off in (["--no-fit"], ["--fit", "off"], ["--fit=0"], ["-fit", "0"]):
        out, error = call(*words, "-c", 0, *off)
        assert "a has" in error and "it would fit with -c" in error and "--fit" not in out
    assert "it would fit with -c" in call(*words, "-c", TRAINED)[1], "a number is what the user wants"
    assert f"-c {n_ctx} (of 8192)" in call(*words, "-c", TRAINED, "--fit", "on")[0]
    out, error = call(*words, "-c", 0, "--fit-ctx", 7000)
    assert "a has" in error and "note: --fit found nothing: with -c 7000 (of 8192)" in out
