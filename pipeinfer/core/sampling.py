"""Choose a token from logits: the same choice for the same (logits, seed, position), wherever and whenever asked.

Knows no tree and no model. A choice reads every logit about once: usually only tokens that can be chosen are sorted, or
get noise. Noise is a function of seed, position and token id alone, from a counter-based generator (Philox 4x64-10,
Salmon et al. 2011): a token's number does not depend on other tokens, on earlier numbers, on the batch, or on the rank.
"""

import math
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeinfer.core.settings import setting
from pipeinfer.core.types import Allowed

Ids = npt.NDArray[np.intp]
Logits = npt.NDArray[np.float32]

BLOCKS_A_TOKEN = 32  # `largest` compares the maxima of so many blocks for each wanted token, and finds few others
BLOCK = 4096  # weights added at once
CHUNK = 16_384  # logits processed at once, within the processor's cache

HEADS = (1 / 512, 5 / 32)
"""Shares of the logits, the largest, that `nucleus` sorts before it sorts all. The first is enough where a model is
sure; the second is above a tenth, below which numpy's search for indices is slower."""

SAMPLE_EVERY = 64  # logits, of which one is sampled to find the least of such a share
N_EXACT = 512  # candidates whose noise is computed without bounding it first
MIN_TEMP = 1e-30  # lower temperatures are greedy: they would overflow as divisors
BELOW_BEST = 8.0  # of many candidates, those further below the best are left out: each is less than e^-8 as likely
MAX_BIASES = 2048  # of one request, limited by the messages between ranks
BIAS = re.compile(r"([0-9]{1,10})([+-](?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?|-inf(?:inity)?)")
MAX_TOKEN_ID, MAX_BIAS = 2**31 - 1, 1e9

TEMPERATURE = ("--temp", "--temperature")

IDS_A_JUMP = 700  # so many consecutive numbers take as long as a jump to one number
WORDS_A_BLOCK = 4  # the generator's counter counts blocks


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """llama.cpp's meanings and defaults. `temp` <= 0 is greedy; `top_k` <= 0, `top_p` >= 1, `min_p` <= 0 switch off.

    The penalties use the last `repeat_last_n` tokens of prompt and output. `logit_bias`: as `bias_text` writes them.
    `grammar`: what the output must match, in llama.cpp's form (GBNF) or as a JSON schema; empty: anything.
    `n_logprobs`: the number of likeliest tokens whose log-probabilities are wanted, with that of the chosen one; below
    0: none."""

    heading = "Sampling"
    seed: int = setting(-1, "--seed", "-s", help="-1: a random one.", least=-1, most=2**32 - 1)
    temp: float = setting(
        0.8, *TEMPERATURE, aliases=("temperature",), help="Temperature; 0 is greedy.", most=1000, first=True
    )
    top_k: int = setting(40, "--top-k", help="0 switches it off.", least=-1)
    top_p: float = setting(0.95, "--top-p", help="1 switches it off.", most=1)
    min_p: float = setting(0.05, "--min-p", help="0 switches it off.", most=1)
    repeat_last_n: int = setting(64, "--repeat-last-n", help="Tokens penalised.", most=4096)
    repeat_penalty: float = setting(
        1.0, "--repeat-penalty", aliases=("repetition_penalty",), help="1: off.", least=0.01, most=100
    )
    frequency_penalty: float = setting(0.0, "--frequency-penalty", help="0: off.", least=-1000, most=1000)
    presence_penalty: float = setting(0.0, "--presence-penalty", help="0: off.", least=-1000, most=1000)
    logit_bias: str = ""
    grammar: str = ""
    n_logprobs: int = -1

    def __post_init__(self) -> None:
        if self.temp < MIN_TEMP:
            object.__setattr__(self, "temp", 0.0)

    @property
    def settled(self) -> "SamplingParams":
        """The same with a random seed if none was given."""
        return self if self.seed >= 0 else replace(self, seed=secrets.randbits(32))

    @property
    def looks_back(self) -> int:
        """How many of the newest tokens the penalties use."""
        off = self.repeat_penalty == 1.0 and self.frequency_penalty == 0.0 and self.presence_penalty == 0.0
        return 0 if off else self.repeat_last_n


def choose(
    logits: Logits, params: SamplingParams, position: int, history: Sequence[int] = (), allowed: Allowed | None = None
) -> int:
    """The token for `position` given its logits (n_vocab,): greedy, or a Gumbel-max sample of the kept candidates. As
    in llama.cpp, tokens that are not allowed are left out only if one of them would be chosen. `history`: as in
    `adjust`. The logits are changed in place."""
    adjust(logits, params, history)
    token = _pick(logits, params, position)
    if allowed and not allowed.has(token):
        allowed.restrict(logits)
        token = _pick(logits, params, position)
    return token


