"""Models that options name on the hub: their files, before anything reads them. Rank 0's, or a lone process's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeinfer.cluster.hosts.cores import Host
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


def find_models(link: Link, hosts: Sequence[Host], options: RunOptions) -> tuple[RunOptions, Sequence[Host]]:
    """On every rank: the options, on rank 0 with files in the place of names, and the hosts with what each lacks of
    these files. Raises JobError for models that rank 0 cannot have."""
    fetched = link.agree(lambda: fetch_models(options))
    paths = [fetched.model, *fetched.drafts]
    lacks = link.all_gather(frozenset(str(path) for path in paths if not all(map(os.path.exists, part_paths(path)))))
    hosts = [replace(host, lacks=own) for host, own in zip(hosts, lacks, strict=True)]
    return options if link.rank else fetched, hosts


def fetch_files(paths: Sequence[Path], offline: bool = False) -> list[Path]:
    """The same of single paths."""
    return [_fetched(path, offline) for path in paths]


def _fetched(path: Path, offline: bool) -> Path:
    name = name_of(path)
    if name is None:
        return path
    from pipeinfer.models.hub import fetch  # what it imports takes a while

    return fetch(name, offline, complain)
