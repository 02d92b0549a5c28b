"""Chains of guesses as llama.cpp's own driver of EAGLE-3 heads makes them (common/speculative.cpp), greedy, in plain
llama-cpp-python: the target whole, the head beside it, one process. Features are rounded to bf16, as on our way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp_ext as extension

from pipeinfer.cluster.wire import WireType, read_activations, rounded
from tests.support.plain_llama import FEW, SILENT, decoding, make_context

LIBRARY = llama_cpp.llama_cpp._lib
INPUTS_OF = LIBRARY._Z30llama_set_embeddings_layer_inpP13llama_contextjb
INPUTS_OF.argtypes, INPUTS_OF.restype = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool], None
INPUTS = LIBRARY._Z30llama_get_embeddings_layer_inpP13llama_contextj
INPUTS.argtypes, INPUTS.restype = [ctypes.c_void_p, ctypes.c_uint32], ctypes.POINTER(ctypes.c_float)
Rows = Any


class Driver:
    """`process`, `draft` and `accept` of common_speculative_impl_draft_eagle3, for one sequence."""

    def __init__(self, target: str, head: str, layers: Sequence[int], n_ctx: int) -> None:
        llama_cpp.llama_log_set(SILENT, None)
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = False
        self.models = [llama_cpp.llama_model_load_from_file(path.encode(), params) for path in (target, head)]
        self.n_target, self.n_embd = map(llama_cpp.llama_model_n_embd, self.models)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.models[0]))
        self.target, self.layers = make_context(self.models[0], n_ctx, FEW, decoding(), 1), layers
        for layer in layers:
            INPUTS_OF(self.target, layer, True)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_threads = n_ctx, 64, 64, 1
        options.n_threads_batch, options.ctx_other = 1, self.target
        self.head = llama_cpp.llama_init_from_model(self.models[1], options)
        extension.llama_set_embeddings_nextn(self.head, True, True)
        self.last: tuple[int, Rows] | None = None  # position, and what the head makes of its features
        self.judged: tuple[int, Rows] | None = None  # the same of the newest rows

    def evaluate(self, tokens: Sequence[int], start: int) -> list[int]:
        """The target's token after each of these, which the head reads."""
        inputs, found = [], []
        for part, chosen in judged(self.target, tokens, start, FEW, self.n_vocab):
            found += chosen
            layers = [np.ctypeslib.as_array(INPUTS(self.target, n), (len(part), self.n_target)) for n in self.layers]
            inputs.append(np.concatenate(layers, axis=1))
        self._process(tokens, start, self._encode(np.concatenate(inputs)))
        return found

    def _process(self, tokens: Sequence[int], start: int, encoded: Rows) -> None:
        pairs = [(tokens[row + 1], encoded[row], start + row) for row in range(len(tokens) - 1)]
        end = llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(self.head), 0)
        if self.last and self.last[0] + 1 == start and self.last[0] > end:
            pairs.insert(0, (tokens[0], self.last[1], self.last[0]))
        if pairs:
            self._decode(pairs, False)
        self.judged, self.last = (start, encoded), (start + len(tokens) - 1, encoded[-1])

    def draft(self, token: int, n: int) -> list[int]:
        """A chain of `n` guesses after the newest token."""
        assert self.last
        position, state = self.last
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.head), 0, position, -1)
        chain: list[int] = []
        while len(chain) < n:
            self._decode([(token, state, position + len(chain))], True)
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.head, 0), (self.n_vocab,))
            token = int(np.argmax(logits))
            state = np.ctypeslib.as_array(extension.llama_get_embeddings_nextn_ith(self.head, 0), (self.n_embd,)).copy()
            chain.append(token)
        # the driver's callers drop the cells of guesses before they verify them
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.head), 0, position + 1, -1)
        return chain

    def accept(self, n: int) -> None:
        """So many guesses were right."""
        assert self.judged
        start, encoded = self.judged
        self.last = start + n, encoded[n]
        for context, end in ((self.target, start + n + 1), (self.head, start + n)):
            llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 0, end, -1)

    def close(self) -> None:
        for context in (self.head, self.target):
            llama_cpp.llama_free(context)
        for model in self.models:
            llama_cpp.llama_model_free(model)

    def _encode(self, rows: Rows) -> Rows:
        rows = read_activations(rounded(rows).view(np.uint8).reshape(-1), rows.shape[1], WireType.BF16)
        batch = llama_batch(len(rows), rows.shape[1])
        end = llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(self.head), 0) + 1
        for row in range(len(rows)):
            place(batch, row, end + row, True)
        ctypes.memmove(batch.embd, np.ascontiguousarray(rows, np.float32).ctypes.data, 4 * rows.size)
        assert llama_cpp.llama_encode(self.head, batch) == 0
        return np.ctypeslib.as_array(extension.llama_get_embeddings_nextn(self.head), (len(rows), self.n_embd)).copy()

    def _decode(self, pairs: Sequence[tuple[int, Rows, int]], wanted: bool) -> None:
        decode_pairs(self.head, pairs, self.n_embd, wanted)


def judged(
    target: Any, tokens: Sequence[int], start: int, n_part: int, n_vocab: int
) -> Iterator[tuple[Sequence[int], list[int]]]:
    """So many tokens at a time are evaluated from position `start` on: these, and the target's token after each."""
    for at in range(0, len(tokens), n_part):
        part = tokens[at : at + n_part]
        batch = llama_batch(len(part), 0)
        for row, token in enumerate(part):
            batch.token[row] = token
            place(batch, row, start + at + row, True)
        assert llama_cpp.llama_decode(target, batch) == 0
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(target), (len(part), n_vocab))
        yield part, np.argmax(logits, axis=1).tolist()


def decode_pairs(head: Any, pairs: Sequence[tuple[int, Rows, int]], n_embd: int, wanted: bool) -> None:
    """Of each row a token, what is known of the one before it, (n_embd,), and the position."""
    batch = llama_batch(len(pairs), n_embd)
    tokens = (ctypes.c_int32 * len(pairs))(*(token for token, *_ in pairs))
    batch.token = tokens
    for row, (_, state, position) in enumerate(pairs):
        place(batch, row, position, wanted)
        ctypes.memmove(
            ctypes.addressof(batch.embd.contents) + 4 * row * n_embd,
            np.ascontiguousarray(state, np.float32).ctypes.data,
            4 * n_embd,
        )
    assert llama_cpp.llama_decode(head, batch) == 0


def llama_batch(n_rows: int, n_embd: int) -> Any:
    """A llama_batch of tokens, or of vectors; some kB that are never freed."""
    batch = llama_cpp.llama_batch_init(n_rows, n_embd, 1)
    batch.n_tokens = n_rows
    return batch


def place(batch: Any, row: int, position: int, wanted: bool) -> None:
    batch.pos[row], batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = position, 1, 0, wanted


def write(driver: Any, prompt: Sequence[int], n_predict: int, n_draft: int) -> tuple[list[int], list[list[int]]]:
    """The target's text of at least `n_predict` tokens, and the chain of guesses after each of its roots."""
    text, chains = driver.evaluate(prompt, 0)[-1:], []
    while len(text) < n_predict:
        chains.append(driver.draft(text[-1], n_draft))
        found = driver.evaluate([text[-1], *chains[-1]], len(prompt) + len(text) - 1)
        n_right = next((n for n, (a, b) in enumerate(zip(chains[-1], found, strict=False)) if a != b), n_draft)
        text += found[: n_right + 1]
        driver.accept(n_right)
    driver.close()
    return text, chains
