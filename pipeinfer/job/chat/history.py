"""What has been said in a chat, as messages and as tokens: what a further turn costs follows from it. Runs nothing.

The next prompt is the template's text of all messages. Where it begins as what was said, that is taken over token by
token, an answer as the model wrote it: tokenised anew it might be other tokens. Its cells are there and stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeinfer.core.kv.blocks import Span, spans_of
from pipeinfer.core.scheduling.prefixes import common, spans_to_continue
from pipeinfer.errors import UserError
from pipeinfer.job.requests.chat_format import ChatFormat
from pipeinfer.models.text.chat import Message, encode_continuation, encode_rendered
from pipeinfer.models.text.literals import Rendered


@dataclass(frozen=True, slots=True)
class _Segment:
    """A piece of the text so far and its tokens."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """A prompt, and which of its rows come in blocks; see `core.requests`."""

    tokens: tuple[int, ...]
    spans: tuple[Span, ...]


class History:
    """Turns of a user and an assistant. The prompts follow from what was said alone: not from what any rank did."""

    def __init__(self, format: ChatFormat) -> None:
        self.format = format
        self.clear()

    def clear(self) -> None:
        """Begin anew, with the system's message."""
        self.messages: list[Message] = []
        self._segments: list[_Segment] = []
        self._said: Sequence[int] = ()
        self._spans: tuple[Span, ...] = ()

    def ask(self, text: str, n_ctx: int) -> TurnPrompt:
        """The user says this next. Raises UserError, and changes nothing, if the template or the context refuses it."""
        messages = [*self.messages, Message("user", text)]
        segments = self._segments_of(self.format.render(messages))
        tokens = tuple(token for segment in segments for token in segment.tokens)
        if not tokens:
            raise self.format.makes_nothing
        if len(tokens) >= n_ctx:
            raise UserError(f"the conversation has {len(tokens)} tokens with this, the context holds {n_ctx} with the "
                            "answer; say less, begin anew with /clear, or start with a larger -c")  # fmt: skip
        if self._said:
            n_common = common(self._said, tokens)
            self._spans = spans_to_continue(self._spans, len(self._said), n_common, len(tokens))
        else:
            self._spans = spans_of(len(tokens))
        self.messages, self._segments, self._said = messages, segments, tokens
        return TurnPrompt(tokens, self._spans)

    def answered(self, tokens: Sequence[int], text: str, whole: bool) -> None:
        """The assistant has said `text`; `tokens`: of the whole turn, prompt and end token too. `whole`: nothing was
        cut off."""
        self.messages.append(Message("assistant", text))
        n_prompt = len(self._said)
        self._said = tuple(tokens)
        if whole:
            ends = self.format.tokenizer.is_end(tokens[-1]) if len(tokens) > n_prompt else False
            self._segments.append(_Segment(text, self._said[n_prompt : len(tokens) - ends]))

    def take_back(self) -> str | None:
        """Forget the newest question and its answer; the question. None if there is none."""
        asked = [at for at, message in enumerate(self.messages) if message.role == "user"]
        if not asked:
            return None
        text = self.messages[asked[-1]].content
        del self.messages[asked[-1] :]
        return text

    def _segments_of(self, rendered: Rendered) -> list[_Segment]:
        """The pieces of a rendered text: those known as far as it begins with them, and what follows them."""
        known: list[_Segment] = []
        at, text = 0, rendered.text
        for segment in self._segments:
            if not text.startswith(segment.text, at):
                break
            at += len(segment.text)
            known.append(segment)
        tokenizer, rest = self.format.tokenizer, rendered.since(at)
        continued = encode_continuation(tokenizer, rest) if known else None
        if continued is None:
            return [_Segment(text, tuple(encode_rendered(tokenizer, rendered)))]
        return [*known, _Segment(rest.text, tuple(continued))] if rest.text else known
