"""What a benchmark measures: every combination of models, policies, splits, prompts and lengths, grouped by what must
be loaded together. Plans and checks; runs nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeinfer.cli.options import RunOptions
from pipeinfer.cli.outcome import settings_text, variant_text
from pipeinfer.cli.setup import Host, Job, make_job, open_models
from pipeinfer.cluster.plan import parse_split, stage_ranks
from pipeinfer.errors import UserError
from pipeinfer.models.tokenizer import Tokenizer
from pipeinfer.results import Row

ABLATIONS = ("cancel", "partitions", "continuous", "asynchronous")
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or, for `pp512`, as many tokens as its name says."""

    name: str
    text: str = ""
    n_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sweep:
    """Lists of what to combine. `base` has everything that all measurements share."""

    base: RunOptions
    pairs: tuple[tuple[Path, Path | None], ...]
    policies: tuple[str, ...]
    splits: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    predicts: tuple[int, ...]
    ablations: tuple[str, ...]
    repetitions: int
    cut: int  # longest prompt in tokens; 0: as they are


@dataclass(frozen=True, slots=True)
class Case:
    """One generation to measure."""

    options: RunOptions
    job: Job
    prompt: str
    repetition: int

    @property
    def key(self) -> Key:
        """What makes two measurements the same one; `row_key` gives it for a row of results.csv."""
        job, draft = self.job, self.options.draft_in_use
        layers = tuple(float(stage.last - stage.first) for stage in job.plan.stages)
        return (
            self.options.policy, variant_text(self.options), settings_text(self.options), self.options.model.name,
            draft.name if draft else "", job.plan.n_ranks, layers, tuple(map(float, job.threads)), self.prompt,
            len(job.prompt), job.n_predict, job.sampling.seed, job.sampling.temp, self.options.numerics,
            self.options.pace or "", self.repetition,
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
    for model, draft in sweep.pairs:
        for policies in _loaded_alike(sweep.policies):
            drafted = policies[0] != "iterative"
            options = replace(sweep.base, model=model, model_draft=draft, policy=policies[0])
            n_stages = len(stage_ranks(len(hosts), drafted))
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
    prompts = [(prompt.name, tokens_of(prompt, tokenizer, sweep.cut)) for prompt in sweep.prompts]
    longest = max((tokens for _, tokens in prompts), key=len)
    n_predict = max(sweep.predicts)
    job = make_job(replace(options, predict=n_predict), hosts, info, tokenizer, longest)
    measured = [
        variant
        for policy in policies
        for variant in _variants(replace(options, policy=policy), sweep.ablations if policy == "pipeinfer" else ())
    ]
    cases = tuple(
        Case(chosen, replace(job, prompt=tuple(tokens), n_predict=n), name, repetition)
        for repetition in range(1, sweep.repetitions + 1)
        for name, tokens in prompts
        for n in sweep.predicts
        for chosen in measured
    )
    return Group(options, job, cases)


def _variants(options: RunOptions, ablations: Sequence[str]) -> Iterator[RunOptions]:
    yield options
    for name in ablations:
        if name in ("cancel", "partitions"):
            yield replace(options, **{name: False})  # type: ignore[arg-type]
        else:
            yield replace(options, speculation=replace(options.speculation, **{name: False}))


# -- prompts


def tokens_of(prompt: Prompt, tokenizer: Tokenizer, cut: int) -> list[int]:
    """The prompt's tokens, its first `cut` at most. Raises UserError when there are none."""
    if prompt.n_tokens:
        # a fixed walk through the vocabulary: any text would do, its length is what counts
        return [(7 + 31 * index) % tokenizer.n_vocab for index in range(prompt.n_tokens)]
    tokens = tokenizer.encode(prompt.text)
    if not tokens:
        raise UserError(f"the prompt {prompt.name} is empty; give some text")
    return tokens[:cut] if cut else tokens


def read_prompts(source: str, n_questions: int) -> list[Prompt]:
    """A length (`512`), a text file, or the first `n_questions` (0: all) of a `.jsonl` whose objects have `turns`.

    Of several turns the first is taken. Raises UserError when it is none of these.
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
        Prompt(f"{path.stem}/{number}", _first_turn(path, number, line))
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not (n_questions and number > n_questions)
    ]
    if not questions:
        raise UserError(f"-p {source} holds no questions")
    return questions


def _first_turn(path: Path, number: int, line: str) -> str:
    try:
        turns = json.loads(line)["turns"]
        turn = turns[0] if isinstance(turns, list) else None
    except (ValueError, KeyError, IndexError, TypeError):
        turn = None
    if not isinstance(turn, str):
        raise UserError(f"{path}, line {number}: no JSON object with a list of texts named turns")
    return turn
