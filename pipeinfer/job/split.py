"""The slices of a model for the stages of a plan, written before any job runs. Loads no weights and prints nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.cluster.plan import make_plan
from pipeinfer.errors import UserError
from pipeinfer.job.deployment import sizes_of
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.gguf.remote import write_table
from pipeinfer.models.gguf.slice import open_slice, slice_path


@dataclass(frozen=True, slots=True)
class Written:
    """A slice in the directory. `is_new`: it was not there, or was not what it should be."""

    path: Path
    first: int
    last: int
    n_bytes: int
    is_new: bool


def split_of_plan(path: Path) -> list[float]:
    """The layers of each stage of a plan that `pipeinfer plan --json` wrote. Raises UserError."""
    try:
        counts = json.loads(path.read_text())["layer_split"]
        return [float(int(count)) for count in counts]
    except OSError as error:
        raise UserError(f"--plan {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--plan {path} is no plan; write one with: pipeinfer plan … --json > plan.json") from None


def write_slices(target: Path, split: list[float] | None, n_stages: int, output: Path) -> Iterator[Written]:
    """One after another; `n_stages` where no split says how many: by size. Beside them the token table, for hosts of a
    first stage that have no file of the model. Raises UserError."""
    info = read_model_info(target)
    plan = make_plan(len(split) if split else n_stages, [], sizes_of(info), 0, split)
    if len(plan.stages) == 1:
        raise UserError("one stage has the whole model, which is read from its own file; split it for 2 stages or more")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output} cannot be a directory: {error.strerror}; name another one") from None
    for stage in plan.stages:
        yield _write(info, stage.first, stage.last, output)
    write_table(info, output)


def _write(info: ModelInfo, first: int, last: int, output: Path) -> Written:
    path = slice_path(info, first, last, output)
    before = path.stat().st_ino if path.exists() else None
    part = open_slice(info, first, last, output)
    part.close()
    return Written(path, first, last, part.n_bytes, path.stat().st_ino != before)
