"""`pipeinfer record`: its options. What it does is in `job.record`."""

from __future__ import annotations

from pathlib import Path

import click

from pipeinfer.cli.options.command import Command
from pipeinfer.job.options.limits import MAX_CTX
from pipeinfer.job.options.values import THREADS, File, Number, Text, Whole
from pipeinfer.models.demo import DRAFT, TARGET


@click.command("record", cls=Command)
@click.option("-m", "--model", type=File(), default=TARGET, help="Target, GGUF. [default: the shipped pair]")
@click.option("-md", "--model-draft", type=File(), default=DRAFT, help="Draft, GGUF.")
@click.option("-p", "--prompt", type=Text(blank=True), required=True, help="The text to continue.")
@click.option("-n", "--predict", type=Whole(1, MAX_CTX), default=512, show_default=True, help="Tokens to record.")
@click.option("-t", "--threads", type=THREADS, help="[default: the cores]")
@click.option("--temp", type=Number(0, 1000), default=0.0, show_default=True, help="0 is greedy.")
@click.option("-s", "--seed", type=Whole(0, 2**32 - 1), default=0, show_default=True)
@click.option("-o", "--output", type=File(), required=True, help="The file to write.")
def record_command(
    model: Path, model_draft: Path, prompt: str, predict: int, threads: int | None, temp: float, seed: int, output: Path
) -> int:
    """Record the text that the target writes and what the draft guesses after each of its tokens."""
    from pipeinfer.job.bench.record import record_pair  # loads libllama

    share = record_pair(model, model_draft, prompt, predict, threads, temp, seed, output)
    click.echo(f"{output}: {predict} tokens, the draft's best guess is right for {share:.1%}")
    return 0
