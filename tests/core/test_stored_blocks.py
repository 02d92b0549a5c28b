"""Blocks of cells on disk: a job that reads them back says what it would say without, whatever became of the files."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from itertools import count, pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pipeinfer.cluster.stages.cell_store import BlockFiles, BlockMemory, CellStore
from pipeinfer.core.blocks import Span
from pipeinfer.core.engine import Engine
from pipeinfer.core.interfaces import CellBlock
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import BlockKey
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.stored_blocks import Room, StoredBytes, TextBlocks
from pipeinfer.policies import Iterative
from tests.core.test_engine import random_policy, toy_engine
from tests.core.test_kept_prefixes import BlockStage, Chat, Counted, check, next_request, some_drafter, state_pool
from tests.core.test_levels import draft_levels
from tests.support.audit import audit_engine
from tests.support.cases import cases
from tests.support.toy import N_LAYERS, Reference, ToyPipeline

N_CTX = 400
BYTES = StoredBytes(130, 28)  # of a toy's blocks, at most
WIDE = StoredBytes(BYTES.block + (1 << 21), BYTES.row)
Kind = tuple[bool, bool, bool]  # prompts are evaluated in blocks, cells are parked, sequences rewind


class ToyJob:
    """An engine whose stages keep blocks in `folder`, or in memory, of `limit` bytes each."""

    def __init__(
        self,
        rng: random.Random,
        folder: Path | None,
        cuts: list[int],
        kind: Kind,
        limit: int,
        stage: type[BlockStage] = BlockStage,
    ) -> None:
        self.blocks, parked, rewinds = kind
        n_cells, n_seq = N_CTX + rng.choice([10, 60, 400]), rng.choice([1, 2, 5, 31])
        stages = [stage(first, last, last == N_LAYERS, n_cells, parked) for first, last in pairwise(cuts)]
        pipeline = ToyPipeline(stages, rng, late=rng.choice([0.0, 0.5, 0.95]))
        self.reference = Reference(N_LAYERS)
        self.drafter = some_drafter(rng, self.reference, n_seq, n_cells + 64)
        drafts = draft_levels(rng, n_cells, [rng.random() for _ in range(rng.choice([0, 0, 1]))])
        pool = SequencePool(n_seq, n_cells, parked) if rewinds else state_pool(stages, n_seq, n_cells, parked)
        for each in stages:
            each.has_states = not rewinds
        options = {"n_chunk": rng.choice([3, 64, 128])}
        self.engine: Engine = toy_engine(pipeline, pool, self.drafter, drafts, blocks=self.blocks, **options)

        def files(at: int) -> BlockFiles | BlockMemory:
            if not folder:
                return BlockMemory(limit, print)
            return BlockFiles(folder / str(at), f"{kind} {cuts[at : at + 2]}", limit, print)

        self.stores = [CellStore(files(at), stage) for at, stage in enumerate(stages)]
        for worker, store in zip(pipeline.workers, self.stores, strict=True):
            worker.store = store
        keys = set.intersection(*(set(store.files.keys) for store in self.stores))
        self.full_at: list[int] = []
        self.engine.admission.store(keys, Room(limit, WIDE if stage is WideStage else BYTES), self.full_at.append)

    def close(self) -> None:
        for store in self.stores:
            store.close()


def talk(rng: random.Random, job: ToyJob, chats: list[Chat]) -> tuple[int, int]:
    """Some turns of each chat, some of them at a time; tokens of prompts that were not evaluated, and all."""
    engine, n_left, n_kept, n_prompt = job.engine, 5, 0, 0
    while n_left or engine.busy:
        chat = rng.choice(chats)
        if n_left and (not chat.newest or chat.newest.finish) and (not engine.busy or rng.random() < 0.05):
            n_left -= 1
            chat.newest = next_request(rng, n_left, chat, job.blocks, N_CTX, 1.0)
            chat.newest.keep = rng.random() < 0.5
            chat.counted, chat.stopped = Counted(), False
            engine.add(chat.newest, random_policy(rng) if job.drafter else Iterative(), chat.counted)
        if chat.newest and not chat.newest.finish and rng.random() < 0.003:
            chat.stopped = True
            engine.stop(chat.newest)
        engine.step() if engine.busy else None
        if rng.random() < 0.1:
            audit_engine(engine)
        for each in chats:
            if each.newest and each.newest.finish and each.counted.n_prompt:
                check(each, job.reference, job.blocks)
                n_kept, n_prompt = n_kept + each.counted.n_kept, n_prompt + each.counted.n_prompt
                each.counted = Counted()
    engine.forget()
    pools = [level.pool for level in engine.levels]
    assert all(pool.n_free == pool.n_seq and not pool.n_committed for pool in pools), "a sequence or a cell leaks"
    return n_kept, n_prompt


def damage(rng: random.Random, folder: Path) -> None:
    """Do to some files what a crash, a disk or another program may do."""
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*.kv"))}
    for path, written in files.items():
        content, fate = bytearray(written), rng.random()
        if fate < 0.03:
            path.unlink()
        elif fate < 0.06:
            path.write_bytes(content[: rng.randrange(len(content) + 1)])
        elif fate < 0.09:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
        elif fate < 0.12:
            path.write_bytes(rng.choice([*files.values()]) if rng.random() < 0.7 else rng.randbytes(len(content)))
        elif fate < 0.14:
            path.with_suffix(".new").write_bytes(content[:-9])
    for path in {path.parent for path in files}:
        (path / f"{'0' * 31}.kv").write_bytes(b"another program's")


def random_kind(rng: random.Random) -> Kind:
    return rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.7


def random_cuts(rng: random.Random) -> list[int]:
    return [0, *sorted(rng.sample(range(1, N_LAYERS), rng.randrange(N_LAYERS))), N_LAYERS]


def run_case(seed: int, folder: Path) -> tuple[int, int]:
    """Chats over jobs of one split; tokens of prompts that later jobs did not evaluate, and all of theirs."""
    rng = random.Random(seed)
    cuts = random_cuts(rng)
    kind, limit = random_kind(rng), rng.choice([1 << 30, 1 << 30, 60_000, 3_000])
    chats, counts = [Chat() for _ in range(rng.choice([1, 2, 3]))], [0, 0]
    for number in range(rng.choice([2, 2, 3])):
        job = ToyJob(rng, folder, cuts, kind, limit)
        n_kept, n_prompt = talk(rng, job, chats)
        job.close()
        if number:
            counts = [counts[0] + n_kept, counts[1] + n_prompt]
        for store in job.stores:
            assert isinstance(store.files, BlockFiles)
            sizes = [path.stat().st_size for path in store.files._root.rglob("*.kv")]
            assert sum(sizes) == store.files.n_bytes <= limit
        assert not list(folder.rglob("*.new"))
        if rng.random() < 0.5:
            damage(rng, folder)
    return counts[0], counts[1]


@pytest.mark.parametrize("block", cases(3, 500))
def test_what_is_read_back_changes_no_text(block: int, tmp_path: Path) -> None:
    counts = []
    for seed in range(block * 20, block * 20 + 20):
        counts.append(run_case(seed, tmp_path / str(seed)))
        shutil.rmtree(tmp_path / str(seed))
    assert sum(n_kept for n_kept, _ in counts) > 0.2 * sum(n_prompt for _, n_prompt in counts)


class WideStage(BlockStage):
    """Blocks of cells so large that most of the time goes into writing them."""

    def save_cells(self, seq: int, first: int, end: int) -> npt.NDArray[np.uint8]:
        return np.concatenate([super().save_cells(seq, first, end), np.zeros(WIDE.block - BYTES.block, np.uint8)])


def stop_while_writing(process: BaseProcess, folder: Path) -> None:
    """Let it stand still where a file is unfinished, if it does not end before."""
    began_s = time.monotonic()
    while process.is_alive() and time.monotonic() < began_s + 60:
        if list(folder.rglob("*.new")):
            os.kill(process.pid or 0, signal.SIGSTOP)
            if list(folder.rglob("*.new")):
                return
            os.kill(process.pid or 0, signal.SIGCONT)
        time.sleep(1e-4)


def run_killed(seed: int, folder: Path) -> int:
    """A job is killed at a random moment, of every second one while a file is unfinished, and another one goes on; the
    number of files that the first left unfinished."""
    rng = random.Random(seed)
    cuts, kind, limit = random_cuts(rng), random_kind(rng), rng.choice([1 << 30, 20 << 20])

    def talk_once() -> ToyJob:
        job = ToyJob(random.Random(seed), folder, cuts, kind, limit, WideStage)
        talk(random.Random(seed), job, [Chat(), Chat()])
        job.close()
        return job

    process = multiprocessing.get_context("fork").Process(target=talk_once)
    process.start()
    stop_while_writing(process, folder)
    if seed % 2 and process.is_alive():  # at any moment after
        os.kill(process.pid or 0, signal.SIGCONT)
        process.join(rng.uniform(0.0, 0.2))
    process.kill()
    process.join()
    n_unfinished = len(list(folder.rglob("*.new")))
    for store in talk_once().stores:
        assert isinstance(store.files, BlockFiles)
        files = BlockFiles(store.files._root, f"{kind} {cuts[int(store.files._root.name) :][:2]}", limit, print)
        there = {path for path in store.files._root.rglob("*") if path.is_file()}
        assert len(there) == len(files.keys) + 1, "a file is neither a block nor the lock"
        assert all(files.read(key) for key in files.keys), "a file is torn"
        files.close()
    return n_unfinished


@pytest.mark.parametrize("block", cases(1, 30))
def test_a_kill_at_any_moment_leaves_no_wrong_text_and_no_file(block: int, tmp_path: Path) -> None:
    n_unfinished = 0
    for seed in range(block * 10, block * 10 + 10):
        n_unfinished += run_killed(seed, tmp_path / str(seed))
        shutil.rmtree(tmp_path / str(seed))
    assert n_unfinished, "no kill came while a block was written"


@pytest.mark.parametrize(("rewinds", "n_kept_by_job"), [(True, (0, 299, 299, 192, 0)), (False, (0, 192, 192, 192, 0))])
def test_a_prompt_is_read_back_by_the_next_job(rewinds: bool, n_kept_by_job: tuple[int, ...], tmp_path: Path) -> None:
    """Whole blocks of it: what another prompt begins with, too. With states up to where one was taken."""
    prompt = [at % 11 for at in range(300)]
    for number, (n_same, n_kept) in enumerate(zip([300, 300, 300, 250, 60], n_kept_by_job, strict=True)):
        rng = random.Random(3)
        job = ToyJob(rng, tmp_path, [0, 2, N_LAYERS], (True, True, rewinds), 1 << 20)
        chat = Chat(Request(0, [*prompt[:n_same], *[5] * (300 - n_same)], 5, SamplingParams(temp=0.0), N_CTX))
        job.engine.add(chat.request, Iterative(), chat.counted)
        job.engine.complete()
        check(chat, job.reference, True)
        assert chat.counted.n_kept == n_kept, number
        job.close()


def n_kept_of(folder: Path, n_bytes: int, *prompts: list[int]) -> tuple[list[int], list[int]]:
    """A job of two stages with these prompts, one after the other: tokens of each that were not evaluated, and where
    the first text was full."""
    job, n_kept = ToyJob(random.Random(3), folder, [0, 2, N_LAYERS], (True, True, True), n_bytes), list[int]()
    for number, prompt in enumerate(prompts):
        chat = Chat(Request(number, prompt, 5, SamplingParams(temp=0.0), N_CTX))
        job.engine.add(chat.request, Iterative(), chat.counted)
        job.engine.complete()
        check(chat, job.reference, True)
        n_kept.append(chat.counted.n_kept)
    job.close()
    assert all(isinstance(store.files, BlockFiles) and store.files.n_bytes <= n_bytes for store in job.stores)
    return n_kept, job.full_at


def test_of_a_text_that_does_not_fit_the_first_blocks_are_kept(tmp_path: Path) -> None:
    prompt = [at % 11 for at in range(300)]
    for n_blocks, n_rows in enumerate((0, 64, 128, 192, 299)):
        n_bytes, folder = n_blocks * BYTES.block + n_rows * BYTES.row + 300, tmp_path / str(n_blocks)
        full_at = [n_rows] if n_rows < 299 else []
        assert n_kept_of(folder, n_bytes, prompt) == ([0], full_at)
        assert n_kept_of(folder, n_bytes, prompt) == ([n_rows], full_at)


def test_a_texts_last_blocks_are_removed_first(tmp_path: Path) -> None:
    one, other, third = ([at % n for at in range(300)] for n in (11, 7, 5))
    n_bytes = 7 * BYTES.block + 500 * BYTES.row
    assert n_kept_of(tmp_path, n_bytes, one, other) == ([0, 0], [])
    assert n_kept_of(tmp_path, n_bytes, one) == ([192], [])
    assert n_kept_of(tmp_path, n_bytes, third, other) == ([0, 0], [])
    assert n_kept_of(tmp_path, n_bytes, other) == ([299], [])


def test_a_text_that_goes_on_keeps_its_first_blocks(tmp_path: Path) -> None:
    """Though they are older than those of a text that came in between."""
    one, other, n_bytes = (
        [at % 11 for at in range(300)],
        [at % 7 for at in range(65)],
        4 * BYTES.block + 299 * BYTES.row,
    )
    (_, _, n_kept), _ = n_kept_of(tmp_path, n_bytes, one[:193], other, one)
    assert n_kept == 192
    assert n_kept_of(tmp_path, n_bytes, one) == ([299], [])


def test_requests_of_one_prompt_wait_for_one_reading(tmp_path: Path) -> None:
    prompt = [at % 11 for at in range(200)]
    for number in range(2):
        rng = random.Random(5)
        job = ToyJob(rng, tmp_path, [0, N_LAYERS], (False, False, True), 1 << 20)
        chats = [Chat(Request(at, prompt, 5, SamplingParams(at, 0.8), N_CTX)) for at in range(4)]
        for chat in chats:
            job.engine.add(chat.request, Iterative(), chat.counted)
        assert job.engine.admission.stored and len(job.engine.admission.stored._readings) == number
        job.engine.complete()
        for chat in chats:
            check(chat, job.reference, False)
        assert sum(chat.counted.n_context for chat in chats) == (7 if number else 199)
        job.close()


@pytest.mark.parametrize("others_are_open", [False, True])
def test_a_reading_spares_what_is_retained(others_are_open: bool) -> None:
    """Parked cells have room for it once they are packed; while others have nodes nothing makes room."""
    job = ToyJob(random.Random(17), None, [0, 2, N_LAYERS], (True, True, True), 1 << 24)
    pool, prefixes, numbers = job.engine.target.pool, job.engine.admission.prefixes, count()
    assert (pool.n_cells, pool.n_seq) == (800, 31)

    def ask(first: int, n_tokens: int, n_predict: int = 5, keep: bool = False) -> Chat:
        prompt = [(at * at + first) % 11 if at else first for at in range(n_tokens)]
        chat = Chat(Request(next(numbers), prompt, n_predict, SamplingParams(temp=0.0), N_CTX, keep=keep))
        job.engine.add(chat.request, Iterative(), chat.counted)
        return chat

    for first, n_tokens, keep in ((1, 200, False), (2, 180, True), (3, 150, True), (4, 190, False), (5, 70, False)):
        ask(first, n_tokens, keep=keep)
        job.engine.complete()
    before = prefixes.retained()
    other = ask(6, 5, 60) if others_are_open else None
    while other and other.request.n_generated < 10:
        job.engine.step()
    assert pool.n_free_cells < 199 < pool.n_free_cells + pool.n_parked
    again = ask(1, 200)
    job.engine.complete()
    assert set(before) <= set(prefixes.retained()) and len(before) == 2
    assert again.counted.n_kept == (0 if others_are_open else 199)
    job.close()


@pytest.mark.parametrize("block", cases(2, 100))
def test_what_memory_keeps_changes_no_text(block: int) -> None:
    """Nor do texts have more of it than they may."""
    n_read = 0
    for seed in range(block * 10, block * 10 + 10):
        rng = random.Random(seed)
        limit = rng.choice([1 << 30, 1 << 30, 60_000, 3_000])
        job = ToyJob(rng, None, random_cuts(rng), random_kind(rng), limit)
        chats = [Chat() for _ in range(3)]
        for _ in range(3):
            talk(rng, job, chats)  # and all that is retained is forgotten
        for store in job.stores:
            store._thread.submit(lambda: None).result()
            assert isinstance(store.files, BlockMemory) and store.files.n_bytes <= limit
        assert job.engine.admission.stored and len(job.engine.admission.stored._keys) <= 2 * limit // 1922 + 1
        n_read += job.engine.admission.stored._n_readings
        job.close()
    assert n_read > 5


def test_blocks_in_memory_make_room_for_others() -> None:
    lines: list[str] = []
    memory, keys = BlockMemory(300, lines.append), [BlockKey(n, n) for n in range(5)]
    blocks = [
        CellBlock(np.arange(5, dtype=np.int32), np.full(n_bytes, 7, np.uint8)) for n_bytes in (80, 80, 80, 80, 281)
    ]
    for key, block in zip(keys[:3], blocks, strict=False):
        memory.write(key, block)
    memory.use(keys[:2])
    memory.write(keys[3], blocks[3])
    assert memory.keys == [keys[1], keys[0], keys[3]] and memory.n_bytes == 300 and memory.read(keys[2]) is None
    memory.write(keys[1], blocks[1])
    memory.write(keys[4], blocks[4])
    memory.write(keys[4], blocks[4])
    assert memory.keys == [keys[0], keys[3], keys[1]] and memory.read(keys[1]) == blocks[1]
    assert lines == ["-cram: 300 B has no room for a state of 301 B"]
    memory.close()
    assert not memory.keys and not memory.n_bytes


def blocks_of(tokens: list[int], spans: tuple[Span, ...], n: int) -> list[tuple[int, int]]:
    text, request = [], Request(0, tokens, 5, SamplingParams(), 1000, spans=spans)
    blocks = TextBlocks(request, spans)
    while block := blocks.next(n):
        text.append(block)
    return [(block.start, block.end) for block in text]


def test_blocks_are_cut_as_rows_are_evaluated() -> None:
    tokens = list(range(500))
    assert blocks_of(tokens, (), 200) == [(0, 64), (64, 128), (128, 192)]
    assert blocks_of(tokens, (Span(0, 199),), 300) == [(0, 64), (64, 128), (128, 199), (199, 263)]
    spans = Span(0, 70), Span(100, 230)
    assert blocks_of(tokens, spans, 300) == [(0, 70), (70, 100), (100, 164), (164, 230), (230, 294)]
    for span in (Span(0, 64), Span(0, 127), Span(0, 128), Span(0, 191), Span(0, 192)):
        assert [edge for edge, _ in blocks_of(tokens, (span,), span.end)] == span.edges[:-1]


def test_a_key_has_all_tokens_and_how_they_are_cut() -> None:
    def key(tokens: list[int], *spans: Span) -> object:
        blocks = TextBlocks(Request(0, tokens, 5, SamplingParams(), 1000, spans=spans), spans)
        last = None
        while block := blocks.next(192):
            last = block.key
        return last

    tokens = list(range(200))
    keys = [
        key(tokens),
        key(tokens, Span(0, 192)),
        key([1, *tokens[1:]]),
        key(tokens, Span(64, 192)),
        key([9, *tokens]),
    ]
    assert len(set(keys)) == 5
    assert key(tokens) == key(tokens[:195])


def test_a_folder_in_a_blocks_place_ends_no_job(tmp_path: Path) -> None:
    """The block is not kept; others are."""
    lines: list[str] = []
    files = BlockFiles(tmp_path / "0", "slice", 1 << 20, lines.append)
    blocks = {BlockKey(n, n): CellBlock(np.arange(n, dtype=np.int32), np.zeros(100, np.uint8)) for n in (1, 2)}
    for key, block in blocks.items():
        files.write(key, block)
    files.close()
    for path in files._folder.iterdir():
        path.unlink()
    path = files._path(BlockKey(1, 1))
    path.mkdir()
    files = BlockFiles(tmp_path / "0", "slice", 1 << 20, lines.append)
    assert not lines and not files.keys
    for key, block in blocks.items():
        files.write(key, block)
    files.close()
    assert files.keys == [BlockKey(2, 2)] and path.is_dir()
    assert len(lines) == 1 and "Is a directory" in lines[0]


def test_a_folder_that_is_only_read_stays_as_it_is(tmp_path: Path) -> None:
    """It may be on a file system that is mounted read-only; one that is not there is not made."""
    folder, lines = tmp_path / "0", list[str]()
    key, block = BlockKey(1, 1), CellBlock(np.arange(3, dtype=np.int32), np.ones(9, np.uint8))
    reader = BlockFiles(folder, "slice", 1 << 20, lines.append, read_only=True)
    assert reader.read(key) is None and not folder.exists() and "nothing is read" in lines.pop()
    reader.close()
    files = BlockFiles(folder, "slice", 1 << 20, lines.append)
    files.write(key, block)
    files.close()
    (folder / "lock").chmod(0o400)
    folder.chmod(0o500)
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    other = BlockFiles(folder, "other slice", 1 << 20, lines.append, read_only=True)
    assert not other.keys and "nothing is read" in lines.pop()
    reader = BlockFiles(folder, "slice", 1 << 20, lines.append, read_only=True)
    found = reader.read(key)
    assert found and found.cells.tolist() == block.cells.tolist() and not lines
    assert before == sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    assert folder.stat().st_mode & 0o777 == 0o500
    for each in (reader, other):
        each.close()
    folder.chmod(0o700)
