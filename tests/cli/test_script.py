"""The script that is installed as `pipeinfer`: it takes the Python that it was installed for, or none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.jobs import ROOT

OTHER = "#!/bin/sh\necho another Python\n"


def install(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return Path(shutil.copy(ROOT / "scripts" / "pipeinfer", folder / "pipeinfer"))


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def call(script: Path, path: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}
    return subprocess.run([script, "info"], capture_output=True, text=True, env=environ, timeout=60)


def test_a_python_that_is_missing_is_named_and_no_other_is_taken(tmp_path: Path) -> None:
    program(tmp_path / "path" / "python3", OTHER)
    script = install(tmp_path / "env")
    python = script.with_name("python3")
    for target, why in (("", "is not there"), ("python", "is a link to /opt/python3.99, which cannot be run")):
        if target:
            python.symlink_to(target)
            python.with_name(target).symlink_to("/opt/python3.99")
        done = call(script, tmp_path / "path")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"pipeinfer: host {os.uname().nodename}: {python} {why}; ")
        assert done.stderr.count("\n") == 1 and "make install" in done.stderr
    python.unlink()
    python.write_text("no program")
    assert f"{python} cannot be run; " in call(script, tmp_path / "path").stderr


def test_a_program_of_one_user_takes_the_python_of_its_packages(tmp_path: Path) -> None:
    program(tmp_path / "path" / "python3", OTHER)
    program(tmp_path / "path" / "python3.98", '#!/bin/sh\necho "$@"\n')
    script = install(tmp_path / "local" / "bin")
    (tmp_path / "local" / "lib" / "python3.98" / "site-packages" / "pipeinfer").mkdir(parents=True)
    assert call(script, tmp_path / "path").stdout == "-m pipeinfer info\n"
    (tmp_path / "path" / "python3.98").unlink()
    assert "python3 is not there" in call(script, tmp_path / "path").stderr


def test_the_python_beside_it_is_taken(tmp_path: Path) -> None:
    script = install(tmp_path / "env")
    program(script.with_name("python3"), '#!/bin/sh\necho "$0 $@"\n')
    assert call(script, tmp_path).stdout == f"{script.with_name('python3')} -m pipeinfer info\n"
