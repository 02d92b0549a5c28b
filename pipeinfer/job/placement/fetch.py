"""Models that options name on the hub: their files, before anything reads them. Rank 0's, or a lone process's."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeinfer.cluster.cores import Host
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.process.complain import complain
from pipeinfer.models.gguf.model_info import part_paths
from pipeinfer.models.hub_names import name_of

if TYPE_CHECKING:  # imports MPI
    from pipeinfer.cluster.transport import Link


def fetch_models(options: RunOptions) -> RunOptions:
    """The options with files in the place of names. Raises UserError for what cannot be had."""
    model, *drafts = fetch_files([options.model, *options.drafts], options.offline)
    return replace(options, model=model, drafts=tuple(drafts))


def find_models(link: Link, hosts: Sequence[Host], paths: Callable[[], Sequence[Path]]) -> tuple[Sequence[Host], str]:
    """On every rank: the hosts, with what each lacks of the models at `paths`, which rank 0 asks for; and, where it
    cannot have them, why."""
    found: Sequence[Path] | None = None
    error = ""
    if link.rank == 0:
        try:
            found = paths()
        except UserError as caught:
            error = str(caught)
    found, error = link.broadcast((found, error) if link.rank == 0 else None)
    if found is None:
        return hosts, error
    lacks = link.all_gather(frozenset(str(path) for path in found if not all(map(os.path.exists, part_paths(path)))))
    return [replace(host, lacks=own) for host, own in zip(hosts, lacks, strict=True)], ""


def fetch_files(paths: Sequence[Path], offline: bool = False) -> list[Path]:
    """The same of single paths."""
    return [_fetched(path, offline) for path in paths]


def _fetched(path: Path, offline: bool) -> Path:
    name = name_of(path)
    if name is None:
        return path
    from pipeinfer.models.hub import fetch  # what it imports takes a while

    return fetch(name, offline, complain)
