"""Prompts in blocks: the same bits in every chunking, split, cache and company, and like plain llama-cpp-python's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest

from pipeinfer.core.blocks import Span
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama import cell_state
from pipeinfer.models.llama.decoder import KvCacheFull
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import finish, plain_tokens_after, run_json

PARAMS = LlamaParams(n_cells=1024, n_seq_max=8, n_batch=256, n_outputs_max=64)
SMALL = Shape(n_layer=3, peaky=8.0)
N = 205  # rows in blocks: 64, 64 and 77

MODELS = {
    "Q8_0": (SMALL, "Q8_0"),
    "Q4_K_M": (SMALL, "Q4_K_M"),
    "Q6_K": (SMALL, "Q6_K"),
    "Q3_K_M": (SMALL, "Q3_K_M"),
    "F16": (SMALL, "F16"),
    "mixtral": (replace(SMALL, n_expert=4), "Q4_K_M"),
    "qwen2": (replace(SMALL, arch="qwen2"), "Q8_0"),
    "qwen3moe": (replace(SMALL, arch="qwen3moe", n_expert=4), "Q8_0"),
    "falcon": (replace(SMALL, arch="falcon", n_head_kv=1), "Q8_0"),
    "phi3": (replace(SMALL, arch="phi3", rope_factors=True), "Q8_0"),
}
Loader = Callable[..., list[LlamaStage]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prompts")


@pytest.fixture
def load() -> Iterator[Loader]:
    """Chains of slices, closed at the end of the test."""
    opened: list[LlamaStage] = []

    def open_chain(path: Path, cuts: Sequence[int] = (), params: LlamaParams = PARAMS) -> list[LlamaStage]:
        info = read_model_info(path)
        chain = [LlamaStage(open_slice(info, a, b), params) for a, b in pairwise([0, *cuts, info.n_layer])]
        opened.extend(chain)
        return chain

    yield open_chain
    for stage in opened:
        stage.close()


def model(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    return path if path.exists() else write_model(path, *MODELS[name])


def tokens_of(seed: int, n: int = N) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, 300, n).tolist()
    return found


def never() -> bool:
    return False


def evaluate(
    chain: Sequence[LlamaStage], tokens: Sequence[int], first: int, seq: int = 0, span: Span | None = None
) -> FloatArray:
    positions = np.arange(first, first + len(tokens), dtype=np.int32)
    wanted = np.full(len(tokens), span is None)
    batch = Batch(np.array(tokens, np.int32), positions, [(seq,)] * len(tokens), None, wanted, span)
    for stage in chain:
        batch.hidden = stage.evaluate(batch, never)
        assert batch.hidden is not None
    assert batch.hidden is not None
    return batch.hidden.copy()


def read(
    chain: Sequence[LlamaStage], prompt: Sequence[int], n_chunk: int, seq: int = 0, start: int = 0
) -> Iterator[int]:
    """The prompt's rows from `start` on, in chunks; after each, where it ended."""
    span, at = Span(start, len(prompt)), start
    while at < len(prompt):
        end = span.chunk_end(at, n_chunk)
        evaluate(chain, prompt[at:end], at, seq, span)
        at = end
        yield at


def after(chain: Sequence[LlamaStage], n: int = N, seq: int = 0) -> FloatArray:
    """Logits of ten rows after the prompt, in one batch."""
    return evaluate(chain, tokens_of(99, 10), n, seq)


@pytest.mark.parametrize("name", MODELS)
def test_chunks_splits_threads_and_company_change_no_bit(folder: Path, load: Loader, name: str) -> None:
    path, prompt = model(folder, name), tokens_of(1)
    alone = load(path)
    for _ in read(alone, prompt, 1):
        pass
    expected = after(alone)
    rng = np.random.default_rng(7)
    for n_chunk, cuts, n_threads in ((128, (1,), 2), (256, (1, 2), 1), (64, (), 2)):
        chain = load(path, cuts, replace(PARAMS, n_threads=n_threads, n_cells=1536))
        other, at = tokens_of(2, 130), 0
        for _ in read(chain, tokens_of(3, 90), 64, seq=5):
            pass
        for _ in read(chain, prompt, n_chunk):  # another request decodes, and gives rows up, between the chunks
            for _ in range(3):
                n = int(rng.integers(1, 9))
                evaluate(chain, other[at : at + n], at, seq=3)
                at += n
            for stage in chain:
                stage.apply([KvOp(OpKind.REMOVE, 3, first=at - 1)])
            at -= 1
        assert np.array_equal(after(chain), expected), (n_chunk, cuts, n_threads)
        assert not any(stage._prefills.by_seq for stage in chain)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K_M", "mixtral", "falcon"])
