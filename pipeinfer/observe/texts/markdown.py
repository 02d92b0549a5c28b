"""A table in Markdown, its columns as wide as what is in them. Knows texts, not what they say."""

from collections.abc import Collection, Iterable, Sequence


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right_aligned: Collection[str] = ()
) -> list[str]:
    """Its lines. A `|` in a cell, which would end it, becomes a `/`."""
    from tabulate import tabulate  # takes a while, and most commands print no table

    cells = [[cell.replace("|", "/") for cell in row] for row in rows]
    sides = ["right" if column in right_aligned else "left" for column in columns]
    return tabulate(cells, columns, "pipe", disable_numparse=True, colalign=sides if cells else None).splitlines()
