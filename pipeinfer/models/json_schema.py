"""JSON schemas as grammars: llama.cpp's own conversion, in its Python form. Checks no grammar."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.models.llama.ggml import load_library


def schema_grammar(schema: Any) -> str:
    """A grammar (GBNF) for the JSON values that a schema describes; {}: any object. An upper bound above
    2000 is none, as in llama.cpp.

    Raises UserError for a schema that cannot be converted.
    """
    if not isinstance(schema, dict):
        raise UserError('a JSON schema is an object, such as {"type": "object"}')
    try:
        return _converted(json.dumps(schema or {"type": "object"}))
    except RecursionError:
        raise UserError("the JSON schema is too deep; name parts of it in $defs") from None
    except Exception as error:  # the conversion has no errors of its own: it asserts, looks up, and the like
        said = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(f"the JSON schema cannot be made a grammar: {said}") from None


def read_schema(text: str) -> Any:
    """Raises UserError for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the JSON schema is no JSON: {error}") from None


@lru_cache(maxsize=64)
def _converted(schema: str) -> str:
    return str(_converter().json_schema_to_gbnf(schema))


@cache
def _converter() -> ModuleType:
    """By its file: the package around it takes long to import. Repetitions are written as in llama.cpp itself: spelled
    out, as this conversion does, a schema's `maxItems` would say how much memory it takes."""
    path = Path(str(load_library().__file__)).with_name("llama_grammar.py")
    spec = spec_from_file_location("pipeinfer_llama_grammar", path)
    assert spec and spec.loader, path
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module._build_repetition = _repetition  # type: ignore[attr-defined]
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
