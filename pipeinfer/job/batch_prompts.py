"""A batch's requests -> prompts in tokens, in the order of the file and some at a time. Plans and runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from pipeinfer.errors import UserError
from pipeinfer.job.batch_file import BatchRequest
from pipeinfer.job.chat_format import ChatFormat, open_format
from pipeinfer.job.options import MAX_CTX, RunOptions
from pipeinfer.job.request import GenerationRequest, end_tokens
from pipeinfer.models.chat import encode_rendered
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.tokenizer import Tokenizer

N_AT_ONCE = 64
"""Requests whose templates are rendered together: a process is started for them."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that can be asked, or what is wrong with it."""

    request: BatchRequest
    asked: GenerationRequest | UserError


class BatchPrompts:
    """`options.chat` must be there: how chats among the requests are asked."""

    def __init__(self, options: RunOptions, info: ModelInfo, tokenizer: Tokenizer) -> None:
        self.options, self.info, self.tokenizer = options, info, tokenizer
        self.n_ctx = min(options.ctx_size or MAX_CTX, info.n_ctx_train)
        self._ends = end_tokens(options, tokenizer)

    @cached_property
    def format(self) -> ChatFormat:
        """Read when the first chat comes. Raises UserError."""
        format = open_format(self.options, self.info, self.tokenizer)
        assert format, "a batch without options for its chats"
        return format

    def of(self, requests: Iterable[BatchRequest]) -> Iterator[Ready]:
        """Each of them, some at a time. Raises UserError where all chats fail: for files of templates."""
        rest = iter(requests)
        while group := list(islice(rest, N_AT_ONCE)):
            yield from self._of_group(group)

    def _of_group(self, group: Sequence[BatchRequest]) -> Iterator[Ready]:
        chats = [request for request in group if request.messages]
        texts = self.format.render_all([request.messages for request in chats]) if chats else []
        rendered = {request.index: text for request, text in zip(chats, texts, strict=True)}
        for request in group:
            try:
                yield Ready(request, self._ask(request, rendered.get(request.index)))
            except UserError as error:
                yield Ready(request, error)

    def _ask(self, request: BatchRequest, rendered: str | UserError | None) -> GenerationRequest:
        if isinstance(rendered, UserError):
            raise rendered
        prompt = self._tokens(request, rendered)
        if not prompt:
            raise UserError("the prompt is empty and this model has no beginning-of-text token; give some text")
        n_ctx = len(prompt) + request.n_predict
        if n_ctx > self.n_ctx:
            source = (
                f"-c {self.n_ctx}" if self.n_ctx == self.options.ctx_size else f"the model's context of {self.n_ctx}"
            )
            raise UserError(f"the prompt has {len(prompt)} tokens, with {request.n_predict} to come {n_ctx}; "
                            f"{source} holds {self.n_ctx}")  # fmt: skip
        stops = request.stops
        if request.messages:
            stops += self.format.stops[len(self.options.stops) :]
        return GenerationRequest(
            tuple(prompt), request.n_predict, n_ctx, request.sampling.settled,
            frozenset() if request.ignore_eos else self._ends, stops, markers=bool(request.messages),
        )  # fmt: skip

    def _tokens(self, request: BatchRequest, rendered: str | None) -> Sequence[int]:
        if rendered is not None:
            return encode_rendered(self.tokenizer, rendered)
        if isinstance(request.prompt, str):
            return self.tokenizer.encode(request.prompt)
        if max(request.prompt) >= self.tokenizer.n_vocab:
            raise UserError(f"there is no token {max(request.prompt)}; the vocabulary has {self.tokenizer.n_vocab}")
        return request.prompt
