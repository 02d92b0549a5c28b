"""The HTTP process of a service: its options, the owner of its port and of the process, and rank 0's `Front`, which
talks to it.

The HTTP process has a session of its own: it takes no time from the engine, and when a rank dies, and the launcher
kills all the others, it still answers its clients. Rank 0 owns it, or under `supervise` the supervisor, which outlives
jobs. Imports nothing but the standard library and what rank 0 has."""

import contextlib
import json
import os
import pickle
import re
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path

import click

from pipeinfer.child import python_command
from pipeinfer.cluster.watch.protocol import Limits
from pipeinfer.core.settings import setting
from pipeinfer.errors import UserError
from pipeinfer.job.options.values import File, Folder, Joined, Number, TextType
from pipeinfer.job.process.streams import complain, read_limited
from pipeinfer.job.process.supervised import FRONT, connect_supervisor, own_attempt, seal
from pipeinfer.job.serve.channel import Closing, Front, Setup

SHARE = 0.75  # of connections or texts, for one address


def most_of_one(n: int) -> int:
    """How many of `n` connections or texts one address may have."""
    return max(1, int(SHARE * n))


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """`api_keys`: any of them is accepted; without one no request needs a key. No message between ranks has them.
    `n_queue`: texts that may wait. `max_body`: bytes of a request. `timeout_s`: for a client to send or to read.

    host: Address to listen on.
    port: Port to listen on; 0: a free one.
    api_key_file: Keys, as of --api-key, one a line.
    ssl_key_file: The private key, PEM: with --ssl-cert-file it is HTTPS.
    ssl_cert_file: Its certificate, PEM, with those that vouch for it.
    alias: The model's name in answers. [default: the file's]
    n_queue: Texts that may wait for room; for more the answer is 429.
    priorities: Take `priority` of requests: whoever asks can pass and preempt others.
    n_connections: Connections that are open at a time.
    max_body: Bytes of a request.
    timeout_s: Seconds that a client may take to send a request, or to read on.
    origins: Pages of these origins may ask too, such as https://chat.example.org; *: all pages.
    strict: Refuse requests with fields or parts that are unknown; else these are passed over, named once in the log and
        in the header X-Pipeinfer-Passed-Over of the answer.
    log_format: A line a request on standard error.
    metrics: /metrics, for Prometheus.
    slots: /slots: what is being written.
    slot_folder: Where /slots/ID?action=save puts the tokens of texts, whose keys and values --kv-disk keeps.
    page: The page at /.
    """

    heading = "Server"
    host: str = setting("127.0.0.1", "--host", type=TextType())
    port: int = setting(8080, "--port", most=65535)
    api_keys: tuple[str, ...] = field(default=(), compare=False, repr=False)
    api_key_file: Path | None = setting(None, "--api-key-file", type=File())
    ssl_key_file: Path | None = setting(None, "--ssl-key-file", type=File())
    ssl_cert_file: Path | None = setting(None, "--ssl-cert-file", type=File())
    alias: str | None = setting(None, "--alias", "-a", type=TextType())
    n_queue: int = setting(256, "--queue", most=1 << 20)
    priorities: bool = setting(False, "--priorities")
    n_connections: int = setting(1024, "--max-connections", least=1, most=1 << 20)
    max_body: int = setting(2 << 20, "--max-body", least=1024, most=1 << 30)
    timeout_s: float = setting(600.0, "--timeout", "-to", type=Number(0, 1e6, above=True))
    origins: tuple[str, ...] = setting((), "--allow-origin", "--cors-origins", type=Joined(TextType()), repeated=True)
    strict: bool = setting(False, "--strict/--lenient")
    log_format: str = setting("text", "--log-format", type=click.Choice(["text", "json", "none"]))
    metrics: bool = setting(True, "--metrics/--no-metrics")
    slots: bool = setting(True, "--slots/--no-slots")
    slot_folder: Path | None = setting(None, "--slot-save-path", type=Folder())
    page: bool = setting(True, "--ui/--no-ui")


NEEDS = ("starlette", "uvicorn", "prometheus_client")
MAX_KEYS = 1 << 20
BACKLOG = 2048  # connections that nothing has accepted yet
MARGIN_S = 2.0  # how long the process may take to end, beside the time for its clients

ANSWER_S = 2.0
"""How long it may take to answer its owner, before another one replaces it; clients have to connect again then."""

