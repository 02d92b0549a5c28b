"""Which devices a rank's layers go to: how that is said, checked, shared out, planned and refused. No GPU is here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
import numpy as np
import pytest

from pipeinfer.cli.run import run
from pipeinfer.cluster.hosts.host import Host, gpus_given
from pipeinfer.core.interfaces import Batch
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import ALL_LAYERS, NO_DEVICE
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.sections import PlacementOptions
from pipeinfer.job.options.values import Backend
from pipeinfer.job.placement.devices import check_servers, plan_devices, rank_options, share_of
from pipeinfer.job.planning.plan_table import plan_cells, plan_rows
from pipeinfer.job.profiling.describe import check_present, describe_host
from pipeinfer.job.session.result import ExperimentSettings
from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.ggml import Device, llama_devices
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.virtual.nodes import Node
from tests.support.jobs import finish
from tests.support.planned import lay_out, options_of

FOUR = [Device(f"CUDA{number}", f"H200 {number}", "GPU", 0, 0) for number in range(4)]


def given(text: str, option: str = "device") -> Any:
    return run.make_context("x", ["-p", "x", f"--{option}", text]).params[option]


def asked(text: str, **others: Any) -> RunOptions:
    return options_of(**{"model": TARGET, "n_gpu_layers": (ALL_LAYERS,), "device": given(text)} | others)


def hosts(names: str, n_gpus: int = 0) -> list[Host]:
    there = tuple(device.name for device in FOUR[:n_gpus])
    return [Host(name, frozenset([0]), 1, offloads=bool(there), gpu_names=there) for name in names]


def devices_of(options: RunOptions, places: list[Host]) -> list[tuple[str, ...] | None]:
    return [own.target.devices for own in plan_devices(options.placement, places)]


def test_devices_are_given_once_or_once_a_rank() -> None:
    assert given("auto") == PlacementOptions.device == ((),) and given("none") == (NO_DEVICE,)
    assert given("CUDA0,CUDA1+CUDA2,none,auto") == (("CUDA0",), ("CUDA1", "CUDA2"), NO_DEVICE, ())
    assert given("RPC[10.0.0.1:50052],Vulkan0") == (("RPC[10.0.0.1:50052]",), ("Vulkan0",))
    for wrong in ("", "CUDA0,,CUDA1", "CUDA0+", "auto+CUDA0", "0", "CUDA 0", "x" * 70):
        with pytest.raises(click.BadParameter):
            given(wrong)
    assert ExperimentSettings.of(asked("CUDA0+CUDA1,none")).options.endswith("device CUDA0+CUDA1,none")


@pytest.mark.parametrize(
    ("text", "others", "said"),
    [
        ("CUDA0,CUDA1", {}, "--device CUDA0,CUDA1 has 2 values, and the number of ranks is 3"),
        ("CUDA0", {"n_gpu_layers": (ALL_LAYERS, 0, 3)}, "--device CUDA0: rank 1 has no layers for it, as -ngl is 0"),
        ("none,CUDA0,CUDA1+CUDA1", {}, "rank 2 has CUDA1.CUDA1; name each device once"),
        ("CUDA0+none", {}, "none alone"),
        ("none", {"backend": (Backend("torch"),)}, "rank 0 has --backend torch; say its device there"),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, others: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        rank_options(asked(text, **others).placement, 3)


def test_rpc_servers_are_given_once_or_once_a_rank() -> None:
    assert given("none", "rpc") == PlacementOptions.rpc == ((),)
    two = given("a.b:1,10.0.0.1:50052+c:65535", "rpc")
    assert two == (("a.b:1",), ("10.0.0.1:50052", "c:65535"))
    for wrong in ("a", "a:", ":1", "a:65536", "a:1+", "none+a:1", "a:b", "-:1 ", "[::1]:1"):
        with pytest.raises(click.BadParameter):
            given(wrong, "rpc")
    options = asked("auto", rpc=two)
    assert [each.servers for each in rank_options(options.placement, 2)] == list(two)
    assert rank_options(options.placement, 1)[0].servers == (*two[0], *two[1]), "a lone rank has all"
    assert ExperimentSettings.of(options).options.startswith("rpc a.b:1,10.0.0.1:50052+c:65535, ")
    with pytest.raises(UserError, match=r"--rpc a.b:1,10.0.0.1:50052.c:65535 has 2 values, and the number of ranks is"):
        rank_options(options.placement, 3)
    with pytest.raises(UserError, match=r"--rpc a.b:1: rank 0 has no layers for it, as -ngl is 0 there"):
        rank_options(asked("auto", rpc=two, n_gpu_layers=(0, ALL_LAYERS)).placement, 2)


def test_a_server_that_cannot_be_used_is_refused_with_its_rank() -> None:
    described = asked("auto", rpc=((), ("127.0.0.1:1",)), n_gpu_layers=(0, ALL_LAYERS))
    with pytest.raises(
        UserError, match=r"^rank 1 \(host b\): --rpc 127.0.0.1:1 (cannot be reached: |needs a llama-cpp)"
    ):
        describe_host(described, hosts("ab"), 1)


@pytest.mark.parametrize("n_layers", ["1,2", "all,auto"])
def test_a_wrong_number_of_values_is_refused_before_devices_are_looked_for(n_layers: str) -> None:
    done = finish(3, ["run", "-p", "x", "-n", "2", "-ngl", n_layers])
    assert (
        done.returncode == 2 and f"--gpu-layers {n_layers} has 2 values, and the number of ranks is 3" in done.stderr
    ), done.stderr


def test_no_device_is_no_layer_on_one_and_a_lone_rank_takes_commas() -> None:
    options = asked("none,CUDA0,auto")
    rank_options(options.placement, 3)
    assert [own.target.n_gpu_layers for own in plan_devices(options.placement, hosts("abc"))] == [
        0,
        ALL_LAYERS,
        ALL_LAYERS,
    ]
    alone = asked("CUDA0,CUDA1")
    rank_options(alone.placement, 1)
    assert devices_of(alone, hosts("a", 4)) == [("CUDA0", "CUDA1")]


def test_ranks_of_a_host_share_its_gpus() -> None:
    names = [device.name for device in FOUR]
    for n_names in range(1, 5):
        for n_sharers in range(1, 7):
            shares = [share_of(names[:n_names], index, n_sharers) for index in range(n_sharers)]
            assert all(shares) and {name for share in shares for name in share} == set(names[:n_names])
            assert n_sharers > n_names or sum(map(len, shares)) == n_names
    assert share_of([], 0, 2) == []


def test_unless_told_a_rank_has_its_share() -> None:
    auto = asked("auto")
    assert devices_of(auto, hosts("abab", 4)) == [("CUDA0", "CUDA1")] * 2 + [("CUDA2", "CUDA3")] * 2
    assert devices_of(auto, hosts("aab", 4)) == [("CUDA0", "CUDA1"), ("CUDA2", "CUDA3"), None]
    assert devices_of(asked("auto", n_gpu_layers=(0, ALL_LAYERS)), hosts("aa", 4)) == [None, None]
    own = [replace(host, gpus_given=f"CUDA_VISIBLE_DEVICES={rank}") for rank, host in enumerate(hosts("aa", 4))]
    assert devices_of(auto, own) == [None, None], "the launcher has shared them out"
    assert devices_of(asked("none,auto,auto"), hosts("aaa", 4)) == [(), ("CUDA0", "CUDA1"), ("CUDA2", "CUDA3")]


def test_what_a_launcher_gave_is_told_apart() -> None:
    both = {"CUDA_VISIBLE_DEVICES": "0,1", "HOME": "/"}
    assert gpus_given(both) == "CUDA_VISIBLE_DEVICES=0,1" and gpus_given({"HOME": "/"}) == ""
    first, second = (gpus_given(both | {"SLURM_GPUS_PER_TASK": "2", "SLURM_LOCALID": rank}) for rank in "01")
    assert first != second, "both see GPUs 0 and 1, and they are not the same"


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    check_present(["CUDA3", "CUDA0"], FOUR)
    with pytest.raises(UserError, match=r"--device CUDA7 is not there; libllama has CUDA0 \(H200 0\), CUDA1"):
        check_present(["CUDA0", "CUDA7"], FOUR)
    with pytest.raises(UserError, match="libllama sees no GPU there"):
        check_present(["CPU"], [])
    places = hosts("ab")
    describe_host(asked("auto"), places, 0)
    describe_host(asked("none,CUDA1"), places, 0)
    with pytest.raises(UserError, match="3 values, and the number of ranks is 2"):
        describe_host(asked("x,y,z"), places, 0)
    with pytest.raises(UserError, match=r"^rank 1 \(host b\): --device CUDA1 is not there"):
        describe_host(asked("none,CUDA1"), places, 1)


def test_the_plan_shows_devices_where_some_are_asked_for() -> None:
    info = read_model_info(TARGET)

    def shown(text: str) -> tuple[list[str], list[Any]]:
        plan = lay_out(asked(text), hosts("abc"), info, [], 256, 8)
        rows = plan_rows(plan, list(map(Node, plan.hosts)))
        return plan_cells(rows)[0], [row["device"] for row in rows]

    columns, devices = shown("none,CUDA1+CUDA2,auto")
    assert "device" in columns and devices == ["none", "CUDA1+CUDA2", None]
    assert "device" not in shown("auto")[0]


def test_the_devices_that_are_named_reach_libllama() -> None:
    """The CPU stands in for one: its handle is passed as a GPU's would be, and no layer goes anywhere else."""
    (cpu,) = (device for device in llama_devices() if device.kind == "CPU")
    info, found, three = read_model_info(TARGET), [], np.arange(3, dtype=np.int32)
    batch = Batch(three + 5, three, [(0,)] * 3, None, np.ones(3, np.bool_))
    for devices in (None, (), (cpu.name,)):
        stage = LlamaStage(open_slice(info, 0, info.n_layer), LlamaParams(n_cells=256, devices=devices))
        result = stage.evaluate(batch, lambda: False)
        assert result is not None
        found.append(result.copy())
        stage.close()
    assert found[0].any() and all(np.array_equal(result, found[0]) for result in found)
    with pytest.raises(KeyError):
        LlamaStage(open_slice(info, 0, 1), LlamaParams(n_cells=256, devices=("CUDA9",)))


def test_a_job_names_the_rank_that_lacks_a_device() -> None:
    done = finish(2, ["run", "-p", "x", "-n", "2", "-ngl", "all", "--device", "none,CUDA1"])
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("pipeinfer: rank 1 (host ") and "--device CUDA1 is not there; libllama sees no GPU" in line
    assert finish(1, ["run", "-p", "x", "-n", "2", "-ngl", "all", "--device", "none"]).returncode == 0


def test_a_server_serves_one_rank() -> None:
    """At a loopback address each host has another one."""
    check_servers([("localhost:1", "a:1"), ("localhost:1",), ()], ["a", "b", "b"])
    for server, hosts in (("localhost:1", "aa"), ("127.0.0.1:1", "aa"), ("a:1", "ab")):
        with pytest.raises(UserError, match=f"--rpc {server}: ranks 0 and 1 have it"):
            check_servers([(server,), (server,)], hosts)
