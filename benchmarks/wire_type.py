"""What `--wire-type bf16` brings on three hosts with slow links, made of namespaces.

    python benchmarks/wire_type.py --mbit 1000,125,20

Needs root (see tests/namespaces.py). Three stages of a layer with wide rows, which sleep rather than compute, so that
what else the machine does counts little; the messages, and what links take for them, are real. TTFT of a prompt and the
speed of the text, with f32 and bf16.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeinfer.cluster.activations import WireType
from tests.gguf_factory import Shape, write_model
from tests.namespaces import Hosts, hosts, missing

WIDE = Shape(n_layer=3, n_head=16, n_head_kv=1, n_ff=256, n_vocab=512)
PROFILE = """
embd = {embd}
[target]
layer_bytes = [3e6, 3e6, 3e6]
output_bytes = 100
[link]
latency_us = 1
gbit_per_s = 1000
[draft]
layers = 1
rows = [1]
layer_ms = [1.0]
"""
STAGE = """
[[stages]]
layers = {layers}
rows = [1, 128]
layer_ms = [{row_ms}, {chunk_ms}]
"""


def medians(made: Hosts, asked: Sequence[str], repetitions: int) -> tuple[float, float, float]:
    """TTFT in ms, tokens a second, MB between the two stages."""
    found = []
    for _ in range(repetitions):
        done = made.run(asked, timeout_s=300)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        timings = result["timings"]
        n_bytes = result["wire"]["hops"][-1]["bytes"]
        found.append((1e3 * timings["ttft_s"], timings["predicted_per_second"], 1e-6 * n_bytes))
    ttft_ms, speed, mb = (statistics.median(each) for each in zip(*found, strict=True))
    return ttft_ms, speed, mb


@click.command()
@click.option("--mbit", default="1000,125", show_default=True)
@click.option("--embd", default=4096, show_default=True, help="Numbers a row.")
@click.option("--row-ms", default=10.0, show_default=True, help="What a stage takes for a row.")
@click.option("--chunk-ms", default=100.0, show_default=True, help="What it takes for 128 rows.")
@click.option("-p", "--prompt", default=40, show_default=True, help="Words of the prompt.")
@click.option("-n", "--predict", default=24, show_default=True)
@click.option("-r", "--repetitions", default=3, show_default=True)
def main(mbit: str, embd: int, row_ms: float, chunk_ms: float, prompt: int, predict: int, repetitions: int) -> None:
    if why := missing():
        raise click.ClickException(f"no hosts can be made here: {why}")
    with tempfile.TemporaryDirectory() as directory, hosts(3, Path(directory)) as made:
        folder = Path(directory)
        model = write_model(folder / "model.gguf", replace(WIDE, n_embd=embd), "Q4_0")
        stages = [STAGE.format(layers=layers, row_ms=row_ms, chunk_ms=chunk_ms) for layers in (1, 2)]
        (folder / "pace.toml").write_text(PROFILE.format(embd=embd) + "".join(stages))
        words = ["-m", str(model), "-md", "none", "-p", "the model " * (prompt // 2), "-n", str(predict), "-t", "1"]
        more = ["--temp", "0", "--numerics", "fast", "--ignore-eos", "--pace", str(folder / "pace.toml"), "--json"]
        click.echo("Mbit/s  wire     TTFT ms  tokens/s  MB between stages")
        for rate in map(float, mbit.split(",")):
            made.limit(rate)
            for wire_type in map(str, WireType):
                asked = ["run", *words, *more, "--wire-type", wire_type]
                ttft_ms, speed, mb = medians(made, asked, repetitions)
                click.echo(f"{rate:6g}  {wire_type:4} {ttft_ms:11.0f} {speed:9.1f} {mb:8.2f}")


if __name__ == "__main__":
    main()
