"""What follows from the headers of models is refused before ranks load."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeinfer.errors import UserError
from pipeinfer.job.options.options import RunOptions
from pipeinfer.job.planning.prepare import check_headers
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.policies import Iterative, PipeInfer
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import but_waiting, finish
from tests.support.planned import options_of


def refusal(options: RunOptions, n_ranks: int) -> str:
    with pytest.raises(UserError) as refused:
        check_headers(options, n_ranks)
    return str(refused.value)


def test_more_ranks_than_layers() -> None:
    pair = options_of(TARGET, (DRAFT,), policy=PipeInfer())
    alone = options_of(TARGET, (DRAFT,), policy=Iterative())
    check_headers(pair, 10)
    check_headers(alone, 9)
    assert "start at most 10 ranks" in refusal(pair, 32) and "start at most 9 ranks" in refusal(alone, 32)


def test_models_that_cannot_be_used(tmp_path: Path) -> None:
    data = TARGET.read_bytes()
    (odd := tmp_path / "odd.gguf").write_bytes(data.replace(b"llama", b"lLama", 1))
    assert "architecture 'lLama' is not known" in refusal(options_of(odd), 2)
    other = write_model(tmp_path / "other.gguf", Shape(n_layer=2, n_vocab=300))
    options = options_of(TARGET, (other,), policy=PipeInfer())
    assert str(other) in refusal(options, 3)


def test_it_is_said_in_a_job() -> None:
    done = finish(12, ["run", "-p", "x", "-t", "1"])
    assert done.returncode == 2 and done.stdout == ""
    (line,) = but_waiting(done.stderr)
    assert line == "pipeinfer: 11 stages for 9 layers; start at most 10 ranks for this model"
