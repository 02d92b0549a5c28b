"""What a plan gives up where it does not fit (--fit): experts go to their hosts' memory, then layers off GPUs, then the
context gets smaller. Each choice is planned anew, and leaves some memory free. Also the inputs of a plan. Loads
nothing."""

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple

from pipeinfer.cluster.hosts.host import UNLIMITED, Host
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO_LAYERS
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.devices import RankOptions, gpu_layers_text, rank_options
from pipeinfer.job.placement.job_plan import CELLS_PADDING, JobPlan
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.llama.tensor_places import has_experts
from pipeinfer.text import size_text

LEAST_FREE, FREE_PART = 1 << 30, 20  # bytes of each GPU and host that stay free by default, or this part if it is more
UNPROVEN = ((0, ""),)  # as `Host.exact_rows`: some layers are on a device that was not tried


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The inputs of a plan. `drafts`: headers of those in use, the smallest first; `n_ctx`: tokens of all requests
    that are open at a time; `n_prompt`: tokens of the longest prompt; `n_least`: of the least context that --fit may
    choose; 0: none smaller than `n_ctx`."""

    options: RunOptions
    hosts: Sequence[Host]
    info: ModelInfo
    drafts: Sequence[ModelInfo]
    n_ctx: int
    n_prompt: int
    n_least: int = 0

    @property
    def least(self) -> int:
        """Tokens of the smallest context."""
        return self.n_least or self.n_ctx


Choose = Callable[[PlanInputs], JobPlan]
"""Makes a plan, with the best numerics, whether it fits or not."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a plan has in place of what was asked for. `n_gpu_layers`, `n_cpu_moe`: as options, a value a rank; empty:
    as asked for. `layer_split`, `draft_rank`: of the plan, for a job that goes on from it; empty, None: free."""

    n_ctx: int
    n_gpu_layers: tuple[int, ...] = ()
    n_cpu_moe: tuple[int, ...] = ()
    layer_split: str = ""
    draft_rank: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Fitted | None":
        """The reverse of `text`; None for an empty or another text."""
        try:
            n_ctx, layers, experts, split, draft_rank = json.loads(text)
            return cls(int(n_ctx), tuple(map(int, layers)), tuple(map(int, experts)), str(split), draft_rank)
        except (ValueError, TypeError):
            return None

    @property
    def text(self) -> str:
        return json.dumps(astuple(self))

    def shown(self, n_ctx: int) -> str:
        """As on the command line; empty: nothing is given up. `n_ctx`: the context that was asked for."""
        lists = {"-ncmoe": self.n_cpu_moe, "-ngl": self.n_gpu_layers}
        words = [f"{flag} {by_rank_text(values)}" for flag, values in lists.items() if values]
        return " ".join([*words, *[f"-c {self.n_ctx} (of {n_ctx})"] * (self.n_ctx < n_ctx)])

    def applied(self, inputs: PlanInputs) -> PlanInputs:
        """The inputs with what it has. Raises UserError where that is for another number of ranks."""
        plain, names = inputs.options, ("n_gpu_layers", "n_cpu_moe", "layer_split", "draft_rank")
        options = plain.changed(**{name: value for name in names if (value := getattr(self, name))})
        both = (rank_options(each.placement, len(inputs.hosts)) for each in (plain, options))
        hosts = [
            host if not host.exact_rows or _is_proven(*ranks) else replace(host, exact_rows=UNPROVEN)
            for host, *ranks in zip(inputs.hosts, *both, strict=True)
        ]
        n_prompt = min(inputs.n_prompt, self.n_ctx)
        return replace(inputs, options=options, hosts=hosts, n_ctx=self.n_ctx, n_prompt=n_prompt)


def fit(inputs: PlanInputs, choose: Choose) -> tuple[JobPlan, str]:
    """The plan as asked for where it fits or nothing may be given up; else the one that gives up least, or if none fits
    the plan as asked for and a text of what was tried."""
    unfit = choose(inputs)
    if unfit.fits or not inputs.options.context.may_fit:
        return unfit, ""
    n_ctx, target = inputs.n_ctx, inputs.options.context.fit_target
    least = min(n_ctx, _least_context(inputs))
    search = _Search(replace(inputs, hosts=[_with_free(host, target) for host in inputs.hosts]), choose)
    moved = search.fewest_moved(n_ctx)
    if not search.fits(moved):
        n_steps = largest(lambda n: search.fits(search.fewest_moved(n * CELLS_PADDING)), *_steps(least, n_ctx))
        moved = search.fewest_moved(n_steps * CELLS_PADDING or least)
    moved = search.by_rank(moved)
    choice, plan = search.choice(moved), search.plan(moved)
    shown, free = choice.shown(n_ctx), "1 GiB or 5%" if target is None else f"{target} MiB"
    if plan is None or not plan.fits:
        short = f"{size_text(plan.shortage)} are missing" if plan else "there is no plan"
        tried = f"--fit found nothing: with {shown} {short}, where {free} are to stay free (--fit-target)"
        return unfit, tried if shown else ""
    missing = f"as asked for, {size_text(unfit.shortage)} of memory would be missing"
    note = f"--fit chose {shown}: {missing}; {free} of each GPU and host stay free (--fit-target)"
    return _finished(plan, choice, inputs.hosts, note), ""


def resume(inputs: PlanInputs, choose: Choose) -> JobPlan | None:
    """The plan with what --fit chose for an earlier job that goes on, or at least with its context; None: there was no
    such choice, or that does not fit."""
    earlier = Fitted.parse(inputs.options.context.fitted)
    if earlier is None or not inputs.least <= earlier.n_ctx <= inputs.n_ctx:
        return None
    for choice in (earlier, *[Fitted(earlier.n_ctx)] * (earlier.n_ctx < inputs.n_ctx)):
        plan = planned(choice, inputs, choose)
        if plan and plan.fits:
            note = f"--fit chose {choice.shown(inputs.n_ctx)} for the job that goes on, and so it stays"
            return _finished(plan, choice, inputs.hosts, note)
    return None


def _least_context(inputs: PlanInputs) -> int:
    """Texts that go on keep their context."""
    earlier = Fitted.parse(inputs.options.context.fitted)
    if earlier or inputs.options.numerics.resumed:
        return earlier.n_ctx if earlier else inputs.n_ctx
    return inputs.least


def _steps(least: int, n_ctx: int) -> tuple[int, int]:
    """The smallest and the largest number of steps of the cache between both contexts."""
    return -(-least // CELLS_PADDING), (n_ctx - 1) // CELLS_PADDING


def _with_free(host: Host, target: int | None) -> Host:
    """With less memory, by what is to stay free. `target`: of the option, in MiB."""

    def usable(n_bytes: int) -> int:
        free = max(LEAST_FREE, n_bytes // FREE_PART) if target is None else target << 20
        return max(1, n_bytes - free)  # with 0 a GPU's memory is unknown

    memory = host.memory
    if memory.host < UNLIMITED:
        memory = replace(memory, host=usable(memory.host))
    return replace(host, memory=memory, gpus=tuple((name, usable(n_bytes)) for name, n_bytes in host.gpus))


def _finished(plan: JobPlan, choice: Fitted, hosts: Sequence[Host], note: str) -> JobPlan:
    """With all memory of its hosts, and the note."""
    ranks = tuple(
        replace(rank, host=replace(rank.host, memory=host.memory, gpus=host.gpus))
        for rank, host in zip(plan.ranks, hosts, strict=True)
    )
    split, draft_rank = split_of(plan)
    whole = replace(choice, layer_split=split, draft_rank=draft_rank)
    return replace(plan, ranks=ranks, fitted=whole.text, notes=(*plan.notes, note))


def planned(choice: Fitted, inputs: PlanInputs, choose: Choose) -> JobPlan | None:
    """Whether it fits or not; None if there cannot be such a plan."""
    try:
        return choose(choice.applied(inputs))
    except UserError:
        return None


def split_of(plan: JobPlan) -> tuple[str, int | None]:
    """The layers of its stages and the rank of a lone draft, as options."""
    drafts = plan.assignment.drafts
    split = ",".join(str(stage.last - stage.first) for stage in plan.assignment.stages)
    return split, drafts[0][0].rank or None if len(drafts) == 1 else None


def _is_proven(plain: RankOptions, taken: RankOptions) -> bool:
    """Whether a rank has tried all devices that it has layers on, by what was asked for."""
    has_host = plain.n_gpu_layers not in (ALL_LAYERS, AUTO_LAYERS) or plain.n_gpu_layers == taken.n_gpu_layers
    return has_host and (plain.places.n_cpu_moe != 0 or taken.places.n_cpu_moe == 0)


def by_rank_text(values: Sequence[int]) -> str:
    """One value a rank as on the command line, or the one that all have."""
    are_alike = len(set(values)) == 1
    return ",".join(map(gpu_layers_text, values[:1] if are_alike else values))


class _OffGpu(NamedTuple):
    """What leaves GPUs: of each rank, or of all, the first layers, and those whose experts do. `split` and `draft_rank`
    are as in `Fitted`."""

    n_ctx: int
    layers: tuple[int, ...] = (0,)
    experts: tuple[int, ...] = (0,)
    split: str = ""
    draft_rank: int | None = None


@dataclass
class _Search:
    """`inputs`: with hosts without the memory that is to stay free. `_last`: of the last context, from where the search
    of another one begins."""

    inputs: PlanInputs
    choose: Choose
    _plans: dict[_OffGpu, JobPlan | None] = field(default_factory=dict)
    _last: _OffGpu = _OffGpu(0)  # noqa: RUF009 (it is frozen)

    def plan(self, moved: _OffGpu) -> JobPlan | None:
        """Whether it fits or not; None if there cannot be one."""
        if moved not in self._plans:
            self._plans[moved] = planned(self.choice(moved), self.inputs, self.choose)
        return self._plans[moved]

    def fits(self, moved: _OffGpu) -> bool:
        return (plan := self.plan(moved)) is not None and plan.fits

    def lacks(self, moved: _OffGpu) -> bool:
        """Whether a GPU is too small."""
        plan = self.plan(moved)
        return plan is None or any(n_bytes is not None and n_bytes < 0 for n_bytes in plan.spare_on_gpus)

    def fewest_moved(self, n_ctx: int) -> _OffGpu:
        """With such a context, experts of as few layers in hosts' memory as GPUs need, and if those of all are too few,
        as many layers on GPUs as these hold; alike on all ranks."""
        n_layer, none = self.inputs.info.n_layer, _OffGpu(n_ctx)
        if not self.lacks(none):
            return none
        (near_layers,), (near_experts,) = self._last.layers, self._last.experts
        most = none._replace(experts=(n_layer,)) if has_experts(self.inputs.info) else none
        n = fewest(lambda n: self.lacks(most._replace(layers=(n,))), n_layer + 1, near_layers)  # with the output
        if n is None:
            return most._replace(layers=(n_layer + 1,))
        least = none._replace(layers=(n,))
        n = fewest(lambda n: self.lacks(least._replace(experts=(n,))), n_layer, near_experts)
        self._last = least._replace(experts=(n or 0,))
        return self._last

    def by_rank(self, moved: _OffGpu) -> _OffGpu:
        """With the same split each rank moves no more than its own GPUs need."""
        plan, n_ranks = self.plan(moved), len(self.inputs.hosts)
        if n_ranks == 1 or plan is None or not (any(moved.layers) or any(moved.experts)):
            return moved
        split, draft_rank = split_of(plan)

        def off_gpus(counts: tuple[int, ...]) -> _OffGpu:
            return _OffGpu(moved.n_ctx, counts[::2], counts[1::2], split, draft_rank)

        # of each rank its layers and then its experts: what left last comes back first
        counts = (*moved.layers, *moved.experts) * n_ranks
        return off_gpus(fewest_of_each(lambda counts: self.lacks(off_gpus(counts)), counts))

    def choice(self, moved: _OffGpu) -> Fitted:
        """As options. A device that is named keeps a layer."""
        options = rank_options(self.inputs.options.placement, len(self.inputs.hosts))
        n_all, layers, experts = self.inputs.info.n_layer + 1, list[int](), list[int]()
        for rank, (each, host) in enumerate(zip(options, self.inputs.hosts, strict=True)):
            n, n_off = each.n_gpu_layers, moved.layers[rank % len(moved.layers)]
            n_on = max(int(bool(each.names or each.servers)), (n_all if n < 0 else min(n, n_all)) - n_off)
            stays = n == 0 or n_off == 0 or (n == AUTO_LAYERS and not host.offloads)
            layers.append(n if stays else n_on)
            n_moe = each.places.n_cpu_moe
            experts.append(n_moe if n_moe < 0 else max(n_moe, moved.experts[rank % len(moved.experts)]))
        lists = tuple(layers) if any(moved.layers) else (), tuple(experts) if any(moved.experts) else ()
        return Fitted(moved.n_ctx, *lists, moved.split, moved.draft_rank)


# -- numbers for which something holds, found in few trials


def largest(holds: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number from `least` to `most` for which it holds, as it does for all below; 0 if it never does."""
    if least > most or not holds(least):
        return 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if holds(middle) else (least, middle - 1)
    return least


def fewest(lacks: Callable[[int], bool], most: int, near: int = 0) -> int | None:
    """The smallest number up to `most` that is enough, as all above it are; None if none is. `lacks`: it is not.
    `near`: where it is expected."""
    low, high = -1, most + 1  # what is too little, and what is enough or too much
    first = iter((near, near - 1, 0, most))
    while high - low > 1:
        n = next((n for n in first if low < n < high), (low + high) // 2)
        low, high = (n, high) if lacks(n) else (low, n)
    return high if high <= most else None


def fewest_of_each(lacks: Callable[[tuple[int, ...]], bool], counts: tuple[int, ...]) -> tuple[int, ...]:
    """One after another each as small as is enough together with the others. `lacks`: as in `fewest`, of all."""
    for at, most in enumerate(counts):
        before, after = counts[:at], counts[at + 1 :]
        n = fewest(lambda n: lacks((*before, n, *after)), most)  # noqa: B023 (it is called at once)
        counts = counts if n is None else (*before, n, *after)
    return counts
