"""Which llama.cpp sequence ids a tree path owns. Knows paths and ids, not tokens, models or MPI.

A sequence is the set of KV cells that one root-to-leaf path can see. The first child placed under a node inherits its
sequence; each further child leases a new one and copies the prefix, which is metadata only. Where layers keep states a
sequence cannot lose its newest rows alone, so every guess leases one. One pool serves one cache on all its stages."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeinfer.core.cells import Cells, Text, fork, give_up, n_held
from pipeinfer.core.requests import Prefix
from pipeinfer.core.runs import BlockKey, KvOp, OpKind
from pipeinfer.core.tree import Node, State, with_ancestors


@dataclass(slots=True)
class Path:
    """One leased sequence: cells [0, end), of which the last are those of `chain`, the nodes placed on it."""

    request_id: int
    end: int = 0
    chain: list[Node] = field(default_factory=list)


class Placement(NamedTuple):
    """The sequences of each row, and those that are newly leased."""

    seqs: list[tuple[int, ...]]
    leased: list[int]


class SequencePool:
    """Leases sequence ids [0, n_seq) and counts the cells in use. Operations wait for `take_pending`.

    `parked`: removed cells stay, out of sight, until all are packed, so that cells keep the order of evaluation.
    `rewinds`: sequences can lose their newest cells; without it every guess has a sequence of its own, `n_guesses` at
    most, so that the others are left for requests. `window`: tokens that the layers with the shortest attention window
    see; 0: all see everything. Unless `parked`, libllama takes cells outside of it for others."""

    def __init__(
        self, n_seq: int, n_cells: int, parked: bool = False, rewinds: bool = True, n_guesses: int = 0, window: int = 0
    ) -> None:
        self.n_seq, self.n_cells, self.parked, self.rewinds, self.n_guesses = n_seq, n_cells, parked, rewinds, n_guesses
        self.window = 0 if parked else window
        self.n_committed = self.n_parked = 0  # cells of committed tokens; out of sight until cells are packed
        self._free = deque(range(n_seq))
        self._paths: dict[int, Path] = {}
        self._seqs_of: dict[int, set[int]] = {}  # the sequences of each request
        self._texts: dict[int, Text] = {}
        self._seq_of: dict[Node, int] = {}
        self._retained: set[int] = set()  # requests that have ended and kept committed tokens
        self._pending: list[KvOp] = []

    # -- capacity

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_free_cells(self) -> int:
        return self.n_cells - self.n_committed - len(self._seq_of) - self.n_parked

    @property
    def _n_guesses_left(self) -> int:
        """Without `rewinds`: guesses that may still be placed. All sequences but one a request are theirs."""
        return self.n_guesses - (len(self._paths) - len(self._texts))

    def is_placed(self, node: Node) -> bool:
        return node in self._seq_of

    def placed_end(self, request_id: int) -> int:
        """How many of the request's committed tokens below the root have cells."""
        return self._texts[request_id].end

    def unplaced(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes and their ancestors that have no cells yet, parents first, the order of `nodes` kept."""
        return with_ancestors(nodes, self._seq_of)

    def fitting(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes that can be placed now, in their order. A node without a free sequence or cell is left out, and so
        are its descendants: trees get narrower before they get shorter."""
        chosen: dict[Node, None] = {}
        has_heir: set[Node] = set()
        n_new, n_cells = 0, self.n_free_cells
        n_free = self.n_free if self.rewinds else min(self.n_free, self._n_guesses_left)
        for node in nodes:
            if len(chosen) >= n_cells:
                break
            parent = node.parent
            if parent is not None:
                if parent not in chosen and parent not in self._seq_of:
                    continue
                inherits = parent not in has_heir and (parent not in self._seq_of or self._is_tip(parent))
                branches = not (inherits and self.rewinds)
                if branches and n_new >= n_free:
                    continue
                n_new += branches
                has_heir.add(parent)
            chosen[node] = None
        return list(chosen)

    def n_held(self, ends: Mapping[int, int]) -> int:
        """Distinct cells of these requests' first committed tokens, so many of each."""
        return n_held((self._texts[request_id].cells, end) for request_id, end in ends.items())

    @property
    def has_nodes(self) -> bool:
        """Whether anything but committed tokens below roots is placed."""
        return bool(self._seq_of)

    @property
    def can_compact(self) -> bool:
        """Whether packing would free cells. It keeps committed tokens alone, so no node may be placed."""
        return self.n_parked > 0 and not self._seq_of

    def compact(self) -> None:
        """Pack the cells, which frees the parked ones."""
        assert self.can_compact, f"{len(self._seq_of)} nodes placed, {self.n_parked} cells parked"
        owners: dict[Cells, int] = {}
        # what texts share is packed with the shortest of them
        for text in sorted(self._texts.values(), key=lambda text: (text.end, text.seq)):
            for cells in text.cells.path():
                if (owner := owners.setdefault(cells, text.seq)) != text.seq:  # it has all below, too
                    self._pending.append(KvOp(OpKind.SHARED, owner, text.seq, 0, cells.end))
                    break
        self._pending.append(KvOp(OpKind.COMPACT, 0))
        self.n_parked = 0

    def resize(self, n_seq: int) -> None:
        """Lease the ids [0, n_seq) from now on. No request may be open."""
        assert not self._texts, f"{len(self._texts)} requests hold sequences"
        self.n_seq, self._free = n_seq, deque(range(n_seq))

    # -- requests

    def open(self, request_id: int, prefix: Prefix | None = None) -> None:
        """Lease the sequence for the request's prompt. It starts with the part of `prefix` that is here, of which every
        row must have been evaluated."""
        if prefix and prefix.moves:
            self._take_over(prefix.source.id, request_id, prefix.n_tokens)
            return
        self._seqs_of[request_id] = set()
        text = self._texts[request_id] = Text(self._lease(request_id))
        n_tokens = min(prefix.n_tokens, self.placed_end(prefix.source.id)) if prefix else 0
        if prefix and n_tokens and self.can_retain(prefix.source.id, n_tokens):
            source = self._texts[prefix.source.id]
            self._paths[text.seq].end = n_tokens
            if self.rewinds:
                text.cells = fork(source.cells, n_tokens)
            else:  # states are packed by sequence, so it has cells of its own
                text.cells.end, self.n_committed = n_tokens, self.n_committed + n_tokens
            self._pending.append(KvOp(OpKind.COPY, source.seq, text.seq, 0, n_tokens))

    def close(self, request_id: int) -> None:
        """Free all that the request holds, or has retained."""
        self.rewind(request_id, 0)
        self._retained.discard(request_id)
        self._release(self._texts.pop(request_id).seq)
        del self._seqs_of[request_id]

    def retain(self, request_id: int, n_tokens: int) -> None:
        """The request has ended: free all but its first tokens, and what stages keep to read the rest of its prompt."""
        self.rewind(request_id, n_tokens)
        self._retained.add(request_id)
        if self.rewinds and (text := self._texts[request_id]).end:  # else none of it was read, or all was freed
            self._pending.append(KvOp(OpKind.REMOVE, text.seq, first=text.end))

    def rewind(self, request_id: int, n_tokens: int) -> None:
        """Free its nodes, and all but its first `n_tokens` committed tokens."""
        text = self._texts[request_id]
        for seq in sorted(self._seqs_of[request_id]):
            path = self._paths[seq]
            self._forget(path.chain)
            path.chain = []
            if seq != text.seq:
                self._release(seq)
        self._cut(text, n_tokens)

    def can_retain(self, request_id: int, n_tokens: int) -> bool:
        """Whether the first `n_tokens` can be used without those after them."""
        text = self._texts[request_id]
        end = self._paths[text.seq].end
        if not self.rewinds:
            return end <= n_tokens
        return not self.window or end < self.window or n_tokens >= end

    def _take_over(self, retained: int, request_id: int, n_tokens: int) -> None:
        """Open a request with the first `n_tokens`, or fewer, that another one has retained."""
        self._retained.remove(retained)
        text = self._texts[request_id] = self._texts.pop(retained)
        self._seqs_of[request_id] = self._seqs_of.pop(retained)
        self._paths[text.seq].request_id = request_id
        self._cut(text, n_tokens)

    def _cut(self, text: Text, n_tokens: int) -> None:
        """Keep at most `n_tokens` of a request that has no nodes."""
        path, end = self._paths[text.seq], min(text.end, n_tokens)
        if end < path.end:
            end = end if self.can_retain(path.request_id, end) else 0
            self._pending.append(KvOp(OpKind.REMOVE, text.seq, first=end))
        path.end = end
        if end < text.end:
            gone, text.cells = text.cells, fork(text.cells, end)
            n_freed = give_up(gone)
            self.n_committed -= n_freed
            self.n_parked += n_freed if self.parked else 0

    # -- cells on disk

    def store(self, request_id: int, first: int, last: int, key: BlockKey) -> None:
        """Let the stages store these committed tokens of an open request, which they have evaluated."""
        self._pending.append(KvOp.store(self._texts[request_id].seq, first, last, key))

    def load(self, request_id: int, reading: int, n_tokens: int) -> None:
        """Retain for a finished request the cells that the stages have read. There must be room for them."""
        self.open(request_id)
        text = self._texts[request_id]
        text.cells.end = self._paths[text.seq].end = n_tokens
        self.n_committed += n_tokens
        self._retained.add(request_id)
        self._pending.append(KvOp(OpKind.LOAD, reading, text.seq, 0, n_tokens))

    # -- placing

    def place(self, request_id: int, n_context: int, nodes: Sequence[Node]) -> Placement:
        """Give cells to the next `n_context` committed tokens, then to `nodes`, whose parents are placed or among them.
        Context may come with the root, not with deeper nodes. All of `nodes` must be `fitting`, and as many cells be
        free as there are rows."""
        text = self._texts[request_id]
        n_rows = n_context + len(nodes)
        assert n_rows <= self.n_free_cells, f"{n_rows} rows for {self.n_free_cells} free cells"
        assert not n_context or all(node.parent is None for node in nodes), "context and guesses in one run"
        if n_context:
            text.cells.end, self.n_committed = text.end + n_context, self.n_committed + n_context
            self._paths[text.seq].end += n_context
        seqs: dict[Node, list[int]] = {}  # calling list[int] is slow
        leased: list[int] = []
        for node in nodes:
            seq = self._seq_for(node, text, seqs, leased)
            self._put(node, seq)
            seqs[node] = [seq]
        return Placement([(text.seq,)] * n_context + [tuple(owners) for owners in seqs.values()], leased)

    def place_root(self, request_id: int, root: Node) -> int:
        """Give a root its cell, of which one must be free; its sequence."""
        seq = self._texts[request_id].seq
        self._put(root, seq)
        return seq

    def take_pending(self) -> list[KvOp]:
        """Operations for the stages to apply before the rows that were placed since the last call."""
        ops, self._pending = self._pending, []
        return ops

    def undo(self, nodes: Sequence[Node], placement: Placement) -> None:
        """Take back the newest placement, of nodes alone, whose operations were applied but not its rows evaluated."""
        for node in reversed(nodes):
            path = self._paths[self._seq_of.pop(node)]
            assert path.chain[-1] is node, "only the newest placement can be taken back"
            path.chain, path.end = path.chain[:-1], path.end - 1
        for seq in placement.leased:
            self._release(seq)

    def _seq_for(self, node: Node, text: Text, batch: dict[Node, list[int]], leased: list[int]) -> int:
        parent = node.parent
        if parent is None:
            return text.seq
        assert self.rewinds or self._n_guesses_left, f"no sequence is left for a guess at position {node.position}"
        source = self._seq_of[parent]
        if self.rewinds and self._is_tip(parent):
            return source
        seq = self._lease(self._paths[source].request_id)
        leased.append(seq)
        # ancestors in this batch have no cells to copy yet: their rows join the new sequence instead
        end = parent.position + 1
        ancestor: Node | None = parent
        while ancestor is not None and ancestor in batch:
            batch[ancestor].append(seq)
            end, ancestor = ancestor.position, ancestor.parent
        if end > 0:
            self._pending.append(KvOp(OpKind.COPY, source, seq, 0, end))
        self._paths[seq].end = parent.position + 1
        return seq

    def _is_tip(self, node: Node) -> bool:
        """Whether the next cell of the node's own sequence would be a child of it."""
        return self._paths[self._seq_of[node]].end == node.position + 1

    def _put(self, node: Node, seq: int) -> None:
        path = self._paths[seq]
        assert path.end == node.position, f"node at position {node.position}, sequence {seq} ends at {path.end}"
        path.chain.append(node)
        path.end += 1
        self._seq_of[node] = seq

    # -- settling

    def settle(self, request_id: int, path: Sequence[Node]) -> None:
        """Free what only dead branches hold. `path`: of `TokenTree.settle`, from the old root to the new one."""
        text, seqs = self._texts[request_id], self._seqs_of[request_id]
        chain = self._paths[text.seq].chain
        if len(seqs) == len(chain) == 1 and chain[0] is path[0]:
            # only the old root was placed, as where nothing is guessed: its cell is a committed token's now
            del self._seq_of[chain.pop()]
            text.cells.end += 1
            self.n_committed += 1
            return
        end = text.end
        for node in path:
            if node in self._seq_of:
                text.seq, text.cells.end = self._seq_of[node], node.position + (node.state is State.RETIRED)
        self.n_committed += text.end - end
        for seq in sorted(seqs):
            self._trim(seq, text)

    def _trim(self, seq: int, text: Text) -> None:
        path = self._paths[seq]
        live = [node for node in path.chain if node.state is State.LIVE]
        gone = [node for node in path.chain if node.state is not State.LIVE]
        path.chain = live
        self._forget(gone)
        if not live and seq != text.seq:
            self._release(seq)
            return
        end = live[-1].position + 1 if live else text.end
        if end < path.end:
            self._pending.append(KvOp(OpKind.REMOVE, seq, first=end))
            path.end = end

    def _forget(self, nodes: Sequence[Node]) -> None:
        """The nodes hold their cells no longer; those of retired ones are committed tokens' now."""
        for node in nodes:
            del self._seq_of[node]
            self.n_parked += self.parked and node.state is not State.RETIRED

    def _lease(self, request_id: int) -> int:
        seq = self._free.popleft()
        self._paths[seq] = Path(request_id)
        self._seqs_of[request_id].add(seq)
        return seq

    def _release(self, seq: int) -> None:
        path = self._paths.pop(seq)
        self._seqs_of[path.request_id].discard(seq)
        if path.end > 0:
            self._pending.append(KvOp(OpKind.REMOVE, seq))
        self._free.append(seq)
