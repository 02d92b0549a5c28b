"""JSON schemas as grammars: llama.cpp's own conversion, in its Python form. Checks no grammar."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

from pipeinfer.errors import UserError
from pipeinfer.models import integer_range
from pipeinfer.models.llama.ggml import load_library
from pipeinfer.models.schema_keywords import honoured

CHARACTER = r'[^"\\\x7F\x00-\x1F]'
"""One that stands for itself in a JSON string; the others are written as escapes."""


def schema_grammar(schema: Any) -> str:
    """A grammar (GBNF) for the JSON values that a schema describes; {}: any object. An upper bound above
    2000 is none, as in llama.cpp.

    Raises UserError for a schema that cannot be converted.
    """
    if not isinstance(schema, dict):
        raise UserError('a JSON schema is an object, such as {"type": "object"}')
    try:
        return _converted(json.dumps(schema or {"type": "object"}))
    except UserError:
        raise
    except RecursionError:
        raise UserError("the JSON schema is too deep; name parts of it in $defs") from None
    except Exception as error:  # the conversion has no errors of its own: it asserts, looks up, and the like
        said = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(f"the JSON schema cannot be made a grammar: {said}") from None


def read_schema(text: str) -> Any:
    """Raises UserError for what is no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the JSON schema is no JSON: {error}") from None


def _refuse(name: str) -> None:
    raise ValueError(f"it has no {name}")


@lru_cache(maxsize=64)
def _converted(text: str) -> str:
    whole = json.loads(text)
    places = _places(whole, "#")
    converter = _library().SchemaConverter(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
    write, ranges = converter.visit, integer_range

    def visit(schema: Any, name: str) -> str:
        """The name of a rule; the conversion calls this for every schema within another, too."""
        read = honoured(schema, places.get(id(schema), name))
        name = name or ("" if schema is whole else "-")
        found = ranges.bounds(read) if read.get("type") == "integer" else None
        if found is None:
            return str(write(read, name))
        return str(converter._add_rule(name or "root", f"({ranges.rule(*found)}) space"))

    names: dict[str, str] = {}

    def refer(reference: str) -> str:
        """The same for what another place defines. The library's own names may be those of other rules."""
        if reference not in names:
            names[reference] = f"ref--{len(names)}"
            names[reference] = visit(_defined(whole, reference), names[reference])
        return names[reference]

    converter.visit, converter._resolve_ref = visit, refer
    converter._format_literal = lambda text: _literal(json.loads(text))
    converter.visit(whole, "")
    return str(converter.format_grammar())


def _defined(whole: Any, reference: str) -> Any:
    """What a `$ref` means (RFC 6901)."""
    found, (where, _, path) = whole, reference.partition("#")
    try:
        for step in path.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            found = found[int(key) if isinstance(found, list) else key]
    except (KeyError, IndexError, ValueError, TypeError):
        found = None
    if where or found is None:
        raise UserError(f"the JSON schema refers to {reference[:80]}, which it does not define; refer to a part of it, "
                        "as in #/$defs/NAME")  # fmt: skip
    return found


def _places(schema: Any, place: str) -> dict[int, str]:
    """Where each part of a schema is, by its identity."""
    parts = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    found = {id(schema): place} if isinstance(schema, dict) else {}
    for key, part in parts:
        found |= _places(part, f"{place}/{key}")
    return found


def _literal(value: Any) -> str:
    """A JSON value as a grammar's text: JSON's own escapes first, then the grammar's."""
    return '"' + "".join(map(_escaped, json.dumps(value, ensure_ascii=False))) + '"'


def _escaped(character: str) -> str:
    code = ord(character)
    if character in '"\\':
        return "\\" + character
    if 0xD800 <= code < 0xE000:  # half of a character: only JSON's escape can say it
        return f"\\\\u{code:04x}"
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\u{code:04x}" if code > 0x7E else character


@cache
def _library() -> ModuleType:
    """By its file: the package around it takes long to import. Repetitions are written as in llama.cpp itself: spelled
    out, as this conversion does, a schema's `maxItems` would say how much memory it takes."""
    path = Path(str(load_library().__file__)).with_name("llama_grammar.py")
    spec = spec_from_file_location("pipeinfer_llama_grammar", path)
    assert spec and spec.loader, path
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module._build_repetition = _repetition  # type: ignore[attr-defined]
    character = module.PRIMITIVE_RULES["char"]
    character.content = character.content.replace(r'[^"\\]', CHARACTER)
    module.DOT = CHARACTER  # type: ignore[attr-defined]
    return module


def _repetition(
    item: str, least: int, most: int | None, separator_rule: str | None = None, item_rule_is_literal: bool = False
) -> str:
    """An item so many times, with separators between; `item_rule_is_literal` changes nothing."""
    if most is not None and most < least:
        raise ValueError(f"at least {least} and at most {most} cannot both be")
    if most == 0:
        return ""
    if separator_rule is None:
        return f"{item}{{{least},{'' if most is None else most}}}"
    further = _repetition(f"({separator_rule} {item})", max(0, least - 1), None if most is None else most - 1)
    return f"{item} {further}" if least else f"({item} {further})?"
