"""What is asked of loaded models: a prompt, how it is to be continued, and whether that fits into the context. Loads
nothing and plans nothing."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from pipeinfer.core.kv.blocks import Span
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Request
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_CTX, STDIN
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.text_sections import Prompt
from pipeinfer.job.process.limited import read_limited
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.policies import Iterative

DEFAULT_CTX = 4096
BYTE_ORDER_MARK = "\ufeff"
"""What some editors begin UTF-8 with; it is no text."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One text to generate. Only rank 0 needs to know it: the others learn what they need with the runs."""

    prompt: tuple[int, ...]
    n_predict: int
    """0: the prompt is read, and kept."""
    n_ctx: int
    sampling: SamplingParams
    end_tokens: frozenset[int]
    stops: tuple[str, ...] = ()
    """Texts that end the generation where they stand in it."""

    markers: bool = False
    """Control tokens are part of the text, as in a chat."""

    spans: tuple[Span, ...] | None = None
    """Rows of the prompt in blocks, see `core.requests`."""

    keep: bool = False
    """Its cells stay for one that begins with the same tokens."""

    priority: int = 0
    """See `core.requests`."""

    begun: tuple[int, ...] = ()
    """See `core.requests`."""

    thought: str = ""
    """What ends the reasoning that the prompt begins."""

    policy: Policy = field(default_factory=Iterative, repr=False)
    """No part of what names a request: the text is the same under every policy."""

    def open(self, id: int) -> Request:
        """Its state in an engine."""
        return Request(
            id, self.prompt, self.n_predict, self.sampling, self.n_ctx, self.end_tokens, self.spans, self.keep,
            self.priority, self.begun,
        )  # fmt: skip


def make_request(
    options: RunOptions, info: ModelInfo, tokenizer: Tokenizer, prompt: Sequence[int], n_most: int = 0
) -> GenerationRequest:
    """`n_most`: tokens of the longest prompt that the same context shall hold. Raises UserError when it does not."""
    n_ctx, n_predict = fit_context(options.ctx_size, options.predict, info, max(n_most, len(prompt)))
    return GenerationRequest(
        tuple(prompt), n_predict, n_ctx, options.sampling.settled, end_tokens(options.ignore_eos, tokenizer),
        options.stops, markers=options.chat is not None, policy=options.policy,
    )  # fmt: skip


def end_tokens(ignore_eos: bool, tokenizer: Tokenizer) -> frozenset[int]:
    """Those that end a generation."""
    return frozenset() if ignore_eos else frozenset(tokenizer.ends)


def read_prompt(options: Prompt) -> str:
    if options.prompt is not None and options.file is None:
        return options.prompt
    if options.prompt is not None or options.file is None:
        raise UserError("give the prompt with -p TEXT or with -f FILE (- is standard input), one of them")
    if options.file == STDIN and sys.stdin is None:
        raise UserError("--file -: standard input is closed; give the prompt with -p, or name a file")
    return read_text("--file", options.file).removesuffix("\n")


def read_text(option: str, path: Path) -> str:
    """A whole file, or standard input. Raises UserError, which names the option."""
    try:
        with nullcontext(sys.stdin.buffer) if path == STDIN else path.open("rb") as file:
            return read_limited(file, f"{option} {path}").decode().removeprefix(BYTE_ORDER_MARK)
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{option} {path} is not UTF-8 text (byte {error.start})") from None


def check_trained(info: ModelInfo, n_prompt: int, n_predict: int) -> None:
    """What is measured on a text says nothing where the model was not trained for its length. Raises UserError."""
    left = info.n_ctx_train - n_prompt
    if n_predict > left:
        way_out = f"use -n {left} at most" if left > 0 else "give a shorter text"
        raise UserError(
            f"-n {n_predict} after a text of {n_prompt} tokens is more than the {info.n_ctx_train} that "
            f"{info.path} was trained for; {way_out}"
        )


def fit_context(ctx_size: int, predict: int, info: ModelInfo, n_prompt: int) -> tuple[int, int]:
    """(context size, tokens to generate), both final; `ctx_size`, `predict`: as the options have them. Raises UserError
    when they do not fit."""
    limit = ctx_size or min(info.n_ctx_train, MAX_CTX)
    source = f"-c {limit}" if ctx_size else f"the model's context of {limit}"
    way_out = "raise -c" if ctx_size else "give -c to go beyond what it was trained for"
    if n_prompt >= limit:
        raise UserError(f"the prompt has {n_prompt} tokens, {source} holds {limit} with the text to come; {way_out}")
    if predict < 0:
        n_ctx = ctx_size or min(limit, max(DEFAULT_CTX, 2 * n_prompt))
        return n_ctx, n_ctx - n_prompt
    if n_prompt + predict > limit:
        raise UserError(
            f"-n {predict} would be cut: {source} leaves {limit - n_prompt} tokens "
            f"after the {n_prompt} of the prompt; "
            f"use -n {limit - n_prompt} at most, or {way_out}"
        )
    return ctx_size or n_prompt + predict, predict
