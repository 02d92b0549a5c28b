"""Blocks of texts whose cells every stage keeps, on its disk or in memory: which a text consists of, which the
stages store, and which they read back for a request. Knows keys and runs; no file and no model.

A block is one of a prompt that is evaluated in blocks (see `blocks`), or up to BLOCK rows that are not. Its key is a
hash of the request's adapters, of all tokens up to its end and of how their rows are cut, so that cells of the same key
have the same bits.

A text can be read back from its first block on. Of a text for which there is no room only the first blocks are stored,
and a text's last blocks are removed before its first.

Where sequences do not rewind the stages store states: all that a sequence has at the end of a block of its prompt, with
the key of that block. A state is taken right behind the run that ends there, before the run is heard of; a stage that
has not evaluated it stores nothing.

Two runs without rows read blocks back. With the first each stage begins to read, with the second it waits for the end;
the verdict of the second has the number of blocks that every stage could read. They become the cells of a finished
request, with which others start as with any other's."""

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from pipeinfer.core.blocks import BLOCK, LARGEST, Span
from pipeinfer.core.levels import InFlightRun, Level
from pipeinfer.core.requests import Finish, Request
from pipeinfer.core.runs import BlockKey, KvOp, OpKind, Verdict
from pipeinfer.core.speculator import Speculator

IN_BLOCK, BY_ROW = b"b", b"r"
STATE_ROWS = 4096  # of a prompt, between its states; one more is near its end


class StoredBytes(NamedTuple):
    """What a block takes at a stage at most: bytes for itself, and for each of its rows."""

    block: int
    row: int


class Room(NamedTuple):
    """For blocks at each stage. `of_blocks`: where they are largest."""

    n_bytes: int
    of_blocks: StoredBytes

    def has(self, n_blocks: int, n_rows: int) -> bool:
        return n_blocks * self.of_blocks.block + n_rows * self.of_blocks.row <= self.n_bytes


class TextBlock(NamedTuple):
    """Positions [start, end) of a text."""

    start: int
    end: int
    key: BlockKey


class TextBlocks:
    """The blocks of a request's text, in order. `spans`: of a prompt read in blocks. `end`: of the last one so far.
    `stored`: those that the stages have; `is_full`: they may have no more."""

    def __init__(self, request: Request, spans: Sequence[Span]) -> None:
        self.end, self._request, self._spans = 0, request, spans
        self.stored, self.is_full = list[TextBlock](), False
        self._digest = b"" if request.adapters is None else repr(request.adapters).encode()

    def next(self, n_tokens: int) -> TextBlock | None:
        """The next block, if it is within the first `n_tokens`."""
        start, kind = self.end, BY_ROW
        span = next((span for span in self._spans if start < span.end), None)
        end = start + BLOCK
        if span and start < span.start:
            end = min(end, span.start)
        elif span:
            kind, end = IN_BLOCK, end if end + BLOCK <= span.end else span.end
        if end > n_tokens:
            return None
        tokens = np.array(self._request.tokens[start:end], "<i4").tobytes()
        self.end, self._digest = end, blake2b(self._digest + kind + tokens, digest_size=16).digest()
        return TextBlock(start, end, BlockKey(*struct.unpack("<qq", self._digest)))


@dataclass(slots=True)
class _Reading:
    """Blocks that are being read back for a request. `waiting`: requests that are not opened before."""

    request: Request
    blocks: list[TextBlock]
    waiting: set[int]


