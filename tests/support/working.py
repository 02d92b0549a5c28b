"""What a `LimitedProcess` runs: it has worked for most of a second before it is asked, and then never ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

while time.process_time() < 0.7:
    pass


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    with Path(asked["log"]).open("a") as log:
        log.write("asked\n")
    while True:
        pass
