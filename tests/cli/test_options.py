"""What the command line accepts: every option of every command, odd values, and the habits of llama.cpp's users."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from pipeinfer.cli.commands import cli
from pipeinfer.cli.options.llama_cpp import HARMLESS, INSTEAD, Command, CommandGroup
from pipeinfer.cli.options.setting_options import select_policy
from pipeinfer.cluster.hosts.host import Host
from pipeinfer.cluster.wire import WireType
from pipeinfer.core.settings import settings_of
from pipeinfer.errors import UserError
from pipeinfer.job.options.limits import ALL_LAYERS
from pipeinfer.job.options.options import unescape
from pipeinfer.job.options.values import TYPES, Backend, File, Joined, Listed, Number, TextType, Whole
from pipeinfer.job.placement.checks import inexact_line
from pipeinfer.job.placement.job_plan import JobPlan
from pipeinfer.models.demo import TARGET
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.policies import POLICIES, PipeInfer
from tests.support.jobs import COMMAND, environment, finish, run_json
from tests.support.planned import lay_out, options_of

WITH_DRAFT = ", ".join(
    name for name, policy in POLICIES.items() if any(setting.flag == "--draft" for _, _, setting in settings_of(policy))
)
ODD = (
    "nan",
    "inf",
    "-inf",
    "NaN",
    "-1",
    "0",
    "",
    " ",
    "\t",
    "1e400",
    "-1e400",
    "1e308",
    "9" * 30,
    "-" + "9" * 30,
    "1_0",
    "0x10",
    "1,",
    ",",
    "1,,2",
    "nan,1",
    "\u0661",
    "\u2603",
    "caf\u00e9",
    "\udcff",
    "--",
    "-x",
    "-",
    "1e-400",
    "+1",
    "1.5",
)
PLAIN = {Whole: "1", Number: "0.5", Listed: "1", File: "some.file", TextType: "text"}


def leaves(command: click.Command, ctx: click.Context, path: str = "") -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path.strip(), command
        return
    for name in command.list_commands(ctx):
        found = command.get_command(ctx, name)
        assert found
        yield from leaves(found, ctx, f"{path} {name}")


COMMANDS = dict(leaves(cli, click.Context(cli)))
PARAMETERS = [
    pytest.param(name, param, id=f"{name} {param.opts[0]}")
    for name, command in COMMANDS.items()
    for param in command.params
]


def takes_value(param: object) -> bool:
    return not (isinstance(param, click.Option) and param.is_flag)


def parse(name: str, words: list[str], given: click.Parameter | None = None) -> dict[str, object]:
    """The values a command would get; what else it requires is filled in. Raises click.UsageError."""
    command = COMMANDS[name]
    for param in command.params:
        if param.required and param is not given:
            value = next(value for kind, value in PLAIN.items() if isinstance(param.type, kind))
            words = [param.opts[0], value, *words] if isinstance(param, click.Option) else [value, *words]
    return command.make_context(name, words).params


def test_every_command_reads_its_words_the_same_way() -> None:
    assert {"run", "bench", "simulate", "measure", "models split"} <= set(COMMANDS)
    assert [name for name, command in COMMANDS.items() if not isinstance(command, Command)] == []
    assert isinstance(cli, CommandGroup)


@pytest.mark.parametrize(("name", "param"), PARAMETERS)
def test_every_option_has_a_type_that_checks(name: str, param: click.Parameter) -> None:
    assert isinstance(param.type, tuple(TYPES)), f"{name} {param.opts}: {param.type}; take a type of cli/values.py"


@pytest.mark.parametrize(("name", "param"), [each for each in PARAMETERS if takes_value(each.values[1])])
def test_odd_values_are_refused_in_one_line_or_legal(name: str, param: click.Parameter) -> None:
    for value in (each for each in ODD if (param.name, each) != ("threads", "-1")):  # as if it was left out
        words = [param.opts[0], value] if isinstance(param, click.Option) else ["--", value]
        try:
            found = parse(name, words, param)[str(param.name)]
        except click.UsageError as error:
            message = error.format_message()
            assert repr(value)[1:-1] in message, f"{value!r}: {message}"
            assert isinstance(param, click.Argument) or param.opts[0] in message, message
            assert "\n" not in message
        else:
            is_many = (param.multiple or param.nargs == -1) and not isinstance(param.type, Joined)
            check_legal(found[0] if isinstance(found, tuple) and is_many else found, param.type)


def check_legal(value: object, kind: click.ParamType) -> None:
    if isinstance(kind, Listed):
        assert isinstance(value, tuple) and value
        for item in value:
            check_legal(item, kind.item)
    elif isinstance(kind, File):
        assert isinstance(value, Path) and str(value).strip() not in ("", ".") and not str(value).startswith("--")
    elif isinstance(kind, (Whole, Number)):
        assert isinstance(value, (int, float)) and math.isfinite(value)
        assert kind.min is not None and kind.max is not None and kind.min <= value <= kind.max
    if isinstance(value, (str, Path)):
        str(value).encode()  # UTF-8
    if isinstance(kind, TextType) and not kind.blank:
        assert str(value).strip()


# -- odd values that are legal, to the end


def extremes(name: str, which: str, *policies: str) -> list[str]:
    """Every numeric option of a command at its least or most, but those that size the work and other policies', and
    the least time in which a busy host's ranks must give a sign."""
    words: list[str] = []
    own = {setting for policy in policies for setting, _, _ in settings_of(POLICIES[policy])}
    foreign = {setting for kind in POLICIES.values() for setting, _, _ in settings_of(kind)} - own
    for param in COMMANDS[name].params:
        if param.name in foreign:
            continue
        if not isinstance(param.type, (Whole, Number)) or param.name in (
            "predict",
            "prompt_tokens",
            "repetitions",
            "ctx_size",
            "cache_ram",
            "nodes",
            "gbit",
            "acceptances",
            "requests",
            "rate",
            "parallel",
            "concurrency",
            "max_delay_s",
            "draft_rank",
        ):
            continue
        if which == "min" and param.name == "rank_timeout_s":
            continue
        limit = param.type.min if which == "min" else param.type.max
        if which == "min" and isinstance(param.type, Number) and param.type.min_open:
            limit = 1e-300
        words += [param.opts[0], str(limit)]
    return words


