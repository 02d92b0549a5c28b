"""Policies: which nodes go to the target now, and which nodes does the draft expand now. Nothing else."""

from pipeinfer.policies.base import Policy, View
from pipeinfer.policies.iterative import Iterative
from pipeinfer.policies.pipeinfer import PipeInfer
from pipeinfer.policies.speculative import Speculative

__all__ = ["Iterative", "PipeInfer", "Policy", "Speculative", "View"]
