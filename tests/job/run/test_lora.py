"""Jobs with LoRA adapters: the text of plain llama-cpp-python with the same adapter, under every policy and split."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.job.loading.test_arrivals import job
from tests.support.adapters import write_adapter
from tests.support.cases import in_long
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import finish, plain_tokens, run_json
from tests.support.rpc_server import needs_rpc, servers

N = 40
SHORT, LONG = "the model of a layer", "the model of a layer " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_model(folder / "model.gguf", Shape(n_layer=6, peaky=8.0, n_strong=2, weak=0.1), "Q4_K_M")


@pytest.fixture(scope="module")
def draft(folder: Path) -> Path:
    return write_model(folder / "draft.gguf", Shape(n_layer=2, peaky=8.0), "Q4_K_M")


@pytest.fixture(scope="module")
def adapter(folder: Path, model: Path) -> Path:
    return write_adapter(folder / "adapter.gguf", model, 8, strength=0.3)


def words(model: Path, prompt: str, *more: object) -> list[str]:
    usual = ["-m", model, "-p", prompt, "-n", N, "--temp", "0", "--ignore-eos", "--no-repack", "-t", "1", *more]
    return [str(word) for word in usual]


@pytest.mark.parametrize("prompt", [in_long(SHORT), LONG])
def test_texts_are_those_of_plain_llama(model: Path, draft: Path, adapter: Path, prompt: str) -> None:
    given, speculation = ["--lora-scaled", f"{adapter}:0.8"], ["-md", draft, "--policy"]
    first = run_json(1, words(model, prompt, "-md", "none", *given))
    expected = plain_tokens(model, first["prompt_tokens"], N, adapters=[f"{adapter}:0.8"])
    assert first["tokens"] == expected != plain_tokens(model, first["prompt_tokens"], N)
    for n_ranks, policy in ((2, "iterative"), (3, "pipeinfer"), *([(3, "auto"), (1, "pipeinfer")] * (prompt == SHORT))):
        more = ["-md", "none"] if policy == "iterative" else [*speculation, policy]
        result = run_json(n_ranks, words(model, prompt, *more, *given))
        assert result["tokens"] == expected, (n_ranks, policy)
        assert result["numerics_name"] == first["numerics_name"]
    assert re.fullmatch("exact-no-repack-lora-[0-9a-f]{8}", first["numerics_name"])


def test_two_adapters_are_added_up_as_in_plain_llama(model: Path, folder: Path, adapter: Path) -> None:
    second = write_adapter(folder / "second.gguf", model, 16, "F32", strength=0.3, seed=1)
    given = ["--lora", f"{adapter},{second}"]
    results = [run_json(n_ranks, words(model, SHORT, "-md", "none", *given)) for n_ranks in (1, 3)]
    expected = plain_tokens(model, results[0]["prompt_tokens"], N, adapters=[f"{adapter}:1", f"{second}:1"])
    assert [result["tokens"] for result in results] == [expected] * 2


def test_repacked_weights_change_no_text_of_other_splits(model: Path, draft: Path, adapter: Path) -> None:
    more = ["--repack", "--lora", adapter]
    texts = [
        run_json(n_ranks, [*words(model, LONG, *more, *drafts), "-t", "2"])["tokens"]
        for n_ranks, drafts in ((1, ("-md", "none")), (3, ("-md", draft, "--policy", "pipeinfer")))
    ]
    assert texts[0] == texts[1]


@needs_rpc
def test_layers_on_devices_have_it_without_exactness(model: Path, adapter: Path) -> None:
    with servers(1) as (server,):
        more = ["--rpc", server.endpoint, "-ngl", "all", "--lora", adapter, "--json"]
        done = finish(1, ["run", *words(model, SHORT, "-md", "none", "--policy", "iterative", *more)])
    assert done.returncode == 0, done.stderr
    assert "rows with adapters (--lora) may have other bits beside others" in done.stderr
    result = json.loads(done.stdout)
    expected = plain_tokens(model, result["prompt_tokens"], N, adapters=[f"{adapter}:1"])
    assert result["tokens"][:4] == expected[:4]


def test_an_adapter_of_the_output_is_for_one_rank(model: Path, folder: Path) -> None:
    adapter = write_adapter(folder / "head.gguf", model, 8, head=True, strength=0.3)
    given = words(model, SHORT, "-md", "none", "--lora", adapter)
    result = run_json(1, given)
    assert result["tokens"] == plain_tokens(model, result["prompt_tokens"], N, adapters=[f"{adapter}:1"])
    done = finish(2, ["run", *given])
    assert done.returncode == 2 and "changes output.weight, which slices" in done.stderr


def test_what_cannot_be_is_refused(model: Path, folder: Path, adapter: Path) -> None:
    other = write_adapter(folder / "qwen2.gguf", model, architecture="qwen2")
    for more, message in (
        (["--lora", str(other)], "is for models of architecture 'qwen2', and model.gguf is of 'llama'"),
        (["--lora", str(model)], "is no LoRA adapter (general.type"),
        (["--lora", str(folder / "none.gguf")], "none.gguf does not exist on this host"),
        (["--lora-scaled", str(adapter)], "is not FILE:SCALE, a file and a number"),
        (["--lora-scaled", f"{adapter}:much"], "is not FILE:SCALE, a file and a number"),
        (["--lora-scaled", f"{adapter}:nan"], "is not FILE:SCALE, a file and a number"),
        (["--lora", str(adapter), "--backend", "torch"], "is for layers that libllama computes, and rank 0 has"),
        (["--lora", str(adapter), "--json", "--trace", str(adapter)], "--lora"),
    ):
        done = finish(1, ["run", *words(model, SHORT, "-md", "none", *more)])
        assert done.returncode == 2 and message in done.stderr, (more, done.stderr)
        assert "Traceback" not in done.stderr


def test_a_plan_has_the_adapter(model: Path, folder: Path, adapter: Path) -> None:
    hosts = folder / "hosts"
    hosts.write_text("a\nb\n")
    plans = [
        json.loads(finish(1, ["plan", "-m", str(model), "-md", "none", "--hosts", str(hosts), "--json", *more]).stdout)
        for more in ((), ("--lora", str(adapter)))
    ]
    weights = [sum(rank["weight_bytes"] for rank in plan["ranks"]) for plan in plans]
    n_bytes = sum(each["n_bytes"] for each in json.loads(info_of(adapter, "--json"))["tensors"])
    assert weights[1] - weights[0] == 2 * n_bytes
    names = [plan["numerics_name"] for plan in plans]
    assert names[1].startswith("exact-lora-") and "lora" not in names[0]


def info_of(adapter: Path, *more: str) -> str:
    done = finish(1, ["models", "info", str(adapter), *more])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_info_shows_an_adapter(adapter: Path) -> None:
    text = info_of(adapter)
    assert "a LoRA adapter" in text and "models of architecture llama" in text and "8, alpha 12" in text
    assert re.search(r"attn_q.weight *\| *6 \| *8 \| f16", text)


def test_a_job_by_a_plan_needs_its_adapter(model: Path, adapter: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    given = ["-m", str(model), "-md", "none", "-c", "64", "-t", "1", "--no-repack"]
    plan.write_text(finish(1, ["plan", *given, "--lora", str(adapter), "--json"]).stdout)
    by_plan = ["run", "-m", str(model), "-md", "none", "-p", SHORT, "-n", "4", "--plan", str(plan)]
    done = finish(1, [*by_plan, "--lora", str(adapter)])
    assert done.returncode == 0, done.stderr
    done = finish(1, by_plan)
    assert done.returncode == 2 and "numerics name is exact-no-repack-lora-" in done.stderr, done.stderr


def test_only_rank_0_needs_the_file(model: Path, adapter: Path, tmp_path: Path) -> None:
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    shutil.copy(adapter, tmp_path / "here" / "a.gguf")
    given = ["--json", *words(model, SHORT, "-md", "none")]
    done = job(tmp_path, 3, "--lora", "a.gguf", greedy=given)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == run_json(1, [*given, "--lora", str(adapter)])["tokens"]
