"""What one request asks, in OpenAI's words and llama.cpp's: what it may say, and what is wrong with it. Tokenises
nothing; who asks, and how it is answered, is not known here."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.job.options.limits import INT32_MAX
from pipeinfer.job.requests.chat_fields import continues, read_messages, read_tools, read_variables, splits_reasoning
from pipeinfer.job.requests.field_names import FORMS, LENGTHS, PROMPTS, served
from pipeinfer.job.requests.fields import PassedOver, flag, is_whole, refuse, shown, without_null
from pipeinfer.job.requests.other_names import translated
from pipeinfer.job.requests.sampling_fields import read_logprobs, read_sampling, text_biases
from pipeinfer.models.text.chat import Message
from pipeinfer.models.text.relaxed_schema import relaxations
from pipeinfer.models.text.stop_strings import check_stops
from pipeinfer.models.text.tools import AUTO, Tools

MAX_STOP_TOKENS = 256

Prompt = str | tuple[int | str, ...]
"""A text, or token ids, which may have texts between them."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where a request does not say. `as_chat`: plain prompts are what a user says. `salt`: what else a
    result depends on, the model above all. `strict`: nothing of a request is passed over."""

    sampling: SamplingParams
    n_predict: int
    stops: tuple[str, ...]
    ignore_eos: bool
    as_chat: bool = False
    salt: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Body:
    """What is asked. `prompt`: a text or token ids; of a chat `messages`, and `variables` of its template. `n_predict`
    below 0: it does not say. `splits`: reasoning is no part of the text. `continues`: the last message, an assistant's,
    is the beginning of the answer. `parse_special`: names of control tokens in the prompt are these tokens; None: as
    the options say. `adds_special`: it begins with bos, if the model adds one. `stop_tokens`: they end the text too.
    `text_biases`: of each token of a text."""

    prompt: Prompt
    messages: tuple[Message, ...]
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
    text_biases: tuple[tuple[str, float], ...] = ()


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


def read_body(given: Mapping[str, Any], defaults: Defaults, as_chat: bool, passed: PassedOver) -> Body:
    """`as_chat`: a plain prompt is what a user says. `passed`: is told what is passed over. Raises UserError, which
    says what is wrong."""
    given = served(translated(given, passed), passed)
    if sum(name in given for name in PROMPTS) != 1:
        refuse("there must be one of prompt and messages")
    messages = read_messages(given["messages"], passed) if "messages" in given else ()
    prompt = read_prompt(given["prompt"]) if "prompt" in given else ""
    if as_chat and isinstance(prompt, str) and not messages:
        prompt, messages = "", (Message("user", prompt),)
    sampling = read_sampling(given, passed) | {"n_logprobs": read_logprobs(given, bool(messages))}
    tools = _tools(given, bool(messages), bool(sampling.get("grammar")), passed)
    return Body(
        prompt, messages, _length(given, defaults.n_predict),
        replace(defaults.sampling, **sampling), _stops(given.get("stop"), defaults.stops),
        flag(given, "ignore_eos", defaults.ignore_eos), _priority(given.get("priority", 0)),
        tools, read_variables(given), splits_reasoning(given), continues(given, messages),
        flag(given, "parse_special", True) if "parse_special" in given else None,
        flag(given, "add_special_tokens", True), _stop_tokens(given.get("stop_token_ids", [])),
        text_biases(given.get("logit_bias")),
    )  # fmt: skip


def _tools(given: Mapping[str, Any], is_chat: bool, is_held: bool, passed: PassedOver) -> Tools | None:
    """`is_held`: something else says what the text must be."""
    flag(given, "parallel_tool_calls", True)
    tools = read_tools(given, passed)
    if tools and not is_chat:
        refuse("tools are for chats; give messages, or leave them out")
    if tools and tools.choice != AUTO and is_held:
        refuse(f"tool_choice {shown(given['tool_choice'])} and {' and '.join(each for each in FORMS if each in given)} "
               "both say what the text must be; give one of them")  # fmt: skip
    for name, schema in (tools.schemas if tools and tools.choice != AUTO else {}).items():
        for reason in relaxations(schema):
            passed.add(f"tools.{name}", f"the arguments of {name}: {reason}")
    return tools


def read_prompt(value: Any) -> Prompt:
    """One text, or token ids, maybe with texts between them. Raises UserError for anything else."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and any(map(is_whole, value)) and all(map(_is_part, value)):
        return tuple(value)
    refuse(f"prompt is {shown(value)}; give one text, or a list of token ids")


def _is_part(value: Any) -> bool:
    return isinstance(value, str) or (is_whole(value) and 0 <= value <= INT32_MAX)


def _length(given: Mapping[str, Any], default: int) -> int:
    """Tokens of the text; 0: the prompt is read and kept."""
    values = {name: given[name] for name in LENGTHS if name in given}
    for name, value in values.items():
        if not is_whole(value) or value < -1:
            refuse(f"{name} is {shown(value)}; give a whole number from 0 on, or -1 for as many as there is room for")
    said = {value for value in values.values() if value != -1}  # -1: as llama.cpp's clients write it
    if len(said) > 1:
        refuse(f"{' and '.join(f'{name} {value}' for name, value in values.items())} are not the same; give one of "
               "them")  # fmt: skip
    return min(int(said.pop()), INT32_MAX) if said else default


def _stop_tokens(value: Any) -> tuple[int, ...]:
    is_list = isinstance(value, list) and len(value) <= MAX_STOP_TOKENS
    if not is_list or not all(is_whole(each) and 0 <= each <= INT32_MAX for each in value):
        refuse(f"stop_token_ids is {shown(value)}; give a list of up to {MAX_STOP_TOKENS} token ids")
    return tuple(value)


def _priority(value: Any) -> int:
    if not is_whole(value) or abs(value) > INT32_MAX:
        refuse(f"priority is {shown(value)}; give a whole number from {-INT32_MAX} to {INT32_MAX}, lower ones first")
    return int(value)


def _stops(value: Any, default: tuple[str, ...]) -> tuple[str, ...]:
    if value is None:
        return default
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        refuse(f"stop is {shown(value)}; give a text, or a list of texts")
    check_stops("stop", found)
    return tuple(found)
