"""Models that several modules of this folder load."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeinfer.models.llama.stage import LlamaStage
from tests.support.shipped import load_draft


@pytest.fixture(scope="module")
def draft() -> Iterator[LlamaStage]:
    stage = load_draft()
    yield stage
    stage.close()
