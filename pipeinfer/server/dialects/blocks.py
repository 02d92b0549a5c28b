"""An answer as blocks, each of one kind: text, reasoning, or a call. What the APIs that have such answers share."""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeinfer.models.text.answers import Part
from pipeinfer.server.errors import Refusal
from pipeinfer.server.forms import Form, json_bytes


@dataclass(slots=True)
class Block:
    """`kind`: of its parts; a call has the kind of its arguments. `name`, `id`: of a call."""

    index: int
    kind: str
    id: str
    name: str = ""
    text: str = ""


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + json_bytes({"type": name, **data}) + b"\n\n"


class BlockForm(Form):
    """The form of one text. Events say when a block begins, goes on and ends."""

    prefix = ""
    """Of an answer's id."""

    blocks: list[Block]

    def _name(self) -> str:
        self.blocks = []
        return f"{self.prefix}_{secrets.token_hex(12)}"

    @property
    def choice(self) -> Any:
        return self.answer.choices[0]

    @property
    def finish(self) -> str:
        return self._finish(0, self.choice) or ""

    def opened(self, block: Block) -> bytes:
        raise NotImplementedError

    def grown(self, block: Block, text: str) -> bytes:
        raise NotImplementedError

    def closed(self, block: Block) -> bytes:
        raise NotImplementedError

    def pieces(self, told: set[int]) -> Iterator[bytes]:
        if 0 not in told:
            yield from self._told(self._parts(0, self.choice))
        if self.choice.finish and 0 not in told:
            told.add(0)
            if self.blocks:
                yield self.closed(self.blocks[-1])

    def _told(self, parts: Iterable[Part]) -> Iterator[bytes]:
        for part in parts:
            if not part.text:
                continue
            kind = "arguments" if part.kind == "call" else part.kind
            if part.kind == "call" or not self.blocks or self.blocks[-1].kind != kind:
                if self.blocks:
                    yield self.closed(self.blocks[-1])
                self.blocks.append(Block(len(self.blocks), kind, secrets.token_hex(12)))
                if part.kind == "call":
                    self.blocks[-1].name = part.text
                yield self.opened(self.blocks[-1])
            if part.kind != "call":
                self.blocks[-1].text += part.text
                yield self.grown(self.blocks[-1], part.text)

    def all_blocks(self) -> list[Block]:
        """Of an answer that has ended."""
        for _ in self._told(self._parts(0, self.choice)):
            pass
        return self.blocks

    def failed(self, refusal: Refusal) -> bytes:
        return named_event("error", refusal.body)


def renamed(given: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The same with fields by the core's names."""
    return {names.get(name, name): value for name, value in given.items()}
