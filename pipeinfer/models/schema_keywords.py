"""Which keywords of a JSON schema its grammar can hold to; what it cannot is refused. Writes no grammar."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from pipeinfer.errors import UserError

TYPES = ["object", "array", "string", "number", "integer", "boolean", "null"]
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
OF_TYPE = {
    "object": {"properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
               "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains",
              "minContains", "maxContains", "unevaluatedItems"},
    "string": {"pattern", "minLength", "maxLength", "format"},
    "number": {*BOUNDS, "multipleOf"},
    "integer": {*BOUNDS, "multipleOf"},
}  # fmt: skip
"""The keywords that say something of values of a type, and nothing of others."""
OF_ALL = {"$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "type", "const", "enum", "not", "if", "then", "else"}
CONSTRAINTS = OF_ALL.union(*OF_TYPE.values())
FORMATS = {"date", "time", "date-time", "uuid", "uuid1", "uuid2", "uuid3", "uuid4", "uuid5"}

UNWRITABLE = re.compile(r'["\x00-\x1f]|\[\^|\\[\\A-Za-z0-9]')
"""In a pattern: what the conversion would write into a JSON string as it is, unescaped, or does not know."""


def honoured(schema: Any, place: str) -> dict[str, Any]:
    """The same schema as the conversion is to read it: without annotations, and a choice of types as a choice of
    schemas. `place` says where in the whole it is.

    Raises UserError for a keyword that the text might break.
    """
    if schema is True:
        return {"anyOf": [{"type": each} for each in TYPES]}
    if not isinstance(schema, dict):
        raise UserError(f"the JSON schema has {str(schema)[:40]} at {place}; a schema is an object there")
    said = {key: value for key, value in schema.items() if key in CONSTRAINTS and not _says_nothing(key, value)}
    for kind in ("const", "enum"):
        if kind in said:
            return {kind: _values(said, kind, place)}
    if isinstance(said.get("type"), list):
        return {"anyOf": [_of_type(said, each) for each in said["type"]]}
    if said.get("type") in TYPES:
        said = _of_type(said, said["type"])
    if "properties" in said:
        said.pop("additionalProperties", None)  # none is written, which holds to any
    if len(said.get("allOf", ())) == 1 and not said.keys() - {"allOf", "type"}:
        return honoured(said["allOf"][0], f"{place}/allOf/0")
    if said.get("type") == "array" and not said.keys() & {"items", "prefixItems"} and len(said) > 1:
        said = {**said, "items": True}
    for key in said.keys() - _read(said, place):
        refuse(key, place)
    return said


def refuse(key: str, place: str, why: str = "") -> NoReturn:
    raise UserError(f"the JSON schema says {key} at {place}, which a grammar cannot hold to{why}; leave it out, "
                    "or check the text for it afterwards")  # fmt: skip


def _says_nothing(key: str, value: Any) -> bool:
    return (key, value) in (("uniqueItems", False), ("minProperties", 0), ("required", []))


def _of_type(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    idle = set().union(*OF_TYPE.values()) - OF_TYPE.get(kind, set())
    return {key: value for key, value in schema.items() if key not in idle} | {"type": kind}


def _values(schema: dict[str, Any], kind: str, place: str) -> Any:
    for key in schema.keys() - {kind, "type"}:
        refuse(key, place, f" beside {kind}")
    types = schema.get("type", TYPES)
    values = [schema["const"]] if kind == "const" else schema["enum"]
    kept = [each for each in values if _types(each) & {*([types] if isinstance(types, str) else types)}]
    if not kept:
        raise UserError(f"the JSON schema has no value of its type in {kind} at {place}; give one")
    return kept[0] if kind == "const" else kept


def _types(value: Any) -> set[str]:
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == value // 1 else {"number"}
    return {"string"} if isinstance(value, str) else {"array"} if isinstance(value, list) else {"object"}


def _read(schema: dict[str, Any], place: str) -> set[str]:
    """The keywords that the conversion reads of this schema."""
    for choice in ("$ref", "oneOf", "anyOf"):
        if choice in schema:
            return {choice}
    kind = schema.get("type")
    if kind in (None, "object"):
        if "properties" in schema or schema.get("additionalProperties", True) is not True:
            missing = set(schema.get("required", [])) - schema.get("properties", {}).keys()
            if missing:
                refuse("required", place, f" for {min(missing)}, which is not in properties")
            return {"type", "properties", "required", "additionalProperties"}
        if "allOf" in schema:
            _check_all_of(schema["allOf"], place)
            return {"type", "allOf"}
    if kind == "object":
        return {"type", "additionalProperties"}
    if kind == "array" or (kind is None and schema.keys() & {"items", "prefixItems"}):
        return _read_of_array(schema)
    if kind in (None, "string") and "pattern" in schema:
        if UNWRITABLE.search(schema["pattern"]) or _chooses(schema["pattern"]):
            refuse("pattern", place, " with a quote, [^, a backslash before one, a letter or a digit, or | outside ( )")
        return {"type", "pattern"}
    if kind in (None, "string") and "format" in schema:
        if schema["format"] not in FORMATS:
            refuse(f'format "{schema["format"]}"'[:60], place, ' (it can "date", "time", "date-time" and "uuid")')
        return {"type", "format"}
    return {"type", "minLength", "maxLength"} if kind == "string" else {"type", *(BOUNDS if kind == "integer" else ())}


def _check_all_of(parts: list[dict[str, Any]], place: str) -> None:
    """The conversion reads the properties of each part alone, and asks for all of them."""
    for part in parts:
        for each in part.get("anyOf", [part]):
            for key in each.keys() & CONSTRAINTS - {"type", "properties"}:
                if key != "required" or part is not each or not {*each[key]} <= each.get("properties", {}).keys():
                    refuse("allOf", place, f" with {key} in it")
            if each.get("type", "object") != "object" or "properties" not in each:
                refuse("allOf", place, " of anything but properties")


def _read_of_array(schema: dict[str, Any]) -> set[str]:
    parts = schema.get("items") or schema.get("prefixItems")
    if not isinstance(parts, list):
        return {"type", "items", "minItems", "maxItems"}
    read = {"type", "additionalItems", "items" if schema.get("items") in (parts, False) else "prefixItems"}
    read |= {"prefixItems"} if parts is schema.get("prefixItems") else set()
    read |= {"minItems"} if schema.get("minItems", 0) <= len(parts) else set()
    return read | ({"maxItems"} if schema.get("maxItems", len(parts)) >= len(parts) else set())


def _chooses(pattern: str) -> bool:
    """Whether a choice is outside of brackets: the conversion would take the string's quotes for parts of it."""
    depth, escaped = 0, False
    for character in pattern:
        if not escaped:
            depth += (character in "([") - (character in ")]")
            if character == "|" and depth == 0:
                return True
        escaped = character == "\\" and not escaped
    return False
