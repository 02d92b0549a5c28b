"""One model that judges nodes, the target or a draft: its pipeline, its KV sequences, its runs in flight. Knows rows,
sequences and runs; no policy, no model and no MPI."""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from pipeinfer.core.blocks import Span
from pipeinfer.core.interfaces import Pipeline
from pipeinfer.core.requests import Prefix, Request
from pipeinfer.core.runs import MAX_OPS, KvOp, Opening, OpKind, Row, Run
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.tree import Node, State
from pipeinfer.core.types import POSITION_END

NO_ROWS: Set[int] = frozenset()
Requests = Sequence[Request]


@dataclass(slots=True, eq=False)
class RequestSlice:
    """What a run carries of a request: its next `n_context` committed tokens, then nodes, parents before children."""

    request: Request
    n_context: int
    nodes: Sequence[Node]
    has_root: bool  # as the first of its nodes
    span: Span | None = None  # the context is whole blocks of it, see `blocks`
    widths: Mapping[Node, int] | None = None  # of a draft: how many guesses are wanted after each node
    scored: bool = False  # answers are wanted for the context: log-probabilities of the tokens after its rows
    first: int = 0  # the first node's row in the run, right after those of the context
    start: int = 0  # the position of its context's first row
    n_branches: int = 0  # nodes that got a new sequence
    pruned: Set[int] = NO_ROWS  # rows of the run that the stages were told to leave out

    @property
    def n_rows(self) -> int:
        return self.n_context + len(self.nodes)

    @property
    def committed(self) -> bool:
        """Whether it carries committed tokens, without which the request cannot go on; the root is one."""
        return self.n_context > 0 or self.has_root

    @property
    def is_single(self) -> bool:
        """Whether it is a run by itself, uncut."""
        return self.span is not None or (self.scored and self.n_context > 0)

    @property
    def dead(self) -> bool:
        """Whether nobody needs its cells or answers. Nodes accepted since are context of what follows."""
        return len(self.dead_rows()) == self.n_rows

    def dead_rows(self) -> set[int]:
        """Rows of the run that nobody needs any more."""
        if self.request.finish:
            return set(range(self.first - self.n_context, self.first + len(self.nodes)))
        return {row for row, node in enumerate(self.nodes, self.first) if node.state is State.DEAD}

    @property
    def committed_start(self) -> int:
        """The first position of a committed token among its rows; POSITION_END if there is none."""
        if self.n_context:
            return self.start
        return min((node.position for node in self.nodes if node.state is State.RETIRED), default=POSITION_END)

    def n_wanted_at(self, position: int) -> int:
        """`n_wanted` of a committed token's row, see `Row`."""
        prompt = self.request.prompt
        return -1 - prompt[position + 1] if self.scored and position + 1 < len(prompt) else 0

    def n_wanted(self, node: Node) -> int:
        """How many guesses are wanted after one of its nodes; 1 where the target answers."""
        return self.widths[node] if self.widths else 1

    def note_scores(self, tokens: Sequence[int]) -> None:
        """Give the request the answers to its context's rows. `tokens`: the answers to all rows of the run."""
        self.request.scores.update(enumerate(tokens[self.first - self.n_context : self.first], self.start + 1))

    def cut(self, n_context: int, n_nodes: int) -> "RequestSlice":
        """At most so many of its committed tokens and nodes."""
        if n_context == self.n_context and n_nodes == len(self.nodes):
            return self
        has_root = self.has_root and n_nodes > 0
        return RequestSlice(self.request, n_context, self.nodes[:n_nodes], has_root, self.span, scored=self.scored)


@dataclass(slots=True, eq=False)
class InFlightRun:
    """A run between submission and verdict."""

    run_id: int
    parts: list[RequestSlice]
    n_rows: int
    n_context: int
    n_before: int  # tokens before a request's first row, the mean over the rows
    sent_s: float = 0.0  # on the engine's clock
    cost_s: float = 0.0  # expected seconds in the slowest stage
    queued: bool = False  # behind a prompt, as its last token is
    dead: bool = False  # nobody needs any of its rows
    cancelled: bool = False  # and the stages were told
    whole: bool = True  # every stage evaluates all of its rows
    reading: int | None = None  # of a run without rows: the reading of blocks that it ends; 0: none. None: no event


