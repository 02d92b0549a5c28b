"""Chains of guesses as llama.cpp's own driver of heads inside the target makes them (MTP, common/speculative.cpp),
greedy, in plain llama-cpp-python: one model with two contexts. What the target puts out is rounded to bf16, as on our
way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp_ext as extension

from pipeinfer.cluster.wire import WireType, read_activations, rounded
from tests.support.plain_eagle3 import decode_pairs, judged
from tests.support.plain_llama import FEW, SILENT, make_context

Rows = Any


class MtpDriver:
    """`process`, `draft` and `accept` of common_speculative_impl_draft_mtp, for one sequence and one head.

    `types`: of the target's K and V. `rewinds`: the target's cache can lose tokens; else it reads its text again.
    """

    def __init__(self, target: str, n_ctx: int, types: tuple[int, int], rewinds: bool) -> None:
        self.rewinds, self.text = rewinds, list[int]()
        llama_cpp.llama_log_set(SILENT, None)
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts, params.load_mtp = False, True
        self.model = llama_cpp.llama_model_load_from_file(target.encode(), params)
        self.n_embd = llama_cpp.llama_model_n_embd(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.target = make_context(self.model, n_ctx, FEW, types, 1)
        extension.llama_set_embeddings_nextn(self.target, True, False)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_threads = n_ctx, 64, 64, 1
        options.n_threads_batch, options.ctx_type = 1, 1
        self.head = llama_cpp.llama_init_from_model(self.model, options)
        extension.llama_set_embeddings_nextn(self.head, True, True)
        self.pending: Rows = np.zeros(self.n_embd, np.float32)
        self.judged: tuple[int, Rows] | None = None  # position of the first of the newest rows, and what came out

    def evaluate(self, tokens: Sequence[int], start: int) -> list[int]:
        """The target's token after each of these, which the head reads."""
        found, output = self._judge(tokens, start)
        self.text += tokens
        before = [self.pending, *output[:-1]]
        self._decode([(token, before[row], start + row) for row, token in enumerate(tokens)], False)
        self.judged, self.pending = (start, output), output[-1]
        return found

    def draft(self, token: int, n: int) -> list[int]:
        """A chain of `n` guesses after the newest token."""
        start = llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(self.head), 0) + 1
        state, chain = self.pending, list[int]()
        while len(chain) < n:
            self._decode([(token, state, start + len(chain))], True)
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.head, 0), (self.n_vocab,))
            token = int(np.argmax(logits))
            state = np.ctypeslib.as_array(extension.llama_get_embeddings_nextn_ith(self.head, 0), (self.n_embd,)).copy()
            chain.append(token)
        # the driver's callers drop the cells of guesses before they verify them
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.head), 0, start, -1)
        return chain

    def accept(self, n: int) -> None:
        """So many guesses were right."""
        assert self.judged
        start, output = self.judged
        self.pending = output[n]
        del self.text[start + n + 1 :]
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.head), 0, start + n + 1, -1)
        memory = llama_cpp.llama_get_memory(self.target)
        if self.rewinds:
            llama_cpp.llama_memory_seq_rm(memory, 0, start + n + 1, -1)
        else:
            llama_cpp.llama_memory_clear(memory, True)
            self._judge(self.text, 0)

    def close(self) -> None:
        for context in (self.head, self.target):
            llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(self.model)

    def _judge(self, tokens: Sequence[int], start: int) -> tuple[list[int], Rows]:
        """The target's token after each of these, and what it puts out, (n_rows, n_embd)."""
        found, outputs = list[int](), []
        for part, chosen in judged(self.target, tokens, start, FEW if self.rewinds else 1, self.n_vocab):
            found += chosen
            rows = extension.llama_get_embeddings_nextn(self.target)
            rows = np.ctypeslib.as_array(rows, (len(part), self.n_embd)).copy()
            outputs.append(read_activations(rounded(rows).view(np.uint8).reshape(-1), self.n_embd, WireType.BF16))
        return found, np.concatenate(outputs)

    def _decode(self, rows: Sequence[tuple[int, Rows, int]], wanted: bool) -> None:
        for at in range(0, len(rows), 64):
            decode_pairs(self.head, rows[at : at + 64], self.n_embd, wanted)