@pytest.mark.parametrize("which", ["min", "max"])
@pytest.mark.parametrize("policy", ["speculative", "pipeinfer"])
def test_a_run_with_every_number_at_its_limit(which: str, policy: str) -> None:
    asked = ["--policy", policy, *extremes("run", which, policy)]
    done = finish(2, ["run", "--chat", "-p", "def f(", "-n", "4", "-t", "1", "--ignore-eos", *asked])
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--draft", "4"], f"--draft is an option of --policy {WITH_DRAFT}; auto has no such options"),
        (
            ["run", "--policy", "iterative", "-pa", "0.1"],
            "--accept-cutoff is an option of --policy speculative, pipeinfer",
        ),
        (["run", "--policy", "speculative", "--no-async"], "speculative has --preset, --draft, --width"),
        (
            ["bench", "--policy", "iterative,speculative", "-pd", "0"],
            "iterative has no such options; speculative has --preset, --draft",
        ),
        (["simulate", "--policy", "speculative", "--inflight", "3"], "--inflight is an option of --policy pipeinfer"),
    ],
)
def test_an_option_of_another_policy_is_refused(words: list[str], said: str) -> None:
    done = finish(1, [*words, *(["--profile", "flowspec"] if words[0] == "simulate" else ["-p", "x"])])
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("temp", ["1e-300", "5e-324", "1e-40", "1000"])
def test_very_low_and_high_temperatures(temp: str) -> None:
    done = finish(
        1, ["run", "-p", "def f(", "-n", "4", "-t", "1", "--temp", temp, "-s", "1", "--repeat-penalty", "1.1"]
    )
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr


