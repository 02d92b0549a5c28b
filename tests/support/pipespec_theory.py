"""PipeSpec's closed forms (McDanel et al. 2025, section 3.3). Knows probabilities and ratios; no tree and no clock.

alpha   how often a token of the smaller model is the larger one's too, each independently of the others
window  gamma, the smaller model's tokens that a verification judges beside the certain one before them
rho     how many of the larger model's steps are verifications; in the others nothing stands to be judged

Where the smaller model makes c tokens during a step of the larger one, `window` is c - 1: the first of them is what
the step's own last token is compared with, and says only whether the next step verifies. With c for gamma, as the
paper's text can be read, equation 4 goes beyond what the smaller model makes: to c + 1 tokens a step.
"""

from __future__ import annotations


def expected_tokens(rho: float, alpha: float, window: float) -> float:
    """Equation 1: tokens a step of a model, if a share `rho` of its steps verifies."""
    return (1 - rho) + rho * accepted_tokens(alpha, window)


def next_rho(rho: float, alpha: float, window: float) -> float:
    """Equation 2: how likely the next step verifies, if this one does with probability `rho`."""
    return rho * alpha ** (window + 1) + (1 - rho) * alpha


def steady_rho(alpha: float, window: float) -> float:
    """Equation 3: what equation 2 comes to."""
    return alpha / (1 - alpha ** (window + 1) + alpha)


def pipespec_tokens(alpha: float, window: float) -> float:
    """Equation 4: tokens a step of the target, more than 1. Its speed over plain decoding."""
    return expected_tokens(steady_rho(alpha, window), alpha, window)


def speculative_speedup(alpha: float, window: float, ratio: float, unseen: float = 0.0) -> float:
    """Equation 5: models in turns over plain decoding. `ratio`: the draft's tokens in a step of the target.

    The paper has `unseen` = 0; it is the draft's step for the last of its own tokens if that step is one by itself: a
    draft that guessed only right has yet to evaluate it.
    """
    n_steps = window + unseen * alpha**window
    return accepted_tokens(alpha, window) / (n_steps / ratio + 1)


def accepted_tokens(alpha: float, window: float) -> float:
    """Equation 6: tokens of one verification (Leviathan et al. 2023), what equation 4 comes to if `alpha` is near 1."""
    return window + 1 if alpha == 1 else (1 - alpha ** (window + 1)) / (1 - alpha)
