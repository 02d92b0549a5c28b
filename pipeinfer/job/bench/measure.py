"""Time this cluster with these models, and write a profile for `simulate`."""

import socket
from dataclasses import replace
from pathlib import Path

from pipeinfer.cluster.hosts.cores import ranks_there
from pipeinfer.cluster.timing.costs import MANY_ROWS
from pipeinfer.cluster.timing.link_times import bandwidth_gbit
from pipeinfer.core.interfaces import LoadedModel
from pipeinfer.errors import JobError, UserError
from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.launch.start import Crew, start_job
from pipeinfer.job.loading.load import load_own
from pipeinfer.job.loading.worker import run_stage
from pipeinfer.job.options.options import RunOptions, with_plan
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.prepare import inputs_of, prepare
from pipeinfer.job.process.complain import complain
from pipeinfer.job.profiling.hosts import find_hosts
from pipeinfer.job.profiling.timing import overheads, slowdowns, time_model, time_over_and_over
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.session.session import Session
from pipeinfer.observe.metrics import speeds
from pipeinfer.outputs import check_separate, check_writable, write_file
from pipeinfer.policies import Iterative, Speculative
from pipeinfer.virtual.choices import SyntheticChoices
from pipeinfer.virtual.measured import ModelTimes, Overheads, disturbed_line, profile_toml
from pipeinfer.virtual.profile import parse_profile
from pipeinfer.virtual.simulation import simulate

ALONE_S, BESIDE_S = 0.3, 0.8  # how long ranks of one host compute runs of a size alone, beside each other
TIMING_S = 2.0


def measure(options: RunOptions, output: Path, tolerance: float) -> int:
    """`pipeinfer measure`, on every rank; returns the exit code."""
    return start_job(lambda crew: _measure(crew, options, output, tolerance), options, options, options.verbose)


def _measure(crew: Crew, options: RunOptions, output: Path, tolerance: float) -> int:
    link = crew.link
    if link.size < 2:
        raise JobError("measure needs 2 ranks or more: a draft and a stage; start it with mpirun")
    options, hosts = find_hosts(crew, link.agree(lambda: with_plan(options, link.size)))

    request: GenerationRequest | None = None  # on rank 0

    def make_plan() -> JobPlan:
        nonlocal request
        check_separate({"--output": output}, inputs_of(options))
        check_writable(output, "--output")
        plan, (request, _) = prepare(options, hosts, given=False)
        return plan

    plan = link.agree(make_plan)
    context = crew.context(plan, traces=True)
    gbit_per_s = bandwidth_gbit(link)
    models = link.agree_all(lambda: _load_own(context, plan))
    times = link.all_gather(_time_own_models(crew, context, plan, *models))
    extra = _run_plainly(context, plan, request, times)
    if link.rank == 0:
        assert extra and request
        overheads, speed = extra
        text = _profile(crew, plan, times, overheads, gbit_per_s)
        foretold = foretold_speed(text, len(request.prompt), request.n_predict)
        if abs(foretold / speed - 1) > tolerance:
            raise JobError(f"the profile foretells {foretold:.2f} tokens/s without guesses, a job of these ranks made "
                           f"{speed:.2f}: something else computed meanwhile; measure again when the machine is quiet, "
                           f"or accept more than {tolerance:g} with --tolerance")  # fmt: skip
        return _write(output, text)
    return 0


def _load_own(context: Context, plan: JobPlan) -> tuple[LoadedModel | None, dict[int, LoadedModel]]:
    """This rank's part of the target and its drafts. Raises UserError, with the rank's name."""
    try:
        return load_own(context, plan)
    except UserError as error:
        raise UserError(f"rank {context.rank} ({socket.gethostname()}): {error}") from None


def _time_own_models(
    crew: Crew, context: Context, plan: JobPlan, stage: LoadedModel | None, drafts: dict[int, LoadedModel]
) -> dict[str, ModelTimes]:
    """Time and free this rank's models: ranks of one host in turns, then 2, 3, … of them at once. Collective."""
    here = ranks_there(crew.hosts, context.rank)
    n_most, own = max(crew.link.all_gather(len(here))), here.index(context.rank)
    models, found = [model for model in (stage, *drafts.values()) if model], dict[str, ModelTimes]()
    for turn in range(n_most):
        if turn == own:
            found = _time_alone(context, plan, stage, drafts)
            beside_s = next(iter(found.values())).beside_s
            for n_rows in (1, MANY_ROWS):
                beside_s[n_rows] = {1: time_over_and_over(models[0], n_rows, CLOCK, CLOCK() + ALONE_S)}
        crew.link.all_gather(None)  # nobody times a model while another one computes beside it
    for n_busy in range(2, n_most + 1):
        for n_rows, of_rows_s in beside_s.items():
            if own < n_busy <= len(here):
                of_rows_s[n_busy] = time_over_and_over(models[0], n_rows, CLOCK, CLOCK() + BESIDE_S)
            crew.link.all_gather(None)
    for model in models:
        model.close()
    return found


