"""Jobs on three hosts with links of a bandwidth, which can be cut: namespaces of this machine."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from pipeinfer.cli.simulate import simulate_command
from tests.gguf_factory import Shape, write_model
from tests.jobs import run_json
from tests.namespaces import Hosts, hosts, missing

ASKED = ["-p", "def read_lines(path):\n", "--temp", "0", "--ignore-eos", "-t", "1"]
N_EMBD = 1024
SLOW = f"""
embd = {N_EMBD}
[target]
layer_bytes = [3e6, 3e6, 3e6]
output_bytes = 100
[link]
latency_us = 100
gbit_per_s = 1000
[[stages]]
layers = 1
rows = [1, 128]
layer_ms = [40.0, 400.0]
[[stages]]
layers = 2
rows = [1, 128]
layer_ms = [40.0, 400.0]
[draft]
layers = 1
rows = [1]
layer_ms = [1.0]
"""
"""120 ms a token, and next to nothing for the links: what they take is real."""

NOTICED_S = 12.0
"""By then a job whose link was cut has ended: 6 s of silence, and what ranks and launcher need."""

WHY = missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=f"no hosts can be made here: {WHY}")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A job whose stages sleep rather than compute, so that its speed is that of its links."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "slow.toml").write_text(SLOW)
    write_model(folder / "m.gguf", Shape(n_layer=3, n_embd=N_EMBD, n_head=16, n_head_kv=4, n_ff=256, n_vocab=512))
    common = ["-m", str(folder / "m.gguf"), "-md", "none", "-p", "the model", "-n", "16", "--temp", "0", "-t", "1"]
    return ["run", *common, "--ignore-eos", "--pace", str(folder / "slow.toml"), "--json"]


@pytest.mark.parametrize("mbit", [1000, 125, 2])
def test_the_speed_is_what_simulate_foretells_of_the_links(three: Hosts, asked: list[str], mbit: float) -> None:
    three.limit(mbit)
    done = three.run(asked)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [rank["host"] for rank in found["ranks"]] == list(three.names)
    profile, n_prompt = asked[asked.index("--pace") + 1], str(len(found["prompt_tokens"]))
    words = ["--profile", profile, "--gbit", str(mbit / 1000), "--policy", "iterative", "-p", n_prompt, "-n", "16"]
    told = CliRunner().invoke(simulate_command, [*words, "-o", "json"], standalone_mode=False)
    (foretold,) = json.loads(told.stdout)
    assert found["timings"]["predicted_per_second"] == pytest.approx(foretold["predicted_per_second"], rel=0.15)


def test_a_way_that_is_cut_between_two_ranks_ends_the_job_with_both_names(three: Hosts) -> None:
    """Both reach rank 0; MPI between them waits for ever."""
    job = three.start(["run", *ASKED, "-n", "6000", "-c", "7000", "--rank-timeout", "5"])
    assert job.stdout and job.stdout.read(20)
    with three.parted("node2", "node3"):
        cut_s = time.monotonic()
        errors = _errors(three, job)
        assert time.monotonic() - cut_s < NOTICED_S
    (line,) = [line for line in errors.splitlines() if line.startswith("pipeinfer: ")]
    between = r"nothing comes from rank 1 \(host node2, stage 0, .*\) to rank 2 \(host node3, stage 1, .*\) any more"
    assert re.match(f"pipeinfer: {between}: a message has not come for 5 s", line), errors


def _errors(three: Hosts, job: subprocess.Popen[str]) -> str:
    """Of a job that has failed; one that goes on fails the test."""
    try:
        errors = job.communicate(timeout=2 * NOTICED_S)[1]
    except subprocess.TimeoutExpired:
        three.end_all()
        pytest.fail(f"it goes on: {job.communicate()[1]}")
    assert job.returncode != 0
    return errors


def test_a_cut_link_ends_the_job_with_the_name_of_the_silent_rank(three: Hosts) -> None:
    plain = run_json(1, [*ASKED, "-n", "8"])["text"]
    job = three.start(["run", *ASKED, "-n", "6000", "-c", "7000"])
    assert job.stdout and job.stdout.read(len(plain)) == plain
    three.cut("node3")
    cut_s = time.monotonic()
    errors = _errors(three, job)
    assert time.monotonic() - cut_s < NOTICED_S
    (line,) = [line for line in errors.splitlines() if line.startswith("pipeinfer: ")]
    assert line.startswith("pipeinfer: rank 2 (host node3, stage 1, ") and "cannot be reached any more" in line, errors
