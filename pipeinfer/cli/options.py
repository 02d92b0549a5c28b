"""What a run is asked to do, built once from the command line and checked as far as that goes without a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.errors import UserError
from pipeinfer.policies.factory import PolicyOptions
from pipeinfer.sampling import SamplingParams

MIN_TEMP = 1e-30  # what is below is greedy, and would overflow as a divisor
ESCAPE = re.compile(rb"\\([nrt'\"\\]|x[0-9a-fA-F]{2})")
PLAIN = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `pipeinfer run` under their long names; see its help for their meanings."""

    model: Path
    drafts: tuple[Path, ...]
    prompt: str | None
    file: Path | None
    predict: int
    ctx_size: int
    batch_size: int
    threads: tuple[int, ...]
    n_gpu_layers: int
    policy: str
    layer_split: str | None
    temp: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    ignore_eos: bool
    numerics: str
    slice_cache: Path | None
    pace: str | None
    repeat_last_n: int
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    couple: bool
    speculation: PolicyOptions
    cancel: bool
    partitions: bool
    sequences: int
    results: Path | None
    trace: Path | None
    json: bool
    verbose: bool

    def sampling(self, seed: int) -> SamplingParams:
        return SamplingParams(
            seed,
            self.temp if self.temp >= MIN_TEMP else 0.0,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repeat_last_n,
            self.repeat_penalty,
            self.frequency_penalty,
            self.presence_penalty,
        )

    @property
    def n_seq(self) -> int:
        """Sequences that trees may lease; one, and so no branches, without partitions."""
        return self.sequences if self.partitions else 1

    @property
    def drafts_in_use(self) -> tuple[Path, ...]:
        """The drafts that the policy needs, in any order."""
        return () if self.policy == "iterative" else self.drafts


def unescape(text: str) -> str:
    """A prompt with llama.cpp's escapes replaced; what is none of them stays. Raises UserError."""
    try:
        return ESCAPE.sub(_escaped, text.encode()).decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"--prompt has escapes for bytes that are not UTF-8 (byte {error.start}); with --no-escape they are text"
        ) from None


def _escaped(found: re.Match[bytes]) -> bytes:
    word = found[1]
    return bytes.fromhex(word[1:].decode()) if word[:1] == b"x" else PLAIN.get(word, word)


def threads_of_rank(threads: tuple[int, ...], rank: int, n_ranks: int, default: int) -> int:
    if len(threads) not in (0, 1, n_ranks):
        shown = ",".join(map(str, threads))
        raise UserError(f"--threads {shown} has {len(threads)} values for {n_ranks} ranks; give one, or one a rank")
    return (threads * n_ranks)[rank] if threads else default


def choose_policy(policy: str | None, has_draft: bool) -> str:
    """The policy asked for, or the best that the models at hand allow. Raises UserError."""
    if policy is None:
        return "pipeinfer" if has_draft else "iterative"
    if policy != "iterative" and not has_draft:
        raise UserError(f"--policy {policy} needs a draft model; give -md, or use --policy iterative")
    return policy
