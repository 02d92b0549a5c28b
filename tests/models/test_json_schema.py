"""JSON schemas as grammars: texts hold them, to the letter; what a grammar cannot hold to is refused."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.models.text.grammar import check_grammar
from pipeinfer.models.text.json_schema import mismatch, read_schema, relaxations, relaxed, schema_grammar
from pipeinfer.models.text.tokenizer import Tokenizer
from tests.models.test_grammar import grammar_of, tokenizer, written

__all__ = ["tokenizer"]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("5", "is an object"),
        ("{", "not JSON"),
        ('{"type": "x"}', "Invalid type: x"),
        ('{"$ref": "#/no"}', "'/no' does not"),
        ('{"$ref": "https://example.org/x"}', "is not fetched"),
        ("[" * 100_000, "not JSON"),
        ('{"type": "integer", "const": "a"}', "Unsatisfiable"),
        ('{"type": "string", "pattern": "["}', "unclosed"),
        ('{"type": "integer", "minimum": 3, "exclusiveMaximum": 3}', "minimum .3. is equal"),
        ('{"type": "integer", "multipleOf": 999983}', "takes too"),
        ('{"items":' * 150 + "{}" + "}" * 150, "takes too"),
    ],
    ids=lambda text: text[:40],
)
def test_what_cannot_be_held_to_is_said(tokenizer: Tokenizer, schema: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        check_grammar(tokenizer, schema_grammar(read_schema(schema)))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert "%json" not in str(caught.value) and "llguidance" not in str(caught.value)


def least_s(n_runs: int, work: Callable[[], object]) -> float:
    """Seconds of a core; what a host takes away may count as this process's."""
    took_s = []
    for _ in range(n_runs):
        begin_s = time.process_time()
        work()
        took_s.append(time.process_time() - begin_s)
    return min(took_s)


def test_a_large_schema_is_quickly_looked_at(tokenizer: Tokenizer) -> None:
    """Six objects of 800 optional properties; and one that is far too large."""
    parts = {f"o{k}": {"type": "object", "properties": {f"p{i}": {} for i in range(800)}} for k in range(6)}
    schema = schema_grammar(asked := {"type": "object", "properties": parts})
    assert len(schema) > 57_000 and least_s(5, lambda: schema_grammar(asked)) < 0.1
    check_grammar(tokenizer, schema)
    with pytest.raises(UserError, match="bytes is too long; 131072 are possible"):
        check_grammar(
            tokenizer,
            schema_grammar({"properties": {f"{at}{key}": each for at in range(19) for key, each in parts.items()}}),
        )


OLD = "http://json-schema.org/draft-07/schema#"
DRAFTS: list[dict[str, Any]] = [{}, {"$schema": OLD}, {"$schema": "https://json-schema.org/draft/2020-12/schema"}]
TUPLE = {"properties": {"p": {"items": [{"type": "integer"}, {"$ref": "#/properties/p/items/0"}]}}, "required": ["p"]}
"""As converters of TypeScript's types write two parts of one kind."""

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
    output = written(grammar_of(tokenizer, schema_grammar(schema)), SamplingParams(seed=seed, temp=1.0), 600)
    text = b"".join(map(tokenizer.decode_piece, output)).decode()
    assert tokenizer.is_end(output[-1]) and holds(schema, json.loads(text)), (schema, text)


