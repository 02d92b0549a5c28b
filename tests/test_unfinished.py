"""Files that are written beside their place: those of dead writers on this host are removed, and no others."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pipeinfer.unfinished import beside, open_locked, sweep


def test_what_a_dead_writer_leaves_is_swept_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a[1]*.base"
    unfinished, other = beside(place), beside(tmp_path / "a1.base")
    other.touch()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        (remote := beside(place)).touch()
    fd = open_locked(unfinished)
    sweep(tmp_path, place.name)
    assert unfinished.exists(), "its writer lives"
    os.close(fd)
    sweep(tmp_path, place.name)
    assert {*tmp_path.iterdir()} == {other, remote}
    sweep(tmp_path)
    assert [*tmp_path.iterdir()] == [remote]
