"""`pipeinfer plan`: who gets what on hosts that are described or there, what is refused, that its advice is right."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from operator import ge
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeinfer.cli.plan import plan_command
from pipeinfer.cluster.hosts.host import FreeMemory, Host, measure_speed
from pipeinfer.cluster.hosts.resources import Memory, left_on_gpus, spare_memory, spare_on_gpus
from pipeinfer.errors import UserError
from pipeinfer.job.placement.checks import open_models
from pipeinfer.job.planning.fit import largest
from pipeinfer.job.planning.planner import ETHERNET, Planner, model_of, with_described_speeds
from pipeinfer.job.planning.suggestions import suggestions
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.policies import PipeInfer, make_policy
from pipeinfer.text import size_text
from pipeinfer.virtual.nodes import read_hosts
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import but_waiting, environment, finish
from tests.support.planned import deploy, options_of

FAST = "gb_per_s=100 gflop_per_s=1000"
SLOW = "gb_per_s=20 gflop_per_s=200"


def write(folder: Path, *lines: str) -> Path:
    path = folder / "hosts"
    path.write_text("\n".join(lines) + "\n")
    return path


def call(*words: object) -> tuple[str, str]:
    """What it prints, and what it refuses."""
    result = CliRunner().invoke(plan_command, [str(word) for word in words], standalone_mode=False)
    if result.exception and not isinstance(result.exception, UserError):
        raise result.exception
    return result.stdout, str(result.exception or "")


def plan(*words: object) -> tuple[dict[str, Any], str]:
    out, error = call(*words, "--json")
    found: dict[str, Any] = json.loads(out)
    return found, error


def notes(*words: object) -> list[str]:
    """Without those of processors whose kernels repack, and of longer prompts."""
    found: list[str] = plan(*words, "--no-repack")[0]["notes"]
    return [note for note in found if not note.startswith("memory is for a prompt")]


def speed_of(found: dict[str, Any]) -> float:
    return next(float(each["tokens_per_s"]) for each in found["predictions"] if each["planned"])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose layers take longer than a message does."""
    shape = Shape(n_layer=8, n_embd=512, n_head=8, n_head_kv=2, n_ff=2048)
    return write_model(tmp_path_factory.mktemp("models") / "wide.gguf", shape)


# -- hosts files


def test_both_forms_of_hosts_files_and_what_is_added(tmp_path: Path) -> None:
    nodes = read_hosts(
        write(
            tmp_path,
            "\ufeffa:2  # MPICH",
            "# a comment",
            "b slots=1 max-slots=4",
            "",
            f"c.example cores=36 memory=1.5Gi {FAST} gpu=H100",
            "a",
        )
    )
    assert [node.host.name for node in nodes] == ["a", "a", "b", "c.example", "a"]
    last = nodes[3]
    assert last.host.n_cores == 36 and last.host.memory.host == 3 << 29 and last.gpu == "H100"
    assert last.machine and last.machine.bytes_per_s == 1e11 and last.source == "hosts file"
    assert nodes[0].machine is None and nodes[0].host.n_cores == 0, "nobody says"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a:0", "slots=0; give a whole number"),
        ("a:2 slots=2", "both give slots"),
        ("a cores=x", "cores=x"),
        ("a memory=12Q", "memory=12Q"),
        ("a memory=0", "memory=0"),
        ("a memory=3", "3 is 3 B"),
        ("a gb_per_s=3", "gb_per_s alone"),
        ("a gb_per_s=nan gflop_per_s=1", "gb_per_s=nan"),
        ("a gb_per_s=1 gflop_per_s=1 gpu_gb_per_s=9", "gpu_gb_per_s and gpu_gflop_per_s, or neither"),
        ("a gpu_gb_per_s=9 gpu_gflop_per_s=9", "give gb_per_s and gflop_per_s of the host too"),
        ("a speed=3", "the keys are slots, cores"),
        ("a cores=1 cores=2", "twice"),
        ("-a", "'-a' is no host"),
        ("me@a slots=2", "a user is set in ~/.ssh/config"),
        ("# nothing", "names no host"),
        ("a cores=2\na cores=3", "different things of a"),
        ("a memory=9e99", "memory=9e99"),
    ],
)
def test_a_bad_hosts_file_is_refused_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_hosts(write(tmp_path, line))
    assert words in str(caught.value) and "--hosts" in str(caught.value) and "\n" not in str(caught.value)


