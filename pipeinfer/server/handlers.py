"""What clients are told when an endpoint raises: the statuses and messages of errors. Knows no endpoint."""

from collections.abc import Container

from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pipeinfer.models.text.chat import TemplateFault
from pipeinfer.server.dialects.llama_cpp import NOT_SERVED
from pipeinfer.server.errors import Refusal, error_body
from pipeinfer.server.respond import JsonResponse


async def refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return JsonResponse(error.body, error.status, error.headers)


async def wrong(request: Request, error: Exception) -> Response:
    fields = getattr(request.state, "fields", ())
    return JsonResponse(error_body(400, str(error), _param(str(error), fields)), 400)


def _param(message: str, given: Container[str]) -> str | None:
    """What of the fields that are `given` a message begins with: `stop`, `messages[0].role`; of a chat the prompt is
    its messages."""
    field = message.removeprefix("the ").partition(" ")[0]
    if field == "prompt" and field not in given:
        field = "messages"
    return field if field.partition("[")[0] in given else None


async def not_rendered(request: Request, error: Exception) -> Response:
    """Which file the template is in is the server's affair, and so is one that renders nothing for anybody."""
    assert isinstance(error, TemplateFault)
    rest = "; ask for completions, until the server has another" if error.is_broken else ""
    status = 500 if error.is_broken else 400
    return JsonResponse(
        error_body(status, f"the model's chat template: {error.what}{rest}", None if error.is_broken else "messages"),
        status,
    )


async def left(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # in the middle of what it said: nobody reads it


async def no_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    missing = NOT_SERVED.get(request.url.path, "there is no such endpoint")
    message = f"{what}: {missing if error.status_code == 404 else error.detail}"
    return JsonResponse(error_body(error.status_code, message), error.status_code, error.headers)


async def fault(request: Request, error: Exception) -> Response:
    return JsonResponse(error_body(500, f"a fault of the server: {type(error).__name__}"), 500)
