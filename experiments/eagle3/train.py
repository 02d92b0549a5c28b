"""Train an EAGLE-3 head on recorded texts: `python -m experiments.eagle3.train -m TARGET.gguf --texts DIR -o HEAD.pt`.

Goes on from HEAD.pt if it is there; files that come into DIR meanwhile are used from the next pass on. Each text is
guessed from true features and from one, two, … own ones, as in a pipeline. Needs the `train` extra.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from experiments.eagle3.last_layers import LastLayers
from experiments.eagle3.net import Head, HeadConfig, load_head, save_head
from experiments.eagle3.recording import Text, read_texts, recorded
from experiments.eagle3.target_parts import begin_from, read_weights, shape_of
from experiments.eagle3.window import Window, window_of
from experiments.schedule import Schedule, optimisers

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FURTHER = 0.8
"""Weight of the loss after each further own feature, as EAGLE-3's authors weigh it."""

DISTANCE = 2.0
"""Weight of the distance beside that of the cross-entropy."""

SAVE_S = 120.0
NEVER = 1_000_000_000


def passes(directories: Sequence[Path], n_tokens: int, seed: int, last: LastLayers) -> Iterator[tuple[int, Window]]:
    """Windows of about `n_tokens`, texts of like length together, for ever; each with the number of its pass."""
    kept: dict[Path, list[tuple[Text, Tensor]]] = {}
    for number in range(NEVER):
        for path in (path for directory in directories for path in recorded(directory)):
            if path not in kept:
                kept[path] = [(text, _ends_of(text, last)) for text in read_texts(path) if len(text.tokens) > 2]
        rng = random.Random(f"{seed} {number}")
        texts = [each for some in kept.values() for each in some]
        texts.sort(key=lambda each: len(each[0].tokens) + rng.uniform(0, 32))
        groups: list[list[tuple[Text, Tensor]]] = [[]]
        for each in texts:
            if len(each[0].tokens) * (len(groups[-1]) + 1) > n_tokens and groups[-1]:
                groups.append([])
            groups[-1].append(each)
        rng.shuffle(groups)
        for group in groups:
            some, ends = zip(*group, strict=True)
            yield number, window_of(some, ends)


def _ends_of(text: Text, last: LastLayers) -> Tensor:
    features = torch.from_numpy(text.features[:, -1].view(np.int16)).view(torch.bfloat16)
    return last.normed(features.float())


def frequent_tokens(texts: Sequence[Text], n_vocab: int, n: int) -> Tensor:
    """The `n` tokens that the target is to write most often by what it thought likely, ascending; of tokens that it
    never thought of, those of the lowest ids, which a vocabulary of merges learned first."""
    counts = np.zeros(n_vocab)
    for text in texts:
        known = text.taught.any(-1)
        np.add.at(counts, text.taught[known], np.exp(text.logits[known].astype(np.float64)))
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:n]))