def test_a_hosts_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path, "directory"), (tmp_path / "binary", "UTF-8")):
        with pytest.raises(UserError, match=words):
            read_hosts(path)


# -- who gets what


def test_the_plan_is_the_one_that_run_makes(tmp_path: Path) -> None:
    hosts = write(tmp_path, f"a cores=8 memory=1G {FAST}", f"b:2 cores=8 memory=90M {FAST}", "c cores=2 memory=80G")
    found, error = plan("--hosts", hosts, "-c", 5000)
    options = options_of(model=TARGET, drafts=(DRAFT,), policy=PipeInfer(), ctx_size=5000)
    nodes = read_hosts(hosts)
    with pytest.raises(UserError) as refused:
        deploy(options, [node.host for node in nodes], open_models(options)[0], 5000, n_prompt=128)
    assert not found["fits"] and error.partition(";")[0] == str(refused.value).partition(";")[0], "the same numbers"
    rows = found["ranks"]
    assert [row["fits"] for row in rows] == [True, False, False, True]
    assert rows[0]["layers"] is None and rows[1]["role"] == "stage 0"
    needed = rows[1]["needed_bytes"] + rows[2]["needed_bytes"]
    assert rows[1]["spare_bytes"] == rows[2]["spare_bytes"] == 90_000_000 - needed, "they share a host"
    assert rows[1]["read_bytes_per_s"] == 0.5e11 and rows[0]["read_bytes_per_s"] == 1e11
    assert rows[3]["speed_source"] is None and [row["threads"] for row in rows] == [8, 4, 4, 2]
    lines = call("--hosts", hosts, "-c", 5000)[0]
    assert "hosts file" in lines and "stage 2" in lines and "90.0 MB" in lines


def test_layers_on_gpus_are_said_rank_by_rank(tmp_path: Path) -> None:
    hosts = write(tmp_path, "a", "b", "c gpu=H100")
    found = plan("--hosts", hosts, "-ngl", "all,0,2")[0]
    plain = plan("--hosts", hosts)[0]
    kv, whole = ([row["kv_bytes"] for row in each["ranks"]] for each in (found, plain))
    assert kv[0] == 0 and 0 < kv[1] < whole[1] and 0 < kv[2] < whole[2], "no cells there, and no prompts in blocks"
    assert found["ranks"][2]["gpu"] == "H100" and "GPU" in found["notes"][0] and not notes("--hosts", hosts)
    drafting = plan("--hosts", hosts, "-ngl", "all,0,0")[0]
    assert [row["kv_bytes"] for row in drafting["ranks"]][1:] == whole[1:], "the target is as exact as without a GPU"
    assert (
        "2 values, and the number of ranks is 3; give one, or one for each rank"
        in call("--hosts", hosts, "-ngl", "all,0")[1]
    )


def test_spare_room_is_the_hosts_or_the_ranks_own() -> None:
    needed = Memory(kv=100).needed
    rooms = [FreeMemory(3 * needed), FreeMemory(3 * needed, process=needed - 1), FreeMemory()]
    hosts = [Host(name, frozenset(), 1, room) for name, room in zip("aab", rooms, strict=True)]
    assert spare_memory(hosts, [Memory(kv=100)] * 3) == [needed, -1, None]


def test_what_does_not_fit_is_refused_with_ways_out_that_fit(tmp_path: Path, wide: Path) -> None:
    hosts = write(tmp_path, f"a memory=130M {FAST}", f"b memory=130M {FAST}")
    found, error = plan("--hosts", hosts, "-m", wide, "-c", 20000)
    assert not found["fits"] and "a has 130.0 MB" in error and found["predictions"] == []
    context, more = (way["what"] for way in found["ways"])
    assert (
        context.startswith("-c ") and more.endswith("more hosts like b") and f"it would fit with {context} or" in error
    )
    n_ctx, n_more = int(context.split()[1]), int(more.split()[0])
    assert plan("--hosts", hosts, "-m", wide, "-c", n_ctx)[0]["fits"]
    assert not plan("--hosts", hosts, "-m", wide, "-c", n_ctx + 256)[0]["fits"], "the largest"
    for n, fits in ((n_more, True), (n_more - 1, False)):
        further = [f"b{number} memory=130M {FAST}" for number in range(n)]
        wider = write(tmp_path, f"a memory=130M {FAST}", f"b memory=130M {FAST}", *further)
        assert plan("--hosts", wider, "-m", wide, "-c", 20000)[0]["fits"] == fits


