"""A chat in one MPI job: rank 0 reads lines of the user and prints answers, all ranks keep their models loaded."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

from pipeinfer.cluster.hosts.host import Host
from pipeinfer.core.requests import Finish
from pipeinfer.errors import UserError
from pipeinfer.job.chat.history import CLEAR, ChatNotes, History, Turn
from pipeinfer.job.chat.lines import PipedLines, open_lines
from pipeinfer.job.launch import CLOCK, Context
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.options.text_sections import OutputOptions
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.deploy import deploy
from pipeinfer.job.planning.plan_table import show_start
from pipeinfer.job.planning.prepare import open_job, start_prepared
from pipeinfer.job.process.streams import complain
from pipeinfer.job.requests.chat_format import ChatFormat, contents_of, open_format
from pipeinfer.job.requests.journal import model_id, open_journal
from pipeinfer.job.requests.request import (
    DEFAULT_CTX,
    GenerationRequest,
    end_tokens,
    least_context,
    read_prompt,
    settled,
)
from pipeinfer.job.session.result import ExperimentSettings, experiment_columns, generation_result
from pipeinfer.job.session.session import Generation, open_session
from pipeinfer.models.text.grammar import TOO_MUCH
from pipeinfer.observe.columns import digest
from pipeinfer.observe.figures import speculation, timings
from pipeinfer.observe.report import ProgressBar, guessed_text, speed_text, stderr_console
from pipeinfer.text import json_text

PROMPT, PROMPT_MORE = "> ", "… "
MORE = "\\"  # at the end of a line: the message goes on in the next line
STOP = "/stop"
ANSWERED = ""  # the note at the end of an answer, also of one that was stopped

HELP = {
    CLEAR: "begin anew, with the system's message",
    "/regen": "take the newest answer back and answer again, with the next seed",
    STOP: "stop the answer that is coming (on a terminal: Ctrl-C)",
    "/help": "say this",
    "/quit": "end the chat; also /exit, /bye, Ctrl-D",
}
LEAVE = ("/quit", "/exit", "/bye")
READ = ("/read", "/glob")  # llama-cli's, each with a file's name or a pattern behind it
INTERRUPTED = 130


def run_chat(options: RunOptions) -> int:
    """`pipeinfer chat`, on every rank; returns the exit code."""
    return start_prepared(options, options, _prepare)


def _prepare(options: RunOptions, hosts: Sequence[Host]) -> "tuple[JobPlan, Chat]":
    """Raises UserError for whatever is wrong with options and files, also for a broken template."""
    options, info, drafts, tokenizer = open_job(options)
    text, context, sampling = options.text, options.context, options.sampling
    format = open_format(text, info, tokenizer)
    assert format, "a chat without its options"
    format.template.check()
    first = read_prompt(text) if text.prompt is not None or text.file is not None else None
    n_ctx = context.ctx_size or min(info.n_ctx_train, DEFAULT_CTX)
    ends, n_predict = end_tokens(context.ignore_eos, tokenizer), context.predict if context.predict >= 0 else n_ctx
    request = GenerationRequest(
        (), n_predict, n_ctx, settled(sampling, tokenizer), ends, format.stops, markers=True, keep=True
    )
    request = replace(request, policy=options.speculation.policy)
    plan = deploy(options, hosts, info, drafts, n_ctx, n_ctx, least_context(context, n_ctx, 0))
    as_given = replace(request, sampling=replace(request.sampling, seed=sampling.seed))
    model, further = model_id(plan), ["special"] if text.special_in_messages else []
    if text.reasoning_budget >= 0:
        further.append(f"reasoning {text.reasoning_budget} {text.reasoning_message}")
    further += [f"template {text.template}"] if text.template else []
    chat, source = contents_of(text.chat, lambda: format)
    further += [] if source is None else [f"template-file {source}"]
    key = digest((as_given, chat, model[0], options.numerics.rounding, *further))
    notes = ChatNotes(open_journal(options.output.resume, model, text.now_s), key)
    request = request.within(plan.capacity.n_ctx)
    return plan, Chat(plan, request, format, first, notes, options.output, ExperimentSettings.of(options))


class ChatInterrupts:
    """Ctrl-C in a chat: it stops the answer; a second one, or one at the prompt, ends the job. `is_stopped`: whether
    the user has stopped the answer in another way; called in every wait, so it must be quick."""

    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        self.is_stopped = is_stopped
        self.ends_chat = False
        self._reading = self._stopped = self._due = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within the block a line is read; after it an answer is generated."""
        self._reading = True
        try:
            yield
        finally:
            self._reading = self._stopped = self._due = False

    def interrupt(self, number: int) -> bool:
        """Returns whether the signal is handled here; otherwise the job stops. Called in another thread."""
        if number != signal.SIGINT:
            return False
        if self._reading or self.ends_chat:
            self.ends_chat = True
        elif self._stopped:
            return False
        else:
            self._stopped = self._due = True
        return True

    def stop_requested(self) -> bool:
        """A stop signal of another rank stops the job."""
        return False

    def due(self) -> bool:
        """Whether to stop the answer; True once."""
        if self._reading or not (self._due or self.is_stopped()):
            return False
        self._due, self._stopped = False, True
        return True