@pytest.mark.parametrize("which", ["min", "max"])
def test_a_simulation_with_every_number_at_its_limit(which: str) -> None:
    done = finish(
        1,
        [
            "simulate",
            "--profile",
            "pipeinfer-a",
            "--nodes",
            "4",
            "-n",
            "8",
            "--policy",
            ",".join(POLICIES),
            *extremes("simulate", which, *POLICIES),
        ],
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "-p", "x", "-n", "2147483647"], "-n 2147483647"),
        (["run", "-p", "x", "-t", "100000"], "512"),
        (["run", "-p", "x", "--temp", "nan"], "from 0 to 1000"),
        (["run", "-p", "x", "--slice-cache", ""], "empty"),
        (["run", "-p", "x", "--slice-cache", "/etc/passwd"], "no directory"),
        (["run", "-p", "x", "-m", "/tmp"], "/tmp"),
        (["run", "-p", "x", "--trace", "/tmp"], "--trace /tmp"),
        (["run", "-p", "x", "--results", "/tmp"], "--results /tmp"),
        (["run", "-f", "/tmp"], "--file /tmp"),
        (["run", "-p", "x", "--pace", "nowhere"], "nowhere"),
        (["run", "-p", r"\xff"], "--no-escape"),
        (["run", "-p", "x", "-m", "-n", "3"], "./-n"),
        (["simulate", "--profile", "pipeinfer-a", "--gbit", "nan"], "--gbit"),
        (["simulate", "--profile", "pipeinfer-a", "--acceptance", "nan"], "--acceptance"),
        (["simulate", "--profile", "/tmp"], "/tmp"),
        # a text in the place of a file's name
        (["run", "-p", "x", "-sys", "You are"], "--chat"),
        (["run", "-p", "x", "--chat", "-sys", "a", "-sysf", "b"], "one of them"),
        (["run", "-p", "x", "--chat", "-sysf", "/does/not/exist"], "/does/not/exist"),
        (["run", "-p", "x", "--chat", "--chat-template-file", "/does/not/exist"], "/does/not/exist"),
        (["run", "-p", "x", "--chat", "--chat-template-kwargs", "[1]"], "not a JSON object"),
        (["run", "-p", "x", "--chat", "--chat-template-kwargs", '{"messages": []}'], "give other names"),
        (["run", "-p", "x", "--stop", ""], "some text"),
        (["run", "-p", "x", *["--stop", "y"] * 33], "--stop has 33 texts, and at most 32 are possible"),
        (["run", "-p", "x", "-j", '{"const": NaN}'], "it has no NaN"),
        (["run", "-f", "Once upon a time " * 20], "too long"),
        (["run", "-p", "x", "-m", "/tmp/" * 2000], "too long"),
        (["run", "-p", "x", "--pace", "x" * 300], "too long"),
        (["simulate", "--profile", "x" * 300], "too long"),
        (["simulate", "--profile", "x" * 300 + ".toml"], "too long"),
    ],
)
def test_wrong_values_end_in_one_line(arguments: list[str], words: str) -> None:
    done = finish(1, arguments)
    assert done.returncode == 2 and done.stdout == "" and words in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_what_is_about_guesses_is_without_effect_where_there_are_none() -> None:
    asked = options_of(model=Path("m"), lookup=True, cancel=False, n_gpu_layers_draft=0)
    assert asked.without_effect(1) == (
        "-ngld, --lookup, --no-cancel are without effect: policy iterative makes no guesses",
    )
    assert not asked.changed(policy=PipeInfer()).without_effect(1)


def test_threads_that_sample_are_without_effect_beside_all_layers() -> None:
    options = options_of(model=Path("m"), samplers=2)
    assert "--sampler-threads is without effect" in options.without_effect(1)[0] and not options.without_effect(2)


def test_a_wire_type_is_without_effect_where_nothing_is_sent() -> None:
    options = options_of(model=Path("m"), numerics="fast", wire_type=WireType.BF16)
    assert "--wire-type bf16 is without effect" in options.without_effect(1)[0]
    assert not options.without_effect(2) and not options_of(model=Path("m")).without_effect(1)
    done = finish(1, ["run", "-p", "x", "-n", "2", "--numerics", "fast", "--wire-type", "bf16"])
    assert done.returncode == 0 and "--wire-type bf16 is without effect" in done.stderr


