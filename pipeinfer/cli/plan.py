"""`pipeinfer plan`: its options, and the sections that it takes. What it tells is in `job.plan_report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.given import job_options
from pipeinfer.cli.setting_options import command
from pipeinfer.cli.simulate import MAX_GBIT, MAX_TOKENS
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.job.options.sections import (
    Ablations,
    Guesses,
    HubAccess,
    Loading,
    Models,
    Numerics,
    Output,
    Placement,
    PolicyName,
)
from pipeinfer.job.options.text_sections import Context, Length
from pipeinfer.job.options.values import PROBABILITY, File, Number, Text, Whole


@command(
    "plan", Models, HubAccess, Loading, Length, Context, Placement, Numerics, PolicyName, Guesses, Policy, Ablations,
    Output, without=("ignore_eos", "samplers", "send_layers", "gpu_aware", "couple", "cancel", "verbose"),
    has_variables=True,
)  # fmt: skip
@click.option(
    "--hosts",
    type=File(),
    help="Plan for these hosts: an MPI hosts file, where a line may also say what a host has, see above; as in "
    "node1 slots=1 cores=36 memory=370G gb_per_s=154 gflop_per_s=1325.",
)
@click.option("--profile", type=Text(), help="Plan for a profile's machines (see `simulate --list`), a rank on each.")
@click.option("-np", "--ranks", type=Whole(0), default=0, help="Ranks of --hosts or --profile. [default: all]")
@click.option("--gbit", type=Number(0, MAX_GBIT, above=True), help="Bandwidth of the links. [default: 10, or known]")
@click.option(
    "-p",
    "--prompt-tokens",
    type=Whole(1, MAX_TOKENS),
    help="Of the longest prompt. [default: 128, or half of the context where that is less]",
)
@click.option(
    "--acceptance",
    "acceptances",
    type=PROBABILITY,
    multiple=True,
    help="How often the draft's best guess is right; of several drafts, once for each, the smallest first. [default: "
    "0.7; `models check` measures it]",
)
def plan_command(
    hosts: Path | None, profile: str | None, ranks: int, gbit: float | None, prompt_tokens: int | None,
    acceptances: tuple[float, ...], **others: Any,
) -> int:  # fmt: skip
    """Tell who would get what, before anything loads: layers, memory, whether it fits, how fast it would be, what would
    help.

    For hosts that --hosts or --profile describes, without MPI; else for the hosts of its own ranks, under mpirun, each
    of which says what it has and is timed for a moment. The options are those of `run`. Exit code 2 where it does not
    fit, with what is missing and the nearest ways out.

    --hosts: a host a line, as MPI has it (node1:2, or node1 slots=2), and of what is known of it: cores=36;
    memory=370G, what models may take of it; gb_per_s and gflop_per_s, what inference reaches of its memory's bandwidth
    and of its arithmetic, all its ranks together; gpu=NAME. No memory: without end; no speed: none is predicted.
    """
    if hosts and profile:
        raise UserError("--hosts and --profile both say where to run; give one of them")
    if ranks and not (hosts or profile):
        raise UserError("-np counts ranks of --hosts or --profile; else start as many with mpirun -np")
    options = job_options(others)
    from pipeinfer.job.inspect.plan import PlanQuestion, plan

    return plan(options, PlanQuestion(hosts, profile, ranks, gbit, prompt_tokens, acceptances))
