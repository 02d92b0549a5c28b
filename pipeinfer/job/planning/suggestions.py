"""Suggestions: changes that make a plan fit, or make it faster. Each is planned again. Prints nothing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeinfer.errors import UserError
from pipeinfer.job.placement.job_plan import check_memory
from pipeinfer.job.placement.memory import CELLS_PADDING
from pipeinfer.job.planning.deploy import DoesNotFit
from pipeinfer.job.planning.planner import Planner, Prediction
from pipeinfer.text import size_text

MOST_NODES = 64
"""Further hosts in a suggestion, at most."""

GAIN = 1.03
"""The least factor by which a suggestion makes a plan faster."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """`what`: the change, in words; `short_bytes`: the memory that is missing then, at most; 0: it fits."""

    what: str
    short_bytes: int
    tokens_per_s: float | None

    def as_data(self) -> dict[str, Any]:
        return asdict(self) | {"fits": not self.short_bytes}


def suggestions(planner: Planner, predicted: list[Prediction]) -> list[Suggestion]:
    """Those that help, the best first. For a plan that does not fit: those with which it would, else the nearest.
    `predicted`: the speeds of its policies."""
    short, tried = planner.plan.shortage, list(_tried(planner))
    if short:
        fitting = [way for way in tried if not way.short_bytes]
        nearest = sorted((way for way in tried if way.short_bytes < short), key=lambda way: way.short_bytes)[:1]
        return fitting or nearest
    chosen = planner.options.speculation.policy.name
    speed = next((each.tokens_per_s for each in predicted if each.policy == chosen), None)
    if speed is None:
        return []
    best = max(predicted, key=lambda each: each.tokens_per_s)
    faster = list[Suggestion]()
    for way in (Suggestion(f"--policy {best.policy}", 0, best.tokens_per_s), *tried):
        if not way.short_bytes and way.tokens_per_s and way.tokens_per_s > GAIN * speed:
            faster.append(way)
            speed = way.tokens_per_s
    return faster[::-1]


def shortage_text(planner: Planner, helping: Sequence[Suggestion]) -> str:
    """The missing memory by host, and the ways out; empty if the plan fits."""
    if not planner.plan.shortage:
        return ""
    fitting = [way.what for way in helping if not way.short_bytes]
    nearest = [f"{way.what} would leave {size_text(way.short_bytes)} missing; " for way in helping]
    way_out = (
        f"it would fit with {' or with '.join(fitting)}"
        if fitting
        else f"{''.join(nearest)}take hosts with more memory, or a smaller quantisation"
    )
    try:
        check_memory(planner.plan, way_out)
    except UserError as error:
        return str(error)
    raise AssertionError(f"{planner.plan.shortage} bytes are missing, and no check fails")


def advised(error: DoesNotFit, planner: Planner) -> DoesNotFit:
    """The refusal of a job with one prompt, with the suggestions that help."""
    return DoesNotFit(shortage_text(planner, suggestions(planner, [])) or str(error), error.plan)


def _tried(planner: Planner) -> Iterator[Suggestion]:
    """Those of the least effort first."""
    for what, change in (*_left_out(planner), *_contexts(planner), *_hosts(planner)):
        try:
            short = change.plan.shortage
            yield Suggestion(what, short, None if short else change.speed)
        except UserError:  # such a plan cannot be
            continue


def _left_out(planner: Planner) -> Iterator[tuple[str, Planner]]:
    """Without options that the plan can choose itself."""
    for option, name in (("--layer-split", "layer_split"), ("--draft-rank", "draft_rank")):
        if getattr(planner.options.placement, name) is not None:
            yield f"leave {option} out", planner.changed(**{name: None})


def _contexts(planner: Planner) -> Iterator[tuple[str, Planner]]:
    """The largest context that fits, where the planned one does not."""
    if not planner.plan.shortage:
        return
    n_predict = planner.options.context.predict

    def smaller(n_blocks: int) -> Planner:
        n_ctx = n_blocks * CELLS_PADDING
        return planner.changed(ctx_size=n_ctx, predict=min(n_predict, n_ctx - planner.n_prompt))

    least = planner.n_prompt // CELLS_PADDING + 1
    n_blocks = largest(lambda n: not smaller(n).plan.shortage, least, (planner.n_ctx - 1) // CELLS_PADDING)
    if n_blocks:
        fitting = smaller(n_blocks)
        context = fitting.options.context
        cut = f" -n {context.predict}" if context.predict != n_predict else ""
        yield f"-c {context.ctx_size}{cut}", fitting


def _hosts(planner: Planner) -> Iterator[tuple[str, Planner]]:
    """One more host, or as many as it takes, each like that of the last rank."""
    last = planner.nodes[-1]

    def wider(n: int) -> Planner:
        twins = [last.twin(f"{last.host.name}+{number}") for number in range(1, n + 1)]
        return replace(planner.changed(layer_split=None), nodes=[*planner.nodes, *twins])

    if len(planner.options.placement.threads) > 1:  # of which there would have to be more
        return
    n = _enough(wider) if planner.plan.shortage else 1
    if n:
        yield f"{n} more host{'s' * (n > 1)} like {last.host.name}", wider(n)


def _enough(wider: Callable[[int], Planner]) -> int:
    """With how many further hosts it fits; 0 if with none that a plan can use."""

    def is_plan(n: int) -> bool:
        try:
            return bool(wider(n).plan)
        except UserError:  # more stages than layers
            return False

    most = largest(is_plan, 1, MOST_NODES)
    if not most or wider(most).plan.shortage:
        return 0
    return 1 + largest(lambda n: wider(n).plan.shortage > 0, 1, most)


def largest(holds: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number from `least` to `most` for which it holds, as it does for all below; 0 if it never does."""
    if least > most or not holds(least):
        return 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if holds(middle) else (least, middle - 1)
    return least