def test_a_prompt_that_is_not_utf_8() -> None:
    done = subprocess.run([*COMMAND, "run", "-p", b"caf\xe9"], capture_output=True, env=environment(), timeout=60)
    assert done.returncode == 2 and b"UTF-8" in done.stderr and len(done.stderr.splitlines()) == 1


# -- llama.cpp's habits


def test_what_llama_cpp_has_and_we_lack_is_named() -> None:
    ours = {name for param in COMMANDS["run"].params for name in (*param.opts, *param.secondary_opts)}
    assert not ours & set(INSTEAD) and not ours & set(HARMLESS), "an option that is there needs no excuse"
    for name, says in INSTEAD.items():
        if name not in HARMLESS:
            with pytest.raises(click.UsageError) as error:
                parse("run", ["-p", "x", name, "value"])
            assert error.value.format_message() == f"{name}: {says}"
        mentioned = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", says)) - {"--bind-to", "--cpu-bind", "-np", "-h"}
        of_batch = {name for param in COMMANDS["batch"].params for name in param.opts}
        assert mentioned <= (ours | of_batch if "pipeinfer batch" in says else ours), f"{name}: {says}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-mu", "http://x/y"], "-hf USER/MODEL"),
        (["-hf", "x"], "write USER/MODEL"),
        (["-i"], "run --chat"),
        (["--no-jinja"], "always rendered by Jinja"),
        (["-ctk", "q3_K"], "'iq4_nl'"),
        (["-devd", "CUDA0"], "-ngl and --device"),
        (["-fa", "off"], "on, 1"),
        (["-fa"], "on, 1"),
        (["--flash-attn", "-n", "3"], "auto, -1; it has no effect here"),
        (["--mirostat", "2"], "no such sampler"),
        (["--control-vector", "x"], "merge"),
        (["-t", "-2"], "'-2' is not a whole number from 1 to 512, or -1 alone"),
        (["-zz"], "-zz"),
        (["-nlg", "3"], "-nlg"),
        (["--n-gpu-layer", "3"], "--n-gpu-layers"),
        (["--frobnicate"], "--frobnicate"),
        (["-vh"], "-vh"),
        (["-n=3"], "-n=3"),
        (["-fprompt.txt"], "-fprompt.txt"),
    ],
)
def test_unknown_words_are_not_taken_for_others(words: list[str], message: str) -> None:
    with pytest.raises(click.UsageError) as error:
        parse("run", ["-p", "x", *words])
    assert message in error.value.format_message()


@pytest.mark.parametrize(
    ("word", "near"),
    [("--foo", []), ("--lok", []), ("--polcy", ["--policy"]), ("--md", ["-md"]), ("--verbos", ["--verbose"])],
)
def test_only_near_misses_are_suggested(word: str, near: list[str]) -> None:
    with pytest.raises(click.NoSuchOption) as error:
        parse("run", ["-p", "x", word])
    assert (error.value.possibilities or []) == near


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--n-predict", "7"], "predict", 7),
        (["--n_predict", "7"], "predict", 7),
        (["-n7"], "predict", 7),
        (["-t4,2"], "threads", (4, 2)),
        (["--threads=-1"], "threads", ()),
        (["--predict=7"], "predict", 7),
        (["-n", "-2"], "predict", -2),
        (["-b", "4096"], "batch_size", 4096),
        (["-ngl", "all"], "n_gpu_layers", (-1,)),
        (["--gpu-layers", "auto"], "n_gpu_layers", (-2,)),
        (["-fa", "on", "-no-cnv", "--no-warmup", "--color", "auto", "-n", "3"], "predict", 3),
        (["-p", "-hf is a flag"], "prompt", "-hf is a flag"),
        (["--draft-p-min", "0.5", "--draft-n", "9"], "accept_cutoff", 0.5),
        (["--spec-draft-model", "d.gguf"], "drafts", (Path("d.gguf"),)),
        (["-f", "-"], "file", Path("-")),
    ],
)
def test_llama_cpps_spellings(words: list[str], name: str, value: object) -> None:
    assert parse("run", words)[name] == value


