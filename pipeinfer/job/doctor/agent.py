"""The process that `doctor` starts on a host. It is sent as text and imports the standard library of Python 3.6 alone,
so that it runs where the program is missing. Requests and answers are JSON objects, one a line; answers begin with
MARK, because login scripts print too."""

import errno
import fcntl
import json
import os
import platform
import pwd
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

MARK = "pipeinfer-doctor "
OPEN_FILES, LOCKED_MEMORY = "open files (-n)", "locked memory (-l)"
ADDRESS_SPACE, FILE_SIZE = "address space (-v)", "file size (-f)"
BLOCK_BYTES, N_PINGS, PINGS_S = 1 << 16, 9, 0.2
REPLY_S = 30.0  # a busy host's agent takes its time, and its system does not
PING, DATA = b"p", b"d"
SIOCGIFADDR = 0x8915

links: dict = {}  # host -> a connection to its agent


def base(python: str, folder: str, disk: str, environ: dict) -> dict:
    """What the system says. `python`: the program's interpreter; `folder`: to work in; `disk`: where slices go."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # it has no name, as in some containers
        user = str(os.getuid())
    os.environ.update(environ)
    if os.path.isdir(folder):
        os.chdir(folder)
    while not os.path.exists(disk):
        disk = os.path.dirname(disk) or "."
    return {
        "host": socket.gethostname(),
        "user": user,
        "time_s": time.time(),
        "interpreter": platform.python_version(),
        "program": interpreter_state(python),
        "addresses": addresses(),
        **machine(),
        "disk_bytes": shutil.disk_usage(disk).free,
        "flags": processor_flags(),
        "ports": read("/proc/sys/net/ipv4/ip_local_port_range").split(),
    }


def interpreter_state(python: str) -> str:
    """Empty where it can be run."""
    if os.access(python, os.X_OK):
        return ""
    for part in [python, os.path.dirname(python)]:
        if os.path.islink(part) and not os.path.exists(part):
            return f"{part} is a link to {os.readlink(part)}, which is not there"
    return f"{python} cannot be run" if os.path.exists(python) else f"{python} is not there"


def read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


def machine() -> dict:
    """What MPI needs of this host."""
    return {"shm": shared_memory(), "limits": limits(), "has_fabric": os.path.isdir("/sys/class/infiniband")}


def shared_memory() -> dict:
    """Bytes free in /dev/shm, or the error of writing there. Empty: the system has none."""
    if not os.path.exists("/dev/shm") and not sys.platform.startswith("linux"):
        return {}
    try:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.write(b"1")
        return {"bytes": shutil.disk_usage("/dev/shm").free, "error": ""}
    except OSError as error:
        return {"bytes": 0, "error": error.strerror}


def limits() -> dict:
    """Soft limits; -1: none."""
    numbers = {OPEN_FILES: resource.RLIMIT_NOFILE, LOCKED_MEMORY: resource.RLIMIT_MEMLOCK}
    numbers.update({ADDRESS_SPACE: resource.RLIMIT_AS, FILE_SIZE: resource.RLIMIT_FSIZE})
    values = {name: resource.getrlimit(number)[0] for name, number in numbers.items()}
    return {name: -1 if value == resource.RLIM_INFINITY else value for name, value in values.items()}


def processor_flags() -> list:
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", read("/proc/cpuinfo")[:8192], re.M)
    return match.group(1).split() if match else []


def addresses() -> dict:
    """Interface -> its IPv4 address and its speed in Mbit/s (0: unknown), without loopback."""
    result = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            speed = read(f"/sys/class/net/{name}/speed").strip()
            address = socket.inet_ntoa(reply[20:24])
            if not address.startswith("127."):
                result[name] = [address, int(speed) if speed.isdigit() else 0]
    return result


def run(words: list, silent_s: float, limit_s: float) -> dict:
    """Run a program, and hand each line that it prints on. It is killed after `silent_s` without a line, or after
    `limit_s`. `errors`: the end of what it wrote to standard error."""
    with tempfile.TemporaryFile() as errors:
        streams: dict = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors}
        try:
            process = subprocess.Popen(words, universal_newlines=True, start_new_session=True, **streams)
        except OSError as error:
            return {"code": 127, "errors": str(error), "late": False}
        late, over, heard_s = threading.Event(), threading.Event(), [time.time()]
        limit_s += heard_s[0]

        def end():
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        def watch():
            while not over.wait(max(0.0, min(heard_s[0] + silent_s, limit_s) - time.time())):
                if time.time() >= min(heard_s[0] + silent_s, limit_s):
                    end()
                    break

        threading.Thread(target=watch, daemon=True).start()
        try:
            for line in process.stdout or ():
                heard_s[0] = time.time()
                say({"line": line.rstrip("\n")})
            code = process.wait()
        except BaseException:  # whoever waits for the lines has gone
            end()
            raise
        finally:
            over.set()
        errors.seek(max(0, errors.tell() - 2000))
        return {"code": code, "errors": errors.read().decode("utf-8", "replace"), "late": late.is_set()}


def listen(token: str) -> dict:
    """Take connections at a port that the system chooses, as those of MPI and of the watch."""
    server = socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET)
    try:
        if socket.has_ipv6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("", 0))
    except OSError:  # IPv6 is switched off
        server = socket.socket(socket.AF_INET)
        server.bind(("", 0))
    server.listen(512)

    def accept():
        while True:
            link, _ = server.accept()
            threading.Thread(target=serve, args=(link, token.encode()), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return {"port": server.getsockname()[1]}


def serve(link: socket.socket, token: bytes) -> None:
    """Echo PINGs; of DATA, answer how many bytes came in which time."""
    link.settimeout(60)
    try:
        if receive(link, len(token)) != token:
            return
        link.sendall(PING)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            kind = receive(link, 1)
            if kind == PING:
                link.sendall(PING)
                continue
            n_bytes, start_s, data = 0, time.time(), b"-"
            while data:
                data = link.recv(BLOCK_BYTES)
                n_bytes += len(data)
            link.sendall(struct.pack("!dd", n_bytes, time.time() - start_s))
            return
    except (OSError, EOFError):
        return
    finally:
        link.close()


def receive(link: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        more = link.recv(n_bytes - len(data))
        if not more:
            raise EOFError("the connection was closed")
        data += more
    return data


def connect(targets: list, token: str, limit_s: float) -> dict:
    """Connect to all `targets`, (host, address where the name does not resolve, port), at once."""
    results: list = []
    interfaces = {address: name for name, (address, _) in addresses().items()}

    def attempt(result: dict, host: str, address: str, port: int) -> None:
        result["resolved"] = resolve(host)
        usable = result["resolved"] if not result["resolved"].startswith(("127.", "::1")) else ""
        try:
            link = socket.create_connection((usable or address, port), limit_s)
            result["state"] = f"its agent says nothing for {REPLY_S:.0f} s"
            link.settimeout(REPLY_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            result["interface"] = interfaces.get(link.getsockname()[0].replace("::ffff:", ""), "")
            link.sendall(token.encode())
            receive(link, 1)
            links[host], result["state"] = link, "open"
        except socket.timeout:  # noqa: UP041 (until Python 3.9 it is another one)
            pass
        except ConnectionRefusedError:
            result["state"] = "refused"
        except (OSError, EOFError) as error:
            is_barred = getattr(error, "errno", 0) in (errno.EHOSTUNREACH, errno.EACCES, errno.EPERM)
            result["state"] = "refused" if is_barred else str(error)

    threads = []
    for target in targets:
        results.append({"to": target[0], "state": "silent", "interface": "", "resolved": ""})
        threads.append(threading.Thread(target=attempt, args=(results[-1], *target), daemon=True))
        threads[-1].start()
    end_s = time.time() + limit_s + REPLY_S + 1
    for thread in threads:
        thread.join(max(0.0, end_s - time.time()))
    return {"links": results}


def resolve(host: str) -> str:
    """Its first address; empty if there is none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def measure(host: str, seconds: float) -> dict:
    """Over an open connection: seconds of a message one way, and bytes a second."""
    link, pings_end_s = links.pop(host), time.perf_counter() + PINGS_S
    times: list = []
    while len(times) < N_PINGS and time.perf_counter() < pings_end_s:
        start_s = time.perf_counter()
        link.sendall(PING)
        receive(link, 1)
        times.append(time.perf_counter() - start_s)
    end_s, block = time.perf_counter() + seconds, b"\0" * BLOCK_BYTES
    link.sendall(DATA)
    while time.perf_counter() < end_s:
        link.sendall(block)
    link.shutdown(socket.SHUT_WR)
    n_bytes, passed_s = struct.unpack("!dd", receive(link, 16))
    link.close()
    return {"latency_s": sorted(times)[len(times) // 2] / 2, "bytes_per_s": n_bytes / max(passed_s, 1e-6)}


def ranks(size: str, names: list) -> dict:
    """The ranks of jobs of `size` ranks that run here. `names`: launchers' variables of a rank and of the size."""
    numbers_here, network = set(), os.readlink("/proc/self/ns/net")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        environ = dict(entry.partition("=")[::2] for entry in read(f"/proc/{pid}/environ").split("\0"))
        numbers = [environ[rank] for rank, all_ranks in names if rank in environ and environ.get(all_ranks) == size]
        try:
            if numbers and os.readlink(f"/proc/{pid}/ns/net") == network:
                numbers_here.add(int(numbers[0]))
        except OSError:  # it has ended
            continue
    return {"ranks": sorted(numbers_here)}


def say(value: dict) -> None:
    sys.stdout.write(MARK + json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    actions = {each.__name__: each for each in (base, run, listen, connect, measure, ranks)}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = actions[request.pop("do")](**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        say(dict(answer, done=True))
    os._exit(0)  # threads still wait for connections


if __name__ == "__main__":
    main()
