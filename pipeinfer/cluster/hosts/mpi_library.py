"""The MPI that is installed. Its library is loaded by a child process, so that no MPI starts here and a broken one does
no harm."""

import json
import subprocess
from typing import Any

from pipeinfer.child import python_command

PROBE = """
import ctypes, json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps({"library": " ".join(MPI.Get_library_version().split("\\n")[0].split()),
                  "standard": ".".join(map(str, MPI.Get_version())), "mpi4py": mpi4py.__version__}))
"""

PROBE_TIMEOUT_S = 20.0


def describe_mpi() -> dict[str, Any]:
    """Its library, its standard and mpi4py's version; `error` if it cannot be loaded."""
    try:
        done = subprocess.run(
            python_command(PROBE), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PROBE_TIMEOUT_S
        )
        versions: dict[str, Any] = json.loads(done.stdout)
        return versions | {"error": None}
    except subprocess.TimeoutExpired:
        why = f"it does not answer within {PROBE_TIMEOUT_S:.0f} s"
    except ValueError:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"library": None, "standard": None, "mpi4py": None, "error": why}