class Chat:
    """Rank 0's part. `request`: the settings of all answers, without a prompt. `first`: the first message, if given."""

    def __init__(
        self,
        plan: JobPlan,
        request: GenerationRequest,
        format: ChatFormat,
        first: str | None,
        notes: ChatNotes,
        output: OutputOptions,
        settings: ExperimentSettings,
    ) -> None:
        self.plan, self.request, self.first, self.notes = plan, request, first, notes
        self.output, self.settings = output, settings
        self.console, self.history = stderr_console(), History(format)
        self.sampling = request.sampling
        if notes.past:
            self.sampling = replace(self.sampling, seed=notes.past[0].seed)
        self.n_answered = self.n_refused = 0  # turns
        self.interrupts = ChatInterrupts(lambda: self.lines.next_is(STOP))

    def run(self, context: Context) -> int:
        """Returns the exit code."""
        self.context, flag, request = context, context.flag, self.request
        about = f"policy {request.policy.name}, chat, context {request.n_ctx}, seed {self.sampling.seed}"
        brief = f"context {request.n_ctx}, seed {self.sampling.seed}"
        show_start(self.console, self.plan, brief, about, verbose := self.output.verbose)
        opened = open_session(self.context, self.plan, self.history.format.tokenizer, verbose=verbose)
        leaves = lambda: self.interrupts.ends_chat or bool(flag.reason)  # noqa: E731
        with (
            closing(self.notes.journal),
            opened as self.session,
            closing(open_lines(leaves, self.notes.n_read)) as self.lines,
        ):
            flag.interrupts = self.interrupts
            code = self._converse()
        if flag.reason:
            complain(flag.reason)
        return flag.exit_code or code

    def _converse(self) -> int:
        """Until the user leaves or the job stops. Returns the exit code."""
        for turn in self.notes.past:
            if not self.context.flag.reason:
                self._repeat(turn)
        message = self._read() if self.notes.past or self.first is None else self.first
        while message is not None and message.strip() not in LEAVE:
            self.notes.add(message, self.sampling.seed, self.lines.n_read)
            self._act(message)
            message = None if self.context.flag.reason else self._read()
        if self.interrupts.ends_chat:
            return INTERRUPTED
        # a user has read why there is no answer, a script learns of it by the code
        return 2 if self.n_refused and not self.n_answered and isinstance(self.lines, PipedLines) else 0

    def _read(self) -> str | None:
        try:
            parts: list[str] = []
            with self.interrupts.reading():
                while (line := self.lines.read(PROMPT_MORE if parts else PROMPT)) is not None:
                    parts.append(line.removesuffix(MORE))
                    if not line.endswith(MORE):
                        break
            return "\n".join(parts) if parts and not self.interrupts.ends_chat else None
        except UserError as error:
            self.context.flag.note(str(error), 2)
        except KeyboardInterrupt:
            self.console.print()  # the shell's prompt begins on a line of its own
            self.interrupts.ends_chat = True
        return None

    def _repeat(self, turn: Turn) -> None:
        """Act on a noted message, and show it to a user who has not typed it."""
        if turn.n_read < 0 and turn.message and not self.output.json:
            self.console.print(f"{PROMPT}{turn.message}", markup=False, highlight=False, soft_wrap=True)
        self._act(turn.message, turn)

    def _act(self, message: str, turn: Turn | None = None) -> None:
        """Do a command, or answer a message. `turn`: the note that has it, if any."""
        word = message.strip()
        name, _, rest = word.partition(" ")
        is_command = word.startswith("/") and (not rest or name in READ)
        if word == CLEAR:
            self.history.clear()
            if not turn:
                self.notes.clear()
        elif word == "/regen":
            self._answer_again(turn)
        elif turn and turn.is_whole and is_command:
            pass  # the user has read its result
        elif word == "/help" or (is_command and word not in HELP):
            if name in READ:
                complain(f"there is no {name}; paste the text of files, or give one with -f FILE when the chat starts")
            elif word != "/help":
                complain(f"there is no {word}; a text may begin with / if there is a space in it")
            for command, does in HELP.items():
                self.console.print(f"{command:8}{does}", markup=False)
        elif word and word != STOP:
            self._answer(message, turn)

    def _answer_again(self, turn: Turn | None) -> None:
        message = self.history.take_back()
        if message is None:
            complain("/regen: there is no answer to take back")
            return
        self.sampling = replace(self.sampling, seed=(self.sampling.seed + 1) % 2**32)
        if self.sampling.is_greedy and not turn:
            complain("/regen: without --temp above 0 the answer is the same")
        self._answer(message, turn)

    def _answer(self, message: str, turn: Turn | None) -> None:
        request, is_whole = self.request, bool(turn and turn.is_whole)
        try:
            prompt = self.history.ask(message, request.n_ctx)
        except UserError as error:
            self.n_refused += 1
            complain(str(error))
            return
        self.n_answered += 1
        n_predict = min(request.n_predict, request.n_ctx - len(prompt.tokens))
        request = replace(request, prompt=prompt.tokens, spans=prompt.spans, n_predict=n_predict)
        sampling = self.history.format.limited(self.sampling, prompt.tokens, prompt.thought)
        request = self.notes.begin(replace(request, sampling=sampling), turn)
        progress = ProgressBar(self.console, CLOCK, "prompt", len(request.prompt) - 1, "tokens")
        answer = self.session.generate(request, self.notes.add_output, progress.update, self.output.json)
        progress.close()
        self.history.answered(answer.request.tokens, answer.text, whole=not answer.was_cut)
        if not (self.context.flag.reason or is_whole):
            self.notes.add(ANSWERED, self.sampling.seed, self.lines.n_read)
        if not is_whole:
            self._report(answer, request)
        elif not self.output.json:
            print(flush=True)

    def _report(self, answer: Generation, request: GenerationRequest) -> None:
        if self.output.json:
            columns = experiment_columns(self.plan, request, self.settings)
            print(json_text(generation_result(answer, self.plan, columns, answer.text).data), flush=True)
        elif self.context.flag.reason:
            self.console.print()  # standard output may go on with the answer, in a later job
        else:
            print(flush=True)
        if answer.request.finish is Finish.FAILED:
            complain(TOO_MUCH)
        if answer.request.finish is Finish.CONTEXT or len(answer.request.tokens) >= request.n_ctx:
            complain(f"the context of {request.n_ctx} tokens is full; /clear begins anew, a larger -c holds more")
        figures = timings(answer.metrics)
        guessed = guessed_text(speculation(answer.metrics))
        self.console.print(f"{speed_text(figures)}{guessed}", style="dim", markup=False, soft_wrap=True)
        for notice in answer.metrics.notices:
            complain(notice)
        sys.stderr.flush()
