"""A folder with all that `gpu.py` needs on a machine that has only Python, torch, numpy and a driver, and no network:
`python benchmarks/gpu_bundle.py FOLDER --python 3.12`. Carry it over; there, `python3 FOLDER/begin.py --quick`.

Holds the packages that are installed here, MPI among them where it is one, and this source. Those compiled for one
version of Python are fetched by pip if there is another one over there. Tells what it leaves out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
HERE = "{}.{}".format(*sys.version_info)
MPIS = ("mpich", "openmpi")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1")
NOT_CARRIED = ("__pycache__", "include", "*.gguf", "libmpi_abi*", "mpi*_abi")
"""The shipped models, as `gpu.py` makes its own, and an MPI a second time, for programs of the common ABI."""

MOST = 64 << 20
ON_CPUS = {"libggml-base", "libggml-cpu", "libggml-rpc"}


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--python", "version", default=HERE, show_default=True, help="Version of the Python over there.")
@click.option("--there", default="torch,numpy", show_default=True, help="What it has, and is not carried.")
def main(folder: Path, version: str, there: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mpi = next((name for name in MPIS if find(name)), None)
    carried = needed(["pipeinfer", "matplotlib", *filter(None, [mpi])], version, set(there.split(",")))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        prefix = Path(scratch) / "prefix"
        site = prefix / "lib" / f"python{version}" / "site-packages"
        fetched = [each for each in carried if version != HERE and is_bound(each)]
        for each in carried:
            if each not in fetched:
                lay(each, prefix, site)
        for wheel in fetch(fetched, version, Path(scratch)):
            unpack(wheel, prefix, site)
        for name in ("pipeinfer", "benchmarks", "tests"):
            shutil.copytree(ROOT / name, prefix / "source" / name, ignore=shutil.ignore_patterns(*NOT_CARRIED))
        with tarfile.open(folder / "bundle.tar.gz", "w:gz") as archive:
            for part in sorted(prefix.iterdir()):
                archive.add(part, part.name)
    shutil.copy(ROOT / "benchmarks/gpu_begin.py", folder / "begin.py")
    (folder / "bundle.json").write_text(json.dumps({"python": version, "there": there.split(",")}))
    tell(folder, mpi, carried)


def tell(folder: Path, mpi: str | None, carried: Sequence[Distribution]) -> None:
    from pipeinfer.models.llama.ggml import library_folder

    n_bytes = sum(each.stat().st_size for each in folder.iterdir() if each.is_file())
    click.echo(f"{folder}: {n_bytes / 2**20:.1f} MiB, {len(carried)} packages; there: python3 {folder.name}/begin.py")
    if mpi is None:
        click.echo("left out: MPI, which is none of Python's packages here: part speed wants an mpirun over there")
    if {each.name.split(".")[0] for each in library_folder().glob("libggml-*")} <= ON_CPUS:
        click.echo("left out: libllama's layers on a GPU: this build of llama-cpp-python is one for CPUs")
    click.echo("left out: transformers, which is measured where it is; llama.cpp is compiled for this processor")
    if n_bytes > MOST:
        raise click.ClickException(f"{n_bytes} bytes are more than {MOST}: name in --there what need not be carried")


# -- what is needed


def find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def needed(roots: Sequence[str], version: str, there: set[str]) -> list[Distribution]:
    """The packages that these want, and those that they want in turn, but for what is `there` and this one."""
    found, ahead = dict[str, Distribution](), [(name, "") for name in roots]
    while ahead:
        name, wanted_by = ahead.pop()
        name = canonicalize_name(name)
        if name in found or name in there:
            continue
        known = find(name)
        if known is None:
            raise click.ClickException(f"{name}, which {wanted_by or 'the script'} wants, is not installed here")
        found[name] = known
        for line in known.requires or ():
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": "", "python_version": version}):
                ahead.append((wanted.name, name))
    return [known for name, known in found.items() if name != "pipeinfer"]


def is_bound(known: Distribution) -> bool:
    """Does it have code for this version of Python alone?"""
    tag = f".cpython-{HERE.replace('.', '')}-"
    return any(tag in each.name for each in known.files or ())


# -- how it comes into the folder


def lay(known: Distribution, prefix: Path, site: Path) -> None:
    """The installed files, for another Python's folders. Of what lies outside of packages (a command's script, headers,
    libraries a second time) only MPI's is wanted."""
    is_mpi, seen = known.metadata["Name"] in MPIS, dict[bytes, Path]()
    for each in known.files or ():
        source = Path(os.path.abspath(str(each.locate())))
        outside = each.parts[0] in ("..", "bin", "lib", "include")
        needless = any(fnmatch(part, pattern) for part in each.parts for pattern in NOT_CARRIED)
        if needless or not source.is_file() or (outside and not is_mpi):
            continue
        target = prefix / source.relative_to(sys.prefix) if outside else site / each
        target.parent.mkdir(parents=True, exist_ok=True)
        content = source.read_bytes()
        if len(content) > 1 << 16 and content in seen:
            os.link(seen[content], target)  # under several names, as libraries are: carried once
        else:
            seen[content] = Path(shutil.copy(source, target))


def fetch(wanted: Sequence[Distribution], version: str, folder: Path) -> Iterator[Path]:
    """Wheels of the same versions for another Python."""
    if not wanted:
        return
    names = [f"{each.metadata['Name']}=={each.version}" for each in wanted]
    words = [word for name in PLATFORMS for word in ("--platform", f"{name}_{os.uname().machine}")]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        version,
        "--implementation",
        "cp",
        *words,
        "-d",
        str(folder),
        *names,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip()
        raise click.ClickException(f"pip has no wheels for Python {version} of {', '.join(names)}: {why}")
    yield from sorted(folder.glob("*.whl"))


def unpack(wheel: Path, prefix: Path, site: Path) -> None:
    """A wheel's files, but for headers and scripts of commands."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            parts, where = Path(name).parts, site
            if parts[0].endswith(".data") and len(parts) > 2:
                if parts[1] not in ("data", "purelib", "platlib"):
                    continue
                where, parts = prefix if parts[1] == "data" else site, parts[2:]
            if not name.endswith("/") and "include" not in parts:
                target = where.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


if __name__ == "__main__":
    main()
