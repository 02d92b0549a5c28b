"""Large pages of slices in memory: where they are reserved, and that nothing depends on them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeinfer.models.gguf import writer
from pipeinfer.models.gguf.header import read_header
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.gguf.slice import open_blank, open_slice
from pipeinfer.models.gguf.writer import HUGE_PAGE, reserve_large_pages
from tests.support.gguf_factory import Shape, write_model

SHAPE = Shape(n_layer=3, n_embd=512, n_head=8, n_head_kv=4, n_ff=4096)
"""Layers of 7 MB."""


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("pages", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return read_model_info(write_model(tmp_path_factory.mktemp("pages") / "m.gguf", SHAPE))


def held(fd: int) -> int:
    """Bytes of memory. What is reserved by a byte a large page is all there once the kernel has gathered it."""
    return os.fstat(fd).st_blocks * 512


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large pages are taken, whatever they cost here; without them nothing can be told."""
    monkeypatch.setattr(writer, "MAX_SLOWDOWN", math.inf)
    fd = os.memfd_create("probe", os.MFD_CLOEXEC)
    try:
        if not reserve_large_pages(fd, HUGE_PAGE, [(0, 1)]):
            pytest.skip("this kernel, or its settings, gather no pages of memory files")
    finally:
        os.close(fd)


def test_there_are_large_pages_where_something_will_be_written_and_nowhere_else(cheap: None, memory: int) -> None:
    n_bytes = 9 * HUGE_PAGE + 100
    spans = [(0, 100), (100, 200), (3 * HUGE_PAGE + 5, 5 * HUGE_PAGE + 5), (9 * HUGE_PAGE - 1, n_bytes)]
    assert reserve_large_pages(memory, n_bytes, spans)
    assert held(memory) == (1 + 3 + 1) * HUGE_PAGE, "of the first, the third to the fifth, and the ninth"
    assert os.fstat(memory).st_size == n_bytes and not any(os.pread(memory, n_bytes, 0))


def test_several_pieces_are_gathered_one_after_another(
    cheap: None, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PIECE_BYTES", 2 * HUGE_PAGE)
    assert reserve_large_pages(memory, 12 * HUGE_PAGE, [(HUGE_PAGE, 11 * HUGE_PAGE)])
    assert held(memory) == 10 * HUGE_PAGE


def test_where_large_pages_are_dear_only_a_few_are_tried(
    cheap: None, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a virtual machine that gives what is free back to its host."""
    monkeypatch.setattr(writer, "MAX_SLOWDOWN", 0.0)
    assert not reserve_large_pages(memory, 12 * HUGE_PAGE, [(0, 12 * HUGE_PAGE)])
    assert held(memory) == writer.FIRST_BYTES and os.fstat(memory).st_size == 12 * HUGE_PAGE


def test_what_cannot_have_them_can_be_written_all_the_same(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        reserve_large_pages(file.fileno(), 2 * HUGE_PAGE, [(0, 2 * HUGE_PAGE)])
        assert file.write(b"x" * 3 * HUGE_PAGE) == 3 * HUGE_PAGE
    reading = os.open(tmp_path / "file", os.O_RDONLY)
    assert not reserve_large_pages(reading, HUGE_PAGE, [(0, HUGE_PAGE)]), "it cannot even be made longer"
    os.close(reading)


def test_slices_lie_in_large_pages_and_are_what_they_were(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    part = open_slice(info, 1, 3)
    monkeypatch.setattr("pipeinfer.models.gguf.writer.reserve_large_pages", lambda *_: False)
    plain = open_slice(info, 1, 3)
    assert part.path.read_bytes() == plain.path.read_bytes() and len(read_header(part.path).tensors) > 18
    assert held(part.fd) >= part.n_bytes > 6 * HUGE_PAGE and held(part.fd) - part.n_bytes < HUGE_PAGE
    part.close()
    plain.close()


def test_slices_that_are_timed_without_weights_lie_in_them_too(cheap: None, info: ModelInfo) -> None:
    blank = open_blank(info, 1, 3)
    assert held(blank.fd) > blank.n_bytes - HUGE_PAGE
    blank.close()
