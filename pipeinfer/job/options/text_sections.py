"""Sections of options about texts: the prompt, chats, constraints, lengths, loads of many; and about output. See
`sections`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeinfer.core.settings import setting
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import INT32_MAX, MAX_CTX, MAX_LAYERS, MAX_SEQUENCES
from pipeinfer.job.options.values import LOGIT_BIAS, SIZE, Delay, File, Folder, Listed, Number, TextType, Whole

ESCAPES = r"\n is a new line; so are \t, \r, \', \", \\, and \x with two digits."
MAX_REQUESTS, MIN_RATE, MAX_RATE = 100_000, 1e-6, 1e6
LEAST_CTX = 4096  # tokens, as in llama.cpp
KV_DISK = 10_000_000_000  # bytes a rank where a folder is named and no size
PARALLEL = 32  # the default number of open requests that arrive at a rate, as in a batch
PARALLEL_HELP = (
    "Requests of loads at a time at most, for which there is to be room. [default: the largest --concurrency, with "
    f"--rate {PARALLEL} at least]"
)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The text that is continued, or the first message.

    prompt: The text to continue.
    file: Read the prompt from this file, without a newline at its end; - is standard input.
    """

    heading = "Prompt and chat"
    prompt: str | None = setting(None, "--prompt", "-p", type=TextType(blank=True), first=True)
    file: Path | None = setting(None, "--file", "-f", type=File(stdin=True))


@dataclass(frozen=True, kw_only=True)
class ChatModes:
    """Whether the prompt is continued or answered.

    chat: Ask the model with its chat template, once.
    conversation: Talk with it, turn by turn: `pipeinfer chat`.
    single_turn: The same as --chat, also with -cnv.
    """

    heading = "Prompt and chat"
    chat: bool = setting(False, "--chat")
    conversation: bool = setting(False, "--conversation", "-cnv")
    single_turn: bool = setting(False, "--single-turn", "-st")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """A chat. `variables`: further ones for the template, as the text of a JSON object.

    system: In a chat, what the system says first.
    system_file: The same, from a file.
    template_file: The chat template, in Jinja. [default: the model's own]
    variables: What else the template may look at, as a JSON object: {"enable_thinking": false}.
    """

    heading = "Prompt and chat"
    system: str | None = setting(None, "--system-prompt", "-sys", type=TextType())
    system_file: Path | None = setting(None, "--system-prompt-file", "-sysf", type=File())
    template_file: Path | None = setting(None, "--chat-template-file", type=File())
    variables: str | None = setting(None, "--chat-template-kwargs", type=TextType())


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The spelling of texts on the command line, and the ends of the output.

    parse_special: Names of control tokens in a prompt that is continued, such as <|im_start|>, are text; by default
        they are these tokens. Messages of a chat: see --special-in-messages.
    special_in_messages: Names of control tokens in messages, such as <|im_end|>, are these tokens, as in llama.cpp;
        else text.
    stops: End the text where this stands in it, which is not printed; may be given several times.
    """

    heading = "Prompt and chat"
    escape: bool = setting(True, "--escape/--no-escape", "-e", help=f"In -p, {ESCAPES}")
    parse_special: bool = setting(True, "--no-special", "--no-parse-special")
    special_in_messages: bool = setting(False, "--special-in-messages")
    stops: tuple[str, ...] = setting((), "--reverse-prompt", "--stop", "-r", type=TextType(blank=True), repeated=True)


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How the model is asked in a chat, and how long it may reason.

    template: A built-in template of llama.cpp by its name, such as chatml or llama3, without tools, reasoning and
        variables; or a template in Jinja, as text.
    reasoning_budget: Tokens of reasoning, as in <think>…</think>, after which its end is forced; 0: it ends at once;
        -1: no limit.
    reasoning_message: What is written before an end that is forced.
    """

    heading = "Prompt and chat"
    template: str | None = setting(None, "--chat-template", type=TextType())
    reasoning_budget: int = setting(-1, "--reasoning-budget", least=-1, most=INT32_MAX, column=True)
    reasoning_message: str | None = setting(None, "--reasoning-budget-message", type=TextType(), column=True)


