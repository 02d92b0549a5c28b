"""One layer of the llama family without attention itself, and its rotary positions. Knows weights and rows, no cache.

The residual stream is float32 whatever the weights are; matrices multiply in their own type. The pairs that positions
rotate are half a head apart. Where a model has them side by side, its rows of queries and keys are reordered when they
are loaded, which changes no product of the two."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import linear, rms_norm, silu

from pipeinfer.models.torch.matrices import Weight, gated_apart, in_groups, multiply
from pipeinfer.models.torch.params import CUDA, Hyperparameters
from pipeinfer.models.torch.weights import Weights

BLOCK = 256  # positions computed at a time, so that an angle has the same bits in every run


class RopeTable:
    """Cosines and sines of all positions up to the highest so far. `factors`: (n_rot / 2,) divisors."""

    def __init__(self, numbers: Hyperparameters, factors: npt.NDArray[np.float32] | None) -> None:
        pairs = np.arange(numbers.n_rot // 2, dtype=np.float64)
        frequencies = numbers.rope_scale * numbers.rope_base ** (-2.0 * pairs / numbers.n_rot)
        self._frequencies = frequencies if factors is None else frequencies / factors.astype(np.float64)
        self._table = np.empty((2, 0, 2 * len(pairs)), np.float32)

    def at(self, positions: npt.NDArray[np.int32]) -> torch.Tensor:
        """(2, n_rows, 1, n_rot): cosines and sines, as `rotate` takes them."""
        while int(positions.max()) >= self._table.shape[1]:
            first = self._table.shape[1]
            angles = np.arange(first, first + BLOCK)[:, None] * self._frequencies
            cos, sin = np.cos(angles), np.sin(angles)
            further = np.stack([np.concatenate([cos, cos], 1), np.concatenate([-sin, sin], 1)])
            self._table = np.concatenate([self._table, further], axis=1, dtype="f4")
        return torch.from_numpy(self._table[:, positions, None])


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first n_rot numbers of each head, (n_rows, n_heads, head_dim), by their rows' angles, in place. `sin`
    is negative for the first of each pair."""
    rotated = heads[..., : cos.shape[-1]]
    first, second = rotated.chunk(2, -1)
    crossed = torch.cat([second, first], -1).mul_(sin)
    rotated.mul_(cos).add_(crossed)


def deinterleaved_order(n_heads: int, head_dim: int, n_rot: int) -> torch.Tensor:
    """The order of rows of queries or keys that puts pairs, which are side by side, half of n_rot apart."""
    of_head = torch.cat([torch.arange(0, n_rot, 2), torch.arange(1, n_rot, 2), torch.arange(n_rot, head_dim)])
    return (torch.arange(n_heads)[:, None] * head_dim + of_head).flatten()


Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LEAST_SUM = 6.103515625e-5  # libllama divides the shares of a row's experts by no smaller sum

grouped_mm: Callable[..., torch.Tensor] | None = getattr(torch.nn.functional, "grouped_mm", None)
"""In torch 2.10 and newer."""


class Matrix:
    """One or several of a layer's matrices with the same input, multiplied at once. `order`: of the rows of each."""

    def __init__(
        self, weights: Weights, names: list[str], order: Callable[[str], torch.Tensor | None] = lambda name: None
    ) -> None:
        self.weight = weights.matrix(*(f"{name}.weight" for name in names), order=order)
        self.bias: torch.Tensor | None = None
        if any(weights.has(f"{name}.bias") for name in names):
            self.bias = torch.cat([self._bias(weights, name, order(f"{name}.weight")) for name in names])

    @staticmethod
    def _bias(weights: Weights, name: str, order: torch.Tensor | None) -> torch.Tensor:
        if not weights.has(f"{name}.bias"):
            n_rows = weights.tensors[f"{name}.weight"].shape[1]
            return torch.zeros(n_rows, device=weights.device)
        bias = weights.vector(f"{name}.bias")
        return bias if order is None else bias[order.to(bias.device)]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """(n_rows, n_in) -> (n_rows, n_out) in float32."""
        product = multiply(rows, self.weight)
        return product if self.bias is None else product + self.bias


