"""The options that shape speculation, the same for every command that runs policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from pipeinfer.cli.values import PROBABILITY, Whole
from pipeinfer.policies.factory import PolicyOptions

Command = TypeVar("Command", bound=Callable[..., Any])
MAX_RUNS = 1000
DEFAULT = PolicyOptions()

OPTIONS = (
    click.option(
        *("--draft", "--draft-max", "--draft-n", "--spec-draft-n-max", "n_draft"), type=Whole(1, 64),
        default=DEFAULT.n_draft, show_default=True, help="Guesses a tree (policy speculative).",
    ),
    click.option(
        "--width", type=Whole(1, 16), default=DEFAULT.width, show_default=True,
        help="Guesses after each token at most.",
    ),
    click.option(
        "--microbatch", type=Whole(0, 64), default=DEFAULT.microbatch, show_default=True,
        help="Guesses a run at most (policy pipeinfer); 0: as many as cost hardly more than one row.",
    ),
    click.option(
        "--inflight", type=Whole(0, MAX_RUNS), default=DEFAULT.inflight, show_default=True,
        help="Runs in flight at most (policy pipeinfer); 0: one more than there are stages.",
    ),
    click.option(
        *("-pa", "--accept-cutoff", "--draft-p-min", "--spec-draft-p-min", "accept_cutoff"), type=PROBABILITY,
        default=DEFAULT.accept_cutoff, show_default=True, help="Probability from which the draft's first guess counts.",
    ),
    click.option(
        *("-ps", "--split-cutoff", "--draft-p-split", "--spec-draft-p-split", "split_cutoff"), type=PROBABILITY,
        default=DEFAULT.split_cutoff, show_default=True, help="The same for further guesses, which make branches.",
    ),
    click.option(
        *("-pr", "--recovery"), type=PROBABILITY, default=DEFAULT.recovery, show_default=True,
        help="Added to -pa for every expansion, until a guess is accepted.",
    ),
    click.option(
        *("-pd", "--decay"), type=PROBABILITY, default=DEFAULT.decay, show_default=True,
        help="Taken off -pa for every expansion that finds no guess.",
    ),
    click.option(
        "--no-continuous", "continuous", flag_value=False, type=bool, default=True,
        help="Ablation: one run of guesses in flight at a time.",
    ),
    click.option(
        "--no-async", "asynchronous", flag_value=False, type=bool, default=True,
        help="Ablation: the draft works only while the pipeline is empty.",
    ),
)  # fmt: skip


def policy_options(command: Command) -> Command:
    """Add the options to a click command; `take_policy_options` collects what they gave."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def take_policy_options(given: dict[str, Any]) -> PolicyOptions:
    """Move the options' values out of a command's keyword arguments."""
    return PolicyOptions(**{field.name: given.pop(field.name) for field in fields(PolicyOptions)})