CONTROL_BYTES = 4096
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
START = "from pipeinfer.server.process import main; main(*map(int, sys.argv[1:]))"


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """The standard input of the HTTP process. `http.api_keys`: also those of the file. `is_followed`: another job
    follows one that is lost."""

    http: HttpOptions
    setup: Setup
    is_followed: bool


class HttpServer:
    """The port of a service and the process that answers there, for one job, or if `is_followed` for several in a row.
    The process gets links to rank 0 of these jobs over a control socket, and answers there when told of a loss."""

    def __init__(self, options: HttpOptions, is_followed: bool = False, saves: bool = False) -> None:
        """Open the port. `saves`: texts of slots can be saved. Raises UserError: what is not installed, files, the
        port."""
        missing = [name for name in NEEDS if find_spec(name) is None]
        if missing:
            what = f"`pipeinfer serve` needs {', '.join(missing)}, which are not installed here"
            raise UserError(f"{what}; install them: pip install 'pipeinfer[serve]'")
        self.options = replace(options, api_keys=options.api_keys + _keys_of(options.api_key_file))
        self._is_followed = is_followed
        _check_certificate(options)
        if options.slot_folder and saves:
            _make_folder(options.slot_folder)
        for origin in options.origins:  # a browser sends `null` for a page from a file
            if origin not in ("*", "null") and not ORIGIN.fullmatch(origin):
                form = "give SCHEME://HOST[:PORT], as in https://chat.example.org, or *"
                raise UserError(f"--allow-origin {origin}: {form}")
        self._port = _listen(options.host, options.port)
        host, port = self._port.getsockname()[:2]
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        is_local = ip_address(host.partition("%")[0]).is_loopback  # only this host reaches it
        self.address = f"{'https' if options.ssl_cert_file else 'http'}://{place}"
        self.tunnel = _way_in(self.address, host, port, is_local, os.environ)  # how another machine gets there
        if not self.options.api_keys and not is_local:
            complain(f"--host {options.host} without --api-key: whoever reaches this port can use the server")
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._setup: Setup | None = None  # the last job's

    def attach(self, setup: Setup, link: int) -> None:
        """A job begins: hand the link to its rank 0, a file descriptor, to the process, which starts if none runs."""
        self._setup = setup
        if self._process is None or self._process.poll() is not None:
            self._start()
        with contextlib.suppress(OSError):  # it has ended: the job sees that its link is closed
            assert self._control
            socket.send_fds(self._control, [b"head"], [link])

    def detach(self, why: str) -> None:
        """The job is lost, another may follow. Returns once the process knows; one that does not answer is replaced."""
        if not self._control:
            return
        with contextlib.suppress(OSError):
            self._control.setblocking(False)
            while self._control.recv(CONTROL_BYTES):
                pass  # an answer to an earlier loss
        with contextlib.suppress(OSError):
            self._control.settimeout(ANSWER_S)
            self._control.send(why.encode()[:CONTROL_BYTES])
            if self._control.recv(CONTROL_BYTES):
                return
        self._end(0.0)
        self._start().send(why.encode()[:CONTROL_BYTES])

    def how_it_ended(self) -> str:
        """Empty while the process runs."""
        code = self._process.poll() if self._process else None
        if code is None:
            return ""
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def close(self, timeout_s: float) -> None:
        """No job follows: the process has so long to tell its clients, and is killed then. The port is closed."""
        self._port.close()
        if self._control and self._is_followed:  # else the end of the job is known
            self._control.close()
        self._end(timeout_s)

    def _start(self) -> socket.socket:
        """Start the process; returns the control socket."""
        if self._control:
            self._control.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = theirs.fileno(), self._port.fileno()
        with theirs:
            command, pipe, none = python_command(START, *numbers), subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdin=pipe, stdout=none, pass_fds=numbers, start_new_session=True)
        assert self._process.stdin and self._setup
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            pickle.dump(ProcessSetup(self.options, self._setup, self._is_followed), stdin)
        return self._control

    def _end(self, timeout_s: float) -> None:
        if self._process:
            try:
                self._process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


