"""What torch's types of weights cost in logits, and how long rows take with them on a CPU.

    python benchmarks/torch_types.py

Logits are compared with those of float32 weights of the same file, and of each quantisation also with those of the file
in float32 that it was made from: what int8 and int4 add is to be seen beside what the quantisation itself does.
`argmax`: how often the likeliest token is the same. Times are the least of some, of runs of so many rows in one thread,
with exact and with fast numerics.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from pipeinfer.core.interfaces import Batch, FloatArray
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.models.agreement import TEXTS
from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.slice import open_slice, read_model_info
from pipeinfer.models.tokenizer import Tokenizer
from pipeinfer.models.torch.params import BF16, F32, INT4, INT8, TorchParams
from pipeinfer.models.torch.stage import TorchStage
from tests.gguf_factory import Shape, quantise, write_model

WIDE = Shape(n_layer=4, n_embd=1024, n_head=16, n_head_kv=4, n_ff=2816, n_vocab=512)
DTYPES, SIZES, N_CHUNK, REPEATS = (F32, BF16, INT8, INT4), (1, 8, 32, 128), 32, 7


def open_stage(path: Path, dtype: str, exact: bool = False) -> TorchStage:
    info = read_model_info(path)
    return TorchStage(open_slice(info, 0, info.n_layer), TorchParams(512, 4, 256, 256, 1, "cpu", dtype, exact=exact))


def batch_of(tokens: list[int], at: int) -> Batch:
    ids, positions = np.array(tokens, np.int32), np.arange(at, at + len(tokens), dtype=np.int32)
    return Batch(ids, positions, [(0,)] * len(ids), None, np.ones(len(ids), bool))


def logits_of(path: Path, tokens: list[int], dtype: str = F32) -> FloatArray:
    stage, found = open_stage(path, dtype), []
    for at in range(0, len(tokens), N_CHUNK):
        logits = stage.evaluate(batch_of(tokens[at : at + N_CHUNK], at), lambda: False)
        assert logits is not None
        found.append(logits)
    stage.close()
    return np.concatenate(found)


def apart(found: FloatArray, expected: FloatArray) -> str:
    percent = 100 * np.linalg.norm(found - expected) / np.linalg.norm(expected)
    return f"{percent:5.2f}% (argmax {100 * (found.argmax(1) == expected.argmax(1)).mean():3.0f}%)"


def compare(name: str, plain: Path, folder: Path, tokens: list[int], kinds: list[str]) -> None:
    original = logits_of(plain, tokens)
    click.echo(f"{name:8} {'':7} {'  '.join(f'{dtype:20}' for dtype in DTYPES[1:])}  the quantisation's own")
    for kind in kinds:
        path = plain if kind == "F32" else folder / f"{name}-{kind}.gguf"
        if kind != "F32":
            quantise(plain, path, kind)
        own = logits_of(path, tokens)
        each = "  ".join(apart(logits_of(path, tokens, dtype), own) for dtype in DTYPES[1:])
        click.echo(f"{name:8} {kind:7} {each}  {apart(own, original) if kind != 'F32' else '-'}")


def seconds(stage: TorchStage, n_rows: int) -> float:
    batch, found = batch_of([5] * n_rows, 0), []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        stage.evaluate(batch, lambda: False)
        found.append(time.perf_counter() - start_s)
        stage.apply([KvOp(OpKind.REMOVE, 0)])
    return min(found)


@click.command(help=__doc__)
@click.option("--kinds", default="F32,Q8_0,Q6_K,Q4_K_M,Q4_0", show_default=True)
def main(kinds: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder, tokenizer = Path(scratch), Tokenizer(TARGET)
        quantise(TARGET, folder / "plain.gguf", "F32")
        text = [token for text in TEXTS for token in tokenizer.encode(text)]
        compare("shipped", folder / "plain.gguf", folder, text, kinds.split(","))
        wide = write_model(folder / "wide.gguf", WIDE, "F32")
        tokens = np.random.default_rng(0).integers(3, WIDE.n_vocab, 128).tolist()
        compare("random", wide, folder, tokens, kinds.split(","))
        click.echo(f"ms of    rows    {'  '.join(f'{dtype:>5} exact/fast' for dtype in DTYPES)}")
        stages = {(dtype, exact): open_stage(wide, dtype, exact) for dtype in DTYPES for exact in (True, False)}
        for n_rows in SIZES:
            took = {key: 1e3 * seconds(stage, n_rows) for key, stage in stages.items()}
            each = "  ".join(f"{took[dtype, True]:8.1f}/{took[dtype, False]:7.1f}" for dtype in DTYPES)
            click.echo(f"random   {n_rows:4}    {each}")


if __name__ == "__main__":
    main()
