"""Requests of HTTP -> requests to the models: parsed, rendered and tokenised beside the serving loop. Knows no HTTP."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Thread
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from pipeinfer.cluster.verdicts import MAX_TOP
from pipeinfer.errors import UserError
from pipeinfer.job.requests.answers import schemas_to_check
from pipeinfer.job.requests.body import Body, Defaults, are_prompts, prompt_parts, read_body
from pipeinfer.job.requests.body_prompts import BodyPrompts
from pipeinfer.job.requests.fields import CHAT, LENGTHS, PassedOver, flag, is_list_of, is_whole, refuse, shown, whole
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.models.text.grammar import check_grammar

T = TypeVar("T")
MAX_CHOICES = 128  # texts of one request, OpenAI's limit
MAX_LOGPROBS = 1 << 17  # of one request; each takes some 70 to 120 bytes of JSON
SEED_END = 2**32
ANSWER_FIELDS = ("timings_per_token", "return_progress", "return_tokens")  # llama-server's
N_TOGETHER = 64  # chats at most that one process renders
N_THREADS = 2  # threads for each kind of work. A client has one at a time
Outcome = GenerationRequest | Exception


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One request of HTTP. `bodies`: of each text, `n` in a row with the same prompt. `usage`: a stream ends with
    counts of tokens. `timed`, `progress`: llama-server's figures in streams. `tokens`: its whole answer has those of
    the text. `keep`: cells stay in the cache. `fields`: the members of its answer; empty: all. `echo`: the text begins
    with the prompt. `scores`: the answer has vLLM's `prompt_logprobs`. `passed_over`: what is ignored, with reasons.
    `schemas`: see `schemas_to_check`. `slot`: of llama-server's, which has the text. `prompt_texts`: those of each
    prompt's tokens, if the answer has them."""

    bodies: tuple[Body, ...]
    n: int
    is_chat: bool
    stream: bool
    usage: bool
    timed: bool
    progress: bool
    tokens: bool
    keep: bool
    fields: tuple[str, ...] = ()
    echo: bool = False
    scores: bool = False
    passed_over: Mapping[str, str] = field(default_factory=dict)
    schemas: Mapping[str, Any] = field(default_factory=dict)
    slot: int = 0
    prompt_texts: tuple[str, ...] = ()

    @property
    def prompts(self) -> tuple[Body, ...]:
        """The first body of each prompt."""
        return self.bodies[:: self.n]


def parse_request(body: Mapping[str, Any], url: str, defaults: Defaults, passed: PassedOver) -> ParsedRequest:
    """`url`: CHAT or COMPLETION. Raises UserError for wrong fields."""
    is_chat, fields = url == CHAT, dict(body)
    prompt, other = ("messages", "prompt") if is_chat else ("prompt", "messages")
    if prompt not in fields or other in fields:
        refuse(f"a body for {url} has {prompt}, and no {other}")
    stream = flag(fields, "stream", False)
    usage = _usage(fields, stream, passed)
    timed, progress, tokens = (flag(fields, name, False) for name in ANSWER_FIELDS)
    keep = flag(fields, "cache_prompt", is_chat or 0 in (fields.get(name) for name in LENGTHS))
    n, name = (fields["n_cmpl"], "n_cmpl") if "n_cmpl" in fields else (fields.get("n", 1), "n")
    if not is_whole(n) or not 1 <= n <= MAX_CHOICES or fields.get("n", n) != n:
        refuse(f"{name} is {shown(n)}; give a whole number from 1 to {MAX_CHOICES}, in one of n and n_cmpl")
    members = fields.pop("response_fields", [])
    if not is_list_of(str, members):
        refuse(f"response_fields is {shown(members)}; give a list of names")
    for name in ("stream", *ANSWER_FIELDS, "cache_prompt", "n", "n_cmpl"):
        fields.pop(name, None)
    echo, n_scored = (False, -1) if is_chat else (flag(fields, "echo", False), _n_scored(fields, stream))
    if not is_chat:
        fields.pop("echo", None)
    if fields.get("best_of", n) not in (n, None):
        refuse(f"best_of is {shown(fields['best_of'])}; only {n}, the number of texts (n), can be served")
    fields.pop("best_of", None)
    prompts = fields[prompt] if not is_chat and are_prompts(fields[prompt]) else [fields[prompt]]
    if len(prompts) * n > MAX_CHOICES:
        refuse(f"{len(prompts)} prompts with n {n} are {len(prompts) * n} texts; a request has up to {MAX_CHOICES}")
    first = read_body({**fields, prompt: prompts[0]}, defaults, False, passed)
    bodies = [first, *(replace(first, prompt=prompt_parts(each)) for each in prompts[1:])]
    n_prompt_logprobs = max(n_scored, first.sampling.n_logprobs if echo else -1)
    bodies = [replace(each, sampling=replace(each.sampling, n_prompt_logprobs=n_prompt_logprobs)) for each in bodies]
    schemas = schemas_to_check(first) if passed.reasons or defaults.sampling.grammar else {}
    texts = tuple(_choice_body(body, at) for body in bodies for at in range(n))
    flags = stream, usage, timed, progress, tokens, keep
    scored = tuple(filter(None, members)), echo, n_scored >= 0
    return ParsedRequest(texts, n, is_chat, *flags, *scored, passed.reasons, schemas)


