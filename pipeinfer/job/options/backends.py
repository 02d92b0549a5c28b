"""What computes a rank's layers, and where: libllama, or torch on a device. Loads neither."""

import re
from dataclasses import dataclass

from pipeinfer.models.torch.params import AUTO, CUDA

LLAMA, TORCH = "llama", "torch"
SPELLING = re.compile(r"torch(?::(auto|cpu|cuda(?::[0-9]{1,3})?))?(?::(f32|bf16|int8|int4))?")
WANTED = (
    "llama, torch, or torch with a device (cpu, cuda, cuda:N) or a type (f32, bf16, int8, int4) behind it: "
    "torch:cpu:bf16"
)


@dataclass(frozen=True, slots=True)
class Backend:
    """device, dtype: of torch alone, as `TorchParams` has them."""

    name: str = LLAMA
    device: str = AUTO
    dtype: str = AUTO

    @classmethod
    def parse(cls, text: str) -> "Backend":
        """Raises ValueError, with what is wanted."""
        if text == LLAMA:
            return cls()
        found = SPELLING.fullmatch(text)
        if found is None:
            raise ValueError(f"is not {WANTED}")
        return cls(TORCH, found[1] or AUTO, found[2] or AUTO)

    def __str__(self) -> str:
        return ":".join([self.name, *(each for each in (self.device, self.dtype) if each != AUTO)])

    @property
    def is_torch(self) -> bool:
        return self.name == TORCH

    @property
    def wants_gpu(self) -> bool:
        """Whether it is on a GPU wherever it runs; `auto` is where there is one."""
        return self.device.startswith(CUDA)