def test_blocks_behind_cells_that_are_there(folder: Path, load: Loader, name: str) -> None:
    """As a further turn has them: behind a prompt in blocks and what was said after it, a row at a time."""
    path, prompt = model(folder, name), tokens_of(1)
    expected: FloatArray | None = None
    for n_chunk, cuts, n_said in ((256, (), 5), (64, (1,), 1), (128, (1, 2), 2)):
        chain = load(path, cuts)
        for _ in read(chain, prompt[:70], n_chunk):
            pass
        at = 70
        while at < 75:
            evaluate(chain, prompt[at : at + min(n_said, 75 - at)], at)
            evaluate(chain, tokens_of(2, 3), 0, seq=2)
            for stage in chain:  # what is parked lies between
                stage.apply([KvOp(OpKind.REMOVE, 2)])
            at += min(n_said, 75 - at)
        for _ in read(chain, prompt, n_chunk, start=75):
            pass
        found = after(chain)
        expected = found if expected is None else expected
        assert np.array_equal(found, expected) and not any(stage._prefills.by_seq for stage in chain)


def share(chain: Sequence[LlamaStage], prompt: Sequence[int]) -> None:
    """Sequence 1 begins with other tokens, sequence 0 with the first two blocks of those of sequence 6, behind which
    it evaluates the rest of the prompt; then the cells of all, of which some are parked, are packed."""
    for _ in read(chain, tokens_of(3, 90), 64, seq=1):
        pass
    for _ in read(chain, [*prompt[:128], *tokens_of(2, 100)], 64, seq=6):
        pass
    evaluate(chain, tokens_of(2, 3), 0, seq=2)
    for stage in chain:
        stage.apply([KvOp(OpKind.REMOVE, 2), KvOp(OpKind.COPY, 6, 0, 0, 128)])
        assert stage.next_position(0) == 128
    span = Span(0, len(prompt))
    evaluate(chain, prompt[128:], 128, 0, span)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K_M", "F16", "mixtral", "falcon"])
def test_blocks_behind_those_of_another_request_have_the_same_bits(folder: Path, load: Loader, name: str) -> None:
    path, prompt = model(folder, name), tokens_of(1)
    for cuts in ((), (1,)):
        alone, chain = load(path, cuts), load(path, cuts)
        for _ in read(alone, prompt, 256):
            pass
        share(chain, prompt)
        assert np.array_equal(after(chain), after(alone)) and not any(stage._prefills.by_seq for stage in chain)


def test_cells_that_are_shared_are_packed_once(folder: Path, load: Loader) -> None:
    """In a cache that would not hold them twice."""
    path, prompt = model(folder, "Q8_0"), tokens_of(1)
    alone, chain = load(path), load(path, (1,), replace(PARAMS, n_cells=512))
    for _ in read(alone, prompt, 256):
        pass
    share(chain, prompt)
    for stage in chain:
        stage.apply([KvOp(OpKind.SHARED, 0, 6, 0, 128), KvOp(OpKind.COMPACT, 0)])
        assert [stage.next_position(seq) for seq in (0, 1, 6)] == [N, 90, 228]
    assert np.array_equal(after(chain), after(alone))
    n_free = chain[0].n_cells - (90 + 228 + N - 128 + 10)
    assert n_free < 128, "they would have fitted twice"
    for at in range(0, n_free, 50):
        evaluate(chain, tokens_of(4, min(50, n_free - at)), at, seq=5)
    with pytest.raises(KvCacheFull):
        evaluate(chain, [5], n_free, seq=5)


def test_blocks_behind_others_are_given_up_back_to_where_they_begin(folder: Path, load: Loader) -> None:
    (stage,), (other,) = load(model(folder, "Q8_0")), load(model(folder, "Q8_0"))
    prompt = tokens_of(1)
    for chain in ([stage], [other]):
        evaluate(chain, prompt[:30], 0)
    next(read([stage], prompt, 64, start=30))
    assert list(stage._prefills.by_seq) == [0] and stage.next_position(0) == 94
    stage.apply([KvOp(OpKind.REMOVE, 0, first=30)])
    assert not stage._prefills.by_seq and stage.next_position(0) == 30
    for chain in ([stage], [other]):
        for _ in read(chain, prompt, 64, start=30):
            pass
    assert np.array_equal(after([stage]), after([other]))


