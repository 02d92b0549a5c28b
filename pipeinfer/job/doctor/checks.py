"""Checks between hosts and of models; all checks, in the order in which they are made and reported."""

import errno
import os
import re
import shlex
from collections import Counter
from statistics import median

from pipeinfer.job.doctor.connections import OPEN, REFUSED, SILENT, SLOWER_BRIEFLY, Way
from pipeinfer.job.doctor.findings import Cluster, Fault, HostReport, Result, Severity, check, errors
from pipeinfer.job.doctor.host_checks import HOST_CHECKS, mpi
from pipeinfer.job.doctor.host_list import full_words
from pipeinfer.text import size_text

VIRTUAL = re.compile(r"docker|virbr|br-|veth|cni|flannel|cali|podman|lxc|lxd|tun|tap|wg|zt|tailscale")
"""Interfaces whose addresses other hosts have too, or cannot reach."""

SLOWER = 3.0  # a way is slow if its bandwidth, timed for a second, is less than the median divided by this
WARNING = Severity.WARNING


def real_addresses(report: HostReport) -> list[str]:
    """Of a host's interfaces, without virtual ones."""
    interfaces: dict[str, tuple[str, int]] = report.base.get("addresses", {})
    return [address for name, (address, _) in interfaces.items() if not VIRTUAL.match(name)]


OTHER_NETWORK = Fault(
    "it has {others} beside {used}: MPI may take them, and other hosts are not there",
    "name the network: mpirun -iface {used} and export UCX_NET_DEVICES={used} (MPICH), or --mca "
    "btl_tcp_if_include {used} (Open MPI)",
    WARNING,
)


FASTER_NETWORK = Fault(
    "connections to {other} take {used} ({rate}), and {faster} gives {faster_rate}",
    "name the hosts by their addresses of {faster} (that of {other} is {address}), and that network to MPI: mpirun "
    "-iface {faster} and export UCX_NET_DEVICES={faster} (MPICH), or --mca btl_tcp_if_include {faster} (Open MPI)",
    WARNING,
)


@check("the interface that is taken, and others that MPI may take", OTHER_NETWORK, FASTER_NETWORK, needs="base")
def network(report: HostReport, cluster: Cluster) -> Result:
    interfaces: dict[str, tuple[str, int]] = report.base["addresses"]
    used = sorted({way.interface for way in cluster.ways_from(report) if way.interface})
    others = [
        f"{name} ({address})" for name, (address, _) in interfaces.items() if name not in used and VIRTUAL.match(name)
    ]
    if used and others:
        return OTHER_NETWORK.on(report, others=", ".join(others), used=used[0])
    others_timed = [way for way in cluster.other_ways if way.start == report.name and way.bytes_per_s]
    if best := max(others_timed, key=_bandwidth, default=None):
        taken = next(way for way in cluster.ways_from(report) if way.to == best.to)
        if 0 < taken.bytes_per_s < best.bytes_per_s / SLOWER:
            rates = {"rate": _rate(taken.bytes_per_s), "faster_rate": _rate(best.bytes_per_s)}
            names = {"other": best.to, "used": taken.interface, "faster": best.interface, "address": best.resolved}
            return FASTER_NETWORK.on(report, **rates, **names)
    shown = [f"{name} ({interfaces[name][0]}{_speed(interfaces[name][1])})" for name in used or interfaces]
    shown += [f"{way.interface} would give {_rate(way.bytes_per_s)}" for way in others_timed]
    return ", ".join(shown) or "loopback alone"


FIREWALL = Fault(
    "{others} cannot be reached from it on TCP port {port} or any other ({how}), and ssh can: a firewall "
    "lets only some ports through",
    "open TCP {low}-{high} between the hosts; there: sudo ufw allow from {address}, or "
    "sudo firewall-cmd --zone=trusted --add-source={address}, or without both: sudo nft list ruleset",
)
WRONG_NAME = Fault(
    "there the name {other} means {address}, which is {host} itself",
    "correct the line of {other} in /etc/hosts on {host}",
)
SAME_HOST = Fault("it and {other} are one host", "name it once, with slots for all its ranks, as in {host}:2")
NO_NAME = Fault("there the name {other} has no address", "echo {address} {other} | {at}sudo tee -a /etc/hosts", WARNING)
LOST = Fault(
    "it takes no connections any more: {error}", "ssh {host} true; does the agent, a Python, stay alive there?"
)
NO_WAY = Fault("no connection gets from it to {other}: {error}", "{at}ping {other}: cable, switch, route")


