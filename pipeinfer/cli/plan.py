"""`pipeinfer plan` and `doctor`: their options and sections of options. The reports are in `job.inspect`."""

from typing import Any

import click

from pipeinfer.cli.options.job_options import SpecTypes, job_options
from pipeinfer.cli.options.llama_cpp import option_words
from pipeinfer.cli.options.setting_options import command, take
from pipeinfer.core.policy import Policy
from pipeinfer.core.settings import settings_of
from pipeinfer.errors import UserError
from pipeinfer.job.inspect.doctor import DoctorRequest, doctor
from pipeinfer.job.inspect.plan import PlanQuestion, plan
from pipeinfer.job.options import sections as jobs
from pipeinfer.job.options.limits import MAX_SEQUENCES
from pipeinfer.job.options.text_sections import ContextOptions, OutputOptions
from pipeinfer.job.options.values import Whole

_MODELS = (jobs.Models, jobs.Adapters, jobs.Loading, ContextOptions)
_SPECULATION = (jobs.PolicyName, jobs.Guesses, SpecTypes, Policy, jobs.Ablations)
SECTIONS = (PlanQuestion, *_MODELS, jobs.PlacementOptions, jobs.Numerics, *_SPECULATION, OutputOptions)
WITHOUT = ("plan", "ignore_eos", "samplers", "send_layers", "gpu_aware", "couple", "cancel", "verbose")
PARALLEL_HELP = "Requests that are open at a time, as `serve`, `batch` and `bench` have them."


@command("plan", *SECTIONS, has_variables=True, without=WITHOUT)
@click.option("--parallel", type=Whole(1, MAX_SEQUENCES), default=1, show_default=True, help=PARALLEL_HELP)
def plan_command(**values: Any) -> int:
    """Tell who would get what, before anything loads: layers, memory, whether it fits, how fast it would be, what would
    help.

    For hosts that --hosts or --profile describes, without MPI; else for the hosts of its own ranks, under mpirun, each
    of which says what it has and is timed for a moment. The options are those of `run`. Exit code 2 where it does not
    fit, with what is missing and the nearest ways out.

    --hosts: a host a line, as MPI has it (node1:2, or node1 slots=2), and of what is known of it: cores=36;
    memory=370G, what models may take of it; gb_per_s and gflop_per_s, what inference reaches of its memory's bandwidth
    and of its arithmetic, all its ranks together; gpu=NAME, gpu_memory, gpu_gb_per_s, gpu_gflop_per_s, the same of its
    GPUs. No memory: without end; no speed: none is predicted.
    """
    question = take(PlanQuestion, values)
    if question.hosts and question.profile:
        raise UserError("--hosts and --profile both say where to run; give one of them")
    if question.n_ranks and not (question.hosts or question.profile):
        raise UserError("-np counts ranks of --hosts or --profile; else start as many with mpirun -np")
    return plan(job_options(values | {"n_expected": values["parallel"]}), question)


DOCTOR_SECTIONS = (DoctorRequest, jobs.Models, jobs.Loading, ContextOptions, jobs.PlacementOptions, jobs.Numerics)
DOCTOR_WITHOUT = ("predict", "ignore_eos", "plan", "samplers", "gpu_aware", "rank_timeout_s", "allow_other_numerics")


@command("doctor", *DOCTOR_SECTIONS, has_variables=True, without=DOCTOR_WITHOUT)
@click.option("--json", is_flag=True, help="Print one JSON object instead of lines.")
def doctor_command(**values: Any) -> int:
    """Check a cluster before the first job, and tell what mends it.

    All hosts at once, each as the launcher goes there: names, ssh, the program and its libraries, the machine, the
    network between every two hosts, an MPI job round all of them, the models. One line for each check and host, then
    the plan that `run` would make and a command to paste. Starts no model. Exit codes: 0, 1 with warnings, 2 with
    errors.
    """
    host_options = {name for name, _, _ in settings_of(DoctorRequest)} | {"json", "hf_token"}
    words = option_words(click.get_current_context(), host_options)
    request = take(DoctorRequest, values)
    return doctor(job_options(values | {"policy": None, "lookup": None}), request, words)
