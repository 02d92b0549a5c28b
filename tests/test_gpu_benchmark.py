"""The script that measures GPUs, tried on a CPU: every part of it runs to its end and finds what it is to find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.torch.params import TorchParams
from tests.models.test_llama_stage import make_batch, random_tokens, run
from tests.support.jobs import ROOT, environment
from tests.support.rpc_server import needs_rpc, servers

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'pipeinfer[torch]'")

from pipeinfer.models.torch.stage import TorchStage


def test_the_script_for_gpus_runs_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "figures.jsonl"
    words = ["--quick", "--device", "cpu", "--backends", "torch:int4", "--compiler", "eager"]
    command = [
        sys.executable,
        str(ROOT / "benchmarks/gpu.py"),
        *words,
        "--folder",
        str(tmp_path),
        "--output",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in output.read_text().splitlines()]
    checked = [each for each in found if "right" in each]
    assert len(checked) >= 20 and all(each["right"] for each in checked)
    assert sum("rows_that_differ" in each for each in checked) == 6
    speeds = {each["what"]: each for each in found if "backend" in each}
    assert set(speeds) == {"one row", "one text", "many texts", "auto with a draft"}
    assert all(each["tokens_per_s"] > 0 for what, each in speeds.items() if what != "one row")
    assert 0 < speeds["one text"]["of_limit"] < 1
    assert (tmp_path / "tiny-torch-int4.png").stat().st_size > 1000
    assert any(each.get("begun_ahead") for each in found) and any(each.get("exact") for each in found)
    others = {each["what"]: each for each in found if "distinct" in each}
    assert 0 < others["torch.compile"]["of_limit"] < 1 and "transformers" in others


@pytest.mark.long
@needs_rpc
def test_the_script_takes_any_device_of_libllama() -> None:
    with servers(1, 1) as two:
        words = ["--quick", "--device", "RPC0", "--rpc", ",".join(each.endpoint for each in two)]
        command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    rows = {each["what"].split(",")[0]: each["rows_at_once"] for each in found if "rows_at_once" in each}
    assert rows["llama F32"] == 1 and rows["llama Q8_0"] == 32
    assert all(each["right"] for each in found if "median" in each)
    assert [each["what"] for each in found if "size" in each] == ["one text", "many texts", "auto with a draft"]


def test_the_plain_llama_is_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with others must compute the same: its choice after every token of a text is torch's."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import torch
    from gpu_others import PlainLlama
    from random_model import SIZES, write_random

    path, tokens = write_random(tmp_path / "tiny.gguf", SIZES["tiny"]), random_tokens(60)
    info = read_model_info(path)
    stage = TorchStage(open_slice(info, 0, info.n_layer), TorchParams(64, 2, 64, 64, 1, "cpu", "f32", exact=False))
    expected = run([stage], make_batch(tokens, 0)).argmax(1).tolist()
    plain, position, found = PlainLlama(path, "cpu", "f32", 64), torch.zeros(1, dtype=torch.int64), []
    with torch.inference_mode():
        for token in tokens:
            following, position = plain(torch.tensor([token]), position)
            found.append(int(following))
    assert found == expected and len(set(found)) > 20
