"""The program's facts of a host: how they are requested, and a host as they describe it. Reads none itself."""

from base64 import b64encode
from collections.abc import Mapping
from pickle import dumps
from typing import TYPE_CHECKING, Any

from pipeinfer.child import python_command
from pipeinfer.cluster.hosts.cores import FreeMemory, Host
from pipeinfer.cluster.hosts.roster import version_text

if TYPE_CHECKING:
    from pipeinfer.job.options.options import RunOptions

CODE = "from pipeinfer.job.inspect.host_facts import main; main()"

FACTS_S = 60.0
"""The longest that the program may take: kernels that are tried for the first time take some seconds."""


def facts_command(options: "RunOptions") -> list[str]:
    """`options`: with files in place of names; read there only by the same version."""
    return python_command(CODE, version_text(), b64encode(dumps(options)).decode())


def host_of(fact: Mapping[str, Any], name: str) -> Host:
    """The host that the fact `host` describes, under the name that the launcher has for it."""
    lists = {key: tuple(map(tuple, fact[key])) for key in ("gpus", "repacked", "grouped", "exact_rows")}
    sets = {key: frozenset(fact[key]) for key in ("cores", "lacks")}
    memory, gpu_names = FreeMemory(**fact["memory"]), tuple(fact["gpu_names"])
    return Host(**{**fact, **lists, **sets, "memory": memory, "gpu_names": gpu_names, "speed": None, "name": name})
