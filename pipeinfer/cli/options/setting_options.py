"""Options made of settings: of the sections that a command names, and of all policies. The command gets their values
by name, and each policy takes its settings from them."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

import click

from pipeinfer.cli.options.llama_cpp import ON, SWITCHED_OFF, Command, negations, read_variables
from pipeinfer.core.policy import Policy
from pipeinfer.core.settings import REQUIRED, Setting, settings_of, value_text
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import INT32_MAX
from pipeinfer.job.options.options import choose_policy
from pipeinfer.job.options.values import Joined, Number, Whole
from pipeinfer.policies import POLICIES, PipeInfer, make_policy

Section = TypeVar("Section")


class SettingOption(click.Option):
    """`heading`: of its section in the help. `is_first`: most users need it."""

    heading = ""
    is_first = False

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """As in llama.cpp: LLAMA_ARG_NO_X of any value is `--no-x`."""
        value = super().resolve_envvar_value(ctx)
        if value is not None and self.is_flag:
            value = "1" if value in ON else "0" if value in SWITCHED_OFF else value
        is_off = self.secondary_opts and any(name in os.environ for name in negations(self.envvar))
        return "0" if value is None and is_off else value

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        values = super().type_cast_value(ctx, value)
        return tuple(chain.from_iterable(values)) if isinstance(self.type, Joined) else values


def command(
    name: str,
    *sections: type[Any],
    without: Collection[str] = (),
    helps: Mapping[str, str] = {},
    defaults: Mapping[str, Any] = {},
    has_variables: bool = False,
) -> Callable[[Callable[..., Any]], Command]:
    """A command with the options of these sections beside those of its function; `Policy`: the settings of all
    policies. Of one name the first option counts. `without`: settings that it lacks. `helps`, `defaults`: other ones.
    `has_variables`: llama.cpp's variables give the sections' options too."""

    def make(function: Callable[..., Any]) -> Command:
        made = click.command(name, cls=Command)(function)
        names = {param.name for param in made.params} | set(without)
        options = [
            option
            for kind in sections
            for option in (policy_options() if kind is Policy else section_options(kind, defaults))
        ]
        unknown = set(without) - {option.name for option in options}
        assert not unknown, f"{name} leaves out {sorted(unknown)}, which its sections do not have"
        for option in options:
            if option.name not in names:
                names.add(option.name)
                option.help = helps.get(str(option.name), option.help)
                made.params.append(option)
        for param in made.params if has_variables else ():
            if not param.envvar:
                read_variables(param)
        return made

    return make


def section_options(kind: type[Any], defaults: Mapping[str, Any] = {}) -> Iterator[SettingOption]:
    """An option for each setting of a section. `defaults`: other ones."""
    for name, default, setting in settings_of(kind):
        option = _option(name, defaults.get(name, default), setting)
        option.heading, option.is_first = getattr(kind, "heading", ""), setting.first
        yield option


def take(kind: type[Section], values: dict[str, Any]) -> Section:
    """Move the values of a section out of a command's keyword arguments."""
    return kind(**{name: values.pop(name) for name, _, _ in settings_of(kind) if name in values})


def _option(name: str, default: Any, setting: Setting) -> SettingOption:
    names = _names(setting, name)
    if isinstance(default, bool) or setting.type is bool:
        if default and "/" not in setting.flag:  # its flags switch it off
            return SettingOption(names, flag_value=False, type=bool, default=True, help=setting.help)
        return SettingOption(names, is_flag=True, default=default, show_default=default, help=setting.help)
    more: dict[str, Any] = {"required": True} if default is REQUIRED else {"default": setting.written or default}
    more["show_default"] = setting.written is not None or (
        default not in (None, ()) and "[default:" not in setting.help
    )
    return SettingOption(names, type=_type_of(default, setting), multiple=setting.repeated, help=setting.help, **more)


def _names(setting: Setting, name: str) -> list[str]:
    """The flags, short ones first, and the parameter's name."""
    flags = setting.flags if "/" in setting.flag else sorted(setting.flags, key=lambda flag: flag.startswith("--"))
    return [*flags, name]


def policy_options() -> Iterator[SettingOption]:
    """An option for each setting of some policy."""
    for name, owners in _owners().items():
        option = _policy_option(name, owners)
        option.heading = "Options of policies"
        yield option


def select_policy(policy: str | None, has_guesses: bool, values: Mapping[str, Any]) -> str:
    """The policy by its name; else PipeInfer if given options are all its own; else the best. Raises UserError."""
    requested = [owners for name, owners in _owners().items() if values.get(name) is not None]
    if policy is None and has_guesses and requested and all(PipeInfer.name in owners for owners in requested):
        return PipeInfer.name
    return choose_policy(policy, has_guesses)


def requests_guesses(values: Mapping[str, Any]) -> bool:
    """Whether a command line names a policy that needs a draft, or one of its options, and no lookup."""
    is_named = values["policy"] not in (None, "iterative") or any(values.get(name) is not None for name in _owners())
    return is_named and not values["lookup"]


def take_policies(names: Iterable[str], values: dict[str, Any]) -> tuple[Policy, ...]:
    """Move the policies' settings out of a command's values: each named policy with those that it has. Raises UserError
    for a setting that none of them has."""
    settings = {name: value for name in _owners() if (value := values.pop(name, None)) is not None}
    chosen = tuple(names)
    for name in settings:
        if not set(chosen) & _owners()[name].keys():
            raise UserError(_foreign(name, chosen))
    return tuple(make_policy(policy, settings) for policy in chosen)


def _owners() -> Mapping[str, Mapping[str, tuple[Any, Setting]]]:
    """Setting -> the policies that have it -> its default and setting there."""
    owners: dict[str, dict[str, tuple[Any, Setting]]] = {}
    for policy, kind in POLICIES.items():
        for name, default, setting in settings_of(kind):
            owners.setdefault(name, {})[policy] = (default, setting)
    return owners


def policy_ablations() -> tuple[str, ...]:
    """Settings that switch a part of some policy off, for studies."""
    return tuple(name for name, owners in _owners().items() if any(default is True for default, _ in owners.values()))


def _policy_option(name: str, owners: Mapping[str, tuple[Any, Setting]]) -> SettingOption:
    default, setting = next(iter(owners.values()))
    names, help = _names(setting, name), f"{setting.help} ({', '.join(owners)})"
    if default is True:
        return SettingOption(names, flag_value=False, type=bool, default=None, help=help)
    defaults = ", ".join(dict.fromkeys(value_text(default) for default, _ in owners.values()))
    return SettingOption(names, type=_type_of(default, setting), default=None, help=f"{help}  [default: {defaults}]")


def _type_of(default: Any, setting: Setting) -> click.ParamType:
    if setting.type is not None:
        param_type: click.ParamType = setting.type
        return param_type
    if setting.choices:
        return click.Choice(setting.choices)
    if isinstance(default, int):
        return Whole(int(setting.least), INT32_MAX if setting.most == float("inf") else int(setting.most))
    return Number(setting.least, setting.most)


def _foreign(name: str, chosen: tuple[str, ...]) -> str:
    """The message for an option that none of the chosen policies has: its policies, and the options of the chosen."""
    owners = _owners()[name]
    flag = next(iter(owners.values()))[1].flag
    flags = {policy: ", ".join(each.flag for _, _, each in settings_of(POLICIES[policy])) for policy in chosen}
    offered = "; ".join(f"{policy} has {names or 'no such options'}" for policy, names in flags.items())
    return f"{flag} is an option of --policy {', '.join(owners)}; {offered}"
