"""A message once round a rank on each host, as an MPI job under the launcher: whether MPI itself works there."""

import json
import math
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from pipeinfer.child import python_command
from pipeinfer.job.doctor.host_list import HostList, full_words

BASE_S, PER_HOST_S = 30.0, 0.5
"""The longest that a ring may take."""

SHARED_CORE = {"openmpi": ["--map-by", ":OVERSUBSCRIBE"], "srun": ["--overcommit"]}
"""Launcher -> the words with which two ranks may share a core."""

CODE = """
import json, os, signal, socket, sys, time
signal.alarm(int(sys.argv[1]))
from mpi4py import MPI
from pipeinfer.cluster.hosts.launch import check_size
from pipeinfer.cluster.idle import Idle
world = MPI.COMM_WORLD
check_size(world.Get_size())
def receive(source):
    Idle().until(lambda: world.iprobe(source) or None)
    return world.recv(None, source)
rank, size, start_s = world.Get_rank(), world.Get_size(), time.monotonic()
name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
names = [] if rank == 0 else receive(rank - 1)[0]
if size > 1:
    world.send((names + [name], bytes(1 << 18)), (rank + 1) % size)
if rank == 0:
    names = receive(size - 1)[0] if size > 1 else [name]
    print(json.dumps({"ring": names, "s": time.monotonic() - start_s}), flush=True)
"""


class Ring(NamedTuple):
    """`names`: what the ranks call their hosts, in order; empty: it failed, with `error`, or is `late`."""

    names: Sequence[str]
    seconds: float
    error: str
    late: bool


def run_ring(hosts: HostList, names: Sequence[str]) -> Ring:
    """On a rank a host; on one host there are two."""
    n_ranks = dict.fromkeys(names, 1 if len(names) > 1 else 2)
    limit_s = BASE_S + PER_HOST_S * len(names)
    words = full_words([*hosts.words(names, n_ranks), *python_command(CODE, math.ceil(limit_s) + 1)])
    words[1:1] = SHARED_CORE.get(hosts.launcher, []) if len(names) == 1 else []
    try:
        none, pipe = subprocess.DEVNULL, subprocess.PIPE
        job = subprocess.Popen(words, stdin=none, stdout=pipe, stderr=pipe, errors="replace")
    except OSError as error:
        return Ring((), 0.0, f"{words[0]}: {error.strerror}", False)
    try:
        out, errors = job.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        job.kill()
        return Ring((), 0.0, "", True)
    for line in out.splitlines():
        if line.startswith('{"ring"'):
            answer = json.loads(line)
            return Ring(answer["ring"], answer["s"], "", False)
    return Ring((), 0.0, _last_line(errors) or f"exit code {job.returncode}", False)


def _last_line(errors: str) -> str:
    """The last line that says more than how a launcher ends."""
    lines = [line.strip(" =-") for line in errors.splitlines()]
    telling = [line for line in lines if line and not line.startswith(("srun: error: ", "[mpiexec@"))]
    return (telling or [line for line in lines if line] or [""])[-1]
