"""The server's endpoints. Each reads what a client says and answers; knows no MPI and no engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pipeinfer.errors import UserError
from pipeinfer.job.requests.field_names import CHAT, COMPLETION
from pipeinfer.job.requests.fields import PassedOver, flag, is_whole, refuse, shown
from pipeinfer.job.requests.logprobs import speller
from pipeinfer.job.requests.request_body import Defaults, read_json
from pipeinfer.job.serve.front import Setup
from pipeinfer.models.text.chat import TemplateFault
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server import handlers
from pipeinfer.server.access import Access, App
from pipeinfer.server.asked import Asked, read_asked
from pipeinfer.server.choices import Choice
from pipeinfer.server.dialects import anthropic, responses
from pipeinfer.server.dialects.anthropic import COUNT_TOKENS, MESSAGES, MessageForm
from pipeinfer.server.dialects.llama_cpp import (
    INFILL,
    NOT_SAVED,
    CompletionForm,
    infill_of,
    props,
    with_suffix,
)
from pipeinfer.server.dialects.responses import RESPONSES, ResponseForm
from pipeinfer.server.errors import Refusal
from pipeinfer.server.forms import Form, event
from pipeinfer.server.head import Head, State
from pipeinfer.server.metrics import CONTENT_TYPE, Metrics
from pipeinfer.server.options import HttpOptions
from pipeinfer.server.pages import KINDS, show_page
from pipeinfer.server.prompting import Prompting
from pipeinfer.server.request_log import RequestLog
from pipeinfer.server.respond import AnswerResponse, EventsResponse, JsonResponse, passed_over_header

T = TypeVar("T")

STALLS_S = 10.0
"""How long one token may take while nothing else is done."""

SMALL_BODY = 16 << 10
"""Bytes of a body that is read at once, within some 2 ms."""

MAX_CONTENT = 1 << 17
"""Characters that /tokenize takes: their tokens are written as JSON without a pause, in some 70 ms."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """As what `url` a request is read, after `body` has made it one of the core's, and the form of its answers."""

    url: str
    form: type[Form]
    body: Callable[[dict[str, Any], Tokenizer, PassedOver], dict[str, Any]] = lambda given, tokenizer, passed: given


DIALECTS = {
    COMPLETION: Dialect(COMPLETION, Form, with_suffix),
    CHAT: Dialect(CHAT, Form),
    MESSAGES: Dialect(CHAT, MessageForm, lambda given, tokenizer, passed: anthropic.chat_of(given, passed)),
    RESPONSES: Dialect(CHAT, ResponseForm, lambda given, tokenizer, passed: responses.chat_of(given, passed)),
    "/completion": Dialect(COMPLETION, CompletionForm),
    INFILL: Dialect(COMPLETION, CompletionForm, infill_of),
}
"""By path."""


