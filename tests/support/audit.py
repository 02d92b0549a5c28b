"""What must hold of an engine, its trees, levels and pools at any time. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeinfer.core.engine import Engine
from pipeinfer.core.levels import Level
from pipeinfer.core.requests import Emission
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.tree import Node, TokenTree

Live = Mapping[int, Sequence[Node]]
"""The live nodes of each open request's tree, root first, by its id."""


def emitted(engine: Engine) -> Iterator[Emission]:
    """Steps the engine until all requests have finished; yields what they emit."""
    emissions: list[Emission] = []
    engine.on_tokens = emissions.extend
    while engine.busy:
        engine.step()
        yield from emissions
        emissions.clear()


def audit_engine(engine: Engine) -> None:
    """Raise AssertionError if a sequence leaks, a run is forgotten or a tree is not what it should be."""
    for active in engine._active.values():
        tree = active.request.tree
        audit_tree(tree)
        assert active in engine._senders or not any(tree.unsent()), f"request {active.request.id} is never asked"
        for node in tree.nodes:
            if node.run_id is not None and node.verdict is None:
                assert node.run_id in engine.target._flights, f"run {node.run_id} is forgotten, its node waits"
    for level in engine.levels:
        audit_level(level, {active.request.id: active.request.tree.nodes for active in engine._active.values()})


def audit_tree(tree: TokenTree) -> None:
    """Raise AssertionError unless `nodes` is exactly the root's subtree, parents first."""
    assert tree.nodes[0] is tree.root, "the root is not the first node"
    assert {id(node) for node in tree.nodes} == {id(node) for node in tree.root.subtree()}, "stray nodes"
    seen: set[int] = set()
    for node in tree.nodes:
        assert node.live, f"a {node.state.value} node among the live"
        assert node is tree.root or id(node.parent) in seen, "a child before its parent"
        sent_alone = node.run_id is not None and node.parent is not None and node.parent.run_id is None
        assert not sent_alone, "sent before its parent"
        seen.add(id(node))


def audit_level(level: Level, live: Live) -> None:
    """Raise AssertionError if a sequence leaks or a run is forgotten."""
    audit_pool(level.pool, live)
    assert set(level._of_request) == set(live), f"requests {set(live)} open, {set(level._of_request)} known"
    for request_id, flights in level._of_request.items():
        assert flights.items() <= level._flights.items(), f"request {request_id} waits for runs that have ended"


def audit_pool(pool: SequencePool, live: Live) -> None:
    """Raise AssertionError unless exactly the open requests, what was retained, and live nodes hold sequences."""
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
