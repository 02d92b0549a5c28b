"""Activations that MPI moves from device to device: where they go so, and that the text stays what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from pipeinfer.cluster.hosts.host import Host
from pipeinfer.errors import ModelFault, UserError
from pipeinfer.job.options.limits import AUTO, OFF, ON
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.values import Backend, Pace
from pipeinfer.job.placement.devices import DevicePlan, plan_devices
from pipeinfer.job.profiling.describe import describe_host, sends_from_device
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.torch.params import torch_version
from pipeinfer.policies import POLICIES
from tests.support.cases import in_long
from tests.support.jobs import finish, run_json
from tests.support.planned import lay_out, options_of

needs_torch = pytest.mark.skipif(not torch_version(), reason="PyTorch is not installed: pip install 'pipeinfer[torch]'")
HOSTS = [Host("node", frozenset(range(8)), 8) for _ in range(4)]
LLAMA, TORCH = Backend(), Backend("torch")
FAST = ["--numerics", "fast", "-md", "none"]
ASKED = ["-p", "def fibonacci(n):", "-n", "48", "-t", "1"]

# --- which ranks ------------------------------------------------------------------------------------------------------


def words(
    options: RunOptions, is_aware: bool | None, gpus: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> list[bool]:
    """What each rank, on what it has of GPUs, comes to. Raises UserError."""

    devices = plan_devices(options.placement, HOSTS)

    def word(rank: int) -> bool:
        def gpu_of(device: DevicePlan) -> str:
            assert device is devices[rank].target
            if gpus[rank] == "lost":
                raise UserError("no such device")
            return gpus[rank]

        monkeypatch.setattr("pipeinfer.job.loading.stages.gpu_of", gpu_of)
        return sends_from_device(options.numerics.gpu_aware, devices, HOSTS[rank], rank, lambda: is_aware)

    return [word(rank) for rank in range(4)]


MIXED = options_of(model=TARGET, backend=(TORCH, TORCH, LLAMA, TORCH))


@pytest.mark.parametrize(
    ("asked", "is_aware", "expected"),
    [
        (AUTO, True, [True, False, False, True]),
        (AUTO, False, [False] * 4),
        (AUTO, None, [False] * 4),
        (ON, True, [True, True, False, True]),
        (ON, None, [True, True, False, True]),
    ],
)
def test_ranks_on_gpus_do_where_mpi_says_that_it_can_and_others_where_asked(
    asked: str, is_aware: bool | None, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = MIXED.changed(gpu_aware=asked)
    with monkeypatch.context() as patch:
        assert words(options, is_aware, ["an H200", "", "", "an H200"], patch) == expected


def test_a_gpu_that_mpi_cannot_read_is_refused_and_one_that_is_not_there_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = MIXED.changed(gpu_aware=ON)
    with pytest.raises(UserError, match=r"^--gpu-aware on: rank 3 \(host node\) is on a GPU.*GPU-aware MPI"):
        words(options, False, ["", "", "", "an H200"], monkeypatch)
    assert words(options, True, ["lost", "", "", "lost"], monkeypatch) == [False, True, False, False]


@pytest.mark.parametrize(
    "options",
    [
        MIXED.changed(gpu_aware=OFF),
        MIXED.changed(gpu_aware=ON, pace=Pace.parse("pipespec")),
        options_of(model=TARGET, gpu_aware=ON),
    ],
)
def test_who_has_no_use_for_it_is_not_asked(options: RunOptions) -> None:
    def never() -> bool:
        raise AssertionError

    assert not any(describe_host(options, HOSTS, rank, never).device_messages for rank in range(4))


def test_only_neighbours_that_both_do_and_have_layers_of_the_target() -> None:
    options = options_of(model=TARGET, drafts=(DRAFT,), backend=(TORCH,), gpu_aware=ON)
    hosts = [replace(host, device_messages=rank != 2) for rank, host in enumerate(HOSTS)]
    info, draft = read_model_info(TARGET), read_model_info(DRAFT)
    with_draft = lay_out(options.changed(policy=POLICIES["pipeinfer"]()), hosts, info, [draft], 512, 100)
    assert [with_draft.hop_is_out_of_band(*hop) for hop in ((0, 1), (1, 2), (2, 3), (3, None))] == [False] * 4
    assert any("--gpu-aware on is without effect: no two stages" in line for line in with_draft.unused)
    alone = lay_out(options, hosts, info, [], 512, 100)
    assert [alone.hop_is_out_of_band(*hop) for hop in ((0, 1), (1, 2), (2, 3), (3, None))] == [
        True,
        False,
        False,
        False,
    ]
    assert not alone.unused
    assert lay_out(options.changed(gpu_aware=AUTO), HOSTS, info, [], 512, 100).unused == ()


# --- what is found there ----------------------------------------------------------------------------------------------


@needs_torch
def test_rows_that_are_no_numbers_are_found_on_the_device() -> None:
    import torch

    from pipeinfer.models.llama.rows import check_result
    from pipeinfer.models.torch.device import DeviceFuture, DeviceQueue

    def check(rows: np.ndarray) -> None:
        check_result(rows, are_logits=False, where="layers 2-3 of model.gguf")

    for bad, dtype in product((np.nan, np.inf, None), (torch.float32, torch.bfloat16)):
        result = DeviceFuture(DeviceQueue(torch.device("cpu")), check, dtype)
        values = torch.ones((3, 4))
        if bad is not None:
            values[1, 2] = bad
        result.take(values)
        if bad is None:
            assert result.result().values.dtype is dtype
        else:
            with pytest.raises(ModelFault, match=r"layers 2-3 of model\.gguf .* a value that is no number .* row 1 of"):
                result.result()


@needs_torch
def test_bf16_on_the_device_is_what_the_host_makes_of_it() -> None:
    import torch

    from pipeinfer.cluster.wire import WireType, read_activations, write_activations
    from pipeinfer.models.torch.device import DeviceFuture, DeviceQueue

    bits = np.random.default_rng(3).integers(0, 2**32, (500, 64), dtype=np.uint32)
    values = np.where(np.isfinite(bits.view(np.float32)), bits.view(np.float32), 1.0).astype(np.float32)
    result = DeviceFuture(DeviceQueue(torch.device("cpu")), lambda rows: None, torch.bfloat16)
    result.take(torch.from_numpy(values))
    room = np.empty(2 * values.size, np.uint8)
    write_activations(values, room, WireType.BF16)
    with np.errstate(over="ignore"):
        rows = result.result()
    assert np.array_equal(read_activations(room, 64, WireType.BF16), rows.values.float().numpy())


# --- jobs -------------------------------------------------------------------------------------------------------------


@needs_torch
@pytest.mark.parametrize(
    ("n_ranks", "more", "hops"),
    [
        in_long(2, ["-md", "none"], {(0, 1)}),
        (3, ["--policy", "pipeinfer", "--temp", "0.8", "--seed", "3"], {(1, 2)}),
        in_long(4, ["--policy", "flowspec", "--no-prepare-ahead"], {(1, 2), (2, 3)}),
        in_long(4, ["--policy", "pipedec", "--no-post-ahead", "--temp", "0.8", "--seed", "3"], {(1, 2), (2, 3)}),
        # fast numerics: what a row has beside it must be alike too
        (4, [*FAST, "--wire-type", "bf16"], {(0, 1), (1, 2), (2, 3)}),
        in_long(4, [*FAST, "--backend", "torch:cpu,torch:cpu,torch:cpu,llama"], {(0, 1), (1, 2)}),
    ],
)
def test_the_text_stays_what_it_is(n_ranks: int, more: list[str], hops: set[tuple[int, int]]) -> None:
    asked = [*ASKED, "--backend", "torch:cpu", *more]
    greedy = asked if "--temp" in asked else [*asked, "--temp", "0"]
    plain, apart = run_json(n_ranks, greedy), run_json(n_ranks, [*greedy, "--gpu-aware", "on"])
    assert apart["tokens"] == plain["tokens"] and len(plain["tokens"]) == 48
    assert not any(hop["from_device"] for hop in plain["wire"]["hops"])
    for hop in apart["wire"]["hops"]:
        is_apart = (hop["from"], hop["to"]) in hops
        assert (hop["from_device"] > hop["messages"] // 4) == is_apart, apart["wire"]
    assert "gpu-aware on" in apart["options"] and "gpu-aware" not in plain["options"]


@needs_torch
def test_without_two_stages_of_torch_it_is_said_to_be_without_effect() -> None:
    done = finish(2, ["run", *ASKED, "--gpu-aware", "on"])
    assert done.returncode == 0
    assert "--gpu-aware on is without effect: no two stages that torch computes follow each other" in done.stderr
