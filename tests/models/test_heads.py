"""Heads, EAGLE-3 and MTP: chains of guesses as llama.cpp's own drivers make them, texts that stay the target's."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from pipeinfer.core.engine import Engine
from pipeinfer.core.policy import Policy
from pipeinfer.core.requests import Request
from pipeinfer.core.runs import Guess
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.sequences import SequencePool
from pipeinfer.core.tree import Node
from pipeinfer.models.demo import TARGET
from pipeinfer.models.drafts.head_files import MTP_TESTED, fit, mtp_head, read_draft
from pipeinfer.models.drafts.model_drafter import HeadDrafter
from pipeinfer.models.gguf.model_info import OWN_HEAD, read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaHead, LlamaStage
from pipeinfer.observe.metrics import RequestMetrics
from pipeinfer.policies import Auto, FlowSpec, Iterative, PipeDec, PipeInfer, Speculative
from tests.core.test_engine import toy_engine
from tests.models.test_architectures import possible_cuts
from tests.support.audit import audit_engine, emitted
from tests.support.gguf_factory import Shape, write_model
from tests.support.heads import write_guessing, write_head
from tests.support.plain_eagle3 import Driver, write
from tests.support.plain_llama import BF16, decoding
from tests.support.plain_mtp import MtpDriver
from tests.support.toy import ToyPipeline

N_CELLS, N_SEQ, N_DRAFT, N_PREDICT = 512, 8, 4, 40
PLAIN = Shape(n_layer=5, n_strong=0, weak=0.3)
EASY = replace(PLAIN, weak=0.05)


class NotedDrafter(HeadDrafter):
    """Notes the chain of guesses below each root."""

    chains: dict[int, list[int]]

    def expand(
        self, request: Request, widths: Mapping[Node, int], interrupted: Callable[[], bool]
    ) -> dict[Node, list[Guess]] | None:
        found = super().expand(request, widths, interrupted)
        for guesses in (found or {}).values():
            self.chains.setdefault(request.tree.root.position, []).append(guesses[0].token)
        return found


def head_of(path: Path, target: Path) -> LlamaHead:
    info = fit(read_draft(path), read_model_info(target))
    return LlamaHead(open_slice(info, 0, 1), LlamaParams(N_CELLS, N_SEQ + 1, 32, 32, exact=False, repack=False))


def own_head_of(target: Path) -> LlamaHead:
    info = mtp_head(read_model_info(target))
    return LlamaHead(open_slice(info, 0, 1), LlamaParams(N_CELLS, N_SEQ + 1, 64, 64, exact=False, repack=False))


def stages_of(target: Path, layers: Sequence[int], cuts: Sequence[int]) -> list[LlamaStage]:
    """With the outputs of these layers as features."""
    info = read_model_info(target)
    return [
        LlamaStage(
            open_slice(info, first, last),
            LlamaParams(N_CELLS, 32, 129, 33, taps=tuple(n - first for n in layers if first <= n < last)),
        )
        for first, last in pairwise([0, *cuts, info.n_layer])
    ]


def check_chains(
    engine: Engine, drafter: NotedDrafter, prompt: list[int], expected: list[int], chains: list[list[int]]
) -> None:
    """The engine writes the expected text after the prompt, and guesses these chains meanwhile."""
    request = Request(0, prompt, N_PREDICT, SamplingParams(temp=0.0), N_CELLS)
    engine.add(request, Speculative(n_draft=N_DRAFT, width=1, accept_cutoff=0.0))
    for _ in emitted(engine):
        audit_engine(engine)
    assert request.tokens[len(prompt) :] == expected[:N_PREDICT]
    whole = list(drafter.chains.values())[:-N_DRAFT]  # where the text ends they are short
    assert whole == chains[: len(whole)] and len(whole) > 5


@pytest.mark.parametrize("target", ["random", "shipped"])
def test_chains_are_those_of_llama_cpp_s_driver(target: str, tmp_path: Path) -> None:
    """Cells of accepted tokens are made again from features there too, so each chain depends on all that was right."""
    model = TARGET if target == "shipped" else write_model(tmp_path / "target.gguf", PLAIN)
    layers = (2, 1, 4)
    head = write_head(tmp_path / "head.gguf", model, layers)
    rng = random.Random(5)
    prompt = [rng.randrange(3, 260) for _ in range(30)]
    driver = Driver(str(model), str(head), layers, len(prompt) + N_PREDICT + 64)
    expected, chains = write(driver, prompt, N_PREDICT, N_DRAFT)
    for cuts in ((), (2, 3)):
        loaded = head_of(head, model)
        drafter = NotedDrafter(loaded, SequencePool(N_SEQ, N_CELLS), 32)
        drafter.chains = {}
        stages = stages_of(model, sorted(layer - 1 for layer in layers), cuts)
        pool = SequencePool(N_SEQ, N_CELLS, parked=True)
        engine = toy_engine(ToyPipeline(stages, random.Random(0)), pool, drafter, n_chunk=64, n_rows=32, blocks=True)
        check_chains(engine, drafter, prompt, expected, chains)
        for stage in (*stages, loaded):
            stage.close()
    n_right = N_PREDICT - len(chains)
    assert target == "shipped" or n_right > 5, "no guess was right: no cell was made again"


@pytest.mark.parametrize("name", MTP_TESTED)
def test_chains_of_a_targets_own_head_are_those_of_llama_cpp_s_driver(name: str, tmp_path: Path) -> None:
    model = write_guessing(tmp_path, name)
    info, rng = read_model_info(model), random.Random(5)
    prompt = [rng.randrange(3, info.n_vocab) for _ in range(30)]
    rewinds, types = info.layers.rewinds, (BF16, BF16) if info.layers.shares_values else decoding()
    driver = MtpDriver(str(model), len(prompt) + N_PREDICT + 64, types, rewinds)
    expected, chains = write(driver, prompt, N_PREDICT, N_DRAFT)
    for cuts in ((), *possible_cuts(info.layers, 1)[:1]):
        loaded = own_head_of(model)
        drafter = NotedDrafter(loaded, SequencePool(N_SEQ, N_CELLS), 32, shift=0)
        drafter.chains = {}
        stages = stages_of(model, [info.n_layer - 1], cuts)
        pool = SequencePool(16, N_CELLS, parked=True, rewinds=rewinds, n_guesses=0 if rewinds else 12)
        blocks = info.layers.architecture.flash
        engine = toy_engine(ToyPipeline(stages, random.Random(0)), pool, drafter, n_chunk=64, n_rows=32, blocks=blocks)
        check_chains(engine, drafter, prompt, expected, chains)
        for stage in (*stages, loaded):
            stage.close()
    assert N_PREDICT - len(chains) >= 5, "no guess was right: no cell was made again"


SYSTEM = [random.Random(2).randrange(3, 318) for _ in range(70)]
POLICIES = (Auto, PipeInfer, Iterative, Speculative, PipeDec, FlowSpec)


def make_requests() -> list[Request]:
    """Short ones and long ones, some of which begin alike, sampled and greedy, with penalties."""
    rng, requests = random.Random(7), list[Request]()
    prompts = [[rng.randrange(3, 318) for _ in range(length)] for length in (1, 2, 30, 90)]
    prompts += [[*SYSTEM, *prompts[2][:n]] for n in (1, 5, 20)] + [SYSTEM, SYSTEM]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(seed=number, temp=0.7 * (number % 2), repeat_penalty=1.0 + 0.1 * (number % 3))
        requests.append(Request(number, prompt, 24, params, 160, keep=number % 2 == 0))
    return requests


def write_texts(
    model: Path, head: Path | None, cuts: Sequence[int], seed: int, policies: Sequence[type[Policy]] = POLICIES
) -> tuple[list[list[int]], int]:
    """Of all requests at once, and how many guesses were right."""
    is_own = head == OWN_HEAD
    loaded = own_head_of(model) if is_own else head_of(head, model) if head else None
    drafter = HeadDrafter(loaded, SequencePool(N_SEQ, N_CELLS), 32, shift=0 if is_own else 1) if loaded else None
    read = (read_model_info(model).n_layer - 1,) if is_own else (0, 1, 3)
    stages, requests, metrics = stages_of(model, read, cuts), make_requests(), list[RequestMetrics]()
    pool = SequencePool(31, N_CELLS, parked=True)
    engine = toy_engine(ToyPipeline(stages, random.Random(seed)), pool, drafter, n_chunk=64, n_rows=32, blocks=True)
    for request in requests:
        metrics.append(RequestMetrics())
        engine.add(request, policies[(request.id + seed) % len(policies)](), metrics[-1])
    for _ in emitted(engine):
        audit_engine(engine)
    for stage in (*stages, *([loaded] if loaded else [])):
        stage.close()
    return [request.tokens for request in requests], sum(each.n_sent_matched for each in metrics)


def test_texts_are_those_without_a_head(tmp_path: Path) -> None:
    """Of all requests at once under all policies, sampled and greedy, over one to three stages; also of a head that
    knows fewer tokens and has tables of its own."""
    model = write_model(tmp_path / "target.gguf", EASY)
    whole = write_head(tmp_path / "whole.gguf", model, (2, 1, 4), sees=0.1)
    part = write_head(tmp_path / "part.gguf", model, (2, 1, 4), n_tokens=200, own_tables=True, sees=0.1)
    expected, _ = write_texts(model, None, (), 0, [Iterative])
    for seed, (head, cuts) in enumerate([(whole, ()), (part, (2,)), (whole, (1, 3)), (part, (1, 2, 3, 4))]):
        texts, n_right = write_texts(model, head, cuts, seed)
        assert texts == expected, f"seed {seed}"
        assert n_right > 15, "hardly a guess was right: this proves little"


def test_texts_are_those_without_a_targets_own_head(tmp_path: Path) -> None:
    model = write_guessing(tmp_path, "glm4moe")
    expected, _ = write_texts(model, None, (), 0, [Iterative])
    for seed, cuts in enumerate([(), (2,), (1, 3)]):
        texts, n_right = write_texts(model, OWN_HEAD, cuts, seed)
        assert texts == expected, f"seed {seed}"
        assert n_right > 15, "hardly a guess was right: this proves little"
