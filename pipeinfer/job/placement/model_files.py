"""The files of target and drafts: downloaded where they are on the hub, opened, and compared. Loads no weights."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.job.options.options import JobModels
from pipeinfer.job.process.streams import complain
from pipeinfer.models.drafts.head_files import draft_of, has_mtp_head
from pipeinfer.models.drafts.translation import Translation, find_translation
from pipeinfer.models.gguf.adapter import ScaledAdapter, check_fits, check_order, read_adapter
from pipeinfer.models.gguf.model_info import OWN_HEAD, ModelInfo, read_model_info
from pipeinfer.models.gguf.validation import vocabulary_digest
from pipeinfer.models.hub import name_of
from pipeinfer.models.text.tokenizer import Tokenizer


def open_models(target: Path, drafts: Sequence[Path]) -> tuple[ModelInfo, Tokenizer]:
    """The target's header and vocabulary. Raises UserError when a model is unusable or the draft's does not fit."""
    info = read_model_info(target)
    tokenizer = Tokenizer(target)
    check_drafts(info, drafts)
    return info, tokenizer


def check_drafts(target: ModelInfo, paths: Sequence[Path]) -> None:
    """Raises UserError for a draft that is unusable, or does not fit the target."""
    for path in paths:
        draft = draft_of(path, target)
        draft.check_rewinds("it cannot be a draft: take another one, or -md none")
        translation = None if draft.head and draft.head.own else draft_translation(target.path, path)
        if draft.head and translation and not translation.padding_only:
            shared = f"they share {translation.n_shared} of {len(translation.outputs)} tokens"
            way_out = "give the head that was trained for it, another draft, or -md none"
            raise UserError(f"{path} is a head for another model than {target.path}: {shared}; {way_out}")


def read_drafts(paths: Sequence[Path], target: ModelInfo) -> list[ModelInfo]:
    """Their headers, a head first, then the smallest. Raises UserError for what cannot draft for the target."""
    drafts = [draft_of(path, target) for path in paths]
    return sorted(drafts, key=lambda draft: (draft.head is None, draft.n_bytes))


def read_adapters(models: JobModels, target: ModelInfo) -> tuple[ScaledAdapter, ...]:
    """Their headers. Raises UserError for a file that is no adapter of the target."""
    adapters = tuple(ScaledAdapter(read_adapter(each.path), each.scale) for each in models.adapters)
    for adapter, _ in adapters:
        check_fits(adapter, target)
    check_order(adapters)
    return adapters


def draft_translation(target: Path, draft: Path) -> Translation | None:
    """None where the models' token ids mean the same. Raises UserError where the draft cannot guess for the target."""
    digests = vocabulary_digest(target), vocabulary_digest(draft)
    return None if digests[0] == digests[1] else _compare(target, draft, digests)


@lru_cache(maxsize=8)
def _compare(target: Path, draft: Path, digests: tuple[str, str]) -> Translation | None:
    """`digests`: of both vocabularies, as a key that changes with the files."""
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
    if translation is None or translation.padding_only:
        return ""
    return (
        f"{draft} has other tokens than the target: they are translated, {translation.n_shared} of "
        f"{len(translation.outputs)} can be guessed"
    )


def fetch_models(models: JobModels) -> JobModels:
    """With files in the place of names, and with the target's own head as the draft where that is wanted. Raises
    UserError for a file that cannot be had."""
    target, *drafts = fetch_files([models.target, *models.drafts], models.offline, models.hf_token)
    if models.finds_head and has_mtp_head(read_model_info(target)):
        drafts = [OWN_HEAD]
    return replace(models, target=target, drafts=tuple(drafts))


def fetch_files(paths: Sequence[Path], offline: bool = False, token: str | None = None) -> list[Path]:
    """The same of single paths. `token`: for the hub; None: huggingface_hub finds it, as in HF_TOKEN."""
    return [_fetched(path, offline, token) for path in paths]


def _fetched(path: Path, offline: bool, token: str | None) -> Path:
    name = name_of(path)
    if name is None:
        return path
    from pipeinfer.models.hub import fetch  # what it imports takes a while

    return fetch(name, offline, complain, token)
