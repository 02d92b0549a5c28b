"""SHA-256 of whole files, kept in the user's cache beside what tells that a file was not written since, and in a
manifest beside slices. Run on each host, with JSON lines, by `doctor --verify` and `models verify`. Knows no GGUF."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from pipeinfer.disk_cache import user_cache
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.contents import FileState
from pipeinfer.outputs import write_file

STEP_BYTES = 1 << 24
N_AT_ONCE = 4
OUTPUT_LOCK = Lock()
MANIFEST = "SHA256SUMS"  # lines as those of sha256sum


def main() -> None:
    with ThreadPoolExecutor(N_AT_ONCE) as pool:  # hashlib leaves the interpreter's lock to others
        for path, result in zip(sys.argv[1:], pool.map(_hash_here, sys.argv[1:]), strict=True):
            _say({"path": path} | result)


def _hash_here(path: str) -> dict[str, object]:
    try:
        digest = file_hash(Path(path), lambda n_bytes: _say({"progress": n_bytes}))
        return {"sha256": digest, "n_bytes": os.stat(path).st_size, "error": ""}
    except OSError as error:
        return {"sha256": "", "n_bytes": 0, "error": error.strerror or str(error)}


def _say(value: dict[str, object]) -> None:
    with OUTPUT_LOCK:  # two threads must not mix their lines
        print(json.dumps(value), flush=True)


def file_hash(path: Path, on_bytes: Callable[[int], object]) -> str:
    """In hexadecimal digits, as model hubs show it. `on_bytes`: takes how many more bytes are done. Raises OSError,
    also for a file that is written to meanwhile."""
    state, cache = FileState.of(path), user_cache()
    name = f"sha256: {os.uname().nodename} {path} {state.n_bytes} {state.mtime_ns} {state.inode}"
    cached = cache.get(name)
    if isinstance(cached, str):
        on_bytes(state.n_bytes)
        return cached
    digest, block = hashlib.sha256(), memoryview(bytearray(STEP_BYTES))
    with open(path, "rb", buffering=0) as file:
        while n_bytes := file.readinto(block):
            digest.update(block[:n_bytes])
            on_bytes(n_bytes)
    if FileState.of(path) != state:
        raise OSError(f"{path} was changed while it was read")
    cache.put(name, digest.hexdigest())
    return digest.hexdigest()


def read_manifest(folder: Path) -> dict[str, str]:
    """File name -> hash, as the manifest of a folder has them; none without one."""
    try:
        lines = (folder / MANIFEST).read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    return {name: digest for digest, mark, name in (line.partition("  ") for line in lines) if mark}


def write_manifest(paths: Sequence[Path]) -> Path:
    """Put files of one folder into its manifest, and files that are gone out of it. Raises UserError."""
    folder = paths[0].parent
    try:
        new = {path.name: file_hash(path, lambda n_bytes: None) for path in paths}
    except OSError as error:
        raise UserError(f"the files of {folder} cannot be hashed: {error}; write them again") from None
    digests = read_manifest(folder) | new
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items()) if (folder / name).exists()]
    write_file(manifest := folder / MANIFEST, "manifest", "".join(lines).encode())
    return manifest