def test_two_prompts_at_once(folder: Path, load: Loader) -> None:
    path, prompts = model(folder, "Q4_K_M"), {0: tokens_of(4, 200), 2: tokens_of(5, 331), 6: tokens_of(6, 64)}
    together = load(path, (2,))
    readers = {seq: read(together, prompt, 64, seq) for seq, prompt in prompts.items()}
    while readers:
        for seq in list(readers):
            if next(readers[seq], None) is None:
                del readers[seq]
    for seq, prompt in prompts.items():
        alone = load(path)
        for _ in read(alone, prompt, 256):
            pass
        assert np.array_equal(after(together, len(prompt), seq), after(alone, len(prompt)))


def test_stopped_in_the_middle_and_begun_again(folder: Path, load: Loader) -> None:
    path, prompt = model(folder, "Q8_0"), tokens_of(1)
    (stage,), (expected,) = load(path), load(path)
    for _ in read([expected], prompt, 256):
        pass
    positions = np.arange(N, dtype=np.int32)
    whole = Batch(np.array(prompt, np.int32), positions, [(1,)] * N, None, np.zeros(N, np.bool_), Span(0, N))
    for n_layers in (0, 2, 4, 7):  # in the first, the second and the last block
        n_asked = 0

        def stop(limit: int = n_layers) -> bool:
            nonlocal n_asked
            n_asked += 1
            return n_asked > limit

        assert stage.evaluate(whole, stop) is None
        assert n_asked == n_layers + 1 and stage.next_position(1) == 0
    for _ in read([stage], prompt, 64, seq=1):
        pass
    assert np.array_equal(after([stage], seq=1), after([expected]))


def test_given_up_between_chunks_frees_what_was_held(folder: Path, load: Loader) -> None:
    (stage,) = load(model(folder, "Q8_0"))
    for end_it in (lambda: stage.apply([KvOp(OpKind.REMOVE, 4)]), stage.clear):
        next(read([stage], tokens_of(1), 64, seq=4))
        assert list(stage._prefills.by_seq) == [4] and stage.next_position(4) == 64
        end_it()
        assert not stage._prefills.by_seq and stage.next_position(4) == 0
    for _ in read([stage], tokens_of(1), 64, seq=4):
        pass


def test_no_room(folder: Path, load: Loader) -> None:
    (stage,) = load(model(folder, "Q8_0"), (), replace(PARAMS, n_cells=256))
    for at in (0, 50):
        evaluate([stage], tokens_of(1, 50), at, seq=1)
    with pytest.raises(KvCacheFull, match="no room for 205 rows in the KV cache of 256 cells"):
        evaluate([stage], tokens_of(2), 0, seq=0, span=Span(0, N))
    assert stage.next_position(0) == 0 and stage.next_position(1) == 100
    evaluate([stage], tokens_of(2, 64), 0, seq=0, span=Span(0, 64))
    stage.apply([KvOp(OpKind.REMOVE, 1), KvOp(OpKind.COMPACT, 0)])
    expected = load(model(folder, "Q8_0"))
    evaluate(expected, tokens_of(2, 64), 0, span=Span(0, 64))
    assert np.array_equal(after([stage], 64), after(expected, 64))


def test_an_unknown_layout_of_the_cache_is_refused() -> None:
    cell = [0, 1, 0]
    for words in ([1, 0, 2, 0], [1, 0, 1, 1, *cell, 1, 1], [1, 0, 1, 1, *cell, 0, 1, 30, 2, 0]):
        with pytest.raises(ValueError, match="not understood"):
            state = np.array(words, np.int32).view(np.uint8).copy()
            cell_state.round_state(state, cell_state.CacheForm(), cell_state.F16, cell_state.BF16)


