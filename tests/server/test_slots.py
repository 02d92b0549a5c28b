"""llama-server's slots: their texts are saved and restored by name, over a restart."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect, Request

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.errors import UserError
from pipeinfer.job.requests.request import GenerationRequest
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.server.app import Api
from pipeinfer.server.choices import Answer
from pipeinfer.server.errors import Refusal
from pipeinfer.server.front import HttpOptions, HttpServer
from pipeinfer.server.head_client import HeadClient, HeadState
from pipeinfer.server.llama_cpp import SavedSlots
from pipeinfer.server.metrics import Metrics
from tests.support.serving import Served

PROMPT = " ".join(f"{word} {at}" for at, word in enumerate(["one", "two", "three", "five"] * 30))
MODELS = ["-m", str(TARGET), "-md", str(DRAFT), "-c", "2048", "--parallel", "4"]


def act(served: Served, slot: int | str, action: str, name: Any = None) -> httpx.Response:
    return served.http.post(f"/slots/{slot}?action={action}", json={} if name is None else {"filename": name})


def ask(served: Served, **more: Any) -> tuple[str, int]:
    body = {"prompt": PROMPT, "n_predict": 20, "seed": 7, **more}
    answer = served.http.post("/completion", json=body).json()
    assert answer["id_slot"] == more.get("id_slot", 0)
    return answer["content"], answer["timings"]["cache_n"]


def test_a_slot_is_restored_after_a_restart(tmp_path: Path) -> None:
    words = [
        *MODELS,
        "--kv-disk",
        "100M",
        "--kv-dir",
        str(tmp_path / "kv"),
        "--slot-save-path",
        str(tmp_path / "slots"),
    ]
    with Served(1, words) as served:
        text, n_cached = ask(served, id_slot=2)
        assert text and not n_cached
        saved = act(served, 2, "save", "talk.bin").json()
        assert saved["id_slot"] == 2 and saved["n_saved"] > 400 and saved["timings"]["save_ms"] >= 0
        assert stat.S_IMODE((tmp_path / "slots" / "talk.bin").stat().st_mode) == 0o600
        ask(served, prompt="another", id_slot=3)
        assert act(served, 2, "erase").json() == {"id_slot": 2, "n_erased": saved["n_saved"]}
        for slot, action, name, words_ in (
            (2, "save", "talk.bin", "has had no text"),
            (2, "restore", "gone.bin", "No such file"),
            (2, "restore", "../talk.bin", "without a folder"),
            (2, "restore", None, "without a folder"),
            (4, "save", "talk.bin", "from 0 to 3"),
            (-1, "erase", None, "from 0 to 3"),
            ("a", "save", "talk.bin", 'id_slot is "a"'),
            (2, "forget", "talk.bin", "one of save, restore, erase"),
        ):
            answer = act(served, slot, action, name)
            assert answer.status_code == 400 and words_ in answer.json()["error"]["message"], answer.text
        (tmp_path / "slots" / "torn.bin").write_text("{")
        assert "no saved slot" in act(served, 2, "restore", "torn.bin").json()["error"]["message"]
        os.mkfifo(tmp_path / "slots" / "pipe.bin")
        (tmp_path / "slots" / "device.bin").symlink_to("/dev/zero")
        (tmp_path / "slots" / "huge.bin").touch()
        os.truncate(tmp_path / "slots" / "huge.bin", 1 << 40)
        for name in ("pipe.bin", "device.bin", "huge.bin"):
            assert "no saved slot" in act(served, 2, "restore", name).json()["error"]["message"]
        (tmp_path / "slots" / "folder.bin").mkdir()
        ask(served, prompt="another", id_slot=3)
        assert act(served, 3, "save", "folder.bin").status_code == 400
        assert not [*(tmp_path / "slots").glob(".*")], "an unfinished file is left"
        content = json.loads((tmp_path / "slots" / "talk.bin").read_text())
        for adapters, refusal in (([[0, 1.0]], "there is no adapter"), ([7], "no saved slot")):
            (tmp_path / "slots" / "other.bin").write_text(json.dumps({**content, "adapters": adapters}))
            assert refusal in act(served, 2, "restore", "other.bin").json()["error"]["message"]
    with Served(1, words) as served:
        restored = act(served, 0, "restore", "talk.bin").json()
        assert restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
        assert ask(served)[0] == text
        assert ask(served)[1] > 400
        assert act(served, 0, "save", "talk.bin").json()["n_saved"] == saved["n_saved"]


def test_a_slow_folder_keeps_nobody_else_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts are saved by one name at once, and read while other work ends."""
    setup: Any = SimpleNamespace(parallel=2, version="m-exact", limit=99)
    saved = SavedSlots(tmp_path, setup, 9, HeadClient(2, Metrics("m", 99)), ())
    for slot, n_tokens in enumerate((3, 60)):
        saved.note(slot, Answer([0], [GenerationRequest((5,) * n_tokens, 8, 99, SamplingParams(), frozenset())]))
    both, replace, read, ended = Barrier(2, timeout=10), os.replace, Path.read_bytes, Event()

    def replace_slowly(old: Any, new: Any) -> None:
        both.wait()
        replace(old, new)

    def read_slowly(path: Path) -> bytes:
        assert ended.wait(10), "all else waits"
        return read(path)

    async def act() -> None:
        saves = await asyncio.gather(*(saved.act("save", slot, {"filename": "a"}, "") for slot in range(2)))
        assert [each["n_saved"] for each in saves] == [3, 60]
        assert len(json.loads(read(tmp_path / "a"))["tokens"]) in (3, 60) and len([*tmp_path.iterdir()]) == 1
        asyncio.get_running_loop().call_soon(ended.set)
        with pytest.raises(Refusal, match="are being loaded"):  # it was read
            await saved.act("restore", 0, {"filename": "a"}, "")

    monkeypatch.setattr(os, "replace", replace_slowly)
    monkeypatch.setattr(Path, "read_bytes", read_slowly)
    asyncio.run(act())


