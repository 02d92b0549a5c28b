"""Policies by name: which nodes go to the target now, and which ones the draft expands now. A new one is a file and a
line here."""

from collections.abc import Mapping
from typing import Any

from pipeinfer.core.policy import PAPER, PaperPolicy, Policy
from pipeinfer.core.settings import settings_of
from pipeinfer.policies.auto import Auto
from pipeinfer.policies.baselines import Iterative, Speculative
from pipeinfer.policies.flowspec import FlowSpec
from pipeinfer.policies.pipedec import PipeDec
from pipeinfer.policies.pipeinfer import PipeInfer
from pipeinfer.policies.pipespec import PipeSpec
from pipeinfer.policies.ssd import Ssd

POLICIES: Mapping[str, type[Policy]] = {
    kind.name: kind for kind in (Iterative, Speculative, PipeInfer, PipeDec, FlowSpec, PipeSpec, Ssd, Auto)
}

USUAL = ("iterative", "speculative", "pipeinfer", "auto")
"""Measured where no policy is named: those of PipeInfer's figures, and the default."""


def ablations_of(kind: type[Policy]) -> tuple[str, ...]:
    """Features of a policy that can be switched off: what it uses, and settings that are on by default."""
    return (*kind.uses, *(name for name, default, _ in settings_of(kind) if default is True))


ABLATIONS = tuple(dict.fromkeys(name for kind in POLICIES.values() for name in ablations_of(kind)))


def make_policy(name: str, values: Mapping[str, Any] = {}) -> Policy:
    """A policy with those of the values that are settings of it."""
    kind = POLICIES[name]
    settings = {setting: values[setting] for setting, _, _ in settings_of(kind) if setting in values}
    if issubclass(kind, PaperPolicy) and settings.get("preset") == PAPER:
        return kind.from_paper(**settings)
    return kind(**settings)
