"""A request's fields in JSON: names here and at other servers, and how each is read. Knows no request as a whole."""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeGuard

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import settings_of
from pipeinfer.core.types import AdapterScales
from pipeinfer.errors import UserError
from pipeinfer.models.gguf.adapter import ScaledAdapter, active_scales, check_order
from pipeinfer.text import shortened

MAX_DEPTH = 100  # levels of objects and lists
TOO_DEEP = f"%s is nested too deeply; objects and lists may be within each other {MAX_DEPTH} times"
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"

PICTURES = "image_data"
MEDIA = re.compile("image|audio|video|file|document")
NO_MEDIA = (
    "models here read text alone: leave it out, or say in words what it shows (llama-server --mmproj takes pictures)"
)

# -- values


@dataclass(slots=True)
class PassedOver:
    """Fields and parts of a request that are ignored, with reasons. `strict`: they are refused instead."""

    strict: bool = False
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, reason: str) -> None:
        """Raises UserError if strict."""
        if self.strict:
            refuse(reason)
        self.reasons.setdefault(name, reason)


def refuse(what: str) -> NoReturn:
    raise UserError(what)


def shown(value: Any) -> str:
    return shortened(json.dumps(value, ensure_ascii=False))


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name, default)
    return value if isinstance(value, bool) else refuse(f"{name} is {shown(value)}; give true or false")


def whole(name: str, value: Any, least: int, most: int, more: str = "") -> int:
    """`more`: what the message says behind the limits."""
    if not is_whole(value) or not least <= value <= most:
        refuse(f"{name} is {shown(value)}; give a whole number from {least} to {most}{more}")
    return value


def one_of(name: str, value: Any, values: Collection[str]) -> str:
    if not isinstance(value, str) or value not in values:
        refuse(f"{name} is {shown(value)}; it is one of {', '.join(values)}")
    return value


