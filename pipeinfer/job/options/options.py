"""What a run is asked to do, built once from the command line and checked as far as that goes without a model."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeinfer.cluster.assignment import draft_widths, stage_ranks
from pipeinfer.cluster.messages.activations import WireType
from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import settings_of
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import AUTO_LAYERS, MAX_SEQUENCES, NO_DRAFT
from pipeinfer.job.options.plan_file import PlanFile, read_plan
from pipeinfer.job.options.sections import (
    Ablations,
    Experiments,
    Guesses,
    Loading,
    Numerics,
    Output,
    Placement,
    Records,
    Resuming,
)
from pipeinfer.job.options.text_sections import ChatOptions, Context, GrammarOptions, Length, Prompt, Traffic
from pipeinfer.policies import Iterative
from pipeinfer.sizes import count_text

N_GUESS_STATES = 16
"""Guesses that trees may have at a time where layers keep states: each has a sequence, with a state, of its own."""

ESCAPE = re.compile(rb"\\([nrt'\"\\]|x[0-9a-fA-F]{2})")
PLAIN = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


@dataclass(frozen=True, kw_only=True)
class RunOptions(
    Output,
    Resuming,
    Records,
    Experiments,
    Ablations,
    Loading,
    Traffic,
    Guesses,
    Numerics,
    Placement,
    Context,
    Length,
    Prompt,
):
    """What a job is asked to do: the options of these sections, of which the last one's come first, and what other
    sections of the command line come to."""

    model: Path
    drafts: tuple[Path, ...] = ()
    finds_head: bool = False
    """The head in the target's own file drafts, where there is one that can be used."""
    policy: Policy = field(default_factory=Iterative)
    chat: ChatOptions | None = None
    stops: tuple[str, ...] = ()
    parse_special: bool = True
    """Names of control tokens in a plain prompt are these tokens."""
    special_in_messages: bool = False
    """So are those in a message."""
    grammar: GrammarOptions = GrammarOptions()  # noqa: RUF009 (so is it)
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 (it is frozen)
    planned: PlanFile | None = None
    """What `plan` names, once it was read."""
    kept_numerics: str = ""
    """The name of those with which what goes on was begun; empty: nothing goes on."""
    parallel: int = 1
    n_expected: int = 1
    """Requests that are expected to be open at a time: exact numerics are laid out for them."""
    also: tuple[Policy, ...] = ()
    """Policies that are measured with the same loaded models."""

    @property
    def goes_on_from(self) -> Path | None:
        """The file with which the same command goes on when the job was ended."""
        return self.resume

    @property
    def n_seq(self) -> int:
        """Sequences that trees may lease: as many as the policy uses, and one for each further request."""
        if not self.partitions:
            return self.parallel
        n_seq = max(policy.n_sequences for policy in (self.policy, *self.also))
        return self.sequences or min(MAX_SEQUENCES, n_seq + self.parallel - 1)

    @property
    def n_guess_rows(self) -> int:
        """Rows of a run with guesses, and of a draft's step, at most."""
        return max(policy.n_rows for policy in (self.policy, *self.also))

    @property
    def wanted_numerics(self) -> str:
        """The name of the numerics that the job must have: of what goes on, or of a plan; empty: the planner
        chooses."""
        return self.kept_numerics or (self.planned.numerics_name if self.planned else "")

    @property
    def may_have_samplers(self) -> bool:
        """Whether threads may choose tokens beside the last stage: unasked for many requests, if not all cores
        compute."""
        if self.samplers is not None:
            return self.samplers > 0
        return self.parallel > 1 and bool(self.threads or any(self.n_gpu_layers))

    def n_samplers(self, rank: int, is_spare: bool) -> int:
        """Sampler threads beside the last stage, on this rank: as asked, else one where it has a spare core or a GPU.
        None on rank 0."""
        if rank == 0 or not self.may_have_samplers:
            return 0
        return int(is_spare) if self.samplers is None else self.samplers

    def target_ranks(self, n_ranks: int) -> list[int]:
        """The ranks with layers of the target, where no rank is chosen for the draft. Raises UserError for too few
        ranks."""
        n_drafts = len(self.drafts_in_use)
        widths = draft_widths(n_drafts, self.draft_split if n_drafts else ())
        return stage_ranks(n_ranks, widths, (self.draft_rank or 0) if n_drafts else 0)

    def n_target_guesses(self, rewinds: bool) -> int:
        """Of a target that does not rewind: guesses that trees may have at a time, each in a sequence of its own."""
        if rewinds or not self.partitions or isinstance(self.policy, Iterative):
            return 0
        return max(0, (self.sequences or min(MAX_SEQUENCES, self.parallel + N_GUESS_STATES)) - self.parallel)

    def n_target_seq(self, rewinds: bool) -> int:
        """Sequences of the target: few where each has a state."""
        return self.n_seq if rewinds else self.parallel + self.n_target_guesses(rewinds)

    @property
    def may_choose_draft_rank(self) -> bool:
        """Whether the planner chooses the rank of the draft: with one draft, and where nothing is given for each rank
        or stage by its role."""
        by_role = bool(self.layer_split or self.pace or self.lookup) or any(
            len(values) > 1 for values in (self.n_gpu_layers, self.device, self.backend)
        )
        by_role = by_role or self.n_gpu_layers_draft != AUTO_LAYERS  # its speed there is nowhere timed
        return self.draft_rank is None and len(self.drafts_in_use) == 1 and not by_role

    @property
    def drafts_in_use(self) -> tuple[Path, ...]:
        """The drafts that the policy needs, in any order."""
        return self.drafts if self.policy.drafts else ()

    @property
    def looks_up(self) -> bool:
        """Whether it is guessed too what stood before."""
        return self.policy.looks_up if self.lookup is None else self.lookup and self.policy.drafts


