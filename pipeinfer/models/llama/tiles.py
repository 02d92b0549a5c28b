"""Keep libggml's tiled kernels from a model's matrices, and let them take these again. Knows no batch.

From 8 rows on these kernels multiply by weights of TILED_TYPES that are laid out as in the file, and add up in another
order. They take no tensor whose field `extra` is set, and for weights in a CPU's plain memory nothing else reads that.
"""

import ctypes
from collections.abc import Iterable, Iterator

from pipeinfer.models.gguf.model_info import ModelInfo, layer_of
from pipeinfer.models.llama import ggml
from pipeinfer.models.llama.params import TILED_TYPES

NAME_BYTES = 64
"""Of a tensor's name, behind which it has the field."""

FIND = "_ZNK11llama_model10get_tensorEPKc"
"""libllama's `llama_model::get_tensor`."""

_MARK = ctypes.create_string_buffer(1)


def can_find() -> bool:
    """Whether this build tells where a model's tensors are."""
    return hasattr(ggml.sibling("llama"), FIND)


def set_apart(tensor: int) -> None:
    """Keep tiled kernels from the tensor at this address."""
    _extra(tensor).value = ctypes.addressof(_MARK)


def names_of(info: ModelInfo, first: int, last: int) -> Iterator[str]:
    """Of the matrices that such kernels may take, as a slice of layers [first, last) names them."""
    for tensor in info.tensors:
        layer = layer_of(tensor.name)
        if tensor.type in TILED_TYPES and (layer is None or first <= layer < last):
            yield tensor.name if layer is None else f"blk.{layer - first}.{tensor.name.split('.', 2)[2]}"


class Tiles:
    """Of the tensors of these names of a loaded model, as long as it is loaded. Names that it lacks are left out."""

    def __init__(self, model: object, names: Iterable[str]) -> None:
        find = getattr(ggml.sibling("llama"), FIND)
        find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
        found = filter(None, (find(model, name.encode()) for name in names))
        self._fields = [field for field in map(_extra, found) if not field.value]  # that of repacked weights is set
        self._are_used = True

    def use(self, are_used: bool) -> None:
        """Whether tiled kernels may take these tensors from now on."""
        if are_used != self._are_used:
            for field in self._fields:
                field.value = None if are_used else ctypes.addressof(_MARK)
            self._are_used = are_used


def _extra(tensor: int) -> ctypes.c_void_p:
    return ctypes.c_void_p.from_address(ggml.ggml().ggml_get_name(tensor) + NAME_BYTES)
