"""`pipeinfer info`: its options. Its report is in `job.inspect.info`."""

from typing import Any

import click

from pipeinfer.cli.options.setting_options import command, take
from pipeinfer.job.inspect.info import InfoQuestion, info
from pipeinfer.job.options.rank_sections import Servers


@command("info", Servers)
@click.option("--json", is_flag=True, help="Print one JSON object instead of lines.")
def info_command(json: bool, **servers: Any) -> int:
    """Tell what this host can do: versions, backends and their devices, memory, cores, MPI, and what is exact where.

    Under mpirun of the host of every rank. MPI is not started otherwise. The first thing to paste into a report of a
    fault.
    """
    return info(InfoQuestion(json, take(Servers, servers)))
