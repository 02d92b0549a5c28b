"""Failed assertions of libggml are one line."""

from __future__ import annotations

import signal
import subprocess
import sys

CODE = """
import os
from pipeinfer.models.llama.ggml import ggml, load_library, report_aborts
load_library()
ggml()
parts = {{line.split()[-1] for line in open("/proc/self/maps") if "/libggml-base" in line}}
assert len(parts) == 1, f"not that of libllama, which calls another copy: {{parts}}"
if {reports}:
    report_aborts(lambda line: (os.write(1, line.encode()), os._exit(7)))
ggml().ggml_abort(b"/tmp/build/ggml/src/ggml.c", 42, b"GGML_ASSERT(%s) failed", b"n > 0")
"""


def run(reports: bool) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CODE.format(reports=reports)], capture_output=True, text=True)


def test_a_failed_assertion_is_reported_without_a_dump() -> None:
    done = run(True)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.startswith("llama.cpp gave up: ggml.c:42: GGML_ASSERT(n > 0) failed; is the model's file whole")
    assert "llama-cpp-python" in done.stdout and "\n" not in done.stdout


def test_where_nobody_takes_it_it_is_written() -> None:
    done = run(False)
    assert done.returncode == -signal.SIGABRT
    assert "GGML_ASSERT(n > 0) failed" in done.stderr and done.stderr.count("\n") == 1
