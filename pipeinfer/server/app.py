"""The server's endpoints. Each reads a request and responds; knows no MPI and no engine."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from pipeinfer.errors import UserError
from pipeinfer.job.requests.answers import speller
from pipeinfer.job.requests.body_prompts import BodyPrompts
from pipeinfer.job.requests.fields import (
    CHAT,
    COMPLETION,
    PassedOver,
    adapter_list,
    read_json,
    read_scales,
    refuse,
    shown,
)
from pipeinfer.job.serve.channel import Setup
from pipeinfer.server import anthropic, llama_cpp, responses
from pipeinfer.server.access import PAGE_FILES, Access, read_body
from pipeinfer.server.anthropic import COUNT_TOKENS, MESSAGES, MessageForm
from pipeinfer.server.choices import Choice
from pipeinfer.server.errors import FULL_S, NOT_SAVED, JsonResponse, LargeJsonResponse, Refusal, error_response
from pipeinfer.server.forms import BlockForm, OpenAIForm, event
from pipeinfer.server.front import HttpOptions
from pipeinfer.server.head_client import HeadClient, HeadState
from pipeinfer.server.infill import INFILL, infill_of, with_suffix
from pipeinfer.server.metrics import CONTENT_TYPE, Metrics
from pipeinfer.server.prompting import ParsedRequest, Prompting, check_logprobs, parse_request
from pipeinfer.server.request_log import RequestLog
from pipeinfer.server.respond import STREAM_HEADERS, AnswerResponse, passed_over_header, while_connected
from pipeinfer.server.responses import RESPONSES, ResponseForm
from pipeinfer.server.tokens import Tokenising, read_tokens, text_of

T = TypeVar("T")
STALLS_S = 10.0  # how long one token may take on an idle server
SMALL_BODY = 16 << 10  # bytes of a body that is read at once, within some 2 ms
ADAPTERS = "/lora-adapters"
PAGE = Path(__file__).with_name("page")
POLICY = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:"
"""The page may load nothing but its own files."""

PAGE_HEADERS = {"cache-control": "no-cache", "content-security-policy": POLICY}
PAGE_HEADERS |= {"x-frame-options": "DENY", "x-content-type-options": "nosniff"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API. `body`: translates its requests to those of `url`, OpenAI's. `form`: of its answers."""

    url: str
    form: type[OpenAIForm]
    body: Callable[[dict[str, Any], BodyPrompts, PassedOver], dict[str, Any]] = lambda body, prompts, passed: body


DIALECTS = {
    COMPLETION: Dialect(COMPLETION, OpenAIForm, with_suffix),
    CHAT: Dialect(CHAT, OpenAIForm),
    MESSAGES: Dialect(CHAT, MessageForm, lambda body, prompts, passed: anthropic.chat_of(body, passed)),
    RESPONSES: Dialect(CHAT, ResponseForm, lambda body, prompts, passed: responses.chat_of(body, passed)),
    "/completion": Dialect(COMPLETION, llama_cpp.CompletionForm),
    INFILL: Dialect(COMPLETION, llama_cpp.CompletionForm, infill_of),
}
"""By path."""

DIALECTS |= {path.removeprefix("/v1"): DIALECTS[path] for path in (CHAT, RESPONSES)}  # llama-server's other names
DIALECTS["/completions"] = DIALECTS["/completion"]
CHATS = (CHAT, RESPONSES, *(path.removeprefix("/v1") for path in (CHAT, RESPONSES)))
COUNTED = {COUNT_TOKENS: MESSAGES, **{f"{path}/input_tokens": path for path in CHATS}}  # -> whose body they take


