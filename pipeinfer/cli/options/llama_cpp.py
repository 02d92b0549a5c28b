"""Commands that read llama.cpp's spellings, such as `-fa`, and its environment variables (LLAMA_ARG_*), accept them
without effect, or refuse them with a hint. `llama_cpp.txt` has the data."""

import os
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

PREFIX = "LLAMA_ARG_"
NEGATION = f"{PREFIX}NO_"
ARGUMENTS: list[tuple[str, list[str]]] = []  # (variable, or -, and spellings) of the options of the pinned llama.cpp

HARMLESS: dict[str, tuple[str, ...] | None] = {}
"""Flag -> the values with which it is accepted, without effect; None: it takes no value."""

INSTEAD: dict[str, str] = {}  # flag -> the nearest option that there is, or why there is none
HINTS: dict[str, str] = {}  # the texts of `INSTEAD` by name
OF_RUN: dict[str, str] = {}  # flags of `run` -> a hint for other commands
OF_COMMAND: dict[str, tuple[dict[str, tuple[str, ...] | None], dict[str, str]]] = {}
"""Command -> what is other there in `HARMLESS` and in `INSTEAD`."""

ANY, OPTIONAL = "*", "?"  # among values of a harmless flag: any value; the value may be left out


def _read_data() -> None:
    names: dict[str, str] = {}
    for line in Path(__file__).with_name("llama_cpp.txt").read_text().splitlines():
        first, _, rest = line.partition(" ")
        rest, _, name = rest.partition(" : ")
        words, is_harmless, values = rest.partition(" =")
        flags = words.split()
        accepted = dict.fromkeys(flags, tuple(values.split()) or None) if is_harmless else {}
        if first.endswith(":"):
            HINTS[first[:-1]] = line.partition(" ")[2]
        elif first == "run":
            OF_RUN.update(dict.fromkeys(flags, name))
        elif first.islower():
            harmless, instead = OF_COMMAND.setdefault(first, ({}, {}))
            harmless.update(accepted)
            instead.update(dict.fromkeys(flags, name) if name else {})
        elif first not in ("", "#"):
            names |= dict.fromkeys(flags, name) if name else {}
            HARMLESS.update(accepted)
            if first == "+":
                ARGUMENTS[-1][1].extend(flags)
            elif first != "*":
                ARGUMENTS.append((first, flags))
    INSTEAD.update({flag: HINTS[name] for flag, name in names.items()})
    for hints in (OF_RUN, *(instead for _, instead in OF_COMMAND.values())):
        hints.update({flag: HINTS[name] for flag, name in hints.items()})


_read_data()


def _of_command(name: str | None) -> tuple[Mapping[str, tuple[str, ...] | None], Mapping[str, str]]:
    """(`HARMLESS`, `INSTEAD`) of a command."""
    harmless, instead = OF_COMMAND.get(str(name), ({}, {}))
    others = {flag: values for flag, values in HARMLESS.items() if flag not in instead}
    return others | harmless, {**INSTEAD, **instead}


RANKS = "-np"  # llama.cpp's option for texts at a time, mpirun's for ranks
COUNTS = {"--nodes": "nodes", "--stages": "stages"}  # options of commands without ranks, and what these count instead
VARIABLES: Mapping[str, str] = {
    f"{PREFIX}MODEL_DRAFT": "-md",
    f"{PREFIX}MLOCK": "--mlock",
    f"{PREFIX}MMAP": "--mmap",
    **{name: flags[0] for name, flags in ARGUMENTS if name.startswith(PREFIX)},
}
"""Variable -> its flag."""

GUESSING = frozenset(("--draft", "--spec-draft-n-max", "--spec-draft-p-split", "--spec-draft-p-min"))
"""Options that only some policies have: they are read from the command line alone."""

SWITCHED_OFF, ON = ("off", "0", "false", "disabled"), ("on", "1", "true", "enabled")
OFF = (*SWITCHED_OFF, "auto", "-1")
SWITCHES = {"--fit": "--no-fit", "-fit": "--no-fit"}  # flags that take llama.cpp's on and off, and their opposites


def read_variables(option: click.Parameter) -> None:
    """Let variables give an option, too; the command line comes first."""
    flags = {*option.opts, *option.secondary_opts} - GUESSING
    option.envvar = [name for name, flag in VARIABLES.items() if flag in flags] or None


