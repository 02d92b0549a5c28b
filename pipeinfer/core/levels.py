"""One model that judges nodes, the target or a larger draft: its pipeline, its KV sequences, its runs in flight.

Knows rows, sequences and runs; no policy, no model and no MPI.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeinfer.core.in_flight import InFlightRun, RequestSlice
from pipeinfer.core.interfaces import Pipeline
from pipeinfer.core.kv.blocks import Span
from pipeinfer.core.kv.sequences import SequencePool
from pipeinfer.core.requests import Prefix, Request
from pipeinfer.core.runs import MAX_OPS, KvOp, Opening, OpKind, Row, Run
from pipeinfer.core.tree import Node


class Level:
    """Places nodes and context, submits them as runs, and keeps what is in flight. Requests are opened and closed.

    `n_chunk`: committed tokens a run at most. `n_rows`: nodes a run at most. `cancel`: tell the stages of runs and rows
    that cannot count any more (off only for ablation studies). `blocks`: a prompt is cut where its length alone says.
    """

    def __init__(
        self,
        pipeline: Pipeline[Any],
        pool: SequencePool,
        *,
        n_chunk: int = 128,
        n_rows: int = 64,
        cancel: bool = True,
        blocks: bool = False,
    ) -> None:
        self.pipeline, self.pool, self.n_chunk, self.n_rows, self.cancel = pipeline, pool, n_chunk, n_rows, cancel
        self.blocks = blocks
        self._next_run_id = 1
        self._flights: dict[int, InFlightRun] = {}
        self._of_request: dict[int, dict[int, InFlightRun]] = {}
        self._opens: dict[int, Opening] = {}  # of requests that no run has carried yet
        self._known: set[int] = set()  # those that one has, until the stages hear that they have ended
        self._closes: list[KvOp] = []
        self._n_dead = 0  # of the runs in flight, those that were given up

    # -- requests

    def open(self, request: Request) -> None:
        """It begins with its `prefix_hit`, as far as that was evaluated here."""
        prefix = request.prefix_hit
        self.pool.open(request.id, prefix and prefix._replace(n_tokens=self.n_shared(prefix)))
        self._of_request[request.id] = {}
        if request.id not in self._known:
            self._opens[request.id] = Opening(request.sampling, len(request.prompt))

    def close(self, request: Request) -> list[InFlightRun]:
        """Free what the request holds, but for what it leaves; it may be opened again if it has not finished. Returns
        the runs that were given up."""
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
        """Nothing more comes of the request, which holds nothing."""
        if self._opens.pop(request.id, None) is None and request.id in self._known:
            self._known.remove(request.id)
            self._closes.append(KvOp(OpKind.CLOSE, request.id))

    def n_shared(self, prefix: Prefix) -> int:
        """How many of its tokens there are here for another request."""
        source = prefix.source
        n_there = self.n_settled(source) if source.id in self._of_request else self.pool.placed_end(source.id)
        return min(prefix.n_tokens, n_there)

    def has_room(
        self,
        request: Request,
        prefix: Prefix | None,
        opened: Sequence[Request],
        retained: Sequence[Request],
        ahead: int,
    ) -> bool:
        """Whether one more request has cells for its text so far and `ahead` tokens more, beside the same of the open
        ones and what is retained; the `prefix` that it begins with counts once."""
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

    def n_reserved(self, opened: Sequence[Request], others: Mapping[int, int], ahead: int) -> int:
        """Cells that open requests come to with `ahead` tokens more each, and first tokens of `others`; what several
        hold counts once."""
        n_to_come = sum(each.n_soon(ahead) - self.pool.placed_end(each.id) for each in opened)
        return n_to_come + self.pool.n_held({**others, **{each.id: each.n_tokens_most for each in opened}})

    def n_settled(self, request: Request) -> int:
        """How many of the request's tokens have cells that every stage is known to have evaluated; none where these
        cannot be had without others."""
        flying = (part for flight in self._of_request[request.id].values() for part in flight.parts)
        starts = [part.committed_start for part in flying if part.request is request]
        n_settled = min(self.pool.placed_end(request.id), len(request.tokens), *starts)
        return n_settled if self.pool.can_retain(request.id, n_settled) else 0

    # -- what a request wants, what there is room for

    def n_inflight(self, request: Request) -> int:
        """Runs of the request without a verdict, those that cannot count any more left out."""
        flights = self._of_request[request.id]
        return sum(not flight.dead for flight in flights.values()) if self._n_dead else len(flights)

    def n_evaluated(self, request: Request) -> int:
        """Runs of the request without a verdict, those that the stages were told to leave out left out."""
        return sum(not flight.cancelled for flight in self._of_request[request.id].values())

    def n_context_left(self, request: Request) -> int:
        """Certain tokens below the root that this level has yet to see."""
        return request.tree.root.position - self.pool.placed_end(request.id)

    def reads_blocks(self, request: Request) -> bool:
        """Whether blocks of its prompt have yet to be sent."""
        return self.blocks and any(self.pool.placed_end(request.id) < span.end for span in request.spans or ())

    def next_context(self, request: Request, n_chunk: int) -> tuple[int, Span | None]:
        """How many committed tokens the next run may carry, and, if they are whole blocks, of which span: as many as
        `n_chunk` holds, but one at least. Where they are not, a run may carry fewer."""
        n_left = self.n_context_left(request)
        start = self.pool.placed_end(request.id) if n_left else 0
        spans = request.spans if n_left and self.blocks else None
        span = next((span for span in spans or () if start < span.end), None)
        if span is None:
            return n_left, None
        return (span.start - start, None) if start < span.start else (span.chunk_end(start, n_chunk) - start, span)

    # -- runs

    def submit(self, parts: Sequence[RequestSlice]) -> InFlightRun | None:
        """Send what fits of the parts as one run; None, and nothing is sent, if that is nothing.

        Parked cells are won back before, if they are needed and that is possible.
        """
        pool, run, sent = self.pool, Run(self._next_run_id, []), list[RequestSlice]()
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
                    self._known.add(part.request.id)
        if not sent:
            return None
        run.ops[:0] = [*self._closes, *pool.take_pending()]
        self._closes.clear()
        self._send_ahead(run)
        run.id, self._next_run_id, run.span = self._next_run_id, self._next_run_id + 1, sent[0].span
        flight = self._flights[run.id] = InFlightRun(run.id, sent, len(run.rows), n_context, run.context)
        for part in sent:
            self._of_request[part.request.id][run.id] = flight
        self.pipeline.submit(run)
        return flight

    def _send_ahead(self, run: Run) -> None:
        """The run's first operations as runs without rows, if it has more than one carries."""
        while len(run.ops) > MAX_OPS:
            ahead = Run(self._next_run_id, [], run.ops[:MAX_OPS])
            del run.ops[:MAX_OPS]
            self._next_run_id += 1
            self._flights[ahead.id] = InFlightRun(ahead.id, [], n_rows=0, n_context=0, context=0, whole=False)
            self.pipeline.submit(ahead)

    def _place(self, part: RequestSlice, run: Run, n_free: int) -> int:
        """Give cells, of which so many are free, and rows of the run to what fits of the part; how many.

        Its nodes are cut down to what can be placed: trees get narrower. Context is placed as a whole or not at all.
        """
        if n_free and not part.n_context and len(part.nodes) == 1 and part.nodes[0].parent is None:
            root = part.nodes[0]  # by itself, as every request without guesses sends it
            seq, n_wanted = self.pool.place_root(part.request.id, root), part.n_wanted(root) if part.widths else 1
            part.first = len(run.rows)
            run.rows.append(Row(part.request.id, root.token, root.position, (seq,), n_wanted))
            return 1
        if not part.n_context:
            part.nodes = self.pool.fitting(part.nodes)
        n_rows = part.n_rows
        if not n_rows or n_rows > n_free:
            return 0
        request, rows, start = part.request, run.rows, self.pool.placed_end(part.request.id)
        placement = self.pool.place(request.id, part.n_context, part.nodes)
        part.start, part.n_branches = start, len(placement.leased)
        run.ops += placement.ops
        for position in range(start, start + part.n_context):
            rows.append(Row(request.id, request.tokens[position], position, (placement.context_seq,), n_wanted=0))
        part.first = len(rows)
        for node, seqs in zip(part.nodes, placement.node_seqs, strict=True):
            rows.append(Row(request.id, node.token, node.position, seqs, part.n_wanted(node)))
        return n_rows

    def poll(self) -> tuple[InFlightRun, Any] | None:
        """The next verdict, with the flight that it ends, if one has come: its parts are those of requests that have
        been open since it was sent."""
        verdict = self.pipeline.poll()
        if verdict is None:
            return None
        flight = self._flights.pop(verdict.run_id)
        self._n_dead -= flight.dead
        waiting = self._of_request
        flight.parts = [part for part in flight.parts if waiting.get(part.request.id, {}).pop(verdict.run_id, None)]
        assert flight.cancelled or not verdict.cancelled, f"run {verdict.run_id} was cancelled by nobody"
        return (flight, verdict) if flight.n_rows else self.poll()  # of operations alone nobody waits for an answer

    @property
    def busy(self) -> bool:
        return bool(self._flights)

    def is_inflight(self, run_id: int | None) -> bool:
        return run_id in self._flights

    def sent_s(self, run_id: int) -> float:
        """When a run was sent; if it is not in flight any more: long ago."""
        return self._flights[run_id].sent_s if run_id in self._flights else -math.inf

    @property
    def n_flights(self) -> int:
        return len(self._flights)

    @property
    def useful_flights(self) -> Iterator[InFlightRun]:
        """Those that were not given up, as they were sent."""
        return (flight for flight in self._flights.values() if not flight.dead)

    @property
    def n_useful_flights(self) -> int:
        return len(self._flights) - self._n_dead

    # -- settling

    def settle(self, request: Request, path: Sequence[Node]) -> list[InFlightRun]:
        """The request's root moved along `path` (old root first, new root last); all other branches are dead.

        Returns the runs that were given up.
        """
        self.pool.settle(request.id, path)
        return self._give_up(request) if self._of_request[request.id] else []

    def _give_up(self, request: Request) -> list[InFlightRun]:
        """Cancel the request's runs of which no row can count any more, and prune the dead rows out of the others."""
        flying = [flight for flight in self._of_request[request.id].values() if not flight.dead]
        doomed = [flight for flight in flying if all(part.dead for part in flight.parts)]
        for flight in doomed:
            flight.dead, flight.cancelled, flight.whole = True, self.cancel, flight.whole and not self.cancel
        self._n_dead += len(doomed)
        if self.cancel:
            if doomed:
                self.pipeline.cancel([flight.run_id for flight in doomed])
            self._prune(request, [flight for flight in flying if not flight.dead])
        return doomed

    def _prune(self, request: Request, flights: Sequence[InFlightRun]) -> None:
        rows = {}
        for flight in flights:
            part = next(part for part in flight.parts if part.request is request)
            if found := part.dead_rows() - part.pruned:
                part.pruned |= found
                flight.whole = False
                rows[flight.run_id] = sorted(found)
        if rows:
            self.pipeline.prune(rows)

    def audit(self, live: Mapping[int, Sequence[Node]]) -> None:
        """Raise AssertionError if a sequence leaks or a run is forgotten; `live`: live nodes of each open request."""
        self.pool.audit(live)
        assert set(self._of_request) == set(live), f"requests {set(live)} open, {set(self._of_request)} known"
        for request_id, flights in self._of_request.items():
            assert flights.items() <= self._flights.items(), f"request {request_id} waits for runs that have ended"
