"""Keys of `serve`: each that the command line names counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeinfer.cli.serve import _keys_in, serve_command
from pipeinfer.errors import UserError


def keys_of(*words: str) -> tuple[str, ...]:
    return _keys_in(serve_command.make_context("serve", list(words)).params["api_keys"])


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ([], ()),
        (["--api-key", "one"], ("one",)),
        (["--api-key", "one", "--api-key", "two"], ("one", "two")),
        (["--api-key", "one, two", "--api-key", "a key,,"], ("one", "two", "a key")),
    ],
)
def test_each_key_counts(words: Sequence[str], keys: tuple[str, ...]) -> None:
    assert keys_of(*words) == keys


def test_a_variable_has_keys_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, keys in (("one, a key,", ("one", "a key")), ("one", ("one",)), ("", ())):
        monkeypatch.setenv("LLAMA_API_KEY", text)
        assert keys_of() == keys
    assert keys_of("--api-key", "other") == ("other",)


def test_an_empty_key_is_none() -> None:
    with pytest.raises(UserError, match="has no key"):
        keys_of("--api-key", "")
