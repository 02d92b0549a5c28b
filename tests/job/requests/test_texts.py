"""Texts that are read from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeinfer.errors import UserError
from pipeinfer.job.requests.request import read_text


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    for written, read in (
        (b"\xef\xbb\xbfdef", "def"),
        (b"def", "def"),
        (b"\xef\xbb\xbf", ""),
        (b"d\xef\xbb\xbf", "d\ufeff"),
    ):
        path.write_bytes(written)
        assert read_text("--file", path) == read
    path.write_bytes(b"\xef\xbb\xbfd\xff")
    with pytest.raises(UserError, match=r"is not UTF-8 text \(byte 4\)"):
        read_text("--file", path)
