"""JSON schemas: as grammars for llguidance, interpreted as in llama.cpp; the keywords that no grammar can enforce; and
whether a text fits the whole schema. Knows no vocabulary, and limits no grammar."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeinfer.child import LimitedProcess, ProcessLimits
from pipeinfer.errors import HostFault, UserError

WHITESPACE = r"\x20|\n{1,2}[\x20\t]{0,20}"
"""llama.cpp's whitespace between the parts of a JSON text: small models would write spaces without end."""

MERGED = ("allOf", "anyOf", "oneOf", "$ref")

MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords whose objects have schemas by name
OF_OBJECTS, OF_ARRAYS = ("properties", "patternProperties"), ("items", "prefixItems")
VALUES = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
DROPPED = (
    *"propertyNames uniqueItems not if then else dependentRequired dependentSchemas dependencies contains".split(),
    *"minContains maxContains unevaluatedProperties unevaluatedItems $dynamicRef $recursiveRef".split(),
)
"""Keywords that llguidance has no grammar for."""

ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), (True, {})),
    "propertyNames": (True, {}, {"type": "string"}),
}
"""Such a keyword -> the values with which it asks nothing; of others that is false."""

FORMATS = (*"date-time time date duration email hostname ipv4 ipv6 uuid uri".split(),)
"""Formats of texts that it has grammars for. Others are annotations, as in JSON Schema."""

LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")  # of a pattern: look-ahead, look-behind and references to groups
PROCESS = LimitedProcess(__name__, ProcessLimits(cpu_s=1, niceness=10))


def read_schema(text: str) -> Any:
    """Raises UserError for invalid JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the JSON schema is not JSON: {error}") from None


def _refuse(name: str) -> None:
    raise ValueError(f"it has no {name}")


def schema_grammar(schema: Any) -> str:
    """The schema as the text of a grammar; {}: any object. Raises UserError for an invalid schema."""
    if not isinstance(schema, dict):
        raise UserError('a JSON schema is an object, such as {"type": "object"}')
    try:
        return json.dumps(schema or {"type": "object"}, allow_nan=False)
    except (ValueError, RecursionError):
        raise UserError("the JSON schema is too deep, or has a number that JSON has not") from None


def as_schema(grammar: str) -> Any:
    """The schema in the text of a grammar; None if it is none."""
    return json.loads(grammar) if grammar.startswith("{") else None


# -- grammars


def json_rule(schema: Any) -> str:
    """The right side of a rule in Lark for a schema. As in llama.cpp, objects with given properties have no others,
    unless the schema allows them or is a part of another one; `oneOf` is `anyOf`; a schema with properties or items
    is of an object or an array. Raises RecursionError for a schema that is too deep."""
    enforced, _ = relaxed(schema)
    closed = _closed(enforced, {*_parts(enforced)}, "#")
    return "%json " + json.dumps({**closed, "x-guidance": {"whitespace_pattern": WHITESPACE, "coerce_one_of": True}})


def _parts(schema: Any, is_part: bool = False) -> Iterator[str]:
    """References of schemas that are combined with others."""
    if isinstance(schema, list):
        for each in schema:
            yield from _parts(each, is_part)
    elif isinstance(schema, dict):
        if "$ref" in schema and (is_part or len(schema) > 1):
            yield str(schema["$ref"])
        for key, each in schema.items():
            if key not in VALUES:
                yield from _parts(each, _is_merged(key, schema))


def _is_merged(key: str, schema: dict[str, Any]) -> bool:
    return key == "allOf" or (key in MERGED and "properties" in schema)


def _closed(schema: Any, open_places: set[str], place: str, is_part: bool = False, is_map: bool = False) -> Any:
    """The schema with `additionalProperties: false` where it applies. `place`: its path in the whole schema."""
    if isinstance(schema, list):
        return [_closed(each, open_places, f"{place}/{at}", is_part) for at, each in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key, each in schema.items():
        if is_map:
            closed[key] = _closed(each, open_places, f"{place}/{key}")
        elif key not in VALUES:
            closed[key] = _closed(each, open_places, f"{place}/{key}", _is_merged(key, schema), key in MAPS)
    is_open = is_map or is_part or place in open_places or not {*MERGED}.isdisjoint(schema)
    if "properties" in schema and "additionalProperties" not in schema and not is_open:
        closed["additionalProperties"] = False
        if missing := _missing(schema):
            closed["properties"] = {**closed["properties"], **missing}
    if not is_map and isinstance(closed.get("items"), list):  # of older drafts
        closed.setdefault("additionalItems", False)
        closed.setdefault("minItems", len(closed["items"]))
    if not is_map and (kind := _meant_type(schema)):
        closed["type"] = kind
    return closed


def _meant_type(schema: Mapping[str, Any]) -> str:
    """The type that a schema without one means by its keywords; without it these would allow any number or text."""
    if not {"type", *VALUES[:2]}.isdisjoint(schema):
        return ""
    if not {*OF_OBJECTS}.isdisjoint(schema):
        return "object"
    if not {*MERGED}.isdisjoint(schema):
        return ""
    if schema.get("additionalProperties", True) not in (True, {}):
        return "object"
    return "array" if not {*OF_ARRAYS}.isdisjoint(schema) else ""


def _missing(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Properties that are required and not described, each with a schema."""
    names, properties = schema.get("required"), schema["properties"]
    if "patternProperties" in schema or not isinstance(names, list) or not isinstance(properties, dict):
        return {}
    return {name: {} for name in names if isinstance(name, str) and name not in properties}