@dataclass(frozen=True, kw_only=True)
class TextOptions(Texts, PromptOptions, AnswerOptions):
    """The prompt, or the chat, and how their texts are read."""

    chat: ChatOptions | None = None
    now_s: float = 0.0  # the time that chat templates see; 0: that of a day's first chat


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOptions:
    """A constraint of the text, one of: a grammar, a JSON schema as text, and the files of either.

    grammar: What the text must be, in llama.cpp's form (GBNF): 'root ::= "yes" | "no"'.
    grammar_file: The same, from a file.
    schema: The text must be JSON that this schema describes; {}: any object.
    schema_file: The same, from a file.
    """

    heading = "Constraints"
    grammar: str | None = setting(None, "--grammar", type=TextType())
    grammar_file: Path | None = setting(None, "--grammar-file", type=File())
    schema: str | None = setting(None, "--json-schema", "-j", type=TextType())
    schema_file: Path | None = setting(None, "--json-schema-file", "-jf", type=File())


@dataclass(frozen=True, kw_only=True)
class Biases:
    """Tokens that are made more or less likely.

    biases: Add this to the logit of a token, as in 15043+1.5, 22-3 or 22-inf (never); may be given several times.
    """

    heading = "Constraints"
    biases: tuple[tuple[int, float], ...] = setting((), "--logit-bias", "-l", type=LOGIT_BIAS, repeated=True)


SAMPLER_FLAGS = ("--samplers", "--sampler-seq", "--sampling-seq")


@dataclass(frozen=True, kw_only=True)
class SamplerTexts:
    """Settings of samplers that are texts.

    sampler_names: Names joined by semicolons, as in top_k;top_p;temperature, or llama.cpp's letters: samplers that are
        not named are off. [default: penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature]

    dry_breakers: A repetition that --dry-multiplier penalises does not reach over this text; may be given several
        times, in place of a new line, : " and *. none: no text does.
    """

    heading = "Sampling"
    sampler_names: str | None = setting(None, *SAMPLER_FLAGS, type=TextType(blank=True))
    dry_breakers: tuple[str, ...] = setting((), "--dry-sequence-breaker", type=TextType(blank=True), repeated=True)


# -- how much


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """What is given up where a plan does not fit. `fitted`: what was chosen for an earlier job that goes on; empty:
    nothing.

    fit: Where the plan does not fit, experts go to their hosts' memory, then layers off GPUs, then the context gets
        smaller; on or off, as in llama.cpp. [default: on without -c, and with -c 0]
    fit_target: MiB that stay free on each GPU and of each host's memory where --fit chooses. [default: 1024, or 5% of
        what is free where that is more]
    fit_ctx: The smallest context that --fit chooses, in tokens, unless what is asked for takes fewer or more.
    """

    heading = "Context and length"
    fitted: str = ""
    fit: bool | None = setting(None, "--fit/--no-fit", "-fit", type=bool)
    fit_target: int | None = setting(None, "--fit-target", "-fitt", type=Whole(0))
    fit_ctx: int = setting(LEAST_CTX, "--fit-ctx", "-fitc", least=1, most=MAX_CTX)


