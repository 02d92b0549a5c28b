"""What a run is asked to do, built once from the command line and checked as far as that goes without a model."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeinfer.cluster.messages.activations import WireType
from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import settings_of
from pipeinfer.errors import UserError
from pipeinfer.job.options.backends import Backend
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO_LAYERS, MAX_SEQUENCES, NO_DEVICE, NO_DRAFT
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
from pipeinfer.models.gguf.cache_types import F16_CACHE, CacheTypes
from pipeinfer.policies import Iterative

MAX_PROMPTS = 4

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
    kept_numerics: str = ""
    """The name of those with which what goes on was begun; empty: nothing goes on."""
    parallel: int = 1
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
    def n_nodes(self) -> int:
        """Nodes that a run of the target carries at most: guesses, or a root of each request."""
        return max(self.n_guess_rows, self.parallel)

    @property
    def cache(self) -> CacheTypes:
        """Of the target, with fast numerics."""
        return CacheTypes(self.cache_type_k, self.cache_type_v)

    @property
    def draft_cache(self) -> CacheTypes:
        return CacheTypes(self.cache_type_k_draft, self.cache_type_v_draft)

    @property
    def kernels(self) -> str:
        """How the target's layers are computed: numerics, and layout of weights and types of the cache where they are
        others."""
        layout = () if self.repack else ("no", "repack")
        return "-".join((self.numerics, *layout, *(self.cache if self.cache != F16_CACHE else ())))

    @property
    def rounding(self) -> str:
        """Numerics, and what else rounds: where these differ a text may be another one."""
        return self.kernels if self.wire_type is WireType.F32 else f"{self.kernels}-{self.wire_type}"

    @property
    def may_have_samplers(self) -> bool:
        """Whether threads may choose tokens beside the last stage: unasked for many requests, if not all cores
        compute."""
        if self.samplers is not None:
            return self.samplers > 0
        return self.parallel > 1 and bool(self.threads or any(self.n_gpu_layers))

    @property
    def n_prompts(self) -> int:
        """Prompts in blocks that are read at a time: each has a context of its own meanwhile."""
        return min(MAX_PROMPTS, self.parallel)

    def n_target_guesses(self, rewinds: bool) -> int:
        """Of a target that does not rewind: guesses that trees may have at a time, each in a sequence of its own."""
        if rewinds or not self.partitions or isinstance(self.policy, Iterative):
            return 0
        return max(0, (self.sequences or min(MAX_SEQUENCES, self.parallel + N_GUESS_STATES)) - self.parallel)

    def n_target_seq(self, rewinds: bool) -> int:
        """Sequences of the target: few where each has a state."""
        return self.n_seq if rewinds else self.parallel + self.n_target_guesses(rewinds)

    @property
    def fixed_draft_rank(self) -> int:
        """The rank of a lone draft where no other is chosen."""
        return self.draft_rank or 0

    @property
    def is_by_rank(self) -> bool:
        """Whether something is given for each rank or stage by itself: in another order it would be for others."""
        return bool(self.layer_split) or max(map(len, (self.threads, self.n_gpu_layers, self.device, self.backend))) > 1

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


def threads_of_rank(threads: tuple[int, ...], rank: int, n_ranks: int, default: int) -> int:
    if len(threads) not in (0, 1, n_ranks):
        shown = ",".join(map(str, threads))
        raise UserError(
            f"--threads {shown} has {len(threads)} values, and the number of ranks is {n_ranks}; give one, or one for "
            "each rank"
        )
    return (threads * n_ranks)[rank] if threads else default


def gpu_layers_asked(options: RunOptions, rank: int) -> int:
    """Of a rank, as given: ALL_LAYERS and AUTO_LAYERS are numbers too. 0 where it shall use no device."""
    if device_of(options, rank) == NO_DEVICE:
        return 0
    given = options.n_gpu_layers
    return given[rank] if len(given) > 1 else given[0]


def device_of(options: RunOptions, rank: int, n_ranks: int = 0) -> tuple[str, ...]:
    """Names of the devices asked for on a rank, or NO_DEVICE; empty: none is named. A lone rank has all that are."""
    given = options.device
    if n_ranks == 1:
        return tuple(name for names in given for name in names)
    return given[rank % len(given)]


def device_text(names: tuple[str, ...]) -> str:
    """As the command line has it."""
    return "+".join(names) or "auto"


def backend_of(options: RunOptions, rank: int) -> Backend:
    return options.backend[rank] if len(options.backend) > 1 else options.backend[0]


def check_by_rank(options: RunOptions, n_ranks: int) -> None:
    """Raises UserError unless options of ranks have one value, or one a rank, and go together on each rank."""
    lists: tuple[tuple[str, tuple[Any, ...], Callable[[Any], str], str], ...] = (
        ("--gpu-layers", options.n_gpu_layers, gpu_layers_text, ""),
        ("--backend", options.backend, str, ""),
        ("--device", options.device, device_text, " (several of one rank as CUDA0+CUDA1)"),
    )
    for flag, values, text, further in lists:
        if len(values) not in (1, n_ranks) and not (flag == "--device" and n_ranks == 1):
            raise UserError(
                f"{flag} {','.join(map(text, values))} has {len(values)} values, and the number of ranks is {n_ranks}; "
                f"give one, or one for each rank{further}"
            )
    for rank in range(n_ranks):
        _check_rank(rank, backend_of(options, rank), gpu_layers_asked(options, rank), device_of(options, rank, n_ranks))


def _check_rank(rank: int, backend: Backend, n_gpu_layers: int, names: tuple[str, ...]) -> None:
    """`names`: of its devices. Raises UserError for what does not go together."""
    shown = device_text(names)
    if backend.is_torch and n_gpu_layers:
        raise UserError(
            f"-ngl is for layers that libllama computes, and rank {rank} has --backend {backend}; torch puts all of a "
            "rank's layers on its GPU: leave -ngl out, or give it as 0 there"
        )
    if len(set(names)) < len(names) or ("none" in names and len(names) > 1):
        raise UserError(f"--device {shown}: rank {rank} has {shown}; name each device once, or none alone")
    if names and backend.is_torch:
        raise UserError(
            f"--device is for layers that libllama computes, and rank {rank} has --backend {backend}; say its device "
            "there (torch:cuda:1), and auto here"
        )
    if names not in ((), NO_DEVICE) and not n_gpu_layers:
        raise UserError(f"--device {shown}: rank {rank} has no layers for it, as -ngl is 0 there; give -ngl all, or a "
                        "number of layers")  # fmt: skip


def check_one_backend(options: RunOptions, ranks: Sequence[int]) -> None:
    """Raises UserError when exact numerics are asked of target layers on these ranks that are computed in two ways."""
    ways: dict[str, list[int]] = {}
    for rank in ranks:
        own = backend_of(options, rank)
        ways.setdefault(str(Backend(own.name, dtype=own.dtype)), []).append(rank)
    if options.numerics == "exact" and len(ways) > 1:
        shown = ", ".join(
            f"rank{'s' * (len(own) > 1)} {' '.join(map(str, own))} {way}" for way, own in sorted(ways.items())
        )
        raise UserError(
            f"--numerics exact needs one --backend for all layers of the target, else the text depends on where it is "
            f"cut; here they have: {shown}; give one, or --numerics fast"
        )


def check_wire_type(options: RunOptions) -> None:
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


def gpu_layers_text(value: int) -> str:
    return {ALL_LAYERS: "all", AUTO_LAYERS: "auto"}.get(value, str(value))


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
