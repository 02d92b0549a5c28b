"""One layer of the llama family, but for attention itself. Knows weights and rows, no cache.

The residual stream is float32 whatever the weights are; matrices multiply in their own type.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import linear, rms_norm, silu

from pipeinfer.models.torch.experts import of_experts
from pipeinfer.models.torch.groups import gated_apart, in_groups
from pipeinfer.models.torch.hyperparameters import Hyperparameters
from pipeinfer.models.torch.matrices import Weight, multiply
from pipeinfer.models.torch.rope import deinterleaved_order, rotate
from pipeinfer.models.torch.weights import Weights

LEAST_SUM = 6.103515625e-5
"""Of the shares of the experts that a row uses: libllama divides by no less."""


class Matrix:
    """One or several of a layer's matrices with the same input, multiplied at once."""

    def __init__(self, weights: Weights, names: list[str], order: Callable[[str], torch.Tensor | None]) -> None:
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
        found = multiply(rows, self.weight)
        return found if self.bias is None else found + self.bias


class Layer:
    """`project` comes before attention, `finish` after it."""

    def __init__(
        self, weights: Weights, index: int, numbers: Hyperparameters, exact: bool, experts_at_once: bool = False
    ) -> None:
        """`index`: in the slice. `exact`: no row's bits shall depend on the others'; rows then come in groups.
        `experts_at_once`: all that rows choose, without waiting for what these are; weights must be tensors."""
        at, self._numbers, self._experts_at_once = f"blk.{index}.", numbers, experts_at_once
        self._gate = gated_apart if exact else _gated
        self.group = 0  # rows of a group of an expert's; 0: all at once

        def norm(name: str) -> torch.Tensor | None:
            return weights.vector(f"{at}{name}.weight") if weights.has(f"{at}{name}.weight") else None

        self._attn_norm, self._ffn_norm = (
            weights.vector(f"{at}attn_norm.weight"),
            weights.vector(f"{at}ffn_norm.weight"),
        )
        self._q_norm, self._k_norm = norm("attn_q_norm"), norm("attn_k_norm")
        self._qkv = Matrix(weights, [f"{at}attn_{name}" for name in "qkv"], partial(_head_order, numbers))
        self._out = Matrix(weights, [f"{at}attn_output"], _as_is)
        self._router: torch.Tensor | None = None
        if weights.has(f"{at}ffn_gate_inp.weight"):
            self._router = weights.vector(f"{at}ffn_gate_inp.weight")
            self._experts = [weights.matrix(f"{at}ffn_{name}_exps.weight") for name in ("gate", "up", "down")]
        else:
            self._gate_up = Matrix(weights, [f"{at}ffn_gate", f"{at}ffn_up"], _as_is)
            self._down = Matrix(weights, [f"{at}ffn_down"], _as_is)

    @property
    def matrices(self) -> list[Weight]:
        """What rows are multiplied with, (n_out, n_in) each; of experts those of one."""
        if self._router is not None:
            return [self._qkv.weight, self._out.weight, self._router, *(each[0] for each in self._experts)]
        return [self._qkv.weight, self._out.weight, self._gate_up.weight, self._down.weight]

    def project(self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(n_rows, n_embd) -> (n_rows, n_head + 2 * n_head_kv, head_dim): queries, keys and values, the former turned
        to their positions; `cos` and `sin`: of these, see `rotate`. All in one: on a GPU each small step costs about
        as much as a large one."""
        numbers, n_rows = self._numbers, len(rows)
        found = self._qkv(rms_norm(rows, rows.shape[1:], self._attn_norm, numbers.epsilon))
        heads = found.view(n_rows, -1, numbers.head_dim)
        if self._q_norm is not None or self._k_norm is not None:
            queries, keys, values = heads.split([numbers.n_head, numbers.n_head_kv, numbers.n_head_kv], 1)
            heads = torch.cat([self._normed(queries, self._q_norm), self._normed(keys, self._k_norm), values], 1)
        rotate(heads[:, : numbers.n_head + numbers.n_head_kv], cos, sin)
        return heads

    def finish(self, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream after the layer. `attended`: (n_rows, n_head * head_dim), what came of attention."""
        rows = rows + self._out(attended)
        normed = rms_norm(rows, rows.shape[1:], self._ffn_norm, self._numbers.epsilon)
        if self._router is not None:
            return rows + self._of_experts(normed)
        gate, up = self._gate_up(normed).chunk(2, 1)
        return rows + self._down(self._gate(gate, up))

    def _normed(self, heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return heads if weight is None else rms_norm(heads, heads.shape[2:], weight, self._numbers.epsilon)

    def _of_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """What the experts that each row chooses add, each with its share."""
        assert self._router is not None
        shares = torch.softmax(linear(rows, self._router), dim=1)
        shares, chosen = shares.topk(self._numbers.n_expert_used, dim=1)
        shares = shares / shares.sum(1, keepdim=True).clamp_min(LEAST_SUM)
        if self._experts_at_once:
            matrices = [each for each in self._experts if isinstance(each, torch.Tensor)]
            return of_experts(rows, chosen, shares, matrices, self._gate)
        found = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():
            share = (shares * (chosen == expert)).sum(1, keepdim=True)
            used = share[:, 0].nonzero()[:, 0]
            (added,) = in_groups(self.group, partial(self._of_expert, expert), rows[used])
            found[used] += share[used] * added
        return found

    def _of_expert(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate, up, down = (each[expert] for each in self._experts)
        return multiply(self._gate(multiply(rows, gate), multiply(rows, up)), down)


def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu(gate) * up


def _as_is(name: str) -> torch.Tensor | None:
    return None


def _head_order(numbers: Hyperparameters, name: str) -> torch.Tensor | None:
    if not numbers.interleaved or "attn_v" in name:
        return None
    n_heads = numbers.n_head if "attn_q" in name else numbers.n_head_kv
    return deinterleaved_order(n_heads, numbers.head_dim, numbers.n_rot)
