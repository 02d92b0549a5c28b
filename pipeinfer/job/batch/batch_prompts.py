"""A batch's requests -> what is to be generated, in the order of the file, some at a time. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from pipeinfer.errors import UserError
from pipeinfer.job.batch.batch_file import BatchRequest
from pipeinfer.job.requests.body_prompts import BodyPrompts
from pipeinfer.job.requests.request import GenerationRequest

N_AT_ONCE = 64
"""Requests whose templates are rendered together: a process is started for them."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that can be asked, or what is wrong with it."""

    request: BatchRequest
    asked: GenerationRequest | UserError


def ready(requests: Iterable[BatchRequest], prompts: BodyPrompts) -> Iterator[Ready]:
    """Each of them, some at a time. Raises UserError where all chats fail: for files of templates."""
    rest = iter(requests)
    while group := list(islice(rest, N_AT_ONCE)):
        for request, asked in zip(group, prompts.ask([each.body for each in group]), strict=True):
            yield Ready(request, asked)
