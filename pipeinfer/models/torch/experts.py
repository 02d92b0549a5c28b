"""The experts that rows have chosen, all multiplied at once and without the host's knowing which: nothing waits for the
device, so that it can be recorded. Knows neither router nor layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from pipeinfer.models.torch.params import CUDA

grouped_mm: Callable[..., torch.Tensor] | None = getattr(torch.nn.functional, "grouped_mm", None)
"""Of torch 2.10 and newer."""


def of_experts(
    rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, experts: Sequence[torch.Tensor],
    gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """(n_rows, n_embd): what the experts that each row chooses add. `chosen`, `shares`: (n_rows, n_used), which, and
    how much of each. `experts`: gate, up and down, (n_experts, n_out, n_in) each."""
    assert grouped_mm, "this torch has no such kernel"
    n_rows, n_used = chosen.shape
    gate, up, down = (each.transpose(1, 2) for each in experts)
    by_expert, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(len(gate), device=rows.device), right=True).int()
    taken = rows.index_select(0, order // n_used).to(gate.dtype)
    hidden = gated(grouped_mm(taken, gate, offs=ends).float(), grouped_mm(taken, up, offs=ends).float())
    found = grouped_mm(hidden.to(down.dtype), down, offs=ends).float()
    # back in the order of rows, and added up in that of the choice: atomic additions would have none
    found = found.index_select(0, order.argsort()).view(n_rows, n_used, -1)
    return (found * shares[:, :, None]).sum(1)


def runs_without_waiting(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's kernel for that leaves the host alone: some devices and types have none, and go expert by
    expert."""
    if grouped_mm is None:
        return False
    rows, matrices = (torch.zeros(size, dtype=dtype, device=device) for size in ((2, 32), (2, 32, 32)))
    ends = torch.tensor([1, 2], dtype=torch.int32, device=device)
    try:
        with _no_waiting() if device.type == CUDA else nullcontext():
            grouped_mm(rows, matrices, offs=ends)
    except RuntimeError:  # it waits, or does not know the type
        return False
    return True


@contextmanager
def _no_waiting() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