@check(
    "every two hosts reach each other at any TCP port, both ways",
    LOST,
    FIREWALL,
    WRONG_NAME,
    SAME_HOST,
    NO_NAME,
    NO_WAY,
)
def ports(report: HostReport, cluster: Cluster) -> Result:
    """As the watch and the MPI library connect: at any free port."""
    ways = cluster.ways_from(report)
    if not ways:
        return None
    if not ways[0].port:
        return LOST.on(report, error=ways[0].state)
    reports = cluster.reports
    for way in ways:
        if way.resolved.startswith(("127.", "::1")):
            if report.is_here and reports[way.to].is_here:
                return SAME_HOST.on(report, other=way.to)
            return WRONG_NAME.on(report, other=way.to, address=way.resolved)
    if barred := [way for way in ways if way.state in (SILENT, REFUSED)]:
        low, high = [*reports[barred[0].to].base["ports"], "1024", "65535"][:2]
        return FIREWALL.on(
            report,
            others=", ".join(way.to for way in barred),
            low=low,
            high=high,
            port=barred[0].port,
            address=report.address or report.name,
            how="it answers nothing" if barred[0].state == SILENT else "it refuses",
        )
    for way in ways:
        if way.state != OPEN:
            return NO_WAY.on(report, other=way.to, error=way.state)
        if not way.resolved and cluster.hosts.launcher != "srun":
            return NO_NAME.on(report, other=way.to, address=reports[way.to].address)
    return f"{', '.join(way.to for way in ways)} can be reached at any port"


SLOW_LINK = Fault(
    "{rate} to {other}, and {usual} is usual here", "{at}ethtool {interface}: speed, duplex, errors", WARNING
)


@check("latency and bandwidth between every two hosts", SLOW_LINK)
def links(report: HostReport, cluster: Cluster) -> Result:
    ways = [way for way in cluster.ways_from(report) if way.bytes_per_s]
    if not ways:
        return None
    usual = median(way.bytes_per_s for way in cluster.ways if way.bytes_per_s)
    slowest, latest = min(ways, key=_bandwidth), max(ways, key=lambda way: way.latency_s)
    if slowest.bytes_per_s < usual / (SLOWER if cluster.is_timed else SLOWER_BRIEFLY):
        return SLOW_LINK.on(
            report,
            rate=_rate(slowest.bytes_per_s),
            usual=_rate(usual),
            other=slowest.to,
            interface=slowest.interface or "eth0",
        )
    return (
        f"{_rate(median(map(_bandwidth, ways)))} and {1e6 * median(way.latency_s for way in ways):.0f} us; the least "
        f"{_rate(slowest.bytes_per_s)} ({slowest.to}) and {1e6 * latest.latency_s:.0f} us ({latest.to})"
    )


NO_SERVER = Fault(
    "a server of rank {rank} cannot be used: {error}", "{at}pipeinfer info --rpc {server} must list its devices"
)


@check("RPC servers answer the ranks that have them, of this version, free", NO_SERVER)
def servers(report: HostReport, cluster: Cluster) -> Result:
    shown = []
    for rank in report.ranks:
        for server, each in report.facts_of(rank).get("servers", {}).items():
            if each["error"]:
                return NO_SERVER.on(report, rank=rank, server=server, error=each["error"])
            devices = ", ".join(f"{name} with {size_text(n_bytes)} free" for name, n_bytes in each["devices"])
            shown.append(f"rank {rank}: {server}, {devices}")
    return "; ".join(shown) or None


NO_START = Fault("no job starts on all hosts: {error}", "{command} hostname must print the name of every host")
NO_RING = Fault(
    "no message went round in time: the launcher hangs, or MPI takes another network than the checks of TCP",
    "{command} hostname; if that prints the name of every host: mpirun -iface {used} and export "
    "UCX_NET_DEVICES={used} (MPICH), or --mca btl_tcp_if_include {used} (Open MPI)",
)
OTHER_HOSTS = Fault(
    "the ranks ran on {names}, and not one on each host",
    "{command} hostname; hosts of one name need sudo hostnamectl set-hostname NAME; else see slots in --hosts",
)


@check("an MPI job brings a message round all hosts", NO_START, NO_RING, OTHER_HOSTS, of_all=True)
def ring(report: HostReport, cluster: Cluster) -> Result:
    result, names = cluster.ring, list(cluster.reports)
    if result is None or (not result.names and any(errors((mpi,), each, cluster) for each in cluster.reports.values())):
        return None
    used = next((way.interface for way in cluster.ways if way.interface), "eth0")
    command = " ".join(full_words(cluster.hosts.words(names, dict.fromkeys(names, 1))))
    if result.late:
        return NO_RING.on(report, used=used, command=command)
    if result.error:
        return NO_START.on(report, error=result.error, command=command)
    if len(set(result.names)) != len(names):
        return OTHER_HOSTS.on(report, names=", ".join(result.names), command=command)
    return (
        f"a message went round {len(result.names)} ranks of {cluster.hosts.launcher} in {1e3 * result.seconds:.0f} ms"
    )


LACKS_MODEL = Fault(
    "{path} is not there: this host gets its layers from rank 0 at each start", "{copy_file}; or --slice-cache", WARNING
)
NO_MODEL = Fault("{path} is not there, and rank 0 has to read it", "copy the model to {host}, or give -m another path")
BAD_MODEL = Fault("{path} cannot be used: {error}", "{copy_file}")
OTHER_MODEL = Fault(
    "{path} is another file than that of {first} ({why})", "which is the right one? If {first}'s: {copy_file}"
)


