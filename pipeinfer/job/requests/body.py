"""One request in OpenAI's and llama.cpp's JSON: its fields, read and checked. Tokenises nothing; knows no client."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from pipeinfer.cluster.verdicts import MAX_TOP
from pipeinfer.core.samplers import OFF, SAMPLERS, bias_text, is_bias, order_text, sampler_names, switched_off
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.types import AdapterScales
from pipeinfer.job.options.limits import INT32_MAX
from pipeinfer.job.requests.chat_fields import (
    continues,
    read_budget,
    read_messages,
    read_tools,
    read_variables,
    splits_reasoning,
)
from pipeinfer.job.requests.fields import (
    FORMS,
    LENGTHS,
    PROMPTS,
    SAMPLING_SETTINGS,
    PassedOver,
    flag,
    is_list_of,
    is_number,
    is_whole,
    none_loaded,
    read_scales,
    refuse,
    served_fields,
    shown,
    whole,
)
from pipeinfer.models.gguf.adapter import ScaledAdapter
from pipeinfer.models.text.grammar_text import ANY_TOKENS
from pipeinfer.models.text.json_schema import relaxations, schema_grammar
from pipeinfer.models.text.messages import ChatMessage
from pipeinfer.models.text.stops import check_stops
from pipeinfer.models.text.tokenizer import BREAKERS_FIELD, breakers_json
from pipeinfer.models.text.tools import AUTO, Tools

MAX_STOP_TOKENS = 256
MAX_TOP_OF_COMPLETIONS = 5  # OpenAI's limit
PromptParts = str | tuple[int | str, ...]  # a text, or token ids, which may have texts between them
TextBiases = tuple[tuple[str, float], ...]  # texts, and the bias of all tokens of each


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values of fields that a request lacks. `as_chat`: a plain prompt is a user's message. `salt`: names all else that
    texts depend on. `strict`: nothing is passed over. `adapters`: the job's; `scales`: theirs, if changed since."""

    sampling: SamplingParams
    n_predict: int
    stops: tuple[str, ...]
    ignore_eos: bool
    as_chat: bool = False
    salt: str = ""
    strict: bool = False
    adapters: tuple[ScaledAdapter, ...] = ()
    scales: AdapterScales | None = None


@dataclass(frozen=True, slots=True)
class Body:
    """The fields of one request, which make its id in a batch. `prompt`: empty for a chat, which has `messages` and
    `variables`. `n_predict`, `reasoning` (budget, message): below 0 as the options say. `splits`: reasoning is no part
    of the text. `continues`: the last message begins the answer. `parse_special`: names of control tokens in the prompt
    are these tokens; None: as the options say. `adds_special`: bos is put first. `guesses`: there may be some."""

    prompt: PromptParts
    messages: tuple[ChatMessage, ...]
    n_predict: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    ignore_eos: bool
    priority: int = 0
    tools: Tools | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    splits: bool = True
    continues: bool = False
    parse_special: bool | None = None
    adds_special: bool = True
    stop_tokens: tuple[int, ...] = ()
    text_biases: TextBiases = ()
    adapters: AdapterScales | None = None  # see GenerationRequest
    reasoning: tuple[int, str] = (-1, "")
    guesses: bool = True

    @property
    def forced_schemas(self) -> dict[str, Any]:
        """The schemas of functions by name, where one of them must be called."""
        return self.tools.schemas if self.tools and self.tools.choice != AUTO else {}


def read_body(fields: Mapping[str, Any], defaults: Defaults, as_chat: bool, passed: PassedOver) -> Body:
    """`as_chat`: a plain prompt is a user's message. Raises UserError for wrong fields."""
    fields = served_fields(fields, passed)
    if sum(name in fields for name in PROMPTS) != 1:
        refuse("there must be one of prompt and messages")
    messages = read_messages(fields["messages"], passed) if "messages" in fields else ()
    prompt = prompt_parts(fields["prompt"]) if "prompt" in fields else ""
    if as_chat and isinstance(prompt, str) and not messages:
        prompt, messages = "", (ChatMessage("user", prompt),)
    sampling, text_biases = _sampling(fields, passed)
    sampling["n_logprobs"] = _n_logprobs(fields, bool(messages))
    tools = _tools(fields, bool(messages), bool(sampling.get("grammar")), passed)
    if (lora := fields.get("lora", [])) and not defaults.adapters:  # as editors send it to any server
        passed.add("lora", none_loaded(lora))
        lora = []
    return Body(
        prompt,
        messages,
        n_predict=length_of(fields, defaults.n_predict),
        sampling=replace(defaults.sampling, **sampling),
        stops=_stops(fields.get("stop"), defaults.stops),
        ignore_eos=flag(fields, "ignore_eos", defaults.ignore_eos),
        priority=whole("priority", fields.get("priority", 0), -INT32_MAX, INT32_MAX, ", lower ones first"),
        tools=tools,
        variables=read_variables(fields),
        splits=splits_reasoning(fields),
        continues=continues(fields, messages),
        parse_special=flag(fields, "parse_special", True) if "parse_special" in fields else None,
        adds_special=flag(fields, "add_special_tokens", True),
        stop_tokens=_stop_tokens(fields.get("stop_token_ids", [])),
        text_biases=text_biases,
        adapters=read_scales(lora, defaults.adapters) if lora != [] else defaults.scales,
        reasoning=read_budget(fields, bool(messages), passed),
        guesses=flag(fields, "guesses", True),
    )


