"""How often a draft's best guess is right, from what papers report of whole guesses: accepted over drafted ones."""

from collections.abc import Sequence

from pipeinfer.virtual.choices import RecordedChoices


def chain_rate(top1: float, n_guesses: int) -> float:
    """Accepted over sent of chains of `n_guesses`, of which a guess is right `top1` of the times that those before it
    are."""
    return sum(top1**depth for depth in range(1, n_guesses + 1)) / n_guesses


def top1_of_chain(rate: float, n_guesses: int = 4) -> float:
    """The `top1` that gives this rate: PipeInfer reports it for trees of four (section V-B), which are chains with its
    cutoffs."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if chain_rate(middle, n_guesses) < rate else (low, middle)
    return round(low, 3)


def recorded_chain_rate(texts: Sequence[RecordedChoices], n_guesses: int) -> float:
    """Accepted over sent of such chains, one after each token of recorded texts."""
    accepted = sent = 0
    for text in texts:
        for start in range(len(text.tokens) - n_guesses + 1):
            window = text.hits[start : start + n_guesses]
            accepted += next((depth for depth, hit in enumerate(window) if not hit), n_guesses)
            sent += n_guesses
    return accepted / max(1, sent)


def rate_at_depth(texts: Sequence[RecordedChoices], depth: int) -> float:
    """How often the best guess `depth` tokens ahead is right, where all before it are."""
    windows = [text.hits[start : start + depth] for text in texts for start in range(len(text.tokens) - depth + 1)]
    reached = [window[-1] for window in windows if all(window[:-1])]
    return sum(reached) / max(1, len(reached))


def rate_after_miss(texts: Sequence[RecordedChoices]) -> float:
    """How often it is right for the token after one that it missed."""
    after = [hit for text in texts for before, hit in zip(text.hits, text.hits[1:], strict=False) if not before]
    return sum(after) / max(1, len(after))
