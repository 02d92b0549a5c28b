"""Which vocabularies a draft may have, and drafts whose token ids are translated."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from pipeinfer.cli.plan import plan_command
from pipeinfer.core.interfaces import Batch, KvOp
from pipeinfer.core.types import FloatArray
from pipeinfer.errors import UserError
from pipeinfer.job.inspect.pair_report import acceptance
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.drafts.translation import (
    NONE,
    TranslatedStage,
    Translation,
    draft_translation,
    find_translation,
    translation_note,
    vocabulary_differences,
)
from pipeinfer.models.text.tokenizer import Tokenizer
from tests.models.test_tokenizer import write_vocabulary
from tests.support.gguf_factory import NORMAL, UNUSED
from tests.support.jobs import finish
from tests.support.other_vocabulary import reorder

N_DEMO, N_LARGE = 4096, 60_000
PROMPT = "def read_lines(path):\n"
EXTENDED: Sequence[int | bytes] = [
    b"<|pad|>",
    2,
    1,
    b"<|im_start|>",
    0,
    *reversed(range(3, 259)),
    *range(259, 3900),
    *range(3940, N_DEMO),
    b"<|im_end|>",
]
"""The shipped vocabulary with its special tokens and bytes elsewhere, some more, and forty words missing."""


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reorder(DRAFT, tmp_path_factory.mktemp("other") / "extended.gguf", EXTENDED)


def change_text(tokens: list[bytes], types: list[int]) -> None:
    tokens[290] = b"other"


def change_byte(tokens: list[bytes], types: list[int]) -> None:
    types[20] = NORMAL


def add_word(tokens: list[bytes], types: list[int]) -> None:
    tokens.append(b"extra")
    types.append(NORMAL)


def add_padding(tokens: list[bytes], types: list[int]) -> None:
    tokens += [b"[PAD320]", b"reserved"]
    types += [NORMAL, UNUSED]


def other_words(tokens: list[bytes], types: list[int]) -> None:
    tokens[100:] = [b"other%d" % token for token in range(100, len(tokens))]
    types[100:] = [NORMAL] * (len(tokens) - 100)


def no_change(tokens: list[bytes], types: list[int]) -> None:
    pass


Opened = tuple[Tokenizer, Tokenizer]


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., Opened]:
    def opened(change: Callable[[list[bytes], list[int]], None], bos: int = 1) -> Opened:
        target = write_vocabulary(tmp_path / "target.gguf")
        return Tokenizer(target), Tokenizer(write_vocabulary(tmp_path / "draft.gguf", 320, change, bos))

    return opened


@pytest.mark.parametrize(
    ("change", "bos", "what", "n_missing"),
    [
        (no_change, 1, None, 0),
        (change_text, 1, "token 290 is '.+' and 'other'", 1),
        (change_byte, 1, "token 20 is '<0x11>' and '<0x11>'", 1),
        (add_word, 1, "320 and 321 tokens, and token 320 .'extra'. of the larger is no padding", 0),
        (add_padding, 1, None, 0),
        (no_change, 5, "bos is 1 .added: True. and 5", 0),
    ],
)
def test_differences_are_listed_and_all_else_is_the_same(
    pair: Callable[..., Opened],
    change: Callable[[list[bytes], list[int]], None],
    bos: int,
    what: str | None,
    n_missing: int,
) -> None:
    target, draft = pair(change, bos)
    differences = list(vocabulary_differences(target, draft))
    translation = find_translation(target, draft)
    if what is None:
        assert differences == [] and list(vocabulary_differences(draft, target)) == []
        assert translation is None or (translation.padding_only and draft.n_vocab > target.n_vocab)
    else:
        ((_, reason),) = differences
        assert re.match(what, reason)
        assert translation and not translation.padding_only
        assert translation.n_shared == target.n_vocab - n_missing
        assert translation.inputs[target.bos] == draft.bos
    if translation:
        assert len(translation.outputs) == len(translation.inputs) == target.n_vocab
        assert 0 <= translation.inputs.min() <= max(translation.inputs.max(), translation.outputs.max()) < draft.n_vocab


def test_too_few_common_tokens_are_refused(pair: Callable[..., Opened]) -> None:
    with pytest.raises(UserError, match=r"draft.gguf cannot draft for .*: of \d+ tokens they share \d+, fewer"):
        find_translation(*pair(other_words))


def test_the_ends_of_texts_are_the_same_whatever_they_are_called(pair: Callable[..., Opened]) -> None:
    def rename(tokens: list[bytes], types: list[int]) -> None:
        tokens[2] = b"<|endoftext|>"

    target, draft = pair(rename)
    translation = find_translation(target, draft)
    assert translation and translation.outputs[target.eos] == translation.inputs[target.eos] == draft.eos


def test_a_token_that_the_draft_lacks_is_read_as_the_end_of_its_spelling(pair: Callable[..., Opened]) -> None:
    def rename(tokens: list[bytes], types: list[int]) -> None:
        tokens[tokens.index("▁token".encode())] = b"other"

    target, draft = pair(rename)
    lost = target.pieces.index(("▁token".encode(), False))
    translation = find_translation(target, draft)
    assert translation and translation.outputs[lost] == NONE
    assert draft.text_of(int(translation.inputs[lost])) == b"n", "no longer end of it is a token"


def test_large_vocabularies_are_compared_quickly(tmp_path: Path) -> None:
    def change(tokens: list[bytes], types: list[int]) -> None:
        tokens[3:259], types[3:259] = tokens[3:259][::-1], types[3:259][::-1]

    one = write_vocabulary(tmp_path / "one.gguf", N_LARGE)
    two = write_vocabulary(tmp_path / "two.gguf", N_LARGE, change)
    start_s = time.process_time()
    assert draft_translation(one, one) is None
    alike_s, start_s = time.process_time() - start_s, time.process_time()
    translation = draft_translation(one, two)
    assert translation and translation.n_shared == N_LARGE
    assert alike_s < 1 and time.process_time() - start_s < 5
    start_s = time.process_time()
    assert draft_translation(one, two) is translation and time.process_time() - start_s < 1


class Fixed:
    """A draft of four tokens whose first logit is its input."""

    n_embd, n_vocab, is_last = 1, 4, True

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray:
        return np.array([[token, 1.0, 2.0, 3.0] for token in batch.tokens], np.float32)

    def apply(self, ops: Sequence[KvOp]) -> None: ...
    def next_position(self, seq: int) -> int:
        return 0

    def clear(self) -> None: ...
    def close(self) -> None: ...


def test_a_stage_reads_and_guesses_the_targets_ids() -> None:
    ids = Translation(np.array([3, 2, 0, 1, 0], np.int32), np.array([3, 2, NONE, 1, 0], np.int32), False)
    stage = TranslatedStage(Fixed(), ids)
    assert stage.n_vocab == 5
    for tokens in ([0, 2], [1, 3, 4], [2]):
        inputs = [ids.inputs[token] for token in tokens]
        batch = Batch(
            np.array(tokens, np.int32),
            np.arange(len(tokens), dtype=np.int32),
            [(0,)] * len(tokens),
            None,
            np.ones(len(tokens), bool),
        )
        logits = stage.evaluate(batch, lambda: False)
        assert logits is not None and logits.tolist() == [[3.0, 2.0, -np.inf, 1.0, token] for token in inputs]


def test_the_same_draft_under_other_ids_is_as_often_right(extended: Path) -> None:
    tokenizer = Tokenizer(TARGET)
    prompts = [tokenizer.encode(PROMPT)]
    tokenizer.close()
    translation = draft_translation(TARGET, extended)
    assert translation and translation.n_shared == N_DEMO - 40
    assert translation_note(extended, translation).endswith("4056 of 4096 can be guessed")
    rates = acceptance(TARGET, DRAFT, prompts, 96), acceptance(TARGET, extended, prompts, 96, translation=translation)
    assert rates[1] == pytest.approx(rates[0], abs=0.03) and rates[0] > 0.3


def test_a_plan_says_what_is_translated(extended: Path) -> None:
    words = ["-m", str(TARGET), "-md", str(extended), "--profile", "pipeinfer-c", "-np", "3"]
    told = CliRunner().invoke(plan_command, words, standalone_mode=False)
    assert f"note: {extended} has other tokens than the target: they are translated, 4056 of 4096" in told.stdout


def test_the_text_is_the_targets_and_the_drafts_help_as_much(extended: Path) -> None:
    larger = reorder(TARGET, extended.with_name("larger.gguf"), EXTENDED)
    sampled = ["--temp", "0.8", "-s", "5", "--repeat-penalty", "1.2", "--policy", "speculative"]
    common = ["run", "--json", "-m", str(TARGET), "-p", PROMPT, "-n", "64", *sampled, "-t", "1", "--draft-split", "2"]
    # the larger draft is over two ranks; guesses of this policy do not depend on the time
    teams = ([DRAFT, TARGET], [extended, larger])
    plain, other = (finish(4, [*common, "-md", str(small), "-md", str(large)]) for small, large in teams)
    assert plain.returncode == other.returncode == 0, other.stderr
    assert "larger.gguf has other tokens than the target: they are translated, 4056 of 4096" in other.stderr
    results = [json.loads(done.stdout) for done in (plain, other)]
    assert results[0]["tokens"] == results[1]["tokens"]
    rates = [result["speculation"]["acceptance_rate"] for result in results]
    assert rates[1] == pytest.approx(rates[0], abs=0.1) and rates[0] > 0.2
