"""What the server's command line may set beside `run`'s: where it listens, who may ask, how much. Opens nothing."""

from dataclasses import dataclass, field
from pathlib import Path

import click

from pipeinfer.core.settings import setting
from pipeinfer.job.options.values import File, Listed, Number, Text

SHARE = 0.75


def most_of_one(n: int) -> int:
    """How many of `n` connections, or of `n` texts, one address may have: others find room beside it."""
    return max(1, int(SHARE * n))


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """`api_keys`: any of them opens; without one everybody may ask. They are secret: no message between ranks has them.
    `n_queue`: requests that wait for room. `n_connections`: open at a time. `max_body`: bytes of a request.
    `timeout_s`: how long a client may take to say or to take anything."""

    heading = "Server"
    host: str = setting("127.0.0.1", "--host", type=Text(), help="Address to listen on.")
    port: int = setting(8080, "--port", most=65535, help="Port to listen on; 0: a free one.")
    api_keys: tuple[str, ...] = field(default=(), compare=False, repr=False)
    api_key_file: Path | None = setting(None, "--api-key-file", type=File(), help="Keys, as of --api-key, one a line.")
    ssl_key_file: Path | None = setting(
        None, "--ssl-key-file", type=File(), help="The private key, PEM: with --ssl-cert-file it is HTTPS."
    )
    ssl_cert_file: Path | None = setting(
        None, "--ssl-cert-file", type=File(), help="Its certificate, PEM, with those that vouch for it."
    )
    alias: str | None = setting(
        None, "--alias", "-a", type=Text(), help="The model's name in answers. [default: the file's]"
    )
    n_queue: int = setting(
        256, "--queue", most=1 << 20, help="Texts that may wait for room; for more the answer is 429."
    )
    priorities: bool = setting(
        False, "--priorities", help="Take `priority` of requests: whoever asks can pass and preempt others."
    )
    n_connections: int = setting(
        1024, "--max-connections", least=1, most=1 << 20, help="Connections that are open at a time."
    )
    max_body: int = setting(2 << 20, "--max-body", least=1024, most=1 << 30, help="Bytes of a request.")
    timeout_s: float = setting(
        600.0, "--timeout", "-to", type=Number(0, 1e6, above=True),
        help="Seconds that a client may take to send a request, or to read on.",
    )  # fmt: skip
    origins: tuple[str, ...] = setting(
        (), "--allow-origin", "--cors-origins", type=Listed(Text()),
        help="Pages of these origins may ask too, such as https://chat.example.org; *: all pages.",
    )  # fmt: skip
    strict: bool = setting(
        False, "--strict/--lenient",
        help="Refuse requests with fields or parts that are unknown; else these are passed over, named once in the log "
        "and in the header X-Pipeinfer-Passed-Over of the answer.",
    )  # fmt: skip
    log_format: str = setting(
        "text", "--log-format", type=click.Choice(["text", "json", "none"]), help="A line a request on standard error."
    )
    metrics: bool = setting(True, "--metrics/--no-metrics", help="/metrics, for Prometheus.")
    slots: bool = setting(True, "--slots/--no-slots", help="/slots: what is being written.")
    page: bool = setting(True, "--ui/--no-ui", help="The page at /.")
