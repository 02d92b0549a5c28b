"""`pipeinfer measure`: time this cluster with these models, and write a profile for `simulate`."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeinfer.cli.command import Command
from pipeinfer.cli.options import RunOptions
from pipeinfer.cli.policy_options import take_policy_options
from pipeinfer.cli.run import run
from pipeinfer.cli.values import File
from pipeinfer.cluster.survey import (
    ModelTimes,
    Overheads,
    disturbed_line,
    overheads,
    profile_toml,
    slowdowns,
    time_model,
    time_over_and_over,
)
from pipeinfer.errors import UserError
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.outputs import check_separate, check_writable, write_file

if TYPE_CHECKING:  # these import MPI
    from pipeinfer.cli.context import Context
    from pipeinfer.cli.job import Crew
    from pipeinfer.cli.setup import Job
    from pipeinfer.cluster.pace import LoadedModel

SHARED = ("model", "drafts", "threads", "n_gpu_layers", "layer_split", "numerics", "slice_cache", "verbose")
ALONE_S, BESIDE_S = 0.5, 1.0  # how long ranks of one host compute alone, beside each other
SLOT_S, TIMING_S = 3.0, 2.0
"""Ranks of one host take turns, for so long each, and time their models a part of it: nobody shall time a model while
another one computes beside it."""

N_TOKENS = 128
PROMPT = "measure"


@click.command("measure", cls=Command)
@click.option("-o", "--output", type=File(), required=True, help="The profile to write, TOML.")
def measure_command(
    output: Path, model: Path | None, drafts: tuple[Path, ...], threads: tuple[int, ...] | None, **others: Any
) -> int:
    """Measure stage, draft and link times of this cluster, under mpirun, and write a profile for `simulate`.

    Rank 0 drafts, larger drafts have the next ranks, the others hold the target's layers.
    """
    if model is None:
        model, drafts = TARGET, drafts or (DRAFT,)
    if not drafts:
        raise UserError("measure needs the draft model too; give -md")
    given = others | {"model": model, "drafts": drafts, "threads": threads or ()}
    options = _options(given)
    from pipeinfer.cli.job import start_job  # initialises MPI

    return start_job(lambda crew: _survey(crew, options, output), options, options.verbose)


def _options(given: dict[str, Any]) -> RunOptions:
    """What `run` would do with these and otherwise its defaults, greedily and without end."""
    defaults = run.make_context("run", [], resilient_parsing=True).params
    defaults.pop("escape")  # how `run` reads a prompt from its words
    fixed = {"prompt": PROMPT, "predict": N_TOKENS, "temp": 0.0, "seed": 0, "ignore_eos": True, "policy": "pipeinfer"}
    values: dict[str, Any] = defaults | fixed | given
    return RunOptions(speculation=take_policy_options(values), **values)


measure_command.params += [copy.copy(option) for option in run.params if option.name in SHARED]


def _survey(crew: Crew, options: RunOptions, output: Path) -> int:
    """Every rank's part; returns the exit code."""
    from pipeinfer.cli.context import complain
    from pipeinfer.cli.setup import inputs_of, prepare

    link, job, error = crew.link, None, ""
    if link.rank == 0:
        try:
            if link.size < 2:
                raise UserError("measure needs 2 ranks or more: a draft and a stage; start it with mpirun")
            check_separate({"--output": output}, inputs_of(options))
            check_writable(output, "--output")
            job, _ = prepare(options, crew.hosts)
        except UserError as caught:
            error = str(caught)
    job, error = link.broadcast((job, error) if link.rank == 0 else None)
    if job is None:
        if link.rank == 0:
            complain(error)
        return 2
    context = crew.context(replace(options, trace=Path()), job)
    context.tracer.on = True
    gbit_per_s = link.bandwidth_gbit()
    times = link.all_gather(_time_own_models(crew, context, job))
    extra = _run_plainly(context, job, times)
    if link.rank == 0:
        assert extra
        _write(output, crew, options, job, times, extra, gbit_per_s)
    return 0


