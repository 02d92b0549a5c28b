"""What a benchmark measures: every combination of models, policies, splits, prompts and lengths, grouped by what must
be loaded together. Plans and checks; runs nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from pipeinfer.cli.options import RunOptions
from pipeinfer.cli.outcome import settings_text, variant_text
from pipeinfer.cli.setup import Host, Job, fit_context, make_job, open_models
from pipeinfer.cluster.plan import parse_split, stage_ranks
from pipeinfer.errors import UserError
from pipeinfer.models.model_info import ModelInfo
from pipeinfer.models.tokenizer import Tokenizer
from pipeinfer.results import Row

ABLATIONS = ("cancel", "partitions", "continuous", "asynchronous")
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or, for `pp512`, as many tokens as its name says. `later`: what is said next, after each answer."""

    name: str
    text: str = ""
    n_tokens: int = 0
    later: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sweep:
    """Lists of what to combine. `base` has everything that all measurements share."""

    base: RunOptions
    pairs: tuple[tuple[Path, tuple[Path, ...]], ...]
    policies: tuple[str, ...]
    splits: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    predicts: tuple[int, ...]
    ablations: tuple[str, ...]
    repetitions: int
    cut: int  # longest prompt in tokens; 0: as they are


@dataclass(frozen=True, slots=True)
class Turn:
    """What is said next in a conversation. `name` is that of its rows."""

    name: str
    tokens: tuple[int, ...]
    measured: bool = False
    """Before this sweep: it is generated for its answer, if a turn after it is not."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, each with the answers before it. Most have one turn: a prompt."""

    turns: tuple[Turn, ...]
    cut: int
    n_keep: int  # tokens at the beginning that a cut leaves there: the beginning-of-text token

    def prompt(self, said: Sequence[int], turn: Turn) -> tuple[int, ...]:
        """The prompt of a turn after all that was said, its newest tokens if it must be cut."""
        tokens = (*said, *turn.tokens)
        if not self.cut or len(tokens) <= self.cut:
            return tokens
        n_newest = max(0, self.cut - self.n_keep)
        return tokens[: self.cut - n_newest] + tokens[len(tokens) - n_newest :]

    def lengths(self, n_predict: int) -> list[int]:
        """Tokens of each turn's prompt, known before any answer: an answer has `n_predict` of them."""
        lengths: list[int] = []
        for turn in self.turns:
            said = lengths[-1] + n_predict if lengths else 0
            lengths.append(min(said + len(turn.tokens), self.cut or sys.maxsize))
        return lengths


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation to measure: one generation a turn, each from an empty cache."""

    options: RunOptions
    job: Job  # its prompt is the first turn's
    conversation: Conversation
    repetition: int

    @property
    def n_left(self) -> int:
        """Generations to measure."""
        return sum(not turn.measured for turn in self.conversation.turns)

    def without(self, known: Set[Key]) -> Case:
        """The same with the turns that are `known` marked, and none after the last that is to be measured."""
        lengths = self.conversation.lengths(self.job.n_predict)
        turns = [
            replace(turn, measured=self._key(turn.name, length) in known)
            for turn, length in zip(self.conversation.turns, lengths, strict=True)
        ]
        while turns and turns[-1].measured:
            turns.pop()
        return replace(self, conversation=replace(self.conversation, turns=tuple(turns)))

    def _key(self, prompt: str, n_prompt: int) -> Key:
        """What makes two measurements the same one; `row_key` gives it for a row of results.csv."""
        job = self.job
        layers = tuple(float(stage.last - stage.first) for stage in job.plan.stages)
        return (
            self.options.policy, variant_text(self.options), settings_text(self.options), self.options.model.name,
            "+".join(draft.path.name for draft in job.drafts), job.plan.n_ranks, layers,
            tuple(map(float, job.threads)), prompt, n_prompt, job.n_predict, job.sampling.seed, job.sampling.temp,
            self.options.numerics, self.options.pace or "", self.repetition,
        )  # fmt: skip


def row_key(row: Row) -> Key:
    return (
        row["policy"], row["variant"], row["settings"], row["model"], row["model_draft"], row["ranks"], row["layers"],
        row["threads"], row["prompt"], row["prompt_n"], row["predicted_n"], row["seed"], row["temp"], row["numerics"],
        row["pace"], row["repetition"],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that share the loaded models. `options` and `job` say what to load, on every rank."""

    options: RunOptions
    job: Job
    cases: tuple[Case, ...]


def plan_groups(sweep: Sweep, hosts: Sequence[Host]) -> list[Group]:
    """Groups in the order of the models, then of the policies. Raises UserError for whatever cannot be measured."""
    groups: list[Group] = []
    unused = set(sweep.splits)
    for model, drafts in sweep.pairs:
        for policies in _loaded_alike(sweep.policies):
            drafted = policies[0] != "iterative"
            options = replace(sweep.base, model=model, drafts=drafts, policy=policies[0])
            n_stages = len(stage_ranks(len(hosts), len(drafts) if drafted else 0))
            fitting = [split for split in sweep.splits if len(parse_split(split)) == n_stages]
            unused -= set(fitting)
            by_split = [replace(options, layer_split=split) for split in fitting] or [options]
            groups += [_group(chosen, policies, sweep, hosts) for chosen in by_split]
    if unused:
        split = min(unused)
        raise UserError(
            f"--layer-split {split} has {len(parse_split(split))} parts, and no policy here has as many stages on "
            f"{len(hosts)} ranks; a draft takes one rank of them"
        )
    return groups


