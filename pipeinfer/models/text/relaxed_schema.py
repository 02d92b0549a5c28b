"""JSON schemas without what no grammar can hold a text to, and whether a text fits the whole schema all the same."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pipeinfer.models.text.limited_process import LimitedProcess, Limits

MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose objects have schemas by name."""

VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""

DROPPED = (
    "propertyNames", "uniqueItems", "not", "if", "then", "else", "dependentRequired", "dependentSchemas",
    "dependencies", "contains", "minContains", "maxContains", "unevaluatedProperties", "unevaluatedItems",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords that llguidance has no grammar for."""

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats of texts that it has grammars for. Others are annotations, as in JSON Schema."""

LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")
"""Of a pattern: look-ahead, look-behind and references to groups."""

PROCESS = LimitedProcess("pipeinfer.models.text.schema_child", Limits(cpu_s=1, wall_s=3.0, niceness=10))


def relaxed(schema: Any) -> tuple[Any, tuple[str, ...]]:
    """The schema that a grammar can hold a text to, and what is left out, a reason each. Raises RecursionError for one
    that is too deep."""
    reasons = dict[str, None]()
    return _relaxed(schema, reasons), tuple(reasons)


def relaxations(schema: Any) -> tuple[str, ...]:
    """What of a schema no grammar holds a text to; nothing of one that is too deep, which is refused elsewhere."""
    try:
        return relaxed(schema)[1]
    except RecursionError:
        return ()


def _relaxed(schema: Any, reasons: dict[str, None]) -> Any:
    if isinstance(schema, list):
        return [_relaxed(each, reasons) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = dict[str, Any]()
    for key, value in schema.items():
        if key in VALUES:
            found[key] = value
        elif key in MAPS and isinstance(value, Mapping):
            found[key] = {name: _relaxed(each, reasons) for name, each in value.items()}
        elif key in DROPPED:
            if value is not False or key.startswith("unevaluated"):
                reasons[f"no grammar holds a text to {key}"] = None
        elif key == "format":
            if value in FORMATS or schema.get("type") in ("integer", "number"):
                found[key] = value
        elif key == "pattern" and isinstance(value, str) and LOOKS_AROUND.search(value):
            reasons["no grammar holds a text to a pattern that looks around"] = None
        else:
            found[key] = _relaxed(value, reasons)
    named = found.get("patternProperties")
    named = named if isinstance(named, dict) else {}
    held = {name: each for name, each in named.items() if not LOOKS_AROUND.search(name)}
    if len(held) < len(named):
        reasons["no grammar holds a text to a pattern that looks around"] = None
        found |= {"patternProperties": held, "additionalProperties": True}
    return found


def mismatch(schema: Any, text: str) -> str:
    """What is wrong with a text by the whole schema; empty where it fits, or where that cannot be told."""
    found = PROCESS.ask({"schema": schema, "text": text})
    return " ".join(str(found.get("wrong", "")).split())[:300]


def as_schema(grammar: str) -> Any:
    """The schema that the text of a grammar is; None if it is none."""
    return json.loads(grammar) if grammar.startswith("{") else None
