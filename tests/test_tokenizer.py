"""Text to tokens and back, and which vocabularies a draft may have."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from pipeinfer.errors import UserError
from pipeinfer.models.tokenizer import TextStream, Tokenizer, check_draft, check_same_vocabulary
from tests.gguf_factory import NORMAL, UNUSED, vocabulary, write_model

TEXTS = ["", "the model", "  two  spaces\nand a line", "ÄÖÜ ß", "日本語 🎉", "<s> is text", "\x00\x01", "a" * 3000]


def write_vocabulary(
    path: Path, n_vocab: int = 320, change: Callable[[list[bytes], list[int]], None] | None = None, bos: int = 1
) -> Path:
    """A GGUF of a vocabulary alone, after `change(tokens, types)`."""
    tokens, scores, types = vocabulary(n_vocab)
    if change is not None:
        change(tokens, types)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([*scores, *[0.0] * (len(tokens) - n_vocab)])
    writer.add_token_types(types)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model(tmp_path_factory.mktemp("vocabulary") / "model.gguf"))


def stream(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    text = TextStream(tokenizer)
    return [*(text.push(token) for token in tokens), text.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens[0] == tokenizer.bos == 1
    assert tokenizer.encode(text, add_special=False) == tokens[1:]
    # SentencePiece puts a space before the text
    assert "".join(stream(tokenizer, tokens)) == (" " + text if text else "")


def test_special_tokens_are_parsed_only_when_asked(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("</s>", add_special=False, parse_special=True) == [2]
    assert 2 not in tokenizer.encode("</s>", add_special=False)
    assert tokenizer.decode_piece(2) == b"" and tokenizer.decode_piece(2, special=True) == b"</s>"
    assert tokenizer.is_end(tokenizer.eos) and not tokenizer.is_end(tokenizer.bos)


def test_characters_come_whole(tokenizer: Tokenizer) -> None:
    byte_tokens = [3 + byte for byte in "é🎉".encode()]
    assert stream(tokenizer, byte_tokens) == ["", "é", "", "", "", "🎉", ""]
    assert stream(tokenizer, byte_tokens[:3]) == ["", "é", "", "\ufffd"]
    assert "".join(stream(tokenizer, [3 + 0xFF, 3 + ord("x")])) == "\ufffdx"


def test_a_missing_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"none.gguf is damaged or cut off"):
        Tokenizer(path)


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


def no_change(tokens: list[bytes], types: list[int]) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "bos", "message"),
    [
        (no_change, 1, None),
        (change_text, 1, "token 290 is '.+' and 'other'"),
        (change_byte, 1, "token 20 is '<0x11>' and '<0x11>'"),
        (add_word, 1, "320 and 321 tokens, and token 320 .'extra'. of the larger is no padding"),
        (add_padding, 1, None),
        (no_change, 5, "bos is 1 .added: True. and 5"),
    ],
)
def test_which_vocabularies_match(
    tmp_path: Path, change: Callable[[list[bytes], list[int]], None], bos: int, message: str | None
) -> None:
    target = Tokenizer(write_vocabulary(tmp_path / "target.gguf"))
    draft = Tokenizer(write_vocabulary(tmp_path / "draft.gguf", 320, change, bos))
    if message is None:
        check_same_vocabulary(target, draft)
        check_same_vocabulary(draft, target)
    else:
        with pytest.raises(UserError, match=f"draft.gguf cannot draft for .*target.gguf: {message}"):
            check_same_vocabulary(target, draft)
    target.close()
    draft.close()
    draft.close()


def test_large_vocabularies_are_compared_quickly(tmp_path: Path) -> None:
    target = Tokenizer(write_vocabulary(tmp_path / "large.gguf", 150_000))
    start = time.process_time()
    check_same_vocabulary(target, target)
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("fits", [True, False])
def test_a_drafts_vocabulary_is_freed_when_it_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    closed: list[Path] = []
    free = Tokenizer.close

    def close(tokenizer: Tokenizer) -> None:
        closed.append(tokenizer.path)
        free(tokenizer)

    monkeypatch.setattr(Tokenizer, "close", close)
    target = Tokenizer(write_vocabulary(tmp_path / "target.gguf"))
    draft = write_vocabulary(tmp_path / "draft.gguf", bos=1 if fits else 2)
    with contextlib.nullcontext() if fits else pytest.raises(UserError, match="cannot draft"):
        check_draft(target, draft)
    assert closed == [draft]
    target.close()


def test_tokens_that_come_twice_are_refused(tmp_path: Path) -> None:
    def change(tokens: list[bytes], types: list[int]) -> None:
        tokens[20] = tokens[21]

    with pytest.raises(UserError, match=r"bad.gguf is damaged: 1 tokens of its vocabulary come twice"):
        Tokenizer(write_vocabulary(tmp_path / "bad.gguf", change=change))


def test_a_missing_byte_is_only_missed_by_texts_that_need_it(tmp_path: Path) -> None:
    def change(tokens: list[bytes], types: list[int]) -> None:
        tokens[3 + 0xC3] = b"<0x!3>"

    tokenizer = Tokenizer(write_vocabulary(tmp_path / "model.gguf", change=change))
    assert tokenizer.encode("the model 🎉") == [1, *tokenizer.encode("the model 🎉", add_special=False)]
    with pytest.raises(UserError, match=r"vocabulary of .*model.gguf has no token for 'Ä'"):
        tokenizer.encode("the Ä")
    tokenizer.close()


def test_a_model_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.gguf has no vocabulary"):
        Tokenizer(write_model(tmp_path / "model.gguf", with_vocab=False))
