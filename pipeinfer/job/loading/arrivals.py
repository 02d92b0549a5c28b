"""What rank 0 sends, once, before anything loads: layers for ranks whose hosts lack a model's file, and adapters, cut
as the target is cut.

Layers go through the slice cache where there is one: what it has of rank 0's file is not sent. All is sent in chunks of
bounded memory, each with a checksum, CRC-32, against faults: 6 GB/s, where SHA-256 has 1.8. Ranks trust each other.
"""

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeinfer.cluster.transport import Link, MpiRequest, Tag
from pipeinfer.cluster.wire import Buffer
from pipeinfer.errors import UserError
from pipeinfer.job.launch import CLOCK, Context
from pipeinfer.job.placement.job_plan import TARGET, JobPlan, ModelFile
from pipeinfer.job.process.streams import complain
from pipeinfer.models.gguf.adapter import ScaledAdapter, parse_content
from pipeinfer.models.gguf.model_info import OWN_HEAD, ModelHeaders, ModelInfo, part_paths, read_model_info
from pipeinfer.models.gguf.remote import Content, RemoteModel, contents
from pipeinfer.models.gguf.slice import SliceFile
from pipeinfer.models.text.tokenizer import VocabularyFile

if TYPE_CHECKING:
    from pipeinfer.observe.report import ProgressBar

CHUNK_BYTES = 8 << 20  # each end holds a few chunks
HEADER = np.dtype([("n_bytes", np.int64), ("checksum", np.uint32)])  # `n_bytes`: of the chunk, or END, FAILED
END, FAILED = 0, -1


def send_chunks(link: Link, rank: int, pieces: Iterable[bytes | memoryview], on_sent: Callable[[int], object]) -> None:
    """Send pieces to a rank that calls `receive_chunks`. `on_sent` is called with the size of each chunk. Raises the
    UserError that `pieces` raises, after a message to the other rank."""
    pending: deque[MpiRequest] = deque()

    def send(content: Buffer, n_bytes: int) -> None:
        header = np.array([(n_bytes, zlib.crc32(content.data))], HEADER).view(np.uint8)
        pending.append(link.comm.Isend(np.concatenate([header, content]), rank, Tag.STREAM))
        while len(pending) > (2 if n_bytes > 0 else 0):
            link.wait_awake(pending.popleft())

    nothing = np.empty(0, np.uint8)
    try:
        for piece in pieces:
            data = np.frombuffer(piece, np.uint8)
            for start in range(0, len(data), CHUNK_BYTES):
                content = data[start : start + CHUNK_BYTES]
                send(content, len(content))
                on_sent(len(content))
    except UserError:
        send(nothing, FAILED)
        raise
    send(nothing, END)


def receive_chunks(link: Link, rank: int, n_bytes: int) -> Iterator[memoryview]:
    """The chunks that this rank sends, each valid until the next one. Receives all, also if the caller stops before.
    Raises UserError when the other rank failed, or the bytes are not the `n_bytes` that were sent."""
    n_missing, is_whole, is_read = n_bytes, True, True
    request, buffer = _post(link, rank)
    while True:
        link.wait_awake(request)
        header = buffer[: HEADER.itemsize].view(HEADER)[0]
        content = buffer[HEADER.itemsize :][: max(0, header["n_bytes"])]
        if header["n_bytes"] <= END:
            break
        request, buffer = _post(link, rank)
        n_missing -= len(content)
        is_whole = is_whole and zlib.crc32(content.data) == header["checksum"]
        if is_whole and is_read:
            try:
                yield content.data
            except GeneratorExit:
                is_read = False
    if is_read and (header["n_bytes"] == FAILED or n_missing or not is_whole):
        raise UserError(f"what rank {rank} sends of the model is not whole; start again, and see what it says")


def _post(link: Link, rank: int) -> tuple[MpiRequest, Buffer]:
    buffer = np.empty(HEADER.itemsize + CHUNK_BYTES, np.uint8)
    return link.comm.Irecv(buffer, rank, Tag.STREAM), buffer


class ModelPart(NamedTuple):
    """A part of a model that a rank needs. `number`: of a draft, or TARGET."""

    number: int
    what: Content
    first: int
    last: int
    n_bytes: int