class HttpFront(Front):
    """Rank 0's `Front`: messages to the HTTP process, which is this rank's own or the supervisor's."""

    def __init__(self, options: HttpOptions, setup: Setup) -> None:
        """Raises UserError as `HttpServer` does, also where the supervisor's does, or began with another model."""
        self._silent_limit_s = Limits.of(setup.rank_timeout_s).silent_s
        self._server: HttpServer | None = None
        if attempt := own_attempt():
            link, self.address, self.tunnel = _connect_supervisor(options, setup, attempt.rendezvous.key)
        else:
            self._server = HttpServer(options, saves=setup.saves_texts)
            self.address, self.tunnel = self._server.address, self._server.tunnel
            link, theirs = socket.socketpair()
            with theirs:
                self._server.attach(setup, theirs.fileno())
        super().__init__(link)

    def lost(self) -> str:
        if not self.closed:
            if self.silent_s < self._silent_limit_s:
                return ""
            return f"nothing comes from the process that speaks HTTP for {self._silent_limit_s:g} s; ending the job"
        if not self._server:
            return "the process that speaks HTTP, or the supervisor, is lost; ending the job"
        how = self._server.how_it_ended()
        if not how and self.silent_s > MARGIN_S:  # since it closed
            how = "has closed its connection"
        return f"the process that speaks HTTP {how}; ending the job" if how else ""

    def close(self, grace_s: float = 0.0) -> None:
        self.tell(Closing(grace_s))
        self.finish()
        if self._server:
            self._server.close(grace_s + MARGIN_S)


def _way_in(address: str, host: str, port: int, is_local: bool, environ: Mapping[str, str]) -> str:
    """The command that forwards a port of this host, under Slurm by way of the host where the job was submitted."""
    scheme, node = address.partition(":")[0], environ.get("SLURMD_NODENAME") or socket.gethostname()
    login = environ.get("SLURM_SUBMIT_HOST", node)
    loopback = "[::1]" if ":" in host else "127.0.0.1"
    place = f"[{host}]" if ":" in host else host
    there = loopback if ip_address(host.partition("%")[0]).is_unspecified else place
    then = f"then {scheme}://{there if is_local else '127.0.0.1'}:{port}"
    if is_local:
        return f"ssh {f'-J {login} ' if login != node else ''}-L {port}:{there}:{port} {node}, {then}"
    if login != node:
        return f"ssh -L {port}:{node if there == loopback else there}:{port} {login}, {then}"
    return f"{scheme}://{node}:{port}, or ssh -L {port}:{there}:{port} {node}, {then}"


def _connect_supervisor(options: HttpOptions, setup: Setup, key: str) -> tuple[socket.socket, str, str]:
    """The supervisor attaches this job to its server: (link to the HTTP process, address, tunnel). Raises UserError."""
    link = connect_supervisor(FRONT)
    assert link, "nobody supervises this job"
    with link:
        try:
            link.send_bytes(seal(pickle.dumps((options, setup)), key))
            answer = json.loads(link.recv_bytes())
        except (OSError, EOFError):
            raise UserError("the supervisor of this job does not answer; start the job anew") from None
        if "error" in answer:
            raise UserError(answer["error"])
        return socket.socket(fileno=os.dup(link.fileno())), answer["address"], answer["tunnel"]


def _keys_of(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        with path.open() as file:
            lines = read_limited(file, f"--api-key-file {path}", MAX_KEYS).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--api-key-file {path}: {getattr(error, 'strerror', None) or 'it is no UTF-8 text'}") from None
    if keys := tuple(line.strip() for line in lines if line.strip()):
        return keys
    raise UserError(f"--api-key-file {path} has no keys; write one a line")


def _make_folder(path: Path) -> None:
    """Raises UserError where saved slots could not be written."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"--slot-save-path {path}: {reason}; name a directory that can be written") from None


def _check_certificate(options: HttpOptions) -> None:
    key, certificate = options.ssl_key_file, options.ssl_cert_file
    if key is None and certificate is None:
        return
    if key is None or certificate is None:
        raise UserError("--ssl-key-file and --ssl-cert-file go together; give both, or none")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except ssl.SSLError:
        raise UserError(
            f"--ssl-cert-file {certificate} and --ssl-key-file {key} are not a certificate and its key in PEM, without "
            "a passphrase; give others"
        ) from None
    except OSError as error:
        raise UserError(f"--ssl-cert-file {certificate} with --ssl-key-file {key}: {error.strerror}") from None


def _listen(host: str, port: int) -> socket.socket:
    """A socket at the address that listens, since until then another server could take it too; nothing answers yet."""
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host  # IPv6, as in a URL
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"--host {host} --port {port}: {why}; give others, --port 0 takes a free one") from None
    return listener
