"""The types of all options: what a command line may say, checked by its text alone.

Every rank parses the same command line and must come to the same end, so nothing here looks at a file system: rank 0
does, later. Knows no command.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from pipeinfer.cluster.assignment import parse_split
from pipeinfer.cluster.messages.activations import WireType
from pipeinfer.core.logit_bias import read_one
from pipeinfer.core.scheduling.batch_planner import ONE_CHUNK
from pipeinfer.errors import UserError
from pipeinfer.job.options.backends import Backend
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO_LAYERS, INT32_MAX, MAX_CTX, MAX_THREADS
from pipeinfer.job.options.plan_file import read_plan
from pipeinfer.models.hub_names import parse_name

NAME_MAX, PATH_MAX = 255, 4095
"""Bytes of a file's name, and of a path, that Linux takes."""

MAX_SHOWN = 60
WHOLE = re.compile(r"[+-]?[0-9]{1,40}")
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,6})?")

DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.:/\[\]-]{0,63}")


class Whole(click.IntRange):
    """A whole number from `least` to `most`, in ASCII digits."""

    name = "number"

    def __init__(self, least: int, most: int = INT32_MAX) -> None:
        super().__init__(least, most)
        self.wanted = f"a whole number from {least} to {most}"

    def _describe_range(self) -> str:
        """In the help: a limit that only 32-bit numbers set is left out."""
        return f"x>={self.min}" if self.max and self.max >= MAX_CTX else super()._describe_range()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return convert_number(super().convert, WHOLE, self.wanted, value, param, ctx)


class Number(click.FloatRange):
    """A number from `least` to `most`, so neither infinite nor NaN. `above`: `least` itself is too little."""

    name = "number"

    def __init__(self, least: float, most: float, above: bool = False) -> None:
        super().__init__(least, most, min_open=above)
        self.wanted = f"a number above {least} and up to {most}" if above else f"a number from {least} to {most}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return convert_number(super().convert, DECIMAL, self.wanted, value, param, ctx)


def convert_number(
    convert: Callable[[Any, click.Parameter | None, click.Context | None], Any], spelling: re.Pattern[str],
    wanted: str, value: Any, param: click.Parameter | None, ctx: click.Context | None,
) -> Any:  # fmt: skip
    """A number in this spelling and range. Raises click.BadParameter with the value as it was given."""
    try:
        if not isinstance(value, str) or spelling.fullmatch(value):
            return convert(value, param, ctx)
    except click.BadParameter:
        pass
    shown = value if len(str(value)) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}…"
    raise click.BadParameter(f"{shown!r} is not {wanted}", ctx, param)


class Text(click.ParamType):
    """UTF-8 text. `blank`: may be empty or white space only."""

    name = "text"

    def __init__(self, blank: bool = False) -> None:
        self.blank = blank

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value)
        if not self.blank and not text.strip():
            self.fail(f"{text!r} is empty; give a {self.name}, or leave the option out", param, ctx)
        if any("\ud800" <= char <= "\udfff" for char in text):  # how Python holds bytes that are not UTF-8
            self.fail(f"{text!r} is not UTF-8", param, ctx)
        return text


class File(Text):
    """A path, which `shell` completion looks for: `file` or `dir`. `stdin`: may be - for standard input."""

    name = "file"
    shell = "file"

    def __init__(self, stdin: bool = False) -> None:
        super().__init__()
        self.stdin = stdin

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        text = super().convert(value, param, ctx)
        if text.startswith("-") and not (self.stdin and text == "-"):
            self.fail(f"{text!r} is no {self.name}; for one of this name write ./{text}", param, ctx)
        path = Path(text)
        if len(os.fsencode(path)) > PATH_MAX or any(len(os.fsencode(part)) > NAME_MAX for part in path.parts):
            self.fail(f"{text[:MAX_SHOWN] + '…'!r} is too long for the name of a {self.name}", param, ctx)
        return path

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]  # one file, whose name may have spaces

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self.shell)]


class Folder(File):
    """The path of a directory."""

    name = "directory"
    shell = "dir"