def loss_of(head: Head, window: Window, n_steps: int, place: Tensor) -> tuple[Tensor, list[float]]:
    """Cross-entropy with the target's likeliest tokens, half of it with the first alone, and the distance of what the
    output rows are multiplied by from the target's; and how often the first was guessed after 0, 1, … own features.

    `place` (n_vocab,): each token's place in the head's logits, or -1. A distance says more of a token than its
    likeliest successors do, which counts while there are few texts.
    """
    assert window.ends is not None
    ids, weights = place[window.taught[:, 1:]], window.weights[:, 1:]
    first = torch.zeros_like(weights)
    first[..., 0] = (weights[..., 0] > 0).float()
    weights = 0.5 * (weights + first) * (ids >= 0)
    is_taught = window.weights[:, 1:, 0] > 0
    loss, hits = torch.zeros(()), []
    scale = sum(FURTHER**step for step in range(n_steps))
    for step, states in enumerate(head.unroll(window.tokens, window.features, n_steps)):
        mask = is_taught.clone()
        mask[:, :step] = False
        normed, right, end = head.output_norm(states[mask]), ids[mask], window.ends[:, 1:][mask]
        logits = head.output(normed)
        log_probs = logits.gather(1, right.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
        distance = ((normed - end).square().sum(-1) / end.square().sum(-1)).mean()
        loss = loss + FURTHER**step / scale * (DISTANCE * distance - (weights[mask] * log_probs).sum(-1).mean())
        hits.append(float((logits.argmax(-1) == right[:, 0]).float().mean()))
    return loss, hits


@click.command(help=__doc__)
@click.option("-m", "target", type=FILE, required=True, help="The target, for its vectors and first weights.")
@click.option("--texts", type=FOLDER, required=True, multiple=True, help="Directories of recorded texts.")
@click.option("-o", "output", type=click.Path(path_type=Path), required=True, help="The head, written now and then.")
@click.option("--layers", type=int, nargs=3, help="Whose inputs were recorded. [default: 2, n/2 and n-3 of n]")
@click.option("--guessed", default=8192, show_default=True, help="Tokens that the head can guess.")
@click.option("--ff", "n_ff", default=0, help="Feed-forward width. [default: the target's]")
@click.option("--own", default=4, show_default=True, help="Own features in a row that it is trained on, less one.")
@click.option("--blind", is_flag=True, help="Read no features: a plain draft of the same cost.")
@click.option("--steps", default=2000, show_default=True)
@click.option("--minutes", default=120.0, show_default=True, help="Of all runs together.")
@click.option("--batch", default=1200, show_default=True, help="Tokens a step.")
@click.option("-t", "n_threads", default=1, show_default=True, help="Threads.")
def main(
    target: Path,
    texts: Sequence[Path],
    output: Path,
    layers: tuple[int, int, int] | None,
    guessed: int,
    n_ff: int,
    own: int,
    blind: bool,
    steps: int,
    minutes: float,
    batch: int,
    n_threads: int,
) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(n_threads)
    weights = read_weights(target)
    saved: dict[str, Any] = {"step": 0, "minutes": 0.0, "tokens": 0, "optims": ()}
    if output.exists():
        head, saved = load_head(output, weights["token_embd.weight"])
    else:
        config = HeadConfig(**shape_of(target, layers, n_ff), n_guessed=guessed, blind=blind)
        known = [text for each in texts for path in recorded(each) for text in read_texts(path)]
        head = Head(
            config, weights["token_embd.weight"], frequent_tokens(known, len(weights["token_embd.weight"]), guessed)
        )
        begin_from(head, weights, known)
        del known
    schedule = Schedule(output.stem, steps, minutes, batch, adam_lr=1e-3, n_warm=10)
    shape = shape_of(target, head.config.layers, 0)
    last = LastLayers(weights, shape, head.config.layers[-1])
    fit(head, schedule, texts, own if not blind else 1, output, saved, last)


def fit(
    head: Head,
    schedule: Schedule,
    texts: Sequence[Path],
    own: int,
    output: Path,
    saved: dict[str, Any],
    last: LastLayers,
) -> None:
    """Train in place, and write `output` every two minutes and at the end."""
    optims = optimisers(head, schedule, ("embd", "output.weight"))
    for (optim, _), state in zip(optims, saved["optims"], strict=False):
        optim.load_state_dict(state)
    step, before, n_tokens = saved["step"], saved["minutes"], saved["tokens"]
    place = torch.full((len(head.token_embd),), -1)
    place[head.guessed] = torch.arange(len(head.guessed))
    began = noted = written = time.monotonic()
    mean = np.zeros(own)

    def write() -> None:
        spent = before + (time.monotonic() - began) / 60
        states = [optim.state_dict() for optim, _ in optims]
        save_head(head, output, step=step, minutes=spent, tokens=n_tokens, optims=states)

    for number, window in passes(texts, schedule.n_batch_tokens, step, last):
        progress = max(step / schedule.steps, (before + (time.monotonic() - began) / 60) / schedule.minutes)
        if progress >= 1:
            break
        schedule.set_rates(optims, step, progress)
        head.zero_grad(set_to_none=True)
        loss, hits = loss_of(head, window, own, place)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optim, _ in optims:
            optim.step()
        step, n_tokens = step + 1, n_tokens + int((window.weights[..., 0] > 0).sum())
        mean = np.array(hits) if not mean.any() else 0.9 * mean + 0.1 * np.array(hits)
        now = time.monotonic()
        if now - noted > 20 or step == 1:
            noted = now
            said = " ".join(f"{share:.3f}" for share in mean)
            print(
                f"step {step} pass {number} {(now - began) / 60:.1f} min {n_tokens} tokens  "
                f"loss {loss.item():.3f}  right {said}",
                flush=True,
            )
        if now - written > SAVE_S:
            written = now
            write()
    write()


if __name__ == "__main__":
    main()
