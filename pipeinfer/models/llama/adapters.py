"""LoRA adapters of a loaded slice: in libllama, and in its contexts. Knows no file on disk."""

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.adapter import ScaledAdapter
from pipeinfer.models.gguf.writer import memory_file
from pipeinfer.models.llama import ggml

Applied = Sequence[tuple[object, float]]  # (libllama's adapter, scale)


class LoadedAdapters:
    """Adapters of a model, which frees them. With exact numerics rows of guesses have adapters without tiles, and
    blocks of a prompt, always of the same rows, have them as in the file."""

    def __init__(self, library: ModuleType, model: object, adapters: Sequence[ScaledAdapter], is_exact: bool) -> None:
        """`adapters`: slices. Before any context, for which libllama counts their nodes. Raises UserError if libllama
        refuses one."""
        self._lib, self._model = library, model
        self._of_blocks = self._of_rows = [*self._load(adapters, False)]
        if is_exact and any(pair.is_tiled for adapter, _ in adapters for pair in adapter.pairs):
            self._of_rows = [*self._load(adapters, True)]

    def apply(self, context: object, are_blocks: bool) -> None:
        applied: Applied = self._of_blocks if are_blocks else self._of_rows
        if applied:
            handles = (self._lib.llama_adapter_lora_p_ctypes * len(applied))(*(handle for handle, _ in applied))
            scales = (ctypes.c_float * len(applied))(*(scale for _, scale in applied))
            self._lib.llama_set_adapters_lora(context, handles, len(applied), scales)

    def _load(self, adapters: Sequence[ScaledAdapter], untiled: bool) -> Iterator[tuple[object, float]]:
        for adapter, scale in adapters:
            for rank, content in adapter.files(untiled):
                yield self._open(adapter.path, content), adapter.scale(scale, rank)

    def _open(self, path: Path, content: bytes) -> object:
        def write(fd: int) -> None:
            with open(fd, "wb", closefd=False) as file:
                file.write(content)

        with open(memory_file("adapter", len(content), (), write), "rb") as file:
            handle = self._lib.llama_adapter_lora_init(self._model, f"/proc/self/fd/{file.fileno()}".encode())
        if not handle:
            raise UserError(f"{path} cannot be loaded: {ggml.last_errors() or 'libllama gives no reason'}")
        return handle
