"""Memory: what ranks will hold against what they held, what hosts have left, and what is refused."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeinfer.cluster.hosts.host import UNLIMITED, FreeMemory, Host, free_memory
from pipeinfer.cluster.hosts.resources import Memory, check_fits, paging_lines
from pipeinfer.errors import UserError
from pipeinfer.job.placement.checks import open_models
from pipeinfer.job.placement.devices import DevicePlan
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.placement.memory import Layers
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import slice_bytes
from pipeinfer.policies import PipeInfer
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import finish, run_json
from tests.support.planned import deploy, options_of

GB = 10**9


def hosts_of(names: Sequence[str], rooms: Sequence[FreeMemory]) -> list[Host]:
    return [Host(name, frozenset(), 1, room) for name, room in zip(names, rooms, strict=True)]


def test_a_hosts_ranks_are_added_up() -> None:
    names, memory = ["a", "a", "b"], [Memory(weights=2 * GB, kv=GB), Memory(kv=3 * GB), Memory(weights=9 * GB)]
    check_fits(hosts_of(names, [FreeMemory(7 * GB)] * 2 + [FreeMemory(10 * GB)]), memory, "")
    with pytest.raises(
        UserError, match=r"a has 6\.0 GB .* needs 6\.1 GB \(rank 0: 3\.1 GB, weights 2\.0 GB, KV 1\.0 GB"
    ):
        rooms = [FreeMemory(7 * GB), FreeMemory(6 * GB), FreeMemory(10 * GB)]
        check_fits(hosts_of(names, rooms), memory, "do this")
    with pytest.raises(
        UserError, match=r"rank 2 on b needs 9\.1 GB.* \(ulimit -v\) leaves 8\.0 GB; raise it, or do this"
    ):
        check_fits(hosts_of(names, [FreeMemory()] * 2 + [FreeMemory(process=8 * GB)]), memory, "do this")


def test_mapped_weights_need_no_room_and_loading_needs_it_once() -> None:
    check_fits(hosts_of("a", [FreeMemory(GB)]), [Memory(mapped=50 * GB)], "")
    both = Memory(weights=GB, loading=GB) + Memory(kv=2 * GB)
    assert both.needed == 3 * GB + both.runtime, "the contexts come after the loading"
    assert (Memory(weights=GB, loading=GB) + Memory()).needed == 2 * GB + both.runtime


def test_weights_that_will_not_stay_are_told() -> None:
    memory = [Memory(mapped=3 * GB, kv=GB), Memory(mapped=3 * GB, kv=GB), Memory(mapped=9 * GB)]
    names, rooms = ["a", "a", "b"], [FreeMemory(4 * GB)] * 2 + [FreeMemory(10 * GB)]
    (line,) = paging_lines(hosts_of(names, rooms), memory)
    assert line.startswith("a has 1.9 GB of memory for 6.0 GB of weights that are mapped")
    assert not paging_lines(hosts_of(names, [FreeMemory(9 * GB)] * 2 + [FreeMemory()]), memory)
    assert not paging_lines(hosts_of("a", [FreeMemory(GB)]), memory[:1]), "which is refused, with other words"


def make_system(folder: Path, cgroup: str, groups: dict[str, dict[str, str]]) -> FreeMemory:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   5000 kB\nSwapFree:   1000 kB\n")
    (folder / "proc/self/cgroup").write_text(cgroup)
    (folder / "proc/self/status").write_text("VmSize: 10 kB\n")
    for name, files in groups.items():
        (folder / "groups" / name).mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / "groups" / name / file).write_text(text)
    return free_memory(folder / "proc", folder / "groups")


def test_control_groups_and_those_above_them(tmp_path: Path) -> None:
    assert make_system(tmp_path / "0", "", {}).host == 6_144_000
    free = {"memory.max": "max", "memory.current": "5"}
    tight = {
        "memory.max": "3000",
        "memory.current": "1200",
        "memory.stat": "inactive_file 100\nactive_file 50\nanon 9\n",
    }
    assert make_system(tmp_path / "1", "0::/job/step\n", {"job/step": free, "job": tight}).host == 1950
    assert make_system(tmp_path / "2", "0::/job/step\n", {"job/step": tight, "job": free}).host == 1950
    assert make_system(tmp_path / "3", "0::/gone\n", {".": tight}).host == 1950, "a container's own group"
    old = {"memory.limit_in_bytes": "3000", "memory.usage_in_bytes": "1000"}
    without = {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "1000"}
    groups = {"memory/job": old, "memory": without}
    assert make_system(tmp_path / "4", "5:cpu:/\n4:memory:/job\n", groups).host == 2000


def test_this_machine_says_what_it_has() -> None:
    if sys.platform == "linux":
        assert 0 < free_memory().host < UNLIMITED
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    assert (free_memory().process < UNLIMITED) == limited


# -- plans


def plan_on(rooms: Sequence[int], split: str | None = None) -> JobPlan:
    options = options_of(
        model=TARGET, drafts=(DRAFT,), policy=PipeInfer(), predict=8, ctx_size=100_000, layer_split=split
    )
    hosts = [Host(f"h{rank}", frozenset({rank}), 1, FreeMemory(host=room)) for rank, room in enumerate(rooms)]
    return deploy(options, hosts, open_models(options)[0], 100_000, n_prompt=3)


def layers(plan: JobPlan) -> list[int]:
    return [stage.last - stage.first for stage in plan.assignment.stages]


def test_a_host_with_little_memory_gets_fewer_layers_instead_of_a_refusal() -> None:
    even = plan_on([GB] * 4)
    assert layers(even) == [3, 4, 2]
    small = even.memory[2].needed - 1
    uneven = plan_on([GB, GB, small, GB])
    assert layers(uneven)[1] < 4 and uneven.memory[2].needed <= small
    with pytest.raises(UserError, match=r"h2 has .* needs .*rank 2: .* leave --layer-split out, use a smaller context"):
        plan_on([GB, GB, small, GB], "3,4,2")


def test_what_no_split_fits_into_is_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match=r"h2 has 100.0 MB .* needs 2.* no split was found that fits; use a smaller"):
        plan_on([GB, GB, 10**8, GB])


def test_a_larger_draft_is_cut_to_what_its_hosts_hold() -> None:
    def plan(rooms: Sequence[int]) -> JobPlan:
        options = options_of(
            model=TARGET, drafts=(TARGET, DRAFT), policy=PipeInfer(), predict=8, ctx_size=100_000, draft_split=(2,)
        )
        hosts = [Host(f"h{rank}", frozenset({rank}), 1, FreeMemory(host=room)) for rank, room in enumerate(rooms)]
        return deploy(options, hosts, open_models(options)[0], 100_000, n_prompt=3)

    even = plan([GB] * 4)
    assert [stage.last for stage in even.assignment.drafts[1]] == [5, 9]
    whole = even.memory[1].kv + even.memory[2].kv
    assert whole == even.memory[3].kv, "each rank has the keys and values of its own layers"
    small = even.memory[1].needed - 1
    uneven = plan([GB, small, GB, GB])
    assert [stage.last for stage in uneven.assignment.drafts[1]] == [4, 9] and uneven.memory[1].needed <= small


# -- jobs


@pytest.mark.parametrize(
    ("value", "words", "n_ranks"),
    [
        ("10000000000", "2147482624", 1),
        ("4294967000", "2147482624", 2),
        ("2147482624", "of memory left", 1),
        ("900000000", "it would fit with -c ", 1),
        ("900000000", "it would fit with -c ", 2),
    ],
)
def test_a_context_that_cannot_be_is_refused(value: str, words: str, n_ranks: int) -> None:
    done = finish(n_ranks, ["run", "-p", "x", "-n", "2", "-c", value])
    assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("pipeinfer: ")]
    assert ("KV" in line) == ("stage 0" in done.stderr), "what does not fit is shown as planned"
    assert words in line and (value in line or ("rank 0: " in line and "KV" in line)), line


def test_a_context_beyond_what_the_model_was_trained_for_is_taken_with_a_note() -> None:
    for words, noted in (["run", "-p", "x", "-n", "2", "-c", "1024"], False), (["chat", "-p", "x", "-c", "1025"], True):
        done = finish(1, [*words, "--predict", "2"])
        notes = [line for line in done.stderr.splitlines() if "1024 tokens that the model was trained for" in line]
        assert done.returncode == 0 and len(notes) == int(noted), done.stderr


def test_the_plan_says_what_ranks_will_hold(tmp_path: Path) -> None:
    """Within 15% or 30 MB, for the shipped pair, for a context that counts, and for weights that count.

    Without exact numerics weights are read out of a slice in memory, which the kernel only counts as the rank's where
    it can gather it into large pages. Nothing is guessed: what guesses have room in is held from the first one on.
    """
    shape = Shape(n_layer=6, n_embd=768, n_head=12, n_head_kv=4, n_ff=3072, n_vocab=64000)
    wide = str(write_model(tmp_path / "wide.gguf", shape, "Q8_0"))
    for n_ranks, arguments in (
        (1, ["-n", "8"]),
        (3, ["-n", "8", "-c", "40000"]),
        (2, ["-n", "8", "-m", wide, "--numerics", "fast"]),
        (3, ["-n", "8", "-m", wide, "-c", "20000"]),
    ):
        result = run_json(n_ranks, ["-p", "x", "-t", "1", "--ignore-eos", "--policy", "iterative", *arguments])
        for rank in result["ranks"]:
            planned, held = rank["memory_bytes"], rank["peak_rss_bytes"]
            off = f"{rank['role']} of {arguments}: planned {planned / 1e6:.0f} MB, held {held / 1e6:.0f} MB"
            uncounted = rank["weight_bytes"] if "fast" in arguments and rank["layers"] else 0
            tolerance = max(0.15 * held, 30e6)
            assert -tolerance < planned - held < tolerance + uncounted, off


def test_weights_for_a_gpu_are_in_memory_on_their_way_alone() -> None:
    """A slice that rank 0 sends is in memory as a whole, and stays where the host computes some of its layers."""
    info = read_model_info(TARGET)
    last = info.n_layer

    def memory(n_gpu_layers: int, in_file: bool) -> Memory:
        numbers = info, 1, last, 512, 64, 8, 8
        return Layers(*numbers, DevicePlan(n_gpu_layers=n_gpu_layers), in_file=in_file).memory

    n_bytes = slice_bytes(info, 1, last)
    assert (memory(-1, True).weights, memory(-1, True).mapped, memory(-1, True).loading) == (0, 0, 0)
    assert (memory(-1, False).weights, memory(-1, False).loading) == (0, n_bytes)
    assert (memory(2, False).weights, memory(2, False).loading) == (n_bytes, 0)
    assert 0 < memory(2, True).mapped < memory(0, True).mapped == n_bytes
