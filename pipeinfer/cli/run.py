"""`pipeinfer run`: its options. What they do is in `job`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.cache_options import cache_options
from pipeinfer.cli.chat_options import chat_options, take_chat, take_stops
from pipeinfer.cli.command import Command, is_from_environment, variable_of
from pipeinfer.cli.constraint_options import constraint_options, take_biases, take_grammar
from pipeinfer.cli.environment import ignored_variables, read_variables
from pipeinfer.cli.hub_options import hub_options, take_models
from pipeinfer.cli.rank_options import rank_options
from pipeinfer.cli.setting_options import policy_meant, policy_options, sampling_options, take_policies, take_sampling
from pipeinfer.cli.values import (
    MAX_LAYERS,
    THREADS,
    BackendName,
    File,
    Folder,
    GpuLayers,
    Listed,
    Split,
    Text,
    Whole,
    WireName,
)
from pipeinfer.cluster.launch import rank_from_environment
from pipeinfer.errors import UserError
from pipeinfer.job.options.options import (
    AUTO,
    DEFAULT,
    MAX_CTX,
    MAX_SAMPLERS,
    MAX_SEQUENCES,
    OFF,
    ON,
    RunOptions,
    choose_drafts,
    unescape,
)
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.policies.registry import POLICIES


@click.command(cls=Command)
@click.option("-m", "--model", type=File(), help="Target model, GGUF. [default: the shipped demonstration pair]")
@click.option(
    "-md",
    "--model-draft",
    "--spec-draft-model",
    "drafts",
    type=File(),
    multiple=True,
    help="Draft model, GGUF, with nearly the target's vocabulary. Of several the smallest guesses, larger ones refine. "
    "none: no draft.",
)
@hub_options
@click.option(
    "--lookup",
    is_flag=True,
    help="Guess also what followed the newest tokens where they stood before; alone, or beside a draft.",
)
@click.option("-p", "--prompt", type=Text(blank=True), help="The text to continue.")
@click.option(
    "-f",
    "--file",
    type=File(stdin=True),
    help="Read the prompt from this file, without a newline at its end; - is standard input.",
)
@click.option(
    "--escape/--no-escape",
    "-e",
    default=True,
    show_default=True,
    help=r"In -p, \n is a new line; so are \t, \r, \', \", \\, and \x with two digits.",
)
@click.option("--chat", is_flag=True, help="Ask the model with its chat template, once.")
@click.option("-cnv", "--conversation", is_flag=True, help="Talk with it, turn by turn: `pipeinfer chat`.")
@chat_options
@click.option(
    "-n",
    "--predict",
    "--n-predict",
    type=Whole(-2),
    default=DEFAULT.predict,
    show_default=True,
    help="Tokens to generate; -1 or -2: until the model ends or the context is full.",
)
@click.option(
    "-c",
    "--ctx-size",
    type=Whole(0, MAX_CTX),
    default=DEFAULT.ctx_size,
    show_default=True,
    help="Context in tokens; 0: what prompt and -n need, within what the model was trained for.",
)
@click.option(
    "-b",
    "--batch-size",
    type=Whole(1),
    default=DEFAULT.batch_size,
    show_default=True,
    help="Prompt tokens a run at most, up to 2048; a prompt is cut into smaller chunks where that fills the pipeline.",
)
@click.option(
    "-t",
    "--threads",
    type=Listed(THREADS),
    help="Threads: one value, or one a rank, as in 6,32,20. [default: the host's cores, shared]",
)
@click.option(
    "--sampler-threads",
    "samplers",
    type=Whole(0, MAX_SAMPLERS),
    help="Threads that choose tokens while the last stage evaluates its next run; 0: it chooses by itself first. "
    "[default: 1 for many requests, where that rank has a core to spare or a GPU; else 0]",
)
@click.option(
    "-ngl",
    "--gpu-layers",
    "--n-gpu-layers",
    "n_gpu_layers",
    type=Listed(GpuLayers()),
    default="0",
    show_default=True,
    help="Layers of each rank's slice to put on its GPU (needs a GPU build of llama-cpp-python); auto: all where there "
    "is one. One value, or one a rank: all,0,0 has the draft on a GPU.",
)
@click.option(
    "-ngld",
    "--gpu-layers-draft",
    "--n-gpu-layers-draft",
    "--spec-draft-ngl",
    "n_gpu_layers_draft",
    type=GpuLayers(),
    default="auto",
    show_default=True,
    help="Layers of drafts on the GPUs of their ranks; 0: libllama computes them on CPUs; auto: as -ngl and --backend "
    "have it, but of one value for all ranks a lone draft goes to the CPU where it is timed to be faster there.",
)
@click.option(
    "--backend",
    type=Listed(BackendName()),
    default="llama",
    show_default=True,
    help="What computes a rank's layers: llama, or torch (needs PyTorch): on a GPU in bf16 where there is one, else on "
    "the CPU in f32; torch:cpu, torch:cuda:1, torch:cpu:bf16, torch:int8, torch:int4 say which. One value, or one a "
    "rank.",
)
@rank_options
@click.option("--policy", type=click.Choice(POLICIES), help="[default: auto with a draft, iterative without]")
@click.option(
    "--layer-split",
    type=Split(),
    help="Layers a stage (4,4,8) or proportions (0.25,0.25,0.5). [default: by size, or as ranks that are not alike are "
    "timed]",
)
@click.option(
    "--draft-split",
    type=Listed(Whole(1, MAX_LAYERS)),
    default=(),
    help="Ranks that a larger draft takes, its layers cut by size; of several larger drafts 1,3, the smaller first. "
    "[default: 1 each]",
)
@click.option(
    "--draft-rank",
    type=Whole(0),
    default=DEFAULT.draft_rank,
    help="The rank that a lone draft has. [default: that whose layers are missed least, as ranks that are not alike "
    "are timed; 0 among such that are]",
)
@click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-generation token.")
@click.option(
    "--numerics",
    type=click.Choice(["exact", "fast"]),
    default=DEFAULT.numerics,
    show_default=True,
    help="exact: every policy and rank count gives the same bits; fast: llama.cpp's default kernels.",
)
@click.option(
    "--wire-type",
    type=WireName(),
    default="f32",
    show_default=True,
    help="What activations travel as between ranks: f32, or bf16, half the bytes, rounded (with --numerics fast).",
)
@click.option(
    "--gpu-aware",
    type=click.Choice([AUTO, ON, OFF]),
    default=DEFAULT.gpu_aware,
    show_default=True,
    help="Activations between stages of torch go from device to device by MPI; auto: from GPUs, where MPI says that it "
    "is GPU-aware; on: from CPUs too, and where MPI does not say.",
)
@cache_options
@click.option(
    "--slice-cache", type=Folder(), help="Keep each rank's slice in this directory of its host, for the next start."
)
@click.option(
    "--send-layers/--no-send-layers",
    default=DEFAULT.send_layers,
    show_default=True,
    help="Ranks whose hosts lack a model's file get their layers from rank 0; else they are refused.",
)
@click.option(
    "--pace",
    type=Text(),
    help="Slow ranks and links down to this profile's (see `simulate`): NAME, or NAME:PAIR of models.",
)
@click.option(
    "--couple-draft/--no-couple-draft",
    "couple",
    default=True,
    show_default=True,
    help="Sampling: guesses share the target's random numbers, so that more are right.",
)
@sampling_options
@constraint_options
@policy_options
@click.option("--no-cancel", "cancel", flag_value=False, type=bool, default=True, help="Ablation: dead runs go on.")
@click.option(
    "--no-partitions",
    "partitions",
    flag_value=False,
    type=bool,
    default=True,
    help="Ablation: one sequence only. Where layers keep states nothing is guessed then.",
)
@click.option(
    "--no-prepare-ahead",
    "prepare_ahead",
    flag_value=False,
    type=bool,
    default=True,
    help="Ablation: a GPU's next run is prepared when the one before it is evaluated (torch).",
)
@click.option(
    "--no-post-ahead",
    "post_ahead",
    flag_value=False,
    type=bool,
    default=True,
    help="Ablation: a message is received when its length is known.",
)
@click.option(
    "--sequences",
    type=Whole(0, MAX_SEQUENCES),
    default=DEFAULT.sequences,
    show_default=True,
    help="Branches that trees may have at a time, or guesses where layers keep states; when they run out, trees get "
    "narrower. 0: as the policy can use.",
)
@click.option("--results", type=File(), help="Append a row of figures to this CSV file.")
@click.option("--trace", type=File(), help="Write the timeline of all ranks, as Chrome trace events.")
@click.option("--json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option("-v", "--verbose", is_flag=True, help="More about loading and about each rank.")
def run(conversation: bool, chat: bool, **others: Any) -> int:
    """Generate text. Text goes to standard output, the plan and the statistics to standard error.

    Under mpirun every rank runs this command: one drafts, rank 0 as a rule, the others hold the target's layers.
    Without a draft all do; of several drafts each takes a rank, a larger one as many as --draft-split says.
    """
    warn_of_variables(click.get_current_context().command)
    options = run_options(chat=chat or conversation, **others)
    if conversation:
        if options.results or options.trace:
            raise UserError("--results and --trace are of one text, -cnv has many; leave them out, or ask with --chat")
        from pipeinfer.job.chat.chat import run_chat  # initialises MPI

        return run_chat(options)
    from pipeinfer.job.run.run import run_job  # initialises MPI

    return run_job(options)


def run_options(
    model: Path | None,
    drafts: tuple[Path, ...],
    policy: str | None,
    lookup: bool,
    threads: tuple[int, ...] | None,
    prompt: str | None,
    escape: bool,
    chat: bool,
    **others: Any,
) -> RunOptions:
    """What the command line asks for. Raises UserError for options that do not go together."""
    model, drafts = take_models(model, drafts, others)
    drafts = choose_drafts(drafts, () if model else (DRAFT,))
    (chosen,) = take_policies([policy_meant(policy, bool(drafts) or lookup, others)], others)
    return RunOptions(
        model=model or TARGET,
        drafts=drafts,
        lookup=lookup,
        policy=chosen,
        sampling=replace(take_sampling(others), logit_bias=take_biases(others)),
        threads=threads or (),
        prompt=unescape(prompt) if prompt and escape else prompt,
        chat=take_chat(others, chat, escape),
        stops=take_stops(others, escape),
        grammar=take_grammar(others),
        **others,
    )


def warn_of_variables(command: click.Command) -> None:
    """Say, on one rank, which of llama.cpp's variables are read, and which are set in vain."""
    if rank_from_environment() == 0:
        ctx = click.get_current_context()
        read = [variable_of(param) for param in command.params if is_from_environment(ctx, str(param.name))]
        if read:
            click.echo(f"pipeinfer: options are given by {', '.join(sorted(read))}", err=True)
        for line in ignored_variables(command, os.environ):
            click.echo(f"pipeinfer: {line}", err=True)


read_variables(run)
