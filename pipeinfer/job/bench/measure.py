"""Time the models on this cluster, and what runs without speculation take beyond them: in a stage, between two stages
and on the head. Write a profile of both for `simulate`."""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from pipeinfer.cluster.hosts.host import ranks_there
from pipeinfer.cluster.hosts.roster import bandwidth_gbit
from pipeinfer.cluster.timed_runs import Seconds, evaluate, forget, time_chunk, time_in_turns, time_run
from pipeinfer.core.blocks import BLOCK
from pipeinfer.core.interfaces import LoadedModel, StageModel
from pipeinfer.errors import JobError, UserError
from pipeinfer.job.launch import CLOCK, Context, Crew, start_job
from pipeinfer.job.loading.load import load_own, run_stage
from pipeinfer.job.options.options import RunOptions, with_plan
from pipeinfer.job.placement.job_plan import SHARED_CORES, JobPlan
from pipeinfer.job.planning.prepare import find_hosts, inputs_of, prepare, with_files
from pipeinfer.job.process.streams import complain
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.session.ranks import LoadedRanks
from pipeinfer.job.session.session import Session
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.figures import speeds
from pipeinfer.observe.trace import HeadLedger, StageRun
from pipeinfer.outputs import check_separate, check_writable, write_file
from pipeinfer.policies import Iterative, Speculative
from pipeinfer.virtual.choices import SyntheticChoices
from pipeinfer.virtual.costs import MANY_ROWS
from pipeinfer.virtual.profile import parse_profile
from pipeinfer.virtual.simulation import simulate
from pipeinfer.virtual.toml_text import ModelTimes, Overheads, disturbed_line, is_chunk, profile_toml

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
CONTEXT = 256  # tokens, for the cost of attention
SIZES_IN_CONTEXT = (1, 128, 64, 32)  # single rows and chunks of prompts first; in blocks these attend in another way
PROMPT = CONTEXT + SIZES[-1] + BLOCK  # rows of a prompt that is never read to its end, so that its context stays
REPEATS, CHUNK_REPEATS = 15, 3
REST_S = 0.003  # a pause after which the threads of a run must wake
ALONE_S, BESIDE_S = 0.3, 0.8  # for runs of a size, on one rank of a host, on several at once
TIMING_S = 2.0  # for a model


@dataclass(frozen=True, slots=True)
class ModelToTime:
    """A model with an empty cache. `blocks`: prompts are in blocks. `rewinds`: newest tokens can be removed."""

    model: StageModel
    layers: int
    n_rows_max: int
    n_cells: int
    blocks: bool = False
    rewinds: bool = True


