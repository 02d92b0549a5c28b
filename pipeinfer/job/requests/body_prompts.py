"""Prompts of bodies in tokens, chats by their format, that fit the context. Plans and runs nothing."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import cached_property
from itertools import islice, pairwise

from pipeinfer.core.blocks import Span, common, spans_of, spans_to_continue
from pipeinfer.core.samplers import bias_text, read_biases
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import ContextOverflow, HostFault, UserError
from pipeinfer.job.options.limits import MAX_CTX
from pipeinfer.job.options.text_sections import ContextOptions, TextOptions
from pipeinfer.job.process.streams import complain
from pipeinfer.job.requests.body import Body
from pipeinfer.job.requests.chat_format import ChatFormat, open_format
from pipeinfer.job.requests.request import DEFAULT_CTX, GenerationRequest, check_constraints, end_tokens, settled
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.text.answers import closes_thought, opened_thought
from pipeinfer.models.text.arguments import as_json
from pipeinfer.models.text.chat_template import MIXED, Rendered, encode_rendered
from pipeinfer.models.text.messages import ChatMessage
from pipeinfer.models.text.tokenizer import Tokenizer

WAY_OUT = "say less, or start with a larger -c"
MAX_TURNS = 64  # earlier answers of a conversation whose prompts are rendered too, from the first on


class BodyPrompts:
    """`text.chat` must be set. `n_ctx`: tokens of a request at most, 0: by options and model. `share`: tokens of an
    answer by default. `say`: see `open_format`. `warn`: called once if messages have names of control tokens."""

    def __init__(
        self,
        text: TextOptions,
        context: ContextOptions,
        info: ModelInfo,
        tokenizer: Tokenizer,
        n_ctx: int = 0,
        share: int = 0,
        say: Callable[[str], object] = complain,
    ) -> None:
        self.text, self.info, self.tokenizer, self.share = text, info, tokenizer, share
        self._say, self._has_warned = say, False
        self.warn: Callable[[str], object] = complain
        self.n_ctx = n_ctx or min(context.ctx_size or MAX_CTX, info.n_ctx_train)
        self._ctx_size, self._ends = context.ctx_size, end_tokens(context.ignore_eos, tokenizer)

    @property
    def format(self) -> ChatFormat:
        """Templates see the time of `text`, else that of a day's first chat. Raises UserError."""
        template, now_s = self._opened.template, time.time()
        if not self.text.now_s and date.fromtimestamp(now_s) != date.fromtimestamp(template.now_s):
            self._opened = replace(self._opened, template=replace(template, now_s=now_s))
        return self._opened

    @cached_property
    def _opened(self) -> ChatFormat:
        """Opened for the first chat. Raises UserError."""
        format = open_format(self.text, self.info, self.tokenizer, self._say)
        assert format, "options without chat"
        return format

    def ask(self, bodies: Sequence[Body]) -> list[GenerationRequest | UserError]:
        """A request or an error for each body. All chats are rendered together, in a process that is started for them.
        The grammar of forced calls is not checked yet. Raises UserError for files of templates; HostFault."""
        errors = [self._too_long(body) for body in bodies]
        turns = [[] if error else _turns(body) for body, error in zip(bodies, errors, strict=True)]
        chats = [(turn, body.tools, body.variables) for body, part in zip(bodies, turns, strict=True) for turn in part]
        rendered = iter(self.format.render_all(chats) if chats else [])
        return [
            error or self._or_error(body, list(islice(rendered, len(part))))
            for body, part, error in zip(bodies, turns, errors, strict=True)
        ]

    def _too_long(self, body: Body) -> UserError | None:
        """The error of a conversation that is too long under any template, found before its turns are rendered."""
        messages = body.messages
        if len(messages) > self.n_ctx:
            return ContextOverflow(len(messages), self.n_ctx, f"messages has {len(messages)}; {WAY_OUT}", at_least=True)
        try:
            self.fitting("".join(f"{each.content}{as_json(each.more) if each.more else ''}" for each in messages))
        except UserError as error:
            return error
        return None

    def rendered(self, body: Body) -> Rendered:
        """The prompt of a chat as text, without the bos that is added to a text. Raises UserError."""
        (text,) = self.format.render_all([(_turns(body)[-1], body.tools, body.variables)])
        if isinstance(text, UserError):
            raise text
        bos = self.tokenizer.spelled_out(self.tokenizer.bos) if self.tokenizer.adds_bos else ""
        text = text.since(len(bos)) if text.text.startswith(bos) else text
        return self.format.continued(text, body.messages[-1])[0] if body.continues else text

    def _or_error(self, body: Body, rendered: Sequence[Rendered | UserError]) -> GenerationRequest | UserError:
        try:
            return self._ask(body, rendered)
        except HostFault:
            raise
        except UserError as error:
            return error

    def _ask(self, body: Body, rendered: Sequence[Rendered | UserError]) -> GenerationRequest:
        """`rendered`: the texts of a chat's earlier turns and of the chat; empty for a plain prompt."""
        prompt, thought, has_begun = self._chat(body, rendered[-1]) if rendered else (self._tokens(body), "", True)
        sampling = self._sampling(body)
        check_constraints(sampling, body.ignore_eos, self.tokenizer, "ignore_eos")
        if body.splits and not has_begun:
            sampling = self.format.behind_reasoning(sampling, thought)
        if rendered:
            sampling = self.format.limited(sampling, prompt, thought, *body.reasoning)
        if rendered and (calls := self.format.constraint(body.tools, thought)):
            if body.ignore_eos or sampling.min_tokens:
                name = "ignore_eos" if body.ignore_eos else "min_tokens"
                both = f"{name} goes on behind the end of the text, and tool_choice says what it is"
                raise UserError(f"{both}; leave one of them out")
            sampling = replace(sampling, grammar=calls)
        if not prompt and rendered:
            raise self.format.makes_nothing
        if not prompt:
            raise UserError("the prompt is empty and this model has no beginning-of-text token; give some text")
        n_left = self.n_ctx - len(prompt)
        if n_left < 1:
            raise ContextOverflow(len(prompt), self.n_ctx, self._way_out)
        n_predict = min(max(1, self.share) if body.n_predict < 0 else body.n_predict, n_left)
        earlier = [encode_rendered(self.tokenizer, text) for text in rendered[:-1] if isinstance(text, Rendered)]
        stops = body.stops
        if body.messages:
            stops += self.format.stops[len(self.text.stops) :]
        ends = frozenset() if body.ignore_eos else self._ends
        if max(body.stop_tokens, default=0) >= self.tokenizer.n_vocab:
            raise UserError(f"stop_token_ids has {max(body.stop_tokens)}; the vocabulary has {self.tokenizer.n_vocab}")
        n_ctx, spans = len(prompt) + max(1, n_predict), spans_of_turns([*earlier, prompt]) if earlier else None
        ends |= {*body.stop_tokens}
        request = GenerationRequest(
            tuple(prompt), n_predict, n_ctx, settled(sampling, self.tokenizer), ends, stops, bool(body.messages)
        )
        request = replace(request, adapters=body.adapters, guesses=body.guesses)
        thought_mark = thought if rendered and body.splits else None
        return replace(request, spans=spans, priority=body.priority, thought=thought_mark)

    def _chat(self, body: Body, rendered: Rendered | UserError) -> tuple[list[int], str, bool]:
        """(the tokens of a chat, the text that ends the reasoning that they begin, whether they begin the content)."""
        if isinstance(rendered, UserError):
            raise rendered
        thought = opened_thought(rendered.text)
        if body.continues:
            rendered, thought = self.format.continued(rendered, body.messages[-1])
        self.fitting(rendered.text)
        if rendered.is_mixed and not self._has_warned:
            self._has_warned = True
            self.warn(MIXED)
        has_begun = not thought and (body.continues or closes_thought(rendered.text))
        return encode_rendered(self.tokenizer, rendered), thought, has_begun

    def _sampling(self, body: Body) -> SamplingParams:
        """With the biases of texts as those of their tokens."""
        if not body.text_biases:
            return body.sampling
        ids, values = read_biases(body.sampling.logit_bias)
        pairs = list(zip(map(int, ids), map(float, values), strict=True))
        for text, bias in body.text_biases:
            pairs += [(token, bias) for token in self.tokenizer.encode(self.fitting(text), add_special=False)]
        try:
            return replace(body.sampling, logit_bias=bias_text(pairs))
        except ValueError as error:
            raise UserError(f"logit_bias {error}") from None

    @property
    def _way_out(self) -> str:
        """The limit that a request exceeds, and what to do."""
        is_trained = self.n_ctx == self.info.n_ctx_train
        is_option = self.n_ctx == self._ctx_size
        is_default = not self._ctx_size and self.share == min(self.info.n_ctx_train, DEFAULT_CTX)
        source = f"-c {self.n_ctx}" if is_option else "the model" if is_trained else "the memory of the ranks"
        source = "the context without -c" if is_default and not is_trained else source
        may_grow = self.n_ctx < self.info.n_ctx_most and (is_option or is_trained or is_default)
        more = f", or start with a larger -c, up to {self.info.n_ctx_most}" if may_grow else ""
        return f"{source} holds {self.n_ctx}; shorten it to less than {self.n_ctx}{more}"

    def fitting(self, text: str) -> str:
        """The same text. Raises UserError for one that cannot fit, whose tokens may take minutes."""
        if (n_bytes := len(text.encode("utf-8", "replace"))) > self.n_ctx * self.tokenizer.longest:
            least = -(-n_bytes // self.tokenizer.longest)
            raise ContextOverflow(least, self.n_ctx, f"the prompt has {n_bytes} bytes; {WAY_OUT}", at_least=True)
        return text

    def _tokens(self, body: Body) -> Sequence[int]:
        parses = self.text.parse_special if body.parse_special is None else body.parse_special
        if isinstance(body.prompt, str):
            return self.tokenizer.encode(self.fitting(body.prompt), body.adds_special, parses)
        ids = [part for part in body.prompt if isinstance(part, int)]
        if max(ids, default=0) >= self.tokenizer.n_vocab:
            raise UserError(f"there is no token {max(ids)}; the vocabulary has {self.tokenizer.n_vocab}")
        self.fitting("".join(part for part in body.prompt if isinstance(part, str)))
        tokens = list[int]()
        for at, part in enumerate(body.prompt):
            begins = not at and body.adds_special
            tokens += [part] if isinstance(part, int) else self.tokenizer.encode(part, begins, parses)
        return tokens


def turns_of(messages: Sequence[ChatMessage]) -> list[Sequence[ChatMessage]]:
    """A conversation up to each of its first answers, and all of it."""
    answered = [at for at, message in enumerate(messages) if message.role == "assistant" and at]
    return [messages[:at] for at in answered[:MAX_TURNS]] + ([messages] if messages else [])


def _turns(body: Body) -> list[Sequence[ChatMessage]]:
    """The same of a body, without the beginning of the next answer."""
    return turns_of(body.messages[:-1]) or [()] if body.continues else turns_of(body.messages)


def spans_of_turns(prompts: Sequence[Sequence[int]]) -> tuple[Span, ...]:
    """Block spans of a conversation's last prompt: earlier turns keep theirs, so that cached rows stay valid."""
    spans = spans_of(len(prompts[0]))
    for before, prompt in pairwise(prompts):
        spans = spans_to_continue(spans, len(before) + 1, common(before, prompt), len(prompt))
    return spans
