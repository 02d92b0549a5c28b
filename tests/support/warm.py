"""Ranks that do not start Python anew: a process that has imported all that jobs import is forked for each.

`python -m tests.support.warm PATH [torch]` is that process; it listens at PATH until its standard input ends. The
client, this file run with `-ISs` and the words PATH WORDS, takes the place of `python -m pipeinfer WORDS` under a
launcher: it sends its words, environment, folder and open files, forwards signals, and ends as the rank does. Most of
what a short job costs is imports.
"""

import array
import contextlib
import gc
import os
import select
import signal
import socket
import sys
from typing import NoReturn

FILES = ("PMI_FD", "HYDI_CONTROL_FD")  # variables that name a launcher's open file
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLEAR = 200  # above all numbers of files that a launcher uses


def ask(path: str, words: list[str]) -> int:
    """Let a rank run; its exit code, negative for a signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a rank to which they go
    files = [0, 1, 2, *sorted({int(os.environ[name]) for name in FILES if name in os.environ})]
    parts = [os.getcwd(), ",".join(map(str, files)), str(len(words)), *words]
    message = "\0".join([*parts, *map("=".join, os.environ.items())]).encode(errors="surrogateescape")
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
        link.sendmsg([len(message).to_bytes(4, "big")], [rights])
        link.sendall(message)
        pid = int.from_bytes(link.recv(4), "big")
        for number in FORWARDED:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        return int.from_bytes(link.recv(4), "big", signed=True)


def end_with(code: int) -> NoReturn:
    """As the process did that ended with this code."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(path: str, with_torch: bool) -> None:
    """Fork a rank for each client; a rank whose client dies is killed."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command does
    _import_all(with_torch)
    gc.collect()
    gc.freeze()  # else each rank's collector passes over all of it, and copies the pages
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    poll = select.poll()
    poll.register(0)
    poll.register(listener, select.POLLIN)
    ranks: dict[int, tuple[int, socket.socket]] = {}  # by the file of the process
    while True:
        for file, _ in poll.poll():
            if file == 0:
                return
            if file == listener.fileno():
                link, _ = listener.accept()
                if not (pid := os.fork()):
                    os.closerange(3, link.fileno())
                    _become_rank(link)
                link.sendall(pid.to_bytes(4, "big"))
                ranks[ended := os.pidfd_open(pid)] = pid, link
                poll.register(ended, select.POLLIN)
                poll.register(link, 0)  # its end alone
            elif file in ranks:
                pid, link = ranks.pop(file)
                poll.unregister(file)
                with contextlib.suppress(KeyError):
                    poll.unregister(link)
                os.close(file)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError), link:
                    link.sendall(code.to_bytes(4, "big", signed=True))
            else:
                poll.unregister(file)
                for pid in [pid for pid, link in ranks.values() if link.fileno() == file]:
                    os.kill(pid, signal.SIGKILL)


def _import_all(with_torch: bool) -> None:
    from importlib import import_module
    from pkgutil import walk_packages

    import pipeinfer
    from pipeinfer.job.planning.prepare import get_ready

    for module in walk_packages(pipeinfer.__path__, "pipeinfer."):
        if (with_torch or "torch" not in module.name) and not module.name.rpartition(".")[2].startswith("_"):
            import_module(module.name)
    import_module("tests.support.forked_sentinel")
    import_module("numpy.ma")  # for percentiles, which numpy imports when they are needed
    get_ready()


def _become_rank(link: socket.socket) -> NoReturn:
    """In the forked process: run the command that the client describes."""
    try:
        head, rights, _, _ = link.recvmsg(4, socket.CMSG_LEN(16 * 4))
        sent = array.array("i")
        for _, _, data in rights:
            sent.frombytes(data[: len(data) - len(data) % sent.itemsize])
        message, n_bytes = b"", int.from_bytes(head, "big")
        while len(message) < n_bytes:
            message += link.recv(n_bytes - len(message))
        folder, numbers, n_words, *parts = message.decode(errors="surrogateescape").split("\0")
        for index, file in enumerate(sent):
            os.dup2(file, CLEAR + index)
        os.closerange(3, CLEAR)
        for index, number in enumerate(map(int, numbers.split(","))):
            os.dup2(CLEAR + index, number)
        os.closerange(CLEAR, CLEAR + len(sent))
        os.chdir(folder)
        os.environ.clear()
        for name, _, value in (each.partition("=") for each in parts[int(n_words) :]):
            os.environ[name] = value
        sys.argv[1:] = parts[: int(n_words)]
        from pipeinfer.cli import main
        from tests.support.forked_sentinel import fork_sentinels

        fork_sentinels()
        main()
    except Exception:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    if __package__:  # by -m
        serve(sys.argv[1], sys.argv[2:] == ["torch"])
    else:
        end_with(ask(sys.argv[1], sys.argv[2:]))