@dataclass(eq=False)
class Level:
    """Makes runs of nodes and context, submits them, and keeps what is in flight. `n_chunk`: committed tokens a run at
    most. `n_rows`: nodes a run at most. `cancel`: tell the stages which runs and rows are dead; off for ablation
    studies. `blocks`: prompts are evaluated in blocks, see `core.blocks`."""

    pipeline: Pipeline[Any]
    pool: SequencePool
    n_chunk: int = 128
    n_rows: int = 64
    cancel: bool = True
    blocks: bool = False

    def __post_init__(self) -> None:
        self._next_run_id = 1
        self._flights: dict[int, InFlightRun] = {}
        self._of_request: dict[int, dict[int, InFlightRun]] = {}
        self._opens: dict[int, Opening] = {}  # of requests that no run has carried yet
        self._at_stages: set[int] = set()  # ids of requests that the stages know
        self._closes: list[KvOp] = []
        self._n_dead = 0  # dead runs in flight

    # -- requests

    def open(self, request: Request) -> None:
        """Open a request, with the cells of its `prefix_hit` that were evaluated here."""
        prefix = request.prefix_hit
        self.pool.open(request.id, prefix and prefix._replace(n_tokens=self.n_shared(prefix)))
        self._of_request[request.id] = {}
        if request.id not in self._at_stages:
            self._opens[request.id] = Opening(request.sampling, len(request.prompt), request.adapters)

    def close(self, request: Request) -> list[InFlightRun]:
        """Free all but what the request retains; unfinished it may be opened again. Returns the runs now dead."""
        n_retained, given_up = min(request.n_retained, self.n_settled(request)), self._give_up(request)
        if request.n_retained:
            self.pool.retain(request.id, n_retained)
        else:
            self.pool.close(request.id)
        del self._of_request[request.id]
        if request.finish:
            self.end(request)
        return given_up

    def end(self, request: Request) -> None:
        """The request, which is not open, has finished: the stages are told to forget it."""
        if self._opens.pop(request.id, None) is None and request.id in self._at_stages:
            self._at_stages.remove(request.id)
            self._closes.append(KvOp(OpKind.CLOSE, request.id))

    def n_shared(self, prefix: Prefix) -> int:
        """Tokens of the prefix that another request can share here."""
        source = prefix.source
        n_there = self.n_settled(source) if source.id in self._of_request else self.pool.placed_end(source.id)
        return min(prefix.n_tokens, n_there)

    def has_room(
        self, request: Request, prefix: Prefix | None, opened: Requests, retained: Requests, ahead: int
    ) -> bool:
        """Whether there are cells for the text of one more request and `ahead` tokens more, beside the same for open
        requests and what is retained. The `prefix` that it starts with counts once."""
        n_shared = 0
        others = {each.id: each.n_retained for each in retained}
        if prefix:
            n_shared = self.n_shared(prefix)
            others.setdefault(prefix.source.id, n_shared)
            if not (self.pool.rewinds or prefix.moves):  # it gets cells of its own, at once
                if n_shared > self.pool.n_free_cells:
                    return False
                n_shared = 0
        return self.n_reserved(opened, others, ahead) + request.n_soon(ahead) - n_shared <= self.pool.n_cells

    def n_reserved(self, opened: Requests, others: Mapping[int, int], ahead: int) -> int:
        """Distinct cells of open requests, with `ahead` tokens more each, and of the first tokens of `others`."""
        n_to_come = sum(each.n_soon(ahead) - self.pool.placed_end(each.id) for each in opened)
        return n_to_come + self.pool.n_held({**others, **{each.id: each.n_tokens_most for each in opened}})

    def n_settled(self, request: Request) -> int:
        """The request's first tokens that every stage has evaluated; 0 where they cannot be used without later ones."""
        flying = (part for flight in self._of_request[request.id].values() for part in flight.parts)
        starts = [part.committed_start for part in flying if part.request is request]
        n_settled = min(self.pool.placed_end(request.id), len(request.tokens), *starts)
        return n_settled if self.pool.can_retain(request.id, n_settled) else 0

    # -- what a request wants

    def n_inflight(self, request: Request) -> int:
        """Runs of the request in flight that are not dead."""
        flights = self._of_request[request.id]
        return sum(not flight.dead for flight in flights.values()) if self._n_dead else len(flights)

    def n_dead(self, request: Request) -> int:
        return len(self._of_request[request.id]) - self.n_inflight(request)

    def n_evaluated(self, request: Request) -> int:
        """Runs of the request in flight that the stages were not told to leave out."""
        return sum(not flight.cancelled for flight in self._of_request[request.id].values())

    def n_context_left(self, request: Request) -> int:
        """Committed tokens below the root that were not sent here."""
        return request.tree.root.position - self.pool.placed_end(request.id)

    def reads_blocks(self, request: Request) -> bool:
        """Whether blocks of its prompt have yet to be sent."""
        return self.blocks and any(self.pool.placed_end(request.id) < span.end for span in request.spans or ())

    def next_context(self, request: Request, n_chunk: int) -> tuple[int, Span | None]:
        """How many committed tokens the next run may carry, and, if they are whole blocks, of which span: as many
        blocks as `n_chunk` rows hold, but at least one. Outside of spans a run may carry fewer."""
        n_left = self.n_context_left(request)
        start = self.pool.placed_end(request.id) if n_left else 0
        spans = request.spans if n_left and self.blocks else None
        span = next((span for span in spans or () if start < span.end), None)
        if span and start >= span.start:
            return span.chunk_end(start, 1 if request.is_scored else n_chunk) - start, span
        n_most = span.start - start if span else n_left
        return min(n_most, self.n_rows) if request.is_scored else n_most, None

    # -- runs

    def submit(self, parts: Sequence[RequestSlice]) -> InFlightRun | None:
        """Send what fits of the parts as one run; None if nothing does. Frees parked cells if that helps."""
        pool, run, sent = self.pool, Run(self._next_run_id, []), []
        if pool.n_parked and pool.can_compact and sum([part.n_rows for part in parts]) > pool.n_free_cells:
            pool.compact()
        n_free, n_context = pool.n_free_cells, 0
        for part in parts:
            if n_rows := self._place(part, run, n_free):
                n_free -= n_rows
                n_context += part.n_context
                sent.append(part)
                if part.request.id in self._opens:
                    run.opens[part.request.id] = self._opens.pop(part.request.id)
                    self._at_stages.add(part.request.id)
        if not sent:
            return None
        run.ops = [*self._closes, *pool.take_pending()]
        self._closes.clear()
        if (n_ahead := len(run.ops) - MAX_OPS) > 0:
            self.send_ops(run.ops[:n_ahead])
            del run.ops[:n_ahead]
        run.id, self._next_run_id, run.span = self._next_run_id, self._next_run_id + 1, sent[0].span
        flight = self._flights[run.id] = InFlightRun(run.id, sent, len(run.rows), n_context, run.n_before)
        for part in sent:
            self._of_request[part.request.id][run.id] = flight
        self.pipeline.submit(run)
        return flight

    def send_ops(self, ops: Sequence[KvOp], reading: int | None = None) -> None:
        """Send operations as runs without rows. `reading`: see InFlightRun."""
        for first in range(0, len(ops), MAX_OPS):
            run, self._next_run_id = Run(self._next_run_id, [], [*ops[first : first + MAX_OPS]]), self._next_run_id + 1
            self._flights[run.id] = InFlightRun(run.id, [], 0, 0, 0, whole=False, reading=reading)
            self.pipeline.submit(run)

    def _place(self, part: RequestSlice, run: Run, n_free: int) -> int:
        """Give what fits of the part rows of the run and some of `n_free` cells; returns how many. Nodes that do not
        fit are cut off, context is placed as a whole or not at all."""
        request, rows, nodes = part.request, run.rows, part.nodes
        if n_free and not part.n_context and len(nodes) == 1 and nodes[0].parent is None:
            root = nodes[0]  # by itself, as without guesses
            seq, part.first = self.pool.place_root(request.id, root), len(rows)
            n_wanted = part.n_wanted(root) if part.widths else 1
            rows.append(Row(request.id, root.token, root.position, (seq,), n_wanted))
            return 1
        if not part.n_context:
            nodes = part.nodes = self.pool.fitting(nodes)
        n_rows, start = part.n_rows, self.pool.placed_end(request.id)
        if not n_rows or n_rows > n_free:
            return 0
        placement = self.pool.place(request.id, part.n_context, nodes)
        part.start, part.first, part.n_branches = start, len(rows) + part.n_context, len(placement.leased)
        for position, seqs in enumerate(placement.seqs[: part.n_context], start):
            rows.append(Row(request.id, request.tokens[position], position, seqs, part.n_wanted_at(position)))
        for node, seqs in zip(nodes, placement.seqs[part.n_context :], strict=True):
            rows.append(Row(request.id, node.token, node.position, seqs, part.n_wanted(node)))
        return n_rows

    def poll(self) -> tuple[InFlightRun, Any] | None:
        """The next verdict that has come, if any, and its run, without the parts of requests closed since."""
        verdict = self.pipeline.poll() if self._flights else None
        if verdict is None:
            return None
        flight = self._flights.pop(verdict.run_id)
        self._n_dead -= flight.dead
        waiting = self._of_request
        flight.parts = [part for part in flight.parts if waiting.get(part.request.id, {}).pop(verdict.run_id, None)]
        assert flight.cancelled or not (verdict.cancelled and flight.parts), f"nobody cancelled run {flight.run_id}"
        return self.poll() if not flight.n_rows and flight.reading is None else (flight, verdict)

    @property
    def busy(self) -> bool:
        return bool(self._flights)

    def sent_s(self, run_id: int) -> float:
        """When a run was sent; -inf if it is not in flight."""
        return self._flights[run_id].sent_s if run_id in self._flights else -math.inf

    @property
    def n_flights(self) -> int:
        return len(self._flights)

    @property
    def useful_flights(self) -> Iterator[InFlightRun]:
        """Runs in flight that are not dead, the oldest first."""
        return (flight for flight in self._flights.values() if not flight.dead)

    @property
    def n_useful_flights(self) -> int:
        return len(self._flights) - self._n_dead

    # -- settling

    def settle(self, request: Request, path: Sequence[Node], prune: bool = True) -> list[InFlightRun]:
        """The request's root moved along `path`, from the old root to the new one; other branches are dead. Returns
        the runs that are dead now. `prune`: stages leave dead rows out of the others."""
        self.pool.settle(request.id, path)
        return self._give_up(request, prune) if self._of_request[request.id] else []

    def _give_up(self, request: Request, prune: bool = True) -> list[InFlightRun]:
        """Cancel the request's runs that are dead, and prune dead rows out of the others."""
        flying = [flight for flight in self._of_request[request.id].values() if not flight.dead]
        doomed = [flight for flight in flying if all(part.dead for part in flight.parts)]
        for flight in doomed:
            flight.dead, flight.cancelled, flight.whole = True, self.cancel, flight.whole and not self.cancel
        self._n_dead += len(doomed)
        if self.cancel:
            if doomed:
                self.pipeline.cancel([flight.run_id for flight in doomed])
            if prune:
                self._prune(request, [flight for flight in flying if not flight.dead])
        return doomed

    def _prune(self, request: Request, flights: Sequence[InFlightRun]) -> None:
        rows = {}
        for flight in flights:
            part = next(part for part in flight.parts if part.request is request)
            if dead := part.dead_rows() - part.pruned:
                part.pruned |= dead
                flight.whole = False
                rows[flight.run_id] = sorted(dead)
        if rows:
            self.pipeline.prune(rows)