def test_ways_out_of_a_deep_model_on_many_hosts_are_found_in_seconds(tmp_path: Path) -> None:
    deep = write_model(tmp_path / "deep.gguf", Shape(n_layer=60, n_embd=64, n_head=4, n_head_kv=2, n_ff=128))
    hosts = write(tmp_path, *(f"h{number} memory={90 + number % 3}M {FAST}" for number in range(24)))
    start_s = time.process_time()
    found = plan("--hosts", hosts, "-m", deep, "-c", 100_000)[0]
    assert not found["fits"] and found["ways"][0]["fits"], "some context fits"
    assert time.process_time() - start_s < 15, "each way is planned again: what a slice weighs is asked once"


def test_a_given_split_that_does_not_fit_is_to_be_left_out(tmp_path: Path, wide: Path) -> None:
    hosts = write(tmp_path, "a memory=4G", "b memory=110M")
    found, error = plan("--hosts", hosts, "-m", wide, "--layer-split", "2,6")
    assert found["ways"][0]["what"] == "leave --layer-split out" and "leave --layer-split out" in error
    assert plan("--hosts", hosts, "-m", wide)[0]["fits"]


def test_hosts_that_are_described_are_split_by_their_speed(tmp_path: Path, wide: Path) -> None:
    found = plan("--hosts", write(tmp_path, f"a {FAST}", f"b {SLOW}"), "-m", wide)[0]
    fast, slow = found["layer_split"]
    assert fast > 2 * slow and [row["layer_source"] for row in found["ranks"]] == ["hosts file"] * 2
    assert found["ranks"][1]["layer_s"] > 2 * found["ranks"][0]["layer_s"]
    even = plan("--hosts", tmp_path / "hosts", "-m", wide, "--layer-split", "4,4")[0]
    assert even["layer_split"] == [4, 4] and speed_of(found) > 1.03 * speed_of(even)
    assert even["ways"][0]["what"] == "leave --layer-split out"
    alike = plan("--hosts", write(tmp_path, f"a {FAST}", f"b {FAST}"), "-m", wide)[0]
    assert alike["layer_split"] == plan("--hosts", write(tmp_path, "a", "b"), "-m", wide)[0]["layer_split"] == [4, 4]


def test_that_the_draft_may_be_elsewhere_is_advised(tmp_path: Path) -> None:
    deep = write_model(tmp_path / "deep.gguf", Shape(n_layer=24, n_embd=512, n_head=8, n_head_kv=2, n_ff=2048))
    draft = write_model(tmp_path / "draft.gguf", Shape(n_layer=1, n_embd=64, n_ff=128))
    options = options_of(model=deep, drafts=(draft,), policy=make_policy("auto", {}), draft_rank=0)
    nodes = read_hosts(write(tmp_path, f"a {FAST}", f"b {FAST}", f"c {SLOW}"))
    given = Planner(options, read_model_info(deep), [read_model_info(draft)], nodes, ETHERNET, 128, is_described=True)
    free = given.changed(draft_rank=None)
    assert free.plan.assignment.drafts[0][0].rank == 2 and free.speed
    found = suggestions(given, [given.predict(options.speculation.policy)])
    way = next(way for way in found if way.what == "leave --draft-rank out")
    assert way.tokens_per_s == pytest.approx(free.speed) and not way.short_bytes


def test_a_way_that_helps_no_more_than_a_simpler_one_is_not_told(tmp_path: Path, wide: Path) -> None:
    nodes = read_hosts(write(tmp_path, f"a {FAST}", f"b {SLOW}"))
    options = options_of(model=wide, layer_split="4,4")
    planner = Planner(options, read_model_info(wide), (), nodes, ETHERNET, 128, is_described=True)
    now = planner.predict(options.speculation.policy)
    split, *others = (way.tokens_per_s or 0 for way in reversed(suggestions(planner, [now])))
    assert split > 1.03 * now.tokens_per_s and all(more > 1.03 * split for more in others)

    def with_policy(speed: float) -> list[str]:
        return [way.what for way in suggestions(planner, [now, replace(now, policy="other", tokens_per_s=speed)])]

    assert with_policy(1.02 * now.tokens_per_s)[-1] == "leave --layer-split out"
    assert with_policy((now.tokens_per_s + split) / 2)[-2:] == ["leave --layer-split out", "--policy other"], (
        "the best first"
    )
    assert with_policy(100 * now.tokens_per_s) == ["--policy other"]


