"""Names of models on the hub: which files of a repository one means. Knows no network and no cache."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.sizes import size_text

PREFIX = "hf:"
"""What a path begins with that is such a name."""

USUAL = ("Q4_K_M", "Q8_0")
"""What is taken of a repository where the name does not say, the first that there is; else the first file."""

BESIDE = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""What the names of GGUF files have that are no models by themselves."""

REPO = re.compile(r"(?!.*(--|\.\.|\.git$))\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", re.ASCII)
"""What the hub lets a repository be called."""

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
TAG = re.compile(r"[-.]([A-Za-z0-9_]+)$")


@dataclass(frozen=True, slots=True)
class HubName:
    """`user/model`, and which of its files: a quantisation, or a file's path there; neither: the usual one."""

    repo: str
    quant: str = ""
    file: str = ""

    def __str__(self) -> str:
        which = self.file or self.quant
        return f"{self.repo}:{which}" if which else self.repo

    @property
    def path(self) -> Path:
        """How options hold it, until the files are there."""
        return Path(f"{PREFIX}{self}")


def parse_name(text: str) -> HubName:
    """`user/model`, `user/model:QUANT` or `user/model:FILE.gguf`. Raises UserError."""
    repo, _, which = text.partition(":")
    if not REPO.fullmatch(repo) or (":" in text and not which):
        raise UserError(f"{text!r} is no model on the hub; write USER/MODEL, or USER/MODEL:Q8_0 for a quantisation")
    return HubName(repo, file=which) if which.lower().endswith(".gguf") else HubName(repo, which)


def name_of(path: Path) -> HubName | None:
    """The name that an option's path is; None of a file. Raises UserError for what is neither."""
    text = str(path)
    return parse_name(text.removeprefix(PREFIX)) if text.startswith(PREFIX) else None


def quant_of(file: str) -> str:
    """What a file's name says of its quantisation; empty where it says nothing."""
    stem = Path(_whole(file)).name.removesuffix(".gguf")
    found = TAG.search(stem)
    return found[1].upper() if found else ""


def is_model(file: str) -> bool:
    """Whether it is a model, or a part of one, by its name."""
    name = Path(file).name
    return name.lower().endswith(".gguf") and not any(word in name for word in BESIDE)


def parts_of(first: str, files: Sequence[str]) -> list[str]:
    """All parts of a model of which this is one, in order, as far as they are there; the file alone if it has none."""
    found = PART.fullmatch(first)
    if found is None:
        return [first]
    parts = [PART.fullmatch(file) for file in sorted(files)]
    return [part[0] for part in parts if part and (part[1], part[3]) == (found[1], found[3])]


def n_parts(file: str) -> int:
    """How many parts the model has that this is one of, by its name."""
    found = PART.fullmatch(file)
    return int(found[3]) if found else 1


def choose_files(name: HubName, sizes: Mapping[str, int]) -> list[str]:
    """The files that a name means among those of the repository, all parts of a split model, the first one first.

    As llama.cpp chooses. `sizes`: of all files, by their paths. Raises UserError, with what there is.
    """
    models = [file for file in sorted(sizes) if is_model(file) and not _is_later(file)]
    if name.file:
        chosen = name.file if name.file in sizes else None
    else:
        found = filter(None, (_of_quant(quant, models) for quant in ([name.quant] if name.quant else USUAL)))
        chosen = next(found, None if name.quant else next(iter(models), None))
    if chosen is None:
        there = ", ".join(f"{file if name.file else quant_of(file) or file} ({_size(file, sizes)})" for file in models)
        raise UserError(
            f"{name.repo} has no {name.file or name.quant or 'GGUF file of a model'}; "
            + (f"there are {there}" if there else "look for a repository with GGUF files")
        )
    files = parts_of(chosen, list(sizes))
    if len(files) != n_parts(chosen):
        raise UserError(f"of {n_parts(chosen)} parts of {chosen} {name.repo} has {len(files)}; take another file")
    return files


def _of_quant(quant: str, models: Sequence[str]) -> str | None:
    """llama.cpp's rule: its name stands somewhere in the path, with a dot or a dash behind it."""
    wanted = re.compile(re.escape(quant) + "[.-]", re.IGNORECASE)
    return next((file for file in models if wanted.search(file)), None)


def _is_later(file: str) -> bool:
    found = PART.fullmatch(file)
    return found is not None and int(found[2]) != 1


def _whole(file: str) -> str:
    """The name without what says which part it is."""
    found = PART.fullmatch(file)
    return f"{found[1]}.gguf" if found else file


def _size(file: str, sizes: Mapping[str, int]) -> str:
    return size_text(sum(sizes[part] for part in parts_of(file, list(sizes))))
