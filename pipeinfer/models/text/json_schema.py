"""JSON schemas as grammars for llguidance, interpreted as in llama.cpp. Knows no vocabulary, and checks no limits."""

import json
from collections.abc import Iterator
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.models.text.relaxed_schema import MAPS, VALUES, relaxed

WHITESPACE = r"\x20|\n{1,2}[\x20\t]{0,20}"
"""llama.cpp's whitespace between the parts of a JSON text: small models would write spaces without end."""

MERGED = ("allOf", "anyOf", "oneOf", "$ref")


def read_schema(text: str) -> Any:
    """Raises UserError for invalid JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the JSON schema is not JSON: {error}") from None


def schema_grammar(schema: Any) -> str:
    """The schema as the text of a grammar; {}: any object. Raises UserError for an invalid schema."""
    if not isinstance(schema, dict):
        raise UserError('a JSON schema is an object, such as {"type": "object"}')
    try:
        return json.dumps(schema or {"type": "object"}, allow_nan=False)
    except (ValueError, RecursionError):
        raise UserError("the JSON schema is too deep, or has a number that JSON has not") from None


def lark_of_schema(text: str) -> str:
    """The grammar in Lark. Raises RecursionError for a schema that is too deep."""
    return f"start: {json_rule(json.loads(text))}"


def json_rule(schema: Any) -> str:
    """What a rule in Lark is that a schema describes. As in llama.cpp, objects with given properties have no others,
    unless the schema allows them or is a part of another one; `oneOf` is `anyOf`.

    Raises RecursionError for a schema that is too deep.
    """
    held, _ = relaxed(schema)
    closed = _closed(held, {*_parts(held)}, "#")
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
                yield from _parts(each, key == "allOf" or (key in MERGED and "properties" in schema))


def _closed(schema: Any, open_places: set[str], place: str, is_part: bool = False, is_map: bool = False) -> Any:
    """The schema with `additionalProperties: false` where it applies. `place`: its path in the whole schema."""
    if isinstance(schema, list):
        return [_closed(each, open_places, f"{place}/{at}", is_part) for at, each in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: each
        if key in VALUES and not is_map
        else _closed(
            each,
            open_places,
            f"{place}/{key}",
            not is_map and (key == "allOf" or (key in MERGED and "properties" in schema)),
            not is_map and key in MAPS,
        )
        for key, each in schema.items()
    }
    is_open = is_map or is_part or place in open_places or not {*MERGED}.isdisjoint(schema)
    if "properties" in schema and "additionalProperties" not in schema and not is_open:
        found["additionalProperties"] = False
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"it has no {name}")
