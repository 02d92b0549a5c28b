"""The files of target and drafts: downloaded where they are on the hub, opened, and compared. Loads no weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeinfer.job.options.options import JobModels
from pipeinfer.job.process.streams import complain
from pipeinfer.models.drafts.head_files import has_mtp_head, read_drafts
from pipeinfer.models.drafts.translation import check_drafts
from pipeinfer.models.gguf.adapter import ScaledAdapter, check_fits, check_order, read_adapter
from pipeinfer.models.gguf.model_info import OWN_HEAD, ModelInfo, read_model_info
from pipeinfer.models.hub import fetch, name_of
from pipeinfer.models.text.tokenizer import Tokenizer


def open_models(target: Path, drafts: Sequence[Path]) -> tuple[ModelInfo, list[ModelInfo], Tokenizer]:
    """The target's header, those of the drafts as `read_drafts` has them, and the target's vocabulary. Raises UserError
    when a model is unusable or a draft does not fit."""
    info, tokenizer = read_model_info(target), Tokenizer(target)
    headers = read_drafts(drafts, info)
    check_drafts(headers, info)
    return info, headers, tokenizer


def read_adapters(models: JobModels, target: ModelInfo) -> tuple[ScaledAdapter, ...]:
    """Their headers. Raises UserError for a file that is no adapter of the target."""
    adapters = tuple(ScaledAdapter(read_adapter(each.path), each.scale) for each in models.adapters)
    for adapter, _ in adapters:
        check_fits(adapter, target)
    check_order(adapters)
    return adapters


def fetch_models(models: JobModels) -> JobModels:
    """With files for names, and the target's own head as the draft where that is wanted. Raises UserError."""
    target, *drafts = fetch_files([models.target, *models.drafts], models.offline, models.hf_token)
    if models.finds_head and has_mtp_head(read_model_info(target)):
        drafts = [OWN_HEAD]
    return replace(models, target=target, drafts=tuple(drafts))


def fetch_files(paths: Sequence[Path], offline: bool = False, token: str | None = None) -> list[Path]:
    """The same of single paths. `token`: for the hub; None: huggingface_hub finds it, as in HF_TOKEN."""
    return [fetch(name, offline, complain, token) if (name := name_of(path)) else path for path in paths]
