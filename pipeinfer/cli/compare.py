"""`pipeinfer compare`: all policies on the same cluster and choices, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeinfer.cli.setting_options import command, take_policies
from pipeinfer.cli.simulate import POLICY_LIST, inputs_of, open_choices, open_profile, ranks_asked, simulate_command
from pipeinfer.cluster.activations import WireType
from pipeinfer.core.policy import Policy
from pipeinfer.job.options.values import File
from pipeinfer.observe.markdown import markdown_table
from pipeinfer.observe.timeline import picture_format
from pipeinfer.outputs import check_separate, check_writable
from pipeinfer.policies.registry import POLICIES
from pipeinfer.virtual.compare import COLUMNS, compare, table
from pipeinfer.virtual.study import Question

SHARED = ("profile_name", "pair", "nodes", "gbit", "wire_type", "predict", "prompt_tokens", "seed", "repetitions",
          "acceptances", "ranks", "files")  # fmt: skip
TEXT = ("policy", "settings")


@command("compare", Policy)
@click.option("--policy", "policies", type=POLICY_LIST, default=",".join(POLICIES), show_default=True, help="Which.")
@click.option("-o", "--output", type=File(), help="Draw the speeds, with the limit as a line: .png, .svg or .pdf.")
def compare_command(
    profile_name: str | None, pair: str | None, nodes: int, gbit: float | None, wire_type: WireType,
    policies: tuple[str, ...], predict: int, prompt_tokens: int, seed: int, repetitions: int,
    acceptances: tuple[float, ...], ranks: tuple[tuple[float, ...], ...], files: tuple[Path, ...], output: Path | None,
    **others: Any,
) -> int:  # fmt: skip
    """Compare policies on a cluster described by a profile: the same texts, guesses and costs for all of them.

    The table goes to standard output. `of the limit`: beside a pipeline that emits a token whenever its slowest stage
    has evaluated a single row; where rows are cheap, runs from which several tokens come can pass it. The same options
    always give the same figures; for real ranks there is `bench`.
    """
    check_separate({"--output": output}, inputs_of(profile_name, files, ()))
    if output:
        picture_format(output)
        check_writable(output, "--output")
    question = Question(
        file=open_profile(profile_name), nodes=nodes, pair=pair or "", gbit=gbit,
        policies=take_policies(policies, others), predict=predict, prompt_tokens=prompt_tokens,
        by_rank=ranks_asked(acceptances, ranks, bool(files)), known=open_choices(files, ()),
        cancel=True, partitions=True, wire_type=wire_type,
    )  # fmt: skip
    found = list(compare(question, range(seed, seed + repetitions)))
    right = [column for column in COLUMNS if column not in TEXT]
    print("\n".join(markdown_table(COLUMNS, list(table(found)), right)))
    if output:
        from pipeinfer.observe.compared import draw  # matplotlib takes a while

        draw(output, [(each.policy, each.speeds) for each in found], min(each.limit for each in found))
    return 0


compare_command.params += [option for option in simulate_command.params if option.name in SHARED]
