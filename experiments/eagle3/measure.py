"""How often a head is right on texts that it was not trained on, by the age of its newest true feature and by depth:
`python -m experiments.eagle3.measure -m TARGET.gguf --texts DIR HEAD.pt`.

The texts are greedy ones. Age a: the guess is made after a own features in a row, over true tokens. Depth d: the d-th
guess of a chain from a true feature, where all before it were right. Prints Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
import torch

from experiments.eagle3.net import Head, load_head
from experiments.eagle3.recording import Text, read_texts, recorded
from experiments.eagle3.target_parts import read_weights
from experiments.eagle3.window import window_of
from pipeinfer.core.requests import Request
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.tree import Node
from pipeinfer.models.drafts.lookup import LookupDrafter
from pipeinfer.text import markdown_table

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
WIDTH, LEAST = 4, 100
"""Guesses at a place; chains that must have come to a depth for its share."""

Hits = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Found:
    """Of one text, for each token of the answer: whether it was the head's first guess, and among its first WIDTH, by
    age (n_ages, n); and whether it is what a lookup finds (n,)."""

    name: str
    first: Hits
    among: Hits
    lookup: Hits

    @property
    def group(self) -> str:
        return self.name.split("/")[0]


@torch.no_grad()
def look_at(head: Head, text: Text, n_ages: int) -> Found:
    window = window_of([text])
    begin = text.n_prompt - 2  # there the token before the answer is read, and the feature before that
    right = torch.from_numpy(text.taught[begin + 1 :, 0].astype(np.int64))
    first, among = [], []
    for states in head.unroll(window.tokens, window.features, n_ages):
        best = head.guessed[head.logits(states[0, begin:]).topk(WIDTH).indices]
        first.append((best[:, 0] == right).numpy())
        among.append((best == right[:, None]).any(-1).numpy())
    return Found(text.name, np.stack(first), np.stack(among), lookup_hits(text, right.tolist()))


def lookup_hits(text: Text, right: Sequence[int]) -> Hits:
    """Whether the answer's tokens, the last of them its end, are those that a lookup finds before each of them."""
    request = Request(0, text.tokens[: text.n_prompt].tolist(), len(right), SamplingParams(temp=0.0), 1 << 20)
    drafter, hits = LookupDrafter(), []
    drafter.open(request)
    for token in right:
        node = Node(request.tokens[-1], len(request.tokens) - 1)
        guesses = (drafter.expand(request, {node: 1}, lambda: False) or {}).get(node, [])
        hits.append([guess.token for guess in guesses] == [token])
        request.tokens.append(token)
    return np.array(hits)


def chains(hits: Hits) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each depth, how many chains came so far, and how many were right there too. `hits`: (n_ages, n)."""
    n_ages, n = hits.shape
    alive = np.ones(n, np.bool_)
    tried, right = np.zeros(n_ages, np.int64), np.zeros(n_ages, np.int64)
    for depth in range(min(n_ages, n)):
        alive = alive[: n - depth]  # those whose next token there is
        tried[depth] = alive.sum()
        alive = alive & hits[depth, depth:]
        right[depth] = alive.sum()
    return tried, right


def spread(shares: Sequence[float]) -> float:
    """The standard error of the mean over texts."""
    return float(np.std(shares, ddof=1) / len(shares) ** 0.5) if len(shares) > 1 else 0.0


def share(hits: Iterable[Hits]) -> str:
    """Of all tokens, with its standard error by texts."""
    known = list(hits)
    return f"{np.concatenate(known).mean():.3f} ± {spread([float(each.mean()) for each in known]):.3f}"


def by_age(found: Sequence[Found]) -> Iterator[list[str]]:
    tried, right = (np.sum(each, axis=0) for each in zip(*(chains(one.first) for one in found), strict=True))
    wide_tried, wide = (np.sum(each, axis=0) for each in zip(*(chains(one.among) for one in found), strict=True))
    for age in range(len(tried)):
        row = [str(age), share(one.first[age] for one in found), share(one.among[age] for one in found)]
        for n, n_right in ((tried[age], right[age]), (wide_tried[age], wide[age])):
            row.append(f"{n_right / n:.3f}" if n >= LEAST else "-")
        yield row


def ageing(shares: npt.NDArray[np.float64]) -> float:
    """The factor an own feature, of `simulate --ageing`, that comes closest to the shares by age."""
    factors = np.linspace(0, 1, 101)
    modelled = shares[0] * factors[:, None] ** np.arange(len(shares))
    return float(factors[np.square(modelled - shares).sum(-1).argmin()])


def by_set(found: Sequence[Found], plain: Sequence[Found]) -> Iterator[list[str]]:
    for group in [*dict.fromkeys(one.group for one in found), ""]:
        some = [one for one in found if group in ("", one.group)]
        others = [one for one in plain if group in ("", one.group)]
        row = [group or "all", str(len(some)), str(sum(one.first.shape[1] for one in some))]
        row += [share(one.first[age] for one in some) for age in (0, 4) if age < len(some[0].first)]
        row += [share(one.first[0] for one in others)] if others else []
        yield [*row, share(one.lookup for one in some)]


@click.command(help=__doc__)
@click.option("-m", "target", type=FILE, required=True, help="The target.")
@click.option("--texts", type=click.Path(exists=True, path_type=Path), required=True, help="Greedy texts, recorded.")
@click.option("--plain", type=FILE, help="A plain draft of the same cost: a head trained with --blind.")
@click.option("--ages", default=9, show_default=True)
@click.option("-t", "n_threads", default=1, show_default=True, help="Threads.")
@click.argument("head", type=FILE)
def main(target: Path, texts: Path, plain: Path | None, ages: int, n_threads: int, head: Path) -> None:
    torch.set_num_threads(n_threads)
    known = [text for path in recorded(texts) for text in read_texts(path)]
    vectors = read_weights(target)["token_embd.weight"]
    net, saved = load_head(head, vectors)
    found = [look_at(net, text, ages) for text in known]
    others = [look_at(load_head(plain, vectors)[0], text, 1) for text in known] if plain else []
    print(f"{saved['step']} steps, {saved['tokens']} tokens guessed at, {saved['minutes']:.1f} minutes of training\n")
    columns: tuple[str, ...] = ("age", "first guess", f"first {WIDTH}", "in a chain", f"in a chain {WIDTH} wide")
    print("\n".join(markdown_table(columns, by_age(found))), end="\n\n")
    shares = np.concatenate([one.first for one in found], 1).mean(-1)
    print(f"The factor for each own feature that comes closest (`simulate --ageing`): {ageing(shares):.2f}\n")
    columns = ("set", "texts", "tokens", "age 0", *["age 4"] * (ages > 4), *["plain draft"] * bool(plain), "lookup")
    print("\n".join(markdown_table(columns, by_set(found, others))))


if __name__ == "__main__":
    main()
