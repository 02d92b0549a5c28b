"""What one request asks, in OpenAI's words and llama.cpp's: what it may say, and what is wrong with it. Tokenises
nothing; who asks, and how it is answered, is not known here."""

import json
import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeinfer.cluster.messages.logprobs import MAX_TOP
from pipeinfer.core.logit_bias import bias_text, is_bias
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import settings_of
from pipeinfer.job.options.limits import INT32_MAX
from pipeinfer.job.requests.chat_fields import CHAT_FIELDS, read_messages, read_tools, read_variables, splits_reasoning
from pipeinfer.job.requests.fields import flag, is_number, is_whole, refuse, shown, without_null
from pipeinfer.models.text.chat import Message
from pipeinfer.models.text.grammar_text import ANY_TOKENS
from pipeinfer.models.text.json_schema import schema_grammar
from pipeinfer.models.text.stop_strings import check_stops
from pipeinfer.models.text.tools import AUTO, Tools

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
"""As what may be asked."""

LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict")
PROMPTS = ("prompt", "messages")
WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_prompt",
    "stream_options", "prompt_cache_retention", "verbosity", "mirostat_tau", "mirostat_eta", "dynatemp_exponent",
    "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
)  # fmt: skip
ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "echo": (False,),
    "suffix": ("",), "modalities": (["text"],), "functions": ([],), "function_call": ("none", "auto"),
    # samplers that are off
    "typical_p": (1,), "typ_p": (1,), "tfs_z": (1,), "mirostat": (0,), "dynatemp_range": (0,), "dry_multiplier": (0,),
    "xtc_probability": (0,), "top_n_sigma": (-1, 0), "top_a": (0,), "epsilon_cutoff": (0,), "eta_cutoff": (0,),
    "min_keep": (0,), "lora": ([],),
    # as it is anyway
    "n_keep": (0, -1), "n_discard": (0,), "id_slot": (-1,), "t_max_predict_ms": (0, -1), "n_indent": (0,),
    "penalize_nl": (False,), "return_tokens": (False,), "post_sampling_probs": (False,),
    "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,), "min_tokens": (0,),
    "include_stop_str_in_output": (False,), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "add_special_tokens": (True, False),
}  # fmt: skip
"""Fields that are accepted with these values alone, with which they change nothing."""

MAX_TOP_OF_COMPLETIONS = 5  # as OpenAI has it

FORMS = ("grammar", "json_schema", "response_format")
"""What the text must be: one of them."""

ALIASES = {alias: name for name, _, setting in settings_of(SamplingParams) for alias in setting.aliases}
"""Other names of fields."""

KNOWN = {
    *(name for name, _, _ in settings_of(SamplingParams)), *ALIASES, *LENGTHS, *PROMPTS, *WITHOUT_EFFECT, *ONLY, *FORMS,
    *CHAT_FIELDS, "stop", "ignore_eos", "logit_bias", "logprobs", "top_logprobs", "priority",
}  # fmt: skip
"""Fields that a request may have."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where a request does not say. `as_chat`: plain prompts are what a user says. `salt`: what else a
    result depends on, the model above all."""

    sampling: SamplingParams
    n_predict: int
    stops: tuple[str, ...]
    ignore_eos: bool
    as_chat: bool = False
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Body:
    """What is asked. `prompt`: a text or token ids; of a chat `messages`, and `variables` of its template. `n_predict`
    below 0: it does not say. `splits`: reasoning is no part of the text."""

    prompt: str | tuple[int, ...]
    messages: tuple[Message, ...]
    n_predict: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    ignore_eos: bool
    priority: int = 0
    tools: Tools | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    splits: bool = True


