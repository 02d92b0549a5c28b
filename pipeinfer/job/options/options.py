"""The options of a job, built once from the command line, and their checks that need no model."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pipeinfer.cluster.assignment import draft_widths, stage_ranks
from pipeinfer.cluster.wire import WireType
from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import Setting, settings_of
from pipeinfer.errors import UserError
from pipeinfer.job.options import sections, text_sections
from pipeinfer.job.options.limits import AUTO_LAYERS, MAX_SEQUENCES, NO_DRAFT
from pipeinfer.job.options.plan_file import PlanFile, read_plan
from pipeinfer.job.options.values import ScaledFile
from pipeinfer.models.gguf.model_info import OWN_HEAD
from pipeinfer.policies import Iterative
from pipeinfer.text import count_text

N_GUESS_STATES = 16  # the most guesses of all trees if layers keep states: each has its own sequence with a state
ESCAPE = re.compile(rb"\\([nrt'\"\\]|x[0-9a-fA-F]{2})")
PLAIN = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


@dataclass(frozen=True, kw_only=True)
class JobModels(sections.Adapters, sections.Loading):
    """The models, by files or by names on the hub. `finds_head`: a usable head in the target's file drafts. `hf_token`:
    for the hub; options that differ between ranks are printed, and this is not."""

    target: Path
    drafts: tuple[Path, ...] = ()
    finds_head: bool = False
    hf_token: str | None = field(default=None, repr=False, compare=False)

    @property
    def files(self) -> list[Path]:
        """Those of the target and of drafts that are not in it."""
        return [self.target, *(path for path in self.drafts if path != OWN_HEAD)]

    @property
    def adapters(self) -> list[ScaledFile]:
        files = [*map(ScaledFile, self.lora), *self.lora_scaled]
        return [ScaledFile(each.path, 0.0) for each in files] if self.lora_init_without_apply else files


@dataclass(frozen=True, kw_only=True)
class JobPlacement(sections.PlacementOptions):
    """The layers of each rank, and its devices. `planned`: the content of the file `plan`, once it was read."""

    planned: PlanFile | None = None

    def may_have_samplers(self, n_requests: int) -> bool:
        """Whether threads may choose tokens beside the last stage: as a rule for many requests, on spare cores."""
        if self.samplers is not None:
            return self.samplers > 0
        return n_requests > 1 and bool(self.threads or any(self.n_gpu_layers))

    def n_samplers(self, n_requests: int, rank: int, is_spare: bool) -> int:
        """How many there are: the option, else one on a rank with a spare core or a GPU; none on rank 0."""
        if rank == 0 or not self.may_have_samplers(n_requests):
            return 0
        return int(is_spare) if self.samplers is None else self.samplers


@dataclass(frozen=True, kw_only=True)
class Speculation(sections.Ablations, sections.Guesses):
    """The policy and its guesses. `by_ranks`: the number of ranks chooses it. `also`: others with the same models."""

    policy: Policy = field(default_factory=Iterative)
    by_ranks: bool = False
    also: tuple[Policy, ...] = ()

    @property
    def n_guess_rows(self) -> int:
        """The most rows of a run with guesses, and of a draft's step."""
        return max(policy.n_rows for policy in (self.policy, *self.also))

    @property
    def looks_up(self) -> bool:
        """Whether guesses are looked up in the text, too."""
        return self.policy.looks_up if self.lookup is None else self.lookup and self.policy.drafts

    def n_seq(self, n_requests: int) -> int:
        """The number of sequences for trees: those of the policy, and one for each further request."""
        if not self.partitions:
            return n_requests
        n_seq = max(policy.n_sequences for policy in (self.policy, *self.also))
        return self.sequences or min(MAX_SEQUENCES, n_seq + n_requests - 1)

    def n_target_guesses(self, n_requests: int, rewinds: bool) -> int:
        """The most guesses of all trees if the target does not rewind: each has its own sequence."""
        if rewinds or not self.partitions or isinstance(self.policy, Iterative):
            return 0
        return max(0, (self.sequences or min(MAX_SEQUENCES, n_requests + N_GUESS_STATES)) - n_requests)

    def n_target_seq(self, n_requests: int, rewinds: bool) -> int:
        """Sequences of the target: few if each has a state."""
        return self.n_seq(n_requests) if rewinds else n_requests + self.n_target_guesses(n_requests, rewinds)


