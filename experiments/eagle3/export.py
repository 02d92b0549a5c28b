"""Write a trained head as GGUF: `python -m experiments.eagle3.export -m TARGET.gguf HEAD.pt HEAD.gguf`.

The file has llama.cpp's layout of `eagle3`. Its token vectors are the target's, from which llama.cpp takes them where
the file has none; `--vectors` puts them in.
"""

from __future__ import annotations

from pathlib import Path

import click
import gguf
import numpy as np

from experiments.eagle3.net import Head, load_head
from experiments.eagle3.target_parts import read_weights
from experiments.gguf_file import add_shape, add_weight, finish

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "F32")
NAMES = {"enc_norm": "enc.output_norm", "fc": "fc", "output_norm": "output_norm", "output": "output"}
"""Parameters of a head -> tensors; all others are of the one block."""


def export_head(head: Head, target: Path, path: Path, matrices: str, rows: str, vectors: bool = False) -> None:
    """Types by name: `matrices` of the block, `rows` of the output, a row a token."""
    c = head.config
    writer = gguf.GGUFWriter(path, "eagle3")
    _copy_vocabulary(target, writer)
    writer.add_name(f"EAGLE-3 head for {target.stem}")
    add_shape(
        writer,
        n_vocab=len(head.token_embd),
        n_ctx=8192,
        n_embd=c.n_embd,
        n_layer=1,
        n_ff=c.n_ff,
        n_head=c.n_head,
        n_head_kv=c.n_head_kv,
        rope_base=c.rope_base,
        norm_eps=c.norm_eps,
    )
    writer.add_array("eagle3.target_layers", list(c.layers))
    writer.add_uint32("eagle3.target_hidden_size", c.n_embd)
    writer.add_bool("eagle3.norm_before_residual", False)
    writer.add_bool("eagle3.norm_before_fc", True)
    for name, weight in head.named_parameters():
        part = name.removesuffix(".weight")
        tensor = f"{NAMES.get(part) or f'blk.0.{part}'}.weight"
        add_weight(writer, tensor, weight.detach().numpy(), rows if part == "output" else matrices)
    if vectors:
        add_weight(writer, "token_embd.weight", head.token_embd.numpy(), "Q8_0")
    writer.add_tensor("d2t", head.guessed.numpy().astype(np.int64))
    finish(writer)


def _copy_vocabulary(target: Path, writer: gguf.GGUFWriter) -> None:
    for name, field in gguf.GGUFReader(target).fields.items():
        if name.startswith("tokenizer.ggml."):
            is_list = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_list else None)


@click.command(help=__doc__)
@click.option("-m", "target", type=FILE, required=True, help="The target, for vocabulary and vectors.")
@click.option("--matrices", type=click.Choice(TYPES), default="Q8_0", show_default=True, help="Type of the block's.")
@click.option("--rows", type=click.Choice(TYPES), default="Q8_0", show_default=True, help="Type of the output's rows.")
@click.option("--vectors", is_flag=True, help="Put the target's token vectors in.")
@click.argument("head", type=FILE)
@click.argument("path", type=click.Path(path_type=Path))
def main(target: Path, head: Path, path: Path, matrices: str, rows: str, vectors: bool) -> None:
    net, _ = load_head(head, read_weights(target)["token_embd.weight"])
    export_head(net, target, path, matrices, rows, vectors)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