class Layer:
    """`project` comes before attention, `finish` after it."""

    def __init__(
        self, weights: Weights, index: int, numbers: Hyperparameters, exact: bool, experts_at_once: bool = False
    ) -> None:
        """`index`: in the slice. `exact`: a row's bits do not depend on the other rows; rows come in groups then.
        `experts_at_once`: the host does not wait to know the chosen experts; weights must be tensors."""
        at, self._numbers, self._experts_at_once = f"blk.{index}.", numbers, experts_at_once
        self._gate = gated_apart if exact else lambda gate, up: silu(gate) * up
        self.group = 0  # rows that an expert multiplies at once; 0: all

        def norm(name: str) -> torch.Tensor | None:
            return weights.vector(f"{at}{name}.weight") if weights.has(f"{at}{name}.weight") else None

        self._attn_norm, self._ffn_norm = (weights.vector(f"{at}{name}_norm.weight") for name in ("attn", "ffn"))
        self._q_norm, self._k_norm = norm("attn_q_norm"), norm("attn_k_norm")
        self._qkv = Matrix(weights, [f"{at}attn_{name}" for name in "qkv"], partial(_head_order, numbers))
        self._out = Matrix(weights, [f"{at}attn_output"])
        self._router: torch.Tensor | None = None
        if weights.has(f"{at}ffn_gate_inp.weight"):
            self._router = weights.vector(f"{at}ffn_gate_inp.weight")
            self._experts = [weights.matrix(f"{at}ffn_{name}_exps.weight") for name in ("gate", "up", "down")]
        else:
            self._gate_up = Matrix(weights, [f"{at}ffn_gate", f"{at}ffn_up"])
            self._down = Matrix(weights, [f"{at}ffn_down"])

    @property
    def matrices(self) -> list[Weight]:
        """All matrices, (n_out, n_in) each; of the experts those of one."""
        if self._router is not None:
            return [self._qkv.weight, self._out.weight, self._router, *(each[0] for each in self._experts)]
        return [self._qkv.weight, self._out.weight, self._gate_up.weight, self._down.weight]

    def project(self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(n_rows, n_embd) -> (n_rows, n_head + 2 * n_head_kv, head_dim): queries, keys and values, rotated to
        the positions of `cos` and `sin` (see `rotate`). In one tensor: small steps on a GPU cost as large ones."""
        numbers, n_rows = self._numbers, len(rows)
        normed = rms_norm(rows, rows.shape[1:], self._attn_norm, numbers.epsilon)
        heads = self._qkv(normed).view(n_rows, -1, numbers.head_dim)
        if self._q_norm is not None or self._k_norm is not None:
            queries, keys, values = heads.split([numbers.n_head, numbers.n_head_kv, numbers.n_head_kv], 1)
            heads = torch.cat([self._normed(queries, self._q_norm), self._normed(keys, self._k_norm), values], 1)
        rotate(heads[:, : numbers.n_head + numbers.n_head_kv], cos, sin)
        return heads

    def finish(self, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream after the layer. `attended`: (n_rows, n_head * head_dim), the result of attention."""
        rows = rows + self._out(attended)
        normed = rms_norm(rows, rows.shape[1:], self._ffn_norm, self._numbers.epsilon)
        if self._router is not None:
            return rows + self._of_experts(normed)
        gate, up = self._gate_up(normed).chunk(2, 1)
        return rows + self._down(self._gate(gate, up))

    def _normed(self, heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return heads if weight is None else rms_norm(heads, heads.shape[2:], weight, self._numbers.epsilon)

    def _of_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of each row's experts, weighted by their shares."""
        assert self._router is not None
        shares = torch.softmax(linear(rows, self._router), dim=1)
        shares, chosen = shares.topk(self._numbers.n_expert_used, dim=1)
        shares = shares / shares.sum(1, keepdim=True).clamp_min(LEAST_SUM)
        if self._experts_at_once:
            matrices = [each for each in self._experts if isinstance(each, torch.Tensor)]
            return of_experts(rows, chosen, shares, matrices, self._gate)
        sums = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():
            share = (shares * (chosen == expert)).sum(1, keepdim=True)
            used = share[:, 0].nonzero()[:, 0]
            (added,) = in_groups(self.group, partial(self._of_expert, expert), rows[used])
            sums[used] += share[used] * added
        return sums

    def _of_expert(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate, up, down = (each[expert] for each in self._experts)
        return multiply(self._gate(multiply(rows, gate), multiply(rows, up)), down)


def _head_order(numbers: Hyperparameters, name: str) -> torch.Tensor | None:
    if not numbers.interleaved or "attn_v" in name:
        return None
    n_heads = numbers.n_head if "attn_q" in name else numbers.n_head_kv
    return deinterleaved_order(n_heads, numbers.head_dim, numbers.n_rot)


def of_experts(
    rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, experts: Sequence[torch.Tensor], gated: Gate
) -> torch.Tensor:
    """(n_rows, n_embd): the weighted sum of the experts that each row chooses. `chosen`, `shares`: (n_rows, n_used).
    `experts`: gate, up and down, (n_experts, n_out, n_in) each. The host need not know which are chosen."""
    assert grouped_mm, "this torch has no such kernel"
    n_rows, n_used = chosen.shape
    gate, up, down = (each.transpose(1, 2) for each in experts)
    by_expert, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(len(gate), device=rows.device), right=True).int()
    taken = rows.index_select(0, order // n_used).to(gate.dtype)
    hidden = gated(grouped_mm(taken, gate, offs=ends).float(), grouped_mm(taken, up, offs=ends).float())
    sums = grouped_mm(hidden.to(down.dtype), down, offs=ends).float()
    # back in the order of rows, and added in the order of the choice: atomic additions have none
    sums = sums.index_select(0, order.argsort()).view(n_rows, n_used, -1)
    return (sums * shares[:, :, None]).sum(1)


def runs_without_waiting(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the host need not wait for `of_experts`: some devices and types have no such kernel."""
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