MODEL_FAULTS = (NO_MODEL, LACKS_MODEL, BAD_MODEL, OTHER_MODEL)


@check("the models are there: size, and samples of every tensor", *MODEL_FAULTS, needs="models")
def models(report: HostReport, cluster: Cluster) -> Result:
    first = next(iter(cluster.reports.values()))
    theirs = cluster.first.facts.get("models", {})
    for path, model in report.facts["models"].items():
        source = theirs.get(path, {"n_bytes": None})
        is_good = source["n_bytes"] is not None and not source["error"]
        fields = {"path": path, "first": cluster.first.name, "copy_file": _copy(report, cluster.first, path, is_good)}
        if model["n_bytes"] is None:
            is_needed = report is first or not cluster.options.models.send_layers
            return (NO_MODEL if is_needed else LACKS_MODEL).on(report, **fields)
        if model["error"]:
            return BAD_MODEL.on(report, error=model["error"], **fields)
        other = theirs.get(path, model)
        if other["n_bytes"] is not None and model["n_bytes"] != other["n_bytes"]:
            why = f"{model['n_bytes']} bytes, not {other['n_bytes']}"
            return OTHER_MODEL.on(report, why=why, **fields)
        if other["fingerprint"] and model["fingerprint"] != other["fingerprint"]:
            return OTHER_MODEL.on(report, why="samples of its tensors differ", **fields)
    return ", ".join(f"{path} ({size_text(each['n_bytes'])})" for path, each in report.facts["models"].items())


DAMAGED_HERE = Fault("{path} is damaged: its SHA-256 is {ours}…, and {n} hosts have {theirs}…", "{copy_file}")
DAMAGED = Fault(
    "{path} is damaged here or on {first}: as a whole they differ (SHA-256 {ours}… and {theirs}…), and their "
    "samples do not",
    "compare both with the hash that the model's source shows; then copy the right file over the other one",
)
UNREADABLE = Fault("{path} cannot be read as a whole: {error}", "{copy_file}")
NO_HASH = Fault("no hash of {path} came from there: {error}", "{at}pipeinfer models verify {path}")


@check("with --verify, whole files are the same", DAMAGED_HERE, DAMAGED, UNREADABLE, NO_HASH)
def hashes(report: HostReport, cluster: Cluster) -> Result:
    for path in cluster.hashed if report.base else ():
        if path not in report.hashes:
            lines = str(report.hashes_failure or "").strip().splitlines() or ["no answer"]
            return NO_HASH.on(report, path=path, error=lines[-1])
    present = {path: each for path, each in report.hashes.items() if each["error"] != os.strerror(errno.ENOENT)}
    for path, entry in present.items():
        source, n_alike, is_most = _most_alike(path, cluster)
        other = source.hashes.get(path, entry)
        fields = {"path": path, "first": source.name, "copy_file": _copy(report, source, path, not other["error"])}
        if entry["error"]:
            return UNREADABLE.on(report, error=entry["error"], **fields)
        if other["sha256"] not in ("", entry["sha256"]):
            digests = {"ours": entry["sha256"][:12], "theirs": other["sha256"][:12]}
            return (DAMAGED_HERE if is_most else DAMAGED).on(report, n=n_alike, **digests, **fields)
    return ", ".join(f"{path} {entry['sha256'][:12]}…" for path, entry in present.items()) or None


def _most_alike(path: str, cluster: Cluster) -> tuple[HostReport, int, bool]:
    """(the host to compare with, the first one unless more than half agree; how many agree; whether that is so)."""
    read = [report for report in cluster.reports.values() if report.hashes.get(path, {}).get("sha256")]
    counts = Counter(report.hashes[path]["sha256"] for report in read)
    digest, n_alike = next(iter(counts.most_common(1)), ("", 0))
    if 2 * n_alike <= len(read):
        return cluster.first, n_alike, False
    return next(report for report in read if report.hashes[path]["sha256"] == digest), n_alike, True


def _copy(report: HostReport, source: HostReport, path: str, is_good: bool) -> str:
    """The fix that brings a file to a host. `is_good`: that of `source` is, as far as is known."""
    if report is source or not is_good:
        return f"get {shlex.quote(path)} again from its source"
    words = [path if host.is_here else f"{host.name}:{path}" for host in (source, report)]
    return f"if the folder is not shared: {shlex.join(['scp', *words])}"


def _bandwidth(way: Way) -> float:
    return way.bytes_per_s


def _rate(bytes_per_s: float) -> str:
    return f"{8e-9 * bytes_per_s:.3g} Gbit/s"


def _speed(mbit: int) -> str:
    return f", {mbit / 1000:g} Gbit/s" if mbit else ""


NETWORK_CHECKS, LAST_CHECKS = (network, ports, links, servers), (mpi, ring, models, hashes)
CHECKS = (*HOST_CHECKS, *NETWORK_CHECKS, *LAST_CHECKS)
