"""`pipeinfer bench` as a user starts it: one job for a sweep, rows, summaries, going on after an interruption."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from click.testing import CliRunner

from pipeinfer.cli.bench import bench
from pipeinfer.cluster.hosts.host import Host
from pipeinfer.cluster.wire import WireType
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import settings_of
from pipeinfer.errors import UserError
from pipeinfer.job.bench.bench import Bench
from pipeinfer.job.bench.sweep import GenerationCase, Group, Sweep, plan_groups
from pipeinfer.job.options.options import Speculation
from pipeinfer.job.options.values import Backend, Pace, ScaledFile
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.job.planning import prepare as prepare_module
from pipeinfer.job.requests.bench_prompts import (
    TEXTS,
    BenchPrompt,
    BenchTurn,
    Conversation,
    conversation_of,
    read_prompts,
)
from pipeinfer.models.demo import DRAFT, TARGET
from pipeinfer.models.llama.tensor_places import TensorPlace
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.observe.summary import markdown, summarise
from pipeinfer.observe.table import RESULTS
from pipeinfer.policies import POLICIES, Iterative, PipeInfer, Speculative, ablations_of
from pipeinfer.text import markdown_table
from tests.support.adapters import write_adapter
from tests.support.gguf_factory import Shape, write_model
from tests.support.jobs import ROOT, but_waiting, environment, finish, run_json, start
from tests.support.paces import pace_words, slow_target
from tests.support.planned import options_of
from tests.support.rows import make_row

USES = ("busy_s", "cancelled_s", "waiting_s", "idle_s")
TEXT = "the model of a rank is in the layer and a token. "


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    shape = Shape(n_layer=6, peaky=12.0, n_strong=2, weak=0.1)
    target = write_model(folder / "target.gguf", shape)
    draft = write_model(folder / "draft.gguf", replace(shape, n_layer=2))
    (folder / "tale.txt").write_text(TEXT * 3)
    questions = [json.dumps({"turns": [f"{TEXT} {index}", "again"]}) for index in range(4)]
    (folder / "asked.jsonl").write_text("\n".join(questions) + "\n")
    return ["-m", str(target), "-md", str(draft), "-t", "1"]  # more threads than cores make small models slow


def folder_of(pair: list[str]) -> Path:
    return Path(pair[1]).parent


def test_a_sweep_in_one_job(pair: list[str], tmp_path: Path) -> None:
    folder, results = folder_of(pair), tmp_path / "results.csv"
    sources = ["-p", "24", "-p", str(folder / "tale.txt"), "-p", str(folder / "asked.jsonl"), "--questions", "2"]
    arguments = ["bench", *pair, *sources, "-n", "4,8", "-r", "2", "--ablate", "cancel,continuous"]
    done = finish(3, [*arguments, "--results", str(results), "-o", "jsonl"])
    assert done.returncode == 0, done.stderr
    rows = RESULTS.read(results)
    # 6 prompts, 2 lengths, 2 repetitions of 7: four policies and the ablations that they have
    assert len(rows) == 6 * 2 * 2 * 7
    variants = {"pipeinfer": ["", "no-cancel", "no-continuous"], "auto": ["", "no-cancel"]}
    pairs = [(policy, variant) for policy, each in variants.items() for variant in each]
    measured = list(dict.fromkeys((row["policy"], row["variant"]) for row in rows))
    assert measured == [("iterative", ""), ("speculative", ""), *pairs]
    assert {row["prompt"] for row in rows} == {"pp24", "tale", "asked/1", "asked/1.2", "asked/2", "asked/2.2"}
    assert {row["prompt_n"] for row in rows if row["prompt"] == "pp24"} == {24}
    assert {row["predicted_n"] for row in rows} == {4, 8}
    for row in rows:
        assert row["runs_cancelled"] == 0 or row["policy"] != "iterative"
        assert row["cancel_messages"] == 0 or row["variant"] != "no-cancel"
    for rank in range(3):
        unnamed = [row["total_s"] - sum(row[use][rank] for use in USES) for row in rows]
        assert min(unnamed) >= -1e-3, "no time has two names"
        # in a generation of milliseconds, on cores that others want too, one of them may lack a name; in a few, seconds
        assert sum(sorted(unnamed)[:-8]) <= 0.01 * sum(row["total_s"] for row in rows), f"rank {rank}"
    summaries = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(summaries) == 3 * 2 * 7, "questions of one set are samples of one line"
    assert {summary["samples"] for summary in summaries if summary["prompt"] == "asked"} == {8}


def test_every_ablation_switches(tmp_path: Path) -> None:
    """By what the switch forbids; the complete policy does all of it."""
    results = tmp_path / "results.csv"
    # one run brings such a prompt: chunks of a longer one are in flight together
    arguments = ["bench", "-t", "1", "-p", str(TEXTS[1]), "--cut", "16", "-n", "64", "-r", "1"]
    ablations = ["--policy", "pipeinfer", "--ablate", ",".join(ablations_of(PipeInfer))]
    pace = pace_words(tmp_path, slow_target(2.0, draft_ms=0.5))
    done = finish(3, [*arguments, *ablations, *pace, "--results", str(results)])
    assert done.returncode == 0, done.stderr
    rows = {row["variant"]: row for row in RESULTS.read(results)}
    whole, free = rows.pop(""), rows.pop("no-cancel")
    assert whole["runs_cancelled"] and whole["cancel_messages"] and whole["branches"]
    assert whole["inflight_max"] == 3 and whole["draft_steps_inflight"]
    assert (free["runs_cancelled"], free["cancel_messages"]) == (0, 0)
    assert rows["no-partitions"]["branches"] == 0
    assert rows["no-continuous"]["inflight_max"] == 2, "the root's run and one of guesses"
    assert rows["no-async"]["draft_steps_inflight"] == 0 < rows["no-async"]["draft_steps"]
    ours = {setting.flag[2:] for _, _, setting in settings_of(PipeInfer) if setting.paper is False}
    assert rows.keys() - ours == {"no-partitions", "no-continuous", "no-async"} and len(rows) == 3 + len(ours)


def test_what_makes_a_measurement_worthless_is_said_once(tmp_path: Path) -> None:
    """And measurements are told apart by what was switched off."""
    results, cores = tmp_path / "results.csv", str(len(os.sched_getaffinity(0)))
    never = ["-pa", "1", "-ps", "1", "-pd", "0", "--policy", "pipeinfer", "--ablate", "cancel"]
    done = finish(2, ["bench", "-t", cores, "-p", "24", "-n", "32", "-r", "2", *never, "--results", str(results)])
    assert done.returncode == 0, done.stderr
    assert [row["draft_n_sent"] for row in RESULTS.read(results)] == [0] * 4
    for variant in ("", "no-cancel, "):
        name = f"pipeinfer, {variant}pp24, n 32"
        assert done.stderr.count(f"pipeinfer: {name}: no guess was ever sent") == 1, done.stderr
        assert f"] {name}, repetition 2: " in done.stderr
    assert done.stderr.count("threads of 2 ranks that compute") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "iterative,iterative"], "--policy has iterative twice"),
        (["-n", "4,8,4"], "-n has 4 twice"),
        (["--ablate", "cancel,cancel"], "--ablate has cancel twice"),
        (["-md", "none", "-md", "none"], "-md has none twice"),
        (["--layer-split", "2,4", "--layer-split", "2,4"], "--layer-split has 2,4 twice"),
    ],
)
def test_what_is_given_twice_is_not_measured_twice(words: list[str], said: str) -> None:
    found = CliRunner().invoke(bench, ["-p", "9", *words])
    assert isinstance(found.exception, UserError) and said in str(found.exception), found


def test_ablations_of_a_policy_that_is_not_measured_are_refused() -> None:
    done = finish(3, ["bench", "-p", "8", "-n", "8", "--policy", "pipedec", "--ablate", "cancel,asynchronous"])
    assert done.returncode == 2, done.stderr
    assert "--ablate asynchronous is about pipeinfer or pipespec, which --policy does not name" in done.stderr


def test_each_policy_is_measured_without_what_it_has(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    policies = ["--policy", "iterative,speculative,flowspec,pipespec", "--ablate", "expansion,asynchronous,cancel"]
    done = finish(3, ["bench", "-t", "1", "-p", "9", "-n", "24", "-r", "1", *policies, "--results", str(results)])
    assert done.returncode == 0, done.stderr
    measured = [(row["policy"], row["variant"]) for row in RESULTS.read(results)]
    variants = {"flowspec": ["", "no-cancel", "no-expansion"], "pipespec": ["", "no-async", "no-cancel"]}
    pairs = [(policy, variant) for policy, each in variants.items() for variant in each]
    assert sorted(measured) == sorted([*pairs, ("iterative", ""), ("speculative", "")])


def test_what_a_preset_has_off_already_is_named(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    preset = ["--policy", "speculative,pipeinfer", "--preset", "paper", "--ablate", "pacing,pruning,cancel"]
    done = finish(3, ["bench", "-t", "1", "-p", "9", "-n", "8", "-r", "1", *preset, "--results", str(results)])
    assert done.returncode == 0, done.stderr
    said = "pipeinfer: --ablate pacing,pruning: not measured of pipeinfer, which has that off already"
    assert [line for line in done.stderr.splitlines() if "--ablate" in line] == [said]
    assert {row["variant"] for row in RESULTS.read(results)} == {"", "no-cancel"}


GREEDY = SamplingParams(seed=0, temp=0.0)


def plan_of(hosts: str = "abc", **changed: Any) -> tuple[JobPlan, GenerationCase]:
    """The first case of a sweep with a rank on each host, by the shipped pair, with something changed."""
    fixed: dict[str, Any] = {"threads": (1,), "ignore_eos": True, "sampling": GREEDY, "policy": PipeInfer()}
    options = options_of(**{**fixed, "model": TARGET, **changed})
    sweep = Sweep(
        base=options,
        pairs=((options.models.target, options.models.drafts or (DRAFT,)),),
        policies=(options.speculation.policy,),
        splits=(split,) if (split := options.placement.layer_split) else (),
        prompts=(BenchPrompt("tale", options.text.prompt or "one two"),),
        predicts=(predict if (predict := options.context.predict) > 0 else 8,),
        ablations=(),
        repetitions=1,
        cut=0,
    )
    (group,) = plan_groups(sweep, [[Host(name, frozenset({0, 1}), 2) for name in hosts]])
    (case,) = group.cases
    assert isinstance(case, GenerationCase)
    return group.plan, case


def test_a_pace_is_the_same_with_a_draft_and_without_one() -> None:
    """So rows of all policies stand beside each other, as in `simulate`."""

    def hash_of(pace: str, **changed: Any) -> str:
        plan, case = plan_of(pace=Pace.parse(pace), **changed)
        return str(case.columns(plan, case.conversation.turns[0])["pace_hash"])

    guessing = hash_of("pipeinfer-c")
    assert guessing == hash_of("pipeinfer-c", policy=Iterative()) == hash_of("pipeinfer-c", hosts="abcd")
    assert guessing != hash_of("ethernet")


def key_with(**changed: Any) -> tuple[Any, ...]:
    plan, case = plan_of(**changed)
    return RESULTS.key_of(RESULTS.as_read(case.columns(plan, case.conversation.turns[0], 4)))


def test_the_key_has_everything_that_was_asked(tmp_path: Path) -> None:
    """--resume leaves nothing out that was asked otherwise, in whichever option of `run`."""
    adapter = write_adapter(tmp_path / "a.gguf", TARGET)
    changed: dict[str, Any] = {
        "drafts": (TARGET,),
        "prompt": "one three",
        "predict": 9,
        "ctx_size": 64,
        "batch_size": 7,
        "threads": (2,),
        "n_gpu_layers": (1,),
        "n_gpu_layers_draft": 0,
        "n_cpu_moe": (1,),
        "cpu_moe": True,
        "override_tensor": (TensorPlace("ffn", "CPU"),),
        "device": (("none",),),
        "numa": "isolate",
        "backend": (Backend("torch"),),
        "policy": Speculative(),
        "layer_split": "1,8",
        "numerics": "fast",
        "slice_cache": tmp_path,
        "kv_disk": 10**9,
        "kv_read_only": True,
        "cache_ram": 7,
        "pace": Pace.parse("pipeinfer-c"),
        "sampling": SamplingParams(seed=1),
        "couple": False,
        "cancel": False,
        "partitions": False,
        "prepare_ahead": False,
        "post_ahead": False,
        "repack": False,
        "sequences": 3,
        "lookup": True,
        "samplers": 1,
        "max_delay_s": 0.5,
        "gpu_aware": "on",
        "cache_type_k_draft": "q8_0",
        "cache_type_v_draft": "q4_0",
        "lora": (adapter,),
        "lora_scaled": (ScaledFile(adapter, 0.5),),
        "reasoning_budget": 5,
        "reasoning_message": "So:",
    }
    # a prompt is asked, whichever way it came; bench has no chat, stops, parallel and grammar; the rest says where to
    # write, or where models come from
    not_asked = {
        "target",
        "hf_token",
        "escape",
        "file",
        "ignore_eos",
        "results",
        "trace",
        "json",
        "verbose",
        "chat",
        "stops",
        "parallel",
    }
    not_asked |= {"constraints", "offline", "send_layers", "rank_timeout_s", "also", "resume", "finds_head"}
    not_asked |= {"template", "now_s"}
    not_asked |= {"parse_special", "special_in_messages", "resumed", "allow_other_numerics"}
    not_asked |= {"plan", "planned", "n_expected", "machines", "by_ranks", "kv_dir"}
    not_asked |= {"lora_init_without_apply"}  # which changes the factors of lora
    not_asked |= {"fit", "fit_target", "fit_ctx", "fitted"}  # bench does not take them
    assert not set(changed) & not_asked
    elsewhere = {"draft_split", "draft_rank", "wire_type", "cache_type_k", "cache_type_v", "rpc"}
    names = {field.name for _, record in options_of().records() for field in fields(record)}
    assert names | {"sampling", "constraints"} == set(changed) | elsewhere | not_asked
    keys = {"": key_with()} | {name: key_with(**{name: value}) for name, value in changed.items()}
    for name, value in (("wire_type", WireType.BF16), ("cache_type_k", "q8_0"), ("cache_type_v", "bf16")):
        keys[name] = key_with(numerics="fast", **{name: value})
    keys["draft_rank"] = key_with(hosts="abc", draft_rank=1)
    keys["rpc"] = key_with(n_gpu_layers=(1,), rpc=(("a:1",),))
    for split in ((1, 2), (2, 1)):  # of as many ranks, so that the target has as many stages
        keys[f"draft_split {split}"] = key_with(hosts="abcde", drafts=(DRAFT, TARGET, TARGET), draft_split=split)
    for kind in POLICIES.values():
        for name, value, each in settings_of(kind):
            others = [word for word in each.choices if word != value]
            other: Any = not value if isinstance(value, bool) else others[0] if others else value + 1
            keys[f"{kind.name} {name}"] = key_with(policy=kind(**{name: other}))
    for name, value, _ in settings_of(SamplingParams):
        if name != "seed":
            keys[name] = key_with(sampling=replace(GREEDY, **{name: type(value)(0.5 * value + 3)}))
    keys["logit_bias"] = key_with(sampling=replace(GREEDY, logit_bias="1+1"))
    for text in ('root ::= "a"', 'root ::= "b"'):
        keys[text] = key_with(sampling=replace(GREEDY, grammar=text))
    found: dict[tuple[Any, ...], str] = {}
    for name, key in keys.items():
        assert key not in found, f"{name} is taken for {found[key] or 'what was asked first'}"
        found[key] = name
    assert key_with() == key_with(verbose=True, results=tmp_path / "results.csv")


def test_models_of_one_name_are_told_apart(pair: list[str], tmp_path: Path) -> None:
    """In --resume and in the table."""
    results, folders = tmp_path / "results.csv", [tmp_path / "one", tmp_path / "other"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        write_model(folder / "model.gguf", Shape(n_layer=2, n_ff=512 + 256 * number))
    common = ["bench", "-t", "1", "-p", "8", "-n", "4", "-r", "2", "--results", str(results), "--resume"]
    for folder in folders:
        done = finish(1, [*common, "-m", str(folder / "model.gguf")])
        assert "2 generations to measure" in done.stderr, done.stderr
    rows = RESULTS.read(results)
    assert len(rows) == 4 and len({row["model_hash"] for row in rows}) == 2
    assert len(summarise(rows)) == 2
    alike = summarise([row | {"model_bytes": 7} for row in rows])
    first, second = (line.split("|")[7] for line in markdown(alike)[2:])
    assert "model_hash" in first and first != second


def test_cases_do_not_touch_each_other(pair: list[str], tmp_path: Path) -> None:
    """What is measured after other generations is what a fresh job measures: the same rows and guesses."""
    tale, results = str(folder_of(pair) / "tale.txt"), tmp_path / "results.csv"
    common = ["-n", "32", "--temp", "0", "--seed", "0", "--policy", "speculative"]
    prompts = ["-p", "40", "-p", tale]
    done = finish(
        2, ["bench", *pair, *prompts, *common, "-r", "3", "--policy", "speculative", "--results", str(results)]
    )
    assert done.returncode == 0, done.stderr
    fresh = run_json(2, [*pair, "-f", tale, *common, "--ignore-eos"])["speculation"]
    # not `runs`: chunks of the prompt are as long as is fast at that moment
    counts = ("rows", "draft_n", "draft_n_sent")
    found = [tuple(row[name] for name in counts) for row in RESULTS.read(results) if row["prompt"] == "tale"]
    assert found == [tuple(fresh[name] for name in counts)] * 3


def test_no_case_begins_with_what_another_one_learned() -> None:
    """Variants, prompts and repetitions; turns of one conversation share it."""
    plan, case = plan_of()
    case = replace(case, conversation=replace(case.conversation, turns=2 * case.conversation.turns))
    settings = replace(case.variant.settings, speculation=Speculation(policy=PipeInfer(pacing=False)))
    variant = replace(case, variant=replace(case.variant, settings=settings))
    again = replace(case, repetition=2)
    began: list[tuple[bool, float]] = []

    def generate(request: Any) -> Any:
        policy = request.policy.begin()
        assert isinstance(policy, PipeInfer)
        began.append((policy.pacing, policy.calibration.hit_rate))
        policy.calibration.hit_rate = 0.9
        return SimpleNamespace(request=SimpleNamespace(tokens=request.prompt))

    head: Any = Bench(SimpleNamespace(flag=SimpleNamespace(reason="")), SimpleNamespace(warm_up=1), [])  # type: ignore[arg-type]
    head._keep_turn = lambda *kept: None
    group = Group(plan, (case, variant, again))
    session = MagicMock(plan=plan, generate=generate)
    head.measure(session, group)
    assert session.ranks.unlearn.call_count == 4
    assert began == [(True, 0.5), *((pacing, rate) for pacing in (True, False, True) for rate in (0.5, 0.9))]


def test_resuming_measures_only_what_is_missing(pair: list[str], tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    arguments = ["bench", *pair, "-p", "16", "-n", "8", "-r", "2", "--results", str(results), "--resume"]
    assert finish(2, arguments).returncode == 0
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:3] + lines[4:]))
    again = finish(2, arguments)
    assert again.returncode == 0 and "1 generation to measure" in again.stderr, again.stderr
    assert len(RESULTS.read(results)) == 8
    nothing = finish(2, arguments)
    assert nothing.returncode == 0 and not nothing.stdout, nothing.stdout
    assert f"nothing left to measure: {results} has it all" in nothing.stderr, nothing.stderr
    assert len(RESULTS.read(results)) == 8
    assert "8 generations to measure" in finish(3, arguments).stderr, "another number of ranks is another measurement"


def test_a_later_turn_is_asked_after_the_answers(tmp_path: Path) -> None:
    """The prompt is the conversation as text: the same figures as `run` has for it, with the shipped pair."""
    questions, results, spoken = tmp_path / "talk.jsonl", tmp_path / "results.csv", tmp_path / "spoken.txt"
    turns = ["def add(a, b):", "def fibonacci(n):", "import os"]
    questions.write_text(json.dumps({"turns": turns}))
    common = ["-n", "24", "--temp", "0", "--seed", "0", "--policy", "speculative"]
    done = finish(2, ["bench", "-t", "1", "-p", str(questions), *common, "-r", "2", "--results", str(results)])
    assert done.returncode == 0, done.stderr
    expected, text = [], ""
    for number, turn in enumerate(turns, start=1):
        text += f"\n\n{turn}" if text else turn
        spoken.write_text(text)
        fresh = run_json(2, ["-t", "1", "-f", str(spoken), *common, "--ignore-eos"])
        name = "talk/1" if number == 1 else f"talk/1.{number}"
        speculation = fresh["speculation"]  # not `runs`: chunks of the prompt are as long as is fast at that moment
        expected.append((name, len(fresh["prompt_tokens"]), speculation["draft_n"], speculation["draft_n_sent"]))
        text += fresh["text"]
    found = [(row["prompt"], row["prompt_n"], row["draft_n"], row["draft_n_sent"]) for row in RESULTS.read(results)]
    assert found == expected * 2


def test_a_conversation_is_resumed_at_its_first_missing_turn(pair: list[str], tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    source = ["-p", str(folder_of(pair) / "asked.jsonl"), "--questions", "1", "--cut", "40"]
    arguments = ["bench", *pair, *source, "-n", "8", "-r", "1", "--results", str(results), "--resume"]
    assert "4 generations to measure" in finish(2, [*arguments, "--turns", "1"]).stderr
    assert {row["prompt"] for row in RESULTS.read(results)} == {"asked/1"}, "a table as older versions write it"
    rest = finish(2, arguments)
    assert rest.returncode == 0 and "4 generations to measure" in rest.stderr, rest.stderr
    rows = RESULTS.read(results)
    assert [row["prompt"] for row in rows] == ["asked/1"] * 4 + ["asked/1.2"] * 4
    assert {row["prompt_n"] for row in rows} == {40}, "the first tokens of the first turn, the newest of the second"
    assert "nothing left to measure" in finish(2, arguments).stderr
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:2] + lines[3:]))
    assert "1 generation to measure" in finish(2, arguments).stderr, "the answer to a first turn is not needed again"


def test_a_later_turn_begins_with_a_blank_line_and_no_space(pair: list[str]) -> None:
    """Of a vocabulary that begins every text with a space."""
    tokenizer = Tokenizer(pair[1])
    first, later = conversation_of(BenchPrompt("q/1", "a rank", later=("of the layer",)), tokenizer, cut=0).turns
    assert first.tokens[0] == tokenizer.bos and (first.name, later.name) == ("q/1", "q/1.2")
    assert b"".join(map(tokenizer.decode_piece, first.tokens)) == b" a rank"
    assert b"".join(map(tokenizer.decode_piece, later.tokens)) == b"\n\nof the layer"


def test_a_cut_keeps_the_newest_tokens_and_the_beginning_of_text() -> None:
    turns = (BenchTurn("q/1", (1, 2, 3)), BenchTurn("q/1.2", (7, 8)), BenchTurn("q/1.3", (9,)))
    whole, cut = Conversation(turns, cut=0, n_keep=1), Conversation(turns, cut=5, n_keep=1)
    assert whole.prompt((1, 2, 3, 4, 5, 6), turns[1]) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert cut.prompt((), turns[0]) == (1, 2, 3)
    assert cut.prompt((1, 2, 3, 4, 5, 6), turns[1]) == (1, 5, 6, 7, 8)
    assert Conversation(turns, cut=5, n_keep=0).prompt((1, 2, 3, 4, 5, 6), turns[1]) == (4, 5, 6, 7, 8)
    assert Conversation(turns, cut=1, n_keep=1).prompt((1, 2, 3), turns[1]) == (1,)
    assert whole.lengths(3) == [3, 8, 12] and cut.lengths(3) == [3, 5, 5]


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_ctrl_c_keeps_what_was_measured(pair: list[str], tmp_path: Path, n_ranks: int) -> None:
    results = tmp_path / "results.csv"
    code, out, errors = interrupted(n_ranks, [*pair, "--results", str(results)])
    assert code != 0 and "Traceback" not in errors
    assert f"interrupted; what was measured is in {results}, --resume goes on from it" in errors
    assert len(RESULTS.read(results)) >= 2 and "| iterative |" in out


def test_what_is_in_no_file_is_not_said_to_be_kept(pair: list[str]) -> None:
    code, out, errors = interrupted(1, pair)
    assert code == 130 and "| iterative |" in out and "--resume" not in errors
    assert "interrupted; the table has what was measured, and without --results FILE nothing else keeps it" in errors


def interrupted(n_ranks: int, words: list[str]) -> tuple[int, str, str]:
    """A sweep that got Ctrl-C after its second generation: exit code, output, errors."""
    job = start(n_ranks, ["bench", *words, "-p", "16", "-n", "64", "-r", "300"])
    assert job.stderr
    while "[2]" not in job.stderr.readline():
        assert job.poll() is None
    job.send_signal(signal.SIGINT)
    out, errors = job.communicate(timeout=60)
    return job.returncode, out, errors


def test_splits_go_to_the_policies_they_fit(pair: list[str], tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    splits = ["--layer-split", "0.34,0.33,0.33", "--layer-split", "0.1,0.9/1.0", "--layer-split", "4,2"]
    done = finish(3, ["bench", *pair, "-p", "16", "-n", "4", "-r", "1", *splits, "--results", str(results)])
    assert done.returncode == 0, done.stderr
    found = {(row["policy"], row["layers"]) for row in RESULTS.read(results)}
    assert found == {("iterative", (2, 2, 2))} | {
        (policy, layers) for policy in ("speculative", "pipeinfer", "auto") for layers in ((1, 5), (4, 2))
    }


BAD = [
    (["--policy", "magic"], "magic"),
    (["-n", "8,x"], "8,x"),
    (["-n", "0"], "'0'"),
    (["-p", "none.txt"], "none.txt"),
    (["-p", "0"], "-p 0"),
    (["--ablate", "luck"], "luck"),
    (["--resume"], "--results"),
    (["--layer-split", "1,1,1,1,1,1"], "6 parts"),
    (["-m", "none.gguf"], "none.gguf"),
    (["-p", "9000"], "9000"),
    (["-p", "{folder}/bad.jsonl"], "line 2"),
    (["-p", "{folder}/mixed.jsonl"], "line 1"),
    (["-p", "{folder}/long.jsonl", "-n", "3000"], "--turns"),
    (["--results", "{folder}/none/results.csv"], "results.csv"),
]


@pytest.mark.parametrize(
    ("arguments", "words", "n_ranks"),
    [(*bad, 1) for bad in BAD] + [(*bad, 2) for bad in BAD if bad[1] in ("magic", "6 parts", "none.gguf", "line 2")],
)
def test_bad_input_is_one_line(pair: list[str], tmp_path: Path, arguments: list[str], words: str, n_ranks: int) -> None:
    (tmp_path / "bad.jsonl").write_text('{"turns": ["a"]}\n{"turns": "a"}\n')
    (tmp_path / "mixed.jsonl").write_text('{"turns": ["a", 2]}\n')
    (tmp_path / "long.jsonl").write_text('{"turns": ["a", "b", "c"]}\n')
    models = [] if "-m" in arguments else pair
    done = finish(n_ranks, ["bench", *models, "-r", "1", *(part.format(folder=tmp_path) for part in arguments)])
    assert done.returncode == 2 and done.stdout == ""
    complaints = [line for line in but_waiting(done.stderr) if line.startswith("pipeinfer: ")]
    assert len(complaints) == 1 and words in complaints[0] and "Traceback" not in done.stderr, done.stderr


def test_a_number_is_as_many_tokens_of_text(pair: list[str]) -> None:
    tokenizer = Tokenizer(pair[1])
    for n_tokens in (1, 24, 5000):
        (turn,) = conversation_of(BenchPrompt("pp", n_tokens=n_tokens), tokenizer, cut=0).turns
        assert len(turn.tokens) == n_tokens
    text = b"".join(map(tokenizer.decode_piece, turn.tokens)).decode(errors="replace")
    assert "Write a Python program" in text and text.count("lighthouse") > 1


def test_the_default_prompts_are_texts(tmp_path: Path) -> None:
    results = tmp_path / "results.csv"
    arguments = ["bench", "-t", "1", "-n", "4", "-r", "1", "--policy", "iterative", "--results", str(results)]
    done = finish(1, arguments)
    assert done.returncode == 0, done.stderr
    assert [row["prompt"] for row in RESULTS.read(results)] == ["program", "tale", "excerpt"]
    done = finish(1, [*arguments, "-p", "8", "-p", "8"])
    assert done.returncode == 2 and "two prompts are called pp8" in done.stderr


def test_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_text('\ufeff{"turns": ["one", "two"]}\n\n{"turns": ["three\u2028\x85"]}\n')
    assert read_prompts("512", 0) == read_prompts("512", 0, cut=600) == [BenchPrompt("pp512", n_tokens=512)]
    assert read_prompts("512", 0, cut=8) == [BenchPrompt("pp8", n_tokens=8)], "the same as -p 8"
    assert read_prompts(str(tmp_path / "a.txt"), 0) == [BenchPrompt("a", "text")]
    questions = [BenchPrompt("b/1", "one", later=("two",)), BenchPrompt("b/3", "three\u2028\x85")]
    assert read_prompts(str(tmp_path / "b.jsonl"), 0) == questions
    assert [read_prompts(str(tmp_path / "b.jsonl"), n) for n in (1, 2)] == [questions[:1], questions]
    assert read_prompts(str(tmp_path / "b.jsonl"), 0, n_turns=1) == [BenchPrompt("b/1", "one"), questions[1]]
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(UserError, match="64 MiB"):
        read_prompts("/dev/zero", 0)
    assert read_prompts("20,300", 0, cut=200) == [BenchPrompt("pp20", n_tokens=20), BenchPrompt("pp200", n_tokens=200)]
    with pytest.raises(UserError, match="of several files each its own -p"):
        read_prompts("a.txt,30", 0)
    with pytest.raises(UserError, match="1 to 1048576 tokens"):
        read_prompts("20,0", 0)
    with pytest.raises(UserError, match="no questions"):
        read_prompts(str(tmp_path / "b.jsonl"), 0)


def test_summary_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        RESULTS.as_read(make_row("pipeinfer", f"set/{index}", speed=speed)) for index, speed in enumerate((10.0, 14.0))
    ]
    (summary,) = summarise([*rows])
    assert (summary["samples"], summary["prompt"], summary["predicted_per_second"]) == (2, "set", 12.0)
    assert summary["predicted_per_second_std"] == pytest.approx(8**0.5)
    header, _, line = markdown([summary])
    assert len(header) == len(line), "columns stand under each other"
    names, values = ([cell.strip() for cell in text.split("|")] for text in (header, line))
    cells = dict(zip(names, values, strict=True))
    assert (cells["acceptance"], cells["hit rate"]) == ("0.80", "0.90")
    assert cells["tg t/s"] == "12.00 ± 2.83" and cells["test"] == "set tg64"


def test_a_table_is_markdown() -> None:
    assert markdown_table(["name", "t/s"], [["a|b", "1.50"], ["", "1e3"]], right_aligned=["t/s"]) == [
        "| name   |   t/s |",
        "|:-------|------:|",
        "| a/b    |  1.50 |",
        "|        |   1e3 |",
    ]
    assert len(markdown_table(["name", "t/s"], [])) == 2


def test_csv_and_json_say_the_same(pair: list[str]) -> None:
    common = ["bench", *pair, "-p", "16", "-n", "4", "-r", "1", "--policy", "iterative"]
    as_json, as_csv = finish(1, [*common, "-o", "json"]), finish(1, [*common, "-o", "csv"])
    (one,), (other,) = json.loads(as_json.stdout), csv.DictReader(io.StringIO(as_csv.stdout))
    assert list(one) == list(other)
    assert one["policy"] == other["policy"] == "iterative" and one["samples"] == int(other["samples"]) == 1
    integers = {"ranks": 1, "prompt_n": 16, "predicted_n": 4, "model_bytes": one["model_bytes"], "top_k": 40}
    for name, value in integers.items():
        assert one[name] == value and isinstance(one[name], int) and other[name] == str(value)
    assert one["layers"] == [6] and one["threads"] == [1] and other["layers"] == "6" and other["threads"] == "1"
    assert one["acceptance_rate"] is None and other["acceptance_rate"] == ""


def test_experiments_begin_only_where_they_are_understood(tmp_path: Path) -> None:
    def asked(word: str) -> subprocess.CompletedProcess[str]:
        script = [str(ROOT / "experiments.sh"), word]
        return subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, timeout=60)

    helped, wrong = asked("--help"), asked("-n")
    assert helped.returncode == 0 and not helped.stderr and helped.stdout.startswith("The experiments of")
    assert "\n  TOKENS     tokens to generate" in helped.stdout and "set -" not in helped.stdout
    assert wrong.returncode == 2 and not wrong.stdout and "-n: settings are variables" in wrong.stderr


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("RANKS", "2,3", "RANKS=2,3: give numbers of MPI ranks, separated by spaces"),
        ("RANKS", "0", "RANKS=0: give"),
        ("REPEATS", "0", "REPEATS=0: give a whole number from 1 on"),
        ("SEED", "-1", "SEED=-1: give a whole number from 0 on"),
        ("PAIRS", "target.gguf", "PAIRS has target.gguf: give TARGET:DRAFT"),
    ],
)
def test_experiments_take_no_setting_for_another(setting: str, value: str, words: str) -> None:
    settings = environment() | {"FIGURES": "", setting: value}
    script = [str(ROOT / "experiments.sh")]
    done = subprocess.run(script, env=settings, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_experiments_measure_ablations_in_turns_with_what_they_are_held_against(tmp_path: Path) -> None:
    settings = {
        "PAIRS": f"{TARGET}:{DRAFT}",
        "RANKS": "2",
        "TOKENS": "4",
        "REPEATS": "2",
        "CUT": "8",
        "QUESTIONS": "",
        "RESULTS": str(tmp_path / "results.csv"),
        "FIGURES": str(tmp_path / "figures"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        [str(ROOT / "experiments.sh")], env=environment() | settings, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = RESULTS.read(tmp_path / "results.csv")
    parts = ("", "no-cancel", "no-partitions", "no-continuous", "no-async")
    policies = {("iterative", ""), ("speculative", ""), *(("pipeinfer", part) for part in parts)}
    each_round = {(row["policy"], row["variant"]) for row in rows[: len(rows) // 2]}
    assert each_round == policies, "each round has them all"
    assert [row["repetition"] for row in rows] == [1] * 21 + [2] * 21
    assert (tmp_path / "figures" / "ablation.png").exists()


TELLS = """
import sys
from pipeinfer.cli import main
from pipeinfer.job.bench import sweep
from pipeinfer.models.llama.repacking import repacked_types
deploy = sweep.deploy
def told(options, hosts, *others):
    print("as run" if hosts[0].repacked == repacked_types() else "otherwise", file=sys.stderr)
    return deploy(options, hosts, *others)
sweep.deploy = told
main()
"""


def test_weights_are_repacked_as_run_has_them() -> None:
    words = ["bench", "-md", "none", "-n", "2", "-r", "1", "--warm-up", "0", "-p", "4"]
    done = subprocess.run([sys.executable, "-c", TELLS, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "as run" in done.stderr, done.stderr


def test_only_who_gave_a_prompt_hears_how_it_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`measure` continues a prompt of its own."""
    monkeypatch.setattr(prepare_module, "template_of", lambda metadata: "{{ messages }}")
    options = options_of(model=TARGET, policy=Speculative(), drafts=(DRAFT,), prompt="one", predict=4, sampling=GREEDY)
    for given in (True, False):
        prepare_module.prepare(options, [Host("a", frozenset({0}), 1)] * 2, given)
        assert ("continued as plain text; --chat asks it" in capsys.readouterr().err) is given
