"""What was said in a chat and what was answered, noted so that a later job goes on with it. Runs nothing.

Each line that was said is a text in the journal. Its key is JSON: a digest of model and options, the supervisor under
which it was said, the bytes of standard input up to it, its number, and the line.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeinfer.cluster.watch.attempts import own_attempt
from pipeinfer.errors import UserError
from pipeinfer.job.requests.journal import WHAT, Journal
from pipeinfer.job.requests.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Turn:
    """A line that was noted. `seed`: of the answer. `tokens`: of the answer, as far as they came. `is_whole`: nothing
    more comes of it. `n_read`: bytes of standard input up to it, which come again; -1 where none do, as another
    supervisor, or none, has started this job."""

    key: str
    said: str
    seed: int
    tokens: Sequence[int]
    is_whole: bool
    n_read: int


class ChatNotes:
    """Appended to as the chat goes on. `past`: what was noted before."""

    def __init__(self, journal: Journal, about: str) -> None:
        """`about`: a digest of model and options. Raises UserError where the notes are of something else."""
        self.journal, self._about = journal, about
        attempt = own_attempt()
        self._under = attempt.job if attempt else ""
        self._key = ""
        noted = [(key, self._read(key), *text) for key, text in journal.texts.items()]
        self.past = [
            Turn(key, said, seed, tuple(tokens), at < len(noted), n_read if under and under == self._under else -1)
            for at, (key, (under, n_read, said), seed, tokens) in enumerate(noted, start=1)
        ]

    @property
    def n_read(self) -> int:
        """Bytes of standard input that were taken before the job was started again."""
        return max(0, self.past[-1].n_read) if self.past else 0

    def said(self, line: str, seed: int, n_read: int) -> None:
        """A new line, before it is taken."""
        words = [self._about, self._under, n_read, len(self.journal.texts), line]
        self._key = json.dumps(words, ensure_ascii=False, separators=(",", ":"))
        self.journal.open(self._key, seed)

    def begin(self, request: GenerationRequest, turn: Turn | None) -> GenerationRequest:
        """The request for an answer. `turn`: which was noted; of a whole one the last token comes again, and no
        more."""
        if not turn:
            return request
        if not turn.is_whole:
            self._key = turn.key
            return replace(self.journal.begin(turn.key, request), sampling=request.sampling)
        self._key = ""
        return replace(request, begun=tuple(turn.tokens[:-1]), n_predict=len(turn.tokens))

    def came(self, tokens: Sequence[int]) -> None:
        """More of the answer."""
        if self._key:
            self.journal.came(self._key, tokens)

    def clear(self) -> None:
        """What was said before the newest line is of no use to a later job."""
        for key in [key for key in self.journal.texts if key != self._key]:
            self.journal.ended(key)

    def _read(self, key: str) -> tuple[str, int, str]:
        """(supervisor, bytes of standard input, line) of a note."""
        try:
            about, under, n_read, _, said = json.loads(key)
        except ValueError:
            about, under, n_read, said = "", "", 0, ""
        if about != self._about:
            raise UserError(f"{WHAT}: the notes are not of this chat: model, -c, -n, template, -r or sampling differ; "
                            "give the same options, or name another file")  # fmt: skip
        return under, n_read, said
