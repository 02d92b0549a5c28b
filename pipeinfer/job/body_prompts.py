"""What requests ask -> prompts in tokens, within the context that there is. Plans and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from pipeinfer.errors import UserError
from pipeinfer.job.chat_format import ChatFormat, open_format
from pipeinfer.job.options import MAX_CTX, RunOptions
from pipeinfer.job.request import GenerationRequest, end_tokens
from pipeinfer.job.request_body import Body
from pipeinfer.models.chat import encode_rendered
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.tokenizer import Tokenizer


class BodyPrompts:
    """`options.chat` must be there: how chats among the requests are asked. `n_ctx`: tokens of one request at most, 0:
    as options and model say. `share`: tokens that a request gets which does not say how many, if there is room."""

    def __init__(
        self, options: RunOptions, info: ModelInfo, tokenizer: Tokenizer, n_ctx: int = 0, share: int = 0
    ) -> None:
        self.options, self.info, self.tokenizer, self.share = options, info, tokenizer, share
        self.n_ctx = n_ctx or min(options.ctx_size or MAX_CTX, info.n_ctx_train)
        self._ends = end_tokens(options, tokenizer)

    @cached_property
    def format(self) -> ChatFormat:
        """Read when the first chat comes. Raises UserError."""
        format = open_format(self.options, self.info, self.tokenizer)
        assert format, "requests without options for their chats"
        return format

    def ask(self, bodies: Sequence[Body]) -> list[GenerationRequest | UserError]:
        """Of each what is to be generated, or what is wrong with it; their chats are rendered together, in a process
        that is started for them. Raises UserError where all chats fail: for files of templates."""
        chats = [body.messages for body in bodies if body.messages]
        rendered = iter(self.format.render_all(chats) if chats else [])
        return [self._or_error(body, next(rendered) if body.messages else None) for body in bodies]

    def _or_error(self, body: Body, rendered: str | UserError | None) -> GenerationRequest | UserError:
        try:
            return self._ask(body, rendered)
        except UserError as error:
            return error

    def _ask(self, body: Body, rendered: str | UserError | None) -> GenerationRequest:
        if isinstance(rendered, UserError):
            raise rendered
        prompt = self._tokens(body, rendered)
        if not prompt:
            raise UserError("the prompt is empty and this model has no beginning-of-text token; give some text")
        n_predict = body.n_predict if body.n_predict >= 0 else max(1, min(self.share, self.n_ctx - len(prompt)))
        n_ctx = len(prompt) + n_predict
        if n_ctx > self.n_ctx:
            source = (
                f"-c {self.n_ctx}" if self.n_ctx == self.options.ctx_size else f"the model's context of {self.n_ctx}"
            )
            raise UserError(f"the prompt has {len(prompt)} tokens, with {n_predict} to come {n_ctx}; "
                            f"{source} holds {self.n_ctx}")  # fmt: skip
        stops = body.stops
        if body.messages:
            stops += self.format.stops[len(self.options.stops) :]
        return GenerationRequest(
            tuple(prompt), n_predict, n_ctx, body.sampling.settled, frozenset() if body.ignore_eos else self._ends,
            stops, markers=bool(body.messages),
        )  # fmt: skip

    def _tokens(self, body: Body, rendered: str | None) -> Sequence[int]:
        if rendered is not None:
            return encode_rendered(self.tokenizer, rendered)
        if isinstance(body.prompt, str):
            return self.tokenizer.encode(body.prompt)
        if max(body.prompt) >= self.tokenizer.n_vocab:
            raise UserError(f"there is no token {max(body.prompt)}; the vocabulary has {self.tokenizer.n_vocab}")
        return body.prompt
