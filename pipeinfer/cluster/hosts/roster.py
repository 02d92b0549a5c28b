"""Version, host and settings of each rank at the start of a job, and whether they fit together; and the MPI that is
installed. Its library is loaded by a child process, so that no MPI starts here and a broken one does no harm."""

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import pipeinfer
from pipeinfer.child import python_command
from pipeinfer.cluster.watch.rendezvous import own_location
from pipeinfer.errors import UserError
from pipeinfer.text import shortened

RankInfo = tuple[str, str, str, dict[str, str]]
"""(version, host, location, settings by name): plain types, which another version of this program can unpickle."""

COMMAND = "the command"  # the name of the entry with the settings' type, which differs between commands


def own_info(settings: object) -> RankInfo:
    """This rank's; `settings`: a dataclass."""
    assert is_dataclass(settings)
    location = own_location()
    return version_text(), location.host, location.where, {COMMAND: type(settings).__name__, **dict(_named(settings))}


def _named(settings: Any) -> Iterator[tuple[str, str]]:
    """Every field of a dataclass as text; dataclasses in it are flattened."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name.startswith("_"):
            continue  # internal
        if is_dataclass(value):
            yield field.name, type(value).__name__
            yield from _named(value)
        elif field.compare:  # else it is no setting, but learned while running
            yield field.name, _text(value)


def _text(value: Any) -> str:
    """The value nearly as on the command line; different values have different texts."""
    return ",".join(map(_text, value)) if isinstance(value, tuple) and value else str(value)


@cache
def version_text() -> str:
    """The version and a digest of the program's files, because not every change has its own version."""
    root, digest = os.path.dirname(pipeinfer.__file__), hashlib.sha256()
    files = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    for path in sorted(path for path in files if path.endswith(".py")):
        with open(path, "rb", buffering=0) as file:
            digest.update(file.read())
    return f"{pipeinfer.__version__} ({digest.hexdigest()[:8]})"


def check_alike(infos: Sequence[RankInfo]) -> None:
    """Raises UserError when a rank has another version of the program or other settings than rank 0."""
    our_version, our_host, _, ours = infos[0]
    first, way_out = f"rank 0 (host {our_host})", "give every rank the same command line"
    for rank, (version, host, _, theirs) in enumerate(infos):
        other = f"rank {rank} (host {host})"
        if version != our_version:
            raise UserError(
                f"{other} runs pipeinfer {version} and {first} {our_version}; install the same on every host"
            )
        if theirs.get(COMMAND) != ours.get(COMMAND):
            raise UserError(f"{other} was started with another command than {first}; {way_out}")
        for name in sorted(ours.keys() | theirs.keys()):
            if theirs.get(name) != ours.get(name):
                each = f"with {name} {_shown(theirs.get(name))} and {first} with {_shown(ours.get(name))}"
                raise UserError(f"{other} was started {each}; {way_out}")


def _shown(text: str | None) -> str:
    return "nothing" if text is None else shortened(text)


def library_name(text: str) -> str:
    """Of what MPI says of its library, the first line."""
    return " ".join(text.partition("\n")[0].split())


PROBE = """
import ctypes, json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps({"library": MPI.Get_library_version(), "standard": ".".join(map(str, MPI.Get_version())),
                  "mpi4py": mpi4py.__version__}))
"""

PROBE_TIMEOUT_S = 20.0


def describe_mpi() -> dict[str, Any]:
    """Its library, its standard and mpi4py's version; `error` if it cannot be loaded."""
    try:
        done = subprocess.run(
            python_command(PROBE), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PROBE_TIMEOUT_S
        )
        versions: dict[str, Any] = json.loads(done.stdout)
        return versions | {"library": library_name(versions["library"]), "error": None}
    except subprocess.TimeoutExpired:
        why = f"it does not answer within {PROBE_TIMEOUT_S:.0f} s"
    except ValueError:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"library": None, "standard": None, "mpi4py": None, "error": why}
