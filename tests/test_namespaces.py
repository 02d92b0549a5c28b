"""Jobs on three hosts with links of a bandwidth, which can be cut: namespaces of this machine."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.jobs import run_json
from tests.namespaces import Hosts, hosts, missing

ASKED = ["-p", "def read_lines(path):\n", "--temp", "0", "--ignore-eos", "-t", "1"]
NOTICED_S = 12.0
"""By then a job whose link was cut has ended: 6 s of silence, and what ranks and launcher need."""

WHY = missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=f"no hosts can be made here: {WHY}")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.mark.parametrize("mbit", [1000, 125])
def test_the_links_carry_what_they_can(three: Hosts, mbit: float) -> None:
    three.limit(mbit)
    done = three.run(["plan", "-c", "256", "--json"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [rank["host"] for rank in found["ranks"]] == list(three.names)
    assert 8e-6 * found["link"]["bytes_per_s"] == pytest.approx(mbit, rel=0.15)


def test_a_cut_link_ends_the_job_with_the_name_of_the_silent_rank(three: Hosts) -> None:
    plain = run_json(1, [*ASKED, "-n", "8"])["text"]
    job = three.start(["run", *ASKED, "-n", "6000", "-c", "7000"])
    assert job.stdout and job.stdout.read(len(plain)) == plain
    three.cut("node3")
    cut_s = time.monotonic()
    try:
        _, errors = job.communicate(timeout=2 * NOTICED_S)
    except subprocess.TimeoutExpired:
        three.end_all()
        pytest.fail(f"it goes on: {job.communicate()[1]}")
    assert job.returncode != 0 and time.monotonic() - cut_s < NOTICED_S
    (line,) = [line for line in errors.splitlines() if line.startswith("pipeinfer: ")]
    assert line.startswith("pipeinfer: rank 2 (host node3, stage 1, ") and "cannot be reached any more" in line, errors
