"""What a batch writes of each request, as OpenAI has it or plainly. Writes nothing itself."""

import time
from collections.abc import Sequence
from typing import Any

from pipeinfer.job.batch.batch_file import BatchRequest
from pipeinfer.job.requests.answer_form import finish_of, message_of, reader_of
from pipeinfer.job.requests.field_names import CHAT
from pipeinfer.job.requests.logprobs import Entry, Spell, chat_form, completion_form
from pipeinfer.job.session.open_requests import Open
from pipeinfer.observe.metrics import timings

SERVED, NOT_SERVED = 200, 400

OBJECTS = {CHAT: "chat.completion"}

TIMES = ("ttft_s", "tpot_s", "total_s")


def result_of(
    id: str, asked: BatchRequest, opened: Open, entries: Sequence[Entry], spell: Spell, model: str
) -> dict[str, Any]:
    """Of a request that has ended. `model`: its name."""
    form = chat_form if asked.body.messages else completion_form
    logprobs = form(entries, spell) if asked.body.sampling.n_logprobs >= 0 else None
    request, text, finish = opened.request, opened.printer.text, opened.finish
    n_prompt, n_predicted = len(request.prompt), opened.n_heard
    if not asked.url:
        times = timings(opened.metrics)
        return {
            **_plain(id, asked), "text": text, "finish": finish, "tokens_evaluated": n_prompt,
            "tokens_cached": opened.metrics.n_kept, "tokens_predicted": n_predicted, "seed": request.sampling.seed,
            **{name: times[name] for name in TIMES},
            **({"logprobs": logprobs} if logprobs else {}),
        }  # fmt: skip
    said: dict[str, Any] = {"text": text}
    if asked.url == CHAT:
        reader = reader_of(asked.body, opened.asked.thought)
        said = {
            "message": message_of([*reader.push(text), *reader.finish(finish == "length" or opened.printer.was_cut)])
        }
        finish = finish_of(finish, reader)
    body = {
        "id": id,
        "object": OBJECTS.get(asked.url, "text_completion"),
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **said, "logprobs": logprobs, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": n_prompt, "completion_tokens": n_predicted, "total_tokens": n_prompt + n_predicted,
            "prompt_tokens_details": {"cached_tokens": opened.metrics.n_kept},
        },
        "seed": request.sampling.seed,
    }  # fmt: skip
    return _response(id, asked, SERVED, body, None)


def refusal_of(id: str, asked: BatchRequest, message: str) -> dict[str, Any]:
    """Of a request that cannot be served."""
    if not asked.url:
        return {**_plain(id, asked), "error": message}
    error = {"message": message, "type": "invalid_request_error", "code": "invalid_request"}
    return _response(id, asked, NOT_SERVED, {"error": error}, {"code": error["code"], "message": message})


def _plain(id: str, asked: BatchRequest) -> dict[str, Any]:
    named = {"custom_id": asked.custom_id} if asked.custom_id is not None else {}
    return {"id": id, "index": asked.index, **named}


def _response(id: str, asked: BatchRequest, status: int, body: dict[str, Any], error: Any) -> dict[str, Any]:
    response = {"status_code": status, "request_id": id, "body": body}
    return {"id": id, "custom_id": asked.custom_id, "response": response, "error": error}
