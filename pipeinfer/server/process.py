"""The program of the HTTP process: clients' requests go to rank 0, its output to clients. It ends when rank 0 does,
after an answer to each client. Under a supervisor it outlives jobs: clients wait for the next one."""

import asyncio
import contextlib
import gc
import logging
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import uvicorn

from pipeinfer.cluster.watch.protocol import Limits
from pipeinfer.job.requests.body_prompts import BodyPrompts
from pipeinfer.job.serve.channel import Heartbeat, Listening
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.access import limited_protocol
from pipeinfer.server.app import Api
from pipeinfer.server.front import BACKLOG, CONTROL_BYTES, ProcessSetup
from pipeinfer.server.head_client import LINE_BYTES, HeadClient
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.prompting import Prompting

END_S = 0.7  # time after the last job for errors to clients with open requests, and to those that connect now
IDLE_S = 15.0  # after so long without a token one is requested, so that health is known
HERE = b"here"

COLLECT_AFTER = 50_000, 20, 50
"""Python's collector passes over the values of a large body again and again by default, which stops the service for
200 ms in all. A pass over as many takes some 3 ms."""


class Server(uvicorn.Server):
    """Leaves signals to rank 0. `on_start`: clients can connect."""

    on_start: Callable[[], object]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(control: int, port: int) -> None:
    """`control`: the socket to the owner of this process, `port`: the one to which clients connect. A pickled
    `ProcessSetup` is on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    process_setup: ProcessSetup = pickle.load(sys.stdin.buffer)
    logging.basicConfig(format="pipeinfer: server: %(message)s", level=logging.ERROR)
    asyncio.run(serve(process_setup, socket.socket(fileno=control), socket.socket(fileno=port)))


async def beat(head: HeadClient, every_s: float) -> None:
    """Tell rank 0 that this process does not stand still."""
    while True:
        head.tell(Heartbeat())
        await asyncio.sleep(every_s)


async def read_job(head: HeadClient, link: socket.socket) -> None:
    """Take the messages of one job's rank 0 until it is gone."""
    reader, writer = await asyncio.open_connection(sock=link, limit=LINE_BYTES)
    head.writer = writer
    if head.is_listening:
        head.tell(Listening())
    try:
        await head.run(reader)
    finally:
        if head.is_followed and head.writer is writer:  # else the next job's is read already
            head.recover()


async def read_jobs(head: HeadClient, control: socket.socket) -> None:
    """Take the messages of each job's rank 0 whose link the owner sends, until no job follows."""
    loop, messages = asyncio.get_running_loop(), asyncio.Queue[tuple[bytes, list[int]]]()
    reading: asyncio.Task[None] | None = None
    control.setblocking(False)

    def receive() -> None:
        try:
            messages.put_nowait(socket.recv_fds(control, CONTROL_BYTES, 1)[:2])
        except ConnectionError:  # closed with an answer unread
            messages.put_nowait((b"", []))

    loop.add_reader(control, receive)
    while (received := await messages.get())[0]:
        message, links = received
        if head.writer:  # of a job that is lost, whose rank 0 may still be there
            head.writer.close()
        if links:
            reading = asyncio.create_task(read_job(head, socket.socket(fileno=links[0])))
            if not head.is_followed:
                reading.add_done_callback(lambda _: messages.put_nowait((b"", [])))
        else:
            head.recover(message.decode(errors="replace"))
            with contextlib.suppress(OSError):  # the owner has ended meanwhile
                control.send(HERE)
    loop.remove_reader(control)
    if reading and not head.is_followed:  # a rank 0 that was killed may have sent more than was read
        await asyncio.wait({reading}, timeout=END_S)


async def serve(process_setup: ProcessSetup, control: socket.socket, port: socket.socket) -> None:
    """Until no job follows."""
    http, setup = process_setup.http, process_setup.setup
    metrics = Metrics(http.alias or setup.model.name, setup.n_ctx)
    head = HeadClient(setup.parallel + http.n_queue, metrics, is_followed=process_setup.is_followed)
    metrics.add_gauges(head.choices)
    info, tokenizer = read_model_info(setup.model), Tokenizer(setup.model)
    info = info.with_factors(setup.limit > info.n_ctx_short)
    options = replace(setup.text, now_s=0.0), setup.context  # a service may outlive the day of its start
    prompting = Prompting(BodyPrompts(*options, info, tokenizer, setup.limit, setup.share, lambda line: None))
    app = Api(http, setup, head, prompting, metrics).app(port.getsockname()[0])
    protocol = limited_protocol(http.n_connections, http.timeout_s)
    tls: dict[str, Any] = {"ssl_keyfile": http.ssl_key_file, "ssl_certfile": http.ssl_cert_file}
    without: dict[str, Any] = {"ws": "none", "lifespan": "off", "log_config": None, "access_log": False}
    server = Server(uvicorn.Config(app, http=protocol, backlog=BACKLOG, server_header=False, **tls, **without))
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    server.on_start = head.listen
    serving = asyncio.create_task(server.serve(sockets=[port]))
    running = asyncio.create_task(read_jobs(head, control))
    beating = asyncio.create_task(beat(head, Limits.of(setup.rank_timeout_s).beat_s))
    trying = asyncio.create_task(head.try_out(tokenizer.encode(" ")[-1:] or [0], IDLE_S))
    await asyncio.wait({serving, running}, return_when=asyncio.FIRST_COMPLETED)
    beating.cancel()
    trying.cancel()
    if not running.done():  # it could not start: an exception ends the process, which rank 0 notices
        await serving
        return
    head.give_up()
    if not head.closing_s:
        await asyncio.sleep(END_S)
    server.should_exit = True
    await asyncio.wait({serving}, timeout=head.closing_s or END_S)
    for connection in list(server.server_state.connections):
        connection.transport.abort()  # a client that has not read by now does not read
    await serving
