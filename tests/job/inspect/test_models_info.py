"""`models info` and `models check`: what is told of files and pairs, and what comes out where they are odd."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from click.testing import CliRunner, Result

from pipeinfer.cli.models import models
from pipeinfer.errors import UserError
from pipeinfer.job.inspect.pair_report import acceptance
from pipeinfer.job.placement.job_plan import cells_for
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.text.tokenizer import Tokenizer
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.gguf_factory import CHAT_TEMPLATE, Shape, write_model

TEXT = "the model of the layer"


def call(*words: object) -> Result:
    return CliRunner().invoke(models, [str(word) for word in words], standalone_mode=False)


def told(*words: object) -> dict[str, Any]:
    result = call(*words, "--json")
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_info_tells_what_the_file_is(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", Shape(n_layer=3), template=CHAT_TEMPLATE)
    info, found = read_model_info(path), told("info", path, "-c", "600")
    assert found["architecture"] == "llama" and found["n_layer"] == 3
    assert found["layer_bytes"] == list(info.layer_bytes)
    assert found["vocabulary"]["n_tokens"] == 320
    assert found["vocabulary"]["special"]["bos"] == {"id": 1, "text": "<s>"}
    assert {"id": 319, "text": "<|end|>"} in found["vocabulary"]["ends"]
    assert found["template"] == CHAT_TEMPLATE
    assert found["sliceable"] and found["exact"]
    lines = call("info", path).stdout
    assert f"template      {len(CHAT_TEMPLATE)} characters" in lines and "sliceable     yes" in lines


def test_what_a_terminal_would_act_on_is_not_printed(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m\x1b]0;x\x07.gguf", Shape(n_layer=2))
    text = call("info", path).stdout
    assert "m?]0;x?.gguf: " in text and "\x1b" not in text


def test_a_stage_weighs_its_layers_and_its_context(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", Shape(n_layer=4))
    info = read_model_info(path)
    small, large = told("info", path, "-c", "256")["stages"], told("info", path, "-c", "5000")["stages"]
    assert [stage["n_stages"] for stage in large] == [1, 2, 4]
    assert large[0]["weight_bytes"] == info.n_bytes and large[0]["layers"] == [0, 4]
    assert large[1]["weight_bytes"] < info.n_bytes
    assert large[0]["kv_bytes"] >= cells_for(5000) * sum(info.kv_bytes_per_cell) > small[0]["kv_bytes"]
    fast = told("info", path, "-c", "5000", "--numerics", "fast")["stages"]
    assert fast[0]["kv_bytes"] == cells_for(5000) * sum(info.kv_bytes_per_cell), "no cache for prompts"


def test_info_tells_why_a_file_cannot_be_cut(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "no-such-architecture")
    writer.add_block_count(7)
    writer.add_chat_template([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = told("info", tmp_path / "odd.gguf")
    assert not found["sliceable"] and "no-such-architecture" in found["reason"] and found["stages"] == []
    assert found["n_layer"] == 7 and found["vocabulary"]["error"]
    assert (found["template"], found["named_templates"]) == ("plain", {"tool_use": "tools"})
    result = call("info", tmp_path / "odd.gguf")
    assert result.return_value == 0 and "sliceable     no: " in result.stdout and "tool_use" in result.stdout


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no model at all"])
def test_info_refuses_what_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    assert isinstance(call("info", tmp_path / "bad.gguf").exception, UserError)


def test_check_measures_the_acceptance_on_a_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    tokenizer = Tokenizer(TARGET)
    expected = acceptance(TARGET, DRAFT, [tokenizer.encode(TEXT)], 20)
    tokenizer.close()
    found = told("check", TARGET, DRAFT, "-f", tmp_path / "text", "-n", "20", "-t", "1")
    assert found["vocabularies_match"] and found["predicted_n"] == 20
    assert found["acceptance_rate"] == expected and 0 < expected < 1
    assert told("check", TARGET, TARGET, "-p", TEXT, "-n", "20", "-t", "1")["acceptance_rate"] == 1.0


@pytest.mark.parametrize(
    ("text", "n", "way_out"), [("a", 1023, "use -n 1022 at most"), ("def f(x):\n" * 300, 1, "give a shorter text")]
)
def test_check_measures_nothing_where_the_target_was_not_trained(text: str, n: int, way_out: str) -> None:
    error = call("check", TARGET, DRAFT, "-p", text, "-n", n, "-t", "1").exception
    assert isinstance(error, UserError) and "more than the 1024 that" in str(error) and way_out in str(error), error


def test_check_says_that_a_file_is_cut_off(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(TARGET.read_bytes()[:-1000])
    for pair in ((cut, DRAFT), (TARGET, cut)):
        error = call("check", *pair).exception
        assert isinstance(error, UserError) and "cut.gguf is cut off: 1000 of" in str(error), error


def test_check_refuses_a_draft_that_keeps_states(tmp_path: Path) -> None:
    draft = write_random_model(tmp_path / "draft.gguf", replace(MODELS["mamba2"], with_vocab=True))
    error = call("check", TARGET, draft, "-n", 0).exception
    assert isinstance(error, UserError) and str(error).endswith("it cannot be a draft: take another one"), error


def test_info_wants_the_first_part_of_a_model(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", Shape(), part_tensors=20)
    first, *later = sorted(tmp_path.iterdir())
    assert told("info", first)["sliceable"]
    error = call("info", later[0]).exception
    assert isinstance(error, UserError) and str(error).endswith(f"give the first, {first.name}"), error


def test_check_of_vocabularies_alone_loads_no_weights() -> None:
    result = call("check", TARGET, DRAFT, "-n", "0")
    assert result.return_value == 0 and "vocabularies  match" in result.stdout and "acceptance" not in result.stdout


def test_check_names_all_tokens_that_differ(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain.gguf", Shape(n_layer=1))
    marked = write_model(tmp_path / "marked.gguf", Shape(n_layer=1, n_vocab=321), template=CHAT_TEMPLATE)
    assert differing(told("check", plain, marked)) == [315, 316, 317, 318, 319, 320]
    result = call("check", plain, marked, "-n", "8", "-t", "1")
    assert result.return_value == 0, "the command's exit code: they are translated"
    assert "vocabularies  differ in 6 points" in result.stdout and "its tokens translated" in result.stdout
    assert "token 319 is '[PAD319]' and '</think>'" in result.stdout and "acceptance    " in result.stdout
    other = told("check", plain, TARGET)
    assert len(differing(other)) > 3000 and other["acceptance_rate"] is None and not other["can_draft"]
    result = call("check", plain, TARGET)
    lines = result.stdout.splitlines()
    assert result.return_value == 1 and len(lines) < 30 and lines[-2].endswith("more, which --json lists")
    assert "cannot draft for" in lines[-1] and "tokens they share" in lines[-1]


def differing(found: dict[str, Any]) -> Sequence[int]:
    return [each["token"] for each in found["differences"] if each["token"] is not None]
