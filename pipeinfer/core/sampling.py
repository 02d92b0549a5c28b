"""Choose a token from logits: the same choice for the same (logits, seed, position), wherever and whenever asked. Knows
no tree and no model. A choice reads every logit about once: usually only tokens that can be chosen are sorted, or get
noise."""

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pipeinfer.core.samplers import (
    CHUNK,
    MAX_TOKEN_ID,
    MOST_XTC,
    Ids,
    Logits,
    bias_text,
    dynamic_temperature,
    largest,
    near_best,
    nucleus,
    read_biases,
    read_breakers,
    repetition_penalties,
    total_weight,
    typical,
    within_share,
    within_sigmas,
    without_top,
)
from pipeinfer.core.settings import setting
from pipeinfer.core.types import Allowed

N_EXACT = 512  # candidates whose noise is computed without bounding it first
MIN_TEMP = 1e-30  # lower temperatures are greedy: they would overflow as divisors
BELOW_BEST = 8.0  # of many candidates, those further below the best are left out: each is less than e^-8 as likely
ROUNDING = 1e-6  # of a bound in float32, as a share of it: logits divided by a low temperature are large
TEMPERATURE = ("--temp", "--temperature")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """llama.cpp's meanings and defaults. `top_k` <= 0, `top_p` >= 1, `min_p` <= 0 switch off.

    The penalties use the last `repeat_last_n` tokens of prompt and output. `dry_sequence_breakers`: a JSON list of
    texts; empty: llama.cpp's. `dry_breakers`: the same as tokens, as `breakers_text` writes them; rank 0 makes them.
    `logit_bias`: as `bias_text` writes them. `ends`: the same, before position `ends_from`; see `with_ends`.
    `grammar`: what the output must match, in llama.cpp's form (GBNF) or as a JSON schema; empty: anything.
    `reasoning`: the budget of reasoning, as `models.text.reasoning` writes it; empty: there is none.
    `sampler_order`: names of samplers, joined by semicolons, where it is not llama.cpp's (`order_text`).
    `n_logprobs`: the number of likeliest tokens whose log-probabilities are wanted, with that of the chosen one; below
    0: none. `n_prompt_logprobs`: the same of the prompt's tokens, all but the first.
    `base_chunk`: what scores of the prompt are compared with, as the stages write it; empty: nothing."""

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
    top_n_sigma: float = setting(
        -1.0, "--top-nsigma", "--top-n-sigma", aliases=("nsigma",), help="Below or 0: off.", least=-1, most=1000
    )
    typical_p: float = setting(1.0, "--typical", "--typical-p", aliases=("typ_p", "typical"), help="1: off.", most=1)
    xtc_probability: float = setting(0.0, "--xtc-probability", help="Chance that the likeliest go; 0: off.", most=1)
    xtc_threshold: float = setting(0.1, "--xtc-threshold", help="Least probability left out; above 0.5: off.", most=1)
    dynatemp_range: float = setting(0.0, "--dynatemp-range", help="The temperature varies by it; 0: off.", most=1000)
    dynatemp_exponent: float = setting(1.0, "--dynatemp-exp", help="Exponent of the normalised entropy.", most=1000)
    dry_multiplier: float = setting(0.0, "--dry-multiplier", help="Penalty for repetitions; 0: off.", most=1000)
    dry_base: float = setting(1.75, "--dry-base", help="Growth of the penalty by token; below 1: off.", most=1000)
    dry_allowed_length: int = setting(2, "--dry-allowed-length", help="Tokens repeated freely.", most=4096)
    dry_penalty_last_n: int = setting(-1, "--dry-penalty-last-n", help="Tokens searched; 0: off, -1: all.", least=-1)
    min_tokens: int = setting(0, "--min-tokens", help="Tokens before the model may end the text.", most=2**31 - 1)
    dry_sequence_breakers: str = ""
    dry_breakers: str = ""
    sampler_order: str = ""
    ends: str = ""
    ends_from: int = 0
    logit_bias: str = ""
    grammar: str = ""
    base_chunk: str = ""
    reasoning: str = ""
    n_logprobs: int = -1
    n_prompt_logprobs: int = -1

    def __post_init__(self) -> None:
        if self.temp < MIN_TEMP:
            object.__setattr__(self, "temp", 0.0)

    @property
    def settled(self) -> "SamplingParams":
        """The same with a random seed if none was given."""
        return self if self.seed >= 0 else replace(self, seed=secrets.randbits(32))

    def with_ends(self, n_prompt: int, ends: Iterable[int]) -> "SamplingParams":
        """The same for a prompt of so many tokens: none of `ends` is chosen before `min_tokens` others."""
        if not self.min_tokens:
            return self
        never = bias_text((token, -math.inf) for token in ends)
        return replace(self, ends=never, ends_from=n_prompt + self.min_tokens)

    @property
    def is_constrained(self) -> bool:
        return bool(self.grammar or self.reasoning)

    @property
    def is_greedy(self) -> bool:
        return self.temp <= 0.0 and self.dynatemp_range <= 0.0

    @property
    def may_cut_best(self) -> bool:
        """Whether the most likely token may be no candidate."""
        return self.typical_p < 1.0 or self.has_xtc

    @property
    def has_xtc(self) -> bool:
        return self.xtc_probability > 0.0 and self.xtc_threshold <= MOST_XTC

    @property
    def penalised(self) -> int:
        """How many of the newest tokens the penalties use."""
        off = self.repeat_penalty == 1.0 and self.frequency_penalty == 0.0 and self.presence_penalty == 0.0
        return 0 if off else self.repeat_last_n

    @property
    def searched(self) -> int:
        """In how many of the newest tokens DRY looks for repetitions."""
        if self.dry_multiplier == 0.0 or self.dry_base < 1.0:
            return 0
        return self.dry_penalty_last_n if self.dry_penalty_last_n >= 0 else MAX_TOKEN_ID

    @property
    def looks_back(self) -> int:
        """How many of the newest tokens are used."""
        return max(self.penalised, self.searched)


