"""The generated parts of docs/reference: `python -m docs.generate` writes them, and a test compares them with the code.

What stands above the mark in a page is written by hand; what follows it is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from docs.generate import commands, tables
from pipeinfer.observe.columns import COLUMNS, LOAD_COLUMNS

FOLDER = Path(__file__).parent.parent / "reference"
MARK = "<!-- generated: python -m docs.generate -->\n"

PAGES: Mapping[str, Callable[[], str]] = {
    "architectures.md": tables.architectures,
    "http.md": tables.http_fields,
    "llama-cpp.md": commands.llama_cpp,
    "load-csv.md": partial(tables.columns, LOAD_COLUMNS),
    "options.md": commands.options,
    "profiles.md": tables.profiles,
    "results-csv.md": partial(tables.columns, COLUMNS),
    "../tutorial/two-machines.md": tables.doctor_checks,
}


def generated(name: str) -> str:
    """The text of a page with its generated part. Raises ValueError if the page has no mark."""
    text, mark, _ = (FOLDER / name).read_text().partition(MARK)
    if not mark:
        raise ValueError(f"{name} has no line {MARK.strip()}")
    return f"{text}{MARK}\n{PAGES[name]()}"
