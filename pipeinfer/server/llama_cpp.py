"""llama-server's own endpoints: completions in its form, its properties, and its slots."""

import asyncio
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeinfer.core.samplers import SAMPLERS, read_bias
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.types import AdapterScales
from pipeinfer.job.requests.answers import Spell, chat_logprobs
from pipeinfer.job.requests.body import Defaults
from pipeinfer.job.requests.fields import (
    CHAT,
    COMPLETION,
    SAMPLING_SETTINGS,
    is_list_of,
    is_whole,
    read_scales,
    refuse,
    shown,
    whole,
)
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.serve.channel import Setup
from pipeinfer.models.gguf.adapter import ScaledAdapter
from pipeinfer.models.text.answers import AnswerPart
from pipeinfer.models.text.tokenizer import BREAKERS, Tokenizer
from pipeinfer.server.choices import Answer, Choice
from pipeinfer.server.errors import Refusal
from pipeinfer.server.forms import ChoiceOutput, OpenAIForm, event
from pipeinfer.server.head_client import HeadClient
from pipeinfer.server.infill import INFILL

STOPS = {"length": "limit", "stop": "eos"}
OFF: dict[str, Any] = {
    **{"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "n_keep": 0, "n_discard": 0, "min_keep": 0},
    **{"post_sampling_probs": False, "backend_sampling": False, "lora": []},
}
PLAIN: dict[str, Any] = {
    **{"grammar_lazy": False, "grammar_triggers": [], "preserved_tokens": [], "generation_prompt": ""},
    **{"chat_format": "Content-only", "reasoning_format": "none", "reasoning_in_content": False},
}
"""llama-server's settings of what no text here has, and of what plain prompts have not."""

PRIVATE = ("dry_sequence_breakers", "grammar", "logit_bias", "stop")  # of a client; others do not see them in `/slots`
MISSING = object()  # no member of that name


class CompletionForm(OpenAIForm):
    """The form of `/completion` and `/infill`: of several texts a list, in streams with their indices."""

    def whole(self) -> Any:
        objects = [self._object(output, "".join(part.text for part in output.parts())) for output in self.outputs]
        return objects[0] if len(objects) == 1 else objects

    def progress_event(self, output: ChoiceOutput, progress: dict[str, Any]) -> bytes:
        return event({"index": output.index, "content": "", "tokens": [], "stop": False, **progress})

    def part(self, output: ChoiceOutput, part: AnswerPart) -> bytes:
        choice = output.choice
        members = {"index": output.index, "content": part.text, "tokens": output.new_tokens(), "stop": False}
        counts = {"tokens_predicted": choice.n_tokens, "tokens_evaluated": choice.n_prompt}
        return event({**members, **counts, **self._probabilities(choice), **self.timings_of(output)})

    def rest(self, output: ChoiceOutput) -> bytes:
        return self.part(output, AnswerPart("content", ""))

    def end(self, output: ChoiceOutput) -> bytes:
        return event(self._object(output, "")) if output.choice.finish in STOPS else b""

    def last(self) -> bytes:
        return b""

    def error_event(self, refusal: Refusal) -> bytes:
        return event(refusal.body)

    def _probabilities(self, choice: Choice) -> dict[str, Any]:
        if not choice.has_logprobs:
            return {}
        return {"completion_probabilities": chat_logprobs(choice.take_entries(), self.spell)["content"]}

    def _object(self, output: ChoiceOutput, content: str) -> dict[str, Any]:
        """The last object of a text."""
        choice, request, body = output.choice, output.choice.request, self.parsed.bodies[output.index]
        settings = _settings(request) | PLAIN | {"ignore_eos": body.ignore_eos}
        settings |= {"stream": self.parsed.stream, "timings_per_token": self.parsed.timed}
        if output.index:  # the same of all texts, and maybe much longer than they are
            del settings["grammar"], settings["logit_bias"]
        if request.adapters is not None:
            settings["lora"] = [{"id": number, "scale": scale} for number, scale in request.adapters]
        tokens = output.new_tokens() if self.parsed.tokens or self.parsed.stream else []
        members: dict[str, Any] = {"index": output.index, "content": content, "tokens": tokens, "stop": True}
        members |= {"id_slot": self.parsed.slot, "model": self.common["model"]}
        members["truncated"] = choice.finish == "length" and not 0 <= body.n_predict <= choice.n_tokens
        if output.index % self.parsed.n == 0:
            members["prompt"] = self.parsed.prompt_texts[output.index // self.parsed.n]
        members |= {"tokens_predicted": choice.n_tokens, "has_new_line": choice.has_new_line}
        members |= {"tokens_evaluated": choice.n_prompt, "tokens_cached": choice.timings.get("cache_n", 0)}
        stop_type = "word" if choice.stop else STOPS[choice.finish or "stop"]
        members |= {"stop_type": stop_type, "stopping_word": choice.stop, "timings": choice.timings}
        members |= {**self._probabilities(choice), "generation_settings": settings}
        return _named(members, self.parsed.fields) if self.parsed.fields else members


def _settings(of: GenerationRequest | Defaults) -> dict[str, Any]:
    """Parameters of a text by llama-server's names."""
    sampling = of.sampling
    settings: dict[str, Any] = {name: getattr(sampling, name) for name, _, _ in SAMPLING_SETTINGS}
    settings["temperature"] = settings.pop("temp")
    breakers, order = sampling.dry_sequence_breakers, sampling.sampler_order
    settings["dry_sequence_breakers"] = json.loads(breakers) if breakers else list(BREAKERS)
    settings |= {"samplers": order.split(";") if order else list(SAMPLERS), "grammar": sampling.grammar}
    biases = map(read_bias, sampling.logit_bias.split())
    settings["logit_bias"] = [{"bias": bias if bias > -math.inf else None, "token": token} for token, bias in biases]
    counts = {"n_probs": max(0, sampling.n_logprobs), "n_predict": of.n_predict, "max_tokens": of.n_predict}
    return settings | counts | {"stop": list(of.stops)} | OFF


def prompt_texts(requests: Sequence[GenerationRequest], spell: Spell) -> tuple[str, ...]:
    """Those of their tokens, control tokens spelled too."""
    return tuple(b"".join(map(spell, request.prompt)).decode("utf-8", "replace") for request in requests)


def _named(members: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The members of these names, if any: `timings/prompt_n` is the `prompt_n` of `timings`."""
    named = dict[str, Any]()
    for name in names:
        value: Any = members
        for part in name.split("/"):
            value = value.get(part, MISSING) if isinstance(value, Mapping) else MISSING
        if value is not MISSING:
            named[name] = value
    return named


def props(setup: Setup, model: str, template: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """llama-server's properties of itself."""
    defaults, how = setup.defaults, {"stream": False, "timings_per_token": False}
    params = _settings(defaults) | PLAIN | {"ignore_eos": defaults.ignore_eos} | how
    properties: dict[str, Any] = {"default_generation_settings": {"n_ctx": setup.limit, "params": params}}
    properties |= {"total_slots": setup.parallel, "model_alias": model, "model_path": setup.model.name}
    properties |= {"modalities": {"vision": False, "audio": False}, "chat_template": template}
    tokens = {"bos_token": tokenizer.spelled_out(tokenizer.bos), "eos_token": tokenizer.spelled_out(tokenizer.eos)}
    return properties | tokens | {"build_info": setup.version, "endpoints": [CHAT, COMPLETION, "/completion", INFILL]}


def slots(setup: Setup, choices: Sequence[Choice | None]) -> list[dict[str, Any]]:
    """`/slots`: the open text of each slot, if it has one."""
    common = {"n_ctx": setup.limit, "speculative": setup.speculates}
    return [
        {"id": number, "is_processing": bool(choice), **common, **(open_text(choice) if choice else {})}
        for number, choice in enumerate(choices)
    ]


def open_text(choice: Choice) -> dict[str, Any]:
    request, n = choice.request, choice.n_tokens
    params = {name: value for name, value in _settings(request).items() if name not in PRIVATE}
    next_token = {"has_next_token": True, "has_new_line": choice.has_new_line, "n_remain": request.n_predict - n}
    text = {"id_task": choice.id, "n_decoded": n, "params": params, "next_token": [next_token | {"n_decoded": n}]}
    text |= {"n_prompt_tokens": choice.n_prompt, "n_prompt_tokens_processed": choice.n_evaluated}
    text |= {"n_prompt_tokens_cache": choice.n_cached, "n_predict": request.n_predict, "seed": request.sampling.seed}
    return text | {"seconds": round(time.monotonic() - choice.submitted_s, 3)}


# -- slots, as far as clients save and restore them: the last text of each, and files with its tokens. The keys and
# values are in the ranks' stores; a request that generates nothing reads them back.

NAME = re.compile(r"[\w-][\w.-]{0,200}", re.ASCII)
SLOT = re.compile(r"-?\d{1,9}", re.ASCII)
ACTIONS = ("save", "restore", "erase")
FILE_BYTES_MAX = 64 << 20  # of a saved text, some 7 million tokens


@dataclass(frozen=True, slots=True)
class SlotText:
    """A prompt with its answer. `adapters`: see GenerationRequest."""

    tokens: tuple[int, ...] = ()
    adapters: AdapterScales | None = None


class SavedSlots:
    """`folder`: of the files; `adapters`: those of the job. A server has as many slots as texts may be open."""

    def __init__(
        self, folder: Path, setup: Setup, n_vocab: int, head: HeadClient, adapters: Sequence[ScaledAdapter]
    ) -> None:
        self._folder, self._n_slots, self._head, self._n_vocab = folder, setup.parallel, head, n_vocab
        self._adapters = adapters
        self._model, self._limit = setup.version.partition("-")[0], setup.limit
        self._texts: dict[int, SlotText] = {}

    def slot_of(self, fields: dict[str, Any]) -> int:
        """The slot that a request names in `id_slot`, which is removed; 0 if it names none. Raises UserError."""
        return max(0, self._checked(fields.pop("id_slot", -1), -1))

    def named(self, name: str) -> int:
        """The slot of a path `/slots/NAME`. Raises UserError if there is none."""
        return self._checked(int(name) if SLOT.fullmatch(name) else name, 0)

    def note(self, slot: int, answer: Answer) -> None:
        """The slot had the answer's first text last."""
        choice = answer.choices[0]
        self._texts[slot] = SlotText((*choice.request.prompt, *choice.tokens), choice.request.adapters)

    async def act(self, action: str, slot: int, fields: Mapping[str, Any], client: str) -> dict[str, Any]:
        """llama-server's answer. Raises UserError and Refusal."""
        if action == "erase":
            return {"id_slot": slot, "n_erased": len(self._texts.pop(slot, SlotText()).tokens)}
        name, start_s = fields.get("filename"), time.monotonic()
        if not isinstance(name, str) or not NAME.fullmatch(name):
            refuse(f"filename is {shown(name)}; give a name of letters, digits, dots, - and _, without a folder")
        try:
            counts = await (self._save(slot, name) if action == "save" else self._restore(slot, name, client))
        except OSError as error:
            refuse(f"filename is {shown(name)}: {self._folder / name}: {error.strerror or error}")
        took = {f"{action}_ms": round(1000 * (time.monotonic() - start_s), 3)}
        return {"id_slot": slot, "filename": name, **counts, "timings": took}

    def _checked(self, slot: Any, least: int) -> int:
        return whole("id_slot", slot, least, self._n_slots - 1, ": a slot for each text that may be open")

    async def _save(self, slot: int, name: str) -> dict[str, int]:
        if not (text := self._texts.get(slot)):
            refuse(f"slot {slot} has had no text; ask for one first, with id_slot {slot}")
        n_written = await asyncio.to_thread(self._write, name, text)  # the folder may be slow
        return {"n_saved": len(text.tokens), "n_written": n_written}

    def _write(self, name: str, text: SlotText) -> int:
        """Returns the bytes of the file."""
        data = json.dumps({"model": self._model, "tokens": text.tokens, "adapters": text.adapters}).encode()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(".new", f".{name}.", self._folder)
        try:
            with open(handle, "wb") as file:
                file.write(data)
            os.replace(unfinished, self._folder / name)
        finally:
            Path(unfinished).unlink(missing_ok=True)
        return len(data)

    async def _restore(self, slot: int, name: str, client: str) -> dict[str, int]:
        text, n_read = await asyncio.to_thread(self._read, name)
        request = GenerationRequest(
            text.tokens, 0, len(text.tokens) + 1, SamplingParams(0, 0.0), frozenset(), keep=True, adapters=text.adapters
        )
        if request.n_ctx > self._limit:
            refuse(f"{name} has {len(text.tokens)} tokens, and a text with one more has up to {self._limit}; raise -c")
        answer = self._head.ask([request], client)
        try:
            await answer.end()
        finally:
            self._head.cancel(answer)  # of a client that has gone
        if answer.was_given_up:
            stopped = Refusal(503, "the server has stopped before the slot was restored")
            raise self._head.outgrown([request]) or stopped
        self._texts[slot] = text
        return {"n_restored": len(text.tokens), "n_read": n_read}

    def _read(self, name: str) -> tuple[SlotText, int]:
        """(the text of a file, the bytes of the file)."""
        path = self._folder / name
        if path.stat().st_size > FILE_BYTES_MAX or not path.is_file():  # a pipe or a device has no end
            refuse(f"{name} is no saved slot; save one with action=save")
        data = path.read_bytes()
        try:
            saved = json.loads(data)
            model, tokens, adapters = saved["model"], saved["tokens"], saved["adapters"]
            scales = None if adapters is None else [{"id": number, "scale": scale} for number, scale in adapters]
        except (ValueError, KeyError, TypeError, RecursionError):
            refuse(f"{name} is no saved slot; save one with action=save")
        if model != self._model:
            refuse(f"{name} was saved with another model; save it again with this one")
        is_text = bool(tokens) and is_list_of(int, tokens)
        if not is_text or not all(is_whole(each) and 0 <= each < self._n_vocab for each in tokens):
            refuse(f"{name} is no saved slot; save one with action=save")
        text = SlotText(tuple(tokens), None if scales is None else read_scales(scales, self._adapters))
        return text, len(data)
