"""What a `LimitedProcess` runs: it says its niceness."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {"niceness": os.nice(0)}
