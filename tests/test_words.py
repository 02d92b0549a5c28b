"""Words: a type name has one meaning in the package, or is in the glossary; and participles name nothing."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pipeinfer"
TREES = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}

PARTICIPLES = frozenset(["found", "asked", "own", "told", "kept", "given", "wanted", "said", "known", "left", "begun"])
"""Words that say what was done with a thing, and not which thing it is."""

LIMITS = {"cli": 1, "core": 1, "job/requests": 1, "models/gguf": 2, "models/llama": 10, "models/torch": 4, "virtual": 1}
"""Room -> names that are participles. A room without an entry has none; a number is lowered when its room has fewer."""


def type_names() -> Counter[str]:
    """How often each class name is defined, protocols apart."""
    classes = (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return Counter(each.name for each in classes if not any("Protocol" in ast.unparse(base) for base in each.bases))


def listed_names() -> list[str]:
    """The first column of the glossary's table of type names with several meanings."""
    _, _, table = (ROOT / "docs" / "glossary.md").read_text().partition("## Type names with several meanings")
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)


def test_a_type_name_has_one_meaning_or_is_in_the_glossary() -> None:
    several = {name for name, count in type_names().items() if count > 1}
    assert listed_names() and several <= {*listed_names()}, "rename one of them, or list both meanings"


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Names of variables, attributes, arguments, functions and classes, where they are bound."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def room_of(path: Path) -> str:
    """The folder below the package; below `job` and `models` the one in it."""
    depth = 2 if path.parts[0] in ("job", "models") else 1
    return "/".join(path.parent.parts[:depth]) or "ground"


def participles() -> Counter[str]:
    counts: Counter[str] = Counter()
    for path, tree in TREES.items():
        counts[room_of(path)] += sum(name.strip("_").lower() in PARTICIPLES for name in bound_names(tree))
    return counts


CHANGES = {"add", "append", "discard", "extend", "insert", "pop", "popleft", "remove", "setdefault", "update", "write"}


def test_assertions_have_no_effect() -> None:
    """PYTHONOPTIMIZE leaves them out."""
    for path, tree in TREES.items():
        for test in (node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)):
            calls = (node.func for node in ast.walk(test) if isinstance(node, ast.Call))
            names = {call.attr for call in calls if isinstance(call, ast.Attribute)}
            binds = any(isinstance(node, ast.NamedExpr) for node in ast.walk(test))
            assert not binds and not CHANGES & names, f"{path}:{test.lineno}"


def test_participles_name_nothing() -> None:
    more = {room: (n, LIMITS.get(room, 0)) for room, n in participles().items() if n > LIMITS.get(room, 0)}
    assert not more, f"(names, limit) of rooms: {more}"


def test_a_participle_is_counted_wherever_it_is_bound() -> None:
    code = """
def told(given, *, kept=0):
    self.said, _found = given, [own for own in kept]

class Left:
    known: int
"""
    assert sum(name.strip("_").lower() in PARTICIPLES for name in bound_names(ast.parse(code))) == 8
