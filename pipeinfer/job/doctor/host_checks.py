"""Checks of each host: the way there, the program, the machine; those of this host before MPI starts."""

import re
import socket
import sys
from collections.abc import Mapping
from typing import Any

from pipeinfer.cluster.hosts.roster import check_alike, version_text
from pipeinfer.cluster.watch.shared_memory import RANK_BYTES
from pipeinfer.errors import UserError
from pipeinfer.job.doctor import agent
from pipeinfer.job.doctor.agent import ADDRESS_SPACE, FILE_SIZE, LOCKED_MEMORY, OPEN_FILES
from pipeinfer.job.doctor.findings import NO_JOB, Cluster, Fault, Finding, HostReport, Result, Severity, check, problems
from pipeinfer.job.doctor.host_list import HostList, host_named
from pipeinfer.job.doctor.host_session import CONNECTED, CONNECTING, FACTS_S
from pipeinfer.text import size_text

COPY, REPLACE = "{copy}", "{replace}"
LEAST_FILES, LEAST_LOCKED_BYTES, MOST_CLOCK_S = 1024, 64 << 20, 2.0
SIGILL = -4
NO_LIMIT = "unlimited"
LAST_FACT = "models"

WARNING = Severity.WARNING

NO_ADDRESS = Fault("this name has no address", "echo ADDRESS {host} | sudo tee -a /etc/hosts")
ALIAS = Fault(
    "ssh alone knows this name: MPI does not find it here", "echo {address} {host} | sudo tee -a /etc/hosts", WARNING
)


@check("its name leads to an address", NO_ADDRESS, ALIAS)
def name(report: HostReport, cluster: Cluster) -> Result:
    if report.is_here or report.has_address or cluster.hosts.launcher == "srun":  # Slurm has addresses of its own
        return report.address or report.base.get("host", "-")
    if report.failure and "ould not resolve" in report.failure.errors:
        return NO_ADDRESS.on(report)
    return ALIAS.on(report, address=report.address or "ADDRESS")


UNKNOWN_KEY = Fault("its host key is not known here", "ssh {host} true, compare the fingerprint, answer yes")
CHANGED_KEY = Fault(
    "its host key is another one than before: it was installed anew, or another machine answers",
    "ask who installed it anew; then ssh-keygen -R {host} and ssh {host} true",
)
BARRED = Fault(
    "ssh is not let in without a question as this user ({error})",
    "ssh-copy-id {host} (no key yet: first ssh-keygen -t ed25519; a passphrase: ssh-add; another user there: "
    "User NAME in ~/.ssh/config)",
)
NO_SSHD = Fault(
    "nothing takes ssh connections there",
    "on {host}: sudo systemctl start ssh; if there is none: sudo apt-get install openssh-server",
)
SILENT_SSHD = Fault(
    "something takes the connection at ssh's port and says nothing ({error})",
    "at {host} itself: sudo systemctl restart ssh; is a disk or its memory full, or is another service at that port?",
)
UNREACHABLE = Fault("it cannot be reached ({error})", "ping {host}: is it on, and is the address right?")
HANGS = Fault(
    "it does not answer within {seconds} s",
    "ssh {host} true; if that hangs too, look at {host} itself: a login script or a disk stands still",
)
NO_CLIENT = Fault("there is no ssh here", "sudo apt-get install openssh-client")
NO_LOGIN = Fault("no program can be started there: {error}", "ssh {host} true must end without a word")
NO_STEP = Fault("srun starts no program there: {error}", "scontrol show node {host}: is it up, and its slurmd?")
NO_PYTHON = Fault("there is no Python there", "{at}sudo apt-get install -y python3")

SSH_FAULTS = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": CHANGED_KEY,
    "Host key verification failed": UNKNOWN_KEY,
    "Permission denied|Too many authentication failures": BARRED,
    "Connection refused": NO_SSHD,
    "banner exchange": SILENT_SSHD,
    "timed out|No route|unreachable": UNREACHABLE,
    "No such file": NO_CLIENT,
}
LATE_FAULTS = {CONNECTING: UNREACHABLE, CONNECTED: SILENT_SSHD}  # how far ssh came within its time -> what is wrong
OTHER_SSH_FAULTS = (HANGS, NO_LOGIN, NO_STEP, NO_PYTHON)


