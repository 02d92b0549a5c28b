"""What a text would take on several machines like this one: some layers timed, pipelines simulated. Knows no MPI."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from pipeinfer.cluster.hosts.host import threads_of_ranks
from pipeinfer.cluster.timed_runs import ROWS, recall_context, recall_rows
from pipeinfer.core.policy import Policy
from pipeinfer.disk_cache import user_cache
from pipeinfer.errors import UserError
from pipeinfer.job.loading.stages import load_layers, timing_key
from pipeinfer.job.placement.job_plan import JobPlan, sizes_of
from pipeinfer.job.planning.planner import HEAD
from pipeinfer.job.profiling.speeds import timed_span, timing_params
from pipeinfer.models.drafts.lookup import LookupDrafter
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.observe.figures import timings
from pipeinfer.policies import Auto, Iterative
from pipeinfer.text import count_text, number, size_text
from pipeinfer.virtual.choices import KnownText, ranks_for, synthetic_team
from pipeinfer.virtual.costs import ModelCost, Profile, Work
from pipeinfer.virtual.nodes import RUN_S
from pipeinfer.virtual.profile import load_profile, spread_over
from pipeinfer.virtual.simulation import Simulated, simulate

PROFILE = "ethernet"  # the profile whose links join the machines, and whose office computers have the large pair
LARGE, N_LARGE, N_PROMPT = "llama-70b-1b", 128, 128  # the pair, and the tokens of its synthetic text and prompt
N_CELLS = 512


@dataclass(frozen=True)
class TimedMachine:
    """One machine with a plan's target. `target`: all layers; `sizes`: of each, the last with the output."""

    plan: JobPlan
    target: ModelCost
    sizes: Sequence[float]

    def cluster(self, n_machines: int) -> Profile:
        """Raises UserError for more machines than layers, and for so few that the weights do not fit."""
        numerics, room = self.plan.numerics, self.plan.hosts[0].memory.host
        if sum(self.sizes) > n_machines * room:
            raise UserError(f"{self.plan.model.path.name} needs more than the {size_text(room)} of each machine")
        stages, link = spread_over((self.target,), n_machines, self.sizes), load_profile(PROFILE).link()
        blocks, parked, n_embd = numerics.blocks, numerics.parked, self.plan.model.n_embd
        name = f"{n_machines} machines"
        return Profile(
            name, n_embd, stages, (), link, HEAD, head_is_first=True, sleeps=True, blocks=blocks, parked=parked
        )


def time_machine(plan: JobPlan) -> TimedMachine:
    """Times some layers with the output on all cores of rank 0's host, or recalls that from the last time. All other
    ranks must be idle. Raises UserError where the layers cannot be loaded."""
    info, device, host = read_model_info(plan.model.path), plan.ranks[0].target, plan.hosts[0]
    sizes, threads = sizes_of(info), threads_of_ranks((), frozenset({0}), [host])
    span = timed_span(sizes, 1, is_last=True)
    if not span:
        raise UserError(f"{info.path.name} has no part that could be timed")
    n_rows = max(ROWS)
    params = timing_params(
        plan.numerics, device, n_cells=N_CELLS, n_batch=n_rows, n_outputs_max=n_rows, n_threads=threads[0]
    )
    what = f"{plan.model.fingerprint} {span} {plan.numerics.name} with the output"
    key, cache = timing_key(what, device, [host], threads, 0), user_cache()
    with closing(load_layers(lambda: open_slice(info, *span), params, device)) as model:
        rows = recall_rows(model, time.monotonic, cache, f"row times: {key}")
        context_s = None  # a state costs the same after any context
        if plan.model.rewinds:
            context_s = recall_context(model, rows, N_CELLS, time.monotonic, cache, f"context: {key}")
    n_timed, run_s = span[1] - span[0], min(RUN_S, rows[1] / 2)
    output_share = sizes.output_bytes / (sizes.output_bytes + sum(sizes.layer_bytes[slice(*span)]))

    def work(share: float, token_s: float = 0.0) -> Work:
        seconds = (share * (took_s - run_s) for took_s in rows.values())
        return Work(tuple(map(float, rows)), tuple(seconds), (token_s,))

    layer = work((1 - output_share) / n_timed, (context_s or 0.0) / n_timed)
    cost = ModelCost("all layers", info.n_layer, layer, work(output_share), run_s)
    return TimedMachine(plan, cost, [*sizes.layer_bytes[:-1], sizes.layer_bytes[-1] + sizes.output_bytes])


COLUMNS = ("machines", "this text", "with guesses", "Llama 70B", "with a 1B draft")
TITLE = """Tokens/s of machines like this one on Gigabit Ethernet: timed here, simulated
there. Guesses for this text are looked up in it. Llama 70B (Q4_K_M) is on
office computers of 30 GB, those of the profile ethernet; -: it does not fit."""

Speeds = Sequence[float | None]  # tokens a second in the columns after the first


def machine_speeds(
    machine: TimedMachine, prompt: Sequence[int], tokens: Sequence[int], counts: Sequence[int]
) -> dict[int, Speeds]:
    """By number of machines; None: does not fit, or has too few layers. `tokens`: of the text, two at least."""
    text, file = KnownText(prompt, tokens), load_profile(PROFILE)
    (large,) = synthetic_team([ranks_for(file.models_of(LARGE)[2][0])], 0, N_PROMPT)

    def of_text(n: int, policy: Policy) -> Simulated:
        lookup = LookupDrafter() if policy.drafts else None
        return simulate(machine.cluster(n), text, policy, len(tokens), lookup=lookup)

    def of_large(n: int, policy: Policy) -> Simulated:
        return simulate(file.lay_out(n, LARGE, policy.drafts), large, policy, N_LARGE)

    columns = [(run, policy) for run in (of_text, of_large) for policy in (Iterative, Auto)]
    return {n: [_speed(partial(run, n, policy().begin())) for run, policy in columns] for n in counts}


def speed_rows(speeds: Mapping[int, Speeds]) -> list[list[str]]:
    return [[str(n), *("-" if each is None else number(each) for each in row)] for n, row in speeds.items()]


def summary(speeds: Mapping[int, Speeds]) -> str:
    """A sentence about the text's speeds; empty where one number of machines was simulated."""
    best = {n: max(filter(None, row[:2]), default=0.0) for n, row in speeds.items()}
    fewest, fastest = min(best), max(best, key=lambda n: best[n])
    if len(best) == 1 or not best[fewest]:
        return ""
    if fastest == fewest:
        return f"More than {count_text(fewest, 'machine')} {'adds' if fewest == 1 else 'add'} no speed to this model."
    return f"{fastest} machines write this text {number(best[fastest] / best[fewest])} times as fast as {fewest}."


def _speed(simulated: Callable[[], Simulated]) -> float | None:
    """Tokens a second after the first one; None if it does not fit, or has too few layers."""
    try:
        return float(timings(simulated().metrics)["predicted_per_second"])
    except UserError:
        return None