def unescape(text: str, option: str = "--prompt") -> str:
    """A text with llama.cpp's escapes replaced; what is none of them stays. Raises UserError with the option's name."""
    try:
        return ESCAPE.sub(_escaped, text.encode()).decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{option} has escapes for bytes that are not UTF-8 (byte {error.start}); with --no-escape they are text"
        ) from None


def _escaped(found: re.Match[bytes]) -> bytes:
    word = found[1]
    return bytes.fromhex(word[1:].decode()) if word[:1] == b"x" else PLAIN.get(word, word)


def with_plan(options: RunOptions, n_ranks: int) -> RunOptions:
    """With what --plan decides. Raises UserError for a file that is no plan, or one for another number of ranks, and
    for options that decide the same."""
    if options.plan is None:
        return options
    planned = read_plan(options.plan)
    if n_ranks != (n := len(planned.decisions["ranks"])):
        raise UserError(f"--plan {options.plan} is for {count_text(n, 'rank')}, and the number of ranks is {n_ranks}; "
                        "start as many, or plan again")  # fmt: skip
    decided = planned.options()
    for name, default, setting in settings_of(RunOptions):
        if name in decided and getattr(options, name) != default:
            raise UserError(f"{setting.flag} is what --plan {options.plan} decides; leave one of them out")
    return replace(options, planned=planned, **decided)


def check_draft_rank(options: RunOptions, n_ranks: int) -> None:
    """Raises UserError for a rank that there is not, or that cannot be another than 0."""
    rank = options.draft_rank
    if not rank:
        return
    if rank >= n_ranks:
        raise UserError(f"--draft-rank {rank}: the highest rank is {n_ranks - 1}; give one up to that, or start more")
    reasons = {
        f"{len(options.drafts)} drafts": len(options.drafts) > 1, "--lookup": options.lookup,
        "--pace": options.pace is not None,
    }  # fmt: skip
    for reason in (each for each, holds in reasons.items() if holds):
        raise UserError(f"--draft-rank {rank} is for one draft without lookup or pace, and here is {reason}; leave one "
                        "of them out")  # fmt: skip


def check_wire_type(options: Numerics) -> None:
    """Raises UserError when exact numerics are asked of activations that are rounded between stages."""
    if options.numerics == "exact" and options.wire_type is not WireType.F32:
        raise UserError(
            f"--wire-type {options.wire_type} rounds activations between stages, so that the text depends on where the "
            "model is cut, and --numerics exact says that it does not; give --numerics fast, or --wire-type f32"
        )


def without_effect(options: RunOptions, n_stages: int) -> tuple[str, ...]:
    """What is asked of a job that has nothing of the kind, a line each. `n_stages`: of its longest pipeline."""
    lines = []
    if not options.policy.drafts:
        asked = [
            setting.given_as(getattr(options, name))
            for name, default, setting in settings_of(RunOptions)
            if setting.for_guesses and getattr(options, name) != default
        ]
        if asked:
            are = "is" if len(asked) == 1 else "are"
            lines.append(f"{', '.join(asked)} {are} without effect: policy {options.policy.name} makes no guesses")
    if not options.prepare_ahead and not any(backend.is_torch for backend in options.backend):
        lines.append("--no-prepare-ahead is without effect: only stages of torch prepare a run while one is evaluated")
    if options.wire_type is not WireType.F32 and n_stages == 1:
        lines.append(
            f"--wire-type {options.wire_type} is without effect: one rank has all layers, no activations travel"
        )
    return tuple(lines)


def choose_drafts(given: tuple[Path, ...], default: tuple[Path, ...]) -> tuple[Path, ...]:
    """The drafts asked for: `-md none` is none at all. Raises UserError for none and some."""
    if NO_DRAFT in given and len(given) > 1:
        raise UserError(f"-md {NO_DRAFT} is no draft, and others are given; leave one of them out")
    return () if given == (NO_DRAFT,) else given or default


def choose_policy(policy: str | None, has_guesses: bool) -> str:
    """The policy asked for, or the best that the models at hand allow. Raises UserError."""
    if policy is None:
        return "auto" if has_guesses else "iterative"
    if policy not in ("iterative", "auto") and not has_guesses:
        raise UserError(f"--policy {policy} needs a draft model; give -md or --lookup, or use --policy iterative")
    return policy


DEFAULT = RunOptions(model=Path())