def are_prompts(value: Any) -> TypeGuard[list[Any]]:
    """Whether a prompt is a list of several; token ids with texts between them are one."""
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(_without_media(each), (str, list)) for each in value)


def prompt_parts(value: Any) -> PromptParts:
    """Raises UserError for anything but one text, or token ids with texts between them."""
    if are_prompts(value) and len(value) == 1:
        value = value[0]
    value = _without_media(value)
    if isinstance(value, str):
        return value
    parts = list(map(_without_media, value)) if isinstance(value, list) else []
    if any(map(is_whole, parts)) and all(isinstance(each, str) or _is_token(each) for each in parts):
        return tuple(parts)
    refuse(f"prompt is {shown(value)}; give one text, or a list of token ids")


def _without_media(value: Any) -> Any:
    """The text of llama-server's prompts with media, which have none."""
    is_text = isinstance(value, dict) and isinstance(value.get("prompt_string"), str)
    return value["prompt_string"] if is_text and not value.get("multimodal_data") else value


def _is_token(value: Any) -> TypeGuard[int]:
    return is_whole(value) and 0 <= value <= INT32_MAX


def _tools(fields: Mapping[str, Any], is_chat: bool, has_form: bool, passed: PassedOver) -> Tools | None:
    """`has_form`: the text has another constraint."""
    flag(fields, "parallel_tool_calls", True)
    tools = read_tools(fields, passed)
    if tools and not is_chat:
        refuse("tools are for chats; give messages, or leave them out")
    if tools is None or tools.choice == AUTO:
        return tools
    if has_form:
        forms = " and ".join(each for each in FORMS if each in fields)
        choice = shown(fields["tool_choice"])
        refuse(f"tool_choice {choice} and {forms} both say what the text must be; give one of them")
    for name, schema in tools.schemas.items():
        for reason in relaxations(schema):
            passed.add(f"tools.{name}", f"the arguments of {name}: {reason}")
    return tools


def length_of(fields: Mapping[str, Any], default: int) -> int:
    """Tokens of the text; 0: the prompt alone is evaluated."""
    values = {name: fields[name] for name in LENGTHS if name in fields}
    for name, value in values.items():
        if not is_whole(value) or value < -1:
            refuse(f"{name} is {shown(value)}; give a whole number from 0 on, or -1 for as many as there is room for")
    lengths = {value for value in values.values() if value != -1}  # -1: as llama.cpp's clients write it
    if len(lengths) > 1:
        each = " and ".join(f"{name} {value}" for name, value in values.items())
        refuse(f"{each} are not the same; give one of them")
    return min(int(lengths.pop()), INT32_MAX) if lengths else default


def _stop_tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_STOP_TOKENS or not all(map(_is_token, value)):
        refuse(f"stop_token_ids is {shown(value)}; give a list of up to {MAX_STOP_TOKENS} token ids")
    return tuple(value)


def _stops(value: Any, default: tuple[str, ...]) -> tuple[str, ...]:
    if value is None:
        return default
    stops = [value] if isinstance(value, str) else value
    if not is_list_of(str, stops):
        refuse(f"stop is {shown(value)}; give a text, or a list of texts")
    stops = [stop for stop in stops if stop]  # as llama.cpp
    check_stops("stop", stops)
    return tuple(stops)


# -- sampling


def _sampling(fields: Mapping[str, Any], passed: PassedOver) -> tuple[dict[str, Any], TextBiases]:
    """(the request's parameters by name, biases of texts)."""
    params: dict[str, Any] = {}
    text_biases: TextBiases = ()
    for name, default, setting in SAMPLING_SETTINGS:
        for written in (name, *setting.aliases):
            if written not in fields:
                continue
            value = fields[written]
            fits = is_whole(value) if isinstance(default, int) else is_number(value)
            most = min(setting.most, INT32_MAX) if isinstance(default, int) and name != "seed" else setting.most
            if not fits or not setting.least <= value <= most:
                kind = "whole number" if isinstance(default, int) else "number"
                refuse(f"{written} is {shown(value)}; give a {kind} from {setting.least:.10g} to {most:.10g}")
            if params.setdefault(name, type(default)(value)) != value:
                refuse(f"{written} is {shown(value)}, and {params[name]:.10g} by another name; give one of them")
    if "logit_bias" in fields:
        params["logit_bias"], text_biases = _biases(fields["logit_bias"])
    if BREAKERS_FIELD in fields:
        params[BREAKERS_FIELD] = _breakers(fields[BREAKERS_FIELD])
    if fields.get("samplers") is not None:
        params |= _samplers(fields["samplers"], passed)
    if "grammar" in fields:
        params["grammar"] = ""
    forms = [name for name in FORMS if fields.get(name, "") != ""]  # an empty grammar is none
    if len(forms) > 1:  # any text is one form, where there is another
        forms = [name for name in forms if fields[name] != {"type": "text"}]
    if len(forms) > 1:
        refuse(f"{' and '.join(forms)} both say what the text must be; give one of them")
    if forms:
        params["grammar"] = _grammar(forms[0], fields[forms[0]], passed)
    return params, text_biases


