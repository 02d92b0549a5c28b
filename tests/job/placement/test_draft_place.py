"""What computes the draft: what is chosen, what is refused, and jobs in which it is not what computes the target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.cluster.hosts.host import Host
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO_LAYERS
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.values import Backend
from pipeinfer.job.placement.devices import RankDevices, plan_devices
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.profiling.describe import describe_host
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.llama.ggml import Device
from pipeinfer.policies import PipeInfer
from tests.support.cases import in_long
from tests.support.jobs import finish, run_json
from tests.support.paces import pace_words, slow_target
from tests.support.planned import lay_out, options_of

TORCH, LLAMA = Backend("torch"), Backend()
PLAIN: dict[str, Any] = {"model": TARGET, "drafts": (DRAFT,), "policy": PipeInfer()}
PROMPT = ["-p", "def read_lines(path):\n", "-n", "24", "--temp", "0", "--ignore-eos"]


def asked(**options: Any) -> RunOptions:
    return options_of(**(PLAIN | {"n_gpu_layers": (ALL_LAYERS,)} | options))


def hosts(n: int) -> list[Host]:
    return [Host(f"h{rank}", frozenset(range(4)), 4) for rank in range(n)]


def planned(options: RunOptions, places: list[Host]) -> JobPlan:
    return lay_out(options, places, read_model_info(TARGET), [read_model_info(DRAFT)], 512, 32)


def devices(options: RunOptions) -> tuple[RankDevices, ...]:
    return plan_devices(options.placement, hosts(2))


def on_gpu(options: RunOptions) -> int:
    return devices(options)[0].draft.n_gpu_layers


def test_the_draft_is_computed_as_its_ranks_layers_unless_something_else_is_said() -> None:
    for backend in ({}, {"n_gpu_layers": (0,), "backend": (TORCH,)}):
        options = asked(**backend)
        there, on_cpu = devices(options), devices(options.changed(n_gpu_layers_draft=0))
        assert all(own.draft == own.target for own in there)
        assert (on_cpu[0].draft.n_gpu_layers, on_cpu[0].draft.backend) == (0, LLAMA)
        for own in on_cpu:
            assert (own.target.n_gpu_layers, own.target.backend) == (
                *options.placement.n_gpu_layers,
                *options.placement.backend,
            )
    assert on_gpu(asked(n_gpu_layers_draft=ALL_LAYERS)) == ALL_LAYERS
    assert on_gpu(asked(n_gpu_layers_draft=3)) == 3 == on_gpu(asked(n_gpu_layers=(0,), n_gpu_layers_draft=3))
    of_torch = asked(n_gpu_layers=(0,), backend=(TORCH,), n_gpu_layers_draft=ALL_LAYERS)
    assert all(own.draft == own.target for own in devices(of_torch))
    named = devices(asked(device=(("CUDA1",),), n_gpu_layers_draft=0))
    assert named[0].draft.devices is None, "a device is for layers that there are"
    assert named[0].target.devices == named[1].target.devices == ("CUDA1",)


def test_the_plan_has_it_where_it_goes() -> None:
    """Weights and caches of a draft on the CPU are the host's, by libllama as it lays them out."""
    options = asked(n_gpu_layers=(0,), backend=(TORCH,))
    by_torch, by_llama = (planned(each, hosts(2)) for each in (options, options.changed(n_gpu_layers_draft=0)))
    assert [str(by_torch.device(rank).backend) for rank in range(2)] == ["torch", "torch"]
    assert [str(by_llama.device(rank).backend) for rank in range(2)] == ["llama", "torch"]
    assert by_llama.memory[0].needed < by_torch.memory[0].needed and by_llama.memory[1] == by_torch.memory[1]
    there, here = (planned(each, hosts(2)) for each in (asked(), asked(n_gpu_layers_draft=0)))
    assert there.ranks[0].gpu_bytes > 0 == here.ranks[0].gpu_bytes
    assert there.ranks[1].gpu_bytes == here.ranks[1].gpu_bytes > 0
    alone = [planned(each, hosts(1)) for each in (asked(n_gpu_layers_draft=0), asked())]
    assert 0 < alone[0].ranks[0].gpu_bytes < alone[1].ranks[0].gpu_bytes, "the target's layers stay there"


def test_layers_of_torch_are_not_counted() -> None:
    options = asked(n_gpu_layers=(0,), backend=(TORCH,), n_gpu_layers_draft=3)
    with pytest.raises(
        UserError, match="-ngld 3 is for a draft that libllama computes, and rank 0 has --backend torch"
    ):
        planned(options, hosts(2))
    planned(options.changed(backend=(LLAMA, TORCH)), hosts(2))


def test_a_gpu_that_only_the_draft_has_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [Device(f"CUDA{number}", "H200", "gpu", 100, 100) for number in range(2)]
    monkeypatch.setattr("pipeinfer.job.profiling.describe.gpus", lambda: two)
    monkeypatch.setattr("pipeinfer.job.profiling.describe.has_gpu", lambda: True)
    places = [replace(host, name="a") for host in hosts(2)]
    options = asked(n_gpu_layers=(0,), n_gpu_layers_draft=ALL_LAYERS)
    found = [describe_host(options, places, rank) for rank in range(2)]
    drafting = plan_devices(options.placement, found)[0].draft
    assert drafting.uses_gpus and drafting.devices is None, "all of them: nobody else uses one"
    assert [name for name, _ in found[0].gpus] == ["CUDA0", "CUDA1"]
    assert describe_host(options.changed(n_gpu_layers_draft=AUTO_LAYERS), places, 0).gpus == ()


# -- jobs


@pytest.mark.parametrize("n_ranks", [in_long(1), 2])
def test_a_draft_of_torchs_target_may_be_libllamas(n_ranks: int, tmp_path: Path) -> None:
    """The text is that of torch's target."""
    pytest.importorskip("torch")
    pace = pace_words(tmp_path, slow_target(4.0, stages=1))
    words = [*PROMPT, "--backend", "torch", *(pace if n_ranks > 1 else [])]
    on_cpu, there = (run_json(n_ranks, [*words, "-ngld", place], warm=False) for place in ("0", "auto"))
    assert on_cpu["text"] == there["text"] and on_cpu["speculation"]["draft_n"] > 0
    backends = [[rank["backend"] for rank in found["ranks"]] for found in (on_cpu, there)]
    assert backends == ([["torch"]] * 2 if n_ranks == 1 else [["llama", "torch"], ["torch", "torch"]])
    if n_ranks > 1:
        own = on_cpu["ranks"][0]
        assert own["peak_rss_bytes"] < own["memory_bytes"] + 50e6, "who computes nothing by torch does not import it"
    done = finish(n_ranks, ["plan", "--json", "--backend", "torch", "-ngld", "0"])
    assert [rank["backend"] for rank in json.loads(done.stdout)["ranks"]] == backends[0], done.stderr
