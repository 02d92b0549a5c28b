"""The files of target and drafts: downloaded where they are on the hub, opened, and compared. Loads no weights."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.process.complain import complain
from pipeinfer.models.gguf.head import OWN_HEAD
from pipeinfer.models.gguf.model_info import ModelInfo, read_model_info
from pipeinfer.models.gguf.vocabulary import vocabulary_digest
from pipeinfer.models.heads.own_head import draft_of, has_own_head
from pipeinfer.models.hub_names import name_of
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.models.text.vocabularies import Translation, find_translation


def open_models(target: Path, drafts: Sequence[Path]) -> tuple[ModelInfo, Tokenizer]:
    """The target's header and vocabulary. Raises UserError when a model is unusable or the draft's does not fit."""
    info = read_model_info(target)
    tokenizer = Tokenizer(target)
    for path in drafts:
        draft = draft_of(path, info)
        draft.check_rewinds("it cannot be a draft: take another one, or -md none")
        translation = None if draft.head and draft.head.own else draft_translation(target, path)
        if draft.head and translation and not translation.alike:
            raise UserError(
                f"{path} is a head for another model than {target}: they share {translation.n_shared} of "
                f"{len(translation.said)} tokens; give the head that was trained for it, another draft, or -md none"
            )
    return info, tokenizer


def read_drafts(paths: Sequence[Path], target: ModelInfo) -> list[ModelInfo]:
    """Their headers, a head first, then the smallest. Raises UserError for what cannot draft for the target."""
    found = [draft_of(path, target) for path in paths]
    return sorted(found, key=lambda draft: (draft.head is None, draft.n_bytes))


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
    """A note on the translation; empty where no token differs but padding."""
    if translation is None or translation.alike:
        return ""
    return (
        f"{draft} has other tokens than the target: they are translated, {translation.n_shared} of "
        f"{len(translation.said)} can be guessed"
    )


def fetch_models(options: RunOptions) -> RunOptions:
    """The options with files in the place of names, and with the target's own head as the draft where that is wanted.
    Raises UserError for a file that cannot be had."""
    model, *drafts = fetch_files([options.model, *options.drafts], options.offline)
    may_find = options.finds_head and not any(backend.is_torch for backend in options.backend)
    if may_find and has_own_head(read_model_info(model)):
        drafts = [OWN_HEAD]
    return replace(options, model=model, drafts=tuple(drafts))


def fetch_files(paths: Sequence[Path], offline: bool = False) -> list[Path]:
    """The same of single paths."""
    return [_fetched(path, offline) for path in paths]


def _fetched(path: Path, offline: bool) -> Path:
    name = name_of(path)
    if name is None:
        return path
    from pipeinfer.models.hub import fetch  # what it imports takes a while

    return fetch(name, offline, complain)
