"""`pipeinfer info`: what a host has, alone and under mpirun."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from pipeinfer import __version__
from pipeinfer.cluster.hosts import roster
from pipeinfer.job.inspect.info import by_host, info_lines
from pipeinfer.models.llama.eval_callback import compiled
from pipeinfer.models.llama.ggml import llama_devices
from pipeinfer.models.llama.repacking import repacked_types
from pipeinfer.models.torch.params import torch_version
from tests.support.jobs import environment, finish


def test_what_a_host_has_without_mpi() -> None:
    """Nothing of MPI is loaded into the process that tells."""
    code = (
        "import sys; from pipeinfer.job.inspect.info import InfoQuestion, info; info(InfoQuestion(True)); "
        "sys.exit('mpi4py' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment() | {"OMP_SOMETHING": "7"}
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["hosts"]
    assert found["pipeinfer"].startswith(__version__) and found["ranks"] == []
    assert 0 < found["n_cores"] <= found["n_cores_of_host"] and found["memory_bytes"] > 10**8
    assert found["mpi"]["error"] is None and found["mpi"]["library"] and found["mpi"]["gpu_aware"] is None
    assert found["llama"]["devices"][0]["kind"] == "CPU" and found["llama"]["devices"][0]["exact"] == "exact"
    assert list(found["llama"]["repacked_rows"].values()) == [each.n_rows for each in repacked_types()]
    assert found["llama"]["callback_compiled"] == bool(compiled())
    assert (found["torch"] is not None) == bool(torch_version())
    assert found["environment"]["OMP_SOMETHING"] == "7" and "HOME" not in found["environment"]
    text = "\n".join(info_lines([found]))
    assert ("callback runs in Python" in text) != found["llama"]["callback_compiled"]
    assert found["mpi"]["library"] in text and "OMP_SOMETHING=7" in text and "not known without mpirun" in text


def test_ranks_of_one_host_are_told_together() -> None:
    done = finish(2, ["info", "--json"])
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["hosts"]
    assert found["ranks"] == [0, 1] and found["mpi"]["gpu_aware"] in (True, False)


def facts(host: str, **more: Any) -> dict[str, Any]:
    return {"host": host, "ranks": [], **more}


def test_hosts_in_the_order_of_their_first_ranks() -> None:
    found = by_host([facts("b", n=0), facts("a", n=1), facts("b", n=2)])
    assert found == [{"host": "b", "ranks": [0, 2], "n": 0}, {"host": "a", "ranks": [1], "n": 1}]


def test_an_mpi_that_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "PROBE", "raise ImportError('libmpi.so: cannot open shared object file')")
    found = roster.describe_mpi()
    assert found["library"] is None and "libmpi.so: cannot open shared object file" in found["error"]
    monkeypatch.setattr(roster, "PROBE", "import time; time.sleep(99)")
    monkeypatch.setattr(roster, "PROBE_TIMEOUT_S", 0.3)
    assert "does not answer" in roster.describe_mpi()["error"]


def test_devices_of_libllama() -> None:
    names = [(device.kind, device.total_bytes > 0) for device in llama_devices()]
    assert ("CPU", True) in names
