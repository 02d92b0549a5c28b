"""llama.cpp's samplers but the penalties, each a function of one row; the names of all; biases. Knows no model."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

Ids = npt.NDArray[np.intp]
Logits = npt.NDArray[np.float32]
Breakers = Mapping[int, tuple[tuple[int, ...], ...]]
"""Sequences of tokens that end a repetition, by their first tokens: what follows those."""

SAMPLERS: Mapping[str, Mapping[str, float]] = {
    "penalties": {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temp": 1.0, "dynatemp_range": 0.0},
}
"""llama.cpp's samplers in its default order, and the settings that switch each off."""

LETTERS = {"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p"}
LETTERS |= {"x": "xtc", "t": "temperature", "a": "adaptive_p", "i": "infill"}
OTHER_NAMES = {"typical_p": "typ_p", "typical": "typ_p", "nucleus": "top_p", "temp": "temperature"}
OFF = ("adaptive_p", "dynatemp")  # samplers that are off unless their own settings say otherwise
ON_ALL = ("penalties", "dry")  # these look at all tokens, before others leave some out

MOST_XTC = 0.5  # at most one token is likelier, and it stays: larger thresholds switch XTC off
FIRST_WIDTH, WIDER, NO_TOKEN = 8, 4, -1  # tokens compared at first; how many times as many after that
FIRST_STARTS, MORE_STARTS = 256, 8  # places looked at at first; how many times as many after that
MOST_FULL = 8  # tokens whose further places are passed over at once, as no repetition behind them can be longer
LOG_MAX = 88.7228391  # of the largest float32: llama.cpp's limit of a DRY penalty

BLOCKS_A_TOKEN = 32  # `largest` compares the maxima of so many blocks for each wanted token, and finds few others
BLOCK = 4096  # weights added at once
CHUNK = 16_384  # logits processed at once, within the processor's cache

HEADS = (1 / 512, 5 / 32)
"""Shares of the logits, the largest, that `nucleus` sorts before it sorts all. The first is enough where a model is
sure; the second is above a tenth, below which numpy's search for indices is slower."""

SAMPLE_EVERY = 64  # logits, of which one is sampled to find the least of such a share


def sampler_names(text: str) -> list[str]:
    """Names that are joined by semicolons, or llama.cpp's letters."""
    names = [each.strip().replace("-", "_") for each in text.split(";") if each.strip()]
    if len(names) == 1 and LETTERS.keys() >= set(text):
        return [LETTERS[letter] for letter in text]
    return [OTHER_NAMES.get(name, name) for name in names]


def switched_off(names: Collection[str]) -> dict[str, float]:
    """The settings that switch off all samplers but these."""
    return {name: value for sampler, off in SAMPLERS.items() if sampler not in names for name, value in off.items()}


def order_text(names: Sequence[str]) -> str:
    """`SamplingParams.sampler_order` of samplers; empty for llama.cpp's. Raises ValueError where it is not possible."""
    places = [tuple(SAMPLERS).index(name) for name in names]
    if places == sorted(set(places)):
        return ""
    if len(set(places)) < len(places):
        raise ValueError(f"has {max(names, key=names.count)} twice; name each once")
    first = [name for name in ON_ALL if name in names]
    if list(names[: len(first)]) != first:
        raise ValueError(f"has others before {first[-1]}; {', then '.join(ON_ALL)} come first")
    return ";".join(names)


def probabilities(values: Logits) -> npt.NDArray[np.float64]:
    """The softmax of logits (n,)."""
    weights = np.exp(values.astype(np.float64) - float(values.max()))
    return weights / weights.sum()


def within_sigmas(logits: Logits, n_sigmas: float) -> Logits:
    """Logits (n_vocab,) of which those further below the largest than `n_sigmas` deviations are -inf; a copy."""
    finite = logits[~np.isneginf(logits)]
    if not len(finite):
        return logits
    least = finite.max() - np.float32(n_sigmas) * finite.std(dtype=np.float64)
    return np.where(logits < least, np.float32(-np.inf), logits)


def typical(values: Logits, p: float) -> Ids:
    """Indices, ascending, of the fewest logits whose surprise is nearest to the entropy and whose probabilities add up
    to more than `p` (Meister et al. 2022)."""
    weights = probabilities(values)
    with np.errstate(divide="ignore"):
        surprise = -np.log(weights)
    order = np.argsort(np.abs(surprise - _entropy(weights)), kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(weights[order]), p, side="right")) + 1
    return np.sort(order[:n_kept])


