"""`pipeinfer run` as a user starts it: real ranks, real models, real faults."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.policies import POLICIES, USUAL
from tests.support.cases import in_long
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import COMMAND, environment, finish, launcher, plain_tokens_after, run_json, start
from tests.support.paces import pace_words, slow_target

PROMPT = "def read_lines(path):\n"
PAPERS = [name for name in POLICIES if name not in USUAL]
SOON_S = 40.0  # on a busy host, and less than ranks wait for one that says nothing
LONG = ["-p", PROMPT, "-n", "6000", "-c", "7000", "--ignore-eos"]  # minutes of work: faults strike in the middle


@pytest.fixture(scope="module")
def plain() -> list[int]:
    """What plain llama-cpp-python says after PROMPT, 96 tokens, greedy, and never ending."""
    return plain_tokens_after(TARGET, run_json(1, ["-p", PROMPT, "-n", "1"]), 96)


@pytest.mark.parametrize(
    ("n_ranks", "policy"),
    [
        *((n, "pipeinfer") for n in (1, 2, 3, 5)),
        *((n, "speculative") for n in (2, 4)),
        *((n, "iterative") for n in (1, 3)),
        *((n, "auto") for n in (1, 4)),
        *((3, policy) for policy in PAPERS),
    ],
)
def test_greedy_text_is_that_of_plain_llama(n_ranks: int, policy: str, plain: list[int]) -> None:
    result = run_json(n_ranks, ["-p", PROMPT, "-n", "96", "--temp", "0", "--ignore-eos", "--policy", policy])
    assert result["tokens"] == plain
    runs = result["speculation"]["runs"]
    assert [hop["messages"] for hop in result["wire"]["hops"]] == [runs] * (n_ranks - 1), "one message a run and hop"


def test_sampled_text_is_the_same_everywhere() -> None:
    common = ["-p", PROMPT, "-n", "96", "--temp", "0.8", "--seed", "7", "--ignore-eos", "--policy"]
    first, *others = [
        run_json(n_ranks, [*common, policy])["tokens"]
        for n_ranks, policy in ((1, "iterative"), (3, "pipeinfer"), (4, "pipedec"), (3, "flowspec"), (3, "pipespec"))
    ]
    assert all(tokens == first for tokens in others)
    assert first != run_json(1, [*common, "iterative", "--seed", "8"])["tokens"]


@pytest.mark.parametrize("type_name", ["Q4_K_M", in_long("Q6_K")])
def test_other_quantisations_and_a_long_prompt(tmp_path: Path, type_name: str) -> None:
    shape = Shape(n_layer=5, n_vocab=2048, peaky=12.0)
    target = write_model(tmp_path / "target.gguf", shape, type_name)
    draft = write_model(tmp_path / "draft.gguf", replace(shape, n_layer=2), "Q8_0")
    (tmp_path / "prompt.txt").write_text("the model of a rank is in the layer and a token. " * 18)
    common = ["-m", str(target), "-md", str(draft), "-f", str(tmp_path / "prompt.txt"), "-n", "64", "--temp", "0"]
    result = run_json(4, [*common, "--ignore-eos", "--slice-cache", str(tmp_path / "cache")])
    assert len(result["prompt_tokens"]) > 500
    assert result["tokens"] == plain_tokens_after(target, result, 64)
    again = run_json(3, [*common, "--ignore-eos", "--policy", "speculative", "--slice-cache", str(tmp_path / "cache")])
    assert again["tokens"] == result["tokens"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--no-cancel", "--no-async", "--no-partitions", "--no-continuous", "--microbatch", "4", "--no-post-ahead"],
        ["-pa", "0.3", "-pr", "0.2", "-pd", "0.05", "--inflight", "12"],
    ],
)
def test_no_switch_changes_the_text(flags: list[str], plain: list[int]) -> None:
    """Each one by itself, with pauses: tests/core/test_delays.py."""
    result = run_json(3, ["-p", PROMPT, "-n", "96", "--temp", "0", "--ignore-eos", *flags])
    assert result["tokens"] == plain


def test_penalised_and_sampled_text_is_the_same_everywhere() -> None:
    common = ["-p", PROMPT, "-n", "64", "--seed", "3", "--temp", "1", "--ignore-eos"]
    common += ["--repeat-penalty", "1.2", "--frequency-penalty", "0.1", "--presence-penalty", "0.1"]
    common += ["--logit-bias", "260+1.5", "-l", "13-0.5", "-l", "259-inf"]
    first = run_json(1, [*common, "--policy", "iterative"])["tokens"]
    assert run_json(3, common)["tokens"] == first
    assert run_json(4, [*common, "--policy", "speculative", "--no-couple-draft"])["tokens"] == first
    assert run_json(1, [*common, "--policy", "iterative", "--repeat-penalty", "1.0"])["tokens"] != first
    assert 259 not in first and 260 in first


@pytest.fixture
def with_guesses(tmp_path: Path) -> list[str]:
    """Three ranks whose stages take so long that guesses come in time."""
    return pace_words(tmp_path, slow_target(4.0))


def test_a_draft_that_is_never_right_is_said_and_given_a_rest(tmp_path: Path) -> None:
    shape = Shape(n_layer=4, n_vocab=2048, peaky=12.0)
    target, draft = write_model(tmp_path / "t.gguf", shape), write_model(tmp_path / "d.gguf", replace(shape, seed=9))
    pace = pace_words(tmp_path, slow_target(4.0, layers=2, draft_layers=4))
    words = ["-m", str(target), "-md", str(draft), "-p", "the rank", "-n", "128", "--ignore-eos", *pace]
    done = finish(3, ["run", *words])
    assert done.returncode == 0, done.stderr
    assert "hardly any guess of the draft is right" in done.stderr or "guesses cost time here" in done.stderr


def test_two_lines_come_before_the_text_and_two_after_it(with_guesses: list[str]) -> None:
    done = finish(3, ["run", "-p", PROMPT, "-n", "32", "--temp", "0", "-t", "1", "-ngl", "99", *with_guesses])
    (no_gpu, *lines), n_ranks = [line for line in done.stderr.splitlines() if line], r"rank 0 draft; 1 stage 0, layers"
    assert no_gpu.startswith("pipeinfer: -ngl is without effect"), done.stderr
    models, who, fast, busy = (line for line in lines if not line.startswith(("pipeinfer: ", "loading: ")))
    assert re.fullmatch(
        r"target \(.*\) with the draft draft \(.*\) on 3 ranks of 1 host, .*, context \d+, seed \d+", models
    )
    assert who.startswith(n_ranks) and "; 2 stage 1, layers" in who
    assert re.match(
        r"32 tokens, [\d.]+ tokens/s, first after [\d.]+ s; \d+ prompt tokens read; guessed ahead \d+ of \d+", fast
    )
    assert re.match(r"busy: rank 0 \d+%, rank 1 \d+%, rank 2 \d+%", busy)


def test_stdout_is_the_text_and_nothing_else(tmp_path: Path, with_guesses: list[str]) -> None:
    common = ["-p", PROMPT, "-n", "48", "--temp", "0"]
    done = finish(3, ["run", "-v", *common, "--results", str(tmp_path / "results.csv"), *with_guesses])
    assert done.returncode == 0
    assert done.stdout == run_json(1, common)["text"]
    for words in ("rank", "draft", "stage 1", "tokens/s", "TTFT", "ITL", "acceptance", "cancelled", "messages"):
        assert words in done.stderr, words
    (row,) = csv.DictReader((tmp_path / "results.csv").open())
    assert list(row)[:4] == ["prompt_per_second", "predicted_per_second", "itl_mean_s", "ttft_s"]
    assert row["policy"] == "auto" and float(row["predicted_per_second"]) > 0


def test_prompt_from_standard_input(tmp_path: Path) -> None:
    done = subprocess.run(
        [*launcher(2), *COMMAND, "run", "--json", "-f", "-", "-n", "8", "--temp", "0"],
        input=PROMPT,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    expected = run_json(1, ["-p", PROMPT.removesuffix("\n"), "-n", "8", "--temp", "0"])
    assert json.loads(done.stdout)["text"] == expected["text"]


def test_no_rank_holds_more_than_its_part(tmp_path: Path) -> None:
    shape = Shape(n_layer=6, n_embd=768, n_head=12, n_head_kv=4, n_ff=3072, n_vocab=64000)
    target = write_model(tmp_path / "target.gguf", shape, "Q8_0")
    result = run_json(4, ["-m", str(target), "-p", "the rank", "-n", "4", "--policy", "iterative", "-t", "1"])
    for rank in result["ranks"]:
        limit = rank["weight_bytes"] + rank["kv_bytes"] + 150e6
        assert rank["peak_rss_bytes"] < limit, f"{rank['role']}: {rank['peak_rss_bytes'] / 1e6:.0f} MB"
    tables = 64000 * 768 * 34 // 32
    holding = [rank["weight_bytes"] > tables for rank in result["ranks"]]
    assert holding == [False, False, False, True], "the first stage looks tokens up in the file"
    for rank in result["ranks"]:
        assert rank["weight_bytes"] + rank["kv_bytes"] < rank["memory_bytes"]


def test_trace_has_a_track_a_rank(tmp_path: Path, with_guesses: list[str]) -> None:
    run_json(3, ["-p", PROMPT, "-n", "16", "--trace", str(tmp_path / "trace.json"), *with_guesses])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events} == {0, 1, 2}
    assert {"draft", "evaluate", "settle"} <= {event["name"] for event in events}


# -- bad input


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "truncated.gguf").write_bytes(TARGET.read_bytes()[: TARGET.stat().st_size // 2])
    (folder / "text.gguf").write_text("not a model\n" * 100)
    write_model(folder / "vocab.gguf", Shape(n_vocab=4096))
    data = TARGET.read_bytes()
    (folder / "mamba.gguf").write_bytes(data.replace(b"llama", b"mamba"))
    (folder / "results.csv").write_text("a,b\n1,2\n")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    return folder


BAD = [
    (["-m", "{bad}/none.gguf", "-p", "x"], "none.gguf"),
    (["-m", "{bad}", "-p", "x"], "{bad}"),
    (["-m", "{bad}/truncated.gguf", "-p", "x"], "truncated"),
    (["-m", "{bad}/text.gguf", "-p", "x"], "GGUF"),
    (["-m", "{bad}/mamba.gguf", "-p", "x"], "mamba"),
    (["-md", "{bad}/vocab.gguf", "-p", "x"], "token"),
    (["-md", "{bad}/none.gguf", "-p", "x"], "none.gguf"),
    (["-p", "x", "--layer-split", "1,2,3,4,5,6,7"], "7 parts"),
    (["-p", "x", "--layer-split", "900"], "900"),
    (["-p", "x" * 400, "-c", "20"], "20"),
    (["-p", "x", "-n", "1000", "-c", "64"], "cut"),
    (["-p", "x", "-n", "100000"], "-n 100000"),
    (["-p", "x", "--policy", "magic"], "magic"),
    (["-p", "x", "--frobnicate"], "--frobnicate"),
    (["-p", "x", "-t", "0"], "--threads"),
    (["-p", "x", "-t", "1,2,3,4,5,6"], "6 values"),
    (["-p", "x", "--temp", "warm"], "warm"),
    (["-p", "x", "-f", "y"], "-f"),
    ([], "-p"),
    (["-f", "{bad}/none.txt"], "none.txt"),
    (["-f", "{bad}/latin.txt"], "UTF-8"),
    (["-f", "/dev/zero"], "64 MiB"),
    (["-m", str(TARGET), "--policy", "pipeinfer", "-p", "x"], "-md"),
    (["-p", "x", "-n", "2", "--results", "{bad}/results.csv"], "results.csv"),
    (["-p", "x", "-n", "2", "--trace", "{bad}/none/trace.json"], "trace.json"),
]
OF_EACH_STEP = {"none.gguf", "truncated", "7 parts", "20", "--frobnicate", "UTF-8", "results.csv", "trace.json"}
"""From words to what is written: on several ranks these are refused."""


@pytest.mark.parametrize(
    ("arguments", "words", "n_ranks"), [(*bad, 1) for bad in BAD] + [(*bad, 3) for bad in BAD if bad[1] in OF_EACH_STEP]
)
def test_bad_input_is_one_line_and_exit_code_2(bad_files: Path, arguments: list[str], words: str, n_ranks: int) -> None:
    done = finish(n_ranks, ["run", *(part.format(bad=bad_files) for part in arguments)], timeout_s=SOON_S)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    complaints = [line for line in done.stderr.splitlines() if line.startswith("pipeinfer: ")]
    assert len(complaints) == 1 and words.format(bad=bad_files) in complaints[0], done.stderr
    assert "Traceback" not in done.stderr


def test_more_stages_than_layers(tmp_path: Path) -> None:
    target = write_model(tmp_path / "two.gguf", Shape(n_layer=2))
    done = finish(3, ["run", "-m", str(target), "-p", "a", "-n", "1"])
    assert done.returncode == 2
    assert "3 stages for 2 layers; start at most 2 ranks" in done.stderr


# -- faults


def wait_for_text(job: subprocess.Popen[str]) -> str:
    assert job.stdout
    # unbuffered: what a buffer took, communicate() would not see
    return os.read(job.stdout.fileno(), 1).decode()


def pid_of_rank(job: subprocess.Popen[str], rank: int) -> int:
    """The process of one rank below mpirun, from the rank its launcher put into the environment."""
    names = [f"{name}={rank}".encode() for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if any(name in environ for name in names) and b"pipeinfer\0run" in command and _descends(folder.name, job.pid):
            return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")


def _descends(pid: str, ancestor: int) -> bool:
    while pid not in ("0", "1"):
        if int(pid) == ancestor:
            return True
        pid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return False


@pytest.mark.parametrize(
    ("moment", "rank"),
    [
        ("loading", 0),
        in_long("loading", 1),
        ("loading", 2),
        in_long("generating", 0),
        ("generating", 1),
        in_long("generating", 2),
    ],
)
def test_a_killed_rank_ends_the_job_and_is_named(moment: str, rank: int) -> None:
    job = start(3, ["run", *LONG])
    if moment == "generating":
        wait_for_text(job)
    else:
        assert job.stderr
        job.stderr.readline()  # the plan is out: the ranks begin to load
    os.kill(pid_of_rank(job, rank), signal.SIGKILL)
    _, errors = job.communicate(timeout=SOON_S)
    assert job.returncode != 0
    assert sum(f"pipeinfer: rank {rank} (" in line and "died" in line for line in errors.splitlines()) == 1, errors
    assert "layers" in errors if rank else "draft" in errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_job_ends_within_seconds_of_a_death_and_of_ctrl_c(number: signal.Signals) -> None:
    """The best of some, since other processes may have the cores for a while."""

    def seconds() -> float:
        job = start(3, ["run", *LONG])
        wait_for_text(job)
        struck = pid_of_rank(job, 1) if number == signal.SIGKILL else job.pid
        struck_s = time.monotonic()
        os.kill(struck, number)
        job.communicate(timeout=SOON_S)
        return time.monotonic() - struck_s

    assert any(seconds() < 3 for _ in range(5))


@pytest.fixture(scope="module")
def beginning() -> str:
    """Of the greedy text that LONG asks for."""
    return str(run_json(1, ["-p", PROMPT, "-n", "200", "--ignore-eos", "--temp", "0"])["text"])


@pytest.mark.parametrize(
    ("n_ranks", "number"),
    [(1, signal.SIGINT), in_long(1, signal.SIGTERM), in_long(3, signal.SIGINT), (3, signal.SIGTERM)],
)
def test_stopping_keeps_the_text(n_ranks: int, number: signal.Signals, beginning: str) -> None:
    job = start(n_ranks, ["run", *LONG, "--temp", "0"])
    text = "".join(wait_for_text(job) for _ in range(40))
    job.send_signal(number)
    rest, errors = job.communicate(timeout=SOON_S)
    text += rest
    assert job.returncode != 0
    assert "Traceback" not in errors
    assert "interrupted" in errors or "terminated" in errors
    assert "tokens/s" in errors, "the statistics of what was generated"
    text = text.split("[mpiexec@")[0]  # what MPICH's launcher says to a Ctrl-C comes on its standard output
    n = min(len(text), len(beginning))
    assert n > 0 and text[:n] == beginning[:n]


def test_a_reader_that_leaves_ends_the_job(tmp_path: Path) -> None:
    job = start(2, ["run", *LONG])
    wait_for_text(job)
    assert job.stdout and job.stderr
    job.stdout.close()
    errors = job.stderr.read()
    assert job.wait(timeout=SOON_S) != 0
    assert "Traceback" not in errors and "Error" not in errors


@pytest.mark.parametrize("temp", [in_long("0"), "0.9"])
def test_the_model_may_end_the_text_after_min_tokens(temp: str) -> None:
    with closing(Tokenizer(TARGET)) as tokenizer:
        wanted = [word for end in sorted(tokenizer.ends) for word in ("--logit-bias", f"{end}+100")]
    words = ["-m", str(TARGET), "-md", str(DRAFT), "-p", PROMPT, "-n", "40", "--temp", temp, "--seed", "5", *wanted]
    words += ["--min-tokens", "12"]
    texts = []
    for n_ranks, policy in ((1, "iterative"), (1, "speculative"), (2, "pipeinfer"), (3, "auto"), (3, "pipedec")):
        result = run_json(n_ranks, [*words, "--policy", policy])
        assert result["finish"] == "end"
        texts.append(result["tokens"])
    assert len(texts[0]) == 12 + 1 and all(text == texts[0] for text in texts)
