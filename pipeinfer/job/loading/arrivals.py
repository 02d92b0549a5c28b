"""Layers for ranks whose hosts lack a model's file: from rank 0, once, before anything loads.

They go through the slice cache where there is one: what lies there, of the file that rank 0 has, is not sent.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeinfer.cluster.assignment import StagePlan
from pipeinfer.cluster.messages.chunked_transfer import receive_chunks, send_chunks
from pipeinfer.cluster.transport import Link
from pipeinfer.errors import UserError
from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.placement.job_plan import JobPlan, ModelFile
from pipeinfer.job.process.complain import complain
from pipeinfer.models.gguf.head import OWN_HEAD
from pipeinfer.models.gguf.model_info import ModelInfo, part_paths, read_model_info
from pipeinfer.models.gguf.remote import RemoteModel, What, contents
from pipeinfer.models.gguf.skeleton import Skeleton, take_skeleton
from pipeinfer.models.text.vocabulary_file import VocabularyFile
from pipeinfer.outputs import temporary_folder

if TYPE_CHECKING:
    from pipeinfer.observe.progress import ProgressBar

TARGET = -1
"""In the place of a draft's number."""


class Want(NamedTuple):
    """What a rank needs of a model: `number`, of a draft or TARGET."""

    number: int
    what: What
    first: int
    last: int
    n_bytes: int


class StreamFeed:
    """A Feed of the bytes that another rank sends."""

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


def fetch_layers(context: Context, plan: JobPlan) -> None:
    """Receive the layers that this rank hosts and has no file of, into `context.arrived`. Collective.

    Raises UserError when something could not be read, sent or written, once all ranks are through.
    """
    link = context.link
    if link.size == 1 or not plan.send_layers:
        return
    missing = link.all_gather(_missing(context, plan))
    if any(missing):
        skeletons = _share_skeletons(link, plan, sorted(set(chain(*missing))))
        _Fetching(context, plan, skeletons).run(missing)


def _missing(context: Context, plan: JobPlan) -> list[int]:
    """The models that this rank hosts and whose files are not on its host."""
    return [number for number in _hosted(context, plan) if not all(map(os.path.exists, _files(plan, number)))]


def _files(plan: JobPlan, number: int) -> list[Path]:
    path = model_file(plan, number).path
    return part_paths(plan.model.path if path == OWN_HEAD else path)


def _hosted(context: Context, plan: JobPlan) -> dict[int, StagePlan]:
    index = plan.assignment.stage_of(context.rank)
    own = {} if index is None else {TARGET: plan.assignment.stages[index]}
    return own | plan.assignment.drafts_on(context.rank)


def model_file(plan: JobPlan, number: int) -> ModelFile:
    """The target's, or that of the draft of this number."""
    return plan.model if number == TARGET else plan.drafts[number]


def _share_skeletons(link: Link, plan: JobPlan, numbers: list[int]) -> dict[int, Skeleton]:
    """Rank 0's, of these models. Raises UserError, on all ranks, when it cannot read one."""
    return link.agree(lambda: {each: take_skeleton(_read(model_file(plan, each))) for each in numbers})


def _read(file: ModelFile) -> ModelInfo:
    """On rank 0. Raises UserError when it is not the file of which the plan was made."""
    info = read_model_info(file.path)
    if (info.fingerprint, info.states) != (file.fingerprint, file.states):
        raise UserError(f"{file.path} was changed while the job started; start again")
    return info


class _Fetching:
    """One rank's part of sending and receiving, which goes on to the end whatever fails."""

    def __init__(self, context: Context, plan: JobPlan, skeletons: dict[int, Skeleton]) -> None:
        self.context, self.plan, self.skeletons, self.link = context, plan, skeletons, context.link
        self.cache, self.error, self.failed = plan.slice_cache, "", set[int]()
        self.progress: ProgressBar | None = None

    def run(self, missing: list[list[int]]) -> None:
        """`missing`: the models that each rank lacks."""
        link = self.link
        own: dict[int, RemoteModel] = {}
        with ExitStack() as stack:
            with self._noting():
                folder = stack.enter_context(temporary_folder())
                for number in missing[link.rank]:
                    with self._noting():
                        own[number] = self._put_up(number, folder)
            wants = link.all_gather([want for number, model in own.items() for want in self._wants(number, model)])
            for rank, its in enumerate(wants):
                if link.rank == 0 and its:
                    self._announce(rank, its)
                for want in its:
                    with self._noting():
                        if link.rank == 0:
                            self._send(rank, want)
                        elif link.rank == rank:
                            self._receive(own[want.number], want)
                if self.progress:
                    self.progress.close()
            for number in own.keys() - self.failed:
                with self._noting():
                    self.context.arrived[number] = own[number].finish()
        if self.error:
            raise UserError(self.error)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self.error = self.error or str(error)

    def _put_up(self, number: int, folder: Path) -> RemoteModel:
        own, place = _hosted(self.context, self.plan)[number], folder / str(number)
        place.mkdir()

        def notice(line: str) -> None:
            complain(f"rank {self.link.rank} ({socket.gethostname()}): {line}")

        model = RemoteModel(self.skeletons[number], place, own.first, own.last, self.cache, notice)
        if number == TARGET and own.last == model.info.n_layer:
            self.context.vocabulary = VocabularyFile(model.info.paths[0])
        return model

    def _wants(self, number: int, model: RemoteModel) -> list[Want]:
        first, last = model.first, model.last
        return [Want(number, what, first, last, contents(model.info, what, first, last)[0]) for what in model.wants()]

    def _receive(self, model: RemoteModel, want: Want) -> None:
        feed = StreamFeed(receive_chunks(self.link, 0, want.n_bytes))
        try:
            model.take(want.what, feed)
        except UserError as error:
            self.failed.add(want.number)
            self.error = self.error or str(error)
        feed.drop()  # another job may have put into the cache what was wanted

    def _announce(self, rank: int, wants: Sequence[Want]) -> None:
        from pipeinfer.observe.progress import transfer_bar  # draws: only rank 0 pays for importing them
        from pipeinfer.observe.report import stderr_console
        from pipeinfer.sizes import size_text

        host, n_bytes = self.plan.hosts[rank].name, sum(want.n_bytes for want in wants)
        files = ", ".join(sorted({str(model_file(self.plan, want.number).path) for want in wants}))
        kept = "" if self.cache else "; --slice-cache DIR keeps it there for the next time"
        complain(f"rank {rank} ({host}) has no {files}: {size_text(n_bytes)} go there{kept}")
        self.progress = transfer_bar(stderr_console(), CLOCK, f"to rank {rank}", n_bytes)

    def _send(self, rank: int, want: Want) -> None:
        assert self.progress
        send_chunks(self.link, rank, _pieces(model_file(self.plan, want.number), want), self.progress.advance)


def _pieces(file: ModelFile, want: Want) -> Iterator[bytes | memoryview]:
    """Raises UserError for any fault while they are read, so that the other rank gets the error."""
    try:
        yield from contents(_read(file), want.what, want.first, want.last)[1]
    except OSError as error:
        raise UserError(f"the model cannot be read any more: {error.strerror}; start again") from None