def _entropy(weights: npt.NDArray[np.float64]) -> float:
    positive = weights[weights > 0.0]
    return -float(positive @ np.log(positive))


def without_top(values: Logits, threshold: float) -> Ids:
    """Indices, ascending, without all but the least likely of those at least as likely as `threshold` (XTC); of equal
    ones that with the largest index stays. Logits of -inf are excluded already."""
    top = np.flatnonzero((probabilities(values) >= threshold) & (values > -np.inf))
    if len(top) < 2:
        return np.arange(len(values))
    return np.delete(np.arange(len(values)), top[np.argsort(-values[top], kind="stable")[:-1]])


def dynamic_temperature(values: Logits, temp: float, spread: float, exponent: float) -> float:
    """From `temp` - `spread` where the choice is sure to `temp` + `spread` where all candidates are alike."""
    if len(values) < 2:
        return temp
    least = max(0.0, temp - spread)
    share = _entropy(probabilities(values)) / float(np.log(len(values)))
    return least + (temp + spread - least) * float(max(share, 0.0) ** exponent)


# -- top-k, top-p and min-p


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


def within_share(values: Logits, top_p: float) -> Ids:
    """Indices, ascending, of the fewest largest logits whose probabilities add up to `top_p`."""
    return nucleus(values, top := values.max(), top_p * total_weight(values, top))


def near_best(values: Logits, min_p: float) -> Ids:
    """Indices, ascending, of the logits at least `min_p` times as likely as the largest."""
    return np.flatnonzero(values >= values.max() + np.float32(np.log(min_p)))


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


# -- DRY: Don't Repeat Yourself


def repetition_penalties(
    history: Sequence[int], multiplier: float, base: float, allowed_length: int, breakers: Breakers
) -> tuple[Ids, Logits]:
    """(tokens that would go on with what the end of `history` repeats, what is taken from the logit of each).
    Repetitions do not reach over a breaker."""
    n_most = _since_breaker(history, breakers)
    if len(history) <= allowed_length or n_most < allowed_length:
        return np.empty(0, np.intp), np.empty(0, np.float32)
    max_exponent = int(LOG_MAX / np.log(base)) if base > 1.000001 else 0
    n_counted = n_most if max_exponent == 0 and base > 1.0 else min(n_most, allowed_length + max_exponent)
    longest = _longest(np.asarray(history)[::-1], allowed_length, n_counted)
    tokens = np.flatnonzero(longest > allowed_length)
    exponents = longest[tokens] - 1 - allowed_length
    if max_exponent:
        exponents = np.minimum(exponents, max_exponent)
    is_breaker = np.array([() in breakers.get(token, ()) for token in tokens.tolist()], bool)
    penalties = multiplier * np.float64(base) ** exponents
    return tokens[~is_breaker], penalties[~is_breaker].astype(np.float32)


def _longest(newest: npt.NDArray[np.integer], n_least: int, n_most: int) -> npt.NDArray[np.int32]:
    """By token id, 1 and the most tokens from somewhere behind such a token on that are those from 0 on, at most
    `n_most`; up to `n_least` where there are no more. Later starts are compared only if they may be longer."""
    longest = np.zeros(int(newest.max()) + 1, np.int32)
    if not n_least:
        longest[newest[:-1]] = 1
    padded = np.empty(len(newest) + n_most + 1, newest.dtype)
    padded[: len(newest)], padded[len(newest) :] = newest, NO_TOKEN
    newest = padded[: len(newest)]
    may_start = newest[1:] == newest[0]  # at 1 and so on
    if n_least > 1:
        may_start &= padded[n_least : len(newest) + n_least - 1] == newest[n_least - 1]
    first, n = 0, FIRST_STARTS
    while first < len(may_start):
        starts = np.flatnonzero(may_start[first : first + n]) + first + 1
        first, n = first + n, MORE_STARTS * n
        before = newest[starts - 1]
        least = np.maximum(longest[before], n_least) - 1
        are_longer = (least < n_most) & (padded[starts + least] == padded[least])
        before, lengths = before[are_longer], _matches(padded, starts[are_longer], n_most)
        np.maximum.at(longest, before, lengths + 1)
        for token in np.unique(before[lengths == n_most])[:MOST_FULL]:
            may_start[first:] &= newest[first:-1] != token
    return longest


