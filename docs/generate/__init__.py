"""The generated parts of docs/reference: `python -m docs.generate` writes them, and a test compares them with the code.

What stands above the mark in a page is written by hand; what follows it is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from docs.generate import architectures, columns, http, llama_cpp, options, profiles

FOLDER = Path(__file__).parent.parent / "reference"
MARK = "<!-- generated: python -m docs.generate -->\n"

PAGES: Mapping[str, Callable[[], str]] = {
    "architectures.md": architectures.table,
    "http.md": http.tables,
    "llama-cpp.md": llama_cpp.table,
    "load-csv.md": columns.load_columns,
    "options.md": options.tables,
    "profiles.md": profiles.table,
    "results-csv.md": columns.result_columns,
}


def generated(name: str) -> str:
    """The text of a page as it has to be. Raises ValueError if the page has no mark."""
    written, mark, _ = (FOLDER / name).read_text().partition(MARK)
    if not mark:
        raise ValueError(f"{name} has no line {MARK.strip()}")
    return f"{written}{MARK}\n{PAGES[name]()}"
