"""The slices of a model for the stages of a plan, written before any job runs. Loads no weights and prints nothing."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from shutil import disk_usage

from pipeinfer.cluster.assignment import StagePlan, assign
from pipeinfer.errors import UserError
from pipeinfer.job.placement.job_plan import sizes_of
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.gguf.remote import cached_table, write_table
from pipeinfer.models.gguf.slice import is_cached, open_slice, slice_bytes, slice_path
from pipeinfer.text import size_text
from pipeinfer.unfinished import sweep


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file in the directory. `is_new`: it was not there, or was not what it should be."""

    path: Path
    what: str
    n_bytes: int
    is_new: bool


def write_slices(
    target: Path, split: Sequence[float] | None, n_stages: int, output: Path, only: Sequence[int] = ()
) -> Iterator[WrittenFile]:
    """Write one file after another. `n_stages`: without a `split`, which is then by size. `only`: the stages to write;
    empty: all. With the first stage comes the token table, for hosts that have no file of the model. Raises UserError,
    before anything is written where the disk has no room for all of it."""
    info = read_model_info(target)
    assignment = assign(len(split) if split else n_stages, [], sizes_of(info), split)
    if len(assignment.stages) == 1:
        raise UserError("one stage has the whole model, which is read from its own file; split it for 2 stages or more")
    if unknown := [number for number in only if number >= len(assignment.stages)]:
        raise UserError(f"--only {unknown[0]}: there are stages 0 to {len(assignment.stages) - 1}")
    stages = {number: assignment.stages[number] for number in sorted(set(only)) or range(len(assignment.stages))}
    try:
        output.mkdir(parents=True, exist_ok=True)
        sweep(output)
        _check_room({number: _missing(info, stage, output) for number, stage in stages.items()}, output)
    except OSError as error:
        raise UserError(f"--output {output} cannot be a directory: {error.strerror}; name another one") from None
    for stage in stages.values():
        path = slice_path(info, stage.first, stage.last, output)
        before = path.stat().st_ino if os.path.exists(path) else None
        part = open_slice(info, stage.first, stage.last, output)
        part.close()
        yield WrittenFile(path, stage.layers, part.n_bytes, path.stat().st_ino != before)
    if 0 in stages:
        was_there = cached_table(info, output).is_good
        table = write_table(info, output)
        yield WrittenFile(table, "token table", table.stat().st_size, not was_there)


def _missing(info: ModelInfo, stage: StagePlan, output: Path) -> int:
    n_bytes = 0 if is_cached(info, stage.first, stage.last, output, ()) else slice_bytes(info, stage.first, stage.last)
    if stage.first == 0 and not (table := cached_table(info, output)).is_good:
        n_bytes += table.n_bytes
    return n_bytes


def _check_room(missing: Mapping[int, int], output: Path) -> None:
    """`missing`: bytes of each stage. Raises UserError, with the stages that would fit, when these are too many."""
    needed, free = sum(missing.values()), disk_usage(output).free
    if needed <= free:
        return
    fitting = [number for number, total in zip(missing, accumulate(missing.values()), strict=True) if total <= free]
    ways = "make room, or name another directory"
    if fitting:
        fits = f"--only {','.join(map(str, fitting))} fits"
        ways = f"make room, name another directory, or write what ranks of this host need alone: {fits}"
    raise UserError(
        f"--output {output} lacks {size_text(needed - free)}: {size_text(needed)} are to be written, "
        f"{size_text(free)} are left; {ways}"
    )
