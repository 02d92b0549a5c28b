"""Tensors that are on another device than their layers: those whose names match a pattern, and experts of the first
layers. Names and layers are those of the whole model, of which a slice has some. Loads nothing."""

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, starmap
from typing import NamedTuple

from pipeinfer.errors import UserError
from pipeinfer.models.gguf.model_info import ModelInfo, layer_of
from pipeinfer.models.gguf.slice import slice_tensors

HOST = "CPU"  # libggml's name of the device whose memory is the host's
EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")  # as in llama.cpp


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """`pattern`: a regular expression, found in names; `device`: libggml's name of one."""

    pattern: str
    device: str

    def __str__(self) -> str:
        return f"{self.pattern}={self.device}"

    @classmethod
    def parse(cls, text: str) -> "TensorPlace":
        """PATTERN=DEVICE. Raises ValueError."""
        pattern, _, device = text.partition("=")
        if not pattern or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.:/\[\]-]{0,63}", device):
            raise ValueError("is not PATTERN=DEVICE, names of tensors and a device, as blk.[0-3].ffn_.*_exps=CPU")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"has no regular expression in front of =: {error}") from None
        return cls(pattern, device)


class TensorPlaces(NamedTuple):
    """`by_name`: the first pattern that a name matches counts. `n_cpu_moe`: the first layers of a slice, whose other
    experts are in the host's memory; negative: all layers."""

    by_name: tuple[TensorPlace, ...] = ()
    n_cpu_moe: int = 0

    @property
    def text(self) -> str:
        """As on the command line; empty: there are none."""
        experts = "" if not self.n_cpu_moe else "-cmoe" if self.n_cpu_moe < 0 else f"-ncmoe {self.n_cpu_moe}"
        return " ".join(filter(None, [*(f"-ot {place}" for place in self.by_name), experts]))

    def tensor_device(self, name: str, first: int = 0) -> str:
        """Empty: that of its layer, or of the output. `first`: of the slice's layers."""
        layer = layer_of(name)
        if layer is None and not name.startswith("output"):
            return ""
        device = next((place.device for place in self.by_name if re.search(place.pattern, name)), "")
        is_moved = layer is not None and EXPERTS.search(name) and self.moves_experts(layer - first)
        return device or (HOST if is_moved else "")

    def moves_experts(self, layer: int) -> bool:
        """Whether experts of this layer of a slice are in the host's memory, without patterns."""
        return self.n_cpu_moe < 0 or layer < self.n_cpu_moe

    def gpu_bytes(self, info: ModelInfo, first: int, last: int, n_on_gpu: int, has_head: bool) -> int:
        """Of the weights of layers [first, last) on GPUs, where the last `n_on_gpu` are; with `has_head` the output."""
        before, output = _moved(info, self.by_name)
        start, n_moved = last - n_on_gpu, last - first if self.n_cpu_moe < 0 else self.n_cpu_moe
        n_bytes = before[start].to_gpus - before[first].to_gpus + before[last].on_gpus - before[start].on_gpus
        if first + n_moved > start:
            n_bytes -= before[min(first + n_moved, last)].experts - before[start].experts
        if has_head:
            return n_bytes + output.on_gpus
        return n_bytes + (output.to_gpus if last == info.n_layer else 0)


def has_experts(info: ModelInfo) -> bool:
    return any(EXPERTS.search(tensor.name) for tensor in info.tensors)


class _Places(NamedTuple):
    """Bytes of layers, or of the output: on GPUs where these are, of them experts that no pattern has; and on GPUs by
    patterns where they are not."""

    on_gpus: int
    experts: int
    to_gpus: int


@lru_cache(maxsize=64)  # a planner asks for every way to cut
def _moved(info: ModelInfo, by_name: tuple[TensorPlace, ...]) -> tuple[tuple[_Places, ...], _Places]:
    """Of the layers before each and of all, and of the output."""
    places = TensorPlaces(by_name)
    *layers, output = [[n_bytes, 0, 0] for n_bytes in (*info.layer_bytes, info.output_bytes)]
    for tensor in info.tensors:
        layer, device = layer_of(tensor.name), places.tensor_device(tensor.name)
        if layer is None or layer < info.n_layer:
            sums = output if layer is None else layers[layer]
            sums[0] -= tensor.n_bytes if device == HOST else 0
            sums[1] += tensor.n_bytes if not device and EXPERTS.search(tensor.name) else 0
            sums[2] += tensor.n_bytes if device not in ("", HOST) else 0
    before = [accumulate(sizes, initial=0) for sizes in zip(*layers, strict=True)]
    return tuple(starmap(_Places, zip(*before, strict=True))), _Places(*output)


def moved_tensors(info: ModelInfo, first: int, last: int, places: TensorPlaces) -> dict[str, str]:
    """Regular expressions of names in the slice of layers [first, last), few for many tensors -> the device of each."""
    if not places.text:
        return {}
    layers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in slice_tensors(info, first, last):
        if not each.is_hole and (device := places.tensor_device(each.tensor.name, first)):
            layer = layer_of(each.name)
            end = each.name if layer is None else each.name.split(".", 2)[2]
            layers[end, device].append("" if layer is None else str(layer))
    patterns = {}
    for (end, device), numbers in layers.items():
        of_layers = rf"blk\.({'|'.join(numbers)})\." if numbers[0] else ""
        patterns[f"^{of_layers}{re.escape(end)}$"] = device
    return patterns


def check_names(info: ModelInfo, by_name: tuple[TensorPlace, ...]) -> None:
    """Raises UserError for a pattern that is in no tensor's name."""
    for place in by_name:
        if not any(TensorPlaces((place,)).tensor_device(tensor.name) for tensor in info.tensors):
            names = "no tensor of a layer or of the output head has such a name"
            way_out = "layers are blk.0, blk.1 and so on, experts blk.0.ffn_up_exps; or leave it out"
            raise UserError(f"-ot {place}: {names} in {info.path.name}; {way_out}")
