"""What the server's command line may set beside `run`'s: where it listens, who may ask, how much. Opens nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """`api_keys`: any of them opens; without one everybody may ask. They are secret: no message between ranks has them.
    `n_queue`: requests that wait for room. `n_connections`: open at a time. `max_body`: bytes of a request.
    `timeout_s`: how long a client may take to say or to take anything."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = field(default=(), compare=False, repr=False)
    api_key_file: Path | None = None
    ssl_key_file: Path | None = None
    ssl_cert_file: Path | None = None
    alias: str | None = None
    n_queue: int = 256
    n_connections: int = 1024
    max_body: int = 2 << 20
    timeout_s: float = 600.0
    metrics: bool = True
    slots: bool = True
    page: bool = True
