"""`pipeinfer doctor`: its options, and the sections that it takes. What it does is in `job.doctor`."""

from typing import Any

import click

from pipeinfer.cli.options.job_options import job_options
from pipeinfer.cli.options.setting_options import command, take
from pipeinfer.job.inspect.doctor import DoctorRequest, doctor
from pipeinfer.job.options.sections import Loading, Models, Numerics, PlacementOptions
from pipeinfer.job.options.text_sections import ContextOptions

_SECTIONS = (DoctorRequest, Models, Loading, ContextOptions, PlacementOptions, Numerics)
_WITHOUT = ("predict", "ignore_eos", "plan", "samplers", "gpu_aware", "rank_timeout_s", "allow_other_numerics")


@command("doctor", *_SECTIONS, has_variables=True, without=_WITHOUT)
@click.option("--json", is_flag=True, help="Print one JSON object instead of lines.")
def doctor_command(**values: Any) -> int:
    """Check a cluster before the first job, and tell what mends it.

    All hosts at once, each as the launcher goes there: names, ssh, the program and its libraries, the machine, the
    network between every two hosts, an MPI job round all of them, the models. One line for each check and host, then
    the plan that `run` would make and a command to paste. Starts no model. Exit codes: 0, 1 with warnings, 2 with
    errors.
    """
    request = take(DoctorRequest, values)
    return doctor(job_options(values | {"policy": None, "lookup": None}), request)
