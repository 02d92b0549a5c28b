"""Options made of settings: those of sections, and those of all policies, each of which takes its own.

A command names its sections; what it gets are the values of their settings by name.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import click

from pipeinfer.cli.options.command import Command
from pipeinfer.cli.options.environment import read_variables
from pipeinfer.core.policy import Policy
from pipeinfer.core.settings import REQUIRED, Setting, settings_of, value_text
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import INT32_MAX
from pipeinfer.job.options.options import choose_policy
from pipeinfer.job.options.values import Number, Whole
from pipeinfer.policies import PipeInfer
from pipeinfer.policies.registry import POLICIES, make_policy

Section = TypeVar("Section")


class SettingOption(click.Option):
    """`heading`: of the help's part that has it. `is_first`: it is one of those that most users need."""

    heading = ""
    is_first = False


def command(
    name: str, *sections: type[Any], without: Collection[str] = (), helps: Mapping[str, str] = {},
    defaults: Mapping[str, Any] = {}, has_variables: bool = False,
) -> Callable[[Callable[..., Any]], Command]:  # fmt: skip
    """A command that has, beside its own options, those of these sections; `Policy` stands for all policies' settings.

    Of options with one name the first counts, the command's own above all. `without`: names of settings that it does
    not have. `helps`, `defaults`: what is different here. `has_variables`: llama.cpp's variables give the sections'
    options too.
    """

    def make(function: Callable[..., Any]) -> Command:
        made = click.command(name, cls=Command)(function)
        known = {param.name for param in made.params} | set(without)
        for kind in sections:
            for option in policy_options() if kind is Policy else section_options(kind, defaults):
                if option.name not in known:
                    known.add(option.name)
                    option.help = helps.get(str(option.name), option.help)
                    if has_variables:
                        read_variables(option)
                    made.params.append(option)
        return made

    return make


def section_options(kind: type[Any], defaults: Mapping[str, Any] = {}) -> Iterator[SettingOption]:
    """An option for each setting of a section; `defaults`: other than the section's."""
    for name, default, setting in settings_of(kind):
        option = _option(name, defaults.get(name, default), setting)
        option.heading, option.is_first = getattr(kind, "heading", ""), setting.first
        yield option


def take(kind: type[Section], given: dict[str, Any]) -> Section:
    """Move the values of a section out of a command's keyword arguments."""
    return kind(**{name: given.pop(name) for name, _, _ in settings_of(kind) if name in given})


def _option(name: str, default: Any, setting: Setting) -> SettingOption:
    names = _names(setting, name)
    if isinstance(default, bool) or setting.type is bool:
        if default and "/" not in setting.flag:  # its flags switch it off
            return SettingOption(names, flag_value=False, type=bool, default=True, help=setting.help)
        return SettingOption(names, is_flag=True, default=default, show_default=default, help=setting.help)
    more = {"required": True} if default is REQUIRED else {"default": setting.written or default}
    is_shown = setting.written is not None or (default not in (None, ()) and "[default:" not in setting.help)
    return SettingOption(
        names, type=_type_of(default, setting), multiple=setting.repeated, show_default=is_shown, help=setting.help,
        **more,
    )  # fmt: skip


def _names(setting: Setting, name: str) -> list[str]:
    """The flags, short ones first, and the parameter's name."""
    flags = setting.flags if "/" in setting.flag else sorted(setting.flags, key=lambda flag: flag.startswith("--"))
    return [*flags, name]


def policy_options() -> Iterator[SettingOption]:
    """An option for each setting that some policy has; `take_policies` collects what they gave."""
    for name, owners in _owners().items():
        option = _policy_option(name, owners)
        option.heading = "Options of policies"
        yield option


def policy_meant(policy: str | None, has_guesses: bool, given: Mapping[str, Any]) -> str:
    """The policy asked for, by its name or by options that PipeInfer itself has; else the best. Raises UserError."""
    asked = [owners for name, owners in _owners().items() if given.get(name) is not None]
    if policy is None and has_guesses and asked and all(PipeInfer.name in owners for owners in asked):
        return PipeInfer.name
    return choose_policy(policy, has_guesses)


def asks_for_guesses(given: Mapping[str, Any]) -> bool:
    """Whether a command line asks for a policy that needs a draft, by its name or by its options, and no lookup."""
    asked = given["policy"] not in (None, "iterative") or any(given.get(name) is not None for name in _owners())
    return asked and not given["lookup"]


def take_policies(names: Iterable[str], given: dict[str, Any]) -> tuple[Policy, ...]:
    """Each named policy with its own options out of `given`. Raises UserError for an option that none of them has."""
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


def policy_ablations() -> tuple[str, ...]:
    """Settings that switch a part of some policy off, for studies."""
    return tuple(name for name, owners in _owners().items() if any(default is True for default, _ in owners.values()))


def _policy_option(name: str, owners: Mapping[str, tuple[Any, Setting]]) -> SettingOption:
    default, setting = next(iter(owners.values()))
    names = _names(setting, name)
    whose = f"({', '.join(owners)})"
    if default is True:
        return SettingOption(names, flag_value=False, type=bool, default=None, help=f"{setting.help} {whose}")
    defaults = ", ".join(dict.fromkeys(value_text(default) for default, _ in owners.values()))
    return SettingOption(names, type=_type_of(default, setting), default=None,
                         help=f"{setting.help} {whose}  [default: {defaults}]")  # fmt: skip


def _type_of(default: Any, setting: Setting) -> click.ParamType:
    if setting.type is not None:
        found: click.ParamType = setting.type
        return found
    if setting.choices:
        return click.Choice(setting.choices)
    if isinstance(default, int):
        return Whole(int(setting.least), INT32_MAX if setting.most == float("inf") else int(setting.most))
    return Number(setting.least, setting.most)


def _foreign(name: str, chosen: tuple[str, ...]) -> str:
    """An option that none of the chosen policies has: whose it is, and what they have instead."""
    owners = _owners()[name]
    flag = next(iter(owners.values()))[1].flag
    own = {policy: [setting.flag for _, _, setting in settings_of(POLICIES[policy])] for policy in chosen}
    offered = "; ".join(f"{policy} has {', '.join(flags) or 'no such options'}" for policy, flags in own.items())
    return f"{flag} is an option of --policy {', '.join(owners)}; {offered}"