def _loaded_alike(policies: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """`iterative` needs no draft and so gives the target one rank more: it is loaded by itself, in its turn."""
    together: tuple[str, ...] = ()
    for policy in policies:
        if together and (policy == "iterative") != (together[0] == "iterative"):
            yield together
            together = ()
        together += (policy,)
    if together:
        yield together


def _group(options: RunOptions, policies: Sequence[str], sweep: Sweep, hosts: Sequence[Host]) -> Group:
    info, tokenizer = open_models(options)
    conversations = [conversation_of(prompt, tokenizer, sweep.cut) for prompt in sweep.prompts]
    n_predict = max(sweep.predicts)
    longest = _longest(replace(options, predict=n_predict), info, conversations)
    job = make_job(replace(options, predict=n_predict), hosts, info, tokenizer, longest)
    measured = [
        variant
        for policy in policies
        for variant in _variants(replace(options, policy=policy), sweep.ablations if policy == "pipeinfer" else ())
    ]
    cases = tuple(
        Case(chosen, replace(job, prompt=conversation.turns[0].tokens, n_predict=n), conversation, repetition)
        for repetition in range(1, sweep.repetitions + 1)
        for conversation in conversations
        for n in sweep.predicts
        for chosen in measured
    )
    return Group(options, job, cases)


def _longest(options: RunOptions, info: ModelInfo, conversations: Sequence[Conversation]) -> list[int]:
    """As many tokens as the longest prompt has. Raises UserError when only first turns fit into the context."""
    lengths = [conversation.lengths(options.predict) for conversation in conversations]
    first, longest = max(turns[0] for turns in lengths), max(map(max, lengths))
    if longest > first:
        fit_context(options, info, first)
        try:
            fit_context(options, info, longest)
        except UserError as error:
            raise UserError(f"with the answers before its last turn {error}, or take fewer --turns") from None
    return [0] * longest


def _variants(options: RunOptions, ablations: Sequence[str]) -> Iterator[RunOptions]:
    yield options
    for name in ablations:
        if name in ("cancel", "partitions"):
            yield replace(options, **{name: False})  # type: ignore[arg-type]
        else:
            yield replace(options, speculation=replace(options.speculation, **{name: False}))


# -- prompts


SEPARATOR = "\n\n"
"""Between what was said and the next turn. There is no chat template: what is measured is speed."""


def conversation_of(prompt: Prompt, tokenizer: Tokenizer, cut: int) -> Conversation:
    """A prompt in tokens, the first `cut` of its first turn at most. Raises UserError when there are none."""
    if prompt.n_tokens:
        # a fixed walk through the vocabulary: any text would do, its length is what counts
        tokens = [(7 + 31 * index) % tokenizer.n_vocab for index in range(prompt.n_tokens)]
        return Conversation((Turn(prompt.name, tuple(tokens)),), cut=0, n_keep=0)
    tokens = tokenizer.encode(prompt.text)
    if not tokens:
        raise UserError(f"the prompt {prompt.name} is empty; give some text")
    first = Turn(prompt.name, tuple(tokens[:cut] if cut else tokens))
    # appended as tokens, not as text: an answer stays what the model said, and its length is known beforehand
    later = [
        Turn(f"{prompt.name}.{number}", _continuation(f"{SEPARATOR}{text}", tokenizer))
        for number, text in enumerate(prompt.later, start=2)
    ]
    return Conversation((first, *later), cut, n_keep=int(tokens[0] == tokenizer.bos))


def _continuation(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a text that follows another: without the space that some vocabularies begin every text with."""
    tokens = tokenizer.encode(text, add_special=False)
    return tuple(tokens[1:] if tokenizer.decode_piece(tokens[0]) == b" " else tokens)


def read_prompts(source: str, n_questions: int, n_turns: int = 0) -> list[Prompt]:
    """A length (`512`), a text file, or the first `n_questions` (0: all) of a `.jsonl` whose objects have `turns`.

    Of these the first `n_turns` (0: all) are taken. Raises UserError when it is none of these.
    """
    if source.isdecimal():
        if not 0 < int(source) <= 1 << 20:
            raise UserError(f"-p {source}: a prompt has 1 to {1 << 20} tokens")
        return [Prompt(f"pp{source}", n_tokens=int(source))]
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"-p {source}: {error.strerror}; give a number of tokens, a text file or a .jsonl") from None
    except UnicodeDecodeError as error:
        raise UserError(f"-p {source} is not UTF-8 text (byte {error.start})") from None
    if path.suffix != ".jsonl":
        return [Prompt(path.stem, text)]
    questions = [
        _question(path, number, line, n_turns)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not (n_questions and number > n_questions)
    ]
    if not questions:
        raise UserError(f"-p {source} holds no questions")
    return questions


def _question(path: Path, number: int, line: str, n_turns: int) -> Prompt:
    try:
        turns = json.loads(line)["turns"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        turns = None
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
        raise UserError(f"{path}, line {number}: no JSON object with a list of texts named turns")
    first, *later = turns[: n_turns or None]
    return Prompt(f"{path.stem}/{number}", first, later=tuple(later))