def _time_alone(
    context: Context, plan: JobPlan, stage: LoadedModel | None, drafts: dict[int, LoadedModel]
) -> dict[str, ModelTimes]:
    found: dict[str, ModelTimes] = {}
    if stage:
        part = plan.assignment.stages[plan.assignment.stage_of(context.rank) or 0]
        n_layer = part.last - part.first
        found["stage"] = time_model(
            stage, n_layer, plan.n_rows_max, plan.capacity.n_cells, CLOCK, TIMING_S,
            blocks=plan.numerics.blocks, rewinds=plan.model.rewinds,
        )  # fmt: skip
    for number, draft in drafts.items():
        n_layer = plan.drafts[number].n_layer  # all of them: no draft is cut here
        found["draft"] = time_model(draft, n_layer, plan.capacity.n_guess_rows, plan.capacity.n_cells, CLOCK, TIMING_S)
    return found


def _run_plainly(
    context: Context, plan: JobPlan, request: GenerationRequest | None, times: list[dict[str, ModelTimes]]
) -> tuple[Overheads, float] | None:
    """A job without speculation, the draft's steps, and the job again. Rank 0 gets what they cost beyond the models'
    own times, and the last job's tokens a second, by which nothing is measured."""
    if not request:
        run_stage(context, plan)
        return None
    session = Session(context, plan)
    session.open()
    settings = replace(plan.engine, looks_up=False)
    for _ in range(2):  # the first one warms up
        plain = session.generate(replace(request, policy=Iterative()), lambda tokens: None, settings=settings)
    drafted = session.generate(replace(request, policy=Speculative()), lambda tokens: None, settings=settings)
    again = session.generate(replace(request, policy=Iterative()), lambda tokens: None, settings=settings)
    session.close()
    steps_s = [
        span["duration_s"]
        for span in drafted.figures[0]["spans"]
        if span["kind"] == "draft" and span["args"]["nodes"] == 1 and span["args"]["finished"]
    ]
    ranks = [stage.rank for stage in plan.assignment.stages]
    runs = [plain.figures[rank]["runs"] for rank in ranks]
    own = [times[rank]["stage"] for rank in ranks]
    found = overheads(plain.ledger, runs, own, steps_s, times[0].get("draft"))
    return found, float(speeds(again.metrics)["predicted_per_second"])


def foretold_speed(text: str, n_prompt: int, n_predict: int) -> float:
    """Tokens a second without guesses by a profile."""
    profile = parse_profile("measured", text, "the profile").lay_out()
    choices = SyntheticChoices((0.5,), n_prompt=n_prompt)
    return float(speeds(simulate(profile, choices, Iterative(), n_predict).metrics)["predicted_per_second"])


def _profile(crew: Crew, plan: JobPlan, times: list[dict[str, ModelTimes]], extra: Overheads, gbit_per_s: float) -> str:
    """In TOML."""
    stages = [times[stage.rank]["stage"] for stage in plan.assignment.stages]
    hosts = ", ".join(dict.fromkeys(host.name for host in crew.hosts))
    title = [
        f"Measured by `pipeinfer measure` on {len(crew.hosts)} ranks: {hosts}.",
        f"Target {plan.model.path.name}, draft {' and '.join(draft.path.name for draft in plan.drafts)}.",
    ]
    one_host = len({host.name for host in crew.hosts}) == 1
    beside_s = [next(iter(found.values())).beside_s for found in times] if one_host else []
    slowdown = {size: slowdowns([by_size[size] for by_size in beside_s]) for size in beside_s[0]} if beside_s else {}
    drafts = [times[draft.rank]["draft"] for (draft,) in plan.assignment.drafts]
    text = profile_toml(
        title, plan.model.n_embd, plan.model.sizes, stages, drafts, extra, gbit_per_s, slowdown,
        plan.numerics.blocks, plan.numerics.parked,
    )  # fmt: skip
    if line := disturbed_line([*stages, *drafts]):
        complain(line)
    return text


def _write(output: Path, text: str) -> int:
    """Returns the exit code."""
    try:
        write_file(output, "--output", text.encode())
    except UserError as error:
        print(text, end="", flush=True)  # what was measured is not lost
        complain(f"{error}; the profile is on standard output")
        return 2
    print(output)
    return 0
