"""Check a text against a JSON schema, in a process of its own: some patterns take unbounded time. Knows no grammar."""

import json
from collections.abc import Mapping
from typing import Any

from jsonschema.exceptions import best_match  # type: ignore[import-untyped]
from jsonschema.validators import Draft202012Validator, validator_for  # type: ignore[import-untyped]
from referencing import Registry


def answer(asked: Mapping[str, Any]) -> dict[str, str]:
    """`wrong`: what the text fails at, and where; empty if nothing. `error`: it cannot be told."""
    schema = asked["schema"]
    try:
        value = json.loads(asked["text"])
    except (ValueError, RecursionError):
        return {"wrong": "it is not JSON"}
    try:
        # an empty registry: a client's schema shall not read files or ask other servers
        validator = validator_for(schema, Draft202012Validator)(schema, registry=Registry())
        error = best_match(validator.iter_errors(value))
    except Exception as fault:  # whatever a schema can raise
        return {"error": f"{type(fault).__name__}: {fault}"}
    return {"wrong": f"{error.json_path}: {error.message}" if error else ""}
