"""Random numbers of sampling, functions of seed, position and token id alone, from a counter-based generator (Philox
4x64-10, Salmon et al. 2011): a token's number does not depend on other tokens, on earlier numbers, on the batch, or on
the rank. Knows no logits."""

import numpy as np
import numpy.typing as npt

IDS_A_JUMP = 700  # so many consecutive numbers take as long as a jump to one number
WORDS_A_BLOCK = 4  # the generator's counter counts blocks
COIN_STREAM = 1  # of the generator's counter: tokens have 0


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


def coin(seed: int, position: int) -> float:
    """A uniform number in [0, 1), of a stream of its own."""
    generator = np.random.Philox(key=seed, counter=[0, 0, COIN_STREAM, position])
    return float(int(generator.random_raw()) >> 11) * 2.0**-53
