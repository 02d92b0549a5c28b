"""libggml's AMX kernels are tried in a process of their own before a model may use them."""

from __future__ import annotations

from pathlib import Path

from pipeinfer.models.llama.ggml import amx_works, load_library, probe_amx


def test_what_is_decided_is_what_the_probe_finds() -> None:
    library = load_library()
    found = probe_amx(Path(str(library.__file__)).parent / "lib")
    assert amx_works() == (found or b"AMX_INT8 = 1" not in library.llama_print_system_info())


def test_libraries_that_cannot_be_tried_are_not_trusted(tmp_path: Path) -> None:
    assert not probe_amx(tmp_path)
