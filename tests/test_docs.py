"""Documents: the commands that they show can be given, their links lead somewhere, and what is generated is fresh."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import click
import pytest

from docs.generate import FOLDER, PAGES, generated
from pipeinfer.cli.commands import COMMANDS, cli
from pipeinfer.models.gguf.architectures import ARCHITECTURES
from pipeinfer.policies import POLICIES

ROOT = Path(__file__).parent.parent

SHOWN = re.compile(rf"(?:^|\s|/|\))(?:pipeinfer\)?) ({'|'.join(COMMANDS)})\b(.*)")


def shown(path: Path) -> list[tuple[str, str]]:
    """(command, its words) of each indented line, without what follows #, a pipe or a file in place of one."""
    found = []
    for line in path.read_text().splitlines():
        match = SHOWN.search(line) if line.startswith("    ") else None
        if match and "--help" not in line:
            found.append((match[1], re.split(r" #|\s\||\s[<>]\s|`", match[2])[0]))
    return found


DOCUMENTS = [
    *(path.name for path in ROOT.glob("*.md")),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
]

COMMANDS_SHOWN = [
    pytest.param(command, words, id=f"{name} {command} {words}"[:60])
    for name in DOCUMENTS
    for command, words in shown(ROOT / name)
]


@pytest.mark.parametrize(("command", "words"), COMMANDS_SHOWN)
def test_a_command_that_is_shown_can_be_given(command: str, words: str) -> None:
    parsed = shlex.split(words)
    # … stands for a value behind an option, else for further options
    read(cli, command, [word for before, word in pairwise(["", *parsed]) if word != "…" or before.startswith("-")])


def read(group: click.Group, name: str, words: list[str]) -> None:
    with click.Context(group) as parent:
        command = group.get_command(parent, name)
        assert command
        if isinstance(command, click.Group):
            read(command, words[0], words[1:])
        else:
            context = command.make_context(name, words, parent=parent)
            if name == "submit":
                first, *rest = context.params["words"]
                read(group, first, rest)


def test_the_documents_show_commands() -> None:
    assert len(COMMANDS_SHOWN) > 25


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_fresh(name: str) -> None:
    assert (FOLDER / name).read_text() == generated(name), "run python -m docs.generate"


LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files_and_headings(name: str) -> None:
    path = ROOT / name
    for link in LINK.findall(path.read_text()):
        target, _, anchor = link.partition("#")
        if ":" in target:
            continue
        found = path.parent / target if target else path
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    heads = (line.lstrip("#").strip().lower() for line in path.read_text().splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in heads}


NAMED = re.compile(r"docs/[\w/-]+\.md")


def test_documents_that_code_names_exist() -> None:
    files = [
        path
        for folder in ("pipeinfer", "tests", "benchmarks", "experiments", "plots")
        for path in (ROOT / folder).rglob("*.py")
    ]
    for path in [*files, *ROOT.glob("*.py"), *ROOT.glob("*.sh"), ROOT / "Makefile"]:
        assert [name for name in NAMED.findall(path.read_text()) if not (ROOT / name).exists()] == [], path


def test_what_is_counted_and_listed_by_hand_is_complete() -> None:
    n_cut = sum(not each.refused for each in ARCHITECTURES.values())
    assert f"[{n_cut} architectures]" in (ROOT / "README.md").read_text()
    page = (ROOT / "docs/explanation/policies.md").read_text()
    assert [name for name in POLICIES if f"| `{name}` |" not in page] == []


def test_the_changelog_is_a_page_a_release() -> None:
    releases = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert [each.splitlines()[0] for each in releases if len(each.splitlines()) > 66] == []
