"""`pipeinfer doctor`: look at all hosts at once, tell what is wrong, and plan the first job. Starts no MPI here."""

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from pipeinfer.cluster.hosts.host import UNLIMITED, FreeMemory
from pipeinfer.core.settings import setting
from pipeinfer.errors import UserError
from pipeinfer.job.doctor.checks import LAST_CHECKS, NETWORK_CHECKS, VIRTUAL, real_addresses
from pipeinfer.job.doctor.connections import (
    BRIEF_S,
    FULL_S,
    connect_all,
    measure_again,
    measure_all,
    measure_others,
    run_ring,
)
from pipeinfer.job.doctor.findings import Check, Cluster, Finding, Severity
from pipeinfer.job.doctor.host_checks import HOST_CHECKS
from pipeinfer.job.doctor.host_list import LAUNCHERS, full_words, program_words, read_host_list
from pipeinfer.job.doctor.host_session import one_connection
from pipeinfer.job.doctor.inquiry import facts_command, host_sessions, read_hashes, read_libraries
from pipeinfer.job.inspect.host_facts import host_of
from pipeinfer.job.inspect.plan import plan_lines, plan_report
from pipeinfer.job.options.options import JobModels, RunOptions
from pipeinfer.job.options.values import TextType
from pipeinfer.job.placement.checks import fetch_models
from pipeinfer.job.placement.devices import check_servers, rank_options
from pipeinfer.job.planning.planner import ETHERNET
from pipeinfer.models.gguf.model_info import part_paths
from pipeinfer.models.hub import name_of
from pipeinfer.text import count_text, json_text, printed
from pipeinfer.virtual.costs import LinkCost
from pipeinfer.virtual.nodes import Node

LEVELS = {Severity.OK: "ok", Severity.WARNING: "warning", Severity.ERROR: "ERROR"}
SLICES = Path("~/.cache")


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """What is looked at, besides the options of `run`.

    hosts: A hosts file, as `plan` takes it, or names: node1,node2:2. [default: the nodes of a Slurm allocation, else
        this machine]
    launcher: What starts ranks. [default: srun in Slurm, else what mpirun is]
    verify: Compare whole models by SHA-256; hashes are kept for the next time.
    bandwidth: Time the links for a second each way between every two hosts.
    """

    heading = "Hosts"
    hosts: str | None = setting(None, "--hosts", type=TextType(), first=True)
    launcher: str | None = setting(None, "--launcher", choices=LAUNCHERS)
    verify: bool = setting(False, "--verify")
    bandwidth: bool = setting(False, "--bandwidth")


def doctor(options: RunOptions, request: DoctorRequest, words: Sequence[str]) -> int:
    """`words`: the options as they were given, for the command. Returns the exit code: 0, 1 with warnings, 2 with
    errors. Raises UserError for bad input."""
    hosts = read_host_list(request.hosts, request.launcher)
    models = replace(_with_files(options.models), hf_token=None)  # options are words of commands from here on
    options, names = replace(options, models=models), [node.host.name for node in hosts.nodes]
    if any(options.placement.rpc):
        check_servers([each.servers for each in rank_options(options.placement, len(names))], names)
    report = _Report(options.output.json, words)
    disk = options.models.slice_cache or SLICES
    facts = facts_command(options, names)
    with one_connection(hosts.launcher) as environ, host_sessions(hosts, disk, facts, environ) as reports:
        cluster = Cluster(hosts, options, reports, request.bandwidth)
        sessions = {name: each.session for name, each in reports.items() if each.session}
        addresses = {name: each.address for name, each in reports.items()}
        cluster.ways = connect_all(sessions, addresses)
        seconds = FULL_S if request.bandwidth else BRIEF_S
        measure_all(sessions, cluster.ways, seconds)
        if not request.bandwidth:
            measure_again(sessions, cluster.ways, addresses)
        interfaces = {name: real_addresses(each) for name, each in reports.items()}
        cluster.other_ways = measure_others(sessions, cluster.ways, interfaces, seconds)
        report.add(cluster, *HOST_CHECKS, *NETWORK_CHECKS)
        if report.level < Severity.ERROR:
            cluster.ring = run_ring(hosts, hosts.names, environ)
            for each, library in zip(reports.values(), cluster.ring.libraries, strict=False):
                each.facts["mpi"] = {"library": library, "error": None}
        if not (cluster.ring and cluster.ring.names):
            read_libraries(reports.values())
        if request.verify:
            paths = [part for path in options.models.files for part in part_paths(path)]
            read_hashes(reports.values(), paths)
            cluster.hashed = [os.path.abspath(path) for path in paths]
        report.add(cluster, *LAST_CHECKS)
    return report.end(cluster)