def test_that_run_would_time_them_is_said_of_hosts_of_which_nobody_knows_how_fast(tmp_path: Path, wide: Path) -> None:
    (note,) = notes("--hosts", write(tmp_path, "a cores=4", "b cores=8"), "-m", wide)
    assert "layers go by size" in note
    for lines in (["a cores=4", "b cores=4"], [f"a cores=4 {FAST}", f"b cores=8 {SLOW}"]):
        assert not notes("--hosts", write(tmp_path, *lines), "-m", wide)


def test_what_longer_prompts_take_is_said_unless_their_length_is_given(wide: Path) -> None:
    words = ["-m", wide, "-c", "8000", "--no-fit"]
    (note,) = (note for note in plan(*words)[0]["notes"] if note.startswith("memory is for a prompt"))
    needed = sum(row["memory_bytes"] for row in plan(*words, "-p", "7999", "-n", "1")[0]["ranks"])
    assert f"all ranks take {size_text(needed)} in place of" in note
    assert not any(each.startswith("memory is") for each in plan(*words, "-p", "4000")[0]["notes"])


def test_that_ranks_which_share_cores_are_not_predicted_is_said(tmp_path: Path) -> None:
    hosts = write(tmp_path, "a cores=2", "a cores=2")
    assert not notes("--hosts", hosts, "-t", "1")
    (note,) = notes("--hosts", hosts, "-t", "2")
    assert note.startswith("ranks share cores")


def test_predictions_of_every_policy_with_a_draft_and_of_one_without(tmp_path: Path, wide: Path) -> None:
    hosts = write(tmp_path, *(f"h{number} {FAST}" for number in range(4)))
    found = plan("--hosts", hosts, "--acceptance", 0.9)[0]
    by_policy = {each["policy"]: each["tokens_per_s"] for each in found["predictions"]}
    assert {"iterative", "speculative", "pipeinfer"} <= set(by_policy) and by_policy["pipeinfer"] > by_policy[
        "iterative"
    ]
    worse = plan("--hosts", hosts, "--acceptance", 0.2)[0]
    assert speed_of(worse) < speed_of(found)
    alone = plan("--hosts", hosts, "-m", wide)[0]
    assert [each["policy"] for each in alone["predictions"]] == ["iterative", "auto"]
    assert alone["predictions"][1]["over_iterative"] == pytest.approx(1, abs=0.01) and alone["policy"] == "auto"
    assert "looks up is not counted" in call("--hosts", hosts, "-m", wide)[0]
    lines = call("--hosts", hosts)[0]
    assert "auto (planned)" in lines and "10 Gbit/s" in lines and "acceptance 0.70" in lines


def test_of_too_many_hosts_the_best_are_taken_and_the_others_are_spares(tmp_path: Path, wide: Path) -> None:
    hosts = write(
        tmp_path,
        f"slow {SLOW}",
        "unknown",
        *(f"h{number} {FAST} memory={100 + number}G" for number in range(9)),
        "twice:2 gb_per_s=300 gflop_per_s=2000",
    )
    found, error = plan("--hosts", hosts, "-m", wide)
    assert not error and [row["host"] for row in found["ranks"]] == [*(f"h{n}" for n in range(3, 9)), "twice", "twice"]
    (line,) = found["warnings"]
    assert line == "8 ranks of 13 are used, this model has no layers for more; spares: slow, unknown, h0, h1, h2"
    assert f"note: {line}" in call("--hosts", hosts, "-m", wide)[0]
    assert "start at most 8 ranks" in call("--hosts", hosts, "-m", wide, "-np", 9)[1], "what is asked for is no choice"
    drafts = plan("--hosts", hosts)[0]
    assert len(drafts["ranks"]) == 10 and drafts["ranks"][0]["role"] == "draft"


