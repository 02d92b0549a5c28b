"""The files of target and drafts, opened and compared before anything is planned. Loads no weights, plans nothing."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from pipeinfer.job.options.options import RunOptions
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.gguf.vocabulary import vocabulary_digest
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.models.text.vocabularies import Translation, find_translation


def open_models(options: RunOptions) -> tuple[ModelInfo, Tokenizer]:
    """The target's header and vocabulary. Raises UserError when a model is unusable or the draft's does not fit."""
    info = read_model_info(options.model)
    tokenizer = Tokenizer(options.model)
    for path in options.drafts_in_use:
        read_model_info(path).check_rewinds("it cannot be a draft: take another one, or -md none")
        draft_translation(options.model, path)
    return info, tokenizer


def draft_translation(target: Path, draft: Path) -> Translation | None:
    """None where the models' token ids mean the same. Raises UserError where the draft cannot guess for the target."""
    digests = vocabulary_digest(target), vocabulary_digest(draft)
    return None if digests[0] == digests[1] else _compare(target, draft, digests)


@lru_cache(maxsize=8)
def _compare(target: Path, draft: Path, digests: tuple[str, str]) -> Translation | None:
    """`digests`: of what is compared, should a file change meanwhile."""
    tokenizers: list[Tokenizer] = []
    try:
        for path in (target, draft):
            tokenizers.append(Tokenizer(path))
        return find_translation(*tokenizers)
    finally:
        for tokenizer in tokenizers:
            tokenizer.close()


def translation_note(draft: Path, translation: Translation | None) -> str:
    """What is to be said of it; nothing where no token differs but padding."""
    if translation is None or translation.alike:
        return ""
    return (
        f"{draft} has other tokens than the target: they are translated, {translation.n_shared} of "
        f"{len(translation.said)} can be guessed"
    )