@dataclass(frozen=True, kw_only=True)
class ContextOptions(FitOptions):
    """The length of texts, the context, and the chunks of prompts.

    predict: Tokens to generate; -1 or -2: until the model ends or the context is full.
    ignore_eos: Go on after an end-of-generation token.
    ctx_size: Context in tokens; 0: what the model was trained for. [default: what prompt and -n need, within that]
    batch_size: Prompt tokens a run at most, up to 2048; a prompt is cut into smaller chunks where that fills the
        pipeline.
    kv_disk: Keep keys and values of texts on each rank's disk, up to so much a rank (500M, 20G): a text that begins
        like one of an earlier job goes on from there. [default: 0, or 10G with --kv-dir]
    kv_dir: Where --kv-disk keeps them. [default: pipeinfer/kv in the user's cache folder]
    kv_read_only: Read what --kv-dir has, and write nothing there; several jobs can do so at a time.
    cache_ram: Keep keys and values of texts in each rank's memory until the job ends, up to so many MiB a rank: a text
        that begins like an earlier one goes on from there, also where its cells had to make room for others.
    """

    heading = "Context and length"
    predict: int = setting(-1, "--predict", "--n-predict", "-n", least=-2, first=True)
    ignore_eos: bool = setting(False, "--ignore-eos")
    ctx_size: int | None = setting(None, "--ctx-size", "-c", type=Whole(0, MAX_CTX), first=True, column=True)
    batch_size: int = setting(128, "--batch-size", "-b", least=1, column=True)
    kv_disk: int = setting(0, "--kv-disk", type=SIZE, column=True)
    kv_dir: Path | None = setting(None, "--kv-dir", "--prompt-cache", type=Folder())
    kv_read_only: bool = setting(False, "--kv-read-only", "--prompt-cache-ro", column=True)
    cache_ram: int = setting(0, "--cache-ram", "-cram", least=0, column=True)

    def __post_init__(self) -> None:
        if self.kv_dir and not self.kv_disk:
            object.__setattr__(self, "kv_disk", KV_DISK)

    @property
    def kept_by(self) -> str:
        """The option that keeps cells of texts; empty: none does."""
        return "--kv-disk" if self.kv_disk else "-cram" if self.cache_ram else ""

    @property
    def may_fit(self) -> bool:
        return not self.ctx_size if self.fit is None else self.fit


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Requests that share a job. `parallel`: the most that are open at a time; `n_expected`: the number by which exact
    numerics choose whether rows are computed in groups.

    max_delay_s: Seconds that the tokens of a text may come later because prompts of others are read meanwhile: these
        are cut into chunks that take all stages together so long. chunk: what one of -b tokens takes; none: no limit.
    """

    heading = "Context and length"
    parallel: int = 1
    n_expected: int = 1
    max_delay_s: float = setting(math.inf, "--max-delay", type=Delay(), written="none", column=True)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Speeds elsewhere.

    machines: After the text, how fast so many machines like this one would be on Gigabit Ethernet, as in 1,2,4,8: a
        table of speeds without and with guesses, timed here and simulated there.
    """

    heading = "Output"
    machines: tuple[int, ...] = setting((), "--machines", type=Listed(Whole(1, MAX_LAYERS)))


# -- loads


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Each concurrency and each rate is a load. `parallel`: the most requests that are open at a time.

    concurrencies: Measure loads instead: 1,4,16 is three, of so many clients, each of whom asks for the next text when
        it has one.
    rates: Measure loads instead: 0.5,2 is two, of so many requests a second, which come at random (Poisson).
    requests: Requests of a load. [default: each prompt once, but twice the largest --concurrency at least]
    """

    heading = "Loads"
    concurrencies: tuple[int, ...] = setting((), "--concurrency", type=Listed(Whole(1, MAX_SEQUENCES)))
    rates: tuple[float, ...] = setting((), "--rate", type=Listed(Number(MIN_RATE, MAX_RATE)))
    requests: int | None = setting(None, "--requests", type=Whole(1, MAX_REQUESTS))
    parallel: int | None = setting(None, "--parallel", type=Whole(1, MAX_SEQUENCES), help=PARALLEL_HELP)

    @property
    def most_clients(self) -> int:
        return max(self.concurrencies, default=0)

    def checked(self) -> "Loads":
        """The loads with `parallel` set, 0 if nothing limits it. Raises UserError for a contradiction."""
        check_once("--concurrency", self.concurrencies)
        check_once("--rate", self.rates)
        most = self.most_clients
        parallel = self.parallel or max(most, PARALLEL if self.rates else 0)
        if parallel < most:
            raise UserError(f"--parallel {parallel} is less than --concurrency {most}; leave it out, or raise it")
        if self.requests and self.requests < most:
            reason = f"--requests {self.requests} are fewer than the clients of --concurrency {most}"
            raise UserError(f"{reason}; give {most} at least")
        return replace(self, parallel=parallel)


def check_once(option: str, values: Sequence[object]) -> None:
    """Raises UserError if a value occurs twice: it would be measured twice under one name."""
    twice = [value for value in values if values.count(value) > 1]
    if twice:
        raise UserError(f"{option} has {twice[0]} twice; give it once, -r says how often everything is measured")


# -- output


@dataclass(frozen=True, kw_only=True)
class Records:
    """Files that are written beside the text, and that outlive the job.

    results: Append a row of figures to this CSV file.
    trace: Write the timeline of all ranks, as Chrome trace events.
    resume: Note in this file what comes; where an earlier job noted the same there, go on from it.
    """

    heading = "Output"
    results: Path | None = setting(None, "--results", type=File())
    trace: Path | None = setting(None, "--trace", type=File())
    resume: Path | None = setting(None, "--resume", type=File())


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How the result is printed.

    json: Print one JSON object instead of the text.
    verbose: More about loading and about each rank.
    """

    heading = "Output"
    json: bool = setting(False, "--json")
    verbose: bool = setting(False, "--verbose", "-v")
