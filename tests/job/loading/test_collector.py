"""Python's collector leaves alone what a rank has imported and loaded: a pass over it would be a pause in a text."""

from __future__ import annotations

import gc
from unittest.mock import MagicMock

import pytest

from pipeinfer.job.loading import load


def test_what_is_loaded_is_not_passed_over_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fetch_layers", "load_part"):
        monkeypatch.setattr(load, name, MagicMock())
    gc.unfreeze()
    try:
        assert len(gc.get_objects()) > 20_000
        load.load_own(MagicMock(), MagicMock())
        assert len(gc.get_objects()) < 1000
    finally:
        gc.unfreeze()
