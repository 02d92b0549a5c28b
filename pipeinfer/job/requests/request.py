"""Requests to loaded models: prompt, sampling, constraints, and whether they fit. Loads and plans nothing."""

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeinfer.core.blocks import Span
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Request
from pipeinfer.core.samplers import read_biases
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.types import AdapterScales
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import MAX_CTX, STDIN
from pipeinfer.job.options.text_sections import ContextOptions, GrammarOptions, PromptOptions
from pipeinfer.job.process.stdin import end_input
from pipeinfer.job.process.streams import complain, read_limited
from pipeinfer.models.gguf.model_info import SHORT, ModelInfo
from pipeinfer.models.text.grammar import check_grammar
from pipeinfer.models.text.grammar_text import ANY_TOKENS
from pipeinfer.models.text.json_schema import as_schema, mismatch, read_schema, relaxations, schema_grammar
from pipeinfer.models.text.tokenizer import Tokenizer, breaker_tokens
from pipeinfer.policies import Iterative
from pipeinfer.text import count_text

DEFAULT_CTX = 4096
LEAST_TEXT = 256  # tokens of a text without -n for which --fit leaves room
BYTE_ORDER_MARK = "\ufeff"  # some editors begin UTF-8 with it


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One text to generate. Only rank 0 knows it: other ranks learn what they need with the runs. Its repr names its
    text in notes of --resume; `policy` and `guesses`, on which no text depends, are not in it."""

    prompt: tuple[int, ...]
    n_predict: int  # 0: evaluate the prompt alone, for the cache
    n_ctx: int
    sampling: SamplingParams
    end_tokens: frozenset[int]
    stops: tuple[str, ...] = ()
    markers: bool = False  # control tokens are part of the text, as in a chat
    spans: tuple[Span, ...] | None = None  # rows of the prompt in blocks, see `core.requests`
    keep: bool = False  # its cells stay for a request that begins with the same tokens
    priority: int = 0  # lower ones start first
    begun: tuple[int, ...] = ()  # tokens from which an interrupted text resumes
    thought: str | None = None  # the text that ends the reasoning that the prompt begins; None: reasoning is content
    adapters: AdapterScales | None = None  # None: as the job says
    policy: Policy = field(default_factory=Iterative, repr=False)
    guesses: bool = field(default=True, repr=False)  # whether there may be some

    def with_policy(self, policy: Policy) -> "GenerationRequest":
        """The same under the policy of its job, if it is to have guesses."""
        return replace(self, policy=policy if self.guesses else Iterative())

    def within(self, n_ctx: int) -> "GenerationRequest":
        """The same in a context of that many tokens at most, which has room for what it needs."""
        n_ctx = min(self.n_ctx, n_ctx)
        return replace(self, n_ctx=n_ctx, n_predict=min(self.n_predict, n_ctx - len(self.prompt)))

    @property
    def sampling_with_ends(self) -> SamplingParams:
        """As the engine and the stages get it."""
        return self.sampling.with_ends(len(self.prompt), self.end_tokens)

    def open(self, id: int) -> Request:
        """The state of this request in an engine."""
        how = self.end_tokens, self.spans, self.keep, self.priority, self.begun, self.adapters
        return Request(id, self.prompt, self.n_predict, self.sampling_with_ends, self.n_ctx, *how)


def settled(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """With a seed, and DRY's breakers as tokens. Raises UserError for breakers of too many tokens."""
    if sampling.searched:
        sampling = replace(sampling, dry_breakers=breaker_tokens(tokenizer, sampling.dry_sequence_breakers))
    return sampling.settled