def _time_own_models(crew: Crew, context: Context, job: Job) -> dict[str, ModelTimes]:
    """Load, time and free this rank's models; ranks of one host in turns, the others asleep, then 2, 3, … of them at
    once."""
    from pipeinfer.cli.context import CLOCK
    from pipeinfer.cli.load import load_drafts, load_stage

    stage = load_stage(context, job, lambda fraction: True)
    drafts = load_drafts(context, job, lambda fraction: True)
    start_s = max(crew.link.all_gather(CLOCK() + context.clock_offset_s)) - context.clock_offset_s + 0.2
    names = [host.name for host in crew.hosts]
    n_here, n_most = names.count(names[context.rank]), max(map(names.count, names))
    turn = names[: context.rank].count(names[context.rank])
    _sleep_until(start_s + turn * SLOT_S)
    found = _time_alone(context, job, stage, drafts)
    models = [model for model in (stage, *drafts.values()) if model]
    together_s = start_s + n_most * SLOT_S
    beside_s = next(iter(found.values())).beside_s
    beside_s[1] = time_over_and_over(models[0], CLOCK, CLOCK() + ALONE_S)
    for n_busy in range(2, n_most + 1):
        _sleep_until(together_s + (n_busy - 2) * BESIDE_S)
        if turn < n_busy <= n_here:
            beside_s[n_busy] = time_over_and_over(models[0], CLOCK, together_s + (n_busy - 1) * BESIDE_S)
    for model in models:
        model.close()
    _sleep_until(together_s + (n_most - 1) * BESIDE_S)
    return found


def _time_alone(
    context: Context, job: Job, stage: LoadedModel | None, drafts: dict[int, LoadedModel]
) -> dict[str, ModelTimes]:
    from pipeinfer.cli.context import CLOCK
    from pipeinfer.cli.memory import N_GUESS_ROWS

    found: dict[str, ModelTimes] = {}
    if stage:
        part = job.plan.stages[job.plan.stage_of(context.rank) or 0]
        n_layer = part.last - part.first
        found["stage"] = time_model(stage, n_layer, job.n_rows_max, job.n_cells, CLOCK, TIMING_S, blocks=job.blocks)
    for number, draft in drafts.items():
        n_layer = job.drafts[number].n_layer
        found["draft"] = time_model(draft, n_layer, N_GUESS_ROWS, job.n_cells, CLOCK, TIMING_S)
    return found


def _sleep_until(when_s: float) -> None:
    """On this rank's clock; at once if it is past."""
    time.sleep(max(0.0, when_s - time.monotonic()))


def _run_plainly(context: Context, job: Job, times: list[dict[str, ModelTimes]]) -> Overheads | None:
    """A real job without speculation, then one for the draft's steps, during which all else rests.

    Rank 0 gets what they cost on top of the models' own times.
    """
    from pipeinfer.cli.session import Session
    from pipeinfer.cli.worker import run_stage
    from pipeinfer.policies import Iterative, Speculative

    if context.rank:
        run_stage(context, job)
        return None
    session = Session(context, job, lambda rank, loaded_s: None)
    session.open()
    for _ in range(2):  # the first one warms up
        plain = session.generate(job, context.options, Iterative(), lambda tokens: None)
    context.tracer.spans.clear()
    session.generate(job, context.options, Speculative(), lambda tokens: None)
    session.close()
    steps_s = [
        span.duration_s
        for span in context.tracer.spans
        if span.kind == "draft" and span.args["nodes"] == 1 and span.args["finished"]
    ]
    ranks = [stage.rank for stage in job.plan.stages]
    runs = [plain.figures[rank]["runs"] for rank in ranks]
    own = [times[rank]["stage"] for rank in ranks]
    return overheads(plain.ledger, runs, own, steps_s, times[0].get("draft"))


def _write(
    output: Path, crew: Crew, options: RunOptions, job: Job, times: list[dict[str, ModelTimes]], extra: Overheads,
    gbit_per_s: float,
) -> None:  # fmt: skip
    from pipeinfer.cli.context import complain

    stages = [times[stage.rank]["stage"] for stage in job.plan.stages]
    hosts = ", ".join(dict.fromkeys(host.name for host in crew.hosts))
    title = [
        f"Measured by `pipeinfer measure` on {len(crew.hosts)} ranks: {hosts}.",
        f"Target {options.model.name}, draft {' and '.join(draft.path.name for draft in job.drafts)}.",
    ]
    one_host = len({host.name for host in crew.hosts}) == 1
    slowdown = slowdowns([next(iter(found.values())).beside_s for found in times]) if one_host else []
    drafts = [times[rank]["draft"] for rank in job.plan.drafts]
    text = profile_toml(title, job.n_embd, stages, drafts, extra, gbit_per_s, slowdown, job.blocks)
    write_file(output, "--output", text.encode())
    if line := disturbed_line([*stages, *drafts]):
        complain(line)
    print(output)
