"""Files of the pictures that commands draw with matplotlib, which the extra `plot` installs. Knows no picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.outputs import check_writable, whole_file

FORMATS = ("png", "svg", "pdf")


def check_picture(output: Path) -> None:
    """Raises UserError when no picture can be made or written there: before anything is computed for it."""
    if output.suffix.lower().removeprefix(".") not in FORMATS:
        raise UserError(f"--output {output}: pictures are .{', .'.join(FORMATS)}; name one of these")
    pyplot()
    check_writable(output, "--output")


def pyplot() -> Any:
    """matplotlib.pyplot, without a display. Raises UserError where it is not installed."""
    try:
        import matplotlib
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise UserError(f"--output needs matplotlib ({error}): pip install 'pipeinfer[plot]'") from None
    matplotlib.use("Agg")
    return plt


def write_picture(output: Path, figure: Any) -> None:
    """The whole file or none; closes the figure."""
    with whole_file(output, "--output") as file:
        figure.savefig(file, format=output.suffix.lower().removeprefix("."), dpi=150)
    pyplot().close(figure)