def read_json(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object, without its fields that are null; `what`: its name in messages. Raises UserError for anything
    else, and for a field that is there twice: one of the two would be dropped."""

    def each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            refuse(f"{what} has the field {shown(twice)} twice in an object; say it once")
        return found

    try:
        found = json.loads(text.decode("utf-8-sig"), object_pairs_hook=each_once)
    except RecursionError:
        refuse(f"{what} is nested too deeply; objects and lists may be within each other some hundred times")
    except UnicodeDecodeError:
        refuse(f"{what} is not UTF-8 text; write it in UTF-8")
    except ValueError as error:
        is_number = "int_max_str_digits" in str(error)
        why = "has a number of too many digits; 4300 are possible" if is_number else f"is not JSON: {error}"
        refuse(f"{what} {why}")
    if not isinstance(found, dict):
        refuse(f'{what} is not a JSON object; write {{"prompt": "…"}} or what OpenAI\'s API asks')
    return without_null(found)


def not_served(given: Mapping[str, Any], known: Container[str] = ()) -> dict[str, str]:
    """Fields that are unknown, or have values that cannot be served, and what is wrong with them. `known`: further
    fields that somebody else reads."""
    found = {}
    for name, value in given.items():
        if name in ONLY and name not in known and not any(value == each for each in ONLY[name]):
            offered = " or ".join(json.dumps(each) for each in ONLY[name])
            found[name] = f"{name} is {shown(value)}; only {offered} can be served"
        elif name not in KNOWN and name not in known:
            found[name] = f"the field {shown(name)} is unknown; leave it out"
    return found


def read_body(given: Mapping[str, Any], defaults: Defaults, as_chat: bool) -> Body:
    """`as_chat`: a plain prompt is what a user says. Raises UserError, which says what is wrong."""
    if wrong := not_served(given):
        refuse(wrong[min(wrong)])
    if sum(name in given for name in PROMPTS) != 1:
        refuse("there must be one of prompt and messages")
    messages = read_messages(given["messages"]) if "messages" in given else ()
    prompt = read_prompt(given["prompt"]) if "prompt" in given else ""
    if as_chat and isinstance(prompt, str) and not messages:
        prompt, messages = "", (Message("user", prompt),)
    sampling = _sampling(given) | {"n_logprobs": _n_logprobs(given, bool(messages))}
    flag(given, "parallel_tool_calls", True)
    tools = read_tools(given)
    if tools and not messages:
        refuse("tools are for chats; give messages, or leave them out")
    if tools and tools.choice != AUTO and sampling.get("grammar"):
        refuse(f"tool_choice {shown(given['tool_choice'])} and {' and '.join(each for each in FORMS if each in given)} "
               "both say what the text must be; give one of them")  # fmt: skip
    return Body(
        prompt, messages, _length(given, defaults.n_predict),
        replace(defaults.sampling, **sampling), _stops(given.get("stop"), defaults.stops),
        flag(given, "ignore_eos", defaults.ignore_eos), _priority(given.get("priority", 0)),
        tools, read_variables(given), splits_reasoning(given),
    )  # fmt: skip


def read_prompt(value: Any) -> str | tuple[int, ...]:
    """One text, or token ids. Raises UserError for anything else."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(is_whole(each) and 0 <= each <= INT32_MAX for each in value):
        return tuple(value)
    refuse(f"prompt is {shown(value)}; give one text, or a list of token ids")


def _length(given: Mapping[str, Any], default: int) -> int:
    names = [name for name in LENGTHS if name in given]
    if len(names) > 1:
        refuse(f"{' and '.join(names)} say the same; give one of them")
    if not names:
        return default
    value = given[names[0]]
    if is_whole(value) and value == -1:  # as llama.cpp's clients write it
        return default
    if is_whole(value) and value == 0:
        refuse(f"{names[0]} is 0, and a text has one token at least; 1 reads the prompt just as well")
    if not is_whole(value) or not 1 <= value <= INT32_MAX:
        refuse(f"{names[0]} is {shown(value)}; give a whole number from 1 on, or nothing")
    return int(value)


def _priority(value: Any) -> int:
    if not is_whole(value) or abs(value) > INT32_MAX:
        refuse(f"priority is {shown(value)}; give a whole number from {-INT32_MAX} to {INT32_MAX}, lower ones first")
    return int(value)


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, default, setting in settings_of(SamplingParams):
        for written in (name, *setting.aliases):
            if written not in given:
                continue
            value = given[written]
            if name in found:
                refuse(f"{written} is given by two names; give one of them")
            fits = is_whole(value) if isinstance(default, int) else is_number(value)
            most = min(setting.most, INT32_MAX) if isinstance(default, int) and name != "seed" else setting.most
            if not fits or not setting.least <= value <= most:
                kind = "whole number" if isinstance(default, int) else "number"
                refuse(f"{written} is {shown(value)}; give a {kind} from {setting.least:.10g} to {most:.10g}")
            found[name] = type(default)(value)
    if "logit_bias" in given:
        found["logit_bias"] = _biases(given["logit_bias"])
    forms = [name for name in FORMS if name in given]
    if len(forms) > 1:
        refuse(f"{' and '.join(forms)} both say what the text must be; give one of them")
    if forms:
        found["grammar"] = _grammar(forms[0], given[forms[0]])
    return found


def _n_logprobs(given: Mapping[str, Any], is_chat: bool) -> int:
    """Tokens beside the chosen one; below 0: nobody asks for log-probabilities."""
    asked, n_top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if is_chat:
        if not is_whole(n_top) or not 0 <= n_top <= MAX_TOP:
            refuse(f"top_logprobs is {shown(n_top)}; give a whole number from 0 to {MAX_TOP}")
        if not flag(given, "logprobs", False) and n_top:
            refuse(f"top_logprobs is {n_top} without logprobs; give logprobs true too, or leave it out")
        return int(n_top) if asked else -1
    if n_top != 0:
        refuse(f"top_logprobs is {shown(n_top)}, which is for chats; of a prompt logprobs says how many")
    if asked is not False and (not is_whole(asked) or not 0 <= asked <= MAX_TOP_OF_COMPLETIONS):
        refuse(f"logprobs is {shown(asked)}; of a prompt give how many tokens beside the chosen one, from 0 to "
               f"{MAX_TOP_OF_COMPLETIONS}")  # fmt: skip
    return -1 if asked is False else int(asked)


def _grammar(name: str, value: Any) -> str:
    if name == "grammar":
        fits = isinstance(value, str) and not value.startswith(ANY_TOKENS)
        return value if fits else refuse(f"grammar is {shown(value)}; give a text in GBNF")
    if name == "json_schema":
        return schema_grammar(value)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        return schema_grammar(value.get("schema") or {})
    if kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else value.get("schema")
        return schema_grammar(schema)
    refuse(f'response_format is {shown(value)}; its type is "text", "json_object", or "json_schema" with a schema')


def _biases(value: Any) -> str:
    """OpenAI's object, or llama.cpp's list of pairs, whose biases may be false for never."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        refuse(f"logit_bias is {shown(value)}; give an object of token ids and numbers")
    try:
        return bias_text(map(_bias, pairs))
    except ValueError as error:
        refuse(f"logit_bias {error}")


def _bias(pair: Any) -> tuple[int, float]:
    if isinstance(pair, (list, tuple)) and len(pair) == 2:
        token, bias = pair
        bias = -math.inf if bias is False else bias
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= 10:
            token = int(token)
        if (
            is_whole(token)
            and 0 <= token <= INT32_MAX
            and (is_whole(bias) or isinstance(bias, float))
            and is_bias(bias)
        ):
            return token, float(bias)
    refuse(f"logit_bias has {shown(pair)}; give token ids, and of each a number, or false for never")


def _stops(value: Any, default: tuple[str, ...]) -> tuple[str, ...]:
    if value is None:
        return default
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        refuse(f"stop is {shown(value)}; give a text, or a list of texts")
    check_stops("stop", found)
    return tuple(found)