@check("ssh gets there without a question, as the launcher goes", *SSH_FAULTS.values(), *OTHER_SSH_FAULTS)
def ssh(report: HostReport, cluster: Cluster) -> Result:
    if report.failure is None:
        return f"as {report.base['user']}, {report.connect_s:.2f} s" if report.base else NO_PYTHON.on(report)
    if name.look(report, cluster) == NO_ADDRESS.on(report):
        return None
    errors, line = report.failure.errors, _last_line(report.failure.errors)
    if cluster.hosts.launcher == "srun":
        late = f"no answer within {report.connect_s:.0f} s" if report.failure.code is None else ""
        return NO_STEP.on(report, error=late or line or f"exit code {report.failure.code}")
    if report.failure.code is None and report.failure.step in LATE_FAULTS:
        return LATE_FAULTS[report.failure.step].on(report, error=f"no answer within {report.connect_s:.0f} s")
    for pattern, fault in SSH_FAULTS.items():
        if re.search(pattern, errors) and (fault is not NO_CLIENT or report.failure.code == 127):
            return fault.on(report, error=line)
    if report.failure.code is None:
        return HANGS.on(report, seconds=f"{report.connect_s:.0f}")
    return NO_LOGIN.on(report, error=line or f"exit code {report.failure.code}")


NO_PROGRAM = Fault("the program is not there: {why}", COPY)
BROKEN_LINK = Fault(
    "the program's Python is missing: {why}",
    "{at}sudo apt-get install -y python3, the version of {first}; else make install there",
)
OTHER_PYTHON = Fault(
    "Python {version}, and here it is {ours}: compiled packages are for one of them",
    "install the same Python on {host}, then make install there",
)


@check("the program's Python is there, the same one", NO_PROGRAM, BROKEN_LINK, OTHER_PYTHON, needs="base")
def python(report: HostReport, cluster: Cluster) -> Result:
    why, version, ours = report.base["program"], report.base["interpreter"], sys.version.split()[0]
    if why:
        return (BROKEN_LINK if "link" in why else NO_PROGRAM).on(report, why=why, first=cluster.first.name)
    if _minor(version) != _minor(ours):
        return OTHER_PYTHON.on(report, version=version, ours=ours)
    return f"{version}, {sys.executable}"


FAILS = Fault("the program does not start, or ends early: {why}", REPLACE)
LATE = Fault("the program has not answered within {seconds} s", "{at}pipeinfer info: where does it stand still?")
OTHER_VERSION = Fault("the program is another one: {why}", REPLACE)
ANOTHER = re.compile(r"No module named 'pipeinfer\.|from 'pipeinfer[.']")  # the source lacks what this one has


@check("the same version and source at the same path", FAILS, LATE, OTHER_VERSION, needs="base")
def program(report: HostReport, cluster: Cluster) -> Result:
    """The version, by the function with which `run` compares its ranks."""
    failure, facts = report.facts_failure, report.facts
    if failure and failure.code is None:
        return LATE.on(report, seconds=f"{FACTS_S:.0f}")
    why = _last_line(failure.errors) or f"exit code {failure.code}" if failure else "it says less than it should"
    if "version" not in facts:
        fault = OTHER_VERSION if ANOTHER.search(why) else FAILS
        return None if isinstance(python.look(report, cluster), Finding) else fault.on(report, why=why)
    first, rank = cluster.first.facts, list(cluster.reports).index(report.name)
    infos = [(each["version"], *each.get("place", ("-", "-")), {}) for each in (first, facts)]
    try:
        check_alike([*infos[:1] * rank, infos[1]])
    except UserError as error:
        return OTHER_VERSION.on(report, why=error)
    if LAST_FACT not in facts and facts["version"] != version_text():
        return OTHER_VERSION.on(report, why=f"pipeinfer {facts['version']}, and here it is {version_text()}")
    if LAST_FACT not in facts and not ("build" in facts and "host" not in facts and failure):  # `build` tells that
        return FAILS.on(report, why=why)
    return str(facts["version"])


OTHER_PACKAGES = Fault("{ours}, and {first} has {theirs}", REPLACE, WARNING)


@check("numpy and mpi4py are the same", OTHER_PACKAGES, needs="packages")
def packages(report: HostReport, cluster: Cluster) -> Result:
    mine = report.facts["packages"]
    ours, theirs = (_versions(each) for each in (mine, cluster.first.facts.get("packages", mine)))
    return ours if ours == theirs else OTHER_PACKAGES.on(report, ours=ours, theirs=theirs, first=cluster.first.name)


