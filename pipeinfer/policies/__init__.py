"""Policies: which nodes go to the target now, and which ones the draft expands now."""

from pipeinfer.policies.auto import Auto
from pipeinfer.policies.flowspec import FlowSpec
from pipeinfer.policies.iterative import Iterative
from pipeinfer.policies.pipedec import PipeDec
from pipeinfer.policies.pipeinfer import PipeInfer
from pipeinfer.policies.pipespec import PipeSpec
from pipeinfer.policies.speculative import Speculative

__all__ = ["Auto", "FlowSpec", "Iterative", "PipeDec", "PipeInfer", "PipeSpec", "Speculative"]
