"""LoRA adapters of a loaded slice: in libllama, and in its contexts. Knows no file on disk."""

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from pipeinfer.core.types import AdapterScales
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.adapter import Adapter, ScaledAdapter, active_scales
from pipeinfer.models.gguf.writer import memory_file
from pipeinfer.models.llama import ggml


class LoadedAdapters:
    """Adapters of a model, which frees them. With exact numerics rows of guesses have adapters without tiles, and
    blocks of a prompt, always of the same rows, have them as in the file."""

    def __init__(self, library: ModuleType, model: object, adapters: Sequence[ScaledAdapter], is_exact: bool) -> None:
        """`adapters`: slices, with the factors of rows that say nothing. Before any context, for which libllama counts
        their nodes. Raises UserError if libllama refuses one."""
        self._lib, self._model = library, model
        self._adapters = [adapter for adapter, _ in adapters]
        self._default = active_scales(adapters)
        self._of_blocks = self._of_rows = [[*self._load(adapter, False)] for adapter in self._adapters]
        if is_exact and any(pair.is_tiled for adapter in self._adapters for pair in adapter.pairs):
            self._of_rows = [[*self._load(adapter, True)] for adapter in self._adapters]

    def apply(self, context: object, are_blocks: bool, scales: AdapterScales | None) -> None:
        """Before a batch. libllama makes its graphs anew where they differ from those of the last one."""
        if not self._adapters:
            return
        parts, applied = self._of_blocks if are_blocks else self._of_rows, list[tuple[object, float]]()
        for number, scale in self._default if scales is None else scales:
            applied += [(handle, self._adapters[number].scale(scale, rank)) for handle, rank in parts[number]]
        handles = (self._lib.llama_adapter_lora_p_ctypes * len(applied))(*(handle for handle, _ in applied))
        factors = (ctypes.c_float * len(applied))(*(factor for _, factor in applied))
        self._lib.llama_set_adapters_lora(context, handles, len(applied), factors)

    def _load(self, adapter: Adapter, untiled: bool) -> Iterator[tuple[object, int]]:
        for rank, content in adapter.files(untiled):
            yield self._open(adapter.path, content), rank

    def _open(self, path: Path, content: bytes) -> object:
        def write(fd: int) -> None:
            with open(fd, "wb", closefd=False) as file:
                file.write(content)

        with open(memory_file("adapter", len(content), (), write), "rb") as file:
            handle = self._lib.llama_adapter_lora_init(self._model, f"/proc/self/fd/{file.fileno()}".encode())
        if not handle:
            raise UserError(f"{path} cannot be loaded: {ggml.last_errors() or 'libllama gives no reason'}")
        return handle
