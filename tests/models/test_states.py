"""Models whose layers keep states: what a stage computes for them, how far it goes back, what is guessed for them."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeinfer.cluster.timed_runs import time_layers
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess, KvOp, OpKind
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.tree import TokenTree
from pipeinfer.core.types import FloatArray
from pipeinfer.job.bench.measure import ModelToTime, time_model
from pipeinfer.job.options.options import JobModels, RunOptions, Speculation
from pipeinfer.job.placement.memory import packing_bytes
from pipeinfer.job.planning.prepare import with_files
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.policies import Iterative, PipeInfer, Speculative
from tests.core.test_engine import toy_engine
from tests.job.batch.test_batch import texts_of
from tests.job.run.test_prompts import after, evaluate, read, tokens_of
from tests.models.test_architectures import possible_cuts, rows_of_whole
from tests.models.test_llama_stage import TreeDriver, load, loaded, random_tokens, run, state
from tests.support.architecture_factory import write_random_model
from tests.support.architecture_models import MODELS
from tests.support.audit import audit_engine, emitted
from tests.support.gguf_factory import write_model
from tests.support.jobs import finish, run_json
from tests.support.paces import pace_words, slow_target
from tests.support.toy import N_LAYERS, OracleDrafter, RandomPolicy, Reference, ToyPipeline

__all__ = ["loaded"]
Loader = Callable[..., list[LlamaStage]]
PARAMS = LlamaParams(n_cells=1024, n_seq_max=4, n_batch=256, n_outputs_max=64)
NAMES = ["qwen35", "nemotron_h_moe", "mamba2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


def model_and_cut(folder: Path, name: str) -> tuple[Path, tuple[int, ...]]:
    path = folder / f"{name}.gguf"
    if not path.exists():
        write_random_model(path, replace(MODELS[name], with_vocab=True))
    return path, possible_cuts(read_model_info(path).layers, 3)[0]


def rows(seqs: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Batch:
    n = len(tokens)
    return Batch(
        np.array(tokens, np.int32), np.array(positions, np.int32), [(seq,) for seq in seqs], None, np.ones(n, bool)
    )


@pytest.mark.parametrize("name", NAMES)
def test_chunks_splits_and_company_change_no_bit(folder: Path, loaded: Loader, name: str) -> None:
    path, cuts = model_and_cut(folder, name)
    alone, prompt = loaded(path, (), PARAMS), tokens_of(1)
    list(read(alone, prompt, 256))
    expected = after(alone)
    chain = loaded(path, cuts, replace(PARAMS, n_threads=2))
    evaluate(chain, tokens_of(2, 30), 0, seq=1)
    at = 30
    for _ in read(chain, prompt, 64):
        evaluate(chain, tokens_of(at, 5), at, seq=1)
        at += 5
    assert np.array_equal(after(chain), expected)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_requests_share_a_batch(folder: Path, loaded: Loader, name: str, exact: bool) -> None:
    """Rows of two requests, in turns: each gets what it would get alone, in the order of the batch."""
    path, cuts = model_and_cut(folder, name)
    params = replace(PARAMS, exact=exact)
    texts = [random_tokens(12, seed=seq) for seq in range(2)]
    alone = [run(load(path, (), params), rows([0] * 12, text, range(12))) for text in texts]
    tokens, positions = [token for pair in zip(*texts, strict=True) for token in pair], [row // 2 for row in range(24)]
    batch = rows([0, 1] * 12, tokens, positions)
    batch.wanted = np.array([True, True, False, True] * 6)
    together = run(loaded(path, cuts, params), batch)
    expected = np.array([alone[row % 2][row // 2] for row in np.flatnonzero(batch.wanted)])
    assert np.array_equal(together, expected) if exact else np.allclose(together, expected, atol=2e-2)


def test_sequences_are_removed_as_a_whole_and_packed(folder: Path, loaded: Loader) -> None:
    path, cuts = model_and_cut(folder, "qwen35")
    chain, alone = loaded(path, cuts, PARAMS), loaded(path, (), PARAMS)
    text = random_tokens(40)

    def say(stages: Sequence[LlamaStage], seq: int, start: int, end: int) -> FloatArray:
        return run(stages, rows([seq] * (end - start), text[start:end], range(start, end)))

    for seq in (0, 1, 2):
        say(chain, seq, 0, 10 + seq)
    for stage in chain:
        stage.apply([KvOp(OpKind.REMOVE, 1), KvOp(OpKind.COMPACT, 0)])
    assert [chain[0].next_position(seq) for seq in (0, 1, 2)] == [10, 0, 12]
    say(alone, 0, 0, 12)
    assert np.array_equal(say(chain, 2, 12, 20), say(alone, 0, 12, 20))
    with pytest.raises(RuntimeError, match="cannot go back to position 15"):
        chain[0].apply([KvOp(OpKind.REMOVE, 2, first=15)])


@pytest.mark.parametrize("name", [*NAMES, "kimi-linear", "lfm2", "falcon-h1"])
def test_states_take_what_is_planned(folder: Path, loaded: Loader, name: str) -> None:
    path, cuts = model_and_cut(folder, name)
    info, edges = read_model_info(path), [0, *cuts, read_model_info(path).n_layer]
    chain = loaded(path, cuts, PARAMS)
    run(chain, rows([0], [5], [0]))
    for stage, first, last in zip(chain, edges, edges[1:], strict=False):
        in_cache = sum(info.layers.state_bytes[first:last]) + sum(info.kv_bytes_per_cell[first:last])
        assert 0 <= len(state(stage, 0)) - in_cache < 1000


@pytest.mark.parametrize("name", ["llama", "mamba2", "qwen35"])
def test_packing_copies_no_more_than_is_planned(folder: Path, loaded: Loader, name: str) -> None:
    path, _ = model_and_cut(folder, name)
    info, params = read_model_info(path), replace(PARAMS, n_cells=768, n_seq_max=5)
    (stage,) = loaded(path, (), params)
    for seq, n_tokens in enumerate((140, 520, 60, 30)):
        for start in range(0, n_tokens, 60):
            tokens = random_tokens(min(60, n_tokens - start), seed=seq)
            run([stage], rows([seq] * len(tokens), tokens, range(start, start + len(tokens))))
    tracemalloc.start()
    stage.apply([KvOp(OpKind.REMOVE, 3), KvOp(OpKind.COMPACT, 0)])
    _, n_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    planned = packing_bytes(info, 0, info.n_layer, params.n_cells)
    assert 0.5 * planned < n_bytes < planned + 20_000, "beside libllama's and Python's notes"
    assert [stage.next_position(seq) for seq in range(4)] == [140, 520, 60, 0]


def test_what_cannot_be_cut_is_given_up() -> None:
    pool = SequencePool(2, 100, rewinds=False)
    for request, n_kept, n_left in ((0, 20, 20), (1, 19, 0)):
        pool.open(request)
        pool.place(request, 20, [])
        pool.retain(request, n_kept)
        assert pool.placed_end(request) == n_left
    assert [op.first for op in pool.take_pending()] == [0]


def test_a_job_says_what_the_model_says(folder: Path) -> None:
    path, _ = model_and_cut(folder, "qwen35")
    common = ["-m", str(path), "-p", "the model of a layer", "-n", "24", "--temp", "0", "--ignore-eos"]
    result = run_json(3, common)
    prompt, tokens = result["prompt_tokens"], result["tokens"]
    expected = rows_of_whole(path, [*prompt, *tokens[:-1]])[len(prompt) - 1 :].argmax(axis=1)
    assert tokens == expected.tolist() and len(set(tokens)) > 3


@pytest.mark.parametrize("name", NAMES)
def test_trees_are_the_same_as_plain_decoding(folder: Path, loaded: Loader, name: str) -> None:
    path, cuts = model_and_cut(folder, name)
    (alone,) = loaded(path, (), PARAMS)
    tokens = random_tokens(230)
    expected = np.concatenate([run([alone], rows([0], [token], [at])) for at, token in enumerate(tokens)])
    params = replace(PARAMS, n_cells=256, n_seq_max=24, n_batch=64)
    driver = TreeDriver(loaded(path, cuts, params), tokens, expected, seed=1, alone=True)
    driver.prefill(120)
    while driver.at < 210:
        driver.step()
    assert driver.n_compactions >= 1


@pytest.mark.parametrize("exact", [True, False])
def test_a_sequence_is_as_if_nothing_had_been_guessed_after_it(folder: Path, loaded: Loader, exact: bool) -> None:
    path, cuts = model_and_cut(folder, "qwen35")
    params = replace(PARAMS, exact=exact, n_seq_max=6)
    chain, (alone,) = loaded(path, cuts, params), loaded(path, (), params)
    tokens, rng = random_tokens(50), np.random.default_rng(1)
    for at, token in enumerate(tokens):
        guesses = random_tokens(int(rng.integers(1, 5)), seed=at)
        seqs = range(1, len(guesses) + 1)
        batch = rows([0, *seqs], [token, *guesses], range(at, at + len(guesses) + 1))
        batch.seqs = [tuple(range(first, len(guesses) + 1)) for first in range(len(guesses) + 1)]
        for stage in chain:
            stage.apply([KvOp(OpKind.COPY, 0, seq, 0, at) for seq in seqs if at])
        found = run(chain, batch)
        assert np.allclose(found[0], run([alone], rows([0], [token], [at]))[0], atol=0 if exact else 2e-2)
        assert [chain[0].next_position(seq) for seq in (0, *seqs)] == [*range(at + 1, at + len(guesses) + 2)]
        for stage in chain:
            stage.apply([KvOp(OpKind.REMOVE, seq) for seq in seqs])


def test_no_more_is_placed_than_there_are_states_for() -> None:
    pool, tree = SequencePool(5, 100, rewinds=False, n_guesses=3), TokenTree(7, 0)
    pool.open(0)
    nodes = [tree.root]
    for token in range(6):
        nodes += tree.grow(nodes[-1], [Guess(token, 0.5)], [-0.1])
    assert pool.fitting(nodes) == nodes[:4]
    pool.place(0, 0, nodes[:4])
    assert pool.fitting(nodes[4:]) == [] and pool.n_free == 1, "another request can be opened"


@pytest.mark.parametrize(("name", "strength"), [("qwen35", 1.0), ("mamba2", 0.05)])
def test_right_and_wrong_guesses_change_no_text(folder: Path, name: str, strength: float) -> None:
    target, draft = folder / "target.gguf", folder / "draft.gguf"
    for path, model in ((target, MODELS[name]), (draft, MODELS["llama"])):
        write_random_model(path, replace(model, with_vocab=True, strength=strength))
    asked = ["-m", str(target), "-p", "the model", "-n", "60", "--temp", "0", "--ignore-eos"]
    pace = pace_words(folder, slow_target(5.0))  # guesses are in time
    result = run_json(3, [*asked, "-md", str(draft), *pace])
    assert result["tokens"] == run_json(1, asked)["tokens"]
    assert (result["speculation"]["acceptance_rate"] > 0.03) == (strength < 1), "of a tree one branch at most is right"


def test_guesses_for_several_requests_change_no_text(folder: Path) -> None:
    target, draft, asked = folder / "loaded.gguf", folder / "loaded_draft.gguf", folder / "asked.jsonl"
    write_random_model(target, replace(MODELS["mamba2"], with_vocab=True, strength=0.05))
    write_random_model(draft, replace(MODELS["llama"], with_vocab=True, strength=0.05))
    lines = [{"custom_id": str(id), "prompt": "the model of a layer " * (id % 3 + 1), "seed": id} for id in range(6)]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def texts(n_ranks: int, *words: str) -> dict[str, str]:
        output = folder / f"{n_ranks}.jsonl"
        words = ("batch", str(asked), "-o", str(output), "-m", str(target), "-n", "20", "--ignore-eos", *words)
        done = finish(n_ranks, [*words, "--json"])
        assert done.returncode == 0, done.stderr
        assert (json.loads(done.stdout)["draft_n_accepted"] > 0) == (n_ranks > 1)
        return texts_of(output)

    assert texts(3, "-md", str(draft), "--policy", "speculative", "-np", "4") == texts(1, "-md", "none", "-np", "1")


@pytest.mark.parametrize(
    ("name", "n_cells", "guesses"),
    [*((name, 900, guesses) for name in NAMES for guesses in (False, True)), ("qwen35", 450, False)],
)
def test_texts_of_one_prompt_read_it_once_and_are_those_of_each_alone(
    folder: Path, loaded: Loader, name: str, n_cells: int, guesses: bool
) -> None:
    """Also where they are packed and some wait again, and for trees of any shape, with as many states as a job has."""
    path, cuts = model_and_cut(folder, name)
    prompts = [tokens_of(3, 200)] * 3 + [tokens_of(4, 20)] * 2 + [tokens_of(5, 90)]
    speculation, n_open = Speculation(policy=Speculative() if guesses else Iterative()), len(prompts)
    n_seq, n_guesses = speculation.n_target_seq(n_open, False), speculation.n_target_guesses(n_open, False)
    params = LlamaParams(n_cells=n_cells, n_seq_max=n_seq + 1, n_batch=129, n_outputs_max=32)

    def texts(
        stages: Sequence[LlamaStage], prompts: Sequence[list[int]], first: int = 0
    ) -> tuple[list[list[int]], int]:
        for stage in stages:
            stage.clear()
        pool = SequencePool(n_seq, n_cells, parked=True, rewinds=False, n_guesses=n_guesses)
        drafter = OracleDrafter(Reference(N_LAYERS), 0.5) if guesses else None  # of another model: mostly wrong
        pipeline = ToyPipeline(stages, random.Random(1))
        engine = toy_engine(pipeline, pool, drafter, n_chunk=128, n_rows=32, blocks=True)
        requests, metrics = list[Request](), [RequestMetrics() for _ in prompts]
        for number, (prompt, observer) in enumerate(zip(prompts, metrics, strict=True), first):
            requests.append(Request(number, prompt, 16, SamplingParams(seed=number, temp=0.8), 230))
            policies = [RandomPolicy(random.Random(number), 3, 40, 12), PipeInfer(microbatch=3), speculation.policy]
            engine.add(requests[-1], policies[number % 3] if guesses else speculation.policy, observer)
        for _ in emitted(engine):
            audit_engine(engine)
        assert len(prompts) == 1 or any(each.n_sent for each in metrics) == guesses
        return [each.tokens for each in requests], sum(each.n_kept for each in metrics)

    alone = loaded(path, (), params)
    found = [texts(alone, [prompt], number) for number, prompt in enumerate(prompts)]
    assert not any(n_kept for _, n_kept in found)
    together, n_kept = texts(loaded(path, cuts, params), prompts)
    assert together == [text for (text,), _ in found]
    assert n_kept == 2 * 199 + 19 or (n_cells < 900 and n_kept >= 199)
    assert len({tuple(text) for text in together[:3]}) == 3, "seeds"


def test_it_does_not_guess_and_is_not_cut_anywhere(folder: Path) -> None:
    path, plain = model_and_cut(folder, "qwen35")[0], folder / "plain.gguf"
    if not plain.exists():
        write_model(plain)
    for n_ranks, arguments, message in (
        (1, ["-m", plain, "-md", path], "it cannot be a draft: take another one"),
        (2, ["-m", path, "--layer-split", "1,7"], "layers 0-0 of this model cannot be a stage, a slice needs a layer"),
    ):
        done = finish(n_ranks, ["run", "-p", "the", "-n", "4", *map(str, arguments)])
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_models_info_knows_how_it_can_be_cut(folder: Path) -> None:
    done = finish(1, ["models", "info", str(model_and_cut(folder, "qwen35")[0]), "--json"])
    found = json.loads(done.stdout)
    assert found["sliceable"] and found["exact"]
    assert [stage["n_stages"] for stage in found["stages"]] == [1, 2, 4], "of eight layers, each second with attention"


@pytest.mark.parametrize("name", NAMES)
def test_their_runs_can_be_timed(folder: Path, loaded: Loader, name: str) -> None:
    """In a context too, to whose end they cannot go back."""
    path, _ = model_and_cut(folder, name)
    (stage,) = loaded(path, (), replace(PARAMS, n_batch=128))
    layer_bytes = [1] * read_model_info(path).n_layer
    assert time_layers(stage, layer_bytes, 1, time.perf_counter, True).s_per_byte > 0
    assert stage.next_position(0) == 0
    found = time_model(
        ModelToTime(stage, len(layer_bytes), 32, 1024, blocks=True, rewinds=False), time.perf_counter, 0.3
    )
    assert found.in_context_s[1] > 0 and stage.next_position(0) == 0


def test_states_are_guessed_for_only_where_that_is_asked_for(folder: Path) -> None:
    """Each guess needs a state of its own; with other layers `auto` is the default on several ranks."""
    found = {}
    for name, path in (("states", model_and_cut(folder, "qwen35")[0]), ("none", write_model(folder / "plain.gguf"))):
        options = RunOptions(models=JobModels(target=path)).changed(by_ranks=True)
        found[name] = [with_files(options, n_ranks).speculation.policy.name for n_ranks in (1, 2)]
    assert found == {"states": ["iterative", "iterative"], "none": ["iterative", "auto"]}