# -- what a grammar cannot enforce


def relaxed(schema: Any) -> tuple[Any, tuple[str, ...]]:
    """The schema that a grammar can enforce, and a reason for each keyword that is left out. Raises RecursionError for
    one that is too deep."""
    reasons = dict[str, None]()
    return _relaxed(schema, reasons), tuple(reasons)


def relaxations(schema: Any) -> tuple[str, ...]:
    """The reasons of `relaxed`; none for a schema that is too deep, which is refused elsewhere."""
    try:
        return relaxed(schema)[1]
    except RecursionError:
        return ()


def _relaxed(schema: Any, reasons: dict[str, None]) -> Any:
    if isinstance(schema, list):
        return [_relaxed(each, reasons) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = dict[str, Any]()
    for key, value in schema.items():
        if key in VALUES:
            result[key] = value
        elif key in MAPS and isinstance(value, Mapping):
            result[key] = {name: _relaxed(each, reasons) for name, each in value.items()}
        elif key in DROPPED:
            asks_nothing = value in ASKS_NOTHING[key] if key in ASKS_NOTHING else value is False
            if not asks_nothing:
                reasons[f"no grammar holds a text to {key}"] = None
        elif key == "format":
            if value in FORMATS or schema.get("type") in ("integer", "number"):
                result[key] = value
        elif key == "pattern" and isinstance(value, str) and LOOKS_AROUND.search(value):
            reasons["no grammar holds a text to a pattern that looks around"] = None
        else:
            result[key] = _relaxed(value, reasons)
    named = result.get("patternProperties")
    named = named if isinstance(named, dict) else {}
    enforced = {name: each for name, each in named.items() if not LOOKS_AROUND.search(name)}
    if len(enforced) < len(named):
        reasons["no grammar holds a text to a pattern that looks around"] = None
        result |= {"patternProperties": enforced, "additionalProperties": True}
    return result


def mismatch(schema: Any, text: str) -> str:
    """Why a text does not fit the whole schema; empty if it fits, or if the comparison fails."""
    try:
        result = PROCESS.ask({"schema": schema, "text": text})
    except HostFault:
        return ""
    return " ".join(str(result.get("wrong", "")).split())[:300]


def answer(request: Mapping[str, Any]) -> dict[str, str]:
    """In a process of its own, because some patterns take unbounded time: `wrong`: the first error of `text`, and its
    place; empty if there is none. `error`: the comparison fails."""
    from jsonschema.exceptions import best_match  # type: ignore[import-untyped]
    from jsonschema.validators import Draft202012Validator, validator_for  # type: ignore[import-untyped]
    from referencing import Registry

    schema = request["schema"]
    try:
        value = json.loads(request["text"])
    except (ValueError, RecursionError):
        return {"wrong": "it is not JSON"}
    try:
        # an empty registry: a client's schema must not read files or call other servers
        validator = validator_for(schema, Draft202012Validator)(schema, registry=Registry())
        error = best_match(validator.iter_errors(value))
    except Exception as fault:  # whatever a schema can raise
        return {"error": f"{type(fault).__name__}: {fault}"}
    return {"wrong": f"{error.json_path}: {error.message}" if error else ""}
