"""Tokens of an answer -> text on standard output, as it comes. Knows no engine."""

import sys
from collections.abc import Sequence

from pipeinfer.cluster.watch.attempts import own_attempt
from pipeinfer.job.process.stop import StopFlag
from pipeinfer.job.process.streams import exit_code, lost
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.models.text.stop_strings import StopStrings
from pipeinfer.models.text.tokenizer import TextStream, Tokenizer


class Printer:
    """`text`: all that has come. `silent`: nothing is printed. Where nobody reads any more the job shall stop."""

    def __init__(self, flag: StopFlag, tokenizer: Tokenizer, request: GenerationRequest, silent: bool) -> None:
        self.flag, self.silent = flag, silent
        self.text = ""
        self.n_decoded = 0  # characters that have come, those held back and cut off too
        self._ends = request.end_tokens
        self._stream, self._stops = TextStream(tokenizer, request.markers), StopStrings(request.stops)

    @property
    def was_cut(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stops.hit

    @property
    def stop(self) -> str:
        """The stop string that has ended the text; empty if none has."""
        return self._stops.found

    def push(self, tokens: Sequence[int]) -> bool:
        """Whether the text ends here, with a stop string."""
        text = "".join(self._stream.push(token) for token in tokens if token not in self._ends)
        self.n_decoded += len(text)
        self._print(self._stops.push(text))
        return self._stops.hit

    def finish(self) -> None:
        """Print what was held back, unless the text may go on in a later job of a supervisor."""
        if self.flag.reason and own_attempt():
            return
        self._print(self._stops.push(self._stream.flush()) + self._stops.flush())

    def _print(self, text: str) -> None:
        self.text += text
        if self.silent:
            return
        sys.stdout.write(text)
        sys.stdout.flush()
        if error := lost(sys.stdout):
            self.flag.set("standard output is lost", exit_code(error))  # the next wait ends the request