NO_MPI = Fault("no MPI library can be loaded: {error}", "{at}{python} -m pip install 'pipeinfer[mpich]'")
OTHER_MPI = Fault("{ours}, and {first} has {theirs}: their ranks do not find each other", REPLACE)
WRONG_LAUNCHER = Fault(
    "{ours} is loaded, and the launcher is {launcher}'s",
    "--launcher of the same MPI, or install the other one: make install MPI=openmpi (mpich)",
)


@check("the same MPI library can be loaded, that of the launcher", NO_MPI, OTHER_MPI, WRONG_LAUNCHER, needs="mpi")
def mpi(report: HostReport, cluster: Cluster) -> Result:
    ours, launcher = report.facts["mpi"], cluster.hosts.launcher
    theirs = cluster.first.facts.get("mpi", ours)
    if ours["error"]:
        return NO_MPI.on(report, error=ours["error"])
    if theirs["library"] and ours["library"] != theirs["library"]:
        return OTHER_MPI.on(report, ours=ours["library"], theirs=theirs["library"], first=cluster.first.name)
    is_open_mpi = "open mpi" in ours["library"].lower()
    if launcher != "srun" and is_open_mpi != (launcher == "openmpi"):
        return WRONG_LAUNCHER.on(report, ours=ours["library"], launcher=launcher)
    return str(ours["library"])


ILLEGAL = Fault(
    "llama.cpp was compiled for another processor: {why}",
    "on {host}: make install; or everywhere with CMAKE_ARGS=-DGGML_NATIVE=off",
)
CRASHES = Fault("llama.cpp cannot be loaded: {why}", "on {host}: make install")
OTHER_BUILD = Fault("{ours}, and {first} has {theirs}: texts may differ", REPLACE, WARNING)
SAME_NAMES = ("AVX", "AVX2", "F16C", "FMA", "BMI2", "AVX_VNNI", "AVX512_VNNI", "AVX512_BF16", "AMX_INT8")
FLAGS = {name: name.lower() for name in SAME_NAMES} | {"AVX512": "avx512f", "AVX512_VBMI": "avx512vbmi"}
"""llama.cpp's name of a feature -> the system's."""


@check("the same llama.cpp, compiled for this processor", ILLEGAL, CRASHES, OTHER_BUILD, needs="build")
def build(report: HostReport, cluster: Cluster) -> Result:
    facts, first, failure = report.facts, cluster.first, report.facts_failure
    uses = re.findall(r"(\w+) = 1", facts.get("features", ""))
    missing = [each for each in uses if each in FLAGS and FLAGS[each] not in report.base["flags"]]
    if missing and report.base["flags"]:
        return ILLEGAL.on(report, why=f"it uses {', '.join(missing)}, which this one lacks")
    if failure and failure.code == SIGILL:
        return ILLEGAL.on(report, why="Illegal instruction")
    if failure and failure.code is not None and "host" not in facts:
        return CRASHES.on(report, why=_last_line(failure.errors) or f"it ended with {failure.code}")
    if facts["build"] != (theirs := first.facts.get("build", facts["build"])):
        return OTHER_BUILD.on(report, ours=facts["build"], theirs=theirs, first=first.name)
    return f"{facts['build']}, {' '.join(uses)}"


BAD_AMX = Fault("its AMX kernels crash or multiply wrongly and are not used", "compile with GCC 13 or later", WARNING)
OTHER_KERNELS = Fault(
    "its repacked kernels ({ours}) are others than those of {first} ({theirs}): exact numerics do not use them",
    "leave {host} out, or take --numerics fast, if speed matters more",
    WARNING,
)


@check("AMX and repacked kernels work, alike on all hosts", BAD_AMX, OTHER_KERNELS, needs="host")
def kernels(report: HostReport, cluster: Cluster) -> Result:
    """What `run` compares before it repacks."""
    ours, theirs = report.facts["host"], cluster.first.facts.get("host", report.facts["host"])
    if not report.facts.get("amx_works", True):
        return BAD_AMX.on(report)
    if any(ours[each] != theirs[each] for each in ("repacked", "grouped")):
        counts = {name: f"{len(each['repacked'])} types" for name, each in (("ours", ours), ("theirs", theirs))}
        return OTHER_KERNELS.on(report, **counts, first=cluster.first.name)
    return f"{len(ours['repacked'])} types of weights are repacked"


BAD_DEVICE = Fault("a device cannot be used: {error}", "{at}pipeinfer info")


@check("processor, cores, memory, GPUs", BAD_DEVICE, needs="gpus")
def machine(report: HostReport, cluster: Cluster) -> Result:
    if error := report.facts.get("host_error"):
        return BAD_DEVICE.on(report, error=error)
    if "host" not in report.facts:
        return None
    host, gpus = report.facts["host"], report.facts["gpus"]
    memory = f"{size_text(host['memory']['host'])} of memory free"
    return ", ".join([host["processor"], f"{host['n_cores']} cores", memory, *gpus])


