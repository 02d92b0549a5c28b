"""What `pipeinfer doctor` says of hosts that are described here, and the parts of it that need no other host."""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import re
import socket
import string
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeinfer.cli.models import models
from pipeinfer.cluster.hosts.roster import version_text
from pipeinfer.errors import UserError
from pipeinfer.job.doctor import agent, checks, connections, hashes, host_checks, inquiry
from pipeinfer.job.doctor.agent import ADDRESS_SPACE, FILE_SIZE, LOCKED_MEMORY, OPEN_FILES
from pipeinfer.job.doctor.checks import CHECKS
from pipeinfer.job.doctor.connections import Ring, Way, connect_all, measure_again, measure_all, rounds, run_ring
from pipeinfer.job.doctor.findings import Cluster, Fault, Finding, HostReport, Severity
from pipeinfer.job.doctor.host_checks import check_this_host
from pipeinfer.job.doctor.host_list import HostList, read_host_list
from pipeinfer.job.doctor.host_session import HostSession, NoAnswer, remote_words
from pipeinfer.models.demo import TARGET
from tests.support.jobs import COMMAND, ROOT, environment, until
from tests.support.planned import options_of

LIMITS = {OPEN_FILES: 4096, LOCKED_MEMORY: -1, ADDRESS_SPACE: -1, FILE_SIZE: -1}
BASE = {
    "host": "node",
    "user": "me",
    "interpreter": sys.version.split()[0],
    "program": "",
    "disk_bytes": 10**12,
    "addresses": {"eth0": ["10.0.0.1", 10_000]},
    "shm": {"bytes": 10**9, "error": ""},
    "has_fabric": False,
    "limits": LIMITS,
    "flags": ["avx2"],
    "ports": ["32768", "60999"],
}
HOST = {"processor": "P", "n_cores": 4, "memory": {"host": 10**9}, "repacked": [[2, 32, "a"]], "grouped": []}
MODEL = {"n_bytes": 100, "fingerprint": "f", "error": ""}
FACTS = {
    "version": version_text(),
    "place": ["node", "x"],
    "packages": {"numpy": "2"},
    "build": "b",
    "features": "AVX2 = 1 | ",
    "mpi": {"library": "MPICH Version: 4.3.2", "error": None},
    "amx_works": True,
    "gpus": [],
    "servers": {},
    "host": HOST,
    "models": {"/m.gguf": MODEL},
}