NODE = {
    "type": "object",
    "required": ["v", "next"],
    "properties": {
        "v": {"type": "integer", "minimum": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a~1b"}]},
    },
}


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        (
            {"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
            ['{"a":null}', "{}", '{"a":null,"b":1}'],
            ['{"a":null"b":1}', '{"a":null,"a":1}', '{"b":""}'],
        ),
        ({"$defs": {"string": {"type": "integer"}}, "$ref": "#/$defs/string"}, ["5"], ['"x"']),
        (
            {
                "$defs": {"b": {"const": 1}},
                "properties": {"b": {"const": "x"}, "c": {"$ref": "#/$defs/b"}},
                "required": ["b", "c"],
            },
            ['{"b":"x","c":1}'],
            ['{"b":"x","c":"x"}', '{"b":1,"c":1}'],
        ),
        (
            {"$defs": {"a/b": NODE}, "$ref": "#/$defs/a~1b"},
            ['{"v":3,"next":null}', '{"v":31,"next":{"v":4,"next":null}}'],
            ['{"v":2,"next":null}', '{"v":3,"next":{}}'],
        ),
        (
            {
                "$defs": {"e": {"enum": ["x", "y"]}},
                "properties": {"e": {"allOf": [{"$ref": "#/$defs/e"}]}},
                "required": ["e"],
            },
            ['{"e":"y"}'],
            ['{"e":{}}', "{}"],
        ),
        ({"type": "string", "pattern": "^(a|b[0-9])$"}, ['"a"', '"b7"'], ['"a', '"b"']),
        ({"type": "string", "pattern": '^[^a]"|c$'}, [r'"b\""', '"xc"'], ['"bb"', r'"a\""']),
        ({"type": "number", "minimum": 0.5, "multipleOf": 0.5}, ["0.5", "12"], ["0.4", "-1"]),
        (
            {
                "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"c": {"const": 2}}, "required": ["c"]}],
                "$defs": {"a": {"properties": {"b": {"const": 1}}}},
            },
            ['{"b":1,"c":2}', '{"c":2}'],
            ['{"b":1}'],
        ),
        (
            {"properties": {"properties": {"properties": {"const": {}}}}},
            ['{"properties":{"const":[1]}}'],
            ['{"a":1}', '{"properties":{"a":1}}'],
        ),
        (
            {"properties": {"a": {"const": 1}}, "required": ["b", "a"]},
            ['{"a":1,"b":[2]}', '{"a":1,"b":null}'],
            ['{"a":1}', '{"a":1,"c":2}'],
        ),
        ({"properties": {"a": {}}, "additionalProperties": True}, ['{"a":1,"b":2}'], ['{"a"}']),
        ({"type": "array", "items": {"type": "integer"}}, ["[ 1, 2]", "[\n 1]"], ["[  1]", "[\n\n\n1]"]),
        # without a type, which keywords mean
        ({"items": {"type": "string"}, "minItems": 1}, ['["a"]'], ["2", '"a"', "[]"]),
        ({"items": [{"type": "integer"}, {"const": "a"}]}, ['[1,"a"]'], ["[1]", '["a",1]', '[1,"a",2]', "1"]),
        *(({**draft, **TUPLE}, ['{"p":[1,1]}'], ['{"p":[1]}', '{"p":["a",1]}', '{"p":[1,1,1]}']) for draft in DRAFTS),
        ({"items": [{"const": 1}], "additionalItems": {"const": 2}, "$schema": OLD}, ["[1,2,2]"], ["[2]", "[1,1]"]),
        ({"$ref": "#/$defs/a", "additionalProperties": False, "$defs": {"a": {"const": 1}}}, ["1"], ["{}"]),
        ({"properties": {"a": {"const": 1}}, "anyOf": [{"required": ["a"]}, {}]}, ['{"a":1}'], ["1", '{"a":2}']),
        ({"prefixItems": [{"type": "integer"}], "items": False}, ["[1]"], ["1", '["a"]', "[1,2]"]),
        ({"additionalProperties": {"type": "integer"}}, ['{"a":1}', "{}"], ["1", '{"a":"b"}']),
        ({"patternProperties": {"^a": {"const": 1}}}, ['{"ab":1}'], ["1", '{"ab":2}']),
        (
            {"properties": {"p": {"properties": {"n": {"const": 1}}, "required": ["n"]}}, "required": ["p"]},
            ['{"p":{"n":1}}'],
            ['"p"', '{"p":"x"}', '{"p":{}}'],
        ),
        ({"allOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}]}, ['{"a":1}'], ["1", '"x"', "{}"]),
        ({"anyOf": [{"items": {"const": 1}}, {"type": "null"}]}, ["[1]", "null"], ["1", '"x"']),
        ({"const": 1, "properties": {}}, ["1"], ["{}"]),
        ({"minItems": 1, "required": ["a"]}, ["1", '"x"'], []),
    ],
)
def test_what_is_held_to(tokenizer: Tokenizer, schema: dict[str, Any], texts: list[str], others: list[str]) -> None:
    grammar = grammar_of(tokenizer, schema_grammar(schema))
    end = next(token for token in range(9) if tokenizer.is_end(token))

    def may_be(text: str) -> bool:
        tokens = tokenizer.encode(text, False)
        return all(grammar.after(tokens[:at]).has(token) for at, token in enumerate([*tokens, end]))

    assert all(map(may_be, texts)) and not any(map(may_be, others))


RELAXED = [
    ('{"items": {"uniqueItems": true}}', "uniqueItems", "[[1, 1]]", "[[1]]"),
    ('{"if": {"type": "object"}, "then": {"required": ["a"]}}', "if", "{}", "[]"),
    ('{"$ref": "#/$defs/a", "$defs": {"a": {"not": {"type": "null"}}}}', "not", "null", "1"),
    ('{"type": "string", "pattern": "^(?=a)"}', "a pattern that looks around", '"b"', '"a"'),
    ('{"patternProperties": {"^(?!x)": {"type": "null"}}}', "a pattern that looks around", '{"a": 1}', '{"a": null}'),
    ('{"propertyNames": {"maxLength": 1}}', "propertyNames", '{"ab": 1}', '{"a": 1}'),
    ('{"dependentRequired": {"a": ["b"]}}', "dependentRequired", '{"a": 1}', '{"a": 1, "b": 1}'),
    ('{"contains": {"type": "null"}}', "contains", "[1]", "[null]"),
]


@pytest.mark.parametrize(("text", "keyword", "wrong", "right"), RELAXED, ids=lambda text: text[:40])
def test_what_no_grammar_holds_a_text_to_is_left_out_and_checked(
    tokenizer: Tokenizer, text: str, keyword: str, wrong: str, right: str
) -> None:
    schema = read_schema(text)
    check_grammar(tokenizer, schema_grammar(schema))
    assert f"no grammar holds a text to {keyword}" in relaxations(schema)
    assert mismatch(schema, wrong) and not mismatch(schema, right)


def test_annotations_and_names_of_properties_are_no_keywords(tokenizer: Tokenizer) -> None:
    names = {name: {"type": "string"} for name in ("not", "if", "format", "uniqueItems")}
    schema = {
        "type": "object",
        "properties": names,
        "$comment": "x",
        "title": "y",
        "deprecated": True,
        "examples": [{"not": 1}],
        "description": "z",
    }
    assert relaxed(schema) == (schema, ())
    for extra in (
        {"type": "string", "format": "new"},
        {"type": "integer", "format": "int64"},
        {"uniqueItems": False},
        {"unevaluatedProperties": True},
        {"propertyNames": {"type": "string"}},
        {"unevaluatedItems": {}, "title": "y"},
        {"type": ["string", "null"], "format": "binary"},
        {"format": "binary"},
    ):
        check_grammar(tokenizer, schema_grammar(extra))
        assert not relaxations(extra)
    check_grammar(tokenizer, schema_grammar({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}))


def test_a_schema_reads_no_file_and_asks_no_server(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"enum": ["TOP SECRET"]}')
    for place in ({"propertyNames": {"$ref": secret.as_uri()}}, {"not": {"$ref": "http://127.0.0.1:9/x"}}):
        assert relaxations(place) and mismatch(place, '{"x": 1}') == ""
    local = {"propertyNames": {"$ref": "#/$defs/short"}, "$defs": {"short": {"maxLength": 1}}}
    assert mismatch(local, '{"ab": 1}') and not mismatch(local, '{"a": 1}')


def test_many_patterns_take_time_by_their_number_alone() -> None:
    patterns = {f"^(?!x{at})": {"type": "null"} for at in range(40_000)}
    assert relaxations(asked := {"patternProperties": patterns})
    assert least_s(3, lambda: relaxations(asked)) < 1


def test_what_cannot_be_compared_is_no_mismatch() -> None:
    assert mismatch({"pattern": "(a+)+$"}, json.dumps("a" * 40 + "b")) == ""
    assert mismatch({"$ref": "https://example.org/x"}, "1") == ""
    assert mismatch({}, "{") == "it is not JSON"