class StreamFeed:
    """The bytes that another rank sends, as a `Feed`."""

    def __init__(self, chunks: Iterator[memoryview]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def take(self, n_bytes: int) -> Iterator[memoryview]:
        while n_bytes:
            if not self._rest:
                self._rest = next(self._chunks)
            piece, self._rest = self._rest[:n_bytes], self._rest[n_bytes:]
            n_bytes -= len(piece)
            yield piece

    def finish(self) -> None:
        for chunk in self._chunks:
            raise AssertionError(f"{len(chunk)} bytes more than a slice has")

    def drop(self) -> None:
        """Receive and drop the rest, for which the sender waits."""
        for _ in self._chunks:
            pass


def fetch_layers(context: Context, plan: JobPlan) -> dict[int, SliceFile]:
    """Receive the layers that this rank hosts and has no file of, by the numbers of their models. Collective. Raises
    UserError when something could not be read, sent or written, once all ranks are through."""
    link = context.link
    if link.size == 1 or not plan.send_layers:
        return {}
    missing = link.all_gather(_missing(context, plan))
    if not any(missing):
        return {}
    numbers = sorted(set(chain(*missing)))
    headers = link.agree(lambda: {number: _read(plan.file(number)).read_headers() for number in numbers})
    return _Transfer(context, plan, headers).run(missing)


def _missing(context: Context, plan: JobPlan) -> list[int]:
    """The models that this rank hosts and whose files are not on its host."""
    paths = {number: plan.file(number).path for number in plan.parts(context.rank)}
    files = {number: part_paths(plan.model.path if path == OWN_HEAD else path) for number, path in paths.items()}
    return [number for number in files if not all(map(os.path.exists, files[number]))]


def _read(file: ModelFile) -> ModelInfo:
    """The header on rank 0. Raises UserError when the file has changed since the plan was made."""
    info = read_model_info(file.path)
    if (info.fingerprint, info.states) != (file.fingerprint, file.states):
        raise UserError(f"{file.path} was changed while the job started; start again")
    return info


class _Transfer:
    """One rank's part of sending and receiving, which goes on to the end whatever fails."""

    def __init__(self, context: Context, plan: JobPlan, headers: dict[int, ModelHeaders]) -> None:
        self.context, self.plan, self.headers, self.link = context, plan, headers, context.link
        self.cache, self.error, self.failed = plan.slice_cache, "", set[int]()
        self.progress: ProgressBar | None = None

    def run(self, missing: list[list[int]]) -> dict[int, SliceFile]:
        """This rank's slices by number. `missing`: the models that each rank lacks."""
        link = self.link
        models: dict[int, RemoteModel] = {}
        for number in missing[link.rank]:
            with self._collected():
                models[number] = self._open(number)
        parts = link.all_gather(
            [
                ModelPart(number, what, model.first, model.last, contents(model.info, what, model.first, model.last)[0])
                for number, model in models.items()
                for what in model.missing()
            ]
        )
        for rank, parts_there in enumerate(parts):
            if link.rank == 0 and parts_there:
                self._announce(rank, parts_there)
            for part in parts_there:
                with self._collected():
                    if link.rank == 0 and self.progress:
                        send_chunks(link, rank, _pieces(self.plan.file(part.number), part), self.progress.advance)
                    elif link.rank == rank:
                        self._receive(models[part.number], part)
            if self.progress:
                self.progress.close()
        slices: dict[int, SliceFile] = {}
        for number in models.keys() - self.failed:
            with self._collected():
                slices[number] = models[number].finish()
        if self.error:
            raise UserError(self.error)
        return slices

    @contextmanager
    def _collected(self) -> Iterator[None]:
        """The first UserError is kept, to be raised at the end."""
        try:
            yield
        except UserError as error:
            self.error = self.error or str(error)

    def _open(self, number: int) -> RemoteModel:
        part, headers = self.plan.parts(self.link.rank)[number], self.headers[number]
        notice = lambda line: complain(f"{self.context.name}: {line}")  # noqa: E731
        model = RemoteModel(headers, part.first, part.last, self.cache, notice)
        if number == TARGET and part.last == model.info.n_layer:
            self.context.vocabulary = VocabularyFile(headers.files[0])
        return model

    def _receive(self, model: RemoteModel, part: ModelPart) -> None:
        feed = StreamFeed(receive_chunks(self.link, 0, part.n_bytes))
        try:
            model.take(part.what, feed)
        except UserError as error:
            self.failed.add(part.number)
            self.error = self.error or str(error)
        feed.drop()  # another job may have put it into the cache

    def _announce(self, rank: int, parts: Sequence[ModelPart]) -> None:
        from pipeinfer.observe.report import ProgressBar, stderr_console  # only rank 0 pays for importing them
        from pipeinfer.text import size_text

        host, n_bytes = self.plan.hosts[rank].name, sum(part.n_bytes for part in parts)
        files = ", ".join(sorted({str(self.plan.file(part.number).path) for part in parts}))
        advice = "" if self.cache else "; --slice-cache DIR keeps it there for the next time"
        complain(f"rank {rank} ({host}) has no {files}: {size_text(n_bytes)} go there{advice}")
        self.progress = ProgressBar(stderr_console(), CLOCK, f"to rank {rank}", n_bytes, "MB")


def _pieces(file: ModelFile, part: ModelPart) -> Iterator[bytes | memoryview]:
    """Raises UserError for any fault while they are read, so that the other rank gets the error."""
    try:
        yield from contents(_read(file), part.what, part.first, part.last)[1]
    except OSError as error:
        raise UserError(f"the model cannot be read any more: {error.strerror}; start again") from None


def fetch_adapters(context: Context, plan: JobPlan) -> tuple[ScaledAdapter, ...]:
    """The adapters of this rank's layers of the target; none without such layers. Collective. Raises UserError on all
    ranks where a file cannot be read, or has changed since the plan was made."""
    if not plan.adapters:
        return ()
    link, stages, contents = context.link, plan.assignment.stages, dict[int, list[bytes]]()

    def cut() -> dict[int, list[int]]:
        for stage in stages:
            parts = [adapter.cut(stage.first, stage.last, plan.model.n_layer) for adapter, _ in plan.adapters]
            contents[stage.rank] = [part.content for part in parts]
        return {rank: list(map(len, parts)) for rank, parts in contents.items()}

    sizes = link.agree(cut)
    for rank in (stage.rank for stage in stages if stage.rank and link.rank in (0, stage.rank)):
        if link.rank:
            chunks = receive_chunks(link, 0, sum(sizes[rank]))
            data = b"".join(map(bytes, chunks))
            ends = np.cumsum([0, *sizes[rank]]).tolist()
            contents[rank] = [data[start:end] for start, end in pairwise(ends)]
        else:
            send_chunks(link, rank, contents.pop(rank), lambda n_bytes: None)
    mine = contents.get(link.rank, [])
    return tuple(
        ScaledAdapter(parse_content(adapter.path, content), scale)
        for content, (adapter, scale) in zip(mine, plan.adapters, strict=False)
    )
