"""Rank 0 turns options into a job: reads headers, tokenises, plans, checks everything that can be wrong beforehand."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.blocks import LARGEST, rows_in_blocks
from pipeinfer.cli.limited import read_limited
from pipeinfer.cli.memory import N_GUESS_ROWS, gpu_layers, plan_memory
from pipeinfer.cli.options import RunOptions, threads_of_rank
from pipeinfer.cli.values import MAX_CTX
from pipeinfer.cluster.cores import Host, crowded_hosts, share_cores
from pipeinfer.cluster.costs import Profile
from pipeinfer.cluster.pace import pace_profile
from pipeinfer.cluster.plan import Plan, Sizes, make_plan, parse_split
from pipeinfer.cluster.room import Memory, check_room
from pipeinfer.errors import UserError
from pipeinfer.models.gguf_slice import ModelInfo, read_model_info
from pipeinfer.models.model_info import part_paths
from pipeinfer.models.tokenizer import Tokenizer, check_draft
from pipeinfer.outputs import check_separate, check_writable
from pipeinfer.results import check_results
from pipeinfer.sampling import SamplingParams

STDIN = Path("-")
DEFAULT_CTX = 4096
MAX_BATCH = 2048  # prompt tokens a run: every rank has buffers for so many rows
N_CELLS_SPARE = 512  # cells above the context, for guesses and, with exact numerics, for parked cells


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model as rank 0 found it, before the job: its file may be replaced or removed while the job runs."""

    path: Path
    fingerprint: str
    n_bytes: int
    n_params: int
    n_layer: int
    quantisation: str

    @classmethod
    def of(cls, info: ModelInfo) -> ModelFile:
        return cls(info.path, info.fingerprint, info.n_bytes, info.n_params, info.n_layer, info.quantisation)


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank needs to know; broadcast by rank 0."""

    plan: Plan
    model: ModelFile
    drafts: tuple[ModelFile, ...]  # in the order of the plan's
    n_embd: int
    n_vocab: int
    prompt: tuple[int, ...]
    n_predict: int
    n_ctx: int
    n_cells: int
    n_seq: int  # sequences that trees may lease
    n_batch: int
    threads: tuple[int, ...]
    hosts: tuple[Host, ...]
    memory: tuple[Memory, ...]  # of each rank
    sampling: SamplingParams
    end_tokens: frozenset[int]
    blocks: bool = False  # a prompt is evaluated in blocks that follow from its length; see pipeinfer.blocks
    pace: Profile | None = None
    """What the ranks and links shall be slowed down to."""

    @property
    def n_rows_max(self) -> int:
        """Rows a run carries at most: a chunk of the prompt with the root, or guesses."""
        return max(self.n_batch + 1, N_GUESS_ROWS, LARGEST if self.blocks else 0)

    @property
    def warnings(self) -> list[str]:
        """What will make this job slow, a line each."""
        return crowded_hosts(self.hosts, self.plan.computing, self.threads)


def prepare(options: RunOptions, hosts: Sequence[Host]) -> tuple[Job, Tokenizer]:
    """Raises UserError for whatever is wrong with the options, the files and how they fit together."""
    check_outputs(options)
    info, tokenizer = open_models(options)
    prompt = tokenizer.encode(read_prompt(options))
    if not prompt:
        raise UserError("the prompt is empty and this model has no beginning-of-text token; give some text")
    return make_job(options, hosts, info, tokenizer, prompt), tokenizer


def open_models(options: RunOptions) -> tuple[ModelInfo, Tokenizer]:
    """The target's header and vocabulary. Raises UserError when a model is unusable or the draft's does not fit."""
    info = read_model_info(options.model)
    tokenizer = Tokenizer(options.model)
    for path in options.drafts_in_use:
        read_model_info(path)
        check_draft(tokenizer, path)
    return info, tokenizer


def make_job(
    options: RunOptions, hosts: Sequence[Host], info: ModelInfo, tokenizer: Tokenizer, prompt: Sequence[int]
) -> Job:
    """The plan for one prompt. Raises UserError when prompt, split, threads or memory do not fit."""
    n_ctx, n_predict = fit_context(options, info, len(prompt))
    n_cells = -(-(n_ctx + N_CELLS_SPARE) // 256) * 256
    split = parse_split(options.layer_split) if options.layer_split else None
    drafts = sorted((read_model_info(path) for path in options.drafts_in_use), key=lambda draft: draft.n_bytes)
    plan = make_plan(len(hosts), len(drafts), sizes_of(info), n_cells, split)
    seed = secrets.randbits(32) if options.seed < 0 else options.seed
    n_batch = min(options.batch_size, MAX_BATCH, n_ctx)
    blocks = options.numerics == "exact" and gpu_layers(options) == 0
    n_in_blocks = rows_in_blocks(len(prompt)) if blocks else 0
    memory = plan_memory(options, plan, info, drafts, n_cells, max(n_batch + 1, N_GUESS_ROWS), n_in_blocks)
    way_out = "use a smaller context (-c), more ranks on further hosts, or a smaller quantisation"
    check_room([host.name for host in hosts], [host.room for host in hosts], memory, way_out)
    return Job(
        plan=plan,
        model=ModelFile.of(info),
        drafts=tuple(map(ModelFile.of, drafts)),
        n_embd=info.n_embd,
        n_vocab=info.n_vocab,
        prompt=tuple(prompt),
        n_predict=n_predict,
        n_ctx=n_ctx,
        n_cells=n_cells,
        n_seq=options.n_seq,
        n_batch=n_batch,
        blocks=blocks,
        threads=spread_threads(options.threads, plan, hosts),
        hosts=tuple(hosts),
        memory=memory,
        sampling=options.sampling(seed),
        end_tokens=frozenset() if options.ignore_eos else frozenset(filter(tokenizer.is_end, range(tokenizer.n_vocab))),
        pace=pace_profile(options.pace, len(hosts), len(drafts)) if options.pace is not None else None,
    )


def check_outputs(options: RunOptions) -> None:
    """What is written at the end must not fail then, and must not be what is read. Leaves nothing behind."""
    check_separate({"--results": options.results, "--trace": options.trace}, inputs_of(options))
    cache = options.slice_cache
    if cache and cache.exists() and not cache.is_dir():
        raise UserError(f"--slice-cache {cache} is no directory; name one, it is made if it is not there")
    if options.results:
        check_results(options.results)
    if options.trace:
        check_writable(options.trace, "--trace")


def inputs_of(options: RunOptions) -> dict[str, list[Path]]:
    """The files that a job reads, by the options that name them."""
    return {
        "--model": part_paths(options.model),
        "--model-draft": [part for draft in options.drafts for part in part_paths(draft)],
        "--file": [options.file] if options.file not in (None, STDIN) else [],
        "--pace": [Path(options.pace.partition(":")[0])] if options.pace else [],
    }


def sizes_of(info: ModelInfo) -> Sizes:
    return Sizes(info.layer_bytes, info.kv_bytes_per_cell, info.input_bytes, info.output_bytes)


def read_prompt(options: RunOptions) -> str:
    if options.prompt is not None and options.file is None:
        return options.prompt
    if options.prompt is not None or options.file is None:
        raise UserError("give the prompt with -p TEXT or with -f FILE (- is standard input), one of them")
    try:
        if options.file == STDIN and sys.stdin is None:
            raise UserError("--file -: standard input is closed; give the prompt with -p, or name a file")
        with nullcontext(sys.stdin.buffer) if options.file == STDIN else options.file.open("rb") as file:
            return read_limited(file, f"--file {options.file}").decode().removesuffix("\n")
    except OSError as error:
        raise UserError(f"--file {options.file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--file {options.file} is not UTF-8 text (byte {error.start})") from None


def fit_context(options: RunOptions, info: ModelInfo, n_prompt: int) -> tuple[int, int]:
    """(context size, tokens to generate), both final. Raises UserError when they do not fit."""
    limit = options.ctx_size or min(info.n_ctx_train, MAX_CTX)
    source = f"-c {limit}" if options.ctx_size else f"the model's context of {limit}"
    way_out = "raise -c" if options.ctx_size else "give -c to go beyond what it was trained for"
    if n_prompt >= limit:
        raise UserError(f"the prompt has {n_prompt} tokens, {source} holds {limit} with the text to come; {way_out}")
    if options.predict < 0:
        n_ctx = options.ctx_size or min(limit, max(DEFAULT_CTX, 2 * n_prompt))
        return n_ctx, n_ctx - n_prompt
    if n_prompt + options.predict > limit:
        raise UserError(
            f"-n {options.predict} would be cut: {source} leaves {limit - n_prompt} tokens "
            f"after the {n_prompt} of the prompt; "
            f"use -n {limit - n_prompt} or -n -1, or {way_out}"
        )
    return options.ctx_size or n_prompt + options.predict, options.predict


def spread_threads(threads: tuple[int, ...], plan: Plan, hosts: Sequence[Host]) -> tuple[int, ...]:
    """Threads of each rank: as given, else the cores of each host shared by all ranks that compute there."""
    defaults = share_cores(hosts, plan.computing)
    return tuple(threads_of_rank(threads, rank, len(hosts), default) for rank, default in enumerate(defaults))