def ignored_variables(command: click.Command, environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that is set to request something, and has no effect on the command."""
    read = {name for option in command.params for name in _listed(option.envvar)}
    read |= negations(read)
    of_server = (HINTS["server"], HINTS["no-server"]) if command.name != "serve" else ()
    harmless, instead = _of_command(command.name)
    for name, value in sorted(environment.items()):
        flag = VARIABLES.get(name, "")
        is_ignored = name.startswith(PREFIX) and name not in read and value and instead.get(flag) not in of_server
        if is_ignored and (line := _ignored(name, value, harmless.get(flag, OFF), instead.get(flag))):
            yield line


def _ignored(name: str, value: str, values: Collection[str] | None, reason: str | None) -> str:
    """Why a variable has no effect; empty if no effect is expected. `values`: those that have none."""
    flag = VARIABLES.get(name, "")
    if not flag:
        is_negation = name.replace(NEGATION, PREFIX, 1) in VARIABLES  # it switches off what is not there anyway
        return "" if is_negation else f"{name} is set, which is not known here"
    if flag in GUESSING:
        return f"{name} is set and not read: which options guesses have depends on --policy; give {flag}"
    if not values or ANY in values or value in values:
        return ""
    return f"{name} is set and not read: {reason or f'{flag} {value} cannot be had here'}"


def negations(names: str | Iterable[str] | None) -> set[str]:
    """llama.cpp's variables that switch off what these switch on."""
    return {name.replace(PREFIX, NEGATION, 1) for name in _listed(names) if name.startswith(PREFIX)}


def _listed(names: str | Iterable[str] | None) -> Iterable[str]:
    return (names,) if isinstance(names, str) else names or ()


# -- commands

SYNONYMS = {"model": ("hf_repo", "hf_file"), "hf_repo": ("model",), "drafts": ("hf_drafts",), "hf_drafts": ("drafts",)}
"""Parameters, and those that name the same in another way."""

WORDS = f"{__name__}.words"  # the key of a command's words in the `meta` of its context
NEAR = 0.75  # the least similarity of an unknown option and a suggested one; 1: they are equal
ATTACHED = re.compile(r"-[A-Za-z][0-9][0-9.,]*")  # `-n8`: only a number may follow an option's letter directly


class Command(click.Command):
    """Raises click.UsageError for unknown options. Its help lists the usual options first, then a section each."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = self.get_params(ctx)
        has_usual = any(getattr(param, "is_first", False) for param in params)
        default = f"Options of {self.name}" if has_usual else "Options"
        groups: dict[str, list[tuple[str, str]]] = {"Options": [], default: []}
        for param in params:
            if record := param.get_help_record(ctx):
                is_usual = getattr(param, "is_first", False) or param is self.get_help_option(ctx)
                heading = "Options" if is_usual else getattr(param, "heading", "") or default
                groups.setdefault(heading, []).append(record)
        for heading, records in filter(lambda group: group[1], groups.items()):
            with formatter.section(heading):
                formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = args
        if not ctx.resilient_parsing:
            words = list(read_words(args, self.get_params(ctx), self.name, ctx.allow_interspersed_args))
            ctx.meta[WORDS] = tuple(words)
        try:
            rest = super().parse_args(ctx, words)
            _prefer_command_line(ctx)
            return rest
        except click.BadParameter as error:
            param = error.param
            if param and is_from_environment(ctx, str(param.name)):
                raise click.BadParameter(f"{error.message} ({variable_of(param)})", ctx, param) from None
            raise


def _prefer_command_line(ctx: click.Context) -> None:
    """Drop values of variables for which the command line has a synonym."""
    for name, others in SYNONYMS.items():
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            for other in filter(partial(is_from_environment, ctx), others):
                ctx.params[other] = () if isinstance(ctx.params[other], tuple) else None
                ctx.set_parameter_source(other, ParameterSource.DEFAULT)


def is_from_environment(ctx: click.Context, name: str) -> bool:
    """Whether a variable gives a parameter its value."""
    return ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT


def variable_of(param: click.Parameter) -> str:
    """The environment variable that gives a parameter its value."""
    return next((name for name in _listed(param.envvar) if os.environ.get(name)), "the environment")


class CommandGroup(click.Group):
    """A group of such commands. Options of a command that stand before it are refused with a hint."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        flags = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        if first.startswith("-") and first not in flags and not ctx.resilient_parsing:
            names = self.list_commands(ctx)
            example = f"{ctx.command_path} {'run' if 'run' in names else names[0]} …"
            raise click.UsageError(
                f"{first}: options come after a command, as in {example}; there are {', '.join(names)}"
            )
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        near = get_close_matches(args[0], names, cutoff=NEAR)
        if args[0] not in names and not args[0].startswith("-") and not ctx.resilient_parsing:
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise click.UsageError(f"there is no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


def read_words(
    args: list[str], params: list[click.Parameter], command: str | None, interspersed: bool
) -> Iterator[str]:
    """The words that click parses. Unless `interspersed`, all words from the first argument on are passed unchanged."""
    harmless, instead = _of_command(command)
    options = {name: param for param in params for name in (*param.opts, *param.secondary_opts)}
    words = deque(args)
    while words:
        word = words.popleft()
        name = _name(word, options)
        if name in SWITCHES and name in options:
            yield _switch(name, word[len(name) + 1 :], words)
        elif name in options:
            yield name + word[len(name) :]
            if word == name and _takes_value(options[name]) and words:
                yield words.popleft()
        elif word == "--":
            yield word
            yield from words
            return
        elif not word.startswith("-") or word == "-" or (ATTACHED.fullmatch(word) and word[:2] in options):
            yield word
            if not (interspersed or word.startswith("-")):
                yield from words
                return
        elif name == RANKS and (flags := COUNTS.keys() & options.keys()):
            flag = flags.pop()
            raise click.UsageError(f"{RANKS}: here {flag} N says how many {COUNTS[flag]} there are")
        elif name in harmless:
            reason = instead.get(name, "it cannot be had here")
            _check_harmless(name, harmless[name], reason, word[len(name) + 1 :], words)
        elif hint := instead.get(name) or OF_RUN.get(name):
            raise click.UsageError(f"{name}: {hint}")
        else:
            raise click.NoSuchOption(name, possibilities=_near_misses(name, options))


def option_words(ctx: click.Context, without: Collection[str]) -> list[str]:
    """The words of a command's line that give options, without those of the parameters `without`, by their names."""
    params = {name: param for param in ctx.command.params for name in (*param.opts, *param.secondary_opts)}
    others, words = list[str](), deque(ctx.meta[WORDS])
    while words:
        word = words.popleft()
        name = word.partition("=")[0] if word.startswith("--") else word
        param = params.get(name) or params.get(word[:2])  # -t8
        value = [words.popleft()] if param and word in params and _takes_value(param) else []
        if param and param.name not in without:
            others += [word, *value]
    return others


def _near_misses(name: str, options: Iterable[str]) -> list[str]:
    """Options that `name` may be meant for, the likeliest first. Dashes, which all have, do not count."""
    names = {option.lstrip("-"): option for option in options}
    return [names[bare] for bare in get_close_matches(name.lstrip("-"), names, cutoff=NEAR)]


def _name(word: str, options: dict[str, click.Parameter]) -> str:
    """The option of `--name=value`; llama.cpp takes `--n_predict` for `--n-predict`."""
    if not word.startswith("--"):
        return word
    name = word.partition("=")[0]
    return name if name in options else name.replace("_", "-")


def _switch(name: str, value: str, words: deque[str]) -> str:
    """The flag of a switch, with its value or the next word, if there is one. Raises click.UsageError for another."""
    if not value and words and words[0] in (*ON, *SWITCHED_OFF):
        value = words.popleft()
    if value and value not in (*ON, *SWITCHED_OFF):
        raise click.UsageError(f"{name} {value}: give on, off, or no value")
    return SWITCHES[name] if value in SWITCHED_OFF else name


def _takes_value(param: click.Parameter) -> bool:
    return isinstance(param, click.Option) and not param.is_flag and not param.count


def _check_harmless(name: str, values: tuple[str, ...] | None, reason: str, value: str, words: deque[str]) -> None:
    """Take the flag's value, the next word unless it is `value`. Raises click.UsageError, with the `reason`, for one
    that is not harmless."""
    if values is None or (OPTIONAL in values and not value and (not words or words[0] not in values)):
        return
    value = value or (words.popleft() if words else "")
    if value in values or (value and ANY in values):
        return
    choices = "" if ANY in values else ", ".join(values)
    if not value or value.startswith("-"):
        raise click.UsageError(f"{name} needs a value: {choices}; it has no effect here and may be left out")
    raise click.UsageError(f"{name} {value}: {reason}; accepted, and without effect: {choices}")
