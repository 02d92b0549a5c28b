"""Models that options name on the hub: their files, before anything reads them. Rank 0's, or a lone process's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeinfer.job.complain import complain
from pipeinfer.job.options import RunOptions
from pipeinfer.models.hub_names import name_of


def fetch_models(options: RunOptions) -> RunOptions:
    """The options with files in the place of names. Raises UserError for what cannot be had."""
    model, *drafts = fetch_files([options.model, *options.drafts], options.offline)
    return replace(options, model=model, drafts=tuple(drafts))


def fetch_files(paths: Sequence[Path], offline: bool = False) -> list[Path]:
    """The same of single paths."""
    return [_fetched(path, offline) for path in paths]


def _fetched(path: Path, offline: bool) -> Path:
    name = name_of(path)
    if name is None:
        return path
    from pipeinfer.models.hub import fetch  # what it imports takes a while

    return fetch(name, offline, complain)