def is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def is_list_of(kind: Any, value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def text_of(name: str, value: Any, kinds: Sequence[Any], between: str = "\n") -> str:
    """A text, or a list of parts of these types with one, joined by `between`, as in llama-server by a new line."""
    if isinstance(value, str):
        return value
    if is_list_of(dict, value):
        for at, each in enumerate(value):
            check_part(f"{name}[{at}]", each.get("type"))
    if not is_list_of(dict, value) or not all(each.get("type") in kinds for each in value):
        refuse(f"{name} is {shown(value)}; give a text, or a list of parts of type {' or '.join(kinds)}")
    return between.join(str(each.get("text") or each.get("refusal") or "") for each in value)


def check_part(name: str, kind: Any) -> None:
    """Raises UserError for a picture and the like."""
    if isinstance(kind, str) and MEDIA.search(kind):
        refuse(f"{name} is of type {shown(kind)}; {NO_MEDIA}")


def without_null(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def read_json(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object without null. `what`: its name in messages. Raises UserError, also for a field given twice."""

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            refuse(f"{what} has the field {shown(twice)} twice in an object; say it once")
        return values

    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=unique)
    except RecursionError:
        refuse(TOO_DEEP % what)
    except UnicodeDecodeError:
        refuse(f"{what} is not UTF-8 text; write it in UTF-8")
    except ValueError as error:
        is_long = "int_max_str_digits" in str(error)
        why = "has a number of too many digits; 4300 are possible" if is_long else f"is not JSON: {error}"
        refuse(f"{what} {why}")
    if is_too_deep(value):
        refuse(TOO_DEEP % what)
    if not isinstance(value, dict):
        refuse(f'{what} is not a JSON object; write {{"prompt": "…"}} or what OpenAI\'s API asks')
    return without_null(value)


def is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [*itertools.chain.from_iterable(inner)]
    return bool(level)


# -- names

LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens")
PROMPTS = ("prompt", "messages")
CHAT_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "reasoning_format")
BUDGETS, BUDGET_MESSAGE = ("reasoning_budget_tokens", "thinking_budget_tokens"), "reasoning_budget_message"
TEMPLATE_FIELDS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
FORMS = ("grammar", "json_schema", "response_format")  # constraints of the text: a request has one of them

WITHOUT_EFFECT: tuple[str, ...] = ("model", "user", "metadata", "store", "service_tier", "safety_identifier")
WITHOUT_EFFECT += ("prompt_cache_key", "cache_prompt", "stream_options", "prompt_cache_retention", "verbosity")
# of samplers that are off
WITHOUT_EFFECT += ("mirostat_tau", "mirostat_eta")
OFF_AT_1 = ("tfs_z", "tfs")
OFF_AT_0: tuple[str, ...] = ("mirostat", "mirostat_mode", "top_a")
OFF_AT_0 += ("epsilon_cutoff", "eta_cutoff", "min_keep")
NOT_SERVED = ("stream", "echo", "post_sampling_probs", "use_beam_search", "include_stop_str_in_output")
ONLY: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", *OFF_AT_1), (1,)),
    **dict.fromkeys(OFF_AT_0, (0,)),
    **dict.fromkeys(NOT_SERVED, (False,)),
    "suffix": ("",),
    PICTURES: ([],),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "skip_special_tokens": (True,),
}
"""Field -> the values with which it is served; others would change the text, and are refused."""

IN_EFFECT: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n_keep", "t_max_predict_ms"), (0, -1)),
    **dict.fromkeys(("n_discard", "n_indent"), (0,)),
    **dict.fromkeys(("penalize_nl", "early_stopping"), (False,)),
    "id_slot": (-1,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
}
"""Field -> the values that say what is done anyway; others are passed over."""

SAMPLING_SETTINGS = settings_of(SamplingParams)
ALIASES = {alias: name for name, _, setting in SAMPLING_SETTINGS for alias in setting.aliases}
OTHERS: tuple[str, ...] = ("stop", "ignore_eos", "logit_bias", "logprobs", "top_logprobs", "n_probs", "priority")
OTHERS += ("parse_special", "dry_sequence_breakers", "samplers", "lora", "guesses")
FIELDS = {name for name, _, _ in SAMPLING_SETTINGS}
FIELDS |= {*ALIASES, *LENGTHS, *PROMPTS, *WITHOUT_EFFECT, *FORMS, *ONLY, *IN_EFFECT, *CHAT_FIELDS}
FIELDS |= {*TEMPLATE_FIELDS, *OTHERS, *BUDGETS, BUDGET_MESSAGE, "add_special_tokens", "stop_token_ids"}


def served_fields(body: Mapping[str, Any], passed: PassedOver) -> dict[str, Any]:
    """The fields that are known, by our names. Raises UserError for what would change the text and is not served."""
    fields = {}
    prompt = body.get("prompt")
    for name in (PICTURES, "multimodal_data"):  # llama-server's, beside the prompt or in it
        if body.get(name) or (isinstance(prompt, dict) and prompt.get(name)):
            refuse(f"{name} is there; {NO_MEDIA}")
    for name, value in _translated(body, passed).items():
        if name in ONLY and value not in ONLY[name]:
            refuse(_only(name, value, ONLY[name]))
        if name in IN_EFFECT and value not in IN_EFFECT[name]:
            passed.add(name, _only(name, value, IN_EFFECT[name]))
        elif name not in FIELDS:
            passed.add(name, f"the field {shown(name)} is unknown; leave it out")
        else:
            fields[name] = value
    return fields


def _only(name: str, value: Any, values: Sequence[Any]) -> str:
    return f"{name} is {shown(value)}; only {' or '.join(map(json.dumps, values))} can be served"


# -- names of vLLM, Ollama, OpenRouter and earlier versions of llama-server

N_MAX = "speculative.n_max"

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
GUIDED = {"guided_json": "json", "guided_grammar": "grammar", "guided_choice": "choice", "guided_regex": "regex"}
STOPS = ("stop_sequences", "stopping_strings")
THINKS = ("enable_thinking", "think", "thinking", "reasoning")


def _translated(body: Mapping[str, Any], passed: PassedOver) -> dict[str, Any]:
    """The same request by the names of this server. Raises UserError for values of a wrong type."""
    fields = dict(body)
    _constrain(fields)
    for name in STOPS:
        if (value := fields.pop(name, None)) is not None:
            fields.setdefault("stop", value)
    _think(fields, passed)
    if (n_max := fields.pop(N_MAX, None)) == 0:
        fields.setdefault("guesses", False)
    elif n_max is not None:
        passed.add(N_MAX, f"{N_MAX} is {shown(n_max)}; only 0, no guesses, can be served")
    return fields


def _constrain(fields: dict[str, Any]) -> None:
    """vLLM's constraints."""
    forms = fields.pop("structured_outputs", None) or {}
    if not isinstance(forms, dict):
        refuse(f"structured_outputs is {shown(forms)}; give an object with json, grammar or choice")
    forms = {**without_null(forms), **{form: fields.pop(name) for name, form in GUIDED.items() if name in fields}}
    for form, value in forms.items():
        if form == "json":
            fields["json_schema"] = _json_of(value)
        elif form == "json_object" and value:
            fields["json_schema"] = {}
        elif form == "grammar":
            fields["grammar"] = value
        elif form == "choice":
            if not value or not is_list_of(str, value):
                refuse(f"guided_choice is {shown(value)}; give a list of texts")
            fields["grammar"] = "root ::= " + " | ".join(map(_literal, value))
        elif form == "regex":
            refuse(f"guided_regex is {shown(value)}; no text can be held to it here, give a grammar or a JSON schema")
        elif form != "json_object" and not form.startswith(("disable_", "whitespace_")):
            other = f"structured_outputs has {shown(form)}, to which no text can be held here"
            refuse(f"{other}; give json, grammar or choice")


def _literal(text: str) -> str:
    """The text in GBNF, which lacks two of JSON's escapes."""
    codes = {r"\b": r"\x08", r"\f": r"\x0c"}
    return re.sub(r"\\.", lambda escape: codes.get(escape[0], escape[0]), json.dumps(text, ensure_ascii=False))


def _json_of(value: Any) -> Any:
    """A schema, also as a text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        refuse(f"guided_json is {shown(value)}; give a JSON schema")


def _think(fields: dict[str, Any], passed: PassedOver) -> None:
    """Reasoning, and how much: as `reasoning_effort`, or as variables of the template."""
    for name in THINKS:
        value = fields.pop(name, None)
        if value is None:
            continue
        if "messages" not in fields:
            passed.add(name, f"{name} is for chats, which have messages; leave it out")
            continue
        thinks, effort = _reasoning(name, value)
        if isinstance(value, dict) and (budget := value.get("budget_tokens", value.get("max_tokens"))) is not None:
            fields.setdefault(BUDGETS[0], budget)
        variables = fields.get("chat_template_kwargs", {})
        if effort is not None:
            fields.setdefault("reasoning_effort", effort)
        elif thinks is not None and isinstance(variables, dict):
            fields["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks, **variables}


def _reasoning(name: str, value: Any) -> tuple[bool | None, str | None]:
    """(whether the model reasons, its effort), None where the request does not say."""
    if isinstance(value, bool):
        return value, None
    if name != "enable_thinking" and isinstance(value, str) and value in EFFORTS:
        return None, value
    if not isinstance(value, dict):
        refuse(f"{name} is {shown(value)}; give true or false")
    if (effort := value.get("effort")) is not None:
        return None, one_of(f"{name}.effort", effort, EFFORTS)
    if isinstance(enabled := value.get("enabled"), bool):
        return enabled, None
    return (value["type"] != "disabled", None) if "type" in value else (None, None)


# -- adapters (LoRA), by their numbers in the job

LORA = "lora"
MAX_FACTOR = 10.0  # of a request, where the job has no larger one: with 1000 a small model's rows were no numbers


def read_scales(value: Any, adapters: Sequence[ScaledAdapter]) -> AdapterScales | None:
    """llama-server's list of `id` and `scale`; others are not applied. None: as the job says. Raises UserError."""
    if not is_list_of(dict, value):
        refuse(f'{LORA} is {shown(value)}; give a list such as [{{"id": 0, "scale": 1.0}}]')
    if value and not adapters:
        refuse(none_loaded(value))
    scales = dict[int, float]()
    for each in value:
        number = whole(f"{LORA}.id", each.get("id"), 0, len(adapters) - 1)
        scale = each.get("scale", 0)
        most = max(MAX_FACTOR, abs(adapters[number].scale))
        if not is_number(scale) or abs(scale) > most:
            refuse(f"{LORA}.scale is {shown(scale)}; give a number from {-most:g} to {most:g}")
        scales[number] = float(scale)
    chosen = [ScaledAdapter(adapter, scales.get(number, 0.0)) for number, (adapter, _) in enumerate(adapters)]
    check_order(chosen, LORA)
    active = active_scales(chosen)
    return None if active == active_scales(adapters) else active


def none_loaded(value: Any) -> str:
    return f"{LORA} is {shown(value)}, and there is no adapter; start with --lora FILE"


def adapter_list(adapters: Sequence[ScaledAdapter], scales: AdapterScales | None) -> list[dict[str, Any]]:
    """All adapters as llama-server lists them. `scales`: see `read_scales`."""
    factors = dict(active_scales(adapters) if scales is None else scales)
    return [
        {"id": number, "path": str(adapter.path), "scale": factors.get(number, 0.0)}
        for number, (adapter, _) in enumerate(adapters)
    ]
