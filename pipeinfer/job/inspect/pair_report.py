"""The report of `models check`: do vocabularies match, and how often is the draft right? Prints nothing."""

from pathlib import Path
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.job.placement.memory import check_alone
from pipeinfer.job.requests.request import check_trained
from pipeinfer.models.agreement import TEXTS, acceptance
from pipeinfer.models.gguf.head import OWN_HEAD
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.heads.header import read_draft
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.models.text.vocabularies import find_translation, vocabulary_differences

N_ROWS = 32


def check_pair(target: Path, draft: Path, text: str | None, n_predict: int, n_threads: int) -> dict[str, Any]:
    """As plain data. `translated_n`: of the target's tokens, how many the draft can guess; null where the ids agree.
    `acceptance_rate`: of the draft's first guesses for `n_predict` greedy tokens after `text`, or after texts of ours.

    Raises UserError for files that are no models, a draft that keeps states, and a text that is empty or too long.
    """
    if draft == OWN_HEAD:
        raise UserError(f"{draft} is the head in a target's own file; `models info` says whether {target} has one")
    drafting = read_draft(draft)
    drafting.check_rewinds("it cannot be a draft: take another one")
    if drafting.head:
        raise UserError(f"{draft} is a head, which guesses from what the target computes: run a text with -md, and see "
                        "how many guesses were right")  # fmt: skip
    vocabularies = Tokenizer(target), Tokenizer(draft)
    translation, why = None, ""
    try:
        try:
            translation = find_translation(*vocabularies)
        except UserError as error:
            why = str(error)
        differences = list(vocabulary_differences(*vocabularies))
        encoded = [vocabularies[0].encode(each) for each in (TEXTS if text is None else (text,))]
        sizes = [each.n_vocab for each in vocabularies]
    finally:
        for vocabulary in vocabularies:
            vocabulary.close()
    prompts = [tokens for tokens in encoded if tokens]
    rate = None
    if n_predict and not why:
        if not prompts:
            raise UserError("the text has no tokens; give some text with -p or -f")
        infos = read_model_info(target), drafting
        n_prompt = max(map(len, prompts))
        check_trained(infos[0], n_prompt, n_predict)
        n_cells = n_prompt + n_predict
        for info in infos:  # one after the other
            check_alone([(info, True)], n_cells, N_ROWS)
        rate = acceptance(target, draft, prompts, n_predict, n_threads, translation)
    return {
        "target": str(target),
        "draft": str(draft),
        "n_vocab": sizes,
        "vocabularies_match": not differences,
        "can_draft": not why,
        "reason": why,
        "translated_n": translation.n_shared if translation else None,
        "differences": [{"token": each.token, "what": each.what} for each in differences],
        "texts": len(prompts),
        "predicted_n": n_predict * len(prompts) if rate is not None else 0,
        "acceptance_rate": rate,
    }
