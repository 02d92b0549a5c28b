"""llama-server's slots, as far as clients save and restore them: the last text of each, and files with its tokens. The
keys and values are in the ranks' stores; a request that generates nothing reads them back. Knows no HTTP."""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.types import AdapterScales
from pipeinfer.job.requests.fields import is_list_of, is_whole, refuse, shown, whole
from pipeinfer.job.requests.lora import read_scales
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.job.serve.channel import Setup
from pipeinfer.models.gguf.adapter import ScaledAdapter
from pipeinfer.server.choices import Answer
from pipeinfer.server.errors import Refusal
from pipeinfer.server.front import HttpOptions
from pipeinfer.server.head_client import HeadClient

NAME = re.compile(r"[\w-][\w.-]{0,200}", re.ASCII)
ACTIONS = ("save", "restore", "erase")


@dataclass(frozen=True, slots=True)
class SlotText:
    """A prompt with its answer. `adapters`: see GenerationRequest."""

    tokens: tuple[int, ...] = ()
    adapters: AdapterScales | None = None


class SavedSlots:
    """`folder`: of the files; `adapters`: those of the job. A server has as many slots as texts may be open."""

    def __init__(
        self, folder: Path, setup: Setup, n_vocab: int, head: HeadClient, adapters: Sequence[ScaledAdapter]
    ) -> None:
        self._folder, self._n_slots, self._head, self._n_vocab = folder, setup.parallel, head, n_vocab
        self._adapters = adapters
        self._model, self._limit = setup.version.partition("-")[0], setup.limit
        self._texts: dict[int, SlotText] = {}

    def slot_of(self, fields: dict[str, Any]) -> int:
        """The slot that a request names in `id_slot`, which is removed; 0 if it names none. Raises UserError."""
        return max(0, self._checked(fields.pop("id_slot", -1)))

    def note(self, slot: int, answer: Answer) -> None:
        """The slot had the answer's first text last."""
        choice = answer.choices[0]
        self._texts[slot] = SlotText((*choice.request.prompt, *choice.tokens), choice.request.adapters)

    async def act(self, action: str, slot: int, fields: Mapping[str, Any], client: str) -> dict[str, Any]:
        """llama-server's answer. Raises UserError and Refusal."""
        self._checked(slot)
        if action == "erase":
            return {"id_slot": slot, "n_erased": len(self._texts.pop(slot, SlotText()).tokens)}
        name, start_s = fields.get("filename"), time.monotonic()
        if not isinstance(name, str) or not NAME.fullmatch(name):
            refuse(f"filename is {shown(name)}; give a name of letters, digits, dots, - and _, without a folder")
        try:
            counts = self._save(slot, name) if action == "save" else await self._restore(slot, name, client)
        except OSError as error:
            refuse(f"filename is {shown(name)}: {self._folder / name}: {error.strerror or error}")
        took = {f"{action}_ms": round(1000 * (time.monotonic() - start_s), 3)}
        return {"id_slot": slot, "filename": name, **counts, "timings": took}

    def _checked(self, slot: Any) -> int:
        return whole("id_slot", slot, -1, self._n_slots - 1, ": a slot for each text that may be open")

    def _save(self, slot: int, name: str) -> dict[str, int]:
        if not (text := self._texts.get(slot)):
            refuse(f"slot {slot} has had no text; ask for one first, with id_slot {slot}")
        data = json.dumps({"model": self._model, "tokens": text.tokens, "adapters": text.adapters}).encode()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = self._folder / f".{name}.new"
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(data)
        os.replace(unfinished, self._folder / name)
        return {"n_saved": len(text.tokens), "n_written": len(data)}

    async def _restore(self, slot: int, name: str, client: str) -> dict[str, int]:
        data = (self._folder / name).read_bytes()
        text = self._read(name, data)
        request = GenerationRequest(
            text.tokens, 0, len(text.tokens) + 1, SamplingParams(0, 0.0), frozenset(), keep=True, adapters=text.adapters
        )
        if request.n_ctx > self._limit:
            refuse(f"{name} has {len(text.tokens)} tokens, and a text with one more has up to {self._limit}; raise -c")
        answer = self._head.ask([request], client)
        await answer.end()
        if answer.was_given_up:
            raise Refusal(503, "the server has stopped before the slot was restored")
        self._texts[slot] = text
        return {"n_restored": len(text.tokens), "n_read": len(data)}

    def _read(self, name: str, data: bytes) -> SlotText:
        try:
            saved = json.loads(data)
            model, tokens, adapters = saved["model"], saved["tokens"], saved["adapters"]
            scales = None if adapters is None else [{"id": number, "scale": scale} for number, scale in adapters]
        except (ValueError, KeyError, TypeError, RecursionError):
            refuse(f"{name} is no saved slot; save one with action=save")
        if model != self._model:
            refuse(f"{name} was saved with another model; save it again with this one")
        is_text = bool(tokens) and is_list_of(int, tokens)
        if not is_text or not all(is_whole(each) and 0 <= each < self._n_vocab for each in tokens):
            refuse(f"{name} is no saved slot; save one with action=save")
        return SlotText(tuple(tokens), None if scales is None else read_scales(scales, self._adapters))


def open_slots(
    http: HttpOptions, setup: Setup, n_vocab: int, head: HeadClient, adapters: Sequence[ScaledAdapter]
) -> SavedSlots | None:
    """None where texts cannot be saved."""
    if not (http.slot_folder and setup.context.kv_disk):
        return None
    return SavedSlots(http.slot_folder, setup, n_vocab, head, adapters)
