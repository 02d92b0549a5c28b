"""JSON schemas as grammars: texts hold them, to the letter; what a grammar cannot hold to is refused."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.models import integer_range
from pipeinfer.models.grammar import Grammar
from pipeinfer.models.json_schema import read_schema, schema_grammar
from pipeinfer.models.tokenizer import Tokenizer
from tests.test_grammar import tokenizer, written

__all__ = ["tokenizer"]


@pytest.mark.parametrize(
    ("schema", "said"),
    [("5", "is an object"), ("{", "no JSON"), ('{"type": "x"}', "Unrecognized"),
     ('{"$ref": "#/no"}', "refers to #/no, which it does"),
     ('{"$ref": "https://example.org/x"}', "which it does not define"),
     ("[" * 100_000, "no JSON")],
)  # fmt: skip
def test_what_is_no_schema_is_said(schema: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        schema_grammar(read_schema(schema))


@pytest.mark.parametrize(
    ("schema", "said"),
    [({"type": "number", "minimum": 0}, "minimum at #,"),
     ({"properties": {"a": {"type": "array", "items": {}, "uniqueItems": True}}}, "uniqueItems at #/properties/a,"),
     ({"type": "object", "minProperties": 1}, "minProperties"),
     ({"type": "object", "patternProperties": {}}, "patternP"),
     ({"type": "string", "format": "email"}, 'format "email"'), ({"type": "integer", "multipleOf": 3}, "multipleOf"),
     ({"type": "object", "required": ["a"]}, "required"), ({"type": "string", "pattern": '^"$'}, "pattern"),
     ({"if": {}, "type": "object"}, "if at #"),
     ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, "not at #/.defs/a,"),
     ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "allOf"), ({"type": "integer", "const": "a"}, "no value"),
     ({"type": "integer", "minimum": 3, "exclusiveMaximum": 3}, "no integer")],
)  # fmt: skip
def test_what_a_grammar_cannot_hold_to_is_refused_with_its_place(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        schema_grammar(schema)


def test_annotations_change_no_grammar() -> None:
    bare = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    notes = {"title": "x", "description": "y", "default": {}, "examples": [], "$id": "z", "deprecated": True}
    said = {**bare, **notes, "properties": {"a": {"type": "integer", "readOnly": False, "title": "A", "minLength": 2}}}
    assert schema_grammar(said) == schema_grammar(bare) and schema_grammar(notes) == schema_grammar({})


def test_the_integers_of_a_range_are_those_between_its_bounds() -> None:
    rng = random.Random(2)
    for _ in range(100):
        low = rng.randint(-300, 1500)
        high = low + rng.choice([0, 1, 9, 90, 1000])
        pattern = re.compile(integer_range.rule(low, high).replace('"', "").replace(" ", ""))
        assert [n for n in range(low - 1100, high + 1100) if pattern.fullmatch(str(n))] == [*range(low, high + 1)]


STRINGS = 'ab"\\\n\t\r\x1b\0\x7fé漢😀/[]{}'


def some_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    word = lambda: "".join(rng.choices(STRINGS, k=rng.randint(1, 4)))  # noqa: E731
    kind = rng.choice(["const", "enum", "string", "integer", "boolean", *["object", "array"] * depth])
    if kind == "const":
        return {"const": word()}
    if kind == "enum":
        return {"type": ["string", "null"], "enum": [word(), word(), None]}
    if kind == "integer":
        low = rng.randint(-400, 400)
        return {"type": kind, "minimum": low, "exclusiveMaximum": low + rng.choice([1, 5, 700])}
    if kind == "array":
        return {"type": kind, "items": some_schema(rng, depth - 1), "maxItems": 2}
    if kind == "object":
        parts = {word(): some_schema(rng, depth - 1) for _ in range(2)}
        return {"type": kind, "properties": parts, "required": [*parts][:1]}
    return {"type": kind, "maxLength": 5} if kind == "string" else {"type": kind}


def holds(schema: dict[str, Any], value: Any) -> bool:
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kind = schema["type"]
    if kind == "array":
        return isinstance(value, list) and len(value) <= 2 and all(holds(schema["items"], each) for each in value)
    if kind == "object":
        parts = schema["properties"]
        return {*schema["required"]} <= value.keys() <= parts.keys() and all(
            holds(parts[key], each) for key, each in value.items()
        )
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value < schema["exclusiveMaximum"]
    return isinstance(value, str) and len(value) <= 5 if kind == "string" else isinstance(value, bool)


@pytest.mark.parametrize("seed", range(24))
def test_a_text_by_a_schema_is_json_that_holds_it(tokenizer: Tokenizer, seed: int) -> None:
    schema = some_schema(random.Random(seed))
    output = written(Grammar(tokenizer, schema_grammar(schema)), SamplingParams(seed=seed, temp=1.0), 600)
    text = b"".join(map(tokenizer.decode_piece, output)).decode()
    assert tokenizer.is_end(output[-1]) and holds(schema, json.loads(text)), (schema, text)


NODE = {"type": "object", "required": ["v", "next"],
        "properties": {"v": {"type": "integer", "minimum": 3},
                       "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a~1b"}]}}}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        ({"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
         ['{"a":null}', "{}"], ['{"a":null"b":1}', '{"a":null,"a":1}']),
        ({"$defs": {"string": {"type": "integer"}}, "$ref": "#/$defs/string"}, ["5"], ['"x"']),
        ({"$defs": {"b": {"const": 1}}, "properties": {"b": {"const": "x"}, "c": {"$ref": "#/$defs/b"}},
          "required": ["b", "c"]}, ['{"b":"x","c":1}'], ['{"b":"x","c":"x"}', '{"b":1,"c":1}']),
        ({"$defs": {"a/b": NODE}, "$ref": "#/$defs/a~1b"},
         ['{"v":3,"next":null}', '{"v":31,"next":{"v":4,"next":null}}'], ['{"v":2,"next":null}', '{"v":3,"next":{}}']),
        ({"$defs": {"e": {"enum": ["x", "y"]}}, "properties": {"e": {"allOf": [{"$ref": "#/$defs/e"}]}},
          "required": ["e"]}, ['{"e":"y"}'], ['{"e":{}}', "{}"]),
        ({"type": "string", "pattern": "^(a|b[0-9])$"}, ['"a"', '"b7"'], ['"a', '"b"']),
    ],
)  # fmt: skip
def test_what_is_held_to(tokenizer: Tokenizer, schema: dict[str, Any], texts: list[str], others: list[str]) -> None:
    grammar = Grammar(tokenizer, schema_grammar(schema))
    end = next(token for token in range(9) if tokenizer.is_end(token))

    def may_be(text: str) -> bool:
        tokens = tokenizer.encode(text, False)
        return all(grammar.after(tokens[:at]).has(token) for at, token in enumerate([*tokens, end]))

    assert all(map(may_be, texts)) and not any(map(may_be, others))


@pytest.mark.parametrize("pattern", ["^a|b$", r"^\d+$", "^[^a]$", r'^"$'])
def test_patterns_that_the_conversion_would_get_wrong_are_refused(pattern: str) -> None:
    with pytest.raises(UserError, match="pattern at #/properties/a"):
        schema_grammar({"properties": {"a": {"type": "string", "pattern": pattern}}})


def test_parts_that_are_not_objects_cannot_be_joined() -> None:
    with pytest.raises(UserError, match="allOf"):
        schema_grammar(
            {"$defs": {"a": {"type": "integer"}}, "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {}}}]}
        )
