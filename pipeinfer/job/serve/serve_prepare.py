"""Rank 0 prepares a service before anything loads: what is wrong with its options, what room it has. Runs nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.placement.deployment import Deployment
from pipeinfer.job.placement.model_files import open_models
from pipeinfer.job.planning.prepare import check_outputs, deploy_largest
from pipeinfer.job.process.complain import complain
from pipeinfer.job.requests.chat_format import open_format
from pipeinfer.job.requests.constraints import constrained
from pipeinfer.job.requests.request import DEFAULT_CTX
from pipeinfer.job.serve.front import Front, Setup
from pipeinfer.models.gguf.model_info import ModelInfo
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
    drain_s: float


def prepare_serve(
    asked: ServeOptions, hosts: Sequence[Host], open_front: Callable[[Any, str], Front]
) -> tuple[Deployment, ServeWork]:
    """Raises UserError for whatever is wrong with options and files."""
    options = asked.run
    check_outputs(options)
    info, tokenizer = open_models(options)
    options = constrained(options, tokenizer)
    deployment, n_ctx = deploy_shares(options, hosts, info)
    version = f"{info.fingerprint[:12]}-{options.kept_numerics or deployment.numerics}"
    front = open_front(asked.front, version)
    try:
        _check_format(options, info, tokenizer)
    except BaseException:
        front.close()
        raise
    setup = Setup(options, n_ctx, min(n_ctx, info.n_ctx_train), max(1, n_ctx // options.parallel), version)
    return deployment, ServeWork(front, setup, tokenizer, asked.drain_s)


def _check_format(options: RunOptions, info: ModelInfo, tokenizer: Tokenizer) -> None:
    """The front opens it again: what is wrong with it is said here. A model whose own template is broken
    still completes texts."""
    format = open_format(options, info, tokenizer)
    try:
        if format:
            format.template.check()
    except TemplateFault as fault:
        complain(f"{fault}; until then chats are refused")


def deploy_shares(options: RunOptions, hosts: Sequence[Host], info: ModelInfo) -> tuple[Deployment, int]:
    """With the context in tokens: where -c does not say, a chat's for each of --parallel requests, or as much as fits.

    Raises UserError as `deploy` does.
    """
    one = min(info.n_ctx_train, DEFAULT_CTX)
    n_ctx = options.ctx_size or options.parallel * one
    return deploy_largest(options, hosts, info, n_ctx, one, info.n_ctx_train)