def _pick(logits: Logits, params: SamplingParams, position: int) -> int:
    if params.temp <= 0.0 or (params.logit_bias and np.isneginf(logits.max())):
        return int(np.argmax(logits))
    ids, scores = perturbed(logits, params, position)
    return int(ids[np.argmax(scores)])


def adjust(logits: Logits, params: SamplingParams, history: Sequence[int]) -> None:
    """Apply biases, then penalties for tokens of `history`, at most `params.looks_back`, to logits (n_vocab,), in
    place; llama.cpp's order."""
    if params.logit_bias:
        ids, biases = read_biases(params.logit_bias)
        n = int(np.searchsorted(ids, len(logits)))  # tokens beyond the vocabulary are ignored
        logits[ids[:n]] += biases[:n]
    if not history or not params.looks_back:
        return
    ids, counts = np.unique(np.asarray(history), return_counts=True)
    seen = logits[ids]
    seen = np.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
    logits[ids] = seen - counts * params.frequency_penalty - params.presence_penalty


def perturbed(logits: Logits, params: SamplingParams, position: int) -> tuple[Ids, npt.NDArray[np.float64]]:
    """Candidates and their scores, the highest of which is the sample (Gumbel-max); `params.temp` is above 0. Of many
    candidates only those near the best."""
    ids = candidates(logits, params)
    values = logits if len(ids) == len(logits) else logits[ids]
    if len(ids) > N_EXACT:
        return contenders(ids, values, params, position)
    return ids, scores(values, random_words(params.seed, position, ids), params.temp)


def scores(values: Logits, words: npt.NDArray[np.uint64], temp: float) -> npt.NDArray[np.float64]:
    """Logits divided by the temperature, plus the noise of their random words."""
    return values.astype(np.float64) / temp + gumbel(words)


def contenders(ids: Ids, values: Logits, params: SamplingParams, position: int) -> tuple[Ids, npt.NDArray[np.float64]]:
    """The candidates within `BELOW_BEST` of the best, and some others, with their scores."""
    reached, parts = -np.inf, []
    for start in range(0, len(ids), CHUNK):
        part = slice(start, start + CHUNK)
        words = random_words(params.seed, position, ids[part])
        bounds = values[part] * np.float32(1.0 / params.temp) + gumbel_bound(words)
        hopeful = slice(best := int(np.argmax(bounds)), best + 1)
        reached = max(reached, float(scores(values[part][hopeful], words[hopeful], params.temp)[0]))
        near = np.flatnonzero(bounds >= np.float32(reached - BELOW_BEST))
        parts.append((ids[part][near], scores(values[part][near], words[near], params.temp)))
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([score for _, score in parts])


# -- candidates


def candidates(logits: Logits, params: SamplingParams) -> Ids:
    """Token ids left by top-k, then top-p, then min-p (llama.cpp's order), ascending; ties go to the smaller id."""
    if 0 < params.top_k < len(logits):
        ids = largest(logits, params.top_k)
        return ids[likely(logits[ids], params)]
    return likely(logits, params)


def largest(logits: Logits, n: int) -> Ids:
    """The ids of the `n` largest of more logits (n_vocab,), ascending; ties go to the smaller id."""
    n_blocks = BLOCKS_A_TOKEN * n
    n_rows = len(logits) // n_blocks
    if n_rows < 2:
        return _first(logits, n, np.partition(logits, -n)[-n])
    # at least n tokens, and hardly more, reach the n-th largest of the blocks' maxima
    maxima = logits[: n_rows * n_blocks].reshape(n_rows, n_blocks).max(axis=0)
    ids = np.flatnonzero(logits >= np.partition(maxima, -n)[-n])
    values = logits[ids]
    return ids[_first(values, n, np.partition(values, -n)[-n])]


def _first(values: Logits, n: int, least: np.float32) -> Ids:
    """Indices of the `n` largest, ascending; `least` is the n-th largest; ties go to the smaller index."""
    indices = np.flatnonzero(values >= least)
    if len(indices) == n:
        return indices
    ties = np.flatnonzero(values[indices] == least)
    return np.delete(indices, ties[n - len(indices) :])


def likely(values: Logits, params: SamplingParams) -> Ids:
    """Indices of the logits that top-p and then min-p leave, ascending."""
    top = values.max()
    if params.min_p <= 0.0:
        if params.top_p >= 1.0:
            return np.arange(len(values))
        return nucleus(values, top, params.top_p * total_weight(values, top))
    # top-p does not depend on less likely tokens, so min-p may go first
    likely_ids = np.flatnonzero(values >= top + np.float32(np.log(params.min_p)))
    if params.top_p >= 1.0:
        return likely_ids
    return likely_ids[nucleus(values[likely_ids], top, params.top_p * total_weight(values, top))]


def _weights(values: Logits, top: np.float32) -> Logits:
    """exp(logit - top), to which the probabilities are proportional."""
    below = values - top
    return np.exp(below, out=below)


