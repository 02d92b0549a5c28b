"""Which backend computes which rank: how it is said, checked, planned and shown, and jobs of both under mpirun."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.cluster.hosts.host import Host
from pipeinfer.errors import UserError
from pipeinfer.job.options.values import Backend
from pipeinfer.job.placement.devices import plan_devices
from pipeinfer.job.session.result import ExperimentSettings
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.torch.params import load_torch, torch_version
from pipeinfer.policies import PipeInfer
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import finish, run_json
from tests.support.planned import lay_out, options_of

needs_torch = pytest.mark.skipif(not torch_version(), reason="PyTorch is not installed: pip install 'pipeinfer[torch]'")
PROMPT = ["-p", "def fibonacci(n):", "--temp", "0", "-t", "1"]
HOSTS = [Host(name, frozenset(range(8)), 8) for name in "aab"]


def backends(text: str) -> tuple[Backend, ...]:
    return tuple(map(Backend.parse, text.split(",")))


def plan(text: str, model: Path = TARGET, **options: Any) -> Any:
    asked = options_of(model=model, backend=backends(text), **options)
    return lay_out(asked, HOSTS, read_model_info(model), [], 512, 100)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("llama", Backend()),
        ("torch", Backend("torch")),
        ("torch:cuda:1", Backend("torch", "cuda:1")),
        ("torch:bf16", Backend("torch", dtype="bf16")),
        ("torch:cpu:f32", Backend("torch", "cpu", "f32")),
        ("torch:int8", Backend("torch", dtype="int8")),
        ("torch:cpu:int4", Backend("torch", "cpu", "int4")),
    ],
)
def test_names_of_backends(text: str, expected: Backend) -> None:
    assert Backend.parse(text) == expected and str(expected) == text


@pytest.mark.parametrize("text", ["", "Torch", "llama:cpu", "torch:gpu", "torch:f32:cpu", "torch:cuda:", "torch:f16"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not llama, torch, or torch with a device"):
        Backend.parse(text)


def test_what_a_rank_has_is_in_the_plan() -> None:
    found = plan("torch,llama,torch:bf16", numerics="fast")
    assert [str(found.device(rank).backend) for rank in range(3)] == ["torch", "llama", "torch:bf16"]
    plain = plan("llama")
    assert [str(plain.device(rank).backend) for rank in range(3)] == ["llama"] * 3


def test_torch_takes_the_memory_of_its_types() -> None:
    """Weights and cache in float32, 4 bytes a number, or bf16, 2, or less; of libllama's as in the file, and 2."""
    full, half, plain = plan("torch").memory, plan("torch:bf16").memory, plan("llama", numerics="fast").memory
    quarter, eighth = plan("torch:int8").memory, plan("torch:int4").memory
    for rank in range(3):
        assert full[rank].weights == 2 * half[rank].weights == 4 * quarter[rank].weights
        assert quarter[rank].kv == half[rank].kv == eighth[rank].kv
        assert full[rank].kv == 2 * half[rank].kv == 2 * plain[rank].kv
        assert full[rank].runtime > plain[rank].runtime
    # 4 bits, and 32 for every 32; the head of the last rank has 8
    assert [eighth[rank].weights / quarter[rank].weights for rank in range(2)] == pytest.approx([0.625] * 2)
    assert 0.625 < eighth[2].weights / quarter[2].weights < 1
    assert full[0].weights > 3 * plain[0].weights
    assert sum(memory.weights for memory in plan("torch:cuda").memory) == 0


@pytest.mark.parametrize(
    ("text", "numerics", "parked"),
    [
        ("llama", "exact", True),
        ("llama", "fast", False),
        ("torch:cpu", "exact", False),
        ("torch", "exact", False),
        ("llama,torch,torch", "fast", False),
    ],
)
def test_rejected_cells_are_parked_by_exact_libllama_alone(text: str, numerics: str, parked: bool) -> None:
    assert plan(text, numerics=numerics).numerics.parked is parked