def _with_files(models: JobModels) -> JobModels:
    """With files in place of names; a file that is missing is left to the checks."""
    try:
        return fetch_models(models)
    except UserError:
        if name_of(models.target) or os.path.exists(models.target):
            raise
        return models


class _Report:
    """Findings, printed as they come; with `as_json` all at the end. `words`: the options of the command to paste."""

    def __init__(self, as_json: bool, words: Sequence[str]) -> None:
        self._as_json, self._words = as_json, words
        self.findings: list[Finding] = []

    @property
    def level(self) -> Severity:
        return max((finding.level for finding in self.findings), default=Severity.OK)

    def add(self, cluster: Cluster, *checks: Check) -> None:
        """Those of each host together; then those of all."""
        for report in cluster.reports.values():
            self._tell(check.finding(report, cluster) for check in checks if not check.of_all)
        self._tell(check.finding(cluster.first, cluster) for check in checks if check.of_all)

    def _tell(self, findings: Iterator[Finding | None]) -> None:
        for finding in filter(None, findings):
            self.findings.append(finding)
            self._print(_line(finding))

    def _print(self, text: str) -> None:
        if not self._as_json:
            print(text, flush=True)

    def end(self, cluster: Cluster) -> int:
        """The plan and the command, or how much is wrong. Returns the exit code."""
        plan, command = None, ""
        if self.level < Severity.ERROR:
            try:
                nodes = [_node(rank, node, cluster) for rank, node in enumerate(cluster.hosts.nodes)]
                plan = plan_report(cluster.options, nodes, _link(cluster))  # as `plan --hosts` tells it
                self._print("\n" + printed(plan_lines(plan)))
                if not plan["fits"]:
                    raise UserError(plan["shortage"])
                command = _command(cluster, self._words)
            except UserError as error:
                self._tell(iter([Finding("plan", "", Severity.ERROR, str(error))]))
        if self._as_json:
            result: dict[str, Any] = {"level": self.level.name.lower(), "plan": plan, "command": command}
            result["findings"] = [asdict(each) | {"level": each.level.name.lower()} for each in self.findings]
            result["hosts"] = {name: report.base | report.facts for name, report in cluster.reports.items()}
            result["links"] = [asdict(way) for way in cluster.ways]
            result["other_links"] = [asdict(way) for way in cluster.other_ways]
            print(json_text(result), flush=True)
        problems = [finding for finding in self.findings if finding.level > Severity.OK]
        n_errors = sum(finding.level == Severity.ERROR for finding in problems)
        summary = f"{count_text(n_errors, 'error')}, {count_text(len(problems) - n_errors, 'warning')}"
        self._print("\n" + "\n".join([*map(_line, problems), summary]))
        if self.level < Severity.ERROR:
            self._print(f"\n{command}")
        return int(self.level)


def _line(finding: Finding) -> str:
    return f"{LEVELS[finding.level]:<8}{finding.host or 'all':<12} {finding}"


def _node(rank: int, node: Node, cluster: Cluster) -> Node:
    """A rank's node by the facts of its host, with the limit of memory and the speed of the hosts file."""
    facts = cluster.reports[node.host.name].facts_of(rank)
    if "host" not in facts:
        raise UserError(f"{node.host.name}: the program there does not say what its host is; try pipeinfer info there")
    host = host_of(facts["host"], node.host.name)
    if node.host.memory.host < UNLIMITED:
        host = replace(host, memory=FreeMemory(min(host.memory.host, node.host.memory.host), host.memory.process))
    return replace(node, host=host, gpu=node.gpu or ", ".join(facts["gpus"]))


def _link(cluster: Cluster) -> LinkCost:
    """The link of the median pair of hosts; ETHERNET if none was timed."""
    ways = [way for way in cluster.ways if way.bytes_per_s]
    if not ways:
        return ETHERNET
    return LinkCost(median(way.latency_s for way in ways), median(way.bytes_per_s for way in ways))


def _command(cluster: Cluster, options: Sequence[str]) -> str:
    hosts = cluster.hosts
    interfaces = {way.interface for way in cluster.ways if way.interface}
    has_others = any(VIRTUAL.match(name) for each in cluster.reports.values() for name in each.base["addresses"])
    interface = min(interfaces) if has_others and len(interfaces) == 1 else ""
    words = hosts.words(hosts.names, {name: hosts.slots(name) for name in hosts.names}, interface)
    return f"{shlex.join(full_words(words))} {program_words()} {shlex.join(['run', *options])} -p 'Once upon a time'"
