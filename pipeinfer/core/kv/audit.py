"""What must hold of a pool of sequences at any time. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeinfer.core.kv.sequences import SequencePool
from pipeinfer.core.tree import Node


def audit(pool: SequencePool, live: Mapping[int, Sequence[Node]]) -> None:
    """Raise AssertionError unless exactly the open requests, what was retained, and live nodes hold sequences.

    `live`: the live nodes of each open request's tree, root first.
    """
    texts, paths, known = pool._texts, pool._paths, set(live) | pool._retained
    assert known == set(texts), f"requests {known} open or retained, {set(texts)} hold sequences"
    assert sorted([*pool._free, *paths]) == list(range(pool.n_seq)), "a sequence is lost or leased twice"
    assert pool.n_committed == pool.n_held({id: text.end for id, text in texts.items()}), "committed cells miscounted"
    owners = {seq: request_id for request_id, seqs in pool._seqs_of.items() for seq in seqs}
    assert {seq: path.request_id for seq, path in paths.items()} == owners, "a sequence has lost its request"
    nodes = {node for tree in live.values() for node in tree}
    assert set(pool._seq_of) <= nodes, "a node that is not live holds a sequence"
    for seq, path in paths.items():
        text = texts[path.request_id]
        assert path.chain or seq == text.seq, f"sequence {seq} serves nobody"
        assert path.end == (path.chain[-1].position + 1 if path.chain else text.end), f"sequence {seq} is too long"
        assert all(pool._seq_of[node] == seq for node in path.chain), f"sequence {seq}: a node of another"
    assert 0 <= pool.n_free_cells <= pool.n_cells, f"{pool.n_free_cells} of {pool.n_cells} cells free"
