"""The types of all options, checked by their text alone: every rank parses the same command line with the same result,
and rank 0 reads the file system later. Knows no command."""

import csv
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from pipeinfer.cluster.wire import WireType
from pipeinfer.core.batch_planner import ONE_CHUNK
from pipeinfer.core.samplers import read_bias
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO_LAYERS, INT32_MAX, MAX_CTX, MAX_THREADS, NO_DEVICE
from pipeinfer.models.hub import parse_name
from pipeinfer.models.torch.params import AUTO, CUDA
from pipeinfer.text import shortened

NAME_MAX, PATH_MAX = 255, 4095  # Linux's limits of the bytes of a file's name, and of a path
WHOLE = re.compile(r"[+-]?[0-9]{1,40}")
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,6})?")

MAX_DILATION = 1e4
MAX_SCALE = 1e6  # of an adapter

LLAMA, TORCH = "llama", "torch"
SPELLING = re.compile(r"torch(?::(auto|cpu|cuda(?::[0-9]{1,3})?))?(?::(f32|bf16|int8|int4))?")
CHOICES = (
    "llama, torch, or torch with a device (cpu, cuda, cuda:N) or a type (f32, bf16, int8, int4) behind it: "
    "torch:cpu:bf16"
)

DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.:/\[\]-]{0,63}")
SIZE_TEXT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([KMGTkmgt]?)(i?)B?")
SERVER = re.compile(r"[A-Za-z0-9_.-]{1,253}:[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Pace:
    """--pace. `profile`: name or path; `pair`: of its models, or empty; `dilation`: real seconds that count as one."""

    text: str
    profile: str
    pair: str
    dilation: float

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> "Pace":
        """NAME[:PAIR][*K]. Raises UserError."""
        name, star, factor = text.rpartition("*")
        if not star:
            name = text
        elif not DECIMAL.fullmatch(factor) or not 1 <= float(factor) <= MAX_DILATION:
            raise UserError(f"'{text}': behind * a number from 1 to {MAX_DILATION:g}: real seconds that count as one")
        profile, _, pair = name.partition(":")
        return cls(text, profile, pair, float(factor) if star else 1.0)


@dataclass(frozen=True, slots=True)
class Backend:
    """What computes layers. `device`, `dtype`: those of `TorchParams`, for torch alone."""

    name: str = LLAMA
    device: str = AUTO
    dtype: str = AUTO

    @classmethod
    def parse(cls, text: str) -> "Backend":
        """Raises ValueError with the possible values."""
        if text == LLAMA:
            return cls()
        match = SPELLING.fullmatch(text)
        if match is None:
            raise ValueError(f"is not {CHOICES}")
        return cls(TORCH, match[1] or AUTO, match[2] or AUTO)

    def __str__(self) -> str:
        return ":".join([self.name, *(each for each in (self.device, self.dtype) if each != AUTO)])

    @property
    def is_torch(self) -> bool:
        return self.name == TORCH

    @property
    def wants_gpu(self) -> bool:
        """Whether it needs a GPU; `auto` uses one if there is one."""
        return self.device.startswith(CUDA)


@dataclass(frozen=True, slots=True)
class ScaledFile:
    path: Path
    scale: float = 1.0

    def __str__(self) -> str:
        return f"{self.path}:{self.scale:g}"

    @classmethod
    def parse(cls, text: str) -> "ScaledFile":
        """FILE:SCALE. Raises ValueError."""
        name, _, scale = text.rpartition(":")
        if not name or not DECIMAL.fullmatch(scale) or abs(float(scale)) > MAX_SCALE:
            raise ValueError(f"is not FILE:SCALE, a file and a number from -{MAX_SCALE:g} to {MAX_SCALE:g}")
        return cls(Path(name), float(scale))


class Numeral(click.ParamType):
    """A number that matches `spelling`, in the range of click's type, the next base. `expected`: in the error."""

    name = "number"
    spelling = DECIMAL
    expected: str

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            if not isinstance(value, str) or self.spelling.fullmatch(value):
                return super().convert(value, param, ctx)
        except click.BadParameter:
            pass
        raise click.BadParameter(f"{shortened(str(value))!r} is not {self.expected}", ctx, param)


class Whole(Numeral, click.IntRange):
    """A whole number from `least` to `most`, in ASCII digits."""

    spelling = WHOLE

    def __init__(self, least: int, most: int = INT32_MAX) -> None:
        super().__init__(least, most)
        self.expected = f"a whole number from {least} to {most}"

    def _describe_range(self) -> str:
        """In the help, without the limit of 32-bit numbers."""
        return f"x>={self.min}" if self.max and self.max >= MAX_CTX else super()._describe_range()


class Number(Numeral, click.FloatRange):
    """A number from `least` to `most`, so neither infinite nor NaN. `above`: `least` itself is too little."""

    def __init__(self, least: float, most: float, above: bool = False) -> None:
        super().__init__(least, most, min_open=above)
        self.expected = f"a number above {least} and up to {most}" if above else f"a number from {least} to {most}"


class TextType(click.ParamType):
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


class File(TextType):
    """A path. `shell`: the kind of its completion, `file` or `dir`. `stdin`: it may be - for standard input."""

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
            self.fail(f"{shortened(text)!r} is too long for the name of a {self.name}", param, ctx)
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
    """Values of one type, separated by commas, as a tuple."""

    def __init__(self, item: click.ParamType) -> None:
        self.item, self.name = item, f"{item.name}, …"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if not isinstance(value, str):
            return tuple(value)
        parts = self._parts(value)
        if not all(parts):
            self.fail(f"{value!r} has an empty part; write values with one comma between them", param, ctx)
        return tuple(self._convert(part, value, param, ctx) for part in parts)

    def _parts(self, value: str) -> list[str]:
        return value.split(",")

    def _convert(self, part: str, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.item.convert(part, param, ctx)
        except click.BadParameter as error:
            if part == value:
                raise
            self.fail(f"{value!r}: {error.message}", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [] if "," in incomplete else self.item.shell_complete(ctx, param, incomplete)


class Joined(Listed):
    """All values of a repeated option, as one tuple. As in llama.cpp, a value with a comma is in double quotes."""

    def _parts(self, value: str) -> list[str]:
        try:
            return next(csv.reader([value]), []) or [value]
        except csv.Error:  # a new line outside quotes
            return [value]


class Threads(Listed):
    """Threads of each rank; empty for llama.cpp's -1, as without the option."""

    def __init__(self) -> None:
        count = Whole(1, MAX_THREADS)
        count.expected += ", or -1 alone"
        super().__init__(count)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        return () if value == "-1" else super().convert(value, param, ctx)


class Parsed(TextType):
    """A text that `parse` converts; it raises ValueError or UserError for a wrong one."""

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


def _gpu_layers(text: str) -> int:
    named = {"all": ALL_LAYERS, "auto": AUTO_LAYERS, "-1": AUTO_LAYERS}
    if text not in named and not (WHOLE.fullmatch(text) and 0 <= int(text) <= INT32_MAX):
        raise ValueError("is neither a number of layers, 0 or more, nor all nor auto")
    return named[text] if text in named else int(text)


def _devices(text: str) -> tuple[str, ...]:
    names = tuple(text.split("+"))
    if not all(map(DEVICE.fullmatch, names)) or ("auto" in names and names[1:]):
        raise ValueError("is neither auto nor none nor a device, as CUDA0, or several of one rank, as CUDA0+CUDA1")
    return () if names == ("auto",) else names


def _servers(text: str) -> tuple[str, ...]:
    servers = () if (text,) == NO_DEVICE else tuple(text.split("+"))
    if not all(SERVER.fullmatch(server) and int(server.rpartition(":")[2]) < 1 << 16 for server in servers):
        raise ValueError("is neither none nor HOST:PORT, or several of one rank, as HOST:PORT+HOST:PORT")
    return servers


def _size(text: str) -> int:
    match = SIZE_TEXT.fullmatch(text)
    if not match:
        raise ValueError("is no size, such as 500M or 20G (10^9 bytes each), or 20GiB")
    number, unit, is_binary = match.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** " kmgt".index(unit.lower() or " "))


LOGIT_BIAS = Parsed("token_id(+/-)bias", read_bias)
PACE = Parsed("text", Pace.parse)
GPU_LAYERS = Parsed("number, all or auto", _gpu_layers)  # layers on a rank's GPU: a number, ALL_LAYERS, or AUTO_LAYERS
DEVICES = Parsed("device", _devices)  # devices of a rank, libllama's names separated by +; empty: auto, NO_DEVICE: none
SERVERS = Parsed("host:port", _servers)  # RPC servers of a rank, separated by +; empty: none
BACKEND = Parsed("backend", Backend.parse)
SCALED = Parsed("file:scale", ScaledFile.parse)
SIZE = Parsed("size", _size)  # in bytes
REPO = Parsed("user/model[:quant]", parse_name)  # a model on the hub


class WireName(click.Choice[str]):
    """The type of activations between ranks."""

    def __init__(self) -> None:
        super().__init__(list(map(str, WireType)))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, WireType) else WireType(super().convert(value, param, ctx))


DELAYS = {"chunk": ONE_CHUNK, "none": math.inf}


class Delay(Number):
    """Seconds above 0, or a word: `chunk` is ONE_CHUNK, `none` is infinite."""

    name = "delay"

    def __init__(self) -> None:
        super().__init__(0, 1e6, above=True)
        self.expected += ", and neither chunk nor none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return DELAYS[value] if value in DELAYS else value if value == math.inf else super().convert(value, param, ctx)


THREADS = Whole(1, MAX_THREADS)
PROBABILITY = Number(0, 1)
TYPES: Sequence[type[click.ParamType]] = (Whole, Number, TextType, Listed, click.Choice, type(click.BOOL))
"""The base types of all options: a further one must check as much."""
