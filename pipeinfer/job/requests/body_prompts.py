"""What requests ask -> prompts in tokens, within the context that there is. Plans and runs nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

from pipeinfer.core.kv.blocks import Span, spans_of
from pipeinfer.core.logit_bias import bias_text, read_biases
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.scheduling.prefixes import common, spans_to_continue
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_CTX
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.process.complain import complain
from pipeinfer.job.requests.chat_format import ChatFormat, open_format
from pipeinfer.job.requests.constraints import check_constraints
from pipeinfer.job.requests.request import GenerationRequest, end_tokens
from pipeinfer.job.requests.request_body import Body
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.text.answers import as_json, opened_thought
from pipeinfer.models.text.chat import Message, encode_rendered
from pipeinfer.models.text.literals import MIXED, Rendered
from pipeinfer.models.text.tokenizer import Tokenizer

MAX_TURNS = 64
"""Of a conversation whose ends are looked for, from the first on: the template is rendered once for each."""


class BodyPrompts:
    """`options.chat` must be there: how chats among the requests are asked. `n_ctx`: tokens of one request at most, 0:
    as options and model say. `share`: tokens that a request gets which does not say how many, if there is room.
    `say`: as in `open_format`. `warn`: is told once where names in messages are tokens."""

    def __init__(
        self, options: RunOptions, info: ModelInfo, tokenizer: Tokenizer, n_ctx: int = 0, share: int = 0,
        say: Callable[[str], object] = complain,
    ) -> None:  # fmt: skip
        self.options, self.info, self.tokenizer, self.share = options, info, tokenizer, share
        self._say, self._is_told = say, False
        self.warn: Callable[[str], object] = complain
        self.n_ctx = n_ctx or min(options.ctx_size or MAX_CTX, info.n_ctx_train)
        self._ends = end_tokens(options.ignore_eos, tokenizer)

    @cached_property
    def format(self) -> ChatFormat:
        """Read when the first chat comes. Raises UserError."""
        format = open_format(self.options, self.info, self.tokenizer, self._say)
        assert format, "requests without options for their chats"
        return format

    def ask(self, bodies: Sequence[Body]) -> list[GenerationRequest | UserError]:
        """Of each what is to be generated, or what is wrong with it; their chats are rendered together, in a process
        that is started for them. The grammar of calls that must be made is not checked yet. Raises UserError where all
        chats fail: for files of templates."""
        wrong = [self._too_long(body) for body in bodies]
        conversations = [[] if why else _turns(body) for body, why in zip(bodies, wrong, strict=True)]
        flat = [
            (messages, body.tools, body.variables)
            for body, turns in zip(bodies, conversations, strict=True)
            for messages in turns
        ]
        rendered = iter(self.format.render_all(flat) if flat else [])
        return [
            why or self._or_error(body, list(islice(rendered, len(turns))))
            for body, turns, why in zip(bodies, conversations, wrong, strict=True)
        ]

    def _too_long(self, body: Body) -> UserError | None:
        """What is wrong with a conversation that no template makes short enough. Its turns are rendered one by one."""
        messages = body.messages
        if len(messages) > self.n_ctx:
            return UserError(f"messages has {len(messages)} messages, and a request has {self.n_ctx} tokens at most; "
                             "say less, or start with a larger -c")  # fmt: skip
        try:
            self._fitting("".join(f"{message.content}{_size(message.more)}" for message in messages))
        except UserError as error:
            return error
        return None

    def rendered(self, body: Body) -> Rendered:
        """The text that a chat asks the model with. Raises UserError."""
        (found,) = self.format.render_all([(_turns(body)[-1], body.tools, body.variables)])
        if isinstance(found, UserError):
            raise found
        return self.format.continued(found, body.messages[-1])[0] if body.continues else found

    def _or_error(self, body: Body, rendered: Sequence[Rendered | UserError]) -> GenerationRequest | UserError:
        try:
            return self._ask(body, rendered)
        except UserError as error:
            return error

    def _ask(self, body: Body, rendered: Sequence[Rendered | UserError]) -> GenerationRequest:
        """`rendered`: of a chat its text, after those of its earlier turns."""
        prompt, thought = self._chat(body, rendered[-1]) if rendered else (self._tokens(body), "")
        sampling = self._sampling(body)
        check_constraints(sampling, body.ignore_eos, self.tokenizer, "ignore_eos")
        if rendered and (calls := self.format.constraint(body.tools, thought)):
            if body.ignore_eos:
                raise UserError("ignore_eos goes on behind the end of the text, and tool_choice says what it is; leave "
                                "one of them out")  # fmt: skip
            sampling = replace(sampling, grammar=calls)
        if not prompt and rendered:
            raise self.format.makes_nothing
        if not prompt:
            raise UserError("the prompt is empty and this model has no beginning-of-text token; give some text")
        n_left = self.n_ctx - len(prompt)
        if n_left < 1:
            raise UserError(f"the prompt has {len(prompt)} tokens, and {self._way_out(len(prompt))}")
        n_predict = min(max(1, self.share) if body.n_predict < 0 else body.n_predict, n_left)
        earlier = [encode_rendered(self.tokenizer, text) for text in rendered[:-1] if isinstance(text, Rendered)]
        stops = body.stops
        if body.messages:
            stops += self.format.stops[len(self.options.stops) :]
        ends = frozenset() if body.ignore_eos else self._ends
        if max(body.stop_tokens, default=0) >= self.tokenizer.n_vocab:
            raise UserError(f"stop_token_ids has {max(body.stop_tokens)}; the vocabulary has {self.tokenizer.n_vocab}")
        return GenerationRequest(
            tuple(prompt), n_predict, len(prompt) + max(1, n_predict), sampling.settled, ends | {*body.stop_tokens},
            stops, markers=bool(body.messages), spans=spans_of_turns([*earlier, prompt]) if earlier else None,
            priority=body.priority, thought=thought, policy=self.options.policy,
        )  # fmt: skip

    def _chat(self, body: Body, rendered: Rendered | UserError) -> tuple[list[int], str]:
        """The tokens of a chat, and what ends the reasoning that they begin. Raises UserError."""
        if isinstance(rendered, UserError):
            raise rendered
        thought = opened_thought(rendered.text)
        if body.continues:
            rendered, thought = self.format.continued(rendered, body.messages[-1])
        self._fitting(rendered.text)
        if rendered.is_mixed and not self._is_told:
            self._is_told = True
            self.warn(MIXED)
        return encode_rendered(self.tokenizer, rendered), thought

    def _sampling(self, body: Body) -> SamplingParams:
        """With the biases of texts, of which the tokens are known here."""
        if not body.text_biases:
            return body.sampling
        ids, values = read_biases(body.sampling.logit_bias)
        pairs = list(zip(map(int, ids), map(float, values), strict=True))
        for text, bias in body.text_biases:
            pairs += [(token, bias) for token in self.tokenizer.encode(self._fitting(text), add_special=False)]
        try:
            return replace(body.sampling, logit_bias=bias_text(pairs))
        except ValueError as error:
            raise UserError(f"logit_bias {error}") from None

    def _way_out(self, n_prompt: int) -> str:
        """Of a request that is too long: what holds it up, and what to do."""
        is_trained = self.n_ctx == self.info.n_ctx_train
        given = self.n_ctx == self.options.ctx_size
        source = f"-c {self.n_ctx}" if given else "the model" if is_trained else "the memory of the ranks"
        n_left = self.n_ctx - n_prompt
        less = f"ask for up to {n_left} tokens" if n_left > 0 else f"shorten it to less than {self.n_ctx}"
        more = f", or start with a larger -c, up to {self.info.n_ctx_train}" if given and not is_trained else ""
        return f"{source} holds {self.n_ctx}; {less}{more}"

    def _fitting(self, text: str) -> str:
        """The same text. Raises UserError for one that is too long, which may take a tokenizer minutes."""
        if (n_bytes := len(text.encode("utf-8", "replace"))) > self.n_ctx * self.tokenizer.longest:
            raise UserError(f"the prompt has {n_bytes} bytes and cannot fit the {self.n_ctx} tokens of a request; "
                            "say less, or start with a larger -c")  # fmt: skip
        return text

    def _tokens(self, body: Body) -> Sequence[int]:
        parses = self.options.parse_special if body.parse_special is None else body.parse_special
        if isinstance(body.prompt, str):
            return self.tokenizer.encode(self._fitting(body.prompt), body.adds_special, parses)
        ids = [part for part in body.prompt if isinstance(part, int)]
        if max(ids, default=0) >= self.tokenizer.n_vocab:
            raise UserError(f"there is no token {max(ids)}; the vocabulary has {self.tokenizer.n_vocab}")
        self._fitting("".join(part for part in body.prompt if isinstance(part, str)))
        tokens = list[int]()
        for at, part in enumerate(body.prompt):
            begins = not at and body.adds_special
            tokens += [part] if isinstance(part, int) else self.tokenizer.encode(part, begins, parses)
        return tokens


def _size(more: Mapping[str, Any]) -> str:
    """What a message says beside its text."""
    return as_json(more) if more else ""


def turns_of(messages: Sequence[Message]) -> list[Sequence[Message]]:
    """A conversation as it was when each of its answers was asked for, the first ones of many, and as it is now."""
    answered = [at for at, message in enumerate(messages) if message.role == "assistant" and at]
    return [messages[:at] for at in answered[:MAX_TURNS]] + ([messages] if messages else [])


def _turns(body: Body) -> list[Sequence[Message]]:
    """The same, without the beginning of the next answer."""
    return turns_of(body.messages[:-1]) or [()] if body.continues else turns_of(body.messages)


def spans_of_turns(prompts: Sequence[Sequence[int]]) -> tuple[Span, ...]:
    """Which rows of the last of a conversation's prompts are evaluated in blocks: those of the prompts before it as
    then, so that what is kept of them is as it would be now, and what came since by itself."""
    spans = spans_of(len(prompts[0]))
    for before, prompt in pairwise(prompts):
        spans = spans_to_continue(spans, len(before) + 1, common(before, prompt), len(prompt))
    return spans