class Api:
    """The endpoints of a server."""

    def __init__(
        self, http: HttpOptions, setup: Setup, head: HeadClient, prompting: Prompting, metrics: Metrics
    ) -> None:
        self.http, self.setup, self.head, self.prompting, self.metrics = http, setup, head, prompting, metrics
        self.model, self.tokenizer = http.alias or setup.model.name, prompting.prompts.tokenizer
        self.created, self.log = int(time.time()), RequestLog(http.log_format)
        self.spell = speller(self.tokenizer)
        prompting.prompts.warn = self.log.warn
        self.defaults = replace(setup.defaults, strict=http.strict)
        self.in_slots: list[Choice | None] = [None] * setup.parallel  # as last told: a text keeps its slot
        self.saved: llama_cpp.SavedSlots | None = None
        if http.slot_folder and setup.saves_texts:
            n_vocab, adapters = self.tokenizer.n_vocab, self.defaults.adapters
            self.saved = llama_cpp.SavedSlots(http.slot_folder, setup, n_vocab, head, adapters)
        elif http.slot_folder:
            self.log.warn("--slot-save-path is without effect without --kv-disk SIZE, which keeps keys and values")

    def app(self, address: str) -> Access:
        """`address`: where it listens."""
        get = {
            **{f"{version}/health": self.health for version in ("", "/v1")},
            **{f"{version}/models": self.models for version in ("", "/v1")},
            **{f"{version}/models/{{name:path}}": self.one_model for version in ("", "/v1")},
            "/props": self.props,
            "/tokenizer_info": self.tokenizer_info,
            ADAPTERS: self.adapters,
            "/events": self.events,
            **({"/metrics": self.show_metrics} if self.http.metrics else {}),
            "/slots": self.slots,
            **(dict.fromkeys(PAGE_FILES, self.page) if self.http.page else {}),
        }
        post = {
            **dict.fromkeys(DIALECTS, self.completions),
            **dict.fromkeys(COUNTED, self.count_tokens),
            "/apply-template": self.apply_template,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            ADAPTERS: self.apply_adapters,
            **({"/slots/{id}": self.act_on_slot} if self.http.slots else {}),
        }
        methods = {"GET": get, "POST": post}
        routes = [Route(*each, methods=[method]) for method, endpoints in methods.items() for each in endpoints.items()]
        kinds = (Refusal, UserError, HTTPException, ClientDisconnect, Exception)
        app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, error_response))
        app.router.redirect_slashes = False  # a redirect has no body, and most clients do not follow it
        return Access(app, self.http.api_keys, self.http.host, address, self.http.origins)

    # -- state

    async def health(self, request: Request) -> Response:
        """200 while requests are accepted, and tokens come."""
        if self.head.stalls_s > STALLS_S:
            reason = f"no token has come for {self.head.stalls_s:.0f} s"
            return JsonResponse({"status": "stalled", "reason": reason}, 503)
        if self.head.state is HeadState.RECOVERING:
            return JsonResponse({"status": "recovering", "reason": self.head.reason}, 503)
        self.head.check_ready()
        return JsonResponse({"status": "ok"})

    def _model(self) -> dict[str, Any]:
        model = {"id": self.model, "object": "model", "created": self.created, "owned_by": "pipeinfer"}
        created_at = datetime.fromtimestamp(self.created, timezone.utc).isoformat().replace("+00:00", "Z")
        model |= {"type": "model", "display_name": self.model, "created_at": created_at}  # Anthropic's
        info, n_vocab = self.prompting.prompts.info, self.tokenizer.n_vocab
        meta = {"vocab_type": self.tokenizer.kind(), "n_vocab": n_vocab, "n_ctx_train": info.n_ctx_train}
        meta |= {"n_embd": info.n_embd, "n_params": info.n_params, "size": info.n_bytes}
        return model | {"max_model_len": self.setup.limit, "system_fingerprint": self.setup.version, "meta": meta}

    async def models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.model:
            raise Refusal(404, f"there is no model {name[:200]!r}; there is {self.model!r}")
        return JsonResponse(self._model())

    async def props(self, request: Request) -> Response:
        return JsonResponse(self._properties())

    def _properties(self) -> dict[str, Any]:
        template = self.prompting.prompts.format.template
        return llama_cpp.props(self.setup, self.model, template.source, self.tokenizer)

    async def slots(self, request: Request) -> Response:
        """llama-server's, and with `waiting=1` the texts that wait behind them."""
        if not self.http.slots:
            raise Refusal(501, "this server was started with --no-slots, and does not show what is being written")
        running = [choice for choice in self.head.choices.values() if choice.is_running]
        before = [choice if choice in running else None for choice in self.in_slots]
        new = iter([choice for choice in running if choice not in before])
        self.in_slots = [choice or next(new, None) for choice in before]
        if request.query_params.get("fail_on_no_slot") and all(self.in_slots):
            raise Refusal(503, "no slot is available: in each a text is being written", FULL_S)
        slots = llama_cpp.slots(self.setup, self.in_slots)
        if request.query_params.get("waiting"):
            others = (choice for choice in self.head.choices.values() if not choice.is_running)
            slots += [{"is_processing": False, **llama_cpp.open_text(choice)} for choice in others]
        return JsonResponse(slots)

    async def act_on_slot(self, request: Request) -> Response:
        """llama-server's: save, restore or erase a slot's last text."""
        if not self.saved:
            raise Refusal(501, NOT_SAVED)
        slot, action = self.saved.named(request.path_params["id"]), request.query_params.get("action", "")
        if action not in llama_cpp.ACTIONS:
            refuse(f"action is {shown(action)}; it is one of {', '.join(llama_cpp.ACTIONS)}")
        self.head.check_ready()
        fields = {} if action == "erase" else await self._body(request, dict)
        return JsonResponse(await while_connected(request, self.saved.act(action, slot, fields, _client(request))))

    async def adapters(self, request: Request) -> Response:
        """llama-server's: the adapters, and what applies where a request does not say."""
        return JsonResponse(adapter_list(self.defaults.adapters, self.defaults.scales))

    async def apply_adapters(self, request: Request) -> Response:
        """llama-server's: other factors for requests to come, a list as in a request's `lora`."""
        try:
            value = json.loads(await self._data(request))
        except (ValueError, RecursionError):
            refuse('the body is not JSON; give a list such as [{"id": 0, "scale": 1.0}]')
        self.defaults = replace(self.defaults, scales=read_scales(value, self.defaults.adapters))
        return JsonResponse({"success": True})

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def page(self, request: Request) -> Response:
        name, kind = PAGE_FILES[request.url.path]
        return Response((PAGE / name).read_bytes(), media_type=f"{kind}; charset=utf-8", headers=PAGE_HEADERS)

    async def events(self, request: Request) -> Response:
        """Snapshots of the pipeline, for as long as a client reads them."""
        self.head.check_ready()

        async def snapshots() -> AsyncIterator[bytes]:
            queue = self.head.watch()
            try:
                while self.head.state is HeadState.READY:
                    with contextlib.suppress(asyncio.TimeoutError):
                        snapshot = await asyncio.wait_for(queue.get(), 1.0)
                        running = sum(choice.is_running for choice in self.head.choices.values())
                        load = {"running": running, "waiting": len(self.head.choices) - running}
                        yield event({"seconds": snapshot.seconds, "ranks": snapshot.ranks, **load})
            finally:
                self.head.unwatch(queue)

        return StreamingResponse(snapshots(), headers=STREAM_HEADERS)

    # -- texts

    async def completions(self, request: Request) -> Response:
        path, client = request.url.path, _client(request)
        dialect = DIALECTS[path]
        parsed = await self._parsed(request, dialect)
        if issubclass(dialect.form, BlockForm) and len(parsed.bodies) > 1:
            refuse(f"{len(parsed.bodies)} texts are asked for, and an answer of {path} has one")
        if (parsed.echo or parsed.scores) and path != COMPLETION:
            refuse(f"echo and prompt_logprobs are for {COMPLETION}, and this is {path}; leave them out, or ask there")
        if parsed.bodies[0].priority and not self.http.priorities:
            reason = f"priority is {parsed.bodies[0].priority}, and this server takes none"
            refuse(f"{reason}; leave it out, or start the server with --priorities")
        self.head.check_ready()
        requests = await while_connected(request, self.prompting.ask(parsed, client))
        check_logprobs(parsed, requests)
        if dialect.form is llama_cpp.CompletionForm:
            spell_prompts = partial(llama_cpp.prompt_texts, requests[:: parsed.n], self.spell)
            parsed = replace(parsed, prompt_texts=await self._in_turn(request, spell_prompts))
        answer = self.head.ask(requests, client)
        form = dialect.form(parsed, answer, self.model, self.setup.version, self.spell)
        id = str(form.common["id"])

        def warn(line: str) -> None:
            self.log.warn(f"{id}: {line}")

        def end() -> None:
            self.log.ended(id, path, answer)
            if self.saved:
                self.saved.note(parsed.slot, answer)

        ids = {"x-request-id": id, "request-id": id}  # OpenAI's, Anthropic's
        headers = passed_over_header(parsed.passed_over) | ids
        return AnswerResponse(self.head, answer, form, headers, end, warn)

    async def count_tokens(self, request: Request) -> Response:
        """Anthropic's, OpenAI's and llama-server's, of a conversation."""
        path = request.url.path
        parsed = await self._parsed(request, DIALECTS[COUNTED[path]])
        (first, *_) = await while_connected(request, self.prompting.ask(parsed, _client(request)))
        kind = {} if path == COUNT_TOKENS else {"object": "response.input_tokens"}
        return JsonResponse({"input_tokens": len(first.prompt), **kind})

    async def apply_template(self, request: Request) -> Response:
        """llama.cpp's: a chat as the text of its prompt."""
        parsed = await self._parsed(request, DIALECTS[CHAT])
        rendering = self.prompting.rendered(parsed.bodies[0], _client(request))
        return JsonResponse({"prompt": await while_connected(request, rendering)})

    async def _parsed(self, request: Request, dialect: Dialect) -> ParsedRequest:
        passed = PassedOver(self.http.strict)

        def read(fields: dict[str, Any]) -> ParsedRequest:
            slot = self.saved.slot_of(fields) if self.saved else 0
            body = dialect.body(fields, self.prompting.prompts, passed)
            return replace(parse_request(body, dialect.url, self.defaults, passed), slot=slot)

        parsed = await self._body(request, read)
        self.log.passed_over(parsed.passed_over)
        return parsed

    # -- tokens

    async def tokenize(self, request: Request) -> Response:
        """llama.cpp's and vLLM's."""
        query = await self._body(request, lambda fields: Tokenising.read(fields, self.http.strict))
        limit = self.setup.limit
        return await self._in_turn(request, lambda: LargeJsonResponse(query.answer(self.tokenizer, self.spell, limit)))

    async def detokenize(self, request: Request) -> Response:
        """llama.cpp's and vLLM's, of `tokens`."""
        tokens = await self._body(request, lambda fields: read_tokens(fields, self.tokenizer.n_vocab))
        return await self._in_turn(request, lambda: JsonResponse(text_of(tokens, self.spell)))

    async def tokenizer_info(self, request: Request) -> Response:
        """vLLM's: the chat template and the names of control tokens."""
        properties = self._properties()
        return JsonResponse({name: properties[name] for name in ("bos_token", "eos_token", "chat_template")})

    async def _body(self, request: Request, read: Callable[[dict[str, Any]], T]) -> T:
        """The body as `read` returns it. A thread reads large bodies, so that other clients are served meanwhile.
        Raises what `_data` raises, UserError when it is no JSON object, and as `read` does."""
        data = await self._data(request)

        def work() -> T:
            fields = read_json(data, "the body")
            request.state.fields = frozenset(fields)  # the names: values would live as long as the connection
            return read(fields)

        is_quick = len(data) <= SMALL_BODY and request.url.path != INFILL  # which has its prompt in tokens
        return work() if is_quick else await self._in_turn(request, work)

    async def _in_turn(self, request: Request, work: Callable[[], T]) -> T:
        """The result of work of a thread, which is left out if the client leaves before."""
        return await while_connected(request, self.prompting.tokenise(_client(request), work))

    async def _data(self, request: Request) -> bytes:
        """Raises Refusal when the body is too large, or does not come."""
        try:
            return await asyncio.wait_for(read_body(request, self.http.max_body), self.http.timeout_s)
        except asyncio.TimeoutError:
            raise Refusal(408, f"the request was not complete after {self.http.timeout_s:g} s") from None


def _client(request: Request) -> str:
    """The address of a client, or what a client of this host, such as a proxy, says that it is."""
    return request.client.host if request.client else ""
