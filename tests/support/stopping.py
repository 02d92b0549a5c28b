"""Work for a limited process that is stopped before its answer, the first time or always."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    mark = Path(asked["mark"])
    if asked["always"] or not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return {"done": True}