def test_two_hundred_hosts_are_planned_in_seconds(tmp_path: Path) -> None:
    deep = write_model(tmp_path / "deep.gguf", Shape(n_layer=80, n_embd=64, n_head=4, n_head_kv=2, n_ff=128))
    start_s = time.process_time()
    hosts = write(tmp_path, *(f"h{number} memory=64G {FAST}" for number in range(200)))
    found = plan("--hosts", hosts, "-m", deep)[0]
    assert len(found["ranks"]) == 80 and found["warnings"][0].endswith(", h198, h199")
    assert time.process_time() - start_s < 30


def test_a_host_without_room_for_a_layer_is_left_out(tmp_path: Path, wide: Path) -> None:
    hosts = write(tmp_path, f"a memory=4G {FAST}", f"tiny memory=20M {FAST}", f"b memory=4G {FAST}")
    found, error = plan("--hosts", hosts, "-m", wide)
    assert not error and [row["host"] for row in found["ranks"]] == ["a", "b"]
    assert found["warnings"] == ["left out, without room for a layer: tiny (20.0 MB)"]
    all_tiny = write(tmp_path, f"a memory=20M {FAST}", f"b memory=20M {FAST}")
    assert "a has 20.0 MB" in call("--hosts", all_tiny, "-m", wide)[1], "then what is missing is told"


def test_no_speed_is_predicted_of_hosts_that_nobody_timed(tmp_path: Path) -> None:
    out, error = call("--hosts", write(tmp_path, f"a {FAST}", "b"))
    assert not error and "the speed of b is not known" in out and "tokens/s" not in out


def test_a_profiles_machines_are_planned_for_as_well() -> None:
    found = plan("--profile", "pipeinfer-c", "-np", 3)[0]
    assert [row["speed_source"] for row in found["ranks"]] == ["profile pipeinfer-c"] * 3
    assert found["ranks"][0]["room_bytes"] == 370e9 and found["link"]["bytes_per_s"] == pytest.approx(97e9 / 8)
    assert plan("--profile", "pipeinfer-c", "-np", 3, "--gbit", 1)[0]["link"]["bytes_per_s"] == 1e9 / 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile", "pipeinfer-c", "-np", "99"], "has 32 slots"),
        (["--hosts", "x", "--profile", "y"], "give one of them"),
        (["-np", "3"], "mpirun -np"),
        (["--profile", "pipeinfer-c", "--acceptance", "0.5", "--acceptance", "0.5"], "2 times for 1 draft"),
        (["--profile", "pipeinfer-c"], "start at most 10 ranks"),
        (["--profile", "pipeinfer-c", "-np", "3", "-c", "100", "-p", "128"], "raise -c"),
    ],
)
def test_bad_input(words: list[str], said: str) -> None:
    assert said in call(*words)[1]


def test_experts_count_as_far_as_a_row_uses_them(tmp_path: Path) -> None:
    path = write_model(tmp_path / "experts.gguf", Shape(n_layer=2, n_expert=4))
    info = read_model_info(path)
    experts = sum(tensor.n_elements for tensor in info.tensors if "_exps" in tensor.name)
    rest = sum(tensor.n_elements for tensor in info.tensors if "blk." in tensor.name) - experts
    model = model_of(info)
    assert experts and rest / 2 < model.layer_params < (rest + experts) / 2
    assert model.layer_bytes < sum(info.layer_bytes) / 2
    nodes = read_hosts(write(tmp_path, f"a {FAST}"))
    (host,), machine = with_described_speeds(nodes, info), nodes[0].machine
    assert host.speed and machine
    assert host.speed.layer_s(info.layer_bytes) == pytest.approx(machine.slice_of(model, 1, True).layer.at(1))


def test_the_largest_number_that_holds() -> None:
    for most in (1, 2, 7, 8):
        for answer in range(most + 1):
            assert largest(partial(ge, answer), 1, most) == answer
    assert largest(partial(ge, 9), 5, 4) == 0


# -- hosts that are there


def test_a_host_tells_its_speed() -> None:
    speed = measure_speed(1)
    assert 1e6 < speed.bytes_per_s < 1e13 and 1e6 < speed.flop_per_s < 1e14


