"""Which tests start ranks, servers or hosts, and so want the cores for themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

STARTS = re.compile(
    r"^from tests\.(jobs|serving|namespaces|slurm|memory_group) import|^import subprocess", re.MULTILINE
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    texts = {path: path.read_text() for path in {item.path for item in items}}
    for item in items:
        if STARTS.search(texts[Path(item.path)]):
            item.add_marker("ranks")
