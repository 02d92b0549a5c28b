"""What a benchmark of loads measures: every combination of models, policies, lengths and loads. Plans and checks; runs
nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UserError
from pipeinfer.job.bench.sweep import Key, Sweep, variants_of
from pipeinfer.job.options.loads import Loads
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deployment import Deployment, deploy
from pipeinfer.job.placement.model_files import open_models
from pipeinfer.job.requests.asked import asked_of
from pipeinfer.job.requests.conversation import first_turns
from pipeinfer.job.requests.request import GenerationRequest, make_request
from pipeinfer.observe.experiment import digest
from pipeinfer.observe.load_columns import LOADS
from pipeinfer.observe.table import Record
from pipeinfer.virtual.load import arrivals_s

SEED_END = 2**32


@dataclass(frozen=True, slots=True)
class LoadSweep:
    """All that is to be combined."""

    sweep: Sweep
    loads: Loads


@dataclass(frozen=True, slots=True)
class LoadCase:
    """One load to measure. `concurrency` 0: its requests come at a `rate`. `prompt`: whose texts they continue."""

    options: RunOptions
    requests: tuple[GenerationRequest, ...]
    prompt: str
    concurrency: int
    rate: float
    repetition: int

    @property
    def seed(self) -> int:
        return self.requests[0].sampling.seed

    def arrivals_s(self) -> list[float]:
        """When its requests come, from the first one on, where clients do not say."""
        return arrivals_s(len(self.requests), self.rate, self.seed)

    def asked(self, deployment: Deployment) -> Record:
        """The columns that say what is asked."""
        first = self.requests[0]
        tokens = [request.prompt for request in self.requests]
        row = asked_of(deployment, first, self.options, self.prompt, digest(tokens), self.repetition)
        load = {"n_requests": len(tokens), "predict": first.n_predict, "concurrency": self.concurrency,
                "rate": math.nan if self.concurrency else self.rate, "parallel": self.options.parallel}  # fmt: skip
        return {name: value for name, value in row.items() if name in LOADS.asked} | load


@dataclass(frozen=True, slots=True)
class LoadGroup:
    """Loads that share the loaded models. `n_ctx`: tokens of all requests that are open at a time."""

    options: RunOptions
    deployment: Deployment
    cases: tuple[LoadCase, ...]
    n_ctx: int

    def without(self, known: Set[Key]) -> LoadGroup:
        """The same with the loads that are not `known`."""
        left = [case for case in self.cases if LOADS.key_of(LOADS.as_read(case.asked(self.deployment))) not in known]
        return replace(self, cases=tuple(left))


def n_requests(loads: Loads, n_prompts: int) -> int:
    """Of a load: every prompt once, but twice the largest concurrency at least, where --requests does not say."""
    return loads.requests or max(n_prompts, 2 * loads.most_clients)


def load_group(
    options: RunOptions, policies: Sequence[Policy], sweep: Sweep, hosts: Sequence[Host], loads: Loads
) -> LoadGroup:
    """What is measured of some policies on what they share. Raises UserError for what does not fit."""
    info, tokenizer = open_models(options)
    asked = first_turns(sweep.prompts, n_requests(loads, len(sweep.prompts)), tokenizer, sweep.cut)
    n_predict, n_prompt = max(sweep.predicts), max(map(len, asked))
    request = make_request(replace(options, predict=n_predict, ctx_size=0), info, tokenizer, asked[0], n_prompt)
    n_ctx = options.ctx_size or min(len(asked), options.parallel) * (n_prompt + n_predict)
    _check_room(options, n_ctx, n_prompt + n_predict, loads)
    deployment = deploy(options, hosts, info, n_ctx, n_prompt)
    name = "+".join(dict.fromkeys(prompt.name.partition("/")[0] for prompt in sweep.prompts))
    points = [(count, math.nan) for count in loads.concurrencies] + [(0, rate) for rate in loads.rates]
    cases = tuple(
        LoadCase(chosen, _requests(request, asked, n, repetition), name, *point, repetition)
        for repetition in range(1, sweep.repetitions + 1)
        for n in sweep.predicts
        for point in points
        for chosen in variants_of(options, policies, sweep.ablations)
    )
    return LoadGroup(options, deployment, cases, n_ctx)


def _requests(
    like: GenerationRequest, prompts: Sequence[tuple[int, ...]], n_predict: int, repetition: int
) -> tuple[GenerationRequest, ...]:
    """One for each prompt, each with the seed after that of the one before it; a repetition has other seeds."""
    first = like.sampling.seed + (repetition - 1) * len(prompts)
    return tuple(
        replace(
            like, prompt=prompt, n_predict=n_predict, n_ctx=len(prompt) + n_predict,
            sampling=replace(like.sampling, seed=(first + number) % SEED_END),
        )
        for number, prompt in enumerate(prompts)
    )  # fmt: skip


def _check_room(options: RunOptions, n_ctx: int, longest: int, loads: Loads) -> None:
    """Raises UserError where not as many could be open as clients ask."""
    most = max(loads.concurrencies, default=1)
    if n_ctx < most * longest:
        clients = f"{most} requests" if most > 1 else "a request"
        raise UserError(f"-c {options.ctx_size} has no room for {clients} of up to {longest} tokens, prompt and text; "
                        f"use -c {most * longest}, or leave it out")  # fmt: skip