def test_planning_needs_no_mpi(tmp_path: Path) -> None:
    hosts = write(tmp_path, f"a {FAST}", f"b {FAST}")
    code = (
        "import sys; from click.testing import CliRunner; from pipeinfer.cli.plan import plan_command\n"
        f"for words in (['--hosts', {str(hosts)!r}], []):\n"
        "    result = CliRunner().invoke(plan_command, words, standalone_mode=False)\n"
        "    assert result.return_value == 0, result.exception\n"
        "sys.exit('mpi4py' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ranks_under_mpirun_tell_what_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"XDG_CACHE_HOME": str(tmp_path)}
    monkeypatch.setattr("tests.support.jobs.environment", lambda: environment() | own)
    speeds = []
    for _ in range(2):
        done = finish(2, ["plan", "--json", "-t", "1"])
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert [row["speed_source"] for row in found["ranks"]] == ["measured"] * 2
        assert all(row["room_bytes"] and row["n_cores"] and row["fits"] for row in found["ranks"])
        assert [row["layer_s"] for row in found["ranks"]] == [None] * 2, "alike: `run` would not time them"
        assert found["predictions"] and found["link"]["bytes_per_s"] > 0
        speeds.append([row["read_bytes_per_s"] for row in found["ranks"]])
    assert speeds[0] == pytest.approx(speeds[1], rel=0.5), "they were kept"
    without = finish(2, ["run", "-p", "x", "-n", "2", "-ngl", "0,3"])
    assert without.returncode == 0 and "-ngl is without effect" in without.stderr, "as this build has none"
    refused = finish(2, ["plan", "-c", "2000000000"])
    assert refused.returncode == 2 and "it would fit with -c " in refused.stderr
    assert len(but_waiting(refused.stderr)) == 1 and "stage 0" in refused.stdout


def test_where_no_rank_has_a_gpu_layers_on_them_are_ignored_as_by_run() -> None:
    found, _ = plan("-ngl", "all", "-md", "none")
    assert any("-ngl is without effect" in line for line in found["warnings"])
    assert found["ranks"][0]["gpu_bytes"] == 0 < found["ranks"][0]["kv_bytes"] and "gpu" not in found["numerics_name"]


def test_a_short_context_has_room_for_the_prompt_that_nobody_gave() -> None:
    words = ("--profile", "pipeinfer-c", "-np", "3", "-c", "64")
    assert plan(*words)[0]["n_ctx"] == 64
    assert "the prompt has 100 tokens, -c 64 holds 64" in call(*words, "-p", "100")[1]


def test_what_gpus_must_hold_is_counted_and_refused_where_it_does_not_fit(tmp_path: Path, wide: Path) -> None:
    words = ("-m", wide, "-c", 2048, "--numerics", "fast", "-md", "none", "-ngl", "0,99,1", "--layer-split", "2,3,3")

    def planned(free: str) -> tuple[dict[str, Any], str]:
        hosts = write(tmp_path, f"a memory=60G {FAST}", f"b slots=2 memory=60G {FAST} gpu=H100 gpu_memory={free}")
        return plan("--hosts", hosts, *words)

    found, _ = planned("10G")
    cpu, whole, part = found["ranks"]
    assert cpu["gpu_bytes"] == 0 and cpu["gpu_spare_bytes"] is None
    assert whole["gpu_bytes"] > part["gpu_bytes"] > 0 and whole["kv_bytes"] == 0 < part["kv_bytes"]
    assert whole["weight_bytes"] < 0.01 * part["weight_bytes"], "what is read for a GPU does not stay in memory"
    needed = whole["gpu_bytes"] + part["gpu_bytes"]
    assert whole["gpu_spare_bytes"] == part["gpu_spare_bytes"] == 10**10 - needed
    assert planned(f"{needed}")[0]["fits"]
    found, error = planned(f"{needed - 1000}")
    assert not found["fits"] and [row["fits"] for row in found["ranks"]] == [True, False, False]
    assert error.startswith("rank 1 on b puts ") and "on H100 and ranks beside it" in error and "-ngl" in error


def test_experts_go_to_cpus_where_that_is_faster(tmp_path: Path) -> None:
    """By the speeds of processors and GPUs; attention stays on GPUs, and no more experts leave them than have to."""
    shape = Shape(n_layer=6, n_embd=512, n_head=8, n_head_kv=2, n_ff=1024, n_expert=16)
    model = write_model(tmp_path / "experts.gguf", shape)
    words = ("-m", model, "-c", 512, "--numerics", "fast", "-md", "none", "--policy", "iterative")

    def planned(gpu_speed: int, gpu_bytes: float, *more: object) -> dict[str, Any]:
        gpu = f"gpu_memory={int(gpu_bytes)} gpu_gb_per_s={gpu_speed} gpu_gflop_per_s={100 * gpu_speed}"
        return plan("--hosts", write(tmp_path, f"a memory=60G {SLOW} {gpu}"), *words, *more)[0]

    whole, alone = planned(400, 1e12, "-ngl", "all"), planned(400, 1e12, "-ngl", "0")
    assert speed_of(whole) > 2 * speed_of(alone) and not whole["ways"]
    room = 0.6 * whole["ranks"][0]["gpu_bytes"]
    off = planned(400, room, "-ngl", "0")["ways"][0]
    n_moved = int(off["what"].removeprefix("-ngl all -ncmoe "))
    assert 0 < n_moved < 6 and off["fits"]
    ways = [planned(400, room, "-ngl", "all", "-ncmoe", n) for n in range(7)]
    assert [way["fits"] for way in ways] == [n >= n_moved for n in range(7)]
    speeds = [speed_of(way) for way in ways[n_moved:]]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] > speed_of(alone)
    assert off["tokens_per_s"] == speeds[0]
    (fewer,) = planned(400, room, "-ngl", "all", "-cmoe")["ways"]
    assert fewer["what"] == f"-ncmoe {n_moved} in place of -cmoe" and fewer["tokens_per_s"] == speeds[0]
    assert not planned(10, room, "-ngl", "0")["ways"], "GPUs that are slower than processors get nothing"


