"""Rank 0's end of the server: checks its settings, opens its port, starts the process that speaks HTTP.

That is a process of its own, in a session of its own: it takes no time from the engine, and when a rank dies, and the
launcher kills all the others, it still tells its clients. Imports nothing but the standard library and what rank 0 has.
"""

import contextlib
import json
import math
import os
import pickle
import re
import socket
import ssl
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path

from pipeinfer.child import python_command
from pipeinfer.cluster.watch.attempts import Attempt, own_attempt
from pipeinfer.cluster.watch.limits import Limits
from pipeinfer.errors import UserError
from pipeinfer.job.process.complain import complain
from pipeinfer.job.process.limited import read_limited
from pipeinfer.job.process.supervised import FRONT, connect_supervisor, seal
from pipeinfer.job.serve.front import Closing, FromFront, FromHead, Setup
from pipeinfer.server.channel import HeadEnd
from pipeinfer.server.options import HttpOptions

NEEDS = ("fastapi", "uvicorn", "prometheus_client")
MAX_KEYS = 1 << 20
BACKLOG = 2048  # connections that nobody has looked at yet
MARGIN_S = 2.0
"""How long the process may take to end, beside what its clients have."""

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
START = "from pipeinfer.server.process import main; main(*map(int, sys.argv[1:]))"


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """What the process is told first. `http.api_keys`: those of the file too."""

    http: HttpOptions
    setup: Setup


class HttpProcess:
    """Where clients come, and the process that speaks HTTP there."""

    def __init__(self, options: HttpOptions) -> None:
        """Raises UserError: what is not installed, files, the port."""
        missing = [name for name in NEEDS if find_spec(name) is None]
        if missing:
            raise UserError(f"`pipeinfer serve` needs {', '.join(missing)}, which are not installed here; "
                            "install them: pip install 'pipeinfer[serve]'")  # fmt: skip
        self.options = replace(options, api_keys=options.api_keys + _keys_of(options.api_key_file))
        _check_certificate(options)
        _check_origins(options.origins)
        self._port = _listen(options.host, options.port)
        if not self.options.api_keys and not self._is_local:
            complain(f"--host {options.host} without --api-key: whoever reaches this port can use the server")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{'https' if self.options.ssl_cert_file else 'http'}://{self._place}"

    @property
    def tunnel(self) -> str:
        port = self._port.getsockname()[1]
        return f"ssh -L {port}:{self._place} {socket.gethostname()}" if self._is_local else ""

    @property
    def _place(self) -> str:
        host, port = self._port.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def _is_local(self) -> bool:
        """Whether only this host reaches it."""
        return ip_address(self._port.getsockname()[0].partition("%")[0]).is_loopback

    def start(self, setup: Setup, link: socket.socket, by_links: bool = False) -> None:
        """`link`: to the head; `by_links`: links to one head after the other come by it. It is closed here."""
        numbers = [link.fileno(), self._port.fileno()]
        with link:
            self._process = subprocess.Popen(
                python_command(START, *numbers, int(by_links)), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                pass_fds=numbers, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            pickle.dump(ProcessSetup(self.options, setup), pipe)

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def how_it_ended(self) -> str:
        """Empty while it runs."""
        code = self._process.poll() if self._process else None
        if code is None:
            return ""
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def end(self, timeout_s: float) -> None:
        """It is killed if it has not ended by then. The port stays."""
        if self._process:
            try:
                self._process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def close(self) -> None:
        """Nobody is heard at the port any more."""
        self._port.close()


class HttpFront:
    """The `Front` of a service."""

    def __init__(self, options: HttpOptions) -> None:
        """Raises UserError as `HttpProcess` does."""
        self._http = HttpProcess(options)
        self._end: HeadEnd | None = None
        self._most_silent_s = math.inf

    @property
    def address(self) -> str:
        return self._http.address

    @property
    def tunnel(self) -> str:
        return self._http.tunnel

    def start(self, setup: Setup) -> None:
        self._most_silent_s = Limits.of(setup.run.rank_timeout_s).silent_s
        ours, theirs = socket.socketpair()
        self._http.start(setup, theirs)
        self._end = HeadEnd(ours)

    def has_news(self) -> bool:
        return self._end is not None and self._end.has_news()

    def take(self) -> list[FromFront]:
        return self._end.take() if self._end else []

    def tell(self, message: FromHead) -> None:
        if self._end:
            self._end.tell(message)

    def lost(self) -> str:
        if self._end is None:
            return ""
        if not self._end.closed:
            if self._end.silent_s < self._most_silent_s:
                return ""
            return f"nothing comes from the process that speaks HTTP for {self._most_silent_s:g} s; ending the job"
        how = self._http.how_it_ended()
        if not how and self._end.silent_s > MARGIN_S:  # since it closed
            how = "has closed its ears"
        return f"the process that speaks HTTP {how}; ending the job" if how else ""

    def close(self, grace_s: float = 0.0) -> None:
        if self._end:
            self._end.tell(Closing(grace_s))
            self._end.finish()
        self._http.close()
        self._http.end(grace_s + MARGIN_S)


class SupervisedFront(HttpFront):
    """The `Front` where the port and the process are the supervisor's, which outlives the job."""

    def __init__(self, options: HttpOptions, version: str, attempt: Attempt) -> None:
        """Raises UserError as `HttpProcess` does, which is the supervisor's then, and where the service began with
        another version."""
        link = connect_supervisor(FRONT)
        assert link, "nobody supervises this job"
        self._link, self._key, self._most_silent_s = link, attempt.rendezvous.key, math.inf
        self._end = None
        try:
            link.send_bytes(seal(pickle.dumps((options, version)), attempt.rendezvous.key))
            said = json.loads(link.recv_bytes())
        except (OSError, EOFError):
            raise UserError("the supervisor of this job does not answer; start the job anew") from None
        if "error" in said:
            raise UserError(said["error"])
        self._address: str = said["address"]
        self._tunnel: str = said["tunnel"]

    @property
    def address(self) -> str:
        return self._address

    @property
    def tunnel(self) -> str:
        return self._tunnel

    def start(self, setup: Setup) -> None:
        self._most_silent_s = Limits.of(setup.run.rank_timeout_s).silent_s
        with contextlib.suppress(OSError):
            self._link.send_bytes(seal(pickle.dumps(setup), self._key))
        self._end = HeadEnd(socket.socket(fileno=os.dup(self._link.fileno())))
        self._link.close()

    def lost(self) -> str:
        if self._end and self._end.closed:
            return "the process that speaks HTTP, or the supervisor, is lost; ending the job"
        return super().lost()

    def close(self, grace_s: float = 0.0) -> None:
        if self._end:
            self._end.tell(Closing(grace_s))
            self._end.finish()


def open_front(options: HttpOptions, version: str) -> HttpFront:
    """The front of a service, on rank 0. Raises UserError as `HttpProcess` and `SupervisedFront` do."""
    attempt = own_attempt()
    return SupervisedFront(options, version, attempt) if attempt else HttpFront(options)


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


def _check_origins(origins: Sequence[str]) -> None:
    """Raises UserError for what no browser says of a page. It says `null` of one from a file."""
    for origin in origins:
        if origin not in ("*", "null") and not ORIGIN.fullmatch(origin):
            raise UserError(f"--allow-origin {origin}: give SCHEME://HOST[:PORT], as in https://chat.example.org, or *")


def _listen(host: str, port: int) -> socket.socket:
    """A socket at the address, where nobody answers yet. It listens: until then another server could have it too."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}; give others, --port 0 takes a free "
                        "one") from None  # fmt: skip
    return found
