"""What a real pair of models chooses, into a file for `simulate`. One process, no MPI."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.placement.fetch import fetch_files
from pipeinfer.job.placement.memory import check_alone
from pipeinfer.job.placement.model_files import draft_translation
from pipeinfer.job.process.complain import complain
from pipeinfer.models.gguf.model_info import part_paths
from pipeinfer.models.gguf.slice import open_slice, read_model_info
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.models.text.vocabularies import Translation
from pipeinfer.models.translated import TranslatedStage
from pipeinfer.outputs import check_separate, check_writable
from pipeinfer.virtual.choices import RecordedChoices
from pipeinfer.virtual.recording import PathModel, draft_guesses, record

N_BATCH = 128


def record_pair(
    model: Path, model_draft: Path, prompt: str, predict: int, threads: int | None, temp: float, seed: int, output: Path
) -> float:
    """Write the file; the share of tokens for which the draft's best guess is right. Raises UserError."""
    model, model_draft = fetch_files([model, model_draft])
    check_separate({"--output": output}, {"--model": part_paths(model), "--model-draft": part_paths(model_draft)})
    check_writable(output, "--output")
    tokenizer = Tokenizer(model)
    translation = draft_translation(model, model_draft)
    tokens = tokenizer.encode(prompt)
    if not tokens:
        raise UserError("the prompt is empty and this model has no beginning-of-text token; give some text")
    about = {"model": str(model), "model_draft": str(model_draft), "temp": temp, "seed": seed}
    info = read_model_info(model)
    n_cells = len(tokens) + predict + N_BATCH
    check_alone([(info, True), (read_model_info(model_draft), False)], n_cells, N_BATCH)
    if len(tokens) + predict > info.n_ctx_train:
        complain(
            f"{model} was trained for {info.n_ctx_train} tokens; what it writes after them says little of the draft"
        )
    target, params = open_whole(model, n_cells, threads, exact=True), sampling_of(about)
    draft = draft_guesses(open_whole(model_draft, n_cells, threads, False, translation), params, couple=True)
    choices = record(target, draft, tokens, predict, params, about)
    choices.save(output)
    return choices.acceptance


def open_whole(
    path: Path, n_cells: int, threads: int | None, exact: bool, translation: Translation | None = None
) -> PathModel:
    """A whole model in this process. `translation`: of a draft. Raises UserError when it cannot be loaded."""
    info = read_model_info(path)
    info.check_rewinds("its guesses and choices cannot be recorded: take another one")
    n_threads = threads or len(os.sched_getaffinity(0))
    params = LlamaParams(
        n_cells=n_cells, n_seq_max=2, n_batch=N_BATCH, n_outputs_max=2, n_threads=n_threads, exact=exact
    )
    model: LoadedModel = LlamaStage(open_slice(info, 0, info.n_layer, None), params)
    blocks = exact and info.layers.known.flash
    return PathModel(TranslatedStage(model, translation) if translation else model, N_BATCH, blocks=blocks)


def sampling_of(about: dict[str, Any]) -> SamplingParams:
    return SamplingParams(seed=int(about["seed"]), temp=float(about["temp"]))


def ask_draft(choices: RecordedChoices, model_draft: Path) -> None:
    """Let a real draft answer for branches that were not recorded. Raises UserError."""
    try:
        params = sampling_of(choices.about)
    except (KeyError, TypeError, ValueError):
        raise UserError("these choices do not say how they were sampled; record them anew") from None
    (model_draft,) = fetch_files([model_draft])
    target = Path(str(choices.about.get("model", "")))
    translation = draft_translation(target, model_draft) if target.is_file() else None
    draft = open_whole(model_draft, choices.n_tokens + N_BATCH, None, False, translation)
    choices.draft = draft_guesses(draft, params, couple=True)
