"""What computes the draft: what is chosen, what is refused, and jobs in which it is not what computes the target."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.cluster.hosts.layer_speed import LayerSpeed
from pipeinfer.errors import UserError
from pipeinfer.job.options.backends import Backend
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO_LAYERS, NO_DEVICE
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement import gpus
from pipeinfer.job.placement.deployment import Deployment, lay_out
from pipeinfer.job.placement.draft_place import has_choice, options_of_draft, place_note
from pipeinfer.job.placement.draft_rank import may_choose
from pipeinfer.job.placement.gpus import rank_devices, with_gpus
from pipeinfer.job.profiling.draft_times import _leaders
from pipeinfer.job.profiling.known_times import read_draft_times
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.llama.devices import Device
from pipeinfer.policies import Iterative, PipeInfer
from tests.support.jobs import finish, run_json

TORCH, LLAMA = Backend("torch"), Backend()
SOONER, LATER = (0.002, 0.001), (0.001, 0.002)
"""On the CPU."""
PLAIN: dict[str, Any] = {"model": TARGET, "drafts": (DRAFT,), "policy": PipeInfer()}
PROMPT = ["-p", "def read_lines(path):\n", "-n", "24", "--temp", "0", "--ignore-eos"]


def asked(**options: Any) -> RunOptions:
    return RunOptions(**(PLAIN | {"n_gpu_layers": (ALL_LAYERS,)} | options))


def hosts(*draft_s: tuple[float, float] | None) -> list[Host]:
    return [Host(f"h{rank}", frozenset(range(4)), 4, draft_s=each) for rank, each in enumerate(draft_s)]


def planned(options: RunOptions, places: list[Host]) -> Deployment:
    return lay_out(options, places, read_model_info(TARGET), [read_model_info(DRAFT)], 512, 32)


def on_gpu(options: RunOptions, places: list[Host], rank: int = 0) -> int:
    return options_of_draft(options, places, rank).n_gpu_layers[rank]


def test_the_draft_goes_where_it_is_sooner() -> None:
    for backend in ({}, {"n_gpu_layers": (0,), "backend": (TORCH,)}):
        options = asked(**backend)
        for draft_s in (None, LATER):
            assert options_of_draft(options, hosts(draft_s, None), 0) is options
            assert not place_note(options, hosts(draft_s)[0], 0)
        found = options_of_draft(options, hosts(SOONER, None), 0)
        assert found.n_gpu_layers == (0, *options.n_gpu_layers) and found.backend == (LLAMA, *options.backend)
        assert options_of_draft(options, hosts(SOONER, None), 1) is options, "another rank has times of its own"
        assert "1 ms a token" in place_note(options, hosts(SOONER)[0], 0)


def test_what_was_said_stands() -> None:
    places = hosts(SOONER, SOONER)
    assert on_gpu(asked(n_gpu_layers_draft=ALL_LAYERS), places) == ALL_LAYERS
    assert (
        on_gpu(asked(n_gpu_layers_draft=3), places)
        == 3
        == on_gpu(asked(n_gpu_layers=(0,), n_gpu_layers_draft=3), places)
    )
    assert on_gpu(asked(n_gpu_layers_draft=0), hosts(LATER, LATER)) == 0
    of_torch = asked(n_gpu_layers=(0,), backend=(TORCH,), n_gpu_layers_draft=ALL_LAYERS)
    assert options_of_draft(of_torch, places, 0) is of_torch and not place_note(of_torch, places[0], 0)
    named = asked(device=(("CUDA1",),), n_gpu_layers_draft=0)
    assert options_of_draft(named, places, 0).device == ((), ("CUDA1",)), "a device is for layers that there are"


def test_when_there_is_a_choice() -> None:
    assert has_choice(asked()) and has_choice(asked(n_gpu_layers=(0,), backend=(TORCH,)))
    for nothing in (
        {"n_gpu_layers": (0,)}, {"n_gpu_layers_draft": 0}, {"n_gpu_layers_draft": ALL_LAYERS}, {"pace": "pipeinfer-c"},
        {"n_gpu_layers": (ALL_LAYERS, 0)}, {"device": (NO_DEVICE,)}, {"policy": Iterative()}, {"drafts": ()},
        {"drafts": (DRAFT, TARGET)}, {"n_gpu_layers": (0,), "backend": (Backend("torch", "cpu"),)},
        {"n_gpu_layers": (0,), "backend": (LLAMA, TORCH)},
    ):  # fmt: skip
        assert not has_choice(asked(**nothing)), nothing


def test_alike_ranks_of_a_host_are_timed_once() -> None:
    places = [*hosts(None), *hosts(None), replace(hosts(None)[0], name="other")]
    assert may_choose(asked()) and _leaders(asked(), places) == {0: 0, 1: 0, 2: 2}
    assert _leaders(asked(draft_rank=1), places) == {1: 1}


def test_a_rank_is_chosen_by_what_the_draft_takes_there() -> None:
    """By bytes the last rank, whose layers are missed least, would be far too slow for the draft."""
    speeds = [LayerSpeed(1e-9), LayerSpeed(1e-9), LayerSpeed(3e-8)]

    def drafting(*draft_s: tuple[float, float] | None) -> int:
        places = [replace(host, speed=speed) for host, speed in zip(hosts(*draft_s), speeds, strict=True)]
        heavy = [read_model_info(TARGET)]
        options = asked(drafts=(TARGET,))
        return lay_out(options, places, read_model_info(TARGET), heavy, 512, 32).plan.drafts[0][0].rank

    assert drafting(None, None, None) == 0 and drafting(None, None, (1.0, 1e-5)) == 2


def test_the_plan_has_it_where_it_goes() -> None:
    """Weights and caches of a draft on the CPU are the host's, by libllama as it lays them out."""
    options = asked(n_gpu_layers=(0,), backend=(TORCH,))
    by_torch, by_llama = planned(options, hosts(LATER, LATER)), planned(options, hosts(SOONER, SOONER))
    assert [str(each) for each in by_torch.backends] == ["torch", "torch"] and not by_torch.notes
    assert [str(each) for each in by_llama.backends] == ["llama", "torch"] and len(by_llama.notes) == 1
    assert by_llama.memory[0].needed < by_torch.memory[0].needed and by_llama.memory[1] == by_torch.memory[1]
    there, here = planned(asked(), hosts(LATER, LATER)), planned(asked(), hosts(SOONER, SOONER))
    assert there.on_gpus[0] > 0 == here.on_gpus[0] and there.on_gpus[1] == here.on_gpus[1] > 0
    alone = planned(asked(), hosts(SOONER)), planned(asked(), hosts(LATER))
    assert 0 < alone[0].on_gpus[0] < alone[1].on_gpus[0], "the target's layers stay there"


