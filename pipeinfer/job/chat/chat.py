"""A chat in one MPI job: rank 0 reads what the user says and prints the answers, all ranks keep their models loaded."""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from pipeinfer.cluster.hosts.cores import Host
from pipeinfer.core.requests import Finish
from pipeinfer.errors import UserError
from pipeinfer.job.chat.history import History
from pipeinfer.job.chat.interrupts import Interrupts
from pipeinfer.job.chat.line_input import Lines, PipedLines
from pipeinfer.job.chat.notes import ChatNotes, Turn
from pipeinfer.job.chat.open_lines import open_lines
from pipeinfer.job.launch.context import CLOCK, Context
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.sections import Output
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.plan_table import show_start
from pipeinfer.job.planning.prepare import ChatSetup, prepare_chat
from pipeinfer.job.planning.prepared import start_prepared
from pipeinfer.job.process.complain import complain
from pipeinfer.job.requests.experiment import ExperimentSettings, experiment_columns
from pipeinfer.job.requests.journal import model_id, open_journal
from pipeinfer.job.requests.printer import Printer
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.session.open_session import open_session
from pipeinfer.job.session.outcome import make_result
from pipeinfer.job.session.session import Generation
from pipeinfer.models.text.grammar_check import TOO_MUCH
from pipeinfer.observe.experiment import digest
from pipeinfer.observe.metrics import speculation, timings
from pipeinfer.observe.progress import ProgressBar
from pipeinfer.observe.report import guessed_text, speed_text, stderr_console
from pipeinfer.observe.texts.json_text import json_text

PROMPT, PROMPT_MORE = "> ", "… "
MORE = "\\"
"""At the end of a line: what is said goes on in the next one."""

STOP = "/stop"
ANSWERED = ""
"""Noted as said where an answer has come to its end, also by `STOP`."""

HELP = {
    "/clear": "begin anew, with the system's message",
    "/regen": "take the newest answer back and answer again, with the next seed",
    STOP: "stop the answer that is coming (on a terminal: Ctrl-C)",
    "/help": "say this",
    "/quit": "end the chat; also /exit, /bye, Ctrl-D",
}
LEAVE = ("/quit", "/exit", "/bye")
INTERRUPTED = 130


def run_chat(options: RunOptions) -> int:
    """`pipeinfer chat`, on every rank; returns the exit code."""
    return start_prepared(options, options, _prepare, _run_head)


@dataclass(frozen=True, slots=True)
class ChatWork:
    """What rank 0 has to do."""

    setup: ChatSetup
    notes: ChatNotes
    settings: ExperimentSettings
    output: Output


def _prepare(options: RunOptions, hosts: Sequence[Host]) -> tuple[JobPlan, ChatWork]:
    plan, setup = prepare_chat(options, hosts)
    asked = replace(setup.request, sampling=replace(setup.request.sampling, seed=options.sampling.seed))
    model = model_id(plan)
    about = digest(
        (asked, options.chat, model[0], options.rounding, *(["special"] if options.special_in_messages else []))
    )
    notes = ChatNotes(open_journal(options.resume, model), about)
    return plan, ChatWork(setup, notes, ExperimentSettings.of(options), options)


def _run_head(context: Context, plan: JobPlan, work: ChatWork) -> int:
    with closing(work.notes.journal):
        return Chat(context, plan, work).run()


