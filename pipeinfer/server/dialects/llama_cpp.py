"""llama-server's own endpoints beside OpenAI's: completions in its form, what it serves, text with a hole in it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pipeinfer.job.requests.field_names import CHAT, COMPLETION
from pipeinfer.job.requests.fields import PassedOver, refuse, shown
from pipeinfer.job.requests.logprobs import spelled
from pipeinfer.job.serve.front import Setup
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.choices import Choice
from pipeinfer.server.errors import Refusal
from pipeinfer.server.forms import Form, event

INFILL = "/infill"
HOLE = ("input_prefix", "input_suffix", "input_extra")
STOPS = {"length": "limit", "stop": "eos"}

MISSING = object()

NOT_SERVED: Mapping[str, str] = {
    **dict.fromkeys(("/embedding", "/embeddings", "/v1/embeddings"),
                    "the last stage computes tokens, and no embeddings; llama-server --embedding has them"),
    **dict.fromkeys(("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), "nothing is ranked here"),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/speech", "/v1/images/generations"), "models read text"),
    "/lora-adapters": "there are no adapters; merge them into the model file",
}  # fmt: skip
"""Paths that clients ask for, and why there is nothing."""

NOT_SAVED = (
    "KV states are not written to disk, as each rank has those of its layers alone; while the server runs, requests "
    "that begin alike share them, and texts that were being written go on after a restart under `pipeinfer supervise`, "
    "in `run` and `batch` with --resume"
)
"""Of llama-server's `/slots/ID?action=save`, `restore`, `erase`."""


class CompletionForm(Form):
    """Of `/completion` and `/infill`: of several texts a list, in streams with their indices."""

    def whole(self) -> Any:
        found = [self._end(at, choice, self._take(at, choice)) for at, choice in enumerate(self.answer.choices)]
        return found[0] if len(found) == 1 else found

    def pieces(self, told: set[int]) -> Iterator[bytes]:
        for at, choice in enumerate(self.answer.choices):
            if at in told:
                continue
            if progress := self._progress(at, choice):
                yield event({"index": at, "content": "", "tokens": [], "stop": False, **progress})
            if (text := self._take(at, choice)) or choice.entries:
                yield event({"index": at, "content": text, "tokens": [], "stop": False,
                             "tokens_predicted": choice.n_tokens, "tokens_evaluated": len(choice.asked.prompt),
                             **self._probabilities(choice)})  # fmt: skip
            if choice.finish in STOPS:
                told.add(at)
                yield event(self._end(at, choice, ""))

    def last(self) -> bytes:
        return b""

    def failed(self, refusal: Refusal) -> bytes:
        return event(refusal.body)

    def _probabilities(self, choice: Choice) -> dict[str, Any]:
        if not choice.has_logprobs:
            return {}
        return {"completion_probabilities": [
            {"id": entry.token, **spelled(entry.token, entry.logprob, self.spell), "top_logprobs": [
                {"id": token, **spelled(token, logprob, self.spell)} for token, logprob in entry.top]}
            for entry in choice.take_entries()
        ]}  # fmt: skip

    def _end(self, at: int, choice: Choice, text: str) -> dict[str, Any]:
        asked = choice.asked
        found = {
            "index": at, "content": text, "tokens": [], "id_slot": -1, "stop": True, "model": self.common["model"],
            "tokens_predicted": choice.n_tokens, "tokens_evaluated": len(asked.prompt), "truncated": False,
            "stop_type": "word" if choice.stop else STOPS[choice.finish or "stop"], "stopping_word": choice.stop,
            "tokens_cached": choice.timings.get("cache_n", 0), "timings": choice.timings,
            **self._probabilities(choice),
            "generation_settings": asdict(asked.sampling) | {"n_predict": asked.n_predict, "stop": asked.stops},
        }  # fmt: skip
        return _named(found, self.asked.fields) if self.asked.fields else found


def _named(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The fields of an answer that are there by these names: `timings/prompt_n` is the `prompt_n` of `timings`."""
    named = dict[str, Any]()
    for name in names:
        value: Any = found
        for part in name.split("/"):
            value = value.get(part, MISSING) if isinstance(value, Mapping) else MISSING
        if value is not MISSING:
            named[name] = value
    return named


def infill_of(given: Mapping[str, Any], tokenizer: Tokenizer, passed: PassedOver) -> dict[str, Any]:
    """The body of a completion that writes what stands between a prefix and a suffix. Raises UserError."""
    marks = tokenizer.fill_in
    if not all(name in marks for name in ("pre", "suf", "mid")):
        refuse("this model's vocabulary has no tokens for a text with a hole in it (FIM); a coder's model has them")
    for name in ("input_prefix", "input_suffix", "prompt"):
        if not isinstance(given.get(name, ""), str):
            refuse(f"{name} is {shown(given[name])}; give a text")

    def tokens(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    before = [tokenizer.bos] if tokenizer.adds_bos else []
    extra = given.get("input_extra", [])
    if not isinstance(extra, list) or not all(isinstance(each, dict) for each in extra):
        refuse(f"input_extra is {shown(extra)}; give a list of objects with filename and text")
    for each in extra if "sep" in marks else ():
        before += [marks["sep"], *tokens(f"{each.get('filename', 'tmp')}\n{each.get('text', '')}")]
    prefix = str(given.get("input_prefix", "")) + str(given.get("prompt", ""))
    prompt = [*before, marks["pre"], *tokens(prefix), marks["suf"], *tokens(str(given.get("input_suffix", ""))),
              marks["mid"]]  # fmt: skip
    return {**{name: value for name, value in given.items() if name not in HOLE}, "prompt": prompt}


def with_suffix(given: Mapping[str, Any], tokenizer: Tokenizer, passed: PassedOver) -> dict[str, Any]:
    """The body of a completion, which may have a suffix. Raises UserError."""
    if not given.get("suffix"):
        return dict(given)
    fields = {name: value for name, value in given.items() if name not in ("suffix", "prompt")}
    return infill_of(
        {**fields, "input_prefix": given.get("prompt"), "input_suffix": given["suffix"]}, tokenizer, passed
    )


def props(setup: Setup, model: str, template: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """What llama-server says of itself."""
    options = setup.run
    params = asdict(options.sampling) | {"n_predict": options.predict, "stop": list(options.stops)}
    return {
        "default_generation_settings": {"n_ctx": setup.limit, "params": params}, "total_slots": options.parallel,
        "model_alias": model, "model_path": options.model.name, "modalities": {"vision": False, "audio": False},
        "chat_template": template, "bos_token": _spelled(tokenizer, tokenizer.bos),
        "eos_token": _spelled(tokenizer, tokenizer.eos), "build_info": setup.version,
        "endpoints": [CHAT, COMPLETION, "/completion", INFILL],
    }  # fmt: skip


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.text_of(token).decode("utf-8", "replace") if token >= 0 else ""
