"""Policies by name. A new policy is a file and a line here."""

from collections.abc import Mapping
from typing import Any

from pipeinfer.core.policy import PAPER, PaperPolicy, Policy
from pipeinfer.core.settings import settings_of
from pipeinfer.policies.auto import Auto
from pipeinfer.policies.flowspec import FlowSpec
from pipeinfer.policies.iterative import Iterative
from pipeinfer.policies.pipedec import PipeDec
from pipeinfer.policies.pipeinfer import PipeInfer
from pipeinfer.policies.pipespec import PipeSpec
from pipeinfer.policies.speculative import Speculative

POLICIES: Mapping[str, type[Policy]] = {
    kind.name: kind for kind in (Iterative, Speculative, PipeInfer, PipeDec, FlowSpec, PipeSpec, Auto)
}

USUAL = ("iterative", "speculative", "pipeinfer", "auto")
"""Measured where no policy is named: those of PipeInfer's figures, and the default."""


def ablations_of(kind: type[Policy]) -> tuple[str, ...]:
    """Features of a policy that can be switched off: what it uses, and settings that are on by default."""
    return (*kind.uses, *(name for name, default, _ in settings_of(kind) if default is True))


ABLATIONS = tuple(dict.fromkeys(name for kind in POLICIES.values() for name in ablations_of(kind)))


def make_policy(name: str, given: Mapping[str, Any] = {}) -> Policy:
    """A policy with its own settings among those given."""
    kind = POLICIES[name]
    names = {setting for setting, _, _ in settings_of(kind)}
    own = {setting: value for setting, value in given.items() if setting in names}
    return kind.from_paper(**own) if issubclass(kind, PaperPolicy) and own.get("preset") == PAPER else kind(**own)
