"""Which of many described hosts a plan takes: those with room, the best of them, as many as have something to do; and
suggestions: changes that make a plan fit, or make it faster. Each is planned again. Prints nothing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

from pipeinfer.cluster.hosts.host import UNLIMITED, FreeMemory
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import ALL_LAYERS
from pipeinfer.job.placement.job_plan import check_memory
from pipeinfer.job.placement.memory import CELLS_PADDING
from pipeinfer.job.planning.deploy import DoesNotFit
from pipeinfer.job.planning.fit import by_rank_text, fewest, fewest_of_each, largest
from pipeinfer.job.planning.planner import Planner, Prediction
from pipeinfer.models.llama.tensor_places import has_experts
from pipeinfer.policies import Iterative
from pipeinfer.text import count_text, size_text
from pipeinfer.virtual.nodes import Node

MOST_NODES = 64  # further hosts in a suggestion, at most
GAIN = 1.03  # the least factor by which a suggestion makes a plan faster


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
    short = planner.plan.shortage
    tried = list(_tried(planner.changed(fit=False) if short else planner))  # --fit has tried its own
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


def with_suggestions(error: DoesNotFit, planner: Planner) -> DoesNotFit:
    """The refusal of a job with one prompt, with the suggestions that help."""
    planner = planner.changed(fit=False)
    text = shortage_text(planner, suggestions(planner, []))
    return DoesNotFit(text, error.plan, error.tried) if text else error


def _tried(planner: Planner) -> Iterator[Suggestion]:
    """Changes of the plan, each planned; those of the least effort first."""
    ways = _left_out, _cells_in_memory, _experts, _contexts, _hosts
    for what, change in chain.from_iterable(way(planner) for way in ways):
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


def _cells_in_memory(planner: Planner) -> Iterator[tuple[str, Planner]]:
    """With fewer cells of texts in memory, as many as fit."""
    if (n_mib := planner.options.context.cache_ram) and planner.plan.shortage:
        most = largest(lambda n: not planner.changed(cache_ram=n).plan.shortage, 1, n_mib - 1)
        yield f"-cram {most}" if most else "leave -cram out", planner.changed(cache_ram=most)


def _experts(planner: Planner) -> Iterator[tuple[str, Planner]]:
    """Experts of as few layers as it takes on CPUs, where GPUs are too small; all else on GPUs of known speed."""
    placement, is_small = planner.options.placement, _lacks_on_gpus(planner)
    if not has_experts(planner.info) or not (is_small or any(node.gpu_machine for node in planner.nodes)):
        return
    layers = placement.n_gpu_layers if is_small else (ALL_LAYERS,)
    whole = planner.changed(n_gpu_layers=layers, cpu_moe=False)

    @cache
    def lacks(counts: tuple[int, ...]) -> bool:
        try:
            return _lacks_on_gpus(whole.changed(n_cpu_moe=counts))
        except UserError:  # such a plan cannot be
            return True

    n = fewest(lambda n: lacks((n,)), planner.info.n_layer)
    if n is None:
        return
    moved = fewest_of_each(lacks, (n,) * len(planner.nodes))
    way = whole.changed(n_cpu_moe=moved)
    words = ["-ngl all"] * (layers != placement.n_gpu_layers)
    if any((*moved, *placement.n_cpu_moe)) or placement.cpu_moe:
        words.append(f"-ncmoe {by_rank_text(moved)}")
    if way.options.placement != placement:
        yield " ".join(words) + " in place of -cmoe" * placement.cpu_moe, way


def _lacks_on_gpus(planner: Planner) -> bool:
    return any(n_bytes is not None and n_bytes < 0 for n_bytes in planner.plan.spare_on_gpus)


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
    most = largest(lambda n: _has_plan(wider(n)), 1, MOST_NODES)
    if not most or wider(most).plan.shortage:
        return 0
    return 1 + largest(lambda n: wider(n).plan.shortage > 0, 1, most)


def _has_plan(planner: Planner) -> bool:
    """Whether all ranks get layers, whether these fit or not: they do not where there are more ranks than layers."""
    try:
        return bool(planner.changed(fit=False).plan)
    except UserError:
        return False


# -- hosts in use


def with_best_hosts(planner: Planner) -> tuple[Planner, list[str]]:
    """The planner with the ranks that it can use, in their order, and a line about the hosts that are left out."""
    lines, nodes = [], planner.nodes
    if small := _without_room(planner):
        nodes = [node for node in nodes if node.host.name not in small]
        shown = ", ".join(f"{name} ({memory})" for name, memory in small.items())
        lines.append(f"left out, without room for a layer: {shown}")
    best = sorted(range(len(nodes)), key=lambda rank: _worth(nodes, rank), reverse=True)

    def first(n: int) -> Planner:
        return replace(planner, nodes=[nodes[rank] for rank in sorted(best[:n])])

    least = min(len(nodes), 1 + len(planner.drafts_in_use) + sum(planner.options.placement.draft_split))
    is_enough = len(nodes) <= planner.info.n_layer or _has_plan(first(len(nodes)))
    n_used = len(nodes) if is_enough else largest(lambda n: _has_plan(first(n)), least, len(nodes))
    if not n_used or n_used == len(nodes):  # without any plan the error says why
        return replace(planner, nodes=nodes), lines
    used = first(n_used)
    spares = dict.fromkeys(nodes[rank].host.name for rank in sorted(best[n_used:]))
    ranks = count_text(n_used, "rank")
    lines.append(f"{ranks} of {len(nodes)} are used, this model has no layers for more; spares: {', '.join(spares)}")
    return used, lines


def _worth(nodes: Sequence[Node], rank: int) -> tuple[float, int, int]:
    """A faster rank is better, then one with more memory, then an earlier one."""
    node = nodes[rank]
    n_there = sum(other.host.name == node.host.name for other in nodes)
    speed = node.machine.bytes_per_s / n_there if node.machine else 0.0
    return speed, node.host.memory.host // n_there, -rank


def _without_room(planner: Planner) -> dict[str, str]:
    """Hosts whose memory holds no layer, and if they are first no draft -> their memory. Empty where all are so."""

    @cache
    def holds(n_bytes: int, is_draft: bool) -> bool:
        """Whether a rank has room for one layer, or for the drafts, beside ranks without a limit."""
        host = replace(planner.nodes[0].host, name="small", memory=FreeMemory(n_bytes))
        ranks = [Node(replace(host, name=name, memory=FreeMemory())) for name in ("before", "after")]
        ranks.insert(0 if is_draft else 1, Node(host))
        split = None if is_draft else f"1,1,{planner.info.n_layer - 2}"
        policy = planner.options.speculation.policy if is_draft else Iterative()
        trial = replace(planner.changed(policy=policy, layer_split=split, fit=False), nodes=ranks)
        try:
            spare = trial.plan.spare_memory[ranks.index(Node(host))]
        except UserError:  # it cannot be told
            return True
        return spare is None or spare >= 0

    small = {}
    for rank, node in enumerate(planner.nodes):
        n_bytes, may_draft = node.host.memory.host, bool(planner.drafts_in_use) and rank == 0
        if n_bytes < UNLIMITED and not holds(n_bytes, False) and not (may_draft and holds(n_bytes, True)):
            small[node.host.name] = size_text(n_bytes)
    return small if len(small) < len({node.host.name for node in planner.nodes}) else {}
