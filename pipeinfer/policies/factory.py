"""Policies by name, from one set of options, for every command that runs them."""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.policies.base import Policy
from pipeinfer.policies.iterative import Iterative
from pipeinfer.policies.pipeinfer import PipeInfer
from pipeinfer.policies.speculative import Speculative

POLICIES = ("iterative", "speculative", "pipeinfer")


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What the policies can be told; see their classes for the meanings."""

    n_draft: int = Speculative.n_draft
    width: int = PipeInfer.width
    microbatch: int = PipeInfer.microbatch
    inflight: int = PipeInfer.inflight
    accept_cutoff: float = PipeInfer.accept_cutoff
    split_cutoff: float = PipeInfer.split_cutoff
    recovery: float = PipeInfer.recovery
    decay: float = PipeInfer.decay
    continuous: bool = True
    asynchronous: bool = True


def make_policy(name: str, options: PolicyOptions) -> Policy:
    """One policy instance, for one request."""
    if name == "iterative":
        return Iterative()
    if name == "speculative":
        return Speculative(options.n_draft, options.width)
    assert name == "pipeinfer", f"no policy {name!r}; there are {', '.join(POLICIES)}"
    return PipeInfer(
        microbatch=options.microbatch,
        inflight=options.inflight,
        width=options.width,
        accept_cutoff=options.accept_cutoff,
        split_cutoff=options.split_cutoff,
        recovery=options.recovery,
        decay=options.decay,
        continuous=options.continuous,
        asynchronous=options.asynchronous,
    )