# --- whole jobs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K_M"])
def test_long_prompts_read_as_in_plain_llama(folder: Path, name: str) -> None:
    target = model(folder, name)
    common = ["-m", str(target), "-p", "the model is a rank of layers in the token " * 12, "-n", "24", "--temp", "0"]
    common += ["--ignore-eos", "-t", "1"]
    alone = run_json(1, [*common, "--policy", "iterative"])
    assert len(alone["prompt_tokens"]) > 200
    assert alone["tokens"] == plain_tokens_after(target, alone, 24)
    for n_ranks, flags in ((2, ["-b", "7"]), (3, ["-b", "512", "-md", str(target), "--policy", "pipeinfer"])):
        assert run_json(n_ranks, [*common, *flags])["tokens"] == alone["tokens"], flags


def test_of_two_sets_of_rope_factors_c_chooses_one_for_all_contexts(folder: Path) -> None:
    """A prompt is read in a context of its size, and a job has more cells than -c says."""
    shape = replace(SMALL, arch="phi3", rope_factors=True, n_ctx_short=512, rope_long=4.0)
    target, with_long = write_model(folder / "both.gguf", shape), folder / "long.gguf"
    with_long.write_bytes(target.read_bytes())
    factors = {each.name: each.data for each in gguf.GGUFReader(with_long, "r+").tensors if "rope" in each.name}
    factors["rope_factors_short.weight"][:] = factors["rope_factors_long.weight"]
    common = ["-m", str(target), "-p", "the model is a rank of layers in the token " * 5, "-n", "24", "--temp", "0"]
    common += ["--ignore-eos", "-t", "1"]
    found = {}
    for is_long, n_ranks, words in (
        (False, 1, []),
        (False, 2, ["-c", "500", "-md", str(target), "--policy", "pipeinfer"]),
        (True, 1, ["-c", "600"]),
        (True, 3, ["-c", "0", "-md", str(target), "--policy", "pipedec"]),
    ):
        job = run_json(n_ranks, [*common, *words])
        assert ("-long" in job["numerics_name"]) == is_long, words
        if is_long not in found:
            found[is_long] = plain_tokens_after(with_long if is_long else target, job, 24)
        assert job["tokens"] == found[is_long], words
    assert found[False] != found[True]
    done = finish(1, ["run", *common, "-n", "600"])
    assert done.returncode == 2 and "give -c for longer texts, of which it has other rope factors" in done.stderr


def test_they_do_not_depend_on_other_requests(folder: Path) -> None:
    shape = replace(SMALL, arch="phi3", rope_factors=True, n_ctx_short=1024, rope_long=4.0)
    target, source, texts = write_model(folder / "of_1024.gguf", shape), folder / "in.jsonl", list[str]()
    line = json.dumps({"prompt": "the model is a rank of layers " * 5, "max_tokens": 24, "ignore_eos": True}) + "\n"
    for n in (1, 12):
        output = folder / f"{n}.out"
        source.write_text(line * n)
        done = finish(1, ["batch", str(source), "-o", str(output), "-m", str(target), "-t", "1", "--temp", "0"])
        assert done.returncode == 0, done.stderr
        texts += [json.loads(each)["text"] for each in output.read_text().splitlines()]
    assert len(texts) == 13 and len({*texts}) == 1


MEMORY = """
import sys; import numpy as np
from pipeinfer.core.blocks import Span
from pipeinfer.core.interfaces import Batch
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
def held(): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
info = read_model_info(sys.argv[1])
stage = LlamaStage(open_slice(info, 0, info.n_layer), LlamaParams(4096, 4, n_batch=127, n_outputs_max=2))
def read(n):
    for at in range(0, n, 64):
        stage.evaluate(Batch(np.full(64, 5, np.int32), np.arange(at, at + 64, dtype=np.int32), [(0,)] * 64, None,
                             np.zeros(64, bool), Span(0, n)), lambda: False)
    stage.clear()
for _ in range(4): read(2048)
before = held()  # the allocator has what it keeps
for _ in range(4): read(2048)
print(held() - before, 2048 * sum(info.kv_bytes_per_cell) // 1024)
"""


def test_what_a_prompt_held_is_given_back(folder: Path) -> None:
    command = [sys.executable, "-c", MEMORY, str(model(folder, "Q8_0"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    kept_kb, held_kb = map(int, done.stdout.split())
    assert kept_kb < 1.5 * held_kb, "four more prompts were read"


def test_the_edges_are_what_the_stage_takes() -> None:
    assert Span(0, N).edges == [0, 64, 128, 205]
