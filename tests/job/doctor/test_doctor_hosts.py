"""`pipeinfer doctor` on hosts with ssh of their own (namespaces of this machine), each with a fault that was made."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pipeinfer
from pipeinfer.job.doctor import connections, findings, host_checks
from pipeinfer.models.gguf.header import sample_extents
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.llama.ggml import library_folder
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import ROOT, environment
from tests.support.ssh_hosts import SshHosts, missing, ssh_hosts

WHY = missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=f"no hosts can be made here: {WHY}")

NFT = shutil.which("nft", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
FIREWALL = """
table inet doctor {{
  chain input {{
    type filter hook input priority 0; policy accept;
    iif lo accept
    ct state established,related accept
    tcp dport 22 accept
    {verdict}
  }}
}}
"""
LATE_CLOCK = """#!/bin/sh
[ "$1" = -S ] && exec {python} -S -u -c "import time; real = time.time; time.time = lambda: real() - 3000; $4"
exec {python} "$@"
"""
ALL = "node1,node2,node3,node4"
COPY = "tar -C " if Path(ROOT) in (Path(sys.prefix), *Path(sys.prefix).parents) else "make install"


@pytest.fixture(scope="module")
def module_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(4, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def hosts(module_hosts: SshHosts) -> Iterator[SshHosts]:
    """As they were, after a test."""
    host_keys = (module_hosts.folder / "known_hosts").read_text()
    yield module_hosts
    (module_hosts.folder / "known_hosts").write_text(host_keys)
    for name in module_hosts.names:
        shutil.copy(module_hosts.folder / "key.pub", module_hosts.folder / f"authorized-{name}")
        module_hosts.start(name)
    module_hosts.await_all()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(n_layer=16, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, n_vocab=512)
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape)


def doctor(hosts: SshHosts, model: Path, *words: str, names: str = ALL) -> subprocess.CompletedProcess[str]:
    return hosts.run(["doctor", "--hosts", names, "-m", str(model), "-md", "none", *words])


def folders() -> list[str]:
    """In which this Python finds the program: the one that is tested, and the one that is installed."""
    code = "import pipeinfer; print(pipeinfer.__path__[0])"
    installed = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True).stdout.split()
    return list(dict.fromkeys([str(Path(pipeinfer.__file__).parent), *installed]))


def problem(done: subprocess.CompletedProcess[str], host: str, check: str) -> str:
    """The one line that is no `ok` of this host, with its way out."""
    checked, *others = done.stdout.removesuffix("\n").split("\n\n")
    lines = [line for line in checked.splitlines() if re.match(rf"(ERROR|warning) +{host} ", line)]
    assert len(lines) == 1 and lines[0] in "\n".join(others), f"{done.stdout}\n{done.stderr}"
    assert f" {check}: " in lines[0] and " -> " in lines[0], done.stdout
    return lines[0]


def mpi_library() -> str:
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return next(word for word in maps.split() if "/libmpi." in word)


def is_fine(done: subprocess.CompletedProcess[str], host: str) -> bool:
    lines = [line for line in done.stdout.splitlines() if line.split()[1:2] == [host]]
    return bool(lines) and all(line.startswith("ok ") for line in lines)


def test_all_is_well_and_the_command_that_it_prints_runs(hosts: SshHosts, model: Path) -> None:
    done = doctor(hosts, model, "-c128", "--layer-split=4,4,4,4", "-hft", "secret")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert all(is_fine(done, name) for name in [*hosts.names, "all"])
    assert "a message went round 4 ranks" in done.stdout
    assert re.search(r"\| +3 +\| node4 +\|", done.stdout), "the plan has a rank on each host"
    *_, summary, _, command = done.stdout.splitlines()
    assert "node1:1,node2:1,node3:1,node4:1" in command and " -np 4 " in command
    assert f" run -m {model} -md none -c128 --layer-split=4,4,4,4 -p " in command, "the options, without the token"
    assert summary == "0 errors, 0 warnings"
    words = hosts.inside("node1", f"{command} -n 4 --ignore-eos --json")
    environ = environment() | {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
    run = subprocess.run(words, capture_output=True, text=True, env=environ, timeout=60, stdin=subprocess.DEVNULL)
    assert run.returncode == 0, run.stderr
    assert [rank["host"] for rank in json.loads(run.stdout)["ranks"]] == hosts.names


def test_ways_to_a_host_that_are_barred(hosts: SshHosts, model: Path) -> None:
    (hosts.folder / "authorized-node2").write_text("")
    lines = (hosts.folder / "known_hosts").read_text().splitlines(keepends=True)
    lines[3] = lines[3].split()[0] + " " + " ".join(lines[0].split()[1:]) + "\n"  # node4 has the key of node1
    (hosts.folder / "known_hosts").write_text("".join(lines[:2] + lines[3:]))
    done = doctor(hosts, model, names=f"{ALL},nowhere")
    assert done.returncode == 2 and is_fine(done, "node1"), done.stdout
    assert "ssh-copy-id node2" in problem(done, "node2", "ssh")
    assert "not known" in (line := problem(done, "node3", "ssh")) and "ssh node3 true" in line
    assert "another one than before" in (line := problem(done, "node4", "ssh")) and "ssh-keygen -R node4" in line
    assert "/etc/hosts" in problem(done, "nowhere", "name")
    assert "mpirun" not in done.stdout


def test_a_program_that_is_missing_or_another_one(hosts: SshHosts, model: Path, tmp_path: Path) -> None:
    bin_folder, name = Path(sys.executable).parent, Path(sys.executable).name
    (broken := tmp_path / "broken").mkdir()
    (broken / name).symlink_to("/opt/python3.99/bin/python3.99")
    (other := tmp_path / "other").mkdir()
    (other / name).write_text(f'#!/bin/sh\nshift\nPYTHONPATH={other} exec {os.path.realpath(sys.executable)} "$@"\n')
    (other / name).chmod(0o755)
    (other / "sitecustomize.py").write_text("import platform\nplatform.python_version = lambda: '3.99.1'\n")
    package = Path(pipeinfer.__file__).parent
    copy = shutil.copytree(package, tmp_path / "pipeinfer", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "errors.py").write_text((copy / "errors.py").read_text() + "\nCHANGED = True\n")
    hosts.start("node1", f"mount --bind {copy} {package}")
    hosts.start("node2", f"mount -t tmpfs none {sys.prefix}")
    hosts.start("node3", f"mount --bind {broken} {bin_folder}")
    hosts.start("node4", f"mount --bind {other} {bin_folder}")
    hosts.await_all()
    done = doctor(hosts, model)
    assert done.returncode == 2 and is_fine(done, "node1"), done.stdout  # it is here: not by ssh
    assert "is not there" in (line := problem(done, "node2", "python")) and COPY in line
    assert "/opt/python3.99/bin/python3.99, which is not there" in problem(done, "node3", "python")
    assert "Python 3.99.1, and here it is 3." in problem(done, "node4", "python")
    hosts.start("node2", f"mount --bind {copy} {package}")
    hosts.start("node3", " && ".join(f"mount -t tmpfs none {folder}" for folder in folders()))
    hosts.start("node4")
    hosts.await_all()
    done = doctor(hosts, model)
    assert "rank 1 (host node2) runs pipeinfer" in (line := problem(done, "node2", "program")) and COPY in line
    assert "No module named 'pipeinfer." in problem(done, "node3", "program") and is_fine(done, "node4"), done.stdout


def test_the_way_out_leaves_nothing_of_another_program(
    hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, file in (("here", "new.py"), ("there", "old.py")):
        (program := tmp_path / folder / "program").mkdir(parents=True)
        (program / file).touch()
    monkeypatch.setattr(findings, "ROOT", str(tmp_path / "here" / "program"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "here" / "program" / ".venv"))
    hosts.start("node2", f"mount --bind {tmp_path / 'there'} {tmp_path / 'here'}")
    hosts.await_all()
    problem = host_checks.OTHER_VERSION.on(findings.HostReport("node2", False), why="")
    for _ in range(2):
        subprocess.run(hosts.inside("node1", problem.fix.split(": ")[1]), check=True)
        assert os.listdir(tmp_path / "there" / "program") == ["new.py"]
    assert (tmp_path / "there" / "program.old.~1~" / "old.py").exists()


def test_hosts_that_hang_hold_up_nobody(hosts: SshHosts, model: Path) -> None:
    hosts.start("node2", extra="ForceCommand sleep 1000")
    hosts.await_all()
    stopped = hosts._daemons["node3"]
    stopped.send_signal(signal.SIGSTOP)
    hosts.made.cut("node4")
    try:
        start_s = time.monotonic()
        done = doctor(hosts, model)
        assert time.monotonic() - start_s < 60
    finally:
        stopped.send_signal(signal.SIGCONT)
        hosts.made.mend("node4")
    assert done.returncode == 2 and is_fine(done, "node1"), done.stdout
    assert "does not answer within" in problem(done, "node2", "ssh")
    assert "says nothing" in problem(done, "node3", "ssh")
    assert "cannot be reached" in problem(done, "node4", "ssh")


@pytest.mark.skipif(NFT is None, reason="there is no nft (nftables)")
def test_a_firewall_that_lets_ssh_through(hosts: SshHosts, model: Path) -> None:
    for name, verdict in (("node3", "drop"), ("node4", "reject")):
        words = ["ip", "netns", "exec", hosts.made.prefix + name, str(NFT), "-f", "-"]
        subprocess.run(words, input=FIREWALL.format(verdict=verdict), text=True, check=True)
    try:
        done = doctor(hosts, model)
    finally:
        for name in ("node3", "node4"):
            words = ["ip", "netns", "exec", hosts.made.prefix + name, str(NFT), "flush", "ruleset"]
            subprocess.run(words, check=True)
    assert done.returncode == 2
    for name, others in (("node1", "node3, node4"), ("node2", "node3, node4"), ("node3", "node4"), ("node4", "node3")):
        line = problem(done, name, "ports")
        assert f"{others} cannot be reached" in line and "a firewall" in line and "ufw allow from" in line


def test_models_that_differ(hosts: SshHosts, model: Path, tmp_path: Path) -> None:
    info, data = read_model_info(model), bytearray(model.read_bytes())
    sampled = {at for start, n in sample_extents(info.tensors) for at in range(start, start + n)}
    first = min(tensor.offset for tensor in info.tensors)
    data[next(at for at in range(first, len(data)) if at not in sampled)] ^= 1
    (damaged := tmp_path / "damaged.gguf").write_bytes(data)
    data[first] ^= 1
    (other := tmp_path / "other.gguf").write_bytes(data)
    (short := tmp_path / "short.gguf").write_bytes(data[:-32])
    hosts.start("node2", f"mount --bind {damaged} {model}")
    hosts.await_all()
    plain = doctor(hosts, model, names="node1,node2")
    assert plain.returncode == 0, plain.stdout
    done = doctor(hosts, model, "--verify", names="node1,node2")
    assert done.returncode == 2 and "their samples do not" in problem(done, "node2", "hashes")
    verified = hosts.run(["models", "verify", str(model), "--hosts", "node1,node2", "--json"])
    result = json.loads(verified.stdout)
    assert verified.returncode == 1 and not result["alike"] and len({each["sha256"] for each in result["files"]}) == 2
    hosts.start("node2", f"mount --bind {other} {model}")
    hosts.start("node3", f"mount --bind {short} {model}")
    hosts.start("node4", f"mount -t tmpfs none {model.parent}")
    hosts.await_all()
    done = doctor(hosts, model)
    assert done.returncode == 2
    line = problem(done, "node2", "models")
    assert "samples of its tensors differ" in line and f"scp {model} node2:" in line
    assert "m.gguf" in problem(done, "node3", "models")
    assert "layers from rank 0" in problem(done, "node4", "models")


def test_faults_of_the_machine(hosts: SshHosts, model: Path, tmp_path: Path) -> None:
    (names := tmp_path / "hosts").write_text(
        "127.0.0.1 localhost node1\n10.77.0.2 node2\n10.77.0.3 node3\n10.77.0.4 node4\n"
    )
    hosts.start("node2", "mount -t tmpfs -o ro none /dev/shm")
    hosts.start("node3", "ulimit -n 200")
    hosts.start("node4", f"mount --bind {names} /etc/hosts")
    for words in ("link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up"):
        subprocess.run(["ip", "-n", hosts.made.prefix + "node1", *words.split()], check=True)
    hosts.await_all()
    try:
        done = doctor(hosts, model)
    finally:
        subprocess.run(["ip", "-n", hosts.made.prefix + "node1", "link", "del", "docker0"], check=True)
    assert done.returncode == 2
    assert "docker0 (172.17.0.1)" in (line := problem(done, "node1", "network")) and "UCX_NET_DEVICES=eth0" in line
    assert "cannot be written" in problem(done, "node2", "shared memory")
    assert "200" in (line := problem(done, "node3", "limits")) and "nofile" in line
    assert "127.0.0.1, which is node4 itself" in problem(done, "node4", "ports")


def test_more_faults_of_ssh(hosts: SshHosts, model: Path) -> None:
    pythons = {os.path.realpath(place) for place in ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable)}
    hosts.stop("node2")
    hosts.start("node3", extra="ForceCommand echo This account is not available. >&2; exit 1")
    hosts.start("node4", " && ".join(f"mount --bind /dev/null {path}" for path in pythons if os.path.exists(path)))
    hosts.await_all()
    done = doctor(hosts, model)
    assert done.returncode == 2 and is_fine(done, "node1"), done.stdout
    assert "sudo systemctl start ssh" in problem(done, "node2", "ssh")
    assert "no program can be started there: This account is not available." in problem(done, "node3", "ssh")
    assert "there is no Python there" in problem(done, "node4", "ssh")


def test_parts_of_the_program_that_are_broken(hosts: SshHosts, model: Path, tmp_path: Path) -> None:
    (numpy,) = Path(np.__file__).parents[1].glob("numpy-*.dist-info")
    text = (numpy / "METADATA").read_text()
    (metadata := tmp_path / "METADATA").write_text(re.sub(r"^Version: .*$", "Version: 1.2.3", text, flags=re.M))
    hosts.start("node3", f"mount --bind /dev/null {library_folder()}/libllama.so")
    hosts.start("node4", f"mount --bind {metadata} {numpy / 'METADATA'}")
    hosts.await_all()
    start_s = time.monotonic()
    done = doctor(hosts, model)
    before_s = time.monotonic() - start_s
    assert done.returncode == 2 and is_fine(done, "node1"), done.stdout
    assert "llama.cpp cannot be loaded" in problem(done, "node3", "build")
    assert "numpy 1.2.3" in problem(done, "node4", "packages")
    hosts.start("node3", f"mount --bind /dev/null {mpi_library()}")
    hosts.await_all()
    start_s = time.monotonic()
    done = doctor(hosts, model, names="node1,node2,node3")
    assert done.returncode == 2 and is_fine(done, "node2"), done.stdout
    assert "no MPI library can be loaded" in problem(done, "node3", "mpi")
    assert time.monotonic() - start_s < before_s + connections.SILENT_S - 10, "the launcher waits for the others"


def test_more_faults_of_the_machine(hosts: SshHosts, model: Path, tmp_path: Path) -> None:
    (slices := tmp_path / "slices").mkdir()
    (processor := tmp_path / "cpuinfo").write_text("flags\t\t: fpu sse2\n")
    here = Path(sys.executable)
    programs = shutil.copytree(here.parent, tmp_path / "programs", symlinks=True)
    (programs / here.name).rename(programs / "real-python")
    (programs / here.name).write_text(LATE_CLOCK.format(python=here.parent / "real-python"))
    (programs / here.name).chmod(0o755)
    hosts.start("node2", f"mount --bind {programs} {here.parent}")
    hosts.start("node3", f"mount -t tmpfs -o size=4k none {slices}")
    hosts.await_all()
    hosts.made.limit(10, ["node4"])
    try:
        done = doctor(hosts, model, "--slice-cache", str(slices))
    finally:
        hosts.made.limit(1000)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert re.search(r"its clock is 29\d\d\.\d s behind", problem(done, "node2", "clock"))
    assert "on the disk for slices" in problem(done, "node3", "disk")
    assert re.search(r"links: 0\.0\d+ Gbit/s to ", problem(done, "node4", "links"))
    hosts.start("node2", f"mount --bind {processor} /proc/cpuinfo")
    hosts.await_all()
    done = doctor(hosts, model, names="node1,node2")
    assert "which this one lacks" in problem(done, "node2", "build")


def test_a_network_that_is_not_taken_and_faster(hosts: SshHosts, model: Path) -> None:
    with hosts.made.joined("node1", "node2", "10.88.0"):
        hosts.made.limit(20)  # eth1 has as much as the cores can move, which is little beside other work
        try:
            done = doctor(hosts, model, names="node1,node2,node3")
        finally:
            hosts.made.limit(1000)
        line = problem(done, "node1", "network")
        assert re.search(r"connections to node2 take eth0 \([\d.]+ Gbit/s\), and eth1 gives [\d.]+ Gbit/s -> ", line)
        assert "that of node2 is 10.88.0.2" in line and "mpirun -iface eth1" in line and done.returncode == 1
        assert "10.88.0.1" in problem(done, "node2", "network") and is_fine(done, "node3")
        hosts.made.limit(100, ["node1", "node2"], "eth1")
        done = doctor(hosts, model, names="node1,node2")
    assert re.search(r"^ok +node1 +network: eth0 .*, eth1 would give [\d.]+ Gbit/s$", done.stdout, re.M), done.stdout


@pytest.mark.long
def test_sixteen_hosts_at_once(tmp_path: Path, model: Path) -> None:
    with ssh_hosts(16, tmp_path) as many:
        doctor(many, model, names="node1,node2")  # kernels are tried, which is kept
        n_cores = os.cpu_count() or 1
        load = max(1.0, os.getloadavg()[0] / n_cores)  # what else is at work here
        start_s = time.monotonic()
        done = doctor(many, model, "--json", names=",".join(many.names))
        passed_s = time.monotonic() - start_s
    result = json.loads(done.stdout)
    assert done.returncode == 0, [each for each in result["findings"] if each["level"] != "ok"]
    assert len(result["links"]) == 16 * 15 and result["command"] and result["plan"]["fits"]
    assert passed_s < 10 * max(1, 4 / n_cores) * load, "ten seconds, where sixteen hosts share four cores"