@dataclass(frozen=True, kw_only=True)
class JobOutput(text_sections.OutputOptions, text_sections.Records, text_sections.Machines):
    """What is printed and written."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a job: a record for each heading of `--help`. No two records have settings of one name."""

    models: JobModels
    text: text_sections.TextOptions = field(default_factory=text_sections.TextOptions)
    constraints: text_sections.GrammarOptions = field(default_factory=text_sections.GrammarOptions)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    context: text_sections.ContextOptions = field(default_factory=text_sections.ContextOptions)
    placement: JobPlacement = field(default_factory=JobPlacement)
    numerics: sections.Numerics = field(default_factory=sections.Numerics)
    speculation: Speculation = field(default_factory=Speculation)
    traffic: text_sections.Traffic = field(default_factory=text_sections.Traffic)
    experiments: sections.Experiments = field(default_factory=sections.Experiments)
    output: JobOutput = field(default_factory=JobOutput)

    def records(self) -> Iterator[tuple[str, Any]]:
        """(name, record) of each but those that a request may have, too."""
        of_requests = ("sampling", "constraints")
        return ((each.name, getattr(self, each.name)) for each in fields(self) if each.name not in of_requests)

    def settings(self) -> Iterator[tuple[str, Any, Any, Setting]]:
        """(name, value, default, setting) of every setting of these records."""
        for _, record in self.records():
            yield from ((name, getattr(record, name), *more) for name, *more in settings_of(type(record)))

    def changed(self, **values: Any) -> "RunOptions":
        """With other values of fields of these records, by their names; `sampling` and `constraints` as a whole."""
        changes: dict[str, Any] = {}
        for name, record in self.records():
            names = {each.name for each in fields(record)} & values.keys()
            if names:
                changes[name] = replace(record, **{each: values.pop(each) for each in names})
        return replace(self, **changes, **values)

    @property
    def resume_file(self) -> Path | None:
        """The file from which the same command resumes when the job was ended."""
        return self.output.resume

    @property
    def required_numerics(self) -> str:
        """The name of the numerics that the job must have, a resumed one's or a plan's; empty: any."""
        planned = self.placement.planned
        return self.numerics.resumed or (planned.numerics_name if planned else "")

    @property
    def drafts_in_use(self) -> tuple[Path, ...]:
        """The drafts that the policy needs, in any order."""
        return self.models.drafts if self.speculation.policy.drafts else ()

    def target_ranks(self, n_ranks: int) -> list[int]:
        """The target's ranks, if no rank is chosen for the draft. Raises UserError for too few ranks."""
        drafts = self.drafts_in_use
        placement = self.placement if drafts else JobPlacement()
        return stage_ranks(n_ranks, draft_widths(len(drafts), placement.draft_split), placement.draft_rank or 0)

    @property
    def may_choose_draft_rank(self) -> bool:
        """Whether the planner chooses the draft's rank: of one draft, if no option is by rank or stage."""
        placement = self.placement
        by_rank = placement.n_gpu_layers, placement.device, placement.backend, placement.n_cpu_moe
        by_role = bool(placement.layer_split or self.experiments.pace or self.speculation.lookup)
        by_role = by_role or any(len(values) > 1 for values in by_rank)
        by_role = by_role or placement.n_gpu_layers_draft != AUTO_LAYERS  # its speed there is not timed
        return placement.draft_rank is None and len(self.drafts_in_use) == 1 and not by_role

    def check_draft_rank(self, n_ranks: int) -> None:
        """Raises UserError for a rank that does not exist, or if only rank 0 can draft."""
        rank, n_drafts = self.placement.draft_rank, len(self.models.drafts)
        if not rank:
            return
        if rank >= n_ranks:
            raise UserError(
                f"--draft-rank {rank}: the highest rank is {n_ranks - 1}; give one up to that, or start more"
            )
        reasons = {
            f"{n_drafts} drafts": n_drafts > 1,
            "--lookup": self.speculation.lookup,
            "--pace": self.experiments.pace is not None,
        }
        if reason := next((reason for reason, applies in reasons.items() if applies), ""):
            requirement = f"--draft-rank {rank} is for one draft without lookup or pace"
            raise UserError(f"{requirement}, and here is {reason}; leave one of them out")

    def without_effect(self, n_stages: int) -> tuple[str, ...]:
        """A line for each option that has no effect in this job. `n_stages`: of its longest pipeline."""
        lines, policy, wire_type = [], self.speculation.policy, self.numerics.wire_type
        if not policy.drafts:
            flags = [
                setting.given_as(value)
                for _, value, default, setting in self.settings()
                if setting.for_guesses and value != default
            ]
            if flags:
                are = "is" if len(flags) == 1 else "are"
                lines.append(f"{', '.join(flags)} {are} without effect: policy {policy.name} makes no guesses")
        if not self.experiments.prepare_ahead and not any(each.is_torch for each in self.placement.backend):
            lines.append(
                "--no-prepare-ahead is without effect: only stages of torch prepare a run while one is evaluated"
            )
        if wire_type is not WireType.F32 and n_stages == 1:
            lines.append(f"--wire-type {wire_type} is without effect: one rank has all layers, no activations travel")
        if self.placement.samplers and n_stages == 1:
            lines.append("--sampler-threads is without effect: one rank has all layers, and samples by itself")
        return tuple(lines)