@pytest.fixture(autouse=True)
def no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names such as node1 are nowhere: a name server that keeps silent is waited for, seconds each time."""
    known, real = {"localhost", "127.0.0.1", socket.gethostname()}, socket.getaddrinfo

    def resolve(host: Any, *others: Any, **options: Any) -> Any:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *others, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def cluster(launcher: str = "mpich", **changes: Any) -> Cluster:
    """Of node1 and node2, with changes of the second: of its report, its system or its facts."""
    reports = {}
    for name, changed in (("node1", {}), ("node2", changes)):
        base = BASE | {key: value for key, value in changed.items() if key in BASE}
        facts = {key: value for key, value in (FACTS | changed).items() if key in FACTS and value is not None}
        report = HostReport(name, False, "10.0.0.2", base=base, facts=facts)
        for key in changed.keys() - BASE.keys() - FACTS.keys():
            setattr(report, key, changed[key])
        reports[name] = report
    nodes = read_host_list("node1,node2", launcher if launcher != "srun" else None).nodes
    return Cluster(HostList(nodes, launcher), options_of(Path("/m.gguf")), reports)


def findings(made: Cluster, host: str = "node2") -> list[Finding]:
    """What is wrong."""
    report = made.reports[host]
    results = [check.finding(report, made) for check in CHECKS]
    return [finding for finding in results if finding and finding.level > Severity.OK]


def test_nothing_is_wrong_of_hosts_that_are_alike() -> None:
    assert findings(cluster()) == []


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"program": "/x/python is not there"}, "python", "is not there"),
    ({"interpreter": "3.6.8"}, "python", "Python 3.6.8"),
    ({"version": "2 (bb)"}, "program", "rank 1 (host node) runs pipeinfer 2 (bb)"),
    ({"version": None, "facts_failure": NoAnswer(1, "No module named 'pipeinfer'")}, "program", "No module named"),
    ({"version": None, "facts_failure": NoAnswer(1, "No module named 'pipeinfer.x'")}, "program", "another one"),
    ({"version": None, "facts_failure": NoAnswer(None, "")}, "program", "has not answered within"),
    ({"version": None}, "program", "it says less than it should"),
    ({"models": None}, "program", "ends early"),
    ({"models": None, "facts_failure": NoAnswer(-9, "")}, "program", "exit code -9"),
    ({"packages": {"numpy": "1"}}, "packages", "numpy 1"),
    ({"has_address": False}, "name", "ssh alone knows this name"),
    ({"mpi": {"library": None, "error": "libmpi.so is missing"}}, "mpi", "libmpi.so is missing"),
    ({"mpi": {"library": "MPICH Version: 5.0.0", "error": None}}, "mpi", "5.0.0"),
    ({"build": "c"}, "build", "c, and node1 has b"),
    ({"features": "AVX2 = 1 | AVX512 = 1 | "}, "build", "it uses AVX512"),
    ({"host": None, "facts_failure": NoAnswer(-4, "")}, "build", "Illegal instruction"),
    ({"host": None, "facts_failure": NoAnswer(1, "libllama.so")}, "build", "libllama.so"),
    ({"amx_works": False}, "kernels", "AMX"),
    ({"host": HOST | {"repacked": [[2, 32, "b"]]}}, "kernels", "repacked"),
    ({"shm": {"bytes": 0, "error": "Read-only file system"}}, "shared memory", "Read-only"),
    ({"shm": {"bytes": 1000, "error": ""}}, "shared memory", "bus error"),
    ({"limits": LIMITS | {OPEN_FILES: 256}}, "limits", "256"),
    ({"limits": LIMITS | {ADDRESS_SPACE: 10**9}}, "limits", "1.0 GB"),
    ({"limits": LIMITS | {FILE_SIZE: 10**8}}, "limits", "file size (-f) is 100.0 MB"),
    ({"limits": LIMITS | {LOCKED_MEMORY: 65536}, "has_fabric": True}, "limits", "memlock"),
    ({"clock_s": -30.0}, "clock", "30.0 s behind"),
    ({"servers": {"a:1": {"error": "a:1 is busy", "devices": []}}}, "servers", "rank 0 cannot be used: a:1 is busy"),
    ({"models": {"/m.gguf": MODEL | {"n_bytes": None}}}, "models", "layers from rank 0"),
    ({"models": {"/m.gguf": MODEL | {"n_bytes": 90}}}, "models", "90 bytes, not 100"),
    ({"models": {"/m.gguf": MODEL | {"fingerprint": "g"}}}, "models", "samples"),
    ({"models": {"/m.gguf": MODEL | {"error": "no GGUF"}}}, "models", "no GGUF"),
]


@pytest.mark.parametrize(("changes", "check", "text"), WRONG)
def test_what_is_wrong_is_one_line_with_the_way_out(changes: dict[str, Any], check: str, text: str) -> None:
    (finding,) = findings(cluster(**changes))
    assert (finding.check, finding.host) == (check, "node2") and finding.fix
    assert text in f"{finding.text} {finding.fix}"
    assert "{" not in finding.text + finding.fix


SSH_ERRORS = [
    (255, "Host key verification failed.", "compare the fingerprint"),
    (
        255,
        "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
        "ask who installed it anew; then ssh-keygen -R node2",
    ),
    (255, "me@node2: Permission denied (publickey).", "ssh-copy-id node2"),
    (255, "ssh: connect to host node2 port 22: Connection refused", "openssh-server"),
    (255, "ssh: connect to host node2 port 22: Connection timed out", "ping node2"),
    (255, "ssh: connect to host node2 port 22: No route to host", "ping node2"),
    (127, "ssh: No such file or directory", "openssh-client"),
    (None, "", "a login script or a disk stands still"),
    (1, "This account is not available.", "must end without a word"),
]


@pytest.mark.parametrize(("code", "errors", "fix"), SSH_ERRORS)
def test_an_error_of_ssh_is_named(code: int | None, errors: str, fix: str) -> None:
    made = cluster(failure=NoAnswer(code, errors))
    made.reports["node2"].base, made.reports["node2"].facts = {}, {}
    (finding,) = findings(made)
    assert finding.check == "ssh" and finding.level is Severity.ERROR and fix in finding.fix


def test_a_node_that_starts_nothing_is_slurms() -> None:
    for failure, text in ((NoAnswer(None, ""), "no answer within 0 s"), (NoAnswer(1, "srun: error: down"), "down")):
        made = cluster("srun", failure=failure)
        made.reports["node2"].base, made.reports["node2"].facts = {}, {}
        (finding,) = findings(made)
        assert "srun starts no program there: " in finding.text and finding.text.endswith(text)
        assert finding.fix.startswith("scontrol show node node2")


def test_a_name_that_ssh_does_not_know_either_has_no_address() -> None:
    errors = "ssh: Could not resolve hostname node2: Name or service not known"
    made = cluster(failure=NoAnswer(255, errors), has_address=False)
    made.reports["node2"].base, made.reports["node2"].facts = {}, {}
    (finding,) = findings(made)
    assert finding.check == "name" and finding.level is Severity.ERROR


def test_a_host_without_hashes_is_a_fault() -> None:
    for failure in (NoAnswer(1, "Input/output error"), None):
        made = cluster(hashes_failure=failure)
        made.hashed = ["/m.gguf"]
        made.reports["node1"].hashes = {"/m.gguf": {"sha256": "a", "n_bytes": 100, "error": ""}}
        (finding,) = findings(made)
        assert finding.check == "hashes" and ("Input/output error" if failure else "no answer") in finding.text
        assert findings(made, "node1") == []


def test_of_three_files_the_one_that_differs_is_damaged() -> None:
    made = cluster()
    made.reports = {**made.reports, "node3": replace(made.reports["node2"], name="node3")}
    for changed in made.reports:
        for name, report in made.reports.items():
            report.hashes = {"/m.gguf": {"sha256": "b" if name == changed else "a", "n_bytes": 100, "error": ""}}
        assert [name for name in made.reports if findings(made, name)] == [changed]
        (finding,) = findings(made, changed)
        source = "node2" if changed == "node1" else "node1"
        assert "its SHA-256 is b…, and 2 hosts have a…" in finding.text
        assert finding.fix.endswith(f"scp {source}:/m.gguf {changed}:/m.gguf")


def test_a_file_is_not_copied_onto_itself() -> None:
    bad = {"/m.gguf": {"n_bytes": 100, "fingerprint": "", "error": "no GGUF"}}
    made = cluster(models=bad)
    assert findings(made)[0].fix == "if the folder is not shared: scp node1:/m.gguf node2:/m.gguf"
    made.reports["node1"].is_here = True
    assert findings(made)[0].fix == "if the folder is not shared: scp /m.gguf node2:/m.gguf"
    made.reports["node1"].facts["models"] = bad
    assert [findings(made, host)[0].fix for host in made.reports] == ["get /m.gguf again from its source"] * 2


def test_words_of_another_host_neither_steer_a_terminal_nor_add_commands() -> None:
    made = cluster(program="\x1b[2J/x is\nnot there")
    assert findings(made)[0].text.endswith("[2J/x is not there")
    made = cluster()
    made.ways = [Way("node2", "node1", 1, "open", "")]
    made.reports["node1"].address = "$(reboot)"
    assert findings(made)[0].fix.startswith("echo '$(reboot)' node1 | ")


SEEN = {"127.0.1.1": "10.0.0.1", "fe80::1%eth0": "10.0.0.1", None: "10.0.0.1", "10.9.9.9": "10.9.9.9"}


@pytest.mark.parametrize(("address", "seen"), SEEN.items())
def test_other_hosts_get_an_address_that_is_one_there(
    address: str | None, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Session:
        def __init__(self, words: list[str]) -> None:
            assert words[0] == "ssh"

        def ask(self, *_: object, **__: object) -> dict[str, Any]:
            return BASE | {"time_s": time.time()}

        def close(self) -> None:
            pass

    def resolve(*_: object, **__: object) -> list[Any]:
        if address is None:
            raise socket.gaierror
        return [(0, 0, 0, "", (address, 0))]

    hosts = HostList(read_host_list("node1", "mpich").nodes, "mpich")
    monkeypatch.setattr(inquiry, "HostSession", Session)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with inquiry.host_sessions(hosts) as reports:
        report = reports["node1"]
    assert report.session and report.address == seen and report.has_address == (address is not None)


def test_every_fault_is_in_the_table_once_and_says_what_to_do() -> None:
    listed = [fault for check in CHECKS for fault in check.faults]
    made = [value for module in (host_checks, checks) for value in vars(module).values() if isinstance(value, Fault)]
    assert sorted(fault.text for fault in listed) == sorted({fault.text for fault in made})
    for fault in listed:
        assert fault.fix and all(name for _, name, _, _ in string.Formatter().parse(fault.text) if name is not None)
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_a_firewall_is_named_with_its_direction() -> None:
    made = cluster()
    made.ways = [Way("node1", "node2", 40000, "silent", "10.0.0.2"), Way("node2", "node1", 40001, "open", "10.0.0.1")]
    (finding,) = findings(made, "node1")
    assert finding.check == "ports" and "node2 cannot be reached from it on TCP port 40000" in finding.text
    assert "open TCP 32768-60999" in finding.fix and findings(made, "node2") == []
    made.ways[0].state = "refused"
    assert "it refuses" in findings(made, "node1")[0].text
    made.ways[0].resolved = "127.0.1.1"
    assert "which is node1 itself" in findings(made, "node1")[0].text
    for report in made.reports.values():
        report.is_here = True
    assert "it and node2 are one host -> name it once" in str(findings(made, "node1")[0])


def test_a_slow_way_counts_when_it_was_timed_for_long() -> None:
    made = cluster()
    made.ways = [
        Way("node1", "node2", 1, "open", "10.0.0.2", "eth0", 1e-4, 1e9),
        Way("node2", "node1", 1, "open", "10.0.0.1", "eth0", 1e-4, 1e8),
    ]
    assert findings(made) == []
    made.is_timed = True
    (finding,) = findings(made)
    assert finding.check == "links" and finding.level is Severity.WARNING and "0.8 Gbit/s to node1" in finding.text


def test_rings_that_fail() -> None:
    made = cluster()
    for result, text in (
        (Ring((), 0.0, "", True), "another network"),
        (Ring((), 0.0, "proxy died", False), "proxy died"),
        (Ring(["a", "a"], 0.0, "", False), "not one on each"),
    ):
        made.ring = result
        (finding,) = findings(made)
        assert finding.check == "ring" and finding.host == "" and text in finding.text


def test_a_ring_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SILENT_S", 0.5)
    monkeypatch.setattr(connections, "LIMIT_S", 3)
    for script in ("exec sleep 1000", "while echo x; do sleep 0.1; done", "exec sleep 1000 >&-"):
        monkeypatch.setattr(connections, "full_words", lambda words, script=script: ["sh", "-c", script])
        assert run_ring(read_host_list("localhost", "mpich"), ["localhost"]).late


@pytest.mark.parametrize("n", [2, 3, 8, 9])
def test_rounds_have_every_pair_once_and_no_host_twice(n: int) -> None:
    hosts = [f"node{index}" for index in range(n)]
    made = rounds(hosts)
    assert sorted(sorted(pair) for pairs in made for pair in pairs) == sorted(
        [a, b] for a in hosts for b in hosts if a < b
    )
    assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in made)


def test_hosts_are_a_file_or_names(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# a comment\nnode1:2\nnode2 slots=1 memory=64G\n")
    for text in (str(tmp_path / "hosts"), "node1:2,node2"):
        made = read_host_list(text, "mpich")
        assert made.names == ("node1", "node2") and [made.slots(name) for name in made.names] == [2, 1]
    ranks = {"node1": 2, "node2": 1}
    assert made.words(made.names, ranks) == ["mpirun", "-hosts", "node1:2,node2:1", "-np", "3"]
    other = replace(made, launcher="openmpi").words(made.names, ranks, "eth1")
    of_network = "--mca btl_tcp_if_include eth1"
    assert other == f"mpirun --host node1:2,node2:1 --bind-to none {of_network} -np 3".split()
    slurm = replace(made, launcher="srun").words(made.names, ranks)
    assert slurm == ["srun", "-X", "--mpi=pmi2", "-N", "2", "-n", "3", "-w", "node1,node2"]
    for wrong in ("node1,", "node1;reboot", "node1:0", "-oProxyCommand=x"):
        with pytest.raises(UserError, match="neither a file nor a host"):
            read_host_list(wrong, "mpich")
    with pytest.raises(UserError, match="allocation"):
        read_host_list("node1", "srun", {})


def test_ssh_is_that_of_the_launcher() -> None:
    assert remote_words("mpich", "node2", False, {})[:3] == ["ssh", "-x", "-v"]
    assert remote_words("openmpi", "n", False, {"OMPI_MCA_plm_rsh_agent": "/opt/rsh -q"})[:4] == [
        "/opt/rsh",
        "-q",
        "-x",
        "n",
    ]
    assert remote_words("openmpi", "n", False, {"OMPI_MCA_plm_rsh_agent": "ssh : rsh"})[:3] == ["ssh", "-x", "-v"]
    assert remote_words("srun", "node2", False, {})[0] == "srun"


def test_the_agent_runs_on_old_pythons() -> None:
    tree = ast.parse(Path(agent.__file__).read_text(), feature_version=(3, 6))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported <= sys.stdlib_module_names and not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))


def test_two_agents_reach_each_other_and_are_timed() -> None:
    sessions = {name: HostSession(remote_words("mpich", name, True)) for name in ("localhost", "127.0.0.1")}
    try:
        ways = connect_all(sessions, dict.fromkeys(sessions, "127.0.0.1"))
        ends = [("localhost", "127.0.0.1"), ("127.0.0.1", "localhost")]
        assert [(way.start, way.to, way.state) for way in ways] == [(*pair, "open") for pair in ends]
        measure_all(sessions, ways, 0.5)
        assert all(0 < way.latency_s < 30 and way.bytes_per_s > 0 for way in ways)
        ways[0].bytes_per_s = slow = ways[1].bytes_per_s / 1e6  # it looked slow
        measure_again(sessions, ways, dict.fromkeys(sessions, "127.0.0.1"))
        assert ways[0].bytes_per_s > slow
        base = sessions["localhost"].ask("base", 60, python="/no/python", folder="/", disk="/no/disk", environ={})
        assert base["program"] == "/no/python is not there" and base["disk_bytes"] > 0
        lines: list[str] = []
        answer = sessions["localhost"].ask(
            "run", 60, lines.append, words=["sh", "-c", "echo a; echo b >&2; exit 3"], silent_s=60, limit_s=60
        )
        assert lines == ["a"] and answer["code"] == 3 and answer["errors"] == "b\n"
        for words, limits in (
            (["sleep", "99"], (0.2, 99)),
            (["sh", "-c", "while echo; do sleep 0.1; done"], (60, 0.5)),
        ):
            silent_s, limit_s = limits
            answer = sessions["localhost"].ask("run", 60, words=words, silent_s=silent_s, limit_s=limit_s)
            assert answer["late"]
        assert sessions["localhost"].ask("run", words=["sleep", "0.5"], silent_s=60, limit_s=60)["code"] == 0
        with pytest.raises(NoAnswer) as error:
            sessions["localhost"].ask("run", 0.2, words=["sleep", "20"], silent_s=60, limit_s=60)
        assert error.value.code is None
    finally:
        for session in sessions.values():
            session.close()


def test_a_host_whose_session_is_lost_is_named_itself() -> None:
    sessions = {name: HostSession(remote_words("mpich", name, True)) for name in ("node1", "node3")}
    sessions["node2"] = HostSession(["sh", "-c", "echo it was killed >&2"])
    try:
        ways = connect_all(sessions, dict.fromkeys(sessions, "127.0.0.1"))
    finally:
        for session in sessions.values():
            session.close()
    assert {way.to for way in ways if way.start != "node2"} == {"node1", "node3"}
    made = cluster()
    made.ways = [way for way in ways if way.start == "node2"]
    assert "it takes no connections any more: it was killed" in findings(made)[0].text


def test_lines_that_are_no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(fcntl, "fcntl", refuse)  # as for a user with many pipes
    cut = (
        f"echo '{agent.MARK}{{\"a'; echo '{agent.MARK}5'; printf '{agent.MARK}'; head -c 3000000 /dev/zero | tr '\\0' 1"
    )
    session = HostSession(["sh", "-c", f"{cut}; echo; echo '{agent.MARK}{{}}'"])
    assert session.ask("base", 60) == {}
    for _ in range(2):
        with pytest.raises(NoAnswer) as error:
            session.ask("base", 60)
        assert error.value.code == 0, "its end is known at once, no time is over"
    session.close()


def test_a_session_that_ends_says_why() -> None:
    session = HostSession(["sh", "-c", "echo hello; echo it is closed >&2; exit 9"])
    with pytest.raises(NoAnswer, match="it is closed") as error:
        session.ask("base", 60)
    assert error.value.code == 9
    session.close()


def test_a_hash_is_kept_until_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (file := tmp_path / "file").write_bytes(b"one")
    n_read: list[int] = []
    for data in (b"one", b"two"):
        file.write_bytes(data)
        for _ in range(2):
            assert hashes.file_hash(file, n_read.append) == hashlib.sha256(data).hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "sha256", None)
        patch.setattr(hashes.user_cache().__class__, "get", lambda cache, name: "kept")
        assert hashes.file_hash(file, n_read.append) == "kept"
    assert n_read == [3] * 5


def test_models_verify_tells_the_hash_of_a_file(tmp_path: Path) -> None:
    done = CliRunner().invoke(models, ["verify", str(TARGET)], standalone_mode=False)
    assert done.return_value == 0 and hashlib.sha256(TARGET.read_bytes()).hexdigest() in done.stdout
    lost = CliRunner().invoke(models, ["verify", str(tmp_path / "lost.gguf")], standalone_mode=False)
    assert lost.return_value == 1 and "No such file" in lost.stdout


def test_this_machine_alone() -> None:
    words = [*COMMAND, "doctor", "--verify"]
    options = {"capture_output": True, "text": True, "env": environment(), "timeout": 120, "cwd": ROOT}
    plain: subprocess.CompletedProcess[str] = subprocess.run(words, **options)  # type: ignore[call-overload]
    assert plain.returncode in (0, 1) and "ERROR" not in plain.stdout, plain.stdout
    assert re.search(r"^ok +all +ring: a message went round 2 ranks of ", plain.stdout, re.M)
    assert re.search(r"^\S*mpirun .*-np 1 .*pipeinfer run -p ", plain.stdout, re.M)
    done = subprocess.run([*words, "--json", "-m", "lost.gguf"], **options)  # type: ignore[call-overload]
    result = json.loads(done.stdout)
    (lost,) = [each for each in result["findings"] if each["level"] == "error"]
    assert done.returncode == 2 and lost["check"] == "models" and result["command"] == "" and result["plan"] is None


def test_this_host_is_looked_at_by_the_same_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = {key: BASE[key] for key in ("shm", "limits", "has_fabric")}
    assert agent.machine().keys() == fine.keys()
    monkeypatch.setattr(agent, "machine", lambda: fine)
    assert check_this_host(8) == []
    monkeypatch.setattr(agent, "machine", lambda: fine | {"shm": {"bytes": 10**7, "error": ""}})
    assert check_this_host(2) == []
    (finding,) = check_this_host(8)
    assert finding.level is Severity.WARNING and "10.0 MB free" in finding.text and "11.2 MB" in finding.text
    bad = {"shm": {"bytes": 0, "error": "Read-only"}, "limits": LIMITS | {OPEN_FILES: 99}}
    monkeypatch.setattr(agent, "machine", lambda: fine | bad)
    first, second = check_this_host(2)
    assert first.level is Severity.ERROR and first.host == socket.gethostname() and "ssh" not in first.fix
    assert second.check == "limits" and "99" in second.text


def test_ranks_of_a_job_are_found_by_their_variables() -> None:
    names = (("A_RANK", "A_SIZE"), ("B_RANK", "B_SIZE"))
    children = [
        subprocess.Popen(["sleep", "30"], env=environ)
        for environ in (
            {"A_RANK": "3", "A_SIZE": "77", "B_RANK": "9", "B_SIZE": "77"},
            {"B_RANK": "5", "B_SIZE": "77"},
            {"B_RANK": "6", "B_SIZE": "78"},
        )
    ]
    try:
        # the kernel shows variables a moment after a program has replaced another
        until(lambda: all(Path(f"/proc/{child.pid}/environ").read_bytes() for child in children))
        assert agent.ranks("77", names) == {"ranks": [3, 5]}  # type: ignore[arg-type]
    finally:
        for child in children:
            child.kill()
            child.wait()