def test_own_options_come_before_llama_cpps() -> None:
    assert parse("bench", ["-r", "3"])["repetitions"] == 3
    assert parse("run", ["-p", "x", "-r", "3"])["stops"] == ("3",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"a\nb\tc\rd", "a\nb\tc\rd"),
        (r"\\n", r"\n"),
        (r"\'\"", "'\""),
        (r"\x41\xc3\xa9", "Aé"),
        (r"\x4", r"\x4"),
        (r"\q\e", r"\q\e"),
        ("\\", "\\"),
        ("é\u2603", "é\u2603"),
    ],
)
def test_escapes_of_a_prompt(text: str, expected: str) -> None:
    assert unescape(text) == expected


def test_escapes_for_bytes_that_are_not_utf_8() -> None:
    with pytest.raises(UserError, match="--no-escape"):
        unescape(r"caf\xe9")


def test_the_prompt_is_read_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("def f(a):\n    return a\n\n")
    common = ["-n", "1", "--temp", "0", "-t", "1"]
    from_file = run_json(1, ["-f", str(tmp_path / "prompt.txt"), *common])["prompt_tokens"]
    assert from_file == run_json(1, ["-p", r"def f(a):\n    return a\n", *common, "-b", "100000"])["prompt_tokens"]
    literal = run_json(1, ["-p", r"def f(a):\n    return a\n", *common, "--no-escape"])["prompt_tokens"]
    assert literal != from_file
    nul = finish(1, ["run", "-p", r"a\x00b", *common])
    assert nul.returncode == 0 and "Traceback" not in nul.stderr


# -- help, version, completion


@pytest.mark.parametrize("name", ["run", "chat", "batch", "serve", "bench", "plan", "measure"])
def test_help_has_the_usual_options_first_and_the_others_under_headings(name: str) -> None:
    text = COMMANDS[name].get_help(click.Context(COMMANDS[name], info_name=name))
    first, *groups = re.split(r"\n\n(?=[A-Z][a-z ]+:\n)", text[text.index("\nOptions:\n") :])
    assert 1 <= len(re.findall(r"^  -", first, re.MULTILINE)) <= 11  # with --help
    headings = [group.partition(":")[0] for group in groups]
    assert "Ranks" in headings and "Numerics" in headings and len(set(headings)) == len(headings)


def test_every_setting_of_a_job_is_an_option() -> None:
    declared = {name for name, *_ in options_of().settings()}
    assert declared <= {param.name for name in ("run", "batch") for param in COMMANDS[name].params}


def test_help_without_arguments_comes_in_lines() -> None:
    for arguments in ([], ["models"]):
        done = finish(1, arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("Usage: pipeinfer") and len(done.stderr.splitlines()) > 5


def test_an_option_before_the_command() -> None:
    done = finish(1, ["-m", "x.gguf"])
    assert done.returncode == 2 and "pipeinfer run" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_the_version_names_llama_cpps(n_ranks: int) -> None:
    done = finish(n_ranks, ["--version"])
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    assert re.fullmatch(
        r"pipeinfer [\d.]+, llama\.cpp \d\S+, ggml \d\S+, llama-cpp-python \d\S+, Python 3\S+, mpi4py .*, Linux\S+",
        line,
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("pipeinfer ru", "plain,run"),
        ("pipeinfer run --numerics ", "plain,fast"),
        ("pipeinfer run -m ", "file,"),
        ("pipeinfer run --slice-cache ", "dir,"),
        ("pipeinfer bench --policy it", "plain,iterative"),
    ],
)
def test_shell_completion(words: str, expected: str) -> None:
    asked = {"_PIPEINFER_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "pipeinfer"], capture_output=True, text=True, env=environment() | asked
    )
    assert done.returncode == 0 and expected in done.stdout.splitlines(), done.stderr