def unescape(text: str, option: str = "--prompt") -> str:
    """A text with llama.cpp's escapes replaced. Raises UserError with the option's name."""
    try:
        return ESCAPE.sub(_escaped, text.encode()).decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{option} has escapes for bytes that are not UTF-8 (byte {error.start}); with --no-escape they are text"
        ) from None


def _escaped(match: re.Match[bytes]) -> bytes:
    word = match[1]
    return bytes.fromhex(word[1:].decode()) if word[:1] == b"x" else PLAIN.get(word, word)


def with_plan(options: RunOptions, n_ranks: int) -> RunOptions:
    """The options with the decisions of --plan. Raises UserError for a file that is no plan, or for another number of
    ranks, and for options that the plan decides."""
    path = options.placement.plan
    if path is None:
        return options
    planned = read_plan(path)
    if n_ranks != (n := len(planned.decisions["ranks"])):
        sizes = f"is for {count_text(n, 'rank')}, and the number of ranks is {n_ranks}"
        raise UserError(f"--plan {path} {sizes}; start as many, or plan again")
    decided = planned.decided()
    for name, value, default, setting in options.settings():
        if name in decided and value != default:
            raise UserError(f"{setting.flag} is what --plan {path} decides; leave one of them out")
    finds_head = options.models.finds_head and not any(backend.is_torch for backend in decided["backend"])
    return options.changed(planned=planned, finds_head=finds_head, **decided)


def check_wire_type(numerics: sections.Numerics) -> None:
    """Raises UserError for exact numerics with activations that are rounded between stages."""
    if numerics.numerics == "exact" and numerics.wire_type is not WireType.F32:
        raise UserError(
            f"--wire-type {numerics.wire_type} rounds activations between stages, so that the text depends on where "
            "the model is cut, and --numerics exact says that it does not; give --numerics fast, or --wire-type f32"
        )


def choose_drafts(drafts: tuple[Path, ...], default: tuple[Path, ...]) -> tuple[Path, ...]:
    """The drafts of the command line, or the default; none for `-md none`, alone. Raises UserError."""
    if NO_DRAFT in drafts and len(drafts) > 1:
        raise UserError(f"-md {NO_DRAFT} is no draft, and others are given; leave one of them out")
    return () if drafts == (NO_DRAFT,) else drafts or default


def choose_policy(policy: str | None, has_guesses: bool) -> str:
    """The named policy, or the best one for these models. Raises UserError."""
    if policy is None:
        return "auto" if has_guesses else "iterative"
    if policy not in ("iterative", "auto") and not has_guesses:
        raise UserError(f"--policy {policy} needs a draft model; give -md or --lookup, or use --policy iterative")
    return policy