def test_a_restore_ends_when_its_client_leaves(tmp_path: Path) -> None:
    setup: Any = SimpleNamespace(parallel=1, version="m-exact", limit=99)
    head = HeadClient(2, Metrics("m", 99))
    told: list[bytes] = []
    writer: Any = SimpleNamespace(write=told.append)
    head.state, head.writer = HeadState.READY, writer
    (tmp_path / "a").write_text(json.dumps({"model": "m", "tokens": [5, 6], "adapters": None}))

    async def body(*_: object) -> dict[str, str]:
        return {"filename": "a"}

    async def receive() -> dict[str, str]:
        while not head.choices:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    api: Any = SimpleNamespace(saved=SavedSlots(tmp_path, setup, 9, head, ()), head=head, _body=body)
    scope = {"type": "http", "path_params": {"id": "0"}, "query_string": b"action=restore", "headers": []}

    async def act() -> None:
        with pytest.raises(ClientDisconnect):
            await asyncio.wait_for(Api.act_on_slot(api, Request(scope, receive)), 10)
        await asyncio.sleep(0)
        assert not head.choices and b"Cancel" in told[-1]

    asyncio.run(act())


def test_there_are_as_many_slots_as_texts_may_be_open_and_a_text_keeps_its_own() -> None:
    request = GenerationRequest((1, 2), 8, 10, SamplingParams(grammar="secret"), frozenset(), stops=("secret",))
    choices = Answer(range(10, 13), [request] * 3).choices
    first, second, third = choices
    api: Any = SimpleNamespace(http=HttpOptions(), in_slots=[None] * 2)
    api.setup, api.head = SimpleNamespace(limit=64, speculates=True), SimpleNamespace(choices={})

    def slots(query: str = "") -> Any:
        asked = Request({"type": "http", "query_string": query.encode()})
        return json.loads(bytes(asyncio.run(Api.slots(api, asked)).body))

    def tasks(query: str = "") -> list[tuple[int | None, int | None]]:
        return [(slot.get("id"), slot.get("id_task")) for slot in slots(query)]

    idle = {"is_processing": False, "n_ctx": 64, "speculative": True}
    assert slots("fail_on_no_slot=1") == [{"id": 0, **idle}, {"id": 1, **idle}]
    api.head.choices |= {choice.id: choice for choice in choices}
    first.has_turn = second.has_turn = True
    first.add([3, 4], "a\n", [])
    assert tasks() == [(0, 10), (1, 11)] and tasks("waiting=1") == [(0, 10), (1, 11), (None, 12)]
    slot, other = slots()
    assert slot["is_processing"] and slot["params"]["mirostat"] == 0 and "secret" not in json.dumps(slot)
    found = {"has_next_token": True, "has_new_line": True, "n_remain": 6, "n_decoded": 2}
    assert slot["next_token"] == [found] and not other["next_token"][0]["has_new_line"]
    with pytest.raises(Refusal) as refused:
        slots("fail_on_no_slot=1")
    assert refused.value.status == 503
    first.finish, third.has_turn = "stop", True
    assert tasks() == [(0, 12), (1, 11)]
    api.http = HttpOptions(slots=False)
    with pytest.raises(Refusal) as refused:
        slots()
    assert refused.value.status == 501


def test_without_a_folder_or_a_disk_the_way_out_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "slots"
    with Served(1, [*MODELS, "--slot-save-path", str(folder)]) as served:
        for slot in (0, -1, "a"):
            answer = act(served, slot, "save", "talk.bin")
            assert answer.status_code == 501 and "--kv-disk SIZE" in answer.json()["error"]["message"]
        served.until(lambda: "--slot-save-path is without effect" in served.errors)
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--slot-save-path .*/file/slots: Not a directory; name a directory"):
        HttpServer(HttpOptions(port=0, slot_folder=tmp_path / "file" / "slots"), saves=True)


def test_a_folder_is_made_where_texts_can_be_saved(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "slots"
    for saves in (False, True):
        HttpServer(HttpOptions(port=0, slot_folder=folder), saves=saves).close(0)
        assert folder.exists() is saves
