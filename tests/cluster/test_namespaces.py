"""Jobs on three hosts with links of a bandwidth, which can be cut: namespaces of this machine."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeinfer.cli.simulate import simulate_command
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import run_json
from tests.support.namespaces import Hosts, hosts, missing

ASKED = ["-p", "def read_lines(path):\n", "--temp", "0", "--ignore-eos", "-t", "1", "--draft-rank", "0"]
N_EMBD = 4096
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

PROMPTS = SLOW.replace(
    "rows = [1, 128]\nlayer_ms = [40.0, 400.0]", "rows = [1, 128, 256]\nlayer_ms = [100.0, 100.0, 200.0]"
)
"""100 ms for 128 tokens of a prompt, whose activations take 168 ms at 100 Mbit/s."""

N_PROMPT = 1400

NOTICED_S = 55.0
"""By then a job whose link was cut has ended, on a busy host too; less than a process may be silent."""

WHY = missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=f"no hosts can be made here: {WHY}")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(n_layer=3, n_embd=N_EMBD, n_head=1, n_head_kv=1, n_ff=32, n_vocab=512, head_length=32)
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape)


def foretold(profile: Path, mbit: float, n_prompt: int, n: int) -> dict[str, float]:
    words = ["--gbit", str(mbit / 1000), "--policy", "iterative", "-p", str(n_prompt), "-n", str(n), "-o", "json"]
    told = CliRunner().invoke(simulate_command, ["--profile", str(profile), *words], standalone_mode=False)
    (found,) = json.loads(told.stdout)
    return dict(found)


def run_slowed_down(hosts: Hosts, mbit: float, command: str, model: Path, profile: Path, *words: str) -> Any:
    """Stages sleep rather than compute, so that the speed is that of the links."""
    hosts.limit(mbit)
    common = ["-m", str(model), "-md", "none", "-t", "1", "--pace", str(profile)]
    done = hosts.run([command, *common, *words])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mbit", [1000, 125, 2])
def test_the_speed_is_what_simulate_foretells_of_the_links(three: Hosts, model: Path, mbit: float) -> None:
    (profile := model.with_name("slow.toml")).write_text(SLOW)
    words = ["--policy", "iterative", "-p", "the model", "-n", "16", "--temp", "0", "--ignore-eos", "--json"]
    for _ in range(10):  # what else the machine does delays it
        found = run_slowed_down(three, mbit, "run", model, profile, *words)
        assert [rank["host"] for rank in found["ranks"]] == list(three.names)
        expected_s = foretold(profile, mbit, len(found["prompt_tokens"]), 16)["itl_p50_s"]
        if (token_s := found["timings"]["itl_p50_s"]) < 1.15 * expected_s:
            break
    assert token_s == pytest.approx(expected_s, rel=0.15)


def test_what_prompts_take_of_links_is_what_simulate_foretells(three: Hosts, model: Path) -> None:
    """A row is 16 KB: at 100 Mbit/s a chunk of a prompt is longer on its way than in a stage, which
    evaluates another one meanwhile."""
    (profile := model.with_name("prompts.toml")).write_text(PROMPTS)
    speeds = []
    for mbit in (1000, 100):
        words = ["--policy", "iterative", "-p", str(N_PROMPT), "-n", "2", "-r", "1", "--numerics", "fast", "-o", "json"]
        expected, speed = foretold(profile, mbit, N_PROMPT, 2)["prompt_per_second"], 0.0
        for _ in range(10):  # what else the machine does delays it
            (found,) = run_slowed_down(three, mbit, "bench", model, profile, *words)
            if (speed := found["prompt_per_second"]) > 0.85 * expected:
                break
        speeds.append(speed)
        assert 0.75 * expected < speed < 1.15 * expected, mbit
    assert speeds[0] > 1.4 * speeds[1]


def test_a_way_that_is_cut_between_two_ranks_ends_the_job_with_both_names(three: Hosts) -> None:
    """Both reach rank 0; MPI between them waits for ever."""
    job = three.start(["run", *ASKED, "-n", "6000", "-c", "7000", "--rank-timeout", "10"])
    assert job.stdout and job.stdout.read(20)
    with three.parted("node2", "node3"):
        errors = _errors(three, job)
    line = _fault(errors)
    between = r"nothing comes from rank 1 \(host node2, stage 0, .*\) to rank 2 \(host node3, stage 1, .*\) any more"
    assert re.match(f"pipeinfer: {between}: a message has not come for 10 s", line), errors


def _fault(errors: str) -> str:
    """The one line that is said after the plan, which has its notes, and after a slow start."""
    lines = [line for line in errors.splitlines() if line.startswith("pipeinfer: ")]
    (line,) = [line for line in lines if "trained for" not in line and "waiting for" not in line]
    return line


def _errors(three: Hosts, job: subprocess.Popen[str]) -> str:
    """Of a job that has failed; one that goes on fails the test."""
    try:
        errors = job.communicate(timeout=NOTICED_S)[1]
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
    errors = _errors(three, job)
    line = _fault(errors)
    assert line.startswith("pipeinfer: rank 2 (host node3, stage 1, ") and "cannot be reached any more" in line, errors