def end_tokens(ignore_eos: bool, tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset() if ignore_eos else frozenset(tokenizer.ends)


def fit_context(ctx_size: int | None, predict: int, info: ModelInfo, n_prompt: int) -> tuple[int, int]:
    """(context size, tokens to generate) of options -c and -n. Raises UserError when they do not fit."""
    limit = ctx_size or min(info.n_ctx_train, MAX_CTX)
    source = f"-c {limit}" if ctx_size else f"the model's context of {limit}"
    beyond = "to go beyond what it was trained for"
    if info.rope_factors == SHORT:
        beyond = "for longer texts, of which it has other rope factors"
    way_out = "raise -c" if ctx_size else f"give -c {beyond}"
    if n_prompt >= limit:
        raise UserError(f"the prompt has {n_prompt} tokens, {source} holds {limit} with the text to come; {way_out}")
    if predict < 0:
        n_ctx = ctx_size or min(limit, max(DEFAULT_CTX, 2 * n_prompt))
        return n_ctx, n_ctx - n_prompt
    if n_prompt + predict > limit:
        n_left = limit - n_prompt
        room = f"{source} leaves {count_text(n_left, 'token')} after the {n_prompt} of the prompt"
        cut = f"-n {predict} would be cut: {room}"
        raise UserError(f"{cut}; use -n {n_left} at most, or {way_out}")
    return ctx_size or n_prompt + predict, predict


def least_context(options: ContextOptions, n_ctx: int, n_prompt: int) -> int:
    """Tokens of the smallest context that --fit may choose in place of `n_ctx`: with -n it has room for that."""
    n_least = n_prompt + (options.predict if options.predict >= 0 else LEAST_TEXT)
    return min(n_ctx, max(options.fit_ctx, n_least))


def check_trained(info: ModelInfo, n_prompt: int, n_predict: int) -> None:
    """Raises UserError for a text longer than the model was trained for: its measures mean nothing."""
    n_left = info.n_ctx_train - n_prompt
    if n_predict > n_left:
        way_out = f"use -n {n_left} at most" if n_left > 0 else "give a shorter text"
        too_long = f"-n {n_predict} after a text of {n_prompt} tokens is more than the {info.n_ctx_train}"
        raise UserError(f"{too_long} that {info.path} was trained for; {way_out}")


# -- texts of options


def read_prompt(options: PromptOptions) -> str:
    if options.prompt is not None and options.file is None:
        return options.prompt
    if options.prompt is not None or options.file is None:
        raise UserError("give the prompt with -p TEXT or with -f FILE (- is standard input), one of them")
    return read_text("--file", options.file).removesuffix("\n")


def read_text(option: str, path: Path) -> str:
    """A whole file, or standard input. Raises UserError, which names the option."""
    if path == STDIN and sys.stdin is None:
        raise UserError(f"{option} -: standard input is closed; name a file")
    if path == STDIN:
        end_input(is_whole=True)
    try:
        with nullcontext(sys.stdin.buffer) if path == STDIN else path.open("rb") as file:
            return read_limited(file, f"{option} {path}").decode().removeprefix(BYTE_ORDER_MARK)
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{option} {path} is not UTF-8 text (byte {error.start})") from None


# -- constraints


def check_constraints(
    sampling: SamplingParams, ignore_eos: bool, tokenizer: Tokenizer, flag: str = "--ignore-eos"
) -> None:
    """Raises UserError for biases and grammars that the vocabulary cannot have. `flag`: the name of `ignore_eos`."""
    ids, _ = read_biases(sampling.logit_bias)
    if len(ids) and ids[-1] >= tokenizer.n_vocab:
        unknown = f"a logit bias is for token {ids[-1]}, and the vocabulary has {tokenizer.n_vocab}, from 0 on"
        raise UserError(f"{unknown}; `pipeinfer run --json` and POST /tokenize tell a text's tokens")
    if sampling.grammar and ignore_eos:
        both = f"{flag} goes on behind the end of the text, where a grammar lets nothing follow"
        raise UserError(f"{both}; leave one of them out")
    if sampling.grammar and sampling.min_tokens:
        both = f"min_tokens {sampling.min_tokens} may forbid the end of the text, and a grammar says where it is"
        raise UserError(f"{both}; leave one of them out")
    if sampling.grammar:
        check_grammar(tokenizer, sampling.grammar)


def complain_of_mismatch(sampling: SamplingParams, text: str) -> None:
    """Warn if a whole text does not fit its schema, where the grammar leaves a part of that out."""
    schema = as_schema(sampling.grammar)
    if schema is not None and relaxations(schema) and (reason := mismatch(schema, text)):
        complain(f"the text does not fit the JSON schema: {reason}")


def grammar_of(options: GrammarOptions) -> str:
    """The grammar, or the schema's, with warnings of what that leaves out. Raises UserError for a wrong one or file."""
    grammar, text, option = options.grammar or "", options.schema, "--json-schema"
    if options.grammar_file is not None:
        grammar = read_text("--grammar-file", options.grammar_file)
        if not grammar.strip():
            raise UserError(f"--grammar-file {options.grammar_file} is empty; leave the option out for any text")
    if options.schema_file is not None:
        option = "--json-schema-file"
        text = read_text(option, options.schema_file)
    if text is None:
        return grammar.removeprefix(ANY_TOKENS)  # in GBNF it means nothing
    schema = read_schema(text)
    for reason in relaxations(schema):
        complain(f"{option}: {reason}")
    return schema_grammar(schema)
