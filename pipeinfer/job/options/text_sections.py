"""Sections of options about texts: the prompt, chats, constraints, lengths. See `sections`."""

import math
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.core.settings import setting
from pipeinfer.job.options.limits import MAX_CTX
from pipeinfer.job.options.values import LOGIT_BIAS, Delay, File, Text


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The text that is continued, or what is said first."""

    heading = "Prompt and chat"
    prompt: str | None = setting(
        None, "--prompt", "-p", type=Text(blank=True), first=True, help="The text to continue."
    )
    file: Path | None = setting(
        None, "--file", "-f", type=File(stdin=True),
        help="Read the prompt from this file, without a newline at its end; - is standard input.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Whether the prompt is continued or answered."""

    heading = "Prompt and chat"
    chat: bool = setting(False, "--chat", help="Ask the model with its chat template, once.")
    conversation: bool = setting(False, "--conversation", "-cnv", help="Talk with it, turn by turn: `pipeinfer chat`.")
    single_turn: bool = setting(False, "--single-turn", "-st", help="The same as --chat, also with -cnv.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How the model is talked to. `variables`: further ones for the template, as the text of a JSON object."""

    heading = "Prompt and chat"
    system: str | None = setting(
        None, "--system-prompt", "-sys", type=Text(), help="In a chat, what the system says first."
    )
    system_file: Path | None = setting(
        None, "--system-prompt-file", "-sysf", type=File(), help="The same, from a file."
    )
    template_file: Path | None = setting(
        None, "--chat-template-file", type=File(), help="The chat template, in Jinja. [default: the model's own]"
    )
    variables: str | None = setting(
        None, "--chat-template-kwargs", type=Text(),
        help='What else the template may look at, as a JSON object: {"enable_thinking": false}.',
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Texts:
    """How texts on the command line are written, and what ends the output."""

    heading = "Prompt and chat"
    escape: bool = setting(
        True, "--escape/--no-escape", "-e",
        help=r"In -p, \n is a new line; so are \t, \r, \', \", \\, and \x with two digits.",
    )  # fmt: skip
    parse_special: bool = setting(
        True, "--no-special", "--no-parse-special",
        help="Names of control tokens in a prompt that is continued, such as <|im_start|>, are text; by default they "
        "are these tokens. Messages of a chat: see --special-in-messages.",
    )  # fmt: skip
    special_in_messages: bool = setting(
        False, "--special-in-messages",
        help="Names of control tokens in messages, such as <|im_end|>, are these tokens, as in llama.cpp; else text.",
    )  # fmt: skip
    stops: tuple[str, ...] = setting(
        (), "--reverse-prompt", "--stop", "-r", type=Text(blank=True), repeated=True,
        help="End the text where this stands in it, which is not printed; may be given several times.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOptions:
    """What the text must be, as one of: a grammar, a JSON schema as text, and the files of either."""

    heading = "Constraints"
    grammar: str | None = setting(
        None, "--grammar", type=Text(),
        help="What the text must be, in llama.cpp's form (GBNF): 'root ::= \"yes\" | \"no\"'.",
    )  # fmt: skip
    grammar_file: Path | None = setting(None, "--grammar-file", type=File(), help="The same, from a file.")
    schema: str | None = setting(
        None, "--json-schema", "-j", type=Text(),
        help="The text must be JSON that this schema describes; {}: any object.",
    )  # fmt: skip
    schema_file: Path | None = setting(None, "--json-schema-file", "-jf", type=File(), help="The same, from a file.")


@dataclass(frozen=True, kw_only=True)
class Biases:
    """Single tokens that are wanted more or less."""

    heading = "Constraints"
    biases: tuple[tuple[int, float], ...] = setting(
        (), "--logit-bias", "-l", type=LOGIT_BIAS, repeated=True,
        help="Add this to the logit of a token, as in 15043+1.5, 22-3 or 22-inf (never); may be given several times.",
    )  # fmt: skip


# -- how much


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a text gets."""

    heading = "Context and length"
    predict: int = setting(
        -1, "--predict", "--n-predict", "-n", least=-2, first=True,
        help="Tokens to generate; -1 or -2: until the model ends or the context is full.",
    )  # fmt: skip
    ignore_eos: bool = setting(False, "--ignore-eos", help="Go on after an end-of-generation token.")


@dataclass(frozen=True, kw_only=True)
class Context:
    """What is kept of texts, and how prompts are read."""

    heading = "Context and length"
    ctx_size: int = setting(
        0, "--ctx-size", "-c", most=MAX_CTX, first=True, column=True,
        help="Context in tokens; 0: what prompt and -n need, within what the model was trained for.",
    )  # fmt: skip
    batch_size: int = setting(
        128, "--batch-size", "-b", least=1, column=True,
        help="Prompt tokens a run at most, up to 2048; a prompt is cut into smaller chunks where that fills the "
        "pipeline.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """How many requests may hold each other up."""

    heading = "Context and length"
    max_delay_s: float = setting(
        math.inf, "--max-delay", type=Delay(), written="none", column=True,
        help="Seconds that the tokens of a text may come later because prompts of others are read meanwhile: these are "
        "cut into chunks that take all stages together so long. chunk: what one of -b tokens takes; none: no limit.",
    )  # fmt: skip
