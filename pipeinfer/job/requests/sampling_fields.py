"""What a request says of sampling: parameters, biases, log-probabilities, what the text must be. Tokenises nothing."""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from pipeinfer.cluster.messages.logprobs import MAX_TOP
from pipeinfer.core.logit_bias import bias_text, is_bias
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import settings_of
from pipeinfer.job.options.limits import INT32_MAX
from pipeinfer.job.requests.field_names import FORMS
from pipeinfer.job.requests.fields import PassedOver, flag, is_number, is_whole, refuse, shown
from pipeinfer.models.text.grammar_text import ANY_TOKENS
from pipeinfer.models.text.json_schema import schema_grammar
from pipeinfer.models.text.relaxed_schema import relaxations

MAX_TOP_OF_COMPLETIONS = 5  # as OpenAI has it


def read_sampling(given: Mapping[str, Any], passed: PassedOver) -> dict[str, Any]:
    """The parameters that are given, by name. Raises UserError."""
    found: dict[str, Any] = {}
    for name, default, setting in settings_of(SamplingParams):
        for written in (name, *setting.aliases):
            if written not in given:
                continue
            value = given[written]
            fits = is_whole(value) if isinstance(default, int) else is_number(value)
            most = min(setting.most, INT32_MAX) if isinstance(default, int) and name != "seed" else setting.most
            if not fits or not setting.least <= value <= most:
                kind = "whole number" if isinstance(default, int) else "number"
                refuse(f"{written} is {shown(value)}; give a {kind} from {setting.least:.10g} to {most:.10g}")
            if found.setdefault(name, type(default)(value)) != value:
                refuse(f"{written} is {shown(value)}, and {found[name]:.10g} by another name; give one of them")
    if "logit_bias" in given:
        found["logit_bias"] = _biases(given["logit_bias"])
    if "grammar" in given:
        found["grammar"] = ""
    forms = [name for name in FORMS if given.get(name, "") != ""]  # an empty grammar is none
    if len(forms) > 1:
        refuse(f"{' and '.join(forms)} both say what the text must be; give one of them")
    if forms:
        found["grammar"] = _grammar(forms[0], given[forms[0]], passed)
    return found


def read_logprobs(given: Mapping[str, Any], is_chat: bool) -> int:
    """Tokens beside the chosen one; below 0: nobody asks for log-probabilities. Raises UserError."""
    asked, n_top, n_probs = given.get("logprobs", False), given.get("top_logprobs", 0), given.get("n_probs", 0)
    if not is_whole(n_probs) or not 0 <= n_probs <= MAX_TOP:
        refuse(f"n_probs is {shown(n_probs)}; give a whole number from 0 to {MAX_TOP}")
    if n_probs:
        return int(n_probs)
    if is_chat:
        if not is_whole(n_top) or not 0 <= n_top <= MAX_TOP:
            refuse(f"top_logprobs is {shown(n_top)}; give a whole number from 0 to {MAX_TOP}")
        if not flag(given, "logprobs", False) and n_top:
            refuse(f"top_logprobs is {n_top} without logprobs; give logprobs true too, or leave it out")
        return int(n_top) if asked else -1
    if n_top != 0:
        refuse(f"top_logprobs is {shown(n_top)}, which is for chats; of a prompt logprobs says how many")
    if asked is True:
        return 0
    if asked is not False and (not is_whole(asked) or not 0 <= asked <= MAX_TOP_OF_COMPLETIONS):
        refuse(f"logprobs is {shown(asked)}; of a prompt give how many tokens beside the chosen one, from 0 to "
               f"{MAX_TOP_OF_COMPLETIONS}")  # fmt: skip
    return -1 if asked is False else int(asked)


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
        schema = inner.get("schema") if isinstance(inner, dict) else value.get("schema")
        return _schema(name, schema, passed)
    refuse(f'response_format is {shown(value)}; its type is "text", "json_object", or "json_schema" with a schema')


def _schema(name: str, value: Any, passed: PassedOver) -> str:
    for reason in relaxations(value):
        passed.add(name, f"{name}: {reason}")
    return schema_grammar(value)


def text_biases(value: Any) -> tuple[tuple[str, float], ...]:
    """Texts, each of whose tokens has a bias, as in llama.cpp. Raises UserError."""
    return tuple((pair[0], _value_of(pair)) for pair in _pairs(value) if _has_text(pair))


def _pairs(value: Any) -> list[Any]:
    """Of OpenAI's object, or llama.cpp's list of pairs, whose biases may be false for never."""
    pairs = list(value.items()) if isinstance(value, dict) else [] if value is None else value
    return pairs if isinstance(pairs, list) else refuse(
        f"logit_bias is {shown(value)}; give an object of token ids and numbers")  # fmt: skip


def _has_text(pair: Any) -> bool:
    """Whether a pair is of a text, and of no token id."""
    return isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str) and not _is_id(pair[0])


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10


def _biases(value: Any) -> str:
    """Those of token ids."""
    try:
        return bias_text(_bias(pair) for pair in _pairs(value) if not _has_text(pair))
    except ValueError as error:
        refuse(f"logit_bias {error}")


def _bias(pair: Any) -> tuple[int, float]:
    if isinstance(pair, (list, tuple)) and len(pair) == 2:
        token = int(pair[0]) if isinstance(pair[0], str) else pair[0]
        if is_whole(token) and 0 <= token <= INT32_MAX:
            return token, _value_of(pair)
    _refuse_bias(pair)


def _value_of(pair: Any) -> float:
    bias = -math.inf if pair[1] is False else pair[1]
    if (is_whole(bias) or isinstance(bias, float)) and is_bias(bias):
        return float(bias)
    _refuse_bias(pair)


def _refuse_bias(pair: Any) -> NoReturn:
    refuse(f"logit_bias has {shown(pair)}; give token ids or texts, and of each a number, or false for never")
