"""Many requests at a time, real ranks: `python benchmarks/batching.py [--numerics fast,exact] [--guesses none,draft]`.

Grows a target from the shipped one, so large that a step is nearly all computing, and answers the same requests,
greedy, in turns by

alone   `pipeinfer batch --parallel 1 --policy iterative`: one after another on the same ranks
batch   `pipeinfer batch`: all at once, without guesses and with those of a draft
plain   plain llama-cpp-python: one process decodes all sequences in one batch a step, as llama.cpp's
        llama-batched-bench does, with as many threads as the ranks have in total, and with one

and prints tokens a second (medians of rounds; prompts count in the time, loading does not) and ratios. With exact
numerics the texts must be those of the requests alone. Bars: 1.8 times alone, and 0.9 of the faster of plain, each for
the best way to batch; the exit code is 1 if one is missed, and 2 if texts differ that must not. Where others compute
too, plain with several threads is far slower than with one: each of them waits for all, after every operation. There
`--ranks 1 --threads 1` compares like with like: what the engine costs beside the same computing.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from harness import batch, grown, in_turns, medians

from pipeinfer.models.demo import DRAFT

N_LAYER = 158  # 150 MB
OF_ALONE, OF_PLAIN = 1.8, 0.9
TEXTS = (
    "def read(path):\n",
    "class Tree:\n    def __init__(self):\n",
    "import os\n\n\nfor name in os.listdir(",
    "# The king ",
)


class Answer(NamedTuple):
    per_s: float
    n_prompt: int
    texts: list[str]


@click.command(help=__doc__)
@click.option("--layers", default=N_LAYER, show_default=True)
@click.option("--ranks", default=2, show_default=True)
@click.option("--threads", default=0, help="Of each rank. [default: the cores, shared]")
@click.option("--requests", default=16, show_default=True)
@click.option("--tokens", default=24, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--numerics", default="fast,exact", show_default=True)
@click.option("--guesses", default="none,draft", show_default=True)
def main(
    layers: int, ranks: int, threads: int, requests: int, tokens: int, rounds: int, numerics: str, guesses: str
) -> None:
    n_threads = threads or max(1, len(os.sched_getaffinity(0)) // ranks)
    prompts = [f"{TEXTS[number % len(TEXTS)]}{number}" for number in range(requests)]
    trials: dict[str, Callable[[], Answer]] = {}
    with tempfile.TemporaryDirectory() as folder:
        target = grown(Path(folder) / "target.gguf", layers)
        for n in sorted({1, ranks * n_threads}):
            trials[f"plain, {n} thread{'s' * (n > 1)}"] = partial(ask_plain, target, prompts, tokens, n)
        for kind, how in product(numerics.split(","), ("alone", *guesses.split(","))):
            name = f"{kind}, {how if how == 'alone' else f'batch, {how}'}"
            trials[name] = partial(ask, Path(folder), target, prompts, tokens, ranks, n_threads, kind, how)
        print(
            f"target of {target.stat().st_size / 1e6:.0f} MB, {ranks} ranks of {n_threads} threads, {requests} "
            f"requests of {tokens} tokens",
            flush=True,
        )
        found = in_turns(trials, rounds)
    sys.exit(judge(found, numerics.split(",")))


def ask(
    folder: Path,
    target: Path,
    prompts: Sequence[str],
    n_predict: int,
    n_ranks: int,
    n_threads: int,
    numerics: str,
    how: str,
) -> Answer:
    """`how`: alone, none or draft."""
    words = ["-m", str(target), "-t", str(n_threads), "--numerics", numerics]
    words += ["-md", str(DRAFT) if how == "draft" else "none"]
    words += ["--parallel", "1", "--policy", "iterative"] if how == "alone" else ["--parallel", str(len(prompts))]
    summary, texts = batch(folder, n_ranks, prompts, n_predict, words)
    return Answer(summary["predicted_per_second"], summary["prompt_n"], texts)


def ask_plain(target: Path, prompts: Sequence[str], n_predict: int, n_threads: int) -> Answer:
    words = [str(target), json.dumps(prompts), str(n_predict), str(n_threads)]
    done = subprocess.run([sys.executable, __file__, "--in-plain-llama", *words], capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return Answer(**found)


def judge(found: dict[str, list[Answer]], numerics: Sequence[str]) -> int:
    """Print it; the exit code."""
    speeds = medians({name: [answer.per_s for answer in answers] for name, answers in found.items()})
    plain, code = max(per_s for name, per_s in speeds.items() if name.startswith("plain")), 0
    n_prompt = {answer.n_prompt for answers in found.values() for answer in answers}
    if len(n_prompt) > 1:
        raise click.ClickException(f"not all were asked the same: prompts of {n_prompt} tokens in all")
    for name in (name for name in speeds if name.startswith("plain")):
        print(f"{name}: {speeds[name]:.1f} tokens/s")
    best_of_alone, best_of_plain = 0.0, 0.0
    for kind in numerics:
        alone, texts = speeds[f"{kind}, alone"], found[f"{kind}, alone"][0].texts
        print(f"{kind}, alone: {alone:.1f} tokens/s")
        for name in (name for name in speeds if name.startswith(f"{kind}, batch")):
            n_same = min(sum(map(str.__eq__, texts, answer.texts)) for answer in found[name])
            of_alone, of_plain = speeds[name] / alone, speeds[name] / plain
            print(
                f"{name}: {speeds[name]:.1f} tokens/s, {of_alone:.2f} of alone, {of_plain:.2f} of plain; {n_same} of "
                f"{len(texts)} texts as alone"
            )
            best_of_alone, best_of_plain = max(best_of_alone, of_alone), max(best_of_plain, of_plain)
            if kind == "exact" and n_same < len(texts):
                code = 2
    return code or int(best_of_alone < OF_ALONE or best_of_plain < OF_PLAIN)


def decode_together(path: str, prompts: Sequence[str], n_predict: int, n_threads: int) -> dict[str, Any]:
    """All sequences in a batch a step, greedy, by llama.cpp's defaults. The first evaluation maps the weights in and is
    not counted."""
    import llama_cpp as lib

    silent = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silent, None)
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    vocab = lib.llama_model_get_vocab(model)
    n_vocab, tokens = lib.llama_vocab_n_tokens(vocab), [tokens_of(lib, vocab, prompt) for prompt in prompts]
    longest, n_prompt = max(map(len, tokens)) + n_predict, sum(map(len, tokens))
    params = lib.llama_context_default_params()
    params.n_ctx = len(prompts) * -(-longest // 256) * 256
    params.n_batch = params.n_ubatch = max(512, n_prompt)
    params.n_seq_max, params.n_threads, params.n_threads_batch = len(prompts), n_threads, n_threads
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(params.n_batch, 0, 1)

    def evaluate(rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Rows of (token, position, sequence, whether it is answered); the likeliest tokens behind those that are."""
        batch.n_tokens = len(rows)
        for at, (token, position, seq, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, seq
        assert lib.llama_decode(context, batch) == 0
        asked = [at for at, row in enumerate(rows) if row[3]]
        logits = (np.ctypeslib.as_array(lib.llama_get_logits_ith(context, at), (n_vocab,)) for at in asked)
        return [int(np.argmax(each)) for each in logits]

    evaluate([(tokens[0][0], 0, 0, True)])
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    start_s = time.monotonic()
    rows = [(token, at, seq, at == len(own) - 1) for seq, own in enumerate(tokens) for at, token in enumerate(own)]
    found = [[token] for token in evaluate(rows)]
    for step in range(n_predict - 1):
        newest = [(own[-1], len(tokens[seq]) + step, seq, True) for seq, own in enumerate(found)]
        for own, token in zip(found, evaluate(newest), strict=True):
            own.append(token)
    wall_s = time.monotonic() - start_s
    texts = [text_of(lib, vocab, own) for own in found]
    return {"per_s": len(prompts) * n_predict / wall_s, "n_prompt": n_prompt, "texts": texts}


def tokens_of(lib: Any, vocab: Any, text: str) -> list[int]:
    data, room = text.encode(), (lib.llama_token * 1024)()
    n_tokens = lib.llama_tokenize(vocab, data, len(data), room, len(room), True, False)
    assert n_tokens >= 0, f"{-n_tokens} tokens in a prompt"
    return list(room[:n_tokens])


def text_of(lib: Any, vocab: Any, tokens: Sequence[int]) -> str:
    room = ctypes.create_string_buffer(256)
    pieces = (room.raw[: lib.llama_token_to_piece(vocab, token, room, len(room), 0, False)] for token in tokens)
    return b"".join(pieces).decode(errors="replace")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-plain-llama"]:
        print(json.dumps(decode_together(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))))
    else:
        main()
