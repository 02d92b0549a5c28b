"""The process that speaks HTTP, beside rank 0: what is asked goes to the head, what comes of it to clients.

It ends when the head does, after a word to each client. Under a supervisor it outlives heads: then clients wait for the
next one.
"""

import asyncio
import contextlib
import gc
import logging
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from pipeinfer.cluster.watch.limits import Limits
from pipeinfer.job.requests.body_prompts import BodyPrompts
from pipeinfer.job.serve.front import Alive, Listening
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.app import Api
from pipeinfer.server.front import BACKLOG, ProcessSetup
from pipeinfer.server.head import LINE_BYTES, Head
from pipeinfer.server.limits import limited_protocol
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.prompting import Prompting

LAST_WORDS_S = 0.7
"""After the head is lost: clients that were being answered get their error, and those that ask now get one too."""

IDLE_S = 15.0
"""After so long without a token one is asked for, so that health is known."""

CONTROL_BYTES, HERE = 4096, b"here"

COLLECT_AFTER = 50_000, 20, 50
"""Python's collector passes over the values of a large body again and again by default, for 200 ms in all in which
nobody is served. A pass over as many takes some 3 ms."""


class Server(uvicorn.Server):
    """Signals are the head's to hear. `on_start`: clients are heard."""

    on_start: Callable[[], object]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(link: int, port: int, by_links: int) -> None:
    """`link`: the socket to the head, or `by_links` to the supervisor; `port`: that on which clients come. What else to
    know is on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    given: ProcessSetup = pickle.load(sys.stdin.buffer)
    logging.basicConfig(format="pipeinfer: server: %(message)s", level=logging.ERROR)
    asyncio.run(serve(given, socket.socket(fileno=link), socket.socket(fileno=port), bool(by_links)))


async def beat(head: Head, every_s: float) -> None:
    """Tell the head that this process does not stand still."""
    while True:
        head.tell(Alive())
        await asyncio.sleep(every_s)


async def hear(head: Head, link: socket.socket) -> None:
    """Until this head is gone."""
    reader, head.writer = await asyncio.open_connection(sock=link, limit=LINE_BYTES)
    if head.is_heard:
        head.tell(Listening())
    await head.run(reader)


async def hear_all(head: Head, control: socket.socket) -> None:
    """Heads whose links come from the supervisor, until it says no more."""
    loop, messages = asyncio.get_running_loop(), asyncio.Queue[tuple[bytes, list[int]]]()
    control.setblocking(False)

    def take() -> None:
        try:
            messages.put_nowait(socket.recv_fds(control, CONTROL_BYTES, 1)[:2])
        except ConnectionError:  # it has closed with an answer unread
            messages.put_nowait((b"", []))

    loop.add_reader(control, take)
    hearing: asyncio.Task[None] | None = None
    while True:
        coming = asyncio.ensure_future(messages.get())
        await asyncio.wait({coming, *([hearing] if hearing else [])}, return_when=asyncio.FIRST_COMPLETED)
        if hearing and hearing.done():
            hearing = None
            head.recover()
        if not coming.done():
            coming.cancel()
            continue
        said, links = coming.result()
        if not said:
            break
        if head.writer:  # this head is not heard any more, though it may still be there
            head.writer.close()
        if links:
            hearing = asyncio.create_task(hear(head, socket.socket(fileno=links[0])))
        else:
            head.recover(said.decode(errors="replace"))
            with contextlib.suppress(OSError):  # it has ended meanwhile
                control.send(HERE)
    loop.remove_reader(control)


async def serve(given: ProcessSetup, link: socket.socket, port: socket.socket, by_links: bool) -> None:
    """Until the head is gone."""
    http, setup = given.http, given.setup
    metrics = Metrics(http.alias or setup.run.model.name, setup.n_ctx)
    head = Head(setup.run.parallel + http.n_queue, metrics, is_followed=by_links)
    metrics.show(head)
    info, tokenizer = read_model_info(setup.run.model), Tokenizer(setup.run.model)
    prompting = Prompting(BodyPrompts(setup.run, info, tokenizer, setup.limit, setup.share, lambda line: None))
    server = Server(uvicorn.Config(
        Api(http, setup, head, prompting, metrics).app(port.getsockname()[0]),
        http=limited_protocol(http.n_connections, http.timeout_s),
        ws="none", lifespan="off", log_config=None, access_log=False, server_header=False, backlog=BACKLOG,
        ssl_keyfile=http.ssl_key_file, ssl_certfile=http.ssl_cert_file,
    ))  # fmt: skip
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    server.on_start = head.starts
    serving = asyncio.create_task(server.serve(sockets=[port]))
    running = asyncio.create_task(hear_all(head, link) if by_links else hear(head, link))
    beating = asyncio.create_task(beat(head, Limits.of(setup.run.rank_timeout_s).beat_s))
    trying = asyncio.create_task(head.try_out(tokenizer.encode(" ")[-1:] or [0], IDLE_S))
    await asyncio.wait({serving, running}, return_when=asyncio.FIRST_COMPLETED)
    beating.cancel()
    trying.cancel()
    if not running.done():  # it could not start: whatever it raises ends the process, which the head notices
        await serving
        return
    head.give_up()
    if not head.closing_s:
        await asyncio.sleep(LAST_WORDS_S)
    server.should_exit = True
    await asyncio.wait({serving}, timeout=head.closing_s or LAST_WORDS_S)
    for connection in list(server.server_state.connections):
        connection.transport.abort()  # who has not read by now does not read
    await serving