class Api:
    """What all endpoints share."""

    def __init__(self, http: HttpOptions, setup: Setup, head: Head, prompting: Prompting, metrics: Metrics) -> None:
        self.http, self.setup, self.head, self.prompting, self.metrics = http, setup, head, prompting, metrics
        self.model = http.alias or setup.run.model.name
        self.created, self.log = int(time.time()), RequestLog(http.log_format)
        self.spell = speller(prompting.prompts.tokenizer)
        prompting.prompts.warn = self.log.warn
        options = setup.run
        self.defaults = Defaults(
            options.sampling, options.predict, options.stops, options.ignore_eos, strict=http.strict
        )

    def app(self, address: str) -> App:
        """`address`: where it listens."""
        app = FastAPI(title="pipeinfer", openapi_url=None, docs_url=None, redoc_url=None)
        post, get = self._adder(app, "POST"), self._adder(app, "GET")
        for version in ("", "/v1"):
            get(f"{version}/health", self.health)
            get(f"{version}/models", self.models)
            get(f"{version}/models/{{name:path}}", self.one_model)
        for path in DIALECTS:
            post(path, self.completions)
        post(COUNT_TOKENS, self.count_tokens)
        post("/apply-template", self.apply_template)
        get("/props", self.props)
        post("/tokenize", self.tokenize)
        post("/detokenize", self.detokenize)
        get("/events", self.events)
        if self.http.metrics:
            get("/metrics", self.show_metrics)
        if self.http.slots:
            get("/slots", self.slots)
            post("/slots/{id}", self.save_slot)
        for path in KINDS if self.http.page else ():
            get(path, show_page)
        app.add_exception_handler(Refusal, handlers.refused)
        app.add_exception_handler(UserError, handlers.wrong)
        app.add_exception_handler(TemplateFault, handlers.not_rendered)
        app.add_exception_handler(HTTPException, handlers.no_endpoint)
        app.add_exception_handler(ClientDisconnect, handlers.left)
        app.add_exception_handler(Exception, handlers.fault)
        return Access(app, self.http.api_keys, self.http.host, address, self.http.origins)

    @staticmethod
    def _adder(app: FastAPI, method: str) -> Callable[[str, Callable[..., Any]], None]:
        return lambda path, endpoint: app.add_route(path, endpoint, methods=[method])

    # -- state

    async def health(self, request: Request) -> Response:
        """200 while requests are taken, and tokens come."""
        if self.head.stalls_s > STALLS_S:
            reason = f"no token has come for {self.head.stalls_s:.0f} s"
            return JsonResponse({"status": "stalled", "reason": reason}, 503)
        if self.head.state is State.READY:
            return JsonResponse({"status": "ok"})
        if self.head.state is State.RECOVERING:
            return JsonResponse({"status": "recovering", "reason": self.head.reason}, 503)
        self.head.check_ready()
        raise AssertionError("a state without a refusal")

    def _model(self) -> dict[str, Any]:
        return {"id": self.model, "object": "model", "created": self.created, "owned_by": "pipeinfer",
                "max_model_len": self.setup.limit, "system_fingerprint": self.setup.version}  # fmt: skip

    async def models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.model:
            raise Refusal(404, f"there is no model {name[:200]!r}; there is {self.model!r}")
        return JsonResponse(self._model())

    async def slots(self, request: Request) -> Response:
        """The texts that are being written or wait."""
        return JsonResponse([_slot(choice) for choice in self.head.choices.values()])

    async def save_slot(self, request: Request) -> Response:
        raise Refusal(501, NOT_SAVED)

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def events(self, request: Request) -> Response:
        """Pictures of the pipeline, for as long as somebody watches."""
        self.head.check_ready()
        queue = self.head.watch()

        async def pictures() -> AsyncIterator[bytes]:
            while self.head.state is State.READY:
                try:
                    picture = await asyncio.wait_for(queue.get(), 1.0)
                except asyncio.TimeoutError:
                    continue
                running = sum(choice.is_running for choice in self.head.choices.values())
                yield event({"seconds": picture.seconds, "ranks": picture.ranks, "running": running,
                             "waiting": len(self.head.choices) - running})  # fmt: skip

        return EventsResponse(pictures(), lambda: self.head.unwatch(queue))

    # -- texts

    async def _asked(self, request: Request, dialect: Dialect) -> Asked:
        tokenizer, passed = self.prompting.prompts.tokenizer, PassedOver(self.http.strict)

        def read(given: dict[str, Any]) -> Asked:
            return read_asked(dialect.body(given, tokenizer, passed), dialect.url, self.defaults, passed)

        asked = await self._body(request, read)
        self.log.passed_over(asked.passed_over)
        return asked

    async def completions(self, request: Request) -> Response:
        path = request.url.path
        dialect = DIALECTS[path]
        asked = await self._asked(request, dialect)
        if dialect.form not in (Form, CompletionForm) and len(asked.bodies) > 1:
            refuse(f"{len(asked.bodies)} texts are asked for, and an answer of {path} has one")
        if asked.bodies[0].priority and not self.http.priorities:
            refuse(f"priority is {asked.bodies[0].priority}, and this server takes none; leave it out, or start the "
                   "server with --priorities")  # fmt: skip
        self.head.check_ready()
        found = await self.prompting.ask(asked, _client(request))
        answer = self.head.ask(found, _client(request))
        form = dialect.form(asked, answer, self.model, self.setup.version, self.spell)
        return AnswerResponse(
            self.head, answer, form, lambda: self.log.ended(str(form.common["id"]), path, answer),
            passed_over_header(asked.passed_over), lambda wrong: self.log.warn(f"{form.common['id']}: {wrong}"),
        )  # fmt: skip

    async def count_tokens(self, request: Request) -> Response:
        """Anthropic's: of a conversation."""
        asked = await self._asked(request, DIALECTS[MESSAGES])
        (found, *_) = await self.prompting.ask(asked, _client(request))
        return JsonResponse({"input_tokens": len(found.prompt)})

    async def apply_template(self, request: Request) -> Response:
        """llama.cpp's: the text that a chat asks the model with."""
        asked = await self._asked(request, DIALECTS[CHAT])
        return JsonResponse({"prompt": await self.prompting.rendered(asked.bodies[0], _client(request))})

    async def props(self, request: Request) -> Response:
        prompts = self.prompting.prompts
        return JsonResponse(props(self.setup, self.model, prompts.format.template.source, prompts.tokenizer))

    async def tokenize(self, request: Request) -> Response:
        """llama.cpp's: `content` (or `prompt`), `add_special`, `parse_special`, `with_pieces`."""
        given = await self._body(request, dict)
        known = {"content", "prompt", "add_special", "parse_special", "with_pieces", "model"}
        if self.http.strict and (unknown := set(given) - known):
            refuse(f"the field {shown(min(unknown))} is unknown; leave it out")
        text = given.get("content", given.get("prompt"))
        if not isinstance(text, str):
            refuse(f"content is {shown(text)}; give a text")
        if len(text) > MAX_CONTENT:
            refuse(f"content has {len(text)} characters; up to {MAX_CONTENT} are tokenised at a time, send it in parts")
        add, parse = flag(given, "add_special", False), flag(given, "parse_special", True)
        pieces, tokenizer = flag(given, "with_pieces", False), self.prompting.prompts.tokenizer

        def work() -> Response:
            tokens: list[Any] = tokenizer.encode(text, add, parse)
            found = [_piece(tokenizer, token) for token in tokens] if pieces else tokens
            return JsonResponse({"tokens": found, "count": len(found), "max_model_len": self.setup.limit})

        return await self.prompting.tokenise(_client(request), work)

    async def detokenize(self, request: Request) -> Response:
        tokenizer = self.prompting.prompts.tokenizer
        n_vocab = tokenizer.n_vocab

        def read(given: dict[str, Any]) -> list[int]:
            tokens = given.get("tokens")
            if not isinstance(tokens, list) or not all(is_whole(each) and 0 <= each < n_vocab for each in tokens):
                refuse(f"tokens is {shown(tokens)}; give a list of token ids below {n_vocab}")
            return tokens

        tokens = await self._body(request, read)
        data = await self.prompting.tokenise(
            _client(request), lambda: b"".join(tokenizer.decode_piece(token, special=True) for token in tokens)
        )
        return JsonResponse({"content": data.decode("utf-8", "replace")})

    async def _body(self, request: Request, read: Callable[[dict[str, Any]], T]) -> T:
        """What `read` makes of the body. A thread reads large ones, so that other clients are served meanwhile.

        Raises Refusal when it is too large or does not come, UserError when it is no JSON object, and what `read` does.
        """
        try:
            data = await asyncio.wait_for(_read(request, self.http.max_body), self.http.timeout_s)
        except asyncio.TimeoutError:
            raise Refusal(408, f"the request was not complete after {self.http.timeout_s:g} s") from None

        def work() -> T:
            given = read_json(data, "the body")
            request.state.fields = frozenset(given)  # their values would live as long as the connection
            return read(given)

        return work() if len(data) <= SMALL_BODY else await self.prompting.tokenise(_client(request), work)


def _client(request: Request) -> str:
    """Whom a request comes from, as far as that can be told without trust."""
    return request.client.host if request.client else ""


async def _read(request: Request, n_most: int) -> bytes:
    message = f"the request is longer than {n_most} bytes; say less, or start the server with a larger --max-body"
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > n_most:
        raise Refusal(413, message)
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > n_most:
            raise Refusal(413, message)
    return bytes(data)


def _slot(choice: Choice) -> dict[str, Any]:
    return {
        "id": choice.id, "is_processing": choice.is_running, "n_ctx": choice.asked.n_ctx,
        "n_prompt_tokens": len(choice.asked.prompt), "n_prompt_tokens_processed": choice.n_evaluated,
        "n_decoded": choice.n_tokens,
        "n_predict": choice.asked.n_predict, "seed": choice.asked.sampling.seed,
        "seconds": round(time.monotonic() - choice.asked_s, 3),
    }  # fmt: skip


def _piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    data = tokenizer.decode_piece(token, special=True)
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}
