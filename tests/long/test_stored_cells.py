"""200 random texts that begin with cells from the disk, on a real model: they have the bits of texts read again.

SmolLM2 where its package is installed, else the shipped target; PIPEINFER_TARGET names another.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.models.demo import default_models
from pipeinfer.models.text.tokenizer import Tokenizer
from tests.support.serving import Served

pytestmark = pytest.mark.long

N_CASES = 50  # for each number of ranks
DOCS = Path(__file__).parents[2] / "docs"


def ask(served: Served, prompt: list[int], seed: int, **more: Any) -> tuple[dict[str, Any], int]:
    """What is said, with probabilities, and how many tokens were not read."""
    body = {"prompt": prompt, "n_predict": 12, "n_probs": 3, "seed": seed, "temperature": 0.9 * (seed % 2)}
    answer = served.http.post("/completion", json=body | more, timeout=300).json()
    said = {name: answer[name] for name in ("content", "completion_probabilities")}
    return said, answer["timings"]["cache_n"]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_what_comes_from_the_disk_has_the_same_bits(n_ranks: int, tmp_path: Path) -> None:
    rng = random.Random(n_ranks)
    target = Path(os.environ.get("PIPEINFER_TARGET") or default_models(with_draft=False)[0])
    words = ["-m", str(target), "-md", "none", "-c", "8192"]
    stored = [*words, "--kv-disk", "4G", "--kv-dir", str(tmp_path)]
    with Served(n_ranks, words, timeout_s=300) as served:
        tokens = Tokenizer(target).encode(" ".join(path.read_text() for path in sorted(DOCS.rglob("*.md"))))
        cases = list[tuple[list[int], list[int], int]]()
        for seed in range(N_CASES):
            at, n = rng.randrange(len(tokens) - 1500), rng.randint(130, 900)
            n_same, n_more = rng.randint(129, n), rng.randint(0, 300)
            other = rng.randrange(len(tokens) - 1500)
            cases.append((tokens[at : at + n], tokens[at : at + n_same] + tokens[other : other + n_more], seed))
        read = [ask(served, again, seed, cache_prompt=False)[0] for _, again, seed in cases]
    with Served(n_ranks, stored, timeout_s=300) as served:
        for first, _, seed in cases:
            ask(served, first, seed)
    with Served(n_ranks, stored, timeout_s=300) as served:
        restored = [ask(served, again, seed) for _, again, seed in cases]
    different = [seed for (_, _, seed), one, (other, _) in zip(cases, read, restored, strict=True) if one != other]
    n_restored = sum(n_cached > 0 for _, n_cached in restored)
    print(f"\n{n_ranks} ranks: {n_restored} of {N_CASES} from the disk, {sum(n for _, n in restored)} tokens")
    assert not different
    assert n_restored >= 0.9 * N_CASES
