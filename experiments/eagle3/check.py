"""Does libllama guess what torch does?
`python -m experiments.eagle3.check -m TARGET.gguf --texts DIR HEAD.pt HEAD.gguf`.

Features of recorded texts go through `llama_encode`, then pairs of token and feature through `llama_decode`, as
llama.cpp's own driver has it; after every EVERY-th token the head goes on from its own states.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import llama_cpp
import numpy as np
import numpy.typing as npt
import torch
from llama_cpp import llama_cpp_ext

from experiments.eagle3.measure import share
from experiments.eagle3.net import Head, load_head
from experiments.eagle3.recording import Text, read_texts, recorded
from experiments.eagle3.target_parts import read_weights
from experiments.eagle3.window import window_of
from pipeinfer.text import markdown_table

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
N_CTX, EVERY = 1024, 16
Rows = npt.NDArray[np.float32]
SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)


class LibHead:
    """A head's file in libllama, with the target's whole model beside it, for one text at a time."""

    def __init__(self, target: Path, path: Path) -> None:
        """Raises ValueError for a file that libllama does not load."""
        llama_cpp.llama_log_set(SILENT, None)
        params = llama_cpp.llama_model_default_params()
        self._models = [llama_cpp.llama_model_load_from_file(str(each).encode(), params) for each in (target, path)]
        if not all(self._models):
            raise ValueError(f"libllama loads {target} or {path} not")
        self.n_embd = llama_cpp.llama_model_n_embd(self._models[1])
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._models[1]))
        self._other = self._open(self._models[0], 256, None)
        self._context = self._open(self._models[1], N_CTX, self._other)
        llama_cpp_ext.llama_set_embeddings_nextn(self._context, True, True)

    def close(self) -> None:
        for context in (self._context, self._other):
            llama_cpp.llama_free(context)
        for model in self._models:
            llama_cpp.llama_model_free(model)

    @staticmethod
    def _open(model: Any, n_ctx: int, other: Any) -> Any:
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = n_ctx
        options.n_threads = options.n_threads_batch = 1
        options.ctx_other = other
        return llama_cpp.llama_init_from_model(model, options)

    def fuse(self, features: Rows) -> Rows:
        """(n, n_embd) of (n, 3 * n_embd). Begins a text: all cells are dropped."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        assert llama_cpp.llama_encode(self._context, _batch(features, range(len(features)))) == 0
        return self._states(len(features))

    def guess(self, tokens: Sequence[int], features: Rows, first: int) -> tuple[Rows, Rows]:
        """Logits (n, n_vocab) and states (n, n_embd) of rows from position `first` on; cells from there are dropped."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, first, -1)
        batch = _batch(features, range(first, first + len(tokens)))
        held = (ctypes.c_int32 * len(tokens))(*tokens)
        batch.token = held
        assert llama_cpp.llama_decode(self._context, batch) == 0
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (len(tokens), self.n_vocab))
        return logits.copy(), self._states(len(tokens))

    def _states(self, n: int) -> Rows:
        return np.ctypeslib.as_array(llama_cpp_ext.llama_get_embeddings_nextn(self._context), (n, self.n_embd)).copy()


def _batch(rows: Rows, positions: Sequence[int]) -> Any:
    batch = llama_cpp.llama_batch_init(*rows.shape, 1)
    batch.n_tokens = len(rows)
    for row, position in enumerate(positions):
        batch.pos[row], batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = position, 1, 0, True
    ctypes.memmove(batch.embd, np.ascontiguousarray(rows, np.float32).ctypes.data, 4 * rows.size)
    return batch


def guesses_of_library(lib: LibHead, text: Text, n_ages: int) -> Iterator[tuple[int, int, int]]:
    """(age, row, token): row r guesses token r + 2."""
    features = torch.from_numpy(text.features.view(np.int16)).view(torch.bfloat16).float().flatten(1).numpy()
    tokens, fused = text.tokens.tolist(), lib.fuse(features)
    logits, states = lib.guess(tokens[1:], fused[:-1], 0)
    yield from ((0, row, int(token)) for row, token in enumerate(logits.argmax(-1)))
    for begin in reversed(range(EVERY, len(tokens) - n_ages, EVERY)):  # cells after each of them are replaced
        state = states[begin - 1]
        for age in range(1, n_ages):
            row = begin + age - 1
            found, own = lib.guess([tokens[row + 1]], state[None], row)
            state = own[0]
            yield age, row, int(found[0].argmax())


@torch.no_grad()
def guesses_of_torch(head: Head, text: Text, n_ages: int) -> npt.NDArray[np.int64]:
    """(n_ages, n_rows)."""
    window = window_of([text])
    return np.stack(
        [
            head.guessed[head.logits(states[0]).argmax(-1)].numpy()
            for states in head.unroll(window.tokens, window.features, n_ages)
        ]
    )


def compare(lib: LibHead, head: Head, texts: Sequence[Text], n_ages: int) -> Iterator[list[str]]:
    same: list[list[npt.NDArray[np.bool_]]] = [[] for _ in range(n_ages)]
    ours: list[list[npt.NDArray[np.bool_]]] = [[] for _ in range(n_ages)]
    theirs: list[list[npt.NDArray[np.bool_]]] = [[] for _ in range(n_ages)]
    for text in texts:
        known = guesses_of_torch(head, text, n_ages)
        found = [each for each in guesses_of_library(lib, text, n_ages) if each[1] >= text.n_prompt - 2]
        for age in range(n_ages):
            rows = [(row, token) for of, row, token in found if of == age]
            if not rows:
                continue
            at, tokens = (np.array(each) for each in zip(*rows, strict=True))
            right = text.taught[at + 1, 0]
            same[age].append(tokens == known[age, at])
            ours[age].append(known[age, at] == right)
            theirs[age].append(tokens == right)
    for age in range(n_ages):
        n = sum(map(len, same[age]))
        yield [str(age), str(n), *(share(each[age]) for each in (same, ours, theirs))]


@click.command(help=__doc__)
@click.option("-m", "target", type=FILE, required=True, help="The target.")
@click.option("--texts", type=click.Path(exists=True, path_type=Path), required=True, help="Greedy texts, recorded.")
@click.option("--ages", default=4, show_default=True)
@click.argument("head", type=FILE)
@click.argument("path", type=FILE)
def main(target: Path, texts: Path, ages: int, head: Path, path: Path) -> None:
    torch.set_num_threads(1)
    known = [text for each in recorded(texts) for text in read_texts(each) if len(text.tokens) < N_CTX]
    net, _ = load_head(head, read_weights(target)["token_embd.weight"])
    lib = LibHead(target, path)
    columns = ("age", "tokens", "same guess", "torch right", "libllama right")
    print("\n".join(markdown_table(columns, compare(lib, net, known, ages))))
    lib.close()


if __name__ == "__main__":
    main()