def _breakers(value: Any) -> str:
    """DRY's sequence breakers: texts, some clients write them as JSON."""
    try:
        texts = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        texts = None
    if not is_list_of(str, texts):
        refuse(f"{BREAKERS_FIELD} is {shown(value)}; give texts")
    return breakers_json(texts, BREAKERS_FIELD)


def _samplers(value: Any, passed: PassedOver) -> dict[str, Any]:
    """What llama-server's list of samplers does: those that it does not name are off, the others come in its order."""
    text = ";".join(value) if is_list_of(str, value) else value
    if not isinstance(text, str):
        passed.add("samplers", f"samplers is {shown(value)}; give a list of names")
        return {}
    names = sampler_names(text)
    if unknown := [name for name in names if name not in SAMPLERS and name not in OFF]:
        passed.add("samplers", f"samplers has {shown(unknown[0])}, and there is no such sampler; leave it out")
    named = [name for name in dict.fromkeys(names) if name in SAMPLERS]
    params: dict[str, Any] = switched_off(named)
    try:
        params["sampler_order"] = order_text(named)
    except ValueError as error:
        passed.add("samplers", f"samplers {error}; they come in llama.cpp's order")
    return params


def _n_logprobs(fields: Mapping[str, Any], is_chat: bool) -> int:
    """How many tokens beside the chosen one get log-probabilities; below 0: no token does."""
    value, n_top = fields.get("logprobs", False), fields.get("top_logprobs", 0)
    n_probs = whole("n_probs", fields.get("n_probs", 0), 0, MAX_TOP)
    if n_probs:
        return n_probs
    if is_chat:
        whole("top_logprobs", n_top, 0, MAX_TOP)
        if not flag(fields, "logprobs", False) and n_top:
            refuse(f"top_logprobs is {n_top} without logprobs; give logprobs true too, or leave it out")
        return int(n_top) if value else -1
    if n_top != 0:
        refuse(f"top_logprobs is {shown(n_top)}, which is for chats; of a prompt logprobs says how many")
    if isinstance(value, bool):
        return 0 if value else -1
    if not is_whole(value) or not 0 <= value <= MAX_TOP_OF_COMPLETIONS:
        limits = f"from 0 to {MAX_TOP_OF_COMPLETIONS}"
        refuse(f"logprobs is {shown(value)}; of a prompt give how many tokens beside the chosen one, {limits}")
    return value


def _grammar(name: str, value: Any, passed: PassedOver) -> str:
    if name == "grammar":
        fits = isinstance(value, str) and not value.startswith(ANY_TOKENS)
        return value if fits else refuse(f"grammar is {shown(value)}; give a text in GBNF")
    if name == "json_schema":
        return _schema(name, value, passed)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        return _schema(name, value.get("schema") or {}, passed)
    if kind == "json_schema":
        inner = value.get("json_schema")
        return _schema(name, (inner if isinstance(inner, dict) else value).get("schema"), passed)
    refuse(f'response_format is {shown(value)}; its type is "text", "json_object", or "json_schema" with a schema')


def _schema(name: str, value: Any, passed: PassedOver) -> str:
    for reason in relaxations(value):
        passed.add(name, f"{name}: {reason}")
    return schema_grammar(value)


def _biases(value: Any) -> tuple[str, TextBiases]:
    """(the biases of tokens as `bias_text`, those of all tokens of texts) of OpenAI's object, or llama.cpp's list of
    pairs, in which false means never."""
    tokens, texts = list[tuple[int, float]](), list[tuple[str, float]]()
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        refuse(f"logit_bias is {shown(value)}; give an object of token ids and numbers")
    for pair in pairs:
        name, bias = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None)
        bias = -math.inf if bias is False else bias
        if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) <= 10:
            name = int(name)
        is_named = isinstance(name, str) or _is_token(name)
        if not is_named or not (is_whole(bias) or isinstance(bias, float)) or not is_bias(bias):
            refuse(f"logit_bias has {shown(pair)}; give token ids or texts, and of each a number, or false for never")
        (texts if isinstance(name, str) else tokens).append((name, float(bias)))  # type: ignore[arg-type]
    try:
        return bias_text(tokens), tuple(texts)
    except ValueError as error:
        refuse(f"logit_bias {error}")
