"""Prompts in tokens: the chat format of a job, by the template of its options or the model's own, and prompts of bodies
that fit the context. Plans and runs nothing."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import islice, pairwise
from typing import Any

from pipeinfer.core.biases import bias_text, read_biases
from pipeinfer.core.blocks import Span, common, spans_of, spans_to_continue
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_CTX
from pipeinfer.job.options.text_sections import ChatOptions, ContextOptions, TextOptions
from pipeinfer.job.process.streams import complain
from pipeinfer.job.requests.body import Body
from pipeinfer.job.requests.request import GenerationRequest, check_constraints, end_tokens, read_text, settled
from pipeinfer.models.gguf.model_info import ModelInfo
from pipeinfer.models.text.answer_forms import THOUGHTS
from pipeinfer.models.text.answers import as_json, opened_thought, unclosed_thought
from pipeinfer.models.text.chat_template import (
    MIXED,
    PLAIN_STOP,
    PLAIN_TEMPLATE,
    ChatMessage,
    ChatTemplate,
    Rendered,
    TemplateFault,
    answer_text,
    encode_rendered,
    orders,
    template_of,
)
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.models.text.tools import AUTO, Tools, calls_grammar, knows_tools, plain_conversation

WAY_OUT = "say less, or start with a larger -c"
MAX_TURNS = 64  # earlier answers of a conversation whose prompts are rendered too, from the first on
Chat = tuple[Sequence[ChatMessage], Tools | None, Mapping[str, Any]]  # messages, tools, other variables of the template

PLAIN = (
    "{path} has no chat template: a plain one is used, with 'User:' and 'Assistant:'; --chat-template-file FILE gives "
    "another"
)


@dataclass(frozen=True)
class ChatFormat:
    """`system`: the system's message before all others. `stops`: texts that end an answer."""

    template: ChatTemplate
    tokenizer: Tokenizer
    system: str | None
    stops: tuple[str, ...]

    @property
    def makes_nothing(self) -> UserError:
        """The error of a chat whose text has no tokens."""
        ways_out = "say something else, or give another with --chat-template-file FILE"
        return UserError(f"{self.template.name} makes no tokens of this; {ways_out}")

    def render(self, messages: Sequence[ChatMessage]) -> Rendered:
        """The text up to the assistant's next answer. Raises UserError as ChatTemplate does."""
        (text,) = self.render_all([(messages, None, {})])
        if isinstance(text, UserError):
            raise text
        if text.is_mixed:
            complain(MIXED)
        return text

    def render_all(self, chats: Sequence[Chat]) -> Sequence[Rendered | UserError]:
        """The text or the error of each chat. Where a template refuses an order of roles, above all the system in mid
        conversation, other orders are tried."""
        messages = [self._with_system(each) for each, *_ in chats]
        if not self.knows_tools:
            messages = [plain_conversation(each, tools) for each, (_, tools, _) in zip(messages, chats, strict=True)]
        variables = [{**more, **({"tools": tools.functions} if tools else {})} for _, tools, more in chats]
        texts = list(self.template.render_all(messages, self.tokenizer, variables))
        for at, fault in enumerate(texts):
            if isinstance(fault, TemplateFault) and not fault.is_broken and (tries := orders(messages[at])):
                again = self.template.render_all(tries, self.tokenizer, [variables[at]] * len(tries))
                texts[at] = next((each for each in again if isinstance(each, Rendered)), fault)
        return texts

    def continued(self, rendered: Rendered, answer: ChatMessage) -> tuple[Rendered, str]:
        """(a prompt followed by the beginning of its answer, as in llama.cpp, the text that ends the reasoning begun by
        then). Reasoning that the prompt begins is closed before a content."""
        source, thought = self.template.source, opened_thought(rendered.text)
        begin = next((each for each, end in THOUGHTS.items() if each in source and end == (thought or end)), "")
        reasoning = str(answer.more.get("reasoning_content", ""))
        parts = [rendered]
        if reasoning and begin:
            parts += [Rendered("" if thought else f"{begin}\n"), self._answer_text(reasoning)]
            thought = THOUGHTS[begin]
        if thought and answer.content:
            parts.append(Rendered(f"\n{thought}\n\n"))
            thought = ""
        if answer.content:
            parts.append(self._answer_text(answer.content))
            thought = unclosed_thought(answer.content)
        return reduce(Rendered.followed_by, parts), thought

    def _answer_text(self, text: str) -> Rendered:
        return answer_text(text, self.tokenizer, self.template.parses_messages)

    @cached_property
    def knows_tools(self) -> bool:
        return knows_tools(self.template.source)

    def constraint(self, tools: Tools | None, thought: str) -> str:
        """The grammar of forced calls; empty where none is forced."""
        is_forced = tools is not None and tools.choice != AUTO
        return calls_grammar(tools, self.template.source, self.tokenizer, thought) if tools and is_forced else ""

    def _with_system(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """With the system's message first, unless there is one."""
        if self.system is None or any(each.role == "system" for each in messages):
            return list(messages)
        return [ChatMessage("system", self.system), *messages]

    def first_prompt(self, text: str) -> list[int]:
        """The tokens of a user's first message. Raises UserError."""
        return encode_rendered(self.tokenizer, self.render([ChatMessage("user", text)]))


def open_format(
    text: TextOptions, info: ModelInfo, tokenizer: Tokenizer, say: Callable[[str], object] = complain
) -> ChatFormat | None:
    """None where the text is no chat. `say`: told if the model has no template. Raises UserError for unreadable
    files and wrong variables. The model's own template is not checked."""
    chat = text.chat
    if chat is None:
        return None
    system = chat.system
    if chat.system_file is not None:
        system = read_text("--system-prompt-file", chat.system_file).removesuffix("\n")
    source, variables = template_of(info.metadata), _variables(chat)
    name, stops = f"the chat template of {info.path}", text.stops
    if chat.template_file is not None:
        name = f"--chat-template-file {chat.template_file}"
        source = read_text("--chat-template-file", chat.template_file)
    elif source is None:
        say(PLAIN.format(path=info.path))
        source, stops = PLAIN_TEMPLATE, (*stops, PLAIN_STOP)
    template = ChatTemplate(source, name, variables, text.special_in_messages)
    if chat.template_file is not None:
        template.check()
    return ChatFormat(template, tokenizer, system, stops)


def _variables(chat: ChatOptions) -> dict[str, Any]:
    if chat.variables is None:
        return {}
    try:
        variables = json.loads(chat.variables)
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        raise UserError(f'--chat-template-kwargs {chat.variables[:80]!r} is not a JSON object; write {{"name": value}}')
    if "messages" in variables:
        raise UserError("--chat-template-kwargs has messages, which are what is said; give other names")
    return variables


# -- bodies


class BodyPrompts:
    """`text.chat` must be set. `n_ctx`: tokens of one request at most, 0: by options and model. `share`: tokens of
    an answer by default, where there is room. `say`: see `open_format`. `warn`: called once if messages have names of
    control tokens."""

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

    @cached_property
    def format(self) -> ChatFormat:
        """Opened for the first chat. Raises UserError."""
        format = open_format(self.text, self.info, self.tokenizer, self._say)
        assert format, "options without chat"
        return format

    def ask(self, bodies: Sequence[Body]) -> list[GenerationRequest | UserError]:
        """A request or an error for each body. All chats are rendered together, in a process that is started for them.
        The grammar of forced calls is not checked yet. Raises UserError for files of templates."""
        errors = [self._too_long(body) for body in bodies]
        turns = [[] if error else _turns(body) for body, error in zip(bodies, errors, strict=True)]
        chats = [(each, body.tools, body.variables) for body, of in zip(bodies, turns, strict=True) for each in of]
        rendered = iter(self.format.render_all(chats) if chats else [])
        return [
            error or self._or_error(body, list(islice(rendered, len(of))))
            for body, of, error in zip(bodies, turns, errors, strict=True)
        ]

    def _too_long(self, body: Body) -> UserError | None:
        """The error of a conversation that is too long under any template, found before its turns are rendered."""
        messages = body.messages
        if len(messages) > self.n_ctx:
            too_many = f"messages has {len(messages)} messages, and a request has {self.n_ctx} tokens at most"
            return UserError(f"{too_many}; {WAY_OUT}")
        try:
            self._fitting("".join(f"{each.content}{as_json(each.more) if each.more else ''}" for each in messages))
        except UserError as error:
            return error
        return None

    def rendered(self, body: Body) -> Rendered:
        """The prompt of a chat as text. Raises UserError."""
        (text,) = self.format.render_all([(_turns(body)[-1], body.tools, body.variables)])
        if isinstance(text, UserError):
            raise text
        return self.format.continued(text, body.messages[-1])[0] if body.continues else text

    def _or_error(self, body: Body, rendered: Sequence[Rendered | UserError]) -> GenerationRequest | UserError:
        try:
            return self._ask(body, rendered)
        except UserError as error:
            return error

    def _ask(self, body: Body, rendered: Sequence[Rendered | UserError]) -> GenerationRequest:
        """`rendered`: the texts of a chat's earlier turns and of the chat; empty for a plain prompt."""
        prompt, thought = self._chat(body, rendered[-1]) if rendered else (self._tokens(body), "")
        sampling = self._sampling(body)
        check_constraints(sampling, body.ignore_eos, self.tokenizer, "ignore_eos")
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
            raise UserError(f"the prompt has {len(prompt)} tokens, and {self._way_out(len(prompt))}")
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
        return replace(request, spans=spans, priority=body.priority, thought=thought, adapters=body.adapters)

    def _chat(self, body: Body, rendered: Rendered | UserError) -> tuple[list[int], str]:
        """(the tokens of a chat, the text that ends the reasoning that they begin)."""
        if isinstance(rendered, UserError):
            raise rendered
        thought = opened_thought(rendered.text)
        if body.continues:
            rendered, thought = self.format.continued(rendered, body.messages[-1])
        self._fitting(rendered.text)
        if rendered.is_mixed and not self._has_warned:
            self._has_warned = True
            self.warn(MIXED)
        return encode_rendered(self.tokenizer, rendered), thought

    def _sampling(self, body: Body) -> SamplingParams:
        """With the biases of texts as those of their tokens."""
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
        """The limit that a request exceeds, and what to do."""
        is_trained = self.n_ctx == self.info.n_ctx_train
        is_option = self.n_ctx == self._ctx_size
        source = f"-c {self.n_ctx}" if is_option else "the model" if is_trained else "the memory of the ranks"
        n_left = self.n_ctx - n_prompt
        less = f"ask for up to {n_left} tokens" if n_left > 0 else f"shorten it to less than {self.n_ctx}"
        more = f", or start with a larger -c, up to {self.info.n_ctx_train}" if is_option and not is_trained else ""
        return f"{source} holds {self.n_ctx}; {less}{more}"

    def _fitting(self, text: str) -> str:
        """The same text. Raises UserError for one that cannot fit, whose tokens may take minutes."""
        if (n_bytes := len(text.encode("utf-8", "replace"))) > self.n_ctx * self.tokenizer.longest:
            too_long = f"the prompt has {n_bytes} bytes and cannot fit the {self.n_ctx} tokens of a request"
            raise UserError(f"{too_long}; {WAY_OUT}")
        return text

    def _tokens(self, body: Body) -> Sequence[int]:
        parses = self.text.parse_special if body.parse_special is None else body.parse_special
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


def turns_of(messages: Sequence[ChatMessage]) -> list[Sequence[ChatMessage]]:
    """A conversation up to each of its first answers, and all of it."""
    answered = [at for at, message in enumerate(messages) if message.role == "assistant" and at]
    return [messages[:at] for at in answered[:MAX_TURNS]] + ([messages] if messages else [])


def _turns(body: Body) -> list[Sequence[ChatMessage]]:
    """The same of a body, without the beginning of the next answer."""
    return turns_of(body.messages[:-1]) or [()] if body.continues else turns_of(body.messages)


def spans_of_turns(prompts: Sequence[Sequence[int]]) -> tuple[Span, ...]:
    """Block spans of a conversation's last prompt: earlier turns keep their spans, so that cached rows stay valid, and
    new rows get their own."""
    spans = spans_of(len(prompts[0]))
    for before, prompt in pairwise(prompts):
        spans = spans_to_continue(spans, len(before) + 1, common(before, prompt), len(prompt))
    return spans