def total_weight(values: Logits, top: np.float32) -> float:
    starts = range(0, len(values), CHUNK)
    return sum(float(_weights(values[start : start + CHUNK], top).sum(dtype=np.float64)) for start in starts)


def nucleus(values: Logits, top: np.float32, target: float) -> Ids:
    """Indices, ascending, of the fewest largest logits whose weights add up to `target`, or of all."""
    if len(values) > CHUNK:
        sample = np.sort(values[::SAMPLE_EVERY])[::-1]
        for share in HEADS:
            head = np.flatnonzero(values >= sample[int(share * len(sample))])
            indices, reached = _reaching(values[head], top, target)
            if reached:
                return head[indices]
    return _reaching(values, top, target)[0]


def _reaching(values: Logits, top: np.float32, target: float) -> tuple[Ids, bool]:
    """What `nucleus` returns, and whether that reaches the target."""
    ordered = np.sort(values)
    n_needed = _n_until(_weights(ordered[::-1], top), target)
    n = min(n_needed, len(values))
    return _first(values, n, ordered[-n]), n == n_needed


def _n_until(weights: Logits, target: float) -> int:
    """How many of the first weights reach the target; one more than there are if all do not."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64)
    reached = np.cumsum(sums)
    block = int(np.searchsorted(reached[:-1], target))
    inside = reached[block] - sums[block] + np.cumsum(weights[block * BLOCK :][:BLOCK], dtype=np.float64)
    return block * BLOCK + int(np.searchsorted(inside, target)) + 1


# -- biases: a text such as `15+1.5 22-inf`


def read_bias(text: str) -> tuple[int, float]:
    """(token id, bias) of llama.cpp's TOKEN_ID(+/-)BIAS. Raises ValueError with the expected form."""
    match = BIAS.fullmatch(text)
    if not match or int(match[1]) > MAX_TOKEN_ID or not is_bias(float(match[2])):
        raise ValueError(f"is no TOKEN_ID(+/-)BIAS, such as 15043+1.5, 22-3 or 22-inf, of up to {MAX_BIAS:.0e}")
    return int(match[1]), float(match[2])


def is_bias(value: float) -> bool:
    return value == -math.inf or abs(value) <= MAX_BIAS


def bias_text(pairs: Iterable[tuple[int, float]]) -> str:
    """The canonical text of biases; those of one token add up. Raises ValueError for too many tokens."""
    sums: dict[int, float] = {}
    for token, bias in pairs:
        sums[token] = sums.get(token, 0.0) + bias
        if len(sums) > MAX_BIASES:
            raise ValueError(f"names more than {MAX_BIASES} tokens; {MAX_BIASES} are possible")
    return " ".join(f"{token}{float(np.float32(bias)):+.9g}" for token, bias in sorted(sums.items()))


@lru_cache(maxsize=256)
def read_biases(text: str) -> tuple[Ids, Logits]:
    """(token ids, ascending; biases)."""
    pairs = [read_bias(each) for each in text.split()]
    return np.array([token for token, _ in pairs], np.intp), np.array([bias for _, bias in pairs], np.float32)


# -- noise


def random_words(seed: int, position: int, ids: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
    """64 random bits for each of the token ids (n,), at least one, which must ascend."""
    block = int(ids[0]) // WORDS_A_BLOCK
    generator = np.random.Philox(key=seed, counter=[block, 0, 0, position])
    n_between = int(ids[-1]) + 1 - block * WORDS_A_BLOCK
    if n_between < IDS_A_JUMP * len(ids):
        drawn = np.asarray(generator.random_raw(n_between))
        return drawn if n_between == len(ids) else drawn[ids - block * WORDS_A_BLOCK]
    words = np.empty(len(ids), np.uint64)
    drawn, block = generator.random_raw(WORDS_A_BLOCK), block + 1  # the next block
    for index, token in enumerate(ids.tolist()):
        target, offset = divmod(token, WORDS_A_BLOCK)
        if target >= block:
            generator.advance(target - block)
            drawn, block = generator.random_raw(WORDS_A_BLOCK), target + 1
        words[index] = drawn[offset]
    return words


def gumbel(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise (n,) from 64 random bits each."""
    # 53 bits, in the open interval (0, 1): the largest would be rounded up to 1, and its logarithm be 0
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(np.minimum(uniform, 1.0 - 2.0**-53)))


def gumbel_bound(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """An upper bound of `gumbel` (n,), up to rounding; infinite for the largest bits. With u the uniform number,
    -log(-log(u)) <= -log(1 - u): one logarithm of 32 bits instead of two of 53."""
    high_halves = words.astype("<u8", copy=False).view("<u4")[1::2]
    with np.errstate(divide="ignore"):
        return np.float32(32 * np.log(2)) - np.log((~high_halves).astype(np.float32))
