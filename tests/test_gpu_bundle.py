"""What `benchmarks/gpu.py` needs is carried to a machine without a network: which packages, which files, and how they
are laid over what is there."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

pytest.importorskip("packaging", reason="comes with pytest")


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_what_is_carried_is_what_pipeinfer_wants_but_for_what_is_there() -> None:
    from gpu_bundle import HERE, is_bound, needed

    found = {each.metadata["Name"]: each for each in needed(["pipeinfer"], HERE, {"torch", "numpy"})}
    assert {"mpi4py", "gguf", "click", "Jinja2", "rich"} <= set(found)
    assert not {"torch", "numpy", "pipeinfer", "pytest", "starlette"} & set(found)
    assert is_bound(found["mpi4py"]) and not is_bound(found["gguf"])
    fewer = needed(["pipeinfer"], HERE, {"torch", "numpy", "rich"})
    assert not {"Pygments", "rich"} & {each.metadata["Name"] for each in fewer}


def test_what_was_carried_runs_beside_what_is_there(tmp_path: Path) -> None:
    """MPI with its launcher, mpi4py and llama.cpp out of the folder; numpy is the one of the Python that begins."""
    from gpu_begin import lay_over
    from gpu_bundle import HERE, MPIS, find, lay

    mpi = next((each for name in MPIS if (each := find(name))), None)
    if mpi is None or sys.prefix == sys.base_prefix:
        pytest.skip("MPI is no package of this environment")
    prefix, begun = tmp_path / "prefix", tmp_path / "begun"
    site = prefix / "lib" / f"python{HERE}" / "site-packages"
    for known in (mpi, find("mpi4py"), find("llama_cpp_python"), find("diskcache")):
        assert known
        lay(known, prefix, site)
    assert not (prefix / "bin/pipeinfer").exists() and not list(site.glob("include"))
    with tarfile.open(tmp_path / "bundle.tar.gz", "w:gz", compresslevel=1) as archive:
        for part in prefix.iterdir():
            archive.add(part, part.name)
    python = lay_over(begun, tmp_path / "bundle.tar.gz")
    code = """if True:
        import sys, numpy, llama_cpp
        from mpi4py import MPI
        llama_cpp.llama_backend_init()
        loaded = open("/proc/self/maps").read()
        sizes = MPI.COMM_WORLD.allgather(MPI.COMM_WORLD.size)
        if MPI.COMM_WORLD.rank == 0:
            print(sizes, numpy.__file__, llama_cpp.__file__, sys.argv[1] + "/lib/libmpi" in loaded)
    """
    launched = [str(begun / "bin/mpirun"), "-np", "2", python, "-c", code, str(begun)]
    if mpi.metadata["Name"] == "openmpi":
        launched[1:1] = ["--oversubscribe", "--allow-run-as-root"]
    done = subprocess.run(launched, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    numpy_file = subprocess.run([sys.executable, "-c", "import numpy; print(numpy.__file__)"], capture_output=True)
    carried = begun / "lib" / f"python{HERE}" / "site-packages/llama_cpp/__init__.py"
    assert done.stdout.strip() == f"[2, 2] {numpy_file.stdout.decode().strip()} {carried} True"


def test_a_wheel_is_unpacked_to_where_it_belongs(tmp_path: Path) -> None:
    from gpu_bundle import unpack

    wheel, prefix = tmp_path / "a-1.whl", tmp_path / "prefix"
    with zipfile.ZipFile(wheel, "w") as archive:
        data = [f"a-1.data/{each}" for each in ("", "data/", "data/bin/tool", "purelib/two.py", "scripts/a")]
        for name in ("a/one.py", "a/include/one.h", *data):
            archive.writestr(name, name)
    unpack(wheel, prefix, prefix / "site")
    found = {str(each.relative_to(prefix)) for each in prefix.rglob("*") if each.is_file()}
    assert found == {"site/a/one.py", "site/two.py", "bin/tool"}


def test_a_bundle_for_another_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "begin.py").write_text((ROOT / "benchmarks/gpu_begin.py").read_text())
    (tmp_path / "bundle.json").write_text(json.dumps({"python": "3.1", "there": []}))
    done = subprocess.run([sys.executable, str(tmp_path / "begin.py")], capture_output=True, text=True)
    assert done.returncode == 2 and "--python" in done.stderr and "Traceback" not in done.stderr
