"""Arguments of calls: JSON, or values that a model wrote without quotes. Knows no marks."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

WHITE = " \t\n\r"  # of JSON
SPACE = re.compile(r"\s*")


class PairMarks(NamedTuple):
    """The marks around a name and around its value. The value's first may be empty, and newlines are marks then."""

    name: str
    behind_name: str
    value: str
    behind_value: str

    def read(self, text: str) -> Iterator[tuple[str, str]]:
        """Names and values up to one that has no end: a regular expression would search from each place anew."""
        at = 0
        while (begin := text.find(self.name, at)) >= 0 and (end := text.find(self.behind_name, begin)) >= 0:
            name, at = text[begin + len(self.name) : end].strip(), end + len(self.behind_name)
            if self.value:
                at = SPACE.match(text, at).end()  # type: ignore[union-attr]
            if not text.startswith(self.value, at):
                continue
            at += len(self.value)
            if (end := text.find(self.behind_value, at)) < 0:
                return
            value = text[at:end]
            yield name, value if self.value else value.removeprefix("\n").removesuffix("\n")
            at = end + len(self.behind_value)


def kinds_of(schema: Any, root: Any) -> set[str]:
    """The types of JSON that a schema names, by itself or by its alternatives; none where it names none. `root`: the
    schema that references are within."""
    kinds, seen, schemas = set[str](), set[int](), [schema]
    while schemas:
        each = schemas.pop()
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        named, values = each.get("type"), each.get("enum")
        kinds |= {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
        if named is None and isinstance(values, list) and all(isinstance(value, str) for value in values):
            kinds.add("string")
        for name in ("anyOf", "oneOf", "allOf"):
            schemas += parts if isinstance(parts := each.get(name), list) else []
        if isinstance(reference := each.get("$ref"), str):
            place = root
            for part in reference.removeprefix("#/").split("/"):
                place = place.get(part) if isinstance(place, dict) else None
            schemas.append(place)
    return kinds


def argument_value(text: str, kinds: set[str]) -> Any:
    """The value that a model wrote without quotes. `kinds`: the types that its schema names: a text stays one if no
    other type but null may be meant; true and false also come as Python writes them."""
    word = text.strip().lower()
    if "string" in kinds and not kinds - {"string", "null"}:
        return None if "null" in kinds and word == "null" else text
    if "boolean" in kinds and word in ("true", "false"):
        return word == "true"
    with contextlib.suppress(ValueError):
        return json_value(text)
    return text


def json_value(text: str) -> Any:
    """The value of a whole text. Raises ValueError as `read_value`."""
    value, end = read_value(text, len(text) - len(text.lstrip(WHITE)))
    if text[end:].strip(WHITE):
        raise ValueError("more than a value")
    return value


def read_value(text: str, start: int = 0) -> tuple[Any, int]:
    """A value of JSON, and where it ends. Raises ValueError for what cannot be written again: no number, or nested too
    deeply."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
        json.dumps([[value]], allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value, end


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
