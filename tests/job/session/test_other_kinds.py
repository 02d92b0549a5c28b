"""GGUF files that are no models: each command names what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter

from pipeinfer.errors import UserError
from pipeinfer.job.inspect.model_report import describe_file
from pipeinfer.models.gguf.model_info import read_model_info


@pytest.mark.parametrize(
    ("kind", "architecture", "said"), [("mmproj", "clip", "projector"), ("adapter", "llama", "LoRA")]
)
def test_what_belongs_to_a_model_is_named(tmp_path: Path, kind: str, architecture: str, said: str) -> None:
    path = tmp_path / "ein Umläut.gguf"
    writer = GGUFWriter(path, architecture)
    writer.add_type(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for read in (read_model_info, lambda path: describe_file(path, 0, "exact")):
        with pytest.raises(UserError, match=f"{path} is an? .*{said}"):
            read(path)
