"""What a client asks for in one request, beyond what a batch's line may say: several texts, pieces as they come.

Knows no HTTP and tokenises nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeinfer.job.requests.answer_check import schemas_to_check
from pipeinfer.job.requests.field_names import CHAT, LENGTHS
from pipeinfer.job.requests.fields import PassedOver, flag, is_whole, refuse, shown
from pipeinfer.job.requests.request_body import Body, Defaults, read_body, read_prompt

MAX_CHOICES = 128
"""Of one request, as OpenAI has it."""

SEED_END = 2**32


@dataclass(frozen=True, slots=True)
class Asked:
    """`bodies`: one for each text, `n` in a row with the same prompt. `stream`: pieces as they come. `usage`: counts of
    tokens at the end of a stream too. `timed`: each piece says when it was there. `progress`: how much
    of the prompt is evaluated is said before. `keep`: what is evaluated stays. `fields`: those of llama-server's answer
    that are wanted; empty: all. `passed_over`: fields and parts that are not served, and why. `schemas`:
    those that the answers are compared with, see `schemas_to_check`."""

    bodies: tuple[Body, ...]
    n: int
    is_chat: bool
    stream: bool
    usage: bool
    timed: bool
    progress: bool
    keep: bool
    fields: tuple[str, ...] = ()
    passed_over: Mapping[str, str] = field(default_factory=dict)
    schemas: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompts(self) -> tuple[Body, ...]:
        """Of those with the same prompt the first."""
        return self.bodies[:: self.n]


OF_STREAMS = ("timings_per_token", "return_progress")
"""llama-server's fields that say more in a stream."""


def read_asked(given: Mapping[str, Any], url: str, defaults: Defaults, passed: PassedOver) -> Asked:
    """`passed`: has what is passed over already. Raises UserError for what is wrong with it."""
    is_chat, fields = url == CHAT, dict(given)
    wanted, other = ("messages", "prompt") if is_chat else ("prompt", "messages")
    if wanted not in fields or other in fields:
        refuse(f"a body for {url} has {wanted}, and no {other}")
    stream = flag(fields, "stream", False)
    usage = _usage(fields, stream, passed)
    timed, progress = (flag(fields, name, False) for name in OF_STREAMS)
    keep = flag(fields, "cache_prompt", is_chat or 0 in (fields.get(name) for name in LENGTHS))
    n, name = (fields["n_cmpl"], "n_cmpl") if "n_cmpl" in fields else (fields.get("n", 1), "n")
    if not is_whole(n) or not 1 <= n <= MAX_CHOICES or fields.get("n", n) != n:
        refuse(f"{name} is {shown(n)}; give a whole number from 1 to {MAX_CHOICES}, in one of n and n_cmpl")
    named = fields.pop("response_fields", [])
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        refuse(f"response_fields is {shown(named)}; give a list of names")
    for name in ("stream", *OF_STREAMS, "cache_prompt", "n", "n_cmpl"):
        fields.pop(name, None)
    if fields.get("best_of") == n:
        del fields["best_of"]
    prompts = _prompts(fields[wanted], is_chat)
    if len(prompts) * n > MAX_CHOICES:
        refuse(f"{len(prompts)} prompts with n {n} are {len(prompts) * n} texts; a request has up to {MAX_CHOICES}")
    first = read_body({**fields, wanted: prompts[0]}, defaults, False, passed)
    bodies = [first, *(replace(first, prompt=read_prompt(each)) for each in prompts[1:])]
    texts = tuple(_nth(body, at) for body in bodies for at in range(n))
    schemas = schemas_to_check(first) if passed.reasons or defaults.sampling.grammar else {}
    fields_wanted = tuple(filter(None, named))
    return Asked(texts, n, is_chat, stream, usage, timed, progress, keep, fields_wanted, passed.reasons, schemas)


def _usage(fields: dict[str, Any], stream: bool, passed: PassedOver) -> bool:
    options = fields.pop("stream_options", None)
    if options is None:
        return False
    if not stream:
        passed.add("stream_options", "stream_options are for streams; give stream true too, or leave them out")
        return False
    if not isinstance(options, dict):
        refuse(f"stream_options is {shown(options)}; give an object, which may have include_usage")
    return flag(options, "include_usage", False)


def _prompts(value: Any, is_chat: bool) -> list[Any]:
    """One, or each of a list of them: token ids with texts between them are one."""
    several = not is_chat and isinstance(value, list) and all(isinstance(each, (str, list)) for each in value)
    return value if several and value else [value]


def _nth(body: Body, at: int) -> Body:
    """The further of several texts have the next seeds."""
    seed = body.sampling.seed
    return replace(body, sampling=replace(body.sampling, seed=(seed + at) % SEED_END)) if seed >= 0 and at else body