class Chat:
    """Rank 0's part of one."""

    def __init__(self, context: Context, plan: JobPlan, work: ChatWork) -> None:
        self.context, self.plan, self.settings, self.output = context, plan, work.settings, work.output
        self.setup, notes = work.setup, work.notes
        self.console = stderr_console()
        self.history, self.notes = History(self.setup.format), notes
        self.sampling = self.setup.request.sampling
        if notes.past:
            self.sampling = replace(self.sampling, seed=notes.past[0].seed)
        self.n_asked = self.n_refused = 0  # turns
        self.interrupts = Interrupts(lambda: self.lines.next_is(STOP))

    def run(self) -> int:
        """Returns the exit code."""
        flag, request = self.context.flag, self.setup.request
        about = f"policy {request.policy.name}, chat, context {request.n_ctx}, seed {self.sampling.seed}"
        brief = f"context {request.n_ctx}, seed {self.sampling.seed}"
        show_start(self.console, self.plan, brief, about, verbose := self.output.verbose)
        opened = open_session(self.context, self.plan, verbose=verbose)
        with opened as self.session, closing(self._open_lines()) as self.lines:
            flag.interrupts = self.interrupts
            code = self._converse()
        if flag.reason:
            complain(flag.reason)
        return flag.exit_code or code

    def _open_lines(self) -> Lines:
        return open_lines(lambda: self.interrupts.left or bool(self.context.flag.reason), self.notes.n_read)

    def _converse(self) -> int:
        """Until the user leaves or the job shall stop. Returns the exit code."""
        for turn in self.notes.past:
            if not self.context.flag.reason:
                self._take_again(turn)
        said = self._read() if self.notes.past or self.setup.first is None else self.setup.first
        while said is not None and said.strip() not in LEAVE:
            self.notes.said(said, self.sampling.seed, self.lines.n_read)
            self._take(said)
            said = None if self.context.flag.reason else self._read()
        if self.interrupts.left:
            return INTERRUPTED
        # a script is told that there is no answer, a user has read why
        return 2 if self.n_refused and not self.n_asked and isinstance(self.lines, PipedLines) else 0

    def _read(self) -> str | None:
        """What the user says next; None when nothing more comes."""
        try:
            with self.interrupts.reading():
                return self._read_lines()
        except UserError as error:
            self.context.flag.note(str(error), 2)
        except KeyboardInterrupt:
            self.console.print()  # the shell's prompt begins on a line of its own
            self.interrupts.left = True
        return None

    def _read_lines(self) -> str | None:
        parts: list[str] = []
        while (line := self.lines.read(PROMPT_MORE if parts else PROMPT)) is not None:
            parts.append(line.removesuffix(MORE))
            if not line.endswith(MORE):
                break
        return "\n".join(parts) if parts and not self.interrupts.left else None

    def _take_again(self, turn: Turn) -> None:
        """A line that was noted; who reads it for the first time is shown it."""
        if turn.n_read < 0 and turn.said and not self.output.json:
            self.console.print(f"{PROMPT}{turn.said}", markup=False, highlight=False, soft_wrap=True)
        self._take(turn.said, turn)

    def _take(self, said: str, turn: Turn | None = None) -> None:
        """A command, or what the model is to answer. `turn`: it was noted."""
        word = said.strip()
        if word == "/clear":
            self.history.clear()
            if not turn:
                self.notes.clear()
        elif word == "/regen":
            self._answer_again(turn)
        elif turn and turn.is_whole and word.startswith("/") and " " not in word:
            pass  # what was said of it was read
        elif word == "/help" or (word.startswith("/") and word not in HELP and " " not in word):
            if word != "/help":
                complain(f"there is no {word}; a text may begin with / if there is a space in it")
            for name, does in HELP.items():
                self.console.print(f"{name:8}{does}", markup=False)
        elif word and word != STOP:
            self._answer(said, turn)

    def _answer_again(self, turn: Turn | None) -> None:
        said = self.history.take_back()
        if said is None:
            complain("/regen: there is no answer to take back")
            return
        self.sampling = replace(self.sampling, seed=(self.sampling.seed + 1) % 2**32)
        if self.sampling.temp <= 0 and not turn:
            complain("/regen: without --temp above 0 the answer is the same")
        self._answer(said, turn)

    def _answer(self, said: str, turn: Turn | None) -> None:
        request = self.setup.request
        try:
            asked = self.history.ask(said, request.n_ctx)
        except UserError as error:
            self.n_refused += 1
            complain(str(error))
            return
        self.n_asked += 1
        n_predict = min(request.n_predict, request.n_ctx - len(asked.tokens))
        request = replace(request, prompt=asked.tokens, spans=asked.spans, n_predict=n_predict, sampling=self.sampling)
        request = self.notes.begin(request, turn)
        printer = Printer(self.context.flag, self.setup.format.tokenizer, request, self.output.json)
        printer.push(request.begun)

        def take(tokens: Sequence[int]) -> bool:
            self.notes.came(tokens)
            return printer.push(tokens)

        progress = ProgressBar(self.console, CLOCK, "prompt", len(request.prompt) - 1, "tokens")
        found = self.session.generate(request, take, progress.update)
        progress.close()
        printer.finish()
        self.history.answered(found.request.tokens, printer.text, whole=not printer.was_cut)
        if not (self.context.flag.reason or (turn and turn.is_whole)):
            self.notes.said(ANSWERED, self.sampling.seed, self.lines.n_read)
        if not (turn and turn.is_whole):
            self._report(found, request, printer.text)
        elif not self.output.json:
            print(flush=True)

    def _report(self, found: Generation, request: GenerationRequest, text: str) -> None:
        if self.output.json:
            result = make_result(text, found, self.plan, experiment_columns(self.plan, request, self.settings))
            print(json_text(result), flush=True)
        elif self.context.flag.reason:
            self.console.print()  # standard output may go on with the answer, in a later job
        else:
            print(flush=True)
        if found.request.finish is Finish.FAILED:
            complain(TOO_MUCH)
        if found.request.finish is Finish.CONTEXT or len(found.request.tokens) >= request.n_ctx:
            complain(f"the context of {request.n_ctx} tokens is full; /clear begins anew, a larger -c holds more")
        figures = timings(found.metrics)
        guessed = guessed_text(speculation(found.metrics))
        self.console.print(f"{speed_text(figures)}{guessed}", style="dim", markup=False, soft_wrap=True)
        for notice in found.metrics.notices:
            complain(notice)
        sys.stderr.flush()