def choose(
    logits: Logits, params: SamplingParams, position: int, history: Sequence[int] = (), allowed: Allowed | None = None
) -> int:
    """The token for `position` given its logits (n_vocab,): greedy, or a Gumbel-max sample of the kept candidates. As
    in llama.cpp, tokens that are not allowed are left out only if one of them would be chosen. `history`: as in
    `adjust`. The logits are changed in place."""
    adjust(logits, params, position, history)
    token = _pick(logits, params, position)
    if allowed and not allowed.has(token):
        allowed.restrict(logits)
        token = _pick(logits, params, position)
    return token


def _pick(logits: Logits, params: SamplingParams, position: int) -> int:
    if params.logit_bias and np.isneginf(logits.max()):
        return int(np.argmax(logits))
    if params.is_greedy:
        return int(np.argmax(likeliest_left(logits, params, position)))
    ids, scores = perturbed(logits, params, position)
    return int(ids[np.argmax(scores)])


def likeliest_left(logits: Logits, params: SamplingParams, position: int) -> Logits:
    """Logits (n_vocab,), of which those that are no candidates are -inf where the best may be one of them."""
    if not params.may_cut_best:
        return logits
    masked = np.full_like(logits, -np.inf)
    ids, values = remaining(logits, params, position)
    masked[ids] = values
    return masked


def adjust(logits: Logits, params: SamplingParams, position: int, history: Sequence[int]) -> None:
    """Apply biases, then penalties for tokens of `history`, at most `params.looks_back`, and for those that would go on
    with a repetition, to logits (n_vocab,) of the token for `position`, in place; llama.cpp's order."""
    for text in filter(None, (params.logit_bias, params.ends if position < params.ends_from else "")):
        ids, biases = read_biases(text)
        n = int(np.searchsorted(ids, len(logits)))  # tokens beyond the vocabulary are ignored
        logits[ids[:n]] += biases[:n]
    if history and params.penalised:
        ids, counts = np.unique(np.asarray(history[-params.penalised :]), return_counts=True)
        seen = logits[ids]
        seen = np.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
        logits[ids] = seen - counts * params.frequency_penalty - params.presence_penalty
    if history and params.searched:
        how = params.dry_multiplier, params.dry_base, params.dry_allowed_length, read_breakers(params.dry_breakers)
        ids, penalties = repetition_penalties(history[-params.searched :], *how)
        logits[ids] -= penalties


def perturbed(logits: Logits, params: SamplingParams, position: int) -> tuple[Ids, npt.NDArray[np.float64]]:
    """Candidates and their scores, the highest of which is the sample (Gumbel-max); `params` is not greedy. Of many
    candidates only those near the best."""
    ids, values = remaining(logits, params, position)
    temp = 1.0 if params.sampler_order else temperature(values, params)
    if len(ids) > N_EXACT:
        return contenders(ids, values, params.seed, position, temp)
    return ids, scores(values, random_words(params.seed, position, ids), temp)


def temperature(values: Logits, params: SamplingParams) -> float:
    """What these logits are divided by; at least `MIN_TEMP`."""
    temp = params.temp
    if params.dynatemp_range > 0.0:
        temp = dynamic_temperature(values, temp, params.dynatemp_range, params.dynatemp_exponent)
    return max(MIN_TEMP, temp)


def scores(values: Logits, words: npt.NDArray[np.uint64], temp: float) -> npt.NDArray[np.float64]:
    """Logits divided by the temperature, plus the noise of their random words."""
    return values.astype(np.float64) / temp + gumbel(words)


