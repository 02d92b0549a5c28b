"""What a request says may come, checked against the vocabulary before anything loads. Chooses no token."""

from __future__ import annotations

from pipeinfer.core.logit_bias import read_biases
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.models.tokenizer import Tokenizer


def check_constraints(sampling: SamplingParams, tokenizer: Tokenizer) -> None:
    """Raises UserError for what cannot be had with this vocabulary."""
    ids, _ = read_biases(sampling.logit_bias)
    if len(ids) and ids[-1] >= tokenizer.n_vocab:
        raise UserError(f"a logit bias is for token {ids[-1]}, and the vocabulary has {tokenizer.n_vocab}, from 0 on; "
                        "`pipeinfer run --json` and POST /tokenize tell a text's tokens")  # fmt: skip
