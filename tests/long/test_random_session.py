"""One job generates hundreds of texts under random settings: each is plain llama.cpp's, and nothing is left of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import llama_cpp
import numpy as np
import pytest

from pipeinfer.core.blocks import BLOCK
from pipeinfer.core.sampling import choose
from pipeinfer.core.types import FloatArray
from pipeinfer.models.demo import TARGET
from tests.job.run.test_rpc_devices import TYPES
from tests.long.auditing import Memory
from tests.long.random_session import N_CTX, Case, random_case
from tests.support.jobs import environment, launcher
from tests.support.plain_llama import FEW, SILENT, decode, decoding, make_context, read_blocks
from tests.support.rpc_server import needs_rpc, servers

pytestmark = pytest.mark.long

N_CASES = 300


@pytest.mark.parametrize(
    ("n_ranks", "options", "delays"), [(5, [], ""), (3, ["--draft-rank", "1"], ""), (3, [], "yes")]
)
def test_random_settings(n_ranks: int, options: list[str], delays: str) -> None:
    check(n_ranks, options, delays, PlainLlama())


@needs_rpc
def test_random_settings_on_devices() -> None:
    """Two ranks with an RPC server each: prompts are read as rows are, in no blocks."""
    with servers(1, 2) as two:
        check(2, ["-ngl", "all", *TYPES, "--rpc", ",".join(each.endpoint for each in two)], "", PlainLlama(False))


def check(n_ranks: int, options: list[str], delays: str, plain: PlainLlama) -> None:
    command = [*launcher(n_ranks), sys.executable, "-m", "tests.long.random_session", "run", "-p", "x", "-n", "1"]
    done = subprocess.run(
        [*command, "-c", str(N_CTX), "-t", "1", "--no-repack", *options],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment() | {"SESSION_CASES": str(N_CASES), "SESSION_DELAYS": delays},
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert [record["case"] for record in records] == list(range(N_CASES)), done.stderr
    for record in records:
        case = random_case(record["case"])
        assert record["tokens"] == plain.generate(case, len(record["tokens"])), f"case {record['case']}: {case}"
        n_least = case.stop_after or case.n_predict
        assert n_least <= len(record["tokens"]) <= case.n_predict, f"case {record['case']}: {case}"
        assert not record["leaks"], f"case {record['case']}: {case}"
    assert sum(record["n_cancelled"] for record in records) > N_CASES
    for rank in records[0]["ranks"]:
        memory = Memory([record["ranks"][rank][0] for record in records])
        files = [record["ranks"][rank][1] for record in records]
        print(f"rank {rank}: {memory}, {files[0]} -> {files[-1]} files")
        assert not memory.grows and files[-1] <= files[0], f"rank {rank}"


class PlainLlama:
    """The whole shipped target, one token at a time, as `tests.support.plain_llama` evaluates it; long prompts
    `in_blocks`."""

    def __init__(self, in_blocks: bool = True) -> None:
        self._in_blocks = in_blocks
        llama_cpp.llama_log_set(SILENT, None)
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = False
        self._model = llama_cpp.llama_model_load_from_file(str(TARGET).encode(), params)
        self._context = make_context(self._model, N_CTX + 24, FEW, decoding(), 1)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def generate(self, case: Case, n: int) -> list[int]:
        """The first `n` tokens of the text."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        tokens, params = list(case.prompt), case.sampling
        is_long = self._in_blocks and len(tokens) > BLOCK
        if is_long:
            read_blocks(self._model, self._context, tokens[:-1], 1)
        new: Sequence[int] = tokens[-1:] if is_long else tokens
        while len(tokens) < len(case.prompt) + n:
            logits = self._logits_after(new)
            history = tokens[max(0, len(tokens) - params.looks_back) :] if params.looks_back else ()
            tokens.append(choose(logits, params, len(tokens), history))
            new = tokens[-1:]
        return tokens[len(case.prompt) :]

    def _logits_after(self, new: Sequence[int]) -> FloatArray:
        decode(self._context, new, [*range(0, len(new), FEW), len(new)])
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, -1), (self._n_vocab,))