def test_the_completion_script_is_printed() -> None:
    asked = os.environ | {"_PIPEINFER_COMPLETE": "bash_source"}
    done = subprocess.run(
        [sys.executable, "-m", "pipeinfer"], capture_output=True, text=True, env=environment() | asked
    )
    assert done.returncode == 0 and "complete -o nosort -F" in done.stdout
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0


@pytest.mark.parametrize(
    ("named", "given", "meant"),
    [
        (None, {}, "auto"),
        (None, {"accept_cutoff": 0.1}, "pipeinfer"),
        (None, {"width": 2}, "pipeinfer"),
        (None, {"n_draft": 2}, "auto"),
        (None, {"width": 2, "n_draft": 2}, "auto"),
        ("flowspec", {}, "flowspec"),
        ("pipedec", {"width": 2}, "pipedec"),
    ],
)
def test_an_option_of_pipeinfer_means_it(named: str | None, given: dict[str, int], meant: str) -> None:
    assert select_policy(named, True, given) == meant
    assert select_policy(None, False, given) == "iterative"


def plan_of(exact_rows: Sequence[tuple[tuple[int, str], ...]] = ((),) * 4, **options: Any) -> JobPlan:
    """On four ranks, all of which have layers of the target."""
    hosts = [Host(name, frozenset({0}), 1, exact_rows=each) for name, each in zip("abcd", exact_rows, strict=True)]
    return lay_out(options_of(model=TARGET, **options), hosts, read_model_info(TARGET), [], 512, 32)


def test_exact_numerics_on_gpus_of_llama_are_not_promised() -> None:
    exact, fast = plan_of(), plan_of(numerics="fast")
    line = inexact_line(exact, {0: "", 1: "a GPU", 2: "a GPU"})
    assert "does not hold for the layers of ranks 1, 2, on GPUs of llama.cpp's: rows have other bits" in line
    assert "-ngl 0" in line
    assert inexact_line(exact, {0: "", 1: ""}) == inexact_line(fast, {1: "a GPU"}) == ""


@pytest.mark.parametrize(
    ("found", "at_once", "name", "said"),
    [
        ([((32, "abcdef"),), ((7, "abcdef"), (32, "abcdef"))], 7, "exact-gpu-abcd", ""),
        ([((32, "abcdef"),), ((0, "abcdef"), (32, "abcdef"))], 0, "exact-gpu", "beside others on ranks 1, 3, so that"),
        ([((32, "abcdef"),), ((7, "abcdef"), (32, "123456"))], 0, "exact-gpu", "devices of several kinds have other"),
    ],
)
def test_exact_numerics_on_gpus_hold_where_all_devices_have_the_same_bits(
    found: list[tuple[tuple[int, str], ...]], at_once: int, name: str, said: str
) -> None:
    plan = plan_of([*found, *found], n_gpu_layers=(ALL_LAYERS,))
    assert (plan.numerics.at_once, plan.numerics.name) == (at_once, name)
    line = inexact_line(plan, dict.fromkeys(range(4), "a GPU"))
    assert (said in line) if said else line == ""
    assert plan_of([*found, *found]).numerics.at_once == 0, "no layer is on a GPU"


def test_exact_numerics_of_torch_want_devices_of_one_kind() -> None:
    exact = plan_of(backend=(Backend.parse("torch"),))
    assert inexact_line(exact, {1: "NVIDIA H200", 2: "NVIDIA H200"}) == ""
    line = inexact_line(exact, {1: "NVIDIA H200", 2: "NVIDIA H200", 3: ""})
    assert "ranks 1, 2 on NVIDIA H200, rank 3 on a CPU" in line


def test_measurements_read_nothing_from_an_earlier_job() -> None:
    """The first generation would leave the next one's prompt on the disk."""
    for name in ("bench", "perplexity", "measure"):
        command = cli.get_command(click.Context(cli), name)
        kept = {"kv_disk", "kv_dir", "kv_read_only", "cache_ram"}
        assert command and kept.isdisjoint(param.name for param in command.params)
