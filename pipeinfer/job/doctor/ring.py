"""A message once round a rank on each host, as an MPI job under the launcher: whether MPI itself works there."""

import json
import math
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

from pipeinfer.child import python_command
from pipeinfer.cluster.hosts.roster import library_name
from pipeinfer.job.doctor.host_list import HostList, full_words

SILENT_S, LIMIT_S = 30.0, 180.0
"""The longest between two signs of its ranks, and the longest in all."""

SHARED_CORE = {"openmpi": ["--map-by", ":OVERSUBSCRIBE"], "srun": ["--overcommit"]}
"""Launcher -> the words with which two ranks may share a core."""

CODE = """
import json, os, signal, socket, sys, time
signal.alarm(int(sys.argv[1]))
def say(text):
    os.write(1, (text + "\\n").encode())
def fail(kind, error, trace):  # a launcher may wait for the others
    say(json.dumps({"failed": f"{kind.__name__}: {error}"}))
sys.excepthook = fail
say("started")
from mpi4py import MPI
say("joined")
from pipeinfer.cluster.hosts.launch import check_size
from pipeinfer.cluster.idle import Idle
world = MPI.COMM_WORLD
check_size(world.Get_size())
def receive(source):
    Idle().until(lambda: world.iprobe(source) or None)
    return world.recv(None, source)
rank, size, start_s = world.Get_rank(), world.Get_size(), time.monotonic()
name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
here = [[name, MPI.Get_library_version()]]
ranks = [] if rank == 0 else receive(rank - 1)[0]
if size > 1:
    world.send((ranks + here, bytes(1 << 18)), (rank + 1) % size)
if rank == 0:
    ranks = receive(size - 1)[0] if size > 1 else here
    say(json.dumps({"ring": ranks, "s": time.monotonic() - start_s}))
"""


class Ring(NamedTuple):
    """`names`: what the ranks call their hosts, in order; empty: it failed, with `error`, or is `late`. `libraries`:
    those of MPI on them."""

    names: Sequence[str]
    seconds: float
    error: str
    late: bool
    libraries: Sequence[str] = ()


def run_ring(hosts: HostList, names: Sequence[str], environ: Mapping[str, str] = os.environ) -> Ring:
    """On a rank a host; on one host there are two."""
    n_ranks = dict.fromkeys(names, 1 if len(names) > 1 else 2)
    words = full_words([*hosts.words(names, n_ranks), *python_command(CODE, math.ceil(LIMIT_S) + 1)])
    words[1:1] = SHARED_CORE.get(hosts.launcher, []) if len(names) == 1 else []
    try:
        none, pipe = subprocess.DEVNULL, subprocess.PIPE
        job = subprocess.Popen(words, stdin=none, stdout=pipe, stderr=pipe, text=True, errors="replace", env=environ)
    except OSError as error:
        return Ring((), 0.0, f"{words[0]}: {error.strerror}", False)
    lines, errors, answer = queue.SimpleQueue[str](), list[str](), dict[str, Any]()
    for stream, take in ((job.stdout, lines.put), (job.stderr, errors.append)):
        threading.Thread(target=_read, args=(stream, take), daemon=True).start()
    end_s = time.monotonic() + LIMIT_S
    try:
        while line := lines.get(timeout=min(SILENT_S, max(0.0, end_s - time.monotonic()))):
            if line.startswith('{"failed"'):
                job.kill()
                return Ring((), 0.0, json.loads(line)["failed"], False)
            if line.startswith('{"ring"'):
                answer = json.loads(line)
        job.wait(SILENT_S)
    except (queue.Empty, subprocess.TimeoutExpired):
        job.kill()
        return Ring((), 0.0, "", True)
    if answer:
        ranks, libraries = zip(*answer["ring"], strict=True)
        return Ring(ranks, answer["s"], "", False, [library_name(each) for each in libraries])
    return Ring((), 0.0, _last_line("".join(errors)) or f"exit code {job.returncode}", False)


def _read(stream: IO[str], take: Callable[[str], object]) -> None:
    """Its lines; an empty one at the end."""
    for line in stream:
        take(line)
    take("")


def _last_line(errors: str) -> str:
    """The last line that says more than how a launcher ends."""
    lines = [line.strip(" =-") for line in errors.splitlines()]
    telling = [line for line in lines if line and not line.startswith(("srun: error: ", "[mpiexec@"))]
    return (telling or [line for line in lines if line] or [""])[-1]
