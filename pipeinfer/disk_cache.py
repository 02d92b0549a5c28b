"""Small values by name in the user's cache folder, a file each. Knows no model and no cluster. A value that cannot be
read, or was written by another program, is missing; a folder that cannot be written stays empty."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.outputs import write_file

N_VALUES = 256  # the most values of the folder; those that were not asked for the longest are deleted
BYTES_MAX = 64 * 1024
NO_HOME = "/nonexistent"  # Debian's name for it


class DiskCache:
    """Values in a folder that processes and hosts may share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str) -> Any:
        """The value of that name, from JSON; None if there is none."""
        path = self._path(name)
        try:
            if not path.is_file() or path.stat().st_size > BYTES_MAX:
                return None
            entry = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(entry, dict) or entry.get("name") != name:
            return None
        with contextlib.suppress(OSError):  # another user's
            os.utime(path)
        return entry.get("value")

    def put(self, name: str, value: Any) -> None:
        """Store a value that JSON can hold, if the folder can be written."""
        with contextlib.suppress(OSError, UserError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(self._path(name), "a kept value", json.dumps({"name": name, "value": value}).encode())
            self._forget()

    def _path(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"

    def _forget(self) -> None:
        with os.scandir(self._folder) as entries:
            files = [(entry.stat().st_mtime, entry.path) for entry in entries if entry.name.endswith(".json")]
        for _, path in sorted(files)[: max(0, len(files) - N_VALUES)]:
            Path(path).unlink(missing_ok=True)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """This program's folder in the user's cache: XDG_CACHE_HOME, or ~/.cache. Where nobody knows the user's home, as of
    a number without a name in a container, it cannot be made."""
    base = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        base = f"{home if os.path.isabs(home) else NO_HOME}/.cache"
    return Path(base) / "pipeinfer"


def user_cache(environ: Mapping[str, str] = os.environ) -> DiskCache:
    """The user's cache."""
    return DiskCache(cache_folder(environ) / "kept")
