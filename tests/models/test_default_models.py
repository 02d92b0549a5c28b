"""Which models a command takes that names none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeinfer.cli.run import run as run_command
from pipeinfer.job.options.options import RunOptions
from pipeinfer.models.demo import DRAFT, SHIPPED_PAIR, SMOLLM2, TARGET


@pytest.fixture
def smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's file in a package that is installed, and must not be imported."""
    package, name = SMOLLM2
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise ImportError")
    file = tmp_path / package / name
    file.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(SHIPPED_PAIR)
    return file


def models_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Path, tuple[Path, ...]]:
    found = list[RunOptions]()

    def noted(options: RunOptions, *others: object) -> int:
        found.append(options)
        return 0

    monkeypatch.setattr("pipeinfer.job.planning.prepare.start_prepared", noted)
    result: Result = CliRunner().invoke(run_command, ["-p", "a", *words], standalone_mode=False)
    assert result.exception is None, result.exception
    return found[0].models.target, found[0].models.drafts


@pytest.mark.parametrize("words", [(), ("--policy", "iterative"), ("--lookup",), ("--lookup", "--policy", "pipedec")])
def test_smollm2_where_it_is_installed(smollm2: Path, words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models_of(monkeypatch, *words) == (smollm2, ())
    monkeypatch.setenv(SHIPPED_PAIR, "1")
    assert models_of(monkeypatch, *words) == (TARGET, (DRAFT,))


@pytest.mark.parametrize("words", [("--policy", "pipedec"), ("-ps", "0.1"), ("-md", str(DRAFT))])
def test_the_shipped_pair_where_a_draft_is_wanted(smollm2: Path, words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models_of(monkeypatch, *words) == (TARGET, (DRAFT,))


def test_a_named_model_has_no_draft_of_ours(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models_of(monkeypatch, "-m", str(TARGET)) == (TARGET, ())


def test_a_package_without_the_file_is_passed_over(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smollm2.unlink()
    assert models_of(monkeypatch) == (TARGET, (DRAFT,))
