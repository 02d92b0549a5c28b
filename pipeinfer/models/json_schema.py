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
    """A grammar (GBNF) for the JSON values that a schema describes; {}: any object.

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
    """By its file: the package around it takes long to import."""
    path = Path(str(load_library().__file__)).with_name("llama_grammar.py")
    spec = spec_from_file_location("pipeinfer_llama_grammar", path)
    assert spec and spec.loader, path
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