class Listed(click.ParamType):
    """Values of one type with commas between them, as a tuple."""

    def __init__(self, item: click.ParamType) -> None:
        self.item, self.name = item, f"{item.name}, …"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if not isinstance(value, str):
            return tuple(value)
        parts = value.split(",")
        if not all(parts):
            self.fail(f"{value!r} has an empty part; write values with one comma between them", param, ctx)
        return tuple(self._convert(part, value, param, ctx) for part in parts)

    def _convert(self, part: str, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.item.convert(part, param, ctx)
        except click.BadParameter as error:
            if part == value:
                raise
            self.fail(f"{value!r}: {error.message}", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [] if "," in incomplete else self.item.shell_complete(ctx, param, incomplete)


class Threads(Listed):
    """Of each rank; empty, as if none were given, for llama.cpp's -1."""

    def __init__(self) -> None:
        each = Whole(1, MAX_THREADS)
        each.wanted += ", or -1 alone"
        super().__init__(each)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        return () if value == "-1" else super().convert(value, param, ctx)


class Parsed(Text):
    """A text that `parse` turns into a value; it raises ValueError or UserError for a wrong one."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        super().__init__()
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):  # a default
            return value
        text = super().convert(value, param, ctx)
        try:
            return self.parse(text)
        except ValueError as error:
            self.fail(f"{text!r} {error}", param, ctx)
        except UserError as error:
            self.fail(str(error).removeprefix("--layer-split "), param, ctx)


def _split(text: str) -> str:
    if text.endswith(".json"):
        return ",".join(map(str, read_plan(Path(text)).layer_split))
    parse_split(text)
    return text


def _gpu_layers(text: str) -> int:
    named = {"all": ALL_LAYERS, "auto": AUTO_LAYERS, "-1": AUTO_LAYERS}
    if text not in named and not (WHOLE.fullmatch(text) and 0 <= int(text) <= INT32_MAX):
        raise ValueError("is neither a whole number nor all nor auto")
    return named[text] if text in named else int(text)


def _devices(text: str) -> tuple[str, ...]:
    names = tuple(text.split("+"))
    if not all(map(DEVICE.fullmatch, names)) or ("auto" in names and names[1:]):
        raise ValueError("is neither auto nor none nor a device, as CUDA0, or several of one rank, as CUDA0+CUDA1")
    return () if names == ("auto",) else names


LOGIT_BIAS = Parsed("token_id(+/-)bias", read_one)
SPLIT = Parsed("split", _split)
"""Layers or proportions a stage, as `parse_split` reads them; the text itself."""

GPU_LAYERS = Parsed("number, all or auto", _gpu_layers)
"""Layers on a rank's GPU: a number, ALL_LAYERS, or AUTO_LAYERS."""

DEVICES = Parsed("device", _devices)
"""Devices of a rank, by libllama's names with + between them; empty: auto, NO_DEVICE: none."""

BACKEND = Parsed("backend", Backend.parse)
REPO = Parsed("user/model[:quant]", parse_name)
"""A model on the hub."""


class WireName(click.Choice[str]):
    """What activations travel as."""

    def __init__(self) -> None:
        super().__init__(list(map(str, WireType)))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, WireType) else WireType(super().convert(value, param, ctx))


DELAYS = {"chunk": ONE_CHUNK, "none": math.inf}


class Delay(Number):
    """Seconds above 0, or a word: `chunk` is ONE_CHUNK, `none` no limit, which is infinite."""

    name = "delay"

    def __init__(self) -> None:
        super().__init__(0, 1e6, above=True)
        self.wanted += ", and neither chunk nor none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return DELAYS[value] if value in DELAYS else value if value == math.inf else super().convert(value, param, ctx)


THREADS = Whole(1, MAX_THREADS)
PROBABILITY = Number(0, 1)
TYPES: Sequence[type[click.ParamType]] = (
    Whole, Number, Text, Listed, click.Choice, type(click.BOOL),
)  # fmt: skip
"""What an option may have for a type: a new one checks as much, or is added here."""