LITTLE_DISK = Fault(
    "{free} free on the disk for slices, which may need {needed}", "give --slice-cache another folder", WARNING
)


@check("room for slices", LITTLE_DISK, needs="base")
def disk(report: HostReport, cluster: Cluster) -> Result:
    sizes = [model["n_bytes"] or 0 for model in cluster.first.facts.get("models", {}).values()]
    needed, free = sum(sizes) // len(cluster.reports), report.base["disk_bytes"]
    if free < needed and cluster.options.models.slice_cache:
        return LITTLE_DISK.on(report, free=size_text(free), needed=size_text(needed))
    return f"{size_text(free)} free"


NO_SHM = Fault("/dev/shm cannot be written: {error}", "{at}sudo mount -o remount,rw,size=50% /dev/shm")
LITTLE_SHM = Fault(
    "/dev/shm has {free} free, and MPI needs about {needed}: ranks may die of a bus error",
    "{at}sudo mount -o remount,size=1G /dev/shm (a container: --shm-size)",
    WARNING,
)


@check("/dev/shm can be written and has room for MPI", NO_SHM, LITTLE_SHM, needs="base")
def shared_memory(report: HostReport, cluster: Cluster) -> Result:
    shm, needed = report.base["shm"], RANK_BYTES * cluster.hosts.slots(report.name)
    if not shm:
        return None
    if shm["error"]:
        return NO_SHM.on(report, error=shm["error"])
    if shm["bytes"] < needed:
        return LITTLE_SHM.on(report, free=size_text(shm["bytes"]), needed=size_text(needed))
    return f"{size_text(shm['bytes'])} free"


LOW_LIMIT = Fault(
    "ulimit: {name} is {value}, and {needed} may be needed",
    "echo '* - {item} {most}' | {at}sudo tee -a /etc/security/limits.d/pipeinfer.conf",
    WARNING,
)


@check("ulimit", LOW_LIMIT, needs="base")
def limits(report: HostReport, cluster: Cluster) -> Result:
    values: Mapping[str, int] = report.base["limits"]
    if 0 <= values[OPEN_FILES] < LEAST_FILES:
        value, most = str(values[OPEN_FILES]), 65536  # without a limit, an older PAM lets nobody in
        return LOW_LIMIT.on(report, name=OPEN_FILES, value=value, needed=LEAST_FILES, item="nofile", most=most)
    for name, item in ((ADDRESS_SPACE, "as"), (FILE_SIZE, "fsize")):  # shared memory is files too
        if values[name] >= 0:
            value = size_text(values[name])
            return LOW_LIMIT.on(report, name=name, value=value, needed="the whole model", item=item, most=NO_LIMIT)
    if report.base["has_fabric"] and 0 <= values[LOCKED_MEMORY] < LEAST_LOCKED_BYTES:
        value = size_text(values[LOCKED_MEMORY])
        return LOW_LIMIT.on(report, name=LOCKED_MEMORY, value=value, needed="more", item="memlock", most=NO_LIMIT)
    return ", ".join(f"{name} {'no limit' if value < 0 else value}" for name, value in values.items())


OTHER_TIME = Fault("its clock is {seconds:.1f} s {way} this machine's", "{at}sudo timedatectl set-ntp true", WARNING)


@check("the clock is as here", OTHER_TIME, needs="base")
def clock(report: HostReport, cluster: Cluster) -> Result:
    if abs(report.clock_s) > MOST_CLOCK_S:
        way = "ahead of" if report.clock_s > 0 else "behind"
        return OTHER_TIME.on(report, seconds=abs(report.clock_s), way=way)
    return "as here"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _versions(packages: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())


def _last_line(errors: str) -> str:
    return (errors.strip().splitlines() or [""])[-1].strip()


HOST_CHECKS = (name, ssh, python, program, packages, build, kernels, machine, disk, shared_memory, limits, clock)


def check_this_host(n_ranks: int) -> list[Finding]:
    """What is wrong with its shared memory and limits for so many ranks. Made before MPI starts here."""
    name = socket.gethostname()
    report = HostReport(name, True, base=agent.machine())
    cluster = Cluster(HostList([host_named(name)] * n_ranks, "mpich"), NO_JOB, {name: report})
    return problems((shared_memory, limits), report, cluster)
