"""Experts on a rank's CPU and the rest of its layers on a device: texts, numerics' names, memory, and what a plan
proposes. Devices are CPUs that RPC servers lend."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.job.run.test_rpc_devices import TYPES, of
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.cases import in_long
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import finish, run_json, start
from tests.support.rpc_server import Server, address_space, needs_rpc, servers

pytestmark = needs_rpc

ARCHITECTURES = ("qwen3moe", "glm4moe", "gpt-oss")
TEXT = ["-md", "none", "-p", "hello there", "-n", "24", "--ignore-eos", "-t", "1", "--temp", "0.8", "--seed", "7"]


@pytest.fixture(scope="module")
def three() -> Iterator[list[Server]]:
    with servers(2, 2, 2) as started:
        yield started


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("experts")
    return {
        name: str(write_random_model(folder / f"{name}.gguf", replace(MODELS[name], with_vocab=True)))
        for name in ARCHITECTURES
    }


@pytest.fixture(scope="module")
def texts(models: dict[str, str]) -> dict[str, list[int]]:
    """On a CPU, no weights repacked, as on devices."""
    words = [*TEXT, "--policy", "iterative", "--no-repack"]
    return {name: run_json(1, ["-m", path, *words])["tokens"] for name, path in models.items()}


CASES = [
    in_long("qwen3moe", 1, "-ngl all -cmoe"),
    in_long("gpt-oss", 1, "-ngl 3 -ncmoe 2 --device RPC1"),
    in_long("glm4moe", 2, "-ngl all -ncmoe 1,all"),
    ("qwen3moe", 2, "-ngl all -ot ffn_(up|down)_exps=CPU,output=CPU"),
    ("gpt-oss", 2, "-ngl all --device RPC0+RPC1 -ot blk.(1|3).ffn_down_exps=RPC1"),
    ("glm4moe", 3, "-ngl all,0,all -cmoe"),
    in_long("gpt-oss", 3, "-ngl all -cmoe"),
]


@pytest.mark.parametrize(("name", "n_ranks", "where"), CASES)
def test_all_texts_are_one(
    name: str, n_ranks: int, where: str, models: dict[str, str], texts: dict[str, list[int]], three: list[Server]
) -> None:
    used = [None if "all,0" in where and rank == 1 else three[rank] for rank in range(n_ranks)]
    words = ["-m", models[name], *TEXT, *TYPES, *where.split(), *of(used), "--policy", "auto"]
    result = run_json(n_ranks, words)
    assert result["tokens"] == texts[name]
    assert re.fullmatch(r"exact-\w+-\w+-gpu-[0-9a-f]{4}", result["numerics_name"])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Most of its weights are experts."""
    shape = Shape("qwen3moe", n_layer=6, n_embd=256, n_ff=512, n_expert=16)
    return write_model(tmp_path_factory.mktemp("wide") / "model.gguf", shape)


@pytest.mark.parametrize(("n_ranks", "where"), [in_long(1, "-ncmoe 4"), (2, "-ncmoe 2,0"), in_long(3, "-cmoe")])
def test_a_plan_has_the_memory_that_is_used(n_ranks: int, where: str, wide: Path) -> None:
    """On devices, within a twentieth. Without exact numerics nothing is tried there before."""
    words = ["-m", str(wide), "-md", "none", "-c", "12000", "-t", "1", "--policy", "iterative", "-ngl", "all"]
    words += ["--numerics", "fast", "--no-repack", *where.split()]
    with servers(*[1] * n_ranks) as started:
        planned = json.loads(finish(n_ranks, ["plan", "--json", *words, *of(started)]).stdout)["ranks"]
    with servers(*[1] * n_ranks) as started:  # new ones: others use memory again
        before = [address_space(server.process.pid) for server in started]
        with start(n_ranks, ["run", "-p", "x", "-n", "4000", "--ignore-eos", *words, *of(started)]) as job:
            assert job.stdout and job.stdout.read(1)
            used = [address_space(server.process.pid) - at for server, at in zip(started, before, strict=True)]
            job.terminate()
    assert [rank["gpu_bytes"] for rank in planned] == [pytest.approx(n_bytes, rel=0.05) for n_bytes in used]


def test_a_plan_proposes_experts_on_cpus_where_a_device_is_too_small(wide: Path, tmp_path: Path) -> None:
    words = ["-m", str(wide), "-md", "none", "-c", "256", "--policy", "iterative", "-ngl", "all"]
    (hosts := tmp_path / "hosts").write_text("a gpu=A gpu_memory=80G\nb gpu=B gpu_memory=20M\n")

    def planned(*more: str) -> dict[str, Any]:
        done = finish(1, ["plan", "--json", "--hosts", str(hosts), *words, "--layer-split", "3,3", *more])
        return dict(json.loads(done.stdout))

    (way,) = re.findall(r"it would fit with leave .* or with -ncmoe (\S+)", planned()["shortage"])
    first, second = map(int, way.split(","))
    assert first == 0 and 0 < second <= 3
    assert planned("-ncmoe", way)["fits"] and not planned("-ncmoe", f"0,{second - 1}")["fits"]
    assert planned("-ncmoe", way)["plan"]["ranks"][1]["target"]["n_cpu_moe"] == second


def test_what_cannot_be_is_refused(wide: Path, three: list[Server]) -> None:
    words = ["run", "-m", str(wide), "-md", "none", "-p", "x", "-n", "2", "--temp", "0"]
    for n_ranks, more, said in (
        (2, ["-ngl", "all", "-ot", "exps=RPC7", *of(three[:2])], "and rank 0, which has it, computes on RPC0+RPC1"),
        (1, ["-ngl", "all", "-ot", "ffn_up_shexp=CPU", *of(three[:1])], "no tensor of a layer or of the output head"),
        (3, ["-ngl", "0", "-ncmoe", "1,2"], "--n-cpu-moe 1,2 has 2 values, and the number of ranks is 3"),
    ):
        done = finish(n_ranks, [*words, *more])
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    done = finish(1, [*words, "-cmoe", "-ot", "exps=CPU"])
    assert "-cmoe is without effect: no rank has layers on a GPU (-ngl)" in done.stderr and done.returncode == 0