class StoredBlocks:
    """`levels`: the target first, of which all layers see all cells. `keys`: of the blocks that every stage has; one
    may have lost some. `n_cached`: tokens of a request that need not be evaluated in any case. `retain`: takes a
    finished request with which others can start; `forget_oldest`: frees one, False if there is none. `room`: for a
    text. `on_full`: called with a number of tokens, the first time that a text has more than there is room for.
    `read_only`: nothing is stored."""

    def __init__(
        self,
        levels: Sequence[Level],
        speculator: Speculator,
        keys: Collection[BlockKey],
        n_cached: Callable[[Request], int],
        retain: Callable[[Request], None],
        forget_oldest: Callable[[], bool],
        room: Room,
        on_full: Callable[[int], object],
        read_only: bool = False,
    ) -> None:
        self._levels, self._target, self._speculator = levels, levels[0], speculator
        self._keys = dict.fromkeys(keys)  # the one that was used last comes last
        self._n_keys = max(1, 2 * room.n_bytes // (room.of_blocks.block + BLOCK * room.of_blocks.row))
        self._n_cached, self._retain, self._forget_oldest = n_cached, retain, forget_oldest
        self._has_states = not self._target.pool.rewinds
        self._room, self._on_full, self._read_only = room, on_full, read_only
        self._state_ends: dict[int, int] = {}  # of open requests, where the newest state was taken
        self._texts: dict[int, TextBlocks] = {}  # of open requests
        self._readings: dict[int, _Reading] = {}
        self._n_readings = 0

    def hear(self, flight: InFlightRun, verdict: Verdict) -> bool:
        """Take in a verdict of the target; whether it has no answers."""
        if flight.reading:
            self._end_reading(self._readings.pop(flight.reading), flight.reading, verdict.tokens[0])
        elif not verdict.cancelled:
            for part in flight.parts:
                self._store(part.request)
        return flight.reading is not None

    # -- storing

    def _store(self, request: Request) -> None:
        """Let the stages store what they have evaluated of an open request since the last call."""
        if self._read_only or self._has_states:
            return
        text, there = self._text(request), list[TextBlock]()
        if text.is_full or self._target.pool.placed_end(request.id) - text.end < BLOCK or request.is_scored:
            return
        n_settled = self._target.n_settled(request)
        while (block := text.next(n_settled)) and self._fits(text, block):
            text.stored.append(block)
            if block.key in self._keys:
                there.append(block)
                continue
            self._note(block.key)
            self._target.pool.store(request.id, *block)
        self._use(there)  # so that what is stored now does not take their place

    def _fits(self, text: TextBlocks, block: TextBlock) -> bool:
        """Whether there is room for the text with a further block."""
        if not self._room.has(len(text.stored) + 1, block.end):
            text.is_full = True
            self._on_full(block.start)
            self._on_full = lambda n_tokens: None
        return not text.is_full

    def _use(self, blocks: Sequence[TextBlock]) -> None:
        """Let the stages note a use of blocks, in their order."""
        for block in blocks:
            if block.key in self._keys:
                self._note(block.key)
        self._target.send_ops([KvOp(OpKind.USE, 0, key.high, key.low) for _, _, key in blocks], 0)

    def _note(self, key: BlockKey) -> None:
        """Keep the key as the newest, of no more than twice as many as a stage can have blocks: which of them it has
        removed is known only when they are read."""
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self._n_keys:
            del self._keys[next(iter(self._keys))]

    def sent(self, flight: InFlightRun) -> None:
        """Let the stages store the states that prompts have behind a run."""
        if self._has_states and not self._read_only:
            for part in flight.parts:
                if part.n_context and not part.request.is_scored:
                    self._store_state(part.request)

    def _store_state(self, request: Request) -> None:
        text, last, end = self._text(request), None, self._target.pool.placed_end(request.id)
        while block := text.next(end):
            last = block
        n_new, n_left = end - self._state_ends.get(request.id, 0), self._target.n_context_left(request)
        is_due = n_new >= STATE_ROWS or (n_new >= BLOCK and 0 < n_left <= max(self._target.n_chunk, LARGEST))
        if last and last.end == end and is_due:
            self._state_ends[request.id] = end
            if last.key not in self._keys:
                self._note(last.key)
                self._target.pool.store(request.id, 0, end, last.key)

    def _text(self, request: Request) -> TextBlocks:
        """Of an open request."""
        if (text := self._texts.get(request.id)) is None:
            text = self._texts[request.id] = self._blocks_of(request)
        return text

    def end(self, request: Request) -> None:
        """Store the rest of an open request that is about to be closed."""
        self._store(request)
        text = self._texts.pop(request.id, None)
        self._state_ends.pop(request.id, None)
        self._target.send_ops(self._target.pool.take_pending(), 0)  # there may be no further run
        self._use(text.stored[::-1] if text else ())

    def _blocks_of(self, request: Request) -> TextBlocks:
        return TextBlocks(request, (request.spans or ()) if self._target.blocks else ())

    # -- reading back

    def is_awaited(self, request: Request) -> bool:
        """Whether blocks are being read back with which the request, which is not open, can start."""
        return any(request.id in reading.waiting for reading in self._readings.values())

    def request(self, request: Request) -> None:
        """Let the stages read back the blocks with which the request starts, if the caches have less of its text."""
        if request.is_scored or not (blocks := self._stored(request)):
            return
        if blocks[-1].end < self._n_cached(request) + BLOCK:
            return
        for reading in self._readings.values():
            if blocks[-1] in reading.blocks:
                reading.waiting.add(request.id)
                return
        self._n_readings += 1
        self._readings[self._n_readings] = _Reading(request, blocks, {request.id})
        ops = [KvOp(OpKind.READ, self._n_readings, key.high, key.low) for _, _, key in blocks]
        self._target.send_ops(ops, 0)
        self._target.send_ops([KvOp(OpKind.JOIN, self._n_readings)], self._n_readings)

    def _end_reading(self, reading: _Reading, number: int, n_blocks: int) -> None:
        """Every stage could read its first `n_blocks`: let them be cells, if there is room."""
        request, blocks = reading.request, reading.blocks[:n_blocks]
        for block in reading.blocks[n_blocks:]:
            self._keys.pop(block.key, None)
        n_tokens = blocks[-1].end if blocks else 0
        if not (blocks and self._make_room(n_tokens)):
            self._target.send_ops([KvOp(OpKind.LOAD, number, last=0)], 0)
            return
        tokens, how = request.tokens[:n_tokens], (request.sampling, request.n_ctx)
        source = Request(-number, tokens, 0, *how, spans=request.spans, adapters=request.adapters)
        source.finish, source.n_retained = Finish.STOPPED, n_tokens
        self._target.pool.load(source.id, number, n_tokens)
        for level in self._levels[1:]:
            level.pool.open(source.id)
            level.pool.retain(source.id, 0)
        self._speculator.hold(source)
        self._retain(source)

    def _stored(self, request: Request) -> list[TextBlock]:
        """The first blocks of its text that were stored, or the last one with a state. Its root is always evaluated."""
        text, blocks = self._blocks_of(request), list[TextBlock]()
        n_most = min(len(request.tokens) - 1, self._target.pool.n_cells)
        while block := text.next(n_most):
            if block.key in self._keys:
                blocks = [block] if self._has_states else [*blocks, block]
            elif not self._has_states:
                break
        return blocks

    def _make_room(self, n_tokens: int) -> bool:
        """Whether there is room for a text of so many tokens; other finished requests make room, where that helps."""
        pool = self._target.pool
        while not (self._has_sequences and self._n_cells >= n_tokens):
            stays_parked = pool.parked and pool.has_nodes and self._n_cells < n_tokens
            if stays_parked or not self._speculator.has_heard or not self._forget_oldest():
                return False
        if pool.n_free_cells < n_tokens:
            pool.compact()
        return True

    @property
    def _has_sequences(self) -> bool:
        return all(level.pool.n_free for level in self._levels) and self._speculator.can_open

    @property
    def _n_cells(self) -> int:
        """Free cells, with those that packing frees."""
        pool = self._target.pool
        return pool.n_free_cells + (pool.n_parked if pool.can_compact else 0)