def _n_scored(fields: dict[str, Any], stream: bool) -> int:
    """Of vLLM's `prompt_logprobs`: how many of the likeliest tokens have log-probabilities beside each of the prompt;
    below 0: none has."""
    if (value := fields.pop("prompt_logprobs", None)) is None:
        return -1
    if stream:
        refuse("prompt_logprobs do not come in a stream; leave stream out, or give echo and logprobs")
    return whole("prompt_logprobs", value, 0, MAX_TOP)


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


def _choice_body(body: Body, at: int) -> Body:
    """Further texts of a prompt have the next seeds."""
    seed = body.sampling.seed
    return replace(body, sampling=replace(body.sampling, seed=(seed + at) % SEED_END)) if seed >= 0 and at else body


def check_logprobs(parsed: ParsedRequest, requests: Sequence[GenerationRequest]) -> None:
    """Raises UserError for an answer that may have more than MAX_LOGPROBS log-probabilities. The tokens of a lone text,
    whose number a request need not say, are not counted: they take as long as the text."""
    n, are_several = 0, len(requests) > 1
    for request in requests:
        n_top, n_prompt_top = request.sampling.n_logprobs + 1, request.sampling.n_prompt_logprobs + 1
        n_times = parsed.scores + (parsed.echo and n_top > 0)  # that the answer has the prompt's tokens
        n += n_times * len(request.prompt) * n_prompt_top + are_several * request.n_predict * n_top
    if n > MAX_LOGPROBS:
        what = f"the answer may have {n} log-probabilities (tokens x likeliest tokens and one more, of all texts)"
        way_out = "ask for fewer texts (n), tokens (max_tokens) or likeliest tokens"
        refuse(f"{what}, and up to {MAX_LOGPROBS} can be served; {way_out}")


# -- prompts


class Turns:
    """Threads that work for clients in turn."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(N_THREADS, name)
        self._locks = WeakValueDictionary[str, asyncio.Lock]()

    async def take(self, client: str, work: Callable[[], T]) -> T:
        """The result of `work`, which starts after this client's earlier work. Cancelled, it does not start."""
        lock = self._locks.get(client) or asyncio.Lock()
        self._locks[client] = lock
        async with lock:
            future = self._threads.submit(work)
            result = asyncio.wrap_future(future)
            try:
                return await asyncio.shield(result)
            except asyncio.CancelledError:
                if not future.cancel():  # it runs, and the client's next work waits for it
                    await asyncio.wait({result})
                raise


class Prompting:
    """Threads that tokenise, that render chats, and that check grammars, of which some take seconds."""

    def __init__(self, prompts: BodyPrompts) -> None:
        self.prompts = prompts
        self._tokenising, self._rendering, self._checking = Turns("tokenise"), Turns("render"), Turns("check")
        self._chats: dict[str, list[tuple[Body, asyncio.Future[Outcome]]]] = {}  # by client, while it has some
        self._tasks = set[asyncio.Task[None]]()
        Thread(target=self._start_ahead, daemon=True).start()

    def _start_ahead(self) -> None:
        with suppress(UserError):  # chats are refused with it
            self.prompts.format.template.process.start_ahead()

    async def ask(self, parsed: ParsedRequest, client: str) -> list[GenerationRequest]:
        """A request for each text. Raises UserError for the first prompt that cannot be served."""
        bodies = parsed.prompts
        await self._check({body.sampling.grammar for body in bodies if not body.ignore_eos}, client)
        outcomes: Sequence[Outcome]
        if parsed.is_chat:
            outcomes = await self._ask_chats(bodies, client)
        else:
            outcomes = await self.tokenise(client, partial(self.prompts.ask, bodies))
        requests = list[GenerationRequest]()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            requests.append(outcome)
        await self._check({request.sampling.grammar for request in requests}, client)
        return [
            replace(request, sampling=replace(request.sampling, seed=body.sampling.seed).settled, keep=parsed.keep)
            for at, body in enumerate(parsed.bodies)
            for request in [requests[at // parsed.n]]
        ]

    async def _check(self, grammars: set[str], client: str) -> None:
        for grammar in grammars - {""}:
            await self._checking.take(client, partial(check_grammar, self.prompts.tokenizer, grammar))

    async def rendered(self, body: Body, client: str) -> str:
        """The text of a chat. Raises UserError."""
        return (await self._rendering.take(client, lambda: self.prompts.rendered(body))).text

    async def tokenise(self, client: str, work: Callable[[], T]) -> T:
        """The result of work with the vocabulary."""
        return await self._tokenising.take(client, work)

    async def _ask_chats(self, bodies: Sequence[Body], client: str) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Outcome]] = [loop.create_future() for _ in bodies]
        if client not in self._chats:
            self._chats[client] = []
            task = loop.create_task(self._render(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._chats[client] += zip(bodies, futures, strict=True)
        return list(await asyncio.gather(*futures))

    async def _render(self, client: str) -> None:
        """Render the client's chats while there are any. Those that come meanwhile are rendered together."""
        while chats := [each for each in self._chats[client] if not each[1].done()]:
            group, self._chats[client] = chats[:N_TOGETHER], chats[N_TOGETHER:]
            outcomes: Sequence[Outcome]
            try:
                outcomes = await self._rendering.take(client, partial(self.prompts.ask, [body for body, _ in group]))
            except Exception as error:  # also where no process can be started: each request gets it
                outcomes = [error] * len(group)
            for (_, future), each in zip(group, outcomes, strict=True):
                if not future.done():
                    future.set_result(each)
        del self._chats[client]
        await asyncio.to_thread(self._start_ahead)