def _matches(padded: npt.NDArray[np.integer], starts: Ids, n_most: int) -> npt.NDArray[np.int32]:
    """How many tokens from each of the `starts` on, above 0, are those from 0 on; at most `n_most`."""
    lengths, open_ones, at, width = np.zeros(len(starts), np.int32), np.arange(len(starts)), 0, FIRST_WIDTH
    while at < n_most and len(open_ones):
        width = min(width, n_most - at)
        differ = sliding_window_view(padded, width)[starts[open_ones] + at] != padded[at : at + width]
        ends = differ.any(axis=1)
        lengths[open_ones] += np.where(ends, differ.argmax(axis=1), width)
        open_ones, at, width = open_ones[~ends], at + width, WIDER * width
    return lengths


def _since_breaker(history: Sequence[int], breakers: Breakers) -> int:
    """The number of tokens behind the last breaker; all without one."""
    for n_behind, token in enumerate(reversed(history) if breakers else ()):
        if token not in breakers:
            continue
        following = history[len(history) - n_behind :]
        fitting = [len(tail) for tail in breakers[token] if tuple(following[: len(tail)]) == tail]
        if fitting:
            return n_behind - max(fitting)
    return len(history)


def breakers_text(sequences: Collection[Sequence[int]]) -> str:
    """Sequences of tokens as `read_breakers` reads them: the differences of single tokens, which may be thousands,
    then the others."""
    single = sorted({tokens[0] for tokens in sequences if len(tokens) == 1})
    steps = np.diff(single, prepend=0).tolist()
    longer = sorted({tuple(tokens) for tokens in sequences if len(tokens) > 1})
    return " ".join([",".join(map(str, steps)), *(",".join(map(str, each)) for each in longer)])


@lru_cache(maxsize=64)
def read_breakers(text: str) -> Breakers:
    """The sequences of `breakers_text`; none of an empty text."""
    steps, *longer = [list(map(int, filter(None, part.split(",")))) for part in text.split(" ")]
    tails: dict[int, tuple[tuple[int, ...], ...]] = dict.fromkeys(np.cumsum(steps, dtype=int).tolist(), ((),))
    for head, *tail in longer:
        tails[head] = (*tails.get(head, ()), tuple(tail))
    return tails


# -- biases of tokens, as a text such as `15+1.5 22-inf`

MAX_BIASES = 2048  # of one request, limited by the messages between ranks
BIAS = re.compile(r"([0-9]{1,10})([+-](?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?|-inf(?:inity)?)")
MAX_TOKEN_ID, MAX_BIAS = 2**31 - 1, 1e9


def read_bias(text: str) -> tuple[int, float]:
    """(token id, bias) of llama.cpp's TOKEN_ID(+/-)BIAS. Raises ValueError with the expected form."""
    match = BIAS.fullmatch(text)
    if not match or int(match[1]) > MAX_TOKEN_ID or not is_bias(float(match[2])):
        raise ValueError(f"is no TOKEN_ID(+/-)BIAS, such as 15043+1.5, 22-3 or 22-inf, of up to {MAX_BIAS:.0e}")
    return int(match[1]), float(match[2])


def is_bias(value: float) -> bool:
    return value == -math.inf or abs(value) <= MAX_BIAS


def bias_text(pairs: Iterable[tuple[int, float]]) -> str:
    """The canonical text of biases; those of one token add up, within the limit. Raises ValueError for too many
    tokens."""
    sums: dict[int, float] = {}
    for token, bias in pairs:
        total = sums.get(token, 0.0) + bias
        sums[token] = -math.inf if total < -MAX_BIAS else min(total, MAX_BIAS)
        if len(sums) > MAX_BIASES:
            raise ValueError(f"names more than {MAX_BIASES} tokens; {MAX_BIASES} are possible")
    return " ".join(f"{token}{float(np.float32(bias)):+.9g}" for token, bias in sorted(sums.items()))


@lru_cache(maxsize=256)
def read_biases(text: str) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """(token ids, ascending; biases)."""
    pairs = [read_bias(each) for each in text.split()]
    return np.array([token for token, _ in pairs], np.intp), np.array([bias for _, bias in pairs], np.float32)
