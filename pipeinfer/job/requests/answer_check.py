"""Whether an answer fits the schemas that no grammar could hold it to as a whole. Knows no HTTP."""

from collections.abc import Iterable, Mapping
from typing import Any

from pipeinfer.job.requests.request_body import Body
from pipeinfer.models.text.answers import Part
from pipeinfer.models.text.relaxed_schema import as_schema, mismatch, relaxations
from pipeinfer.models.text.tools import AUTO

CONTENT = ""
"""The schema of the content, beside those of functions by their names."""


def schemas_to_check(body: Body) -> dict[str, Any]:
    """Those of which something is left out of the grammar."""
    found = {CONTENT: as_schema(body.sampling.grammar)}
    if body.tools and body.tools.choice != AUTO:
        found |= body.tools.schemas
    return {name: schema for name, schema in found.items() if schema is not None and relaxations(schema)}


class AnswerCheck:
    """Collects an answer's parts."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        self._texts: list[tuple[str, str]] = []  # name of a schema, what is to fit it

    def push(self, parts: Iterable[Part]) -> None:
        for kind, text in parts:
            if kind == "call":
                self._texts.append((text, ""))
            elif kind in ("arguments", "content"):
                name = self._texts[-1][0] if kind == "arguments" else CONTENT
                if not self._texts or self._texts[-1][0] != name:
                    self._texts.append((name, ""))
                self._texts[-1] = name, self._texts[-1][1] + text

    def mismatches(self) -> list[str]:
        """What is wrong, a line each. Takes up to a second for each text."""
        found = []
        for name, text in self._texts:
            if name in self._schemas and (wrong := mismatch(self._schemas[name], text)):
                what = f"the arguments of {name} do" if name else "the answer does"
                found.append(f"{what} not fit the schema: {wrong}")
        return found