def contenders(ids: Ids, values: Logits, seed: int, position: int, temp: float) -> tuple[Ids, npt.NDArray[np.float64]]:
    """The candidates within `BELOW_BEST` of the best, and some others, with their scores."""
    reached, parts = -np.inf, []
    for start in range(0, len(ids), CHUNK):
        part = slice(start, start + CHUNK)
        words = random_words(seed, position, ids[part])
        bounds = values[part] * np.float32(1.0 / temp) + gumbel_bound(words)
        hopeful = slice(best := int(np.argmax(bounds)), best + 1)
        reached = max(reached, float(scores(values[part][hopeful], words[hopeful], temp)[0]))
        near = np.flatnonzero(bounds >= np.float32(reached - BELOW_BEST - ROUNDING * abs(reached)))
        parts.append((ids[part][near], scores(values[part][near], words[near], temp)))
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([score for _, score in parts])


# -- candidates


def remaining(logits: Logits, params: SamplingParams, position: int) -> tuple[Ids, Logits]:
    """The candidates and their logits, divided by the temperature if there is an order of samplers. As in llama.cpp,
    where they count for dynamic temperature, top-n-sigma leaves tokens out by logits of -inf."""
    ids, values = None, logits
    for name in params.sampler_order.split(";") if params.sampler_order else USUAL:
        if name == "temperature":
            values = values / np.float32(temperature(values, params))
        elif name == "top_n_sigma":
            values = within_sigmas(values, params.top_n_sigma) if params.top_n_sigma > 0.0 else values
        elif name in CUTS and CUTS[name][0](params, len(values)):
            indices = CUTS[name][1](values, params, position)
            ids, values = indices if ids is None else ids[indices], values[indices]
    return np.arange(len(logits)) if ids is None else ids, values


def likely(values: Logits, params: SamplingParams) -> Ids:
    """Indices of the logits that top-p and then min-p leave, ascending."""
    if params.min_p <= 0.0:
        return within_share(values, params.top_p) if params.top_p < 1.0 else np.arange(len(values))
    # top-p does not depend on less likely tokens, so min-p may go first
    near = near_best(values, params.min_p)
    if params.top_p >= 1.0:
        return near
    top = values.max()
    return near[nucleus(values[near], top, params.top_p * total_weight(values, top))]


def _without_top(values: Logits, params: SamplingParams, position: int) -> Ids:
    if coin(params.seed, position) < params.xtc_probability:
        return without_top(values, params.xtc_threshold)
    return np.arange(len(values))


Cut = Callable[[Logits, SamplingParams, int], Ids]
CUTS: Mapping[str, tuple[Callable[[SamplingParams, int], bool], Cut]] = {
    "top_k": (lambda params, n: 0 < params.top_k < n, lambda values, params, _: largest(values, params.top_k)),
    "typ_p": (lambda params, _: params.typical_p < 1.0, lambda values, params, _: typical(values, params.typical_p)),
    "top_p": (lambda params, _: params.top_p < 1.0, lambda values, params, _: within_share(values, params.top_p)),
    "min_p": (lambda params, _: params.min_p > 0.0, lambda values, params, _: near_best(values, params.min_p)),
    "likely": (
        lambda params, _: params.top_p < 1.0 or params.min_p > 0.0,
        lambda values, params, _: likely(values, params),
    ),
    "xtc": (lambda params, n: params.has_xtc and n > 1, _without_top),
}
"""What leaves tokens out, by sampler (`likely`: top-p, then min-p): (is it on for so many tokens; what it keeps)."""

USUAL = ("top_n_sigma", "top_k", "typ_p", "likely", "xtc")  # llama.cpp's order


# -- noise, a function of seed, position and token id alone: it does not depend on other tokens, on earlier numbers, on
# the batch, or on the rank. From a counter-based generator (Philox 4x64-10, Salmon et al. 2011).

IDS_A_JUMP = 700  # so many consecutive numbers take as long as a jump to one number
WORDS_A_BLOCK = 4  # the generator's counter counts blocks
COIN_STREAM = 1  # of the generator's counter: tokens have 0


def random_words(seed: int, position: int, ids: Ids) -> npt.NDArray[np.uint64]:
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


def gumbel_bound(words: npt.NDArray[np.uint64]) -> Logits:
    """An upper bound of `gumbel` (n,), up to rounding; infinite for the largest bits. With u the uniform number,
    -log(-log(u)) <= -log(1 - u): one logarithm of 32 bits instead of two of 53."""
    high_halves = words.astype("<u8", copy=False).view("<u4")[1::2]
    with np.errstate(divide="ignore"):
        return np.float32(32 * np.log(2)) - np.log((~high_halves).astype(np.float32))


def coin(seed: int, position: int) -> float:
    """A uniform number in [0, 1), of a stream of its own."""
    generator = np.random.Philox(key=seed, counter=[0, 0, COIN_STREAM, position])
    return float(int(generator.random_raw()) >> 11) * 2.0**-53