def test_layers_go_where_gpus_have_room_for_them(tmp_path: Path, wide: Path) -> None:
    words = ("-m", wide, "-c", 2048, "--numerics", "fast", "-md", "none", "-ngl", "all")

    def planned(small: float, large: float) -> tuple[list[dict[str, Any]], str]:
        hosts = write(tmp_path, f"a gpu=A gpu_memory={int(small)}", f"b slots=2 gpu=B gpu_memory={int(large)}")
        found, error = plan("--hosts", hosts, *words)
        return found["ranks"], error

    def n_layers(row: dict[str, Any]) -> int:
        first, last = map(int, row["layers"].split("-"))
        return last + 1 - first

    alike = planned(1e12, 1e12)[0]
    sizes = [row["gpu_bytes"] for row in alike]
    moved, error = planned(0.9 * sizes[0], 1e12)
    assert not error and n_layers(moved[0]) < n_layers(alike[0]) and all(row["fits"] for row in moved)
    assert planned(0.9 * sizes[0], sizes[1] + sizes[2])[1].startswith("rank "), "there is no such split"


def test_who_shares_devices_shares_what_others_leave_there() -> None:
    def host(name: str, *gpus: tuple[str, int]) -> Host:
        return Host(name, frozenset(), 1, gpus=gpus)

    hosts = [host("a", ("CUDA0", 100)), host("a", ("CUDA0", 90)), host("a", ("CUDA1", 50)), host("b")]
    both, other = "GPUs of rank 0", "GPUs of rank 2"
    assert left_on_gpus(hosts, [0, 1, 2, 3], [9] * 4) == ((both, both, other, ""), {both: 90, other: 50})
    assert left_on_gpus(hosts, [1, 2], [30, 0, 10, 0]) == ((both, other), {both: 60, other: 50})


def test_devices_are_shared_by_the_ranks_that_see_them() -> None:
    def host(name: str, given: str, *gpus: tuple[str, int]) -> Host:
        return Host(name, frozenset(), 1, gpus_given=given, gpus=gpus)

    one, two = ("CUDA0", 100), ("CUDA1", 50)
    free = [(one,), (("CUDA0", 90),), (two,)]
    hosts = [*(host("a", "", *gpus) for gpus in free), host("b", "", one), host("a", "x", one)]
    assert spare_on_gpus(hosts, [30, 40, 60, 0, 100]) == [20, 20, -10, None, 0]
    assert spare_on_gpus([host("a", "")], [30]) == [None], "nobody knows"
    assert spare_on_gpus([host("a", "", one, two)], [120]) == [30]
