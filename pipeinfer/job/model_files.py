"""The files of target and drafts, opened and compared before anything is planned. Loads no weights, plans nothing."""

from __future__ import annotations

from pipeinfer.job.options import RunOptions
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.tokenizer import Tokenizer, check_draft
from pipeinfer.policies import Iterative


def open_models(options: RunOptions) -> tuple[ModelInfo, Tokenizer]:
    """The target's header and vocabulary. Raises UserError when a model is unusable or the draft's does not fit."""
    info = read_model_info(options.model)
    if options.parallel > 1 and not isinstance(options.policy, Iterative):
        info.check_rewinds(
            "guesses can be taken back for one request at a time: use --parallel 1, or --policy iterative"
        )
    tokenizer = Tokenizer(options.model)
    for path in options.drafts_in_use:
        read_model_info(path).check_rewinds("it cannot be a draft: take another one, or -md none")
        check_draft(tokenizer, path)
    return info, tokenizer
