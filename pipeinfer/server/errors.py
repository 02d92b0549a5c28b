"""Errors as clients get them, in OpenAI's form, which is Anthropic's too; JSON responses. Knows no endpoint."""

import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pipeinfer.errors import ContextOverflow, HostFault, UserError
from pipeinfer.models.text.chat_template import TemplateFault

INVALID = "invalid_request_error"
TYPES = {400: INVALID, 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 405: INVALID}
TYPES |= {408: "timeout_error", 413: INVALID, 429: "rate_limit_error"}
TYPES |= {500: "server_error", 501: "not_supported_error", 503: "unavailable_error"}
ANTHROPIC = "/v1/messages"
LOADING_S, FULL_S, DRAINING_S, LOST_S = 2, 2, 10, 30  # seconds after which a client may retry

NO_EMBEDDINGS = "the last stage computes tokens, and no embeddings; llama-server --embedding has them"
NOT_SERVED: Mapping[str, str] = {
    **dict.fromkeys(("/embedding", "/embeddings", "/v1/embeddings"), NO_EMBEDDINGS),
    **dict.fromkeys(("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), "nothing is ranked here"),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/speech", "/v1/images/generations"), "models read text"),
}
"""Paths of other servers, and the reason why they are not served."""

NOT_SAVED = (
    "this server does not support slots actions; start it with --slot-save-path DIRECTORY and --kv-disk SIZE. With "
    "--kv-disk alone texts that begin alike share keys and values, also after a restart"
)
"""The same for llama-server's `/slots/ID?action=save`, `restore`, `erase`."""

Headers = Mapping[str, str]
NO_HEADERS: Headers = MappingProxyType({})
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


SEPARATORS = {separator: f"\\u{ord(separator):04x}" for separator in "\x85\u2028\u2029"}
"""Separators of lines in Unicode, at which some clients cut an event of a stream, and how JSON writes them."""


def json_bytes(data: Any) -> bytes:
    """JSON in UTF-8; lone surrogates become question marks."""
    return _in_utf8(ENCODER.encode(data))


def _in_utf8(text: str) -> bytes:
    for separator, escaped in SEPARATORS.items():
        text = text.replace(separator, escaped)
    return text.encode("utf-8", "replace")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


class LargeJsonResponse(JsonResponse):
    """The same, for threads: it takes longer, and lets other threads run meanwhile."""

    def render(self, content: Any) -> bytes:
        return _in_utf8("".join(ENCODER.iterencode(content)))  # `encode` would hold the interpreter's lock


class Refusal(Exception):
    """An error response. `param`: the field of the request that it is about, if any. `retry_s`: when a client may
    retry, if that can help. `more`: further members of the error, or others."""

    def __init__(
        self,
        status: int,
        message: str,
        retry_s: int = 0,
        param: str | None = None,
        headers: Headers = NO_HEADERS,
        **more: Any,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.more = status, message, param, more
        self.headers = dict(headers) | ({"retry-after": str(retry_s)} if retry_s else {})

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status, **self.more}
        return {"type": "error", "error": error}

    @property
    def response(self) -> Response:
        return JsonResponse(self.body, self.status, self.headers)


def lost() -> Refusal:
    return Refusal(503, "the job behind this server has ended; ask again when it has been started anew", LOST_S)


async def error_response(request: Request, error: Exception) -> Response:
    """The response to a request whose endpoint raises."""
    fields = getattr(request.state, "fields", ())
    match error:
        case Refusal():
            return error.response
        case TemplateFault(is_broken=True):  # for all chats; the path of the template is not told
            what = f"{error.what}; ask for completions, until the server has another"
            refusal = Refusal(500, f"the model's chat template: {what}")
        case TemplateFault():
            refusal = Refusal(400, f"the model's chat template: {error.what}", param="messages")
        case HostFault():
            refusal = Refusal(503, str(error), FULL_S)
        case ContextOverflow(n_prompt=n_prompt, n_ctx=n_ctx):
            too_long = f"prompt is too long: {n_prompt} tokens > {n_ctx} maximum; "  # as Anthropic's clients know it
            message = f"{too_long * request.url.path.startswith(ANTHROPIC)}{error}"
            more: dict[str, Any] = {"type": "exceed_context_size_error", "code": "context_length_exceeded"}
            more |= {"n_prompt_tokens": n_prompt, "n_ctx": n_ctx}
            refusal = Refusal(400, message, param=_param("prompt", fields), **more)
        case UserError():
            refusal = Refusal(400, str(error), param=_param(str(error), fields))
        case ClientDisconnect():
            return Response(status_code=400)  # nobody reads it
        case HTTPException(status_code=status):
            reason = NOT_SERVED.get(request.url.path, "there is no such endpoint") if status == 404 else error.detail
            message = f"{request.method} {request.url.path[:200]}: {reason}"
            refusal = Refusal(status, message, headers=error.headers or NO_HEADERS)
        case _:
            refusal = Refusal(500, f"a fault of the server: {type(error).__name__}")
    return refusal.response


def _param(message: str, fields: Collection[str]) -> str | None:
    """The field that a message begins with, such as `stop` or `messages[0].role`; a chat's prompt is its messages."""
    field = message.removeprefix("the ").partition(" ")[0]
    if field == "prompt" and field not in fields:
        field = "messages"
    return field if field.partition("[")[0] in fields else None
