"""Which llama.cpp sequence ids a tree path owns. Knows paths and ids, not tokens, models or MPI.

A sequence is the set of KV cells that one root-to-leaf path can see. The first child placed under a node inherits its
sequence; each further child leases a new one and copies the prefix, which is metadata only. Where layers keep states a
sequence cannot lose its newest rows alone, so every guess leases one. One pool serves one KV cache: the target's (every
stage applies the same operations in the same order) or a draft's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from pipeinfer.core.paths import Base, Path, Placement
from pipeinfer.core.requests import Prefix
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.shared import Cells, fork, give_up, n_held
from pipeinfer.core.tree import Node, State, with_ancestors
from pipeinfer.core.window import Window


class SequencePool:
    """Leases sequence ids [0, n_seq) and counts the cells in use.

    `parked`: the stages keep removed cells, out of sight, so that the order of the cells stays the order of evaluation
    (exact numerics); only compaction wins them back. Without `rewinds` sequences are only removed as a whole: each
    guess has one of its own, of all requests `n_guesses` at most, so that the others are left for requests.
    `window`: of layers that see only so many tokens back; 0 if there are none.
    """

    def __init__(self, n_seq: int, n_cells: int, parked: bool = False, rewinds: bool = True, n_guesses: int = 0,
                 window: int = 0) -> None:  # fmt: skip
        self.n_seq, self.n_cells, self.parked, self.rewinds, self.n_guesses = n_seq, n_cells, parked, rewinds, n_guesses
        self.window = Window(window, parked)
        self._free = deque(range(n_seq))
        self._paths: dict[int, Path] = {}
        self._seqs_of: dict[int, set[int]] = {}  # the sequences of each request
        self._bases: dict[int, Base] = {}
        self._seq_of: dict[Node, int] = {}
        self._left: set[int] = set()  # requests that have ended and left their committed tokens
        self._pending: list[KvOp] = []
        self.n_parked = 0  # cells out of sight that compaction wins back
        self._n_certain = 0

    # -- capacity

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_free_cells(self) -> int:
        return self.n_cells - self._n_certain - len(self._seq_of) - self.n_parked

    @property
    def _n_guesses_left(self) -> int:
        """Without `rewinds`: how many more may be placed. All sequences but one a request are guesses'."""
        return self.n_guesses - (len(self._paths) - len(self._bases))

    def is_placed(self, node: Node) -> bool:
        return node in self._seq_of

    def placed_end(self, request_id: int) -> int:
        """How many of the request's committed tokens below the root have cells."""
        return self._bases[request_id].end

    def unplaced(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes and all above them that have no cells yet, parents first, the order of `nodes` kept."""
        return with_ancestors(nodes, self._seq_of)

    def fitting(self, nodes: Sequence[Node]) -> list[Node]:
        """Those of the nodes that can be placed now, in their order. Left out is what no sequence or cell is free for,
        and what is below that: a tree gets narrower before it gets shorter."""
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

    @property
    def n_committed(self) -> int:
        """Cells of committed tokens, of all requests."""
        return self._n_certain

    def n_held(self, ends: Mapping[int, int]) -> int:
        """Cells of these requests' first committed tokens, so many of each."""
        return n_held((self._bases[request_id].cells, end) for request_id, end in ends.items())

    @property
    def can_compact(self) -> bool:
        """Compaction keeps committed tokens alone, each request's in a sequence of its own: no node may be placed."""
        return self.n_parked > 0 and not self._seq_of

    @property
    def has_nodes(self) -> bool:
        """Whether anything but committed tokens below roots is placed."""
        return bool(self._seq_of)

    def compact(self) -> None:
        """Win the parked cells back, with the next placement's operations."""
        assert self.can_compact, f"{len(self._seq_of)} nodes placed, {self.n_parked} cells parked"
        owners: dict[Cells, int] = {}
        # the shortest text's window is what all that share its cells need of them: libllama keeps no more
        for base in sorted(self._bases.values(), key=lambda base: (base.end, base.seq)):
            for cells in base.cells.path():
                if (owner := owners.setdefault(cells, base.seq)) != base.seq:  # who has these has all below them too
                    self._pending.append(KvOp(OpKind.SHARED, owner, base.seq, 0, cells.end))
                    break
            self.window.lose(base)
        self._pending.append(KvOp(OpKind.COMPACT, 0))
        self.n_parked = 0

    def resize(self, n_seq: int) -> None:
        """Lease the ids [0, n_seq) from now on. No request may be open."""
        assert not self._bases, f"{len(self._bases)} requests hold sequences"
        self.n_seq, self._free = n_seq, deque(range(n_seq))

    # -- requests

    def open(self, request_id: int, prefix: Prefix | None = None) -> None:
        """Lease the sequence that the request's prompt goes to. It begins with another one's first tokens, as far as
        they are here; what is here must have been evaluated."""
        if prefix and prefix.moves:
            self._take_over(prefix.source.id, request_id, prefix.n_tokens)
            return
        self._seqs_of[request_id] = set()
        base = self._bases[request_id] = Base(self._lease(request_id))
        n_tokens = min(prefix.n_tokens, self.placed_end(prefix.source.id)) if prefix else 0
        if prefix and n_tokens and self.can_retain(prefix.source.id, n_tokens):
            source = self._bases[prefix.source.id]
            self._paths[base.seq].end = n_tokens
            if self.rewinds:
                base.cells = fork(source.cells, n_tokens)
            else:  # a sequence is packed as a whole, with its state: then it has cells of its own
                base.cells.end, self._n_certain = n_tokens, self._n_certain + n_tokens
            self.window.lose(base)
            self._pending.append(KvOp(OpKind.COPY, source.seq, base.seq, 0, n_tokens))

    def close(self, request_id: int) -> None:
        """Give back all that the request holds, or has left."""
        self._left.discard(request_id)
        for seq in sorted(self._seqs_of[request_id]):
            self._forget(self._paths[seq].chain)
            self._release(seq)
        del self._seqs_of[request_id]
        self._give_up(self._bases.pop(request_id).cells)

    def can_retain(self, request_id: int, n_tokens: int) -> bool:
        """Whether the first `n_tokens` can stay, or be another's, without those after them."""
        end = self._paths[(base := self._bases[request_id]).seq].end
        return self.window.has(base, end, n_tokens) if self.rewinds else end <= n_tokens

    def retain(self, request_id: int, n_tokens: int) -> None:
        """The request has ended: give back all but its first committed tokens, `n_tokens` at most, which stay."""
        base = self._bases[request_id]
        for seq in sorted(self._seqs_of[request_id]):
            path = self._paths[seq]
            self._forget(path.chain)
            path.chain = []
            if seq != base.seq:
                self._release(seq)
        self._cut(base, n_tokens)
        self._left.add(request_id)

    def _take_over(self, left: int, request_id: int, n_tokens: int) -> None:
        """Open a request with what another one has left, no more than the first `n_tokens`."""
        self._left.remove(left)
        base = self._bases[request_id] = self._bases.pop(left)
        self._seqs_of[request_id] = self._seqs_of.pop(left)
        self._paths[base.seq].request_id = request_id
        self._cut(base, n_tokens)

    def _cut(self, base: Base, n_tokens: int) -> None:
        """Keep no more than so many committed tokens of a request of which nothing else is placed."""
        path, end = self._paths[base.seq], min(base.end, n_tokens)
        if end < path.end:
            end = end if self.can_retain(path.request_id, end) else 0
            self._pending.append(KvOp(OpKind.REMOVE, base.seq, first=end))
        path.end = end
        if end < base.end:
            gone, base.cells = base.cells, fork(base.cells, end)
            self._give_up(gone)

    def _give_up(self, tip: Cells) -> None:
        n_free = give_up(tip)
        self._n_certain -= n_free
        self.n_parked += n_free if self.parked else 0

    # -- placing

    def place(self, request_id: int, n_context: int, nodes: Sequence[Node]) -> Placement:
        """Give cells to the next `n_context` committed tokens, then to `nodes`, whose parents are placed or among them.

        Context comes before the root, and no deeper node may come with it. All of `nodes` must be `fitting`, and as
        many cells be free as there are rows.
        """
        base = self._bases[request_id]
        n_rows = n_context + len(nodes)
        assert n_rows <= self.n_free_cells, f"{n_rows} rows for {self.n_free_cells} free cells"
        assert not n_context or all(node.parent is None for node in nodes), "context and guesses in one run"
        ops = self.take_pending()
        base.cells.end, self._n_certain = base.end + n_context, self._n_certain + n_context
        self._paths[base.seq].end += n_context
        if n_context:
            self.window.lose(base)  # blocks of a prompt are moved in
        seqs, leased = dict[Node, list[int]](), list[int]()
        for node in nodes:
            seq = self._seq_for(node, base, seqs, ops, leased)
            self._put(node, seq)
            seqs[node] = [seq]
        node_seqs = [tuple(owners) for owners in seqs.values()]
        return Placement(request_id, ops, n_context, base.seq, list(nodes), node_seqs, leased)

    def place_root(self, request_id: int, root: Node) -> int:
        """Give a root its cell, of which one must be free; its sequence. Operations wait for `take_pending`."""
        seq = self._bases[request_id].seq
        self._put(root, seq)
        return seq

    def take_pending(self) -> list[KvOp]:
        """Operations to apply before what is placed from now on."""
        ops, self._pending = self._pending, []
        return ops

    def undo(self, placement: Placement) -> None:
        """Take back the newest placement, whose operations were applied but whose rows were not evaluated."""
        base = self._bases[placement.request_id]
        base.cells.end, self._n_certain = base.end - placement.n_context, self._n_certain - placement.n_context
        self._paths[base.seq].end -= placement.n_context
        for node in reversed(placement.nodes):
            path = self._paths[self._seq_of.pop(node)]
            assert path.chain.pop() is node, "only the newest placement can be taken back"
            path.end -= 1
        for seq in placement.leased:
            self._release(seq)

    def _seq_for(self, node: Node, base: Base, batch: dict[Node, list[int]], ops: list[KvOp], leased: list[int]) -> int:
        parent = node.parent
        if parent is None:
            return base.seq
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
            ops.append(KvOp(OpKind.COPY, source, seq, 0, end))
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
        """The root moved along `path` (old root first); free what only dead branches hold.

        To be called after the tree settled, when the nodes know whether they are live.
        """
        base, seqs = self._bases[request_id], self._seqs_of[request_id]
        chain = self._paths[base.seq].chain
        if len(seqs) == len(chain) == 1 and chain[0] is path[0]:
            # the old root is all that was placed, as where nothing is guessed: its cell is a committed token's now
            del self._seq_of[chain.pop()]
            base.cells.end += 1
            self._n_certain += 1
            return
        end = base.end
        for node in path:
            if node in self._seq_of:
                base.seq, base.cells.end = self._seq_of[node], node.position + (node.state is State.RETIRED)
        self._n_certain += base.end - end
        for seq in sorted(seqs):
            self._trim(seq, base)

    def _trim(self, seq: int, base: Base) -> None:
        path = self._paths[seq]
        live, gone = list[Node](), list[Node]()
        for node in path.chain:
            (live if node.state is State.LIVE else gone).append(node)
        path.chain = live
        self._forget(gone)
        if not live and seq != base.seq:
            self._release(seq)
            return
        end = live[-1].position + 1 if live else base.end
        if end < path.end:
            self._pending.append(KvOp(OpKind.REMOVE, seq, first=end))
            path.end = end

    def _forget(self, nodes: Sequence[Node]) -> None:
        """These nodes hold their cells no longer; retired ones' cells are counted by the base."""
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

    # -- audit

    def audit(self, live: Mapping[int, Sequence[Node]]) -> None:
        """Raise AssertionError unless sequences are held by exactly the open requests and their live nodes.

        `live` maps each open request to the live nodes of its tree, root first.
        """
        known = set(live) | self._left
        assert known == set(self._bases), f"requests {known} open or left, {set(self._bases)} hold sequences"
        assert sorted([*self._free, *self._paths]) == list(range(self.n_seq)), "a sequence is lost or leased twice"
        ends = {request_id: base.end for request_id, base in self._bases.items()}
        assert self._n_certain == self.n_held(ends), "committed tokens are miscounted"
        assert {seq: path.request_id for seq, path in self._paths.items()} == {
            seq: request_id for request_id, seqs in self._seqs_of.items() for seq in seqs
        }, "a sequence has lost its request"
        nodes = {node for tree in live.values() for node in tree}
        assert set(self._seq_of) <= nodes, "a node that is not live holds a sequence"
        for seq, path in self._paths.items():
            base = self._bases[path.request_id]
            assert path.chain or seq == base.seq, f"sequence {seq} serves nobody"
            assert path.end == (path.chain[-1].position + 1 if path.chain else base.end), f"sequence {seq} is too long"
            assert all(self._seq_of[node] == seq for node in path.chain), f"sequence {seq}: a node of another"
        assert 0 <= self.n_free_cells <= self.n_cells, f"{self.n_free_cells} of {self.n_cells} cells free"
