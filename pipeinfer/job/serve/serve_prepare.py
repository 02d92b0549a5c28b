"""Rank 0 prepares a service before anything loads: what is wrong with its options, what room it has. Runs nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.core.policy import Policy
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.placement.model_files import open_models
from pipeinfer.job.planning.prepare import check_outputs, deploy_largest
from pipeinfer.job.process.complain import complain
from pipeinfer.job.requests.chat_format import ChatFormat, open_format
from pipeinfer.job.requests.constraints import constrained
from pipeinfer.job.requests.request import DEFAULT_CTX
from pipeinfer.job.serve.front import Front, Setup
from pipeinfer.models.text.chat import TemplateFault
from pipeinfer.models.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """`run`: what holds for all requests, and where one does not say. `front`: a dataclass, the front's settings.
    `drain_s`: how long open requests have when the service shall end."""

    run: RunOptions
    front: Any
    drain_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ServeWork:
    front: Front
    setup: Setup
    tokenizer: Tokenizer
    policy: Policy
    drain_s: float
    verbose: bool


def prepare_serve(
    asked: ServeOptions, hosts: Sequence[Host], open_front: Callable[[Any, str], Front]
) -> tuple[JobPlan, ServeWork]:
    """Raises UserError for whatever is wrong with options and files."""
    options = asked.run
    check_outputs(options)
    info, tokenizer = open_models(options.model, options.drafts_in_use)
    options = constrained(options, tokenizer)
    one = min(info.n_ctx_train, DEFAULT_CTX)  # a chat's
    n_ctx = options.ctx_size or options.parallel * one
    plan = deploy_largest(options, hosts, info, n_ctx, one, info.n_ctx_train)
    n_ctx = plan.capacity.n_ctx
    version = f"{info.fingerprint[:12]}-{plan.text_numerics}"
    front = open_front(asked.front, version)
    try:
        _check_template(open_format(options, info, tokenizer))
    except BaseException:
        front.close()
        raise
    setup = Setup(options, n_ctx, min(n_ctx, info.n_ctx_train), max(1, n_ctx // options.parallel), version)
    return plan, ServeWork(front, setup, tokenizer, options.policy, asked.drain_s, options.verbose)


def _check_template(format: ChatFormat | None) -> None:
    """The front opens it again: what is wrong with it is said here. A model whose own template is broken still
    completes texts."""
    try:
        if format:
            format.template.check()
    except TemplateFault as fault:
        complain(f"{fault}; until then chats are refused")