def test_layers_of_torch_are_not_counted() -> None:
    options = asked(n_gpu_layers=(0,), backend=(TORCH,), n_gpu_layers_draft=3)
    with pytest.raises(
        UserError, match="-ngld 3 is for a draft that libllama computes, and rank 0 has --backend torch"
    ):
        planned(options, hosts(None, None))
    planned(replace(options, backend=(LLAMA, TORCH)), hosts(None, None))


def test_a_gpu_that_only_the_draft_has_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [Device(f"CUDA{number}", "H200", "gpu", 100, 100) for number in range(2)]
    monkeypatch.setattr(gpus, "gpus", lambda: two)
    places = [replace(host, name="a") for host in hosts(None, None)]
    options = asked(n_gpu_layers=(0,), n_gpu_layers_draft=ALL_LAYERS)
    drafting = options_of_draft(options, places, 0)
    assert rank_devices(drafting, places, 0) is None, "all of them: nobody else uses one"
    found = with_gpus(options, places, 0, lambda own: [own, ()])
    assert [name for name, _ in found[0].gpus] == ["CUDA0", "CUDA1"]
    assert with_gpus(replace(options, n_gpu_layers_draft=AUTO_LAYERS), places, 0, lambda own: [own, ()]) == tuple(
        places
    )


def test_what_was_kept_is_believed_if_it_can_be() -> None:
    assert read_draft_times({"asked_s": 0.5, "cpu_s": 0.25}) == (0.5, 0.25)
    for value in (None, {}, {"asked_s": 0.5}, {"asked_s": 0.5, "cpu_s": -1.0}, {"asked_s": "x", "cpu_s": 1.0}):
        assert read_draft_times(value) is None


# -- jobs


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_torch_leaves_the_draft_to_libllama_on_a_cpu(n_ranks: int) -> None:
    """Where that guesses sooner; it is timed, and known the next time. The text is that of torch's target."""
    pytest.importorskip("torch")
    words = [*PROMPT, "--backend", "torch"]
    chosen, there = (run_json(n_ranks, [*words, "-ngld", place]) for place in ("auto", "all"))
    assert chosen["text"] == there["text"] and chosen["speculation"]["draft_n"] > 0
    backends = [[rank["backend"] for rank in found["ranks"]] for found in (chosen, there)]
    assert backends == ([["torch"]] * 2 if n_ranks == 1 else [["llama", "torch"], ["torch", "torch"]])
    for place, says in (("auto", True), ("all", False), ("0", False)):
        done = finish(n_ranks, ["run", *words, "-ngld", place])
        assert ("libllama on the CPU of rank 0: " in done.stderr) == says, done.stderr
        assert done.stdout.strip("\n") == chosen["text"].strip("\n")
    on_cpu = run_json(n_ranks, [*words, "-ngld", "0"])["ranks"][0]
    assert on_cpu["peak_rss_bytes"] < on_cpu["memory_bytes"] + 50e6, "who computes nothing by torch does not import it"
    done = finish(n_ranks, ["plan", "--json", "--backend", "torch"])
    planned_ranks = json.loads(done.stdout)["ranks"]
    assert [rank["backend"] for rank in planned_ranks][-1] == "torch"
    if n_ranks > 1:
        assert planned_ranks[0]["backend"] == "llama" and planned_ranks[0]["role"] == "draft", done.stderr
