"""Marks the tests that start processes, by what they use, as `ranks`: where one fails beside another, it is run again
alone (Makefile). Commands take the shipped pair."""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path

import pytest

from pipeinfer.models.demo import SHIPPED_PAIR

ROOT = Path(__file__).parent.parent
os.environ[SHIPPED_PAIR] = "1"  # whatever is installed beside
os.environ["GOMP_SPINCOUNT"] = "0"  # of jobs too: threads that wait for each other leave the cores to tests beside
STARTERS = {"subprocess", "multiprocessing", "pty"}


@cache
def starting(path: Path) -> frozenset[str]:
    """Names of a module of tests, functions and fixtures among them, whose use starts a process."""
    found, uses = set[str](), dict[str, set[str]]()
    for top in _tree(path).body:
        used = uses.setdefault(top.name, set()) if isinstance(top, ast.FunctionDef | ast.ClassDef) else set()
        for node in ast.walk(top):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names} & STARTERS
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests."):
                room = ROOT.joinpath(*node.module.split("."))
                theirs = (
                    starting(room.with_suffix(".py"))
                    if not room.is_dir()
                    else {alias.name for alias in node.names if starting(room / f"{alias.name}.py")}
                )
                found |= {alias.asname or alias.name for alias in node.names if alias.name in theirs}
            elif name := _name(node):
                used.add(name)
    while more := {name for name, used in uses.items() if used & found} - found:
        found |= more
    return frozenset(found)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _name(node: ast.AST) -> str | None:
    """What a node refers to; fixtures are arguments, or named by a string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def has_tests(path: Path, of_ranks: bool) -> bool:
    """Whether a module may have tests that start processes, or that start none."""
    if "mark.ranks" in path.read_text():
        return True
    found = starting(path)
    names = (node.name for node in _tree(path).body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return any((name in found) == of_ranks for name in names if name.lower().startswith("test"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules without a test that is asked for are not imported: some take torch, others clients of OpenAI's."""
    asked = str(config.option.markexpr)
    if not collection_path.match("test_*.py") or "ranks" not in asked:
        return None
    return None if has_tests(collection_path, "not ranks" not in asked) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.location[2].split("[")[0].split(".")[0] in starting(Path(item.path)):
            item.add_marker("ranks")
