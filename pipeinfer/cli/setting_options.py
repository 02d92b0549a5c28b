"""Options made of settings: those of sampling, and those of all policies, each of which takes its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click

from pipeinfer.cli.values import Number, Whole
from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import Setting, settings_of
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import INT32_MAX, choose_policy
from pipeinfer.policies import PipeInfer
from pipeinfer.policies.registry import POLICIES, make_policy

Command = TypeVar("Command", bound=Callable[..., Any])


def sampling_options(command: Command) -> Command:
    """Add an option for each setting of sampling; `take_sampling` collects what they gave."""
    for name, default, setting in reversed(list(settings_of(SamplingParams))):
        option = click.option(
            *_names(setting, name), type=_type_of(default, setting), default=default, show_default=True,
            help=setting.help,
        )  # fmt: skip
        command = option(command)
    return command


def take_sampling(given: dict[str, Any]) -> SamplingParams:
    """Move the options' values out of a command's keyword arguments."""
    return SamplingParams(**{name: given.pop(name) for name, _, _ in settings_of(SamplingParams)})


def policy_options(command: Command) -> Command:
    """Add an option for each setting that some policy has; `take_policies` collects what they gave."""
    for name, owners in reversed(list(_owners().items())):
        command = _policy_option(name, owners)(command)
    return command


def policy_meant(policy: str | None, has_guesses: bool, given: Mapping[str, Any]) -> str:
    """The policy asked for, by its name or by options that PipeInfer itself has; else the best. Raises UserError."""
    asked = [owners for name, owners in _owners().items() if given.get(name) is not None]
    if policy is None and has_guesses and asked and all(PipeInfer.name in owners for owners in asked):
        return PipeInfer.name
    return choose_policy(policy, has_guesses)


def take_policies(names: Iterable[str], given: dict[str, Any]) -> tuple[Policy, ...]:
    """Move the options' values out of a command's keyword arguments; each of the named policies takes its own.

    Raises UserError for an option that none of them has.
    """
    found = {name: value for name in _owners() if (value := given.pop(name, None)) is not None}
    chosen = tuple(names)
    for name in found:
        if not set(chosen) & _owners()[name].keys():
            raise UserError(_foreign(name, chosen))
    return tuple(make_policy(policy, found) for policy in chosen)


def _owners() -> Mapping[str, Mapping[str, tuple[Any, Setting]]]:
    """Of each setting the policies that have it, with its default there."""
    found: dict[str, dict[str, tuple[Any, Setting]]] = {}
    for policy, kind in POLICIES.items():
        for name, default, setting in settings_of(kind):
            found.setdefault(name, {})[policy] = (default, setting)
    return found


def ablations() -> tuple[str, ...]:
    """Options that switch a part of some policy off, for studies."""
    switches = (name for name, owners in _owners().items() if any(default is True for default, _ in owners.values()))
    return ("cancel", "partitions", *switches)


def _policy_option(name: str, owners: Mapping[str, tuple[Any, Setting]]) -> Callable[[Command], Command]:
    default, setting = next(iter(owners.values()))
    whose = f"({', '.join(owners)})"
    if default is True:
        return click.option(*_names(setting, name), flag_value=False, type=bool, default=None,
                            help=f"{setting.help} {whose}")  # fmt: skip
    defaults = ", ".join(dict.fromkeys(f"{default:g}" for default, _ in owners.values()))
    return click.option(*_names(setting, name), type=_type_of(default, setting), default=None,
                        help=f"{setting.help} {whose}  [default: {defaults}]")  # fmt: skip


def _names(setting: Setting, name: str) -> tuple[str, ...]:
    return (*sorted(setting.flags, key=lambda flag: flag.startswith("--")), name)


def _type_of(default: Any, setting: Setting) -> click.ParamType:
    if isinstance(default, int):
        return Whole(int(setting.least), INT32_MAX if setting.most == float("inf") else int(setting.most))
    return Number(setting.least, setting.most)


def _foreign(name: str, chosen: tuple[str, ...]) -> str:
    """An option that none of the chosen policies has: whose it is, and what they have instead."""
    owners = _owners()[name]
    flag = next(iter(owners.values()))[1].flag
    own = {policy: [setting.flag for _, _, setting in settings_of(POLICIES[policy])] for policy in chosen}
    offered = "; ".join(f"{policy} has {', '.join(flags) or 'none'}" for policy, flags in own.items())
    return f"{flag} is an option of --policy {' and '.join(owners)}; of such options {offered}"
