"""What clients are told when they are not served, in OpenAI's form, which is Anthropic's too. Knows no request."""

from typing import Any

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 429: "rate_limit_error",
    500: "server_error", 501: "not_supported_error", 503: "unavailable_error",
}  # fmt: skip

LOADING_S, FULL_S, DRAINING_S, LOST_S = 2, 2, 10, 30
"""After so many seconds a client may try again."""


class Refusal(Exception):
    """An answer with this status. `retry_s`: when to ask again, if that can help. `closes`: what else comes on the
    connection is not heard."""

    def __init__(self, status: int, message: str, retry_s: int = 0, closes: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_s, self.closes = status, message, retry_s, closes

    @property
    def headers(self) -> dict[str, str]:
        found = {"retry-after": str(self.retry_s)} if self.retry_s else {}
        found |= {"connection": "close"} if self.closes else {}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """`param`: the field of the request that the message is about, if it is about one."""
    kind = TYPES.get(status, "server_error")
    return {"type": "error", "error": {"message": message, "type": kind, "param": param, "code": status}}


def lost() -> Refusal:
    return Refusal(503, "the job behind this server has ended; ask again when it has been started anew", LOST_S)
