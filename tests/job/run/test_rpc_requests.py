"""Requests of every kind on devices, beside each other: each text is that of the request alone on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.job.run.test_rpc_devices import ALL, GREEDY, PROMPT, SAMPLED, TYPES, of
from tests.support.cases import in_long
from tests.support.jobs import ROOT, environment, run_json
from tests.support.rpc_server import Server, needs_rpc, servers

pytestmark = needs_rpc

GRAMMAR = 'root ::= "    return " [a-z_]+ "(" [a-z_]+ (", " [a-z_]+)* ")\\n" root'


@pytest.fixture(scope="module")
def three() -> Iterator[list[Server]]:
    with servers(2, 1, 1) as started:
        yield started


def on_stages(places: str, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.support.device_requests", places, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    result = on_stages("cpu", "alone")
    assert not result["counts"].get("preempted")
    return list(result["texts"])


@pytest.mark.parametrize("places", [in_long("RPC0"), "RPC0,cpu,RPC1", in_long("cpu,RPC1,RPC0")])
def test_many_requests_with_too_few_cells(places: str, three: Sequence[Server], alone: list[list[int]]) -> None:
    """They begin alike, some greedy, some sampled; guesses are pruned and runs cancelled, also between the layers of a
    CPU's stage; who came last gives its cells away and goes on; caches are packed."""
    result = on_stages(places, three[0].endpoint)
    counts = result["counts"]
    assert result["texts"] == alone
    for each in ("kept", "preempted", "SHARED", "COMPACT"):
        assert counts.get(each), f"{each}: {counts}"
    if "cpu" in places:
        assert counts.get("skipped", 0) + counts.get("stopped", 0), counts


@pytest.mark.parametrize("sampling", [in_long(GREEDY), SAMPLED])
def test_a_grammar_holds_on_devices(three: Sequence[Server], sampling: list[str]) -> None:
    words = [*PROMPT[:2], "-n", "32", "-t", "1", *sampling, "--grammar", GRAMMAR]
    by_cpu = run_json(1, [*words, "--policy", "iterative"])
    assert by_cpu["text"].startswith("    return ")
    for n_ranks, policy in ((2, "pipeinfer"), (3, "auto")):
        result = run_json(n_ranks, [*words, "--policy", policy, *ALL, *TYPES, *of(three[:n_ranks])])
        assert result["tokens"] == by_cpu["tokens"]
