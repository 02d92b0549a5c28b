"""Begins `gpu.py` on a machine without a network, out of a folder that `gpu_bundle.py` made and that holds this file:
`python3 FOLDER/begin.py [options of gpu.py]`. Lays what was carried over what this Python has; needs nothing but torch
and numpy there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    expected = json.loads((HERE / "bundle.json").read_text())
    version = "{}.{}".format(*sys.version_info)
    if version != expected["python"]:
        return refuse(f"bundled for Python {expected['python']}, but this is {version}: bundle with --python {version}")
    for name in expected["there"]:
        if subprocess.run([sys.executable, "-c", f"import {name}"]).returncode:
            return refuse(f"{sys.executable} has no {name}; name a Python that has it")
    python = lay_over(HERE / "venv", HERE / "bundle.tar.gz")
    code = subprocess.run([python, str(HERE / "venv/source/benchmarks/gpu.py"), *sys.argv[1:]]).returncode
    if code == -signal.SIGILL:
        return refuse("this processor lacks instructions that llama.cpp was compiled for; bundle a build without them")
    return code


def lay_over(folder: Path, bundle: Path) -> str:
    """An environment of what was carried, before all that this Python's own has. Returns its Python."""
    venv.create(folder, clear=True)
    with tarfile.open(bundle) as carried:
        carried.extractall(folder)
    ours = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    theirs = [each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")]
    (ours / "theirs.pth").write_text("".join(f"import site; site.addsitedir({each!r})\n" for each in theirs))
    return str(folder / "bin/python")


def refuse(why: str) -> int:
    print(f"begin.py: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