def test_rejected_cells_are_parked_where_layers_have_a_window(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model.gguf", MODELS["gemma3"])
    assert plan("llama", model, numerics="fast").numerics.parked


def test_a_whole_model_that_was_sent_stays_in_memory() -> None:
    here, model = HOSTS[0], read_model_info(TARGET)
    options = options_of(model=TARGET, drafts=(DRAFT, TARGET), policy=PipeInfer(), backend=backends("torch"))
    hosts = [here, replace(here, lacks=frozenset({str(TARGET)})), here]
    for at in (options, options.changed(backend=backends("torch:cuda"))):
        sent, plain = (
            lay_out(at, each, model, [read_model_info(DRAFT), model], 512, 1) for each in (hosts, [here] * 3)
        )
        assert sent.memory[1].weights == plain.memory[1].weights + model.n_bytes


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("torch,llama", {}, "--backend torch,llama has 2 values, and the number of ranks is 3"),
        ("torch", {"n_gpu_layers": (99,)}, "-ngl is for layers that libllama computes, and rank 0"),
        ("llama,torch,llama", {"n_gpu_layers": (0, -1, 0)}, "and rank 1 has --backend"),
        ("llama,torch,torch", {}, "needs one --backend for all layers .*: rank 0 llama, ranks 1 2 torch; give one"),
        ("torch,torch:bf16,torch", {}, "ranks 0 2 torch, rank 1 torch:bf16"),
    ],
)
def test_what_does_not_go_together(text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(text, **options)


def test_a_model_that_torch_does_not_compute_is_refused_before_anything_loads(tmp_path: Path) -> None:
    path = write_model(tmp_path / "phi3.gguf", Shape("phi3", rope_factors=True))
    with pytest.raises(UserError, match="is a phi3 model; --backend torch computes"):
        plan("torch", path)
    assert plan("llama", path)


def test_results_tell_experiments_with_other_backends_apart() -> None:
    of = ExperimentSettings.of
    assert of(options_of(backend=backends("llama,torch:bf16"))).options == "backend llama,torch:bf16"
    assert of(options_of()).options == "" and of(options_of(samplers=1)).options == "sampler-threads 1"


def test_ranks_of_a_host_take_its_gpus_in_turns() -> None:
    hosts = [HOSTS[0]] * 5 + [HOSTS[2]]
    given = options_of(model=TARGET, backend=backends("llama,torch,torch:cuda:1,torch:cuda,torch:bf16,torch"))
    turns = [own.target.turn for own in plan_devices(given.placement, hosts)]
    assert [turns[rank] for rank in (1, 3, 4, 5)] == [0, 1, 2, 0], "of those that have none named"
    alike = given.changed(backend=backends("torch"))
    assert [own.target.turn for own in plan_devices(alike.placement, HOSTS)] == [0, 1, 0]


def test_the_command_line_says_it_in_one_line() -> None:
    done = finish(1, ["run", *PROMPT, "--backend", "torch:gpu"])
    assert done.returncode == 2 and "'torch:gpu' is not llama, torch, or" in done.stderr, done.stderr
    done = finish(1, ["plan", "--backend", "torch:bf16", "--json"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [rank["backend"] for rank in found["ranks"]] == ["torch:bf16"]
    assert any("torch" in note for note in found["notes"])


def test_a_rank_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not there
    load_torch.cache_clear()
    with pytest.raises(UserError, match=r"needs PyTorch.*pip install 'pipeinfer\[torch\]' on every host"):
        load_torch()


@needs_torch
def test_exact_text_of_torch_is_the_same_on_every_number_of_ranks() -> None:
    alone = run_json(1, [*PROMPT, "-n", "16", "--backend", "torch", "--policy", "iterative"])
    cut = run_json(3, [*PROMPT, "-n", "16", "--backend", "llama,torch,torch"], warm=False)
    assert cut["tokens"] == alone["tokens"] and cut["numerics"] == "exact"
    assert [rank["backend"] for rank in cut["ranks"]] == ["llama", "torch", "torch"]
    own, *others = (rank["peak_rss_bytes"] for rank in cut["ranks"])
    assert own + 100e6 < min(others), "a rank of llama.cpp has loaded torch"


@needs_torch
def test_both_backends_in_one_job() -> None:
    mixed = run_json(
        3, [*PROMPT, "-n", "16", "-md", "none", "--backend", "torch:bf16,llama,torch", "--numerics", "fast"]
    )
    plain = run_json(1, [*PROMPT, "-n", "16", "--policy", "iterative"])
    assert mixed["tokens"] == plain["tokens"]
    assert mixed["options"] == "backend torch:bf16,llama,torch"
