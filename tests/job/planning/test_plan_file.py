"""--plan FILE: a job by a plan that was written before is that plan, or is refused with what differs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeinfer.cluster.hosts.host import FreeMemory, Host
from pipeinfer.cluster.wire import WireType
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import ALL_LAYERS, AUTO_LAYERS, NO_DEVICE
from pipeinfer.job.options.options import RunOptions, with_plan
from pipeinfer.job.options.values import Backend
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning.deploy import DoesNotFit
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.llama.tensor_places import TensorPlace
from pipeinfer.policies import POLICIES
from tests.support.cases import cases
from tests.support.jobs import finish, run_json
from tests.support.planned import deploy, options_of

INFO = read_model_info(TARGET)
Q8_0 = 8
GPUS = ("CUDA0", "CUDA1", "CUDA2", "CUDA3")


def random_hosts(rng: random.Random) -> list[Host]:
    offloads, n_ranks = rng.random() < 0.5, rng.randint(1, 5)
    return [
        Host(
            f"h{rng.randrange(3)}",
            frozenset(range(8)),
            rng.choice([0, 2, 8]),
            repacked=((Q8_0, 32, "x"),),
            offloads=offloads,
            gpu_names=GPUS[: rng.randint(1, 4)] if offloads else (),
        )
        for _ in range(n_ranks)
    ]


def random_options(rng: random.Random, n_ranks: int) -> RunOptions:
    def by_rank(*values: Any) -> tuple[Any, ...]:
        return tuple(rng.choice(values) for _ in range(rng.choice([1, n_ranks])))

    policy = POLICIES[rng.choice(["iterative", "pipeinfer", "pipedec", "auto", "speculative"])]()
    fast = rng.random() < 0.5
    way: dict[str, Any] = rng.choice(
        [{"backend": (Backend("torch"),)}, {"n_gpu_layers": by_rank(0, 2, ALL_LAYERS)}, {}]
    )
    if "n_gpu_layers" in way and rng.random() < 0.3:
        way = {"n_gpu_layers": (ALL_LAYERS,), "device": by_rank((), NO_DEVICE, ("CUDA0",))}
    if rng.random() < 0.2:
        way |= {"n_cpu_moe": by_rank(0, 2, ALL_LAYERS), "override_tensor": (TensorPlace("ffn_down", "CPU"),)}
    return options_of(
        model=TARGET,
        drafts=(DRAFT,),
        policy=policy,
        threads=rng.choice([(), by_rank(1, 2, 3)]),
        numerics="fast" if fast else "exact",
        repack=rng.random() < 0.7,
        wire_type=WireType.BF16 if fast and rng.random() < 0.5 else WireType.F32,
        cache_type_k="q8_0" if fast and "backend" not in way and rng.random() < 0.5 else "f16",
        draft_rank=rng.choice([None, None, n_ranks - 1]) if policy.drafts else None,
        n_gpu_layers_draft=rng.choice([AUTO_LAYERS, 0, ALL_LAYERS]),
        parallel=rng.choice([1, 1, 4]),
        batch_size=rng.choice([32, 128]),
        **way,
    )


def written(plan: JobPlan, folder: Path) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps({"plan": plan.decisions}))
    return path


@pytest.mark.parametrize("seed", cases(100, 300))
def test_a_job_by_a_plan_is_that_plan(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    hosts = random_hosts(rng)
    options = random_options(rng, len(hosts))
    try:
        plan = deploy(options, hosts, INFO, 512, 100)
    except UserError:
        return  # options that do not go together
    path = written(plan, tmp_path)
    plain = options_of(
        model=TARGET, drafts=(DRAFT,), policy=options.speculation.policy, parallel=options.traffic.parallel, plan=path
    )
    again = deploy(with_plan(plain, len(hosts)), hosts, INFO, 400, 100)
    assert again.decisions == plan.decisions and again.hash == plan.hash


def test_most_of_them_have_a_plan() -> None:
    """Else the test above says little."""
    n_plans = 0
    for seed in range(100):
        rng = random.Random(seed)
        hosts = random_hosts(rng)
        try:
            n_plans += bool(deploy(random_options(rng, len(hosts)), hosts, INFO, 512, 100))
        except UserError:
            continue
    assert n_plans > 50


HERE = [Host(name, frozenset(range(4)), 4, repacked=((Q8_0, 32, "x"),)) for name in ("a", "b")]
PLAIN = options_of(model=TARGET, policy=POLICIES["iterative"]())


def by_plan(path: Path, hosts: list[Host], model: Path = TARGET, **options: Any) -> JobPlan:
    asked = with_plan(PLAIN.changed(target=model, plan=path, **options), len(hosts))
    return deploy(asked, hosts, read_model_info(model), 512, 100)


def test_what_differs_is_said(tmp_path: Path) -> None:
    path = written(deploy(PLAIN, HERE, INFO, 512, 100), tmp_path)
    renamed = [replace(HERE[0], name="a.cluster.org"), HERE[1]]
    assert by_plan(path, renamed).hash == by_plan(path, HERE).hash, "a domain is no other host"
    with pytest.raises(
        UserError, match="is for other hosts or files: rank 1 host is b in the plan, c here; plan again"
    ):
        by_plan(path, [HERE[0], replace(HERE[1], name="c")])
    with pytest.raises(UserError, match=r"model is [0-9a-f]+ in the plan, [0-9a-f]+ here"):
        by_plan(path, HERE, DRAFT)
    other = [replace(host, repacked=((Q8_0, 32, "other"),)) for host in HERE]
    with pytest.raises(UserError, match=r"numerics name is exact-q8_0.32-\w+ in the plan, exact-q8_0.32-\w+ here"):
        by_plan(path, other)
    with pytest.raises(UserError, match="is for 2 ranks, and the number of ranks is 1; start as many, or plan again"):
        by_plan(path, HERE[:1])
    with pytest.raises(UserError, match=r"--threads is what --plan .* decides; leave one of them out"):
        by_plan(path, HERE, threads=(2,))
    with pytest.raises(UserError, match="has room for 1 requests, and this job needs 4"):
        by_plan(path, HERE, parallel=4)
    with pytest.raises(DoesNotFit, match="rank 0 on a needs"):
        by_plan(path, [replace(host, memory=FreeMemory(10**7, 10**7)) for host in HERE])


def test_weights_stay_as_planned_where_there_is_room_to_repack_them(tmp_path: Path) -> None:
    full = deploy(PLAIN, HERE[:1], INFO, 512, 100)
    n_bytes = full.memory[0].needed - 1
    tight = deploy(PLAIN, [replace(HERE[0], memory=FreeMemory(n_bytes, n_bytes))], INFO, 512, 100)
    assert full.numerics.repacked and not tight.numerics.repacked
    assert by_plan(written(tight, tmp_path), HERE[:1]).numerics.name == tight.numerics.name == "exact"


def test_a_plan_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match="--plan /dev/zero is longer than 64 MiB"):
        by_plan(Path("/dev/zero"), HERE)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "[" * 100_000, '{"plan": {}}', '{"plan": {"stages": [[0, 0, 9]], "ranks": 3}}']
)
def test_what_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match="is no plan; write one with"):
        by_plan(path, HERE)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        by_plan(tmp_path / "none.json", HERE)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no model": lambda plan: plan.pop("model"),
    "capacity more": lambda plan: plan["capacity"].update(foo=3),
    "capacity less": lambda plan: plan["capacity"].pop("n_cells"),
    "capacity text": lambda plan: plan["capacity"].update(n_cells="many"),
    "capacity below 1": lambda plan: plan["capacity"].update(n_batch=-5),
    "threads text": lambda plan: plan["ranks"][0].update(threads="x"),
    "no turn": lambda plan: plan["ranks"][0]["target"].pop("turn"),
    "layers text": lambda plan: plan["ranks"][0]["target"].update(n_gpu_layers="all"),
    "threads below 1": lambda plan: plan["ranks"][0].update(threads=-3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_plan_that_was_changed_by_hand_is_refused(change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    path = written(deploy(PLAIN, HERE, INFO, 512, 100), tmp_path)
    plan = json.loads(path.read_text())
    by_plan(path, HERE)
    change(plan["plan"])
    path.write_text(json.dumps(plan))
    with pytest.raises(UserError, match="is no plan; write one with"):
        by_plan(path, HERE)


@pytest.mark.ranks
def test_jobs_by_a_plan(tmp_path: Path) -> None:
    words = ["-p", "def fibonacci(n):", "-n", "24", "--temp", "0", "--policy", "pipeinfer"]
    done = finish(3, ["plan", "-c", "300", "--draft-rank", "1", "--policy", "pipeinfer", "-t", "1", "--json"])
    assert done.returncode == 0, done.stderr
    (path := tmp_path / "plan.json").write_text(done.stdout)
    found = run_json(3, [*words, "--plan", str(path)])
    assert found["plan_hash"] == json.loads(done.stdout)["plan_hash"]
    assert [rank["role"] for rank in found["ranks"]][1] == "draft"
    assert found["tokens"] == run_json(1, words)["tokens"]
    for command in (["run", "-p", "x"], ["chat"], ["bench", "-n", "8"], ["measure", "-o", str(tmp_path / "m.toml")]):
        refused = finish(2, [*command, "--plan", str(path)])
        assert refused.returncode == 2 and "is for 3 ranks, and the number of ranks is 2" in refused.stderr
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{number}(x):"}) + "\n" for number in range(3)))
    for plan, parallel in ((path, "1"), (tmp_path / "several.json", "3")):
        if not plan.exists():
            plan.write_text(finish(2, ["plan", "-c", "300", "--parallel", "3", "--json"]).stdout)
        job = ["batch", str(prompts), "-o", str(tmp_path / f"{parallel}.jsonl"), "-n", "8", "--temp", "0"]
        words = ["--parallel", parallel, "--plan", str(plan), *(["--policy", "pipeinfer"] if plan == path else [])]
        done = finish(3 if plan == path else 2, [*job, *words])
        assert done.returncode == 0, done.stderr
    first, second = (sorted((tmp_path / f"{name}.jsonl").read_text().splitlines()) for name in "13")
    assert [json.loads(line)["text"] for line in first] == [json.loads(line)["text"] for line in second]
