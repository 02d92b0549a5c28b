"""The history of a chat, as messages and as tokens, the next prompt, and notes in a journal from which a later job
continues it. Runs nothing.

The next prompt is the template's text of all messages. Where it begins like the text so far, it has the tokens of that
text, an answer as the model wrote it: tokenised anew it might be other tokens, whose cells are not cached.

Each message is a text in the journal. Its key is JSON: a digest of model and options, the supervisor of the job, the
bytes of standard input up to the message, its number, and the message.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeinfer.core.blocks import Span, common, spans_of, spans_to_continue
from pipeinfer.errors import UserError
from pipeinfer.job.process.supervised import own_attempt
from pipeinfer.job.requests.chat_format import ChatFormat
from pipeinfer.job.requests.journal import WHAT, Journal
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.models.text.answers import opened_thought
from pipeinfer.models.text.chat_template import Rendered, encode_continuation, encode_rendered
from pipeinfer.models.text.messages import ChatMessage

CLEAR = "/clear"


@dataclass(frozen=True, slots=True)
class _Segment:
    """A piece of the text so far and its tokens."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """A prompt, and its rows in blocks. `thought`: the text that ends the reasoning that it begins."""

    tokens: tuple[int, ...]
    spans: tuple[Span, ...]
    thought: str


class History:
    """Turns of a user and an assistant. Prompts follow from the messages alone, not from what is cached."""

    def __init__(self, format: ChatFormat) -> None:
        self.format = format
        self.clear()

    def clear(self) -> None:
        """Start again with the system's message."""
        self.messages: list[ChatMessage] = []
        self._segments: list[_Segment] = []
        self._tokens: Sequence[int] = ()
        self._spans: tuple[Span, ...] = ()

    def ask(self, text: str, n_ctx: int) -> TurnPrompt:
        """The prompt for the next message. Raises UserError, and changes nothing, if template or context refuse it."""
        messages = [*self.messages, ChatMessage("user", text)]
        rendered = self.format.render(messages)
        segments = self._segments_of(rendered)
        tokens = tuple(token for segment in segments for token in segment.tokens)
        if not tokens:
            raise self.format.makes_nothing
        if len(tokens) >= n_ctx:
            too_long = f"the conversation has {len(tokens)} tokens with this, the context holds {n_ctx} with the answer"
            raise UserError(f"{too_long}; say less, begin anew with /clear, or start with a larger -c")
        if self._tokens:
            n_common = common(self._tokens, tokens)
            self._spans = spans_to_continue(self._spans, len(self._tokens), n_common, len(tokens))
        else:
            self._spans = spans_of(len(tokens))
        self.messages, self._segments, self._tokens = messages, segments, tokens
        return TurnPrompt(tokens, self._spans, opened_thought(rendered.text))

    def answered(self, tokens: Sequence[int], text: str, whole: bool) -> None:
        """Add an answer. `tokens`: of the whole turn, with prompt and end token. `whole`: nothing was cut off."""
        self.messages.append(ChatMessage("assistant", text))
        n_prompt = len(self._tokens)
        self._tokens = tuple(tokens)
        if whole:
            ends = self.format.tokenizer.is_end(tokens[-1]) if len(tokens) > n_prompt else False
            self._segments.append(_Segment(text, self._tokens[n_prompt : len(tokens) - ends]))

    def take_back(self) -> str | None:
        """Remove the newest question and its answer. Returns the question; None if there is none."""
        questions = [at for at, message in enumerate(self.messages) if message.role == "user"]
        if not questions:
            return None
        text = self.messages[questions[-1]].content
        del self.messages[questions[-1] :]
        return text

    def _segments_of(self, rendered: Rendered) -> list[_Segment]:
        """The pieces of a rendered text: earlier ones as far as it begins with them, and the rest."""
        earlier: list[_Segment] = []
        at, text = 0, rendered.text
        for segment in self._segments:
            if not text.startswith(segment.text, at):
                break
            at += len(segment.text)
            earlier.append(segment)
        tokenizer, rest = self.format.tokenizer, rendered.since(at)
        continued = encode_continuation(tokenizer, rest) if earlier else None
        if continued is None:
            return [_Segment(text, tuple(encode_rendered(tokenizer, rendered)))]
        return [*earlier, _Segment(rest.text, tuple(continued))] if rest.text else earlier


@dataclass(frozen=True, slots=True)
class Turn:
    """A noted message. `seed`, `tokens`: of the answer so far, which `is_whole` if it has ended. `n_read`: bytes of
    standard input up to the message, which come again; -1: another supervisor, or none, has started this job."""

    key: str
    message: str
    seed: int
    tokens: Sequence[int]
    is_whole: bool
    n_read: int


class ChatNotes:
    """Grows with the chat. `past`: the turns that an earlier job has noted."""

    def __init__(self, journal: Journal, chat_digest: str) -> None:
        """`chat_digest`: of model and options. Raises UserError if the notes are of another chat."""
        self.journal, self._digest = journal, chat_digest
        attempt = own_attempt()
        self._job = attempt.job if attempt else ""
        self._key = ""
        noted = [(key, self._read(key), *text) for key, text in journal.texts.items()]
        clears = [at for at, (_, (job, _, text), *_) in enumerate(noted) if text.strip() == CLEAR and job != self._job]
        first = clears[-1] if clears else 0
        self._forget([key for key, *_ in noted[:first]])
        noted = noted[first:]
        self.past = [
            Turn(key, message, seed, tuple(tokens), at < len(noted), n_read if job and job == self._job else -1)
            for at, (key, (job, n_read, message), seed, tokens) in enumerate(noted, start=1)
        ]

    @property
    def n_read(self) -> int:
        """Bytes of standard input that were read before the job was restarted."""
        return max(0, self.past[-1].n_read) if self.past else 0

    def add(self, message: str, seed: int, n_read: int) -> None:
        """Note a new message before it is answered."""
        words = [self._digest, self._job, n_read, len(self.journal.texts), message]
        self._key = json.dumps(words, ensure_ascii=False, separators=(",", ":"))
        self.journal.open(self._key, seed)

    def begin(self, request: GenerationRequest, turn: Turn | None) -> GenerationRequest:
        """The request for an answer. `turn`: its note, if any; of a whole answer the last token alone is generated."""
        if not turn:
            return request
        if not turn.is_whole:
            self._key = turn.key
            return replace(self.journal.begin(turn.key, request), sampling=request.sampling)
        self._key = ""
        return replace(request, begun=tuple(turn.tokens[:-1]), n_predict=len(turn.tokens))

    def add_output(self, tokens: Sequence[int]) -> None:
        """Note further tokens of the answer."""
        if self._key:
            self.journal.add_output(self._key, tokens)

    def clear(self) -> None:
        """Remove all notes before the newest message; not those of a supervised job, whose next attempt prints all that
        this one has printed."""
        if not self._job:
            self._forget([key for key in self.journal.texts if key != self._key])

    def _forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.journal.end(key)

    def _read(self, key: str) -> tuple[str, int, str]:
        """(supervisor, bytes of standard input, message) of a note."""
        try:
            chat_digest, job, n_read, _, message = json.loads(key)
        except ValueError:
            chat_digest, job, n_read, message = "", "", 0, ""
        if chat_digest != self._digest:
            others = "the notes are not of this chat: model, -sys, -c, -n, template, -r, sampling or --numerics differ"
            raise UserError(f"{WHAT}: {others}; give the same options, or name another file")
        return job, n_read, message
