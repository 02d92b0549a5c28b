"""Fields of other servers that have a meaning here under another name: vLLM's, Ollama's, OpenRouter's, llama-server's
list of samplers. Reads nothing else."""

import json
from collections.abc import Mapping
from typing import Any

from pipeinfer.job.requests.chat_fields import EFFORTS
from pipeinfer.job.requests.fields import PassedOver, refuse, shown, without_null

GUIDED = {"guided_json": "json", "guided_grammar": "grammar", "guided_choice": "choice", "guided_regex": "regex"}
STOPS = ("stop_sequences", "stopping_strings")
THINKS = ("enable_thinking", "think", "thinking", "reasoning")
SAMPLERS: Mapping[str, Mapping[str, float]] = {
    "penalties": {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "top_k": {"top_k": 0}, "top_p": {"top_p": 1.0}, "min_p": {"min_p": 0.0}, "temperature": {"temp": 1.0},
}  # fmt: skip
"""llama.cpp's names of the samplers that there are, and the settings that switch each off."""

ALSO = {"repeat_penalty": ("repetition_penalty",), "temp": ("temperature",)}
"""Other names of those settings."""

LETTERS = {"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
           "x": "xtc", "t": "temperature", "a": "adaptive_p", "i": "infill"}  # fmt: skip
"""llama.cpp's names in a text of letters."""

OFF = ("dry", "top_n_sigma", "typ_p", "typical_p", "xtc", "adaptive_p", "dynatemp")
"""Samplers that are off unless a field of theirs says otherwise."""


def translated(given: Mapping[str, Any], passed: PassedOver) -> dict[str, Any]:
    """The same request with the fields that are read here. Raises UserError for values of a wrong type."""
    found = dict(given)
    _constrain(found)
    for name in STOPS:
        if (value := found.pop(name, None)) is not None:
            found.setdefault("stop", value)
    _think(found, passed)
    _switch_off(found, passed)
    return found


def _constrain(found: dict[str, Any]) -> None:
    """What the text must be, as vLLM says it."""
    asked = found.pop("structured_outputs", None) or {}
    if not isinstance(asked, dict):
        refuse(f"structured_outputs is {shown(asked)}; give an object with json, grammar or choice")
    asked = {**without_null(asked), **{form: found.pop(name) for name, form in GUIDED.items() if name in found}}
    for form, value in asked.items():
        if form == "json":
            found["json_schema"] = _json_of(value)
        elif form == "json_object" and value:
            found["json_schema"] = {}
        elif form == "grammar":
            found["grammar"] = value
        elif form == "choice":
            if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
                refuse(f"guided_choice is {shown(value)}; give a list of texts")
            found["grammar"] = "root ::= " + " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
        elif form == "regex":
            refuse(f"guided_regex is {shown(value)}; no text can be held to it here, give a grammar or a JSON schema")
        elif form != "json_object" and not form.startswith(("disable_", "whitespace_")):
            refuse(
                f"structured_outputs has {shown(form)}, to which no text can be held here; give json, grammar or choice"
            )


def _json_of(value: Any) -> Any:
    """A schema, also as a text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        refuse(f"guided_json is {shown(value)}; give a JSON schema")


def _think(found: dict[str, Any], passed: PassedOver) -> None:
    """Whether and how long the model reasons: `reasoning_effort`, and variables of the template."""
    for name in THINKS:
        value = found.pop(name, None)
        if value is None:
            continue
        if "messages" not in found:
            passed.add(name, f"{name} is for chats, which have messages; leave it out")
            continue
        asks, effort = _asked_thought(name, value)
        if effort is not None:
            found.setdefault("reasoning_effort", effort)
        elif asks is not None:
            variables = found.get("chat_template_kwargs", {})
            if isinstance(variables, dict):
                found["chat_template_kwargs"] = {"enable_thinking": asks, "thinking": asks, **variables}


def _asked_thought(name: str, value: Any) -> tuple[bool | None, str | None]:
    """Whether it reasons, and how long, as far as either is said."""
    if isinstance(value, bool):
        return value, None
    if name != "enable_thinking" and isinstance(value, str) and value in EFFORTS:
        return None, value
    if isinstance(value, dict):
        if (effort := value.get("effort")) is not None:
            if effort not in EFFORTS:
                refuse(f"{name}.effort is {shown(effort)}; it is one of {', '.join(EFFORTS)}")
            return None, effort
        if isinstance(asks := value.get("enabled"), bool):
            return asks, None
        return (value["type"] != "disabled", None) if "type" in value else (None, None)
    refuse(f"{name} is {shown(value)}; give true or false")


def _switch_off(found: dict[str, Any], passed: PassedOver) -> None:
    """llama-server's list of samplers: those that it does not name are off. Their order is llama.cpp's own."""
    samplers = found.pop("samplers", None)
    if samplers is None:
        return
    if isinstance(samplers, str):
        samplers = [LETTERS.get(letter, letter) for letter in samplers]
    if not isinstance(samplers, list) or not all(isinstance(each, str) for each in samplers):
        passed.add("samplers", f"samplers is {shown(samplers)}; give a list of names")
        return
    if unknown := [each for each in samplers if each not in SAMPLERS and each not in OFF]:
        passed.add("samplers", f"samplers has {shown(unknown[0])}, and there is no such sampler; leave it out")
    for name, off in SAMPLERS.items():
        if name not in samplers:
            found.update(off)
            for setting in off:
                for other in ALSO.get(setting, ()):
                    found.pop(other, None)