def time_model(timed: ModelToTime, clock: Seconds, budget_s: float) -> ModelTimes:
    """Times of runs of all SIZES, within about `budget_s`. The cache is empty afterwards."""
    model, blocks, n_cells = timed.model, timed.blocks, timed.n_cells
    start_s, until_s = clock(), clock() + budget_s

    def over_at(when_s: float) -> Callable[[object], bool]:
        return lambda times: bool(times) and clock() > when_s

    _time_and_forget(model, 1, clock)  # maps the weights in
    sizes = [size for size in SIZES if size <= timed.n_rows_max]
    guesses = [size for size in sizes if not is_chunk(size)]

    def measure_twice(size: int) -> tuple[float, float]:
        """Seconds of a run after one of another size, and of the same again."""
        return _time_and_forget(model, size, clock), _time_and_forget(model, size, clock)

    times = time_in_turns(guesses, REPEATS, measure_twice, over_at(start_s + budget_s / 2))
    pairs = (pair for of_size in times.values() for pair in of_size[1:] or of_size)
    reshape_s = statistics.median(first - second for first, second in pairs)
    rested = []
    for _ in range(REPEATS):
        time.sleep(REST_S)
        rested.append(_time_and_forget(model, 1, clock))
    rested_s = statistics.median(rested)
    # chunks of prompts come last: they slow down the small runs that follow
    chunks = [size for size in sizes if is_chunk(size) and clock() < until_s and size + BLOCK <= n_cells]
    n_blocks = PROMPT if blocks else 0
    time_one = lambda size: time_chunk(model, size, n_blocks, clock)  # noqa: E731
    chunk_times = time_in_turns(chunks, CHUNK_REPEATS, time_one, over_at(until_s))
    times |= chunk_times
    by_rows = {size: statistics.median(second for _, second in of_size) for size, of_size in times.items()}
    context = min(CONTEXT, n_cells // 2)
    in_context_s = _time_in_context(timed, context, by_rows, clock, until_s)
    in_blocks = chunk_times if blocks else {}
    attention_s = {size: _first_block_s(by_rows[size], in_context_s.get(size, 0.0), context) for size in in_blocks}
    by_rows |= {size: by_rows[size] - seconds for size, seconds in attention_s.items()}
    begins_s = [first - second + attention_s[size] for size, of_size in in_blocks.items() for first, second in of_size]
    reshape_s = max(0.0, reshape_s)
    prompt_s = max(0.0, statistics.median(begins_s or [0.0]) - reshape_s)  # a new context has no graph yet either
    rest_s = max(0.0, rested_s - by_rows[1])
    return ModelTimes(timed.layers, by_rows, context, in_context_s, reshape_s, rest_s, prompt_s)


def _first_block_s(took_s: float, in_context_s: float, context: int) -> float:
    """Seconds of a chunk's attention to the block before it, from what the chunk takes after `context` tokens."""
    token_s = max(0.0, in_context_s - took_s) / max(1, context - BLOCK)
    return min(BLOCK * token_s, took_s / 2)  # not all of it, however disturbed the times are


def time_over_and_over(model: StageModel, n_rows: int, clock: Seconds, until_s: float) -> float:
    """Seconds of a run, on average, evaluated again and again until `until_s`; other ranks may do the same."""
    start_s, n = clock(), 0
    while (now_s := clock()) < until_s or not n:
        _time_and_forget(model, n_rows, clock)
        n += 1
    return (max(now_s, clock()) - start_s) / n


def slowdowns(beside_s: Sequence[Mapping[int, float]]) -> list[float]:
    """How many times as long a run takes when 1, 2, … ranks compute. `beside_s`: of each rank, by number, seconds."""
    factors = [1.0]
    for n_busy in range(2, len(beside_s) + 1):
        ratios = [beside[n_busy] / beside[1] for beside in beside_s if n_busy in beside]
        factors.append(max(factors[-1], statistics.fmean(ratios)))
    return factors


def _time_and_forget(model: StageModel, n_rows: int, clock: Seconds) -> float:
    took_s = time_run(model, n_rows, clock, 0, _n_wanted(n_rows))
    forget(model)
    return took_s


def _time_in_context(
    timed: ModelToTime, context: int, by_rows: Mapping[int, float], clock: Seconds, until_s: float
) -> dict[int, float]:
    """Rows -> seconds of a run after `context` tokens, at least of one row and of one chunk."""
    model, blocks = timed.model, timed.blocks

    def fill() -> None:
        n_batch = max(*by_rows, BLOCK) if blocks else max(by_rows)
        for start in range(0, context, n_batch):
            evaluate(model, min(n_batch, context - start), start, 0, PROMPT if blocks else 0)

    def measure(size: int) -> float:
        n_blocks = PROMPT if blocks and is_chunk(size) else 0
        took_s = time_run(model, size, clock, context, _n_wanted(size, n_blocks), n_blocks)
        forget(model, context if timed.rewinds else 0)
        if not timed.rewinds:
            fill()
        return took_s

    def is_enough(times: Mapping[int, list[float]]) -> bool:
        return any(len(of_size) >= 2 for of_size in times.values()) and clock() > until_s

    fill()
    medians_s: dict[int, float] = {}
    for size in SIZES_IN_CONTEXT:
        has_kind = is_chunk(size) in map(is_chunk, medians_s)
        if size not in by_rows or context + size > timed.n_cells or (has_kind and clock() > until_s):
            continue
        times = time_in_turns((size,), 1 + CHUNK_REPEATS, measure, is_enough)[size]
        medians_s[size] = statistics.median(times[1:])  # the first one has another size than the one before
    forget(model)
    return dict(sorted(medians_s.items()))


def _n_wanted(n_rows: int, n_blocks: int = 0) -> int:
    """Rows that want logits: all guesses, the last row of a prompt, and none in blocks."""
    return int(not n_blocks) if is_chunk(n_rows) else n_rows


def overheads(
    ledger: HeadLedger,
    stages: Sequence[Sequence[StageRun]],
    stage_times: Sequence[ModelTimes],
    draft_steps_s: Sequence[float],
    draft: ModelTimes | None,
) -> Overheads:
    """The overheads in a job that sent single rows, means of times on one clock. `draft_steps_s`: of one row each."""
    by_run = [{run_id: (start_s, end_s) for run_id, _, start_s, end_s, _ in runs} for runs in stages]
    answered_s = {run_id: at_s for at_s, run_id in ledger.verdicts}
    # the first run carries the prompt
    run_ids = [run_id for run_id in sorted(answered_s) if all(run_id in stage for stage in by_run)][1:]
    context = _mean(run_ids)  # after a prompt of hardly any tokens
    stage_s = tuple(
        max(0.0, _mean(stage[run_id][1] - stage[run_id][0] for run_id in run_ids) - times.row_s(context))
        for stage, times in zip(by_run, stage_times, strict=True)
    )
    hops = [_mean(after[run_id][0] - before[run_id][1] for run_id in run_ids) for before, after in pairwise(by_run)]
    hops.append(_mean(answered_s[run_id] - by_run[-1][run_id][1] for run_id in run_ids))
    first_s = _mean(by_run[0][run_id][0] - ledger.submitted_s[run_id] for run_id in run_ids)
    hop_s = max(0.0, statistics.fmean(hops))
    follows = [(run_id, run_id + 1) for run_id in run_ids if run_id + 1 in ledger.submitted_s]
    verdict_s = _mean(ledger.submitted_s[after] - answered_s[before] for before, after in follows)
    # steps differ in their number of rows
    beyond_s = _mean(draft_steps_s) - draft.by_rows[1] - draft.reshape_s if draft and draft_steps_s else 0.0
    return Overheads(stage_s, hop_s, max(0.0, first_s - hop_s), max(0.0, verdict_s), max(0.0, beyond_s))


def _mean(values: Iterable[float]) -> float:
    return float(statistics.fmean(numbers)) if (numbers := list(values)) else 0.0


def measure(options: RunOptions, output: Path, tolerance: float) -> int:
    """`pipeinfer measure`, on every rank; returns the exit code."""
    placement, verbose = options.placement, options.output.verbose
    return start_job(lambda crew: _measure(crew, options, output, tolerance), options, placement, verbose)


def _measure(crew: Crew, options: RunOptions, output: Path, tolerance: float) -> int:
    link = crew.link
    if link.size < 2:
        raise JobError("measure needs 2 ranks or more: a draft and a stage; start it with mpirun")
    options = link.agree(lambda: with_files(with_plan(options, link.size), link.size))
    hosts = find_hosts(crew, options)
    request: GenerationRequest | None = None  # on rank 0

    def make_plan() -> JobPlan:
        nonlocal request
        check_separate({"--output": output}, inputs_of(options))
        check_writable(output, "--output")
        plan, (request, _) = prepare(options, hosts, is_users=False)
        print("loading and timing the models, then a job of them; large ones take minutes", file=sys.stderr)
        return plan

    plan = link.agree(make_plan)
    context, gbit_per_s = crew.context(plan, traces=True), bandwidth_gbit(link)
    models = link.agree_all(lambda: _load_own(context, plan))
    times = link.all_gather(_time_own_models(crew, context, plan, *models))
    extra = _run_plainly(context, plan, request, times)
    if link.rank == 0:
        assert extra and request
        text, speed = _profile(crew, plan, times, extra[0], gbit_per_s), extra[1]
        predicted = predicted_speed(text, len(request.prompt), request.n_predict)
        speeds_text = f"{predicted:.2f} tokens/s without guesses, a job of these ranks made {speed:.2f}"
        comparison = f"the profile foretells {speeds_text}: {(off := abs(predicted / speed - 1)):.1%} off"
        if off > tolerance:
            way_out = f"measure again when the machine is quiet, or accept more than {tolerance:.0%} with --tolerance"
            raise JobError(f"{comparison}; something else computed meanwhile: {way_out}")
        complain(f"{comparison}, {tolerance:.0%} is accepted")
        return _write(output, text)
    return 0


def _load_own(context: Context, plan: JobPlan) -> tuple[LoadedModel | None, dict[int, LoadedModel]]:
    try:
        return load_own(context, plan)
    except UserError as error:
        raise UserError(f"{context.name}: {error}") from None


def _time_own_models(
    crew: Crew, context: Context, plan: JobPlan, stage: LoadedModel | None, drafts: dict[int, LoadedModel]
) -> dict[str, ModelTimes]:
    """Time and free this rank's models: ranks of one host in turns, then 2, 3, … of them at once. Collective."""
    ranks = ranks_there(crew.hosts, context.rank)
    n_most, index = max(crew.link.all_gather(len(ranks))), ranks.index(context.rank)
    models, times = [model for model in (stage, *drafts.values()) if model], dict[str, ModelTimes]()
    for turn in range(n_most):
        if turn == index:
            times = _time_alone(context, plan, stage, drafts)
            beside_s = next(iter(times.values())).beside_s
            for n_rows in (1, MANY_ROWS):
                beside_s[n_rows] = {1: time_over_and_over(models[0], n_rows, CLOCK, CLOCK() + ALONE_S)}
        crew.link.all_gather(None)  # no rank times a model while another one of the host computes
    for n_busy in range(2, n_most + 1):
        for n_rows, of_rows_s in beside_s.items():
            if index < n_busy <= len(ranks):
                of_rows_s[n_busy] = time_over_and_over(models[0], n_rows, CLOCK, CLOCK() + BESIDE_S)
            crew.link.all_gather(None)
    for model in models:
        model.close()
    return times


def _time_alone(
    context: Context, plan: JobPlan, stage: LoadedModel | None, drafts: dict[int, LoadedModel]
) -> dict[str, ModelTimes]:
    times, n_cells = dict[str, ModelTimes](), plan.capacity.n_cells
    if stage:
        part = plan.assignment.stages[plan.assignment.stage_of(context.rank) or 0]
        kind = plan.numerics.blocks, plan.model.rewinds
        timed = ModelToTime(stage, part.last - part.first, plan.n_rows_max, n_cells, *kind)
        times["stage"] = time_model(timed, CLOCK, TIMING_S)
    for number, draft in drafts.items():
        n_layer = plan.drafts[number].n_layer  # all of them: no draft is cut here
        timed = ModelToTime(draft, n_layer, plan.capacity.n_guess_rows, n_cells)
        times["draft"] = time_model(timed, CLOCK, TIMING_S)
    return times


def _run_plainly(
    context: Context, plan: JobPlan, request: GenerationRequest | None, times: list[dict[str, ModelTimes]]
) -> tuple[Overheads, float] | None:
    """Generate without guesses, with a draft, and without again. Returns, on rank 0, the overheads beside the models'
    times, and the tokens a second of the last text, which is no part of the measurement."""
    if not request:
        run_stage(context, plan)
        return None
    loaded = LoadedRanks(context, plan)
    loaded.load()
    session = Session(loaded, Tokenizer(plan.model.path))
    loaded.configure(session.engine, replace(plan.engine, looks_up=False))
    for _ in range(2):  # the first one warms up
        plain = session.generate(replace(request, policy=Iterative()))
    drafted = session.generate(replace(request, policy=Speculative()))
    again = session.generate(replace(request, policy=Iterative()))
    loaded.close()
    steps = (span for span in drafted.reports[0]["spans"] if span["kind"] == "draft" and span["args"]["finished"])
    steps_s = [span["duration_s"] for span in steps if span["args"]["nodes"] == 1]
    ranks = [stage.rank for stage in plan.assignment.stages]
    runs = [plain.reports[rank]["runs"] for rank in ranks]
    stage_times = [times[rank]["stage"] for rank in ranks]
    extra = overheads(plain.ledger, runs, stage_times, steps_s, times[0].get("draft"))
    return extra, float(speeds(again.metrics)["predicted_per_second"])


def predicted_speed(text: str, n_prompt: int, n_predict: int) -> float:
    """Tokens a second without guesses, simulated with a profile."""
    profile = parse_profile("measured", text, "the profile").lay_out()
    choices = SyntheticChoices((0.5,), n_prompt=n_prompt)
    return float(speeds(simulate(profile, choices, Iterative(), n_predict).metrics)["predicted_per_second"])


def _profile(crew: Crew, plan: JobPlan, times: list[dict[str, ModelTimes]], extra: Overheads, gbit_per_s: float) -> str:
    stages = [times[stage.rank]["stage"] for stage in plan.assignment.stages]
    hosts = ", ".join(dict.fromkeys(host.name for host in crew.hosts))
    drafting = " and ".join(draft.path.name for draft in plan.drafts)
    title = [f"Measured by `pipeinfer measure` on {len(crew.hosts)} ranks: {hosts}."]
    title += [f"Target {plan.model.path.name}, draft {drafting}."]
    one_host = len({host.name for host in crew.hosts}) == 1
    beside_s = [next(iter(of_rank.values())).beside_s for of_rank in times] if one_host else []
    slowdown = {size: slowdowns([by_size[size] for by_size in beside_s]) for size in beside_s[0]} if beside_s else {}
    drafts = [times[draft.rank]["draft"] for (draft,) in plan.assignment.drafts]
    model, numerics = (plan.model.n_embd, plan.model.sizes), (plan.numerics.blocks, plan.numerics.parked)
    text = profile_toml(title, *model, stages, drafts, extra, gbit_per_s, slowdown, *numerics)
    for line in filter(None, [disturbed_line([*stages, *drafts]), SHARED_CORES * (plan.crowding > 1)]):
        complain(line)
    return text


def _write(output: Path, text: str) -> int:
    try:
        write_file(output, "--output", text.encode())
    except UserError as error:
        print(text, end="", flush=True)  # what was measured is not lost
        complain(f"{error}; the profile is on standard output")
        return 2
    print(output)
    return 0
