"""llama.cpp's options and variables: each of the pinned version's is there, without effect, or answered."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from docs.generate.commands import own_options
from pipeinfer.cli.bench import bench, perplexity_command
from pipeinfer.cli.commands import cli
from pipeinfer.cli.models import split_command
from pipeinfer.cli.options.llama_cpp import ARGUMENTS, HARMLESS, INSTEAD, OF_RUN, ignored_variables
from pipeinfer.cli.run import chat_command, run, run_options
from pipeinfer.cli.serve import batch_command, serve_command
from pipeinfer.cli.simulate import simulate_command
from pipeinfer.errors import UserError
from tests.support.jobs import ROOT, finish, run_json


def test_every_option_of_llama_cpp_is_answered_and_on_the_page() -> None:
    ours, page = own_options(), (ROOT / "docs/reference/llama-cpp.md").read_text()
    for _, flags in ARGUMENTS:
        assert [flag for flag in flags if f"`{flag}`" not in page] == []
        assert [flag for flag in flags if flag not in ours and flag not in INSTEAD and flag not in HARMLESS] == []
    for pattern in ('\'root ::= "yes" | "no"\'', "blk.(2|3).ffn_.*_exps=CPU", "<|im_start|>"):
        assert pattern.replace("|", "\\|") in page  # as it is typed; a table shows \| as |


def parsed(
    command: click.Command, words: list[str], monkeypatch: pytest.MonkeyPatch, **variables: str
) -> click.Context:
    for name, value in variables.items():
        monkeypatch.setenv(f"LLAMA_ARG_{name}", value)
    return command.make_context("x", words)


def test_variables_give_options_and_the_command_line_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "MODEL": "a b.gguf",
        "SPEC_DRAFT_MODEL": "c d.gguf",
        "CTX_SIZE": "77",
        "TOP_P": "0.5",
        "N_PREDICT": "9",
    }
    for command in (run, chat_command):
        found = parsed(command, ["-p", "x", "-n", "3"], monkeypatch, **variables).params
        assert (str(found["model"]), list(map(str, found["drafts"]))) == ("a b.gguf", ["c d.gguf"])
        assert (found["ctx_size"], found["top_p"], found["predict"]) == (77, 0.5, 3)
        found = parsed(command, ["-p", "x", "-md", "e.gguf"], monkeypatch).params
        assert list(map(str, found["drafts"])) == ["e.gguf"]
    assert parsed(bench, [], monkeypatch).params["ctx_size"] is None, "a benchmark is what its command line says"
    assert parsed(run, ["-p", "x"], monkeypatch, THREADS="-1").params["threads"] == ()
    found = parsed(run, ["-p", "x"], monkeypatch, FIT="off", FIT_TARGET="512", FIT_CTX="99").params
    assert (found["fit"], found["fit_target"], found["fit_ctx"]) == (False, 512, 99)
    for words, is_on in (
        ("--fit", True),
        ("-fit on", True),
        ("--fit off", False),
        ("--fit=0", False),
        ("--no-fit", False),
    ):
        assert parsed(run, ["-p", "x", *words.split()], monkeypatch).params["fit"] is is_on
    with pytest.raises(click.UsageError, match="--fit maybe: give on, off, or no value"):
        parsed(run, ["-p", "x", "--fit=maybe"], monkeypatch)
    with pytest.raises(click.BadParameter, match=r"'many' is not a whole number") as error:
        parsed(run, ["-p", "x"], monkeypatch, CTX_SIZE="many")
    assert "LLAMA_ARG_CTX_SIZE" in error.value.format_message()


def test_models_of_the_hub_are_named_as_in_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*words: str, **variables: str) -> tuple[str, list[str]]:
        values = parsed(run, ["-p", "x", *words], monkeypatch, **variables).params
        models = run_options(
            {name: value for name, value in values.items() if name not in ("chat", "conversation", "single_turn")}
        ).models
        return str(models.target), list(map(str, models.drafts))

    assert asked("-hf", "u/m:Q8_0") == ("hf:u/m:Q8_0", [])
    assert asked("--hf-repo=u/m", "-hff", "a/b.gguf", "-hfd", "u/d") == ("hf:u/m:a/b.gguf", ["hf:u/d"])
    assert asked("-m", "hf:u/m", "-md", "d.gguf", "-hfd", "u/d:Q4_0") == ("hf:u/m", ["d.gguf", "hf:u/d:Q4_0"])
    for wrong, why in (
        (["-hf", "m.gguf"], "'m.gguf' is no model on the hub"),
        (["-hf", "u/m", "-m", "m.gguf"], "--model m.gguf and --hf-repo u/m both name the target"),
        (["-hff", "m.gguf"], "--hf-file m.gguf is a file of no repository"),
    ):
        with pytest.raises((click.BadParameter, UserError), match=why):
            asked(*wrong)
    assert asked(HF_REPO="u/v", SPEC_DRAFT_HF_REPO="u/d") == ("hf:u/v", ["hf:u/d"])


def test_what_the_command_line_names_variables_do_not_name_again(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"HF_REPO": "u/v", "HF_FILE": "x.gguf", "SPEC_DRAFT_HF_REPO": "u/d", "MODEL": "a.gguf", "MODEL_DRAFT": "b"}
    for command in (run, batch_command, serve_command):
        words = ["in.jsonl", "-o", "out.jsonl"] if command is batch_command else []
        found = parsed(command, [*words, "-m", "m.gguf", "-md", "none"], monkeypatch, **others).params
        assert (str(found["model"]), found["hf_repo"], found["hf_file"]) == ("m.gguf", None, None)
        assert list(map(str, found["drafts"])) == ["none"] and found["hf_drafts"] == ()
        found = parsed(command, [*words, "-hf", "u/t", "-hfd", "u/e"], monkeypatch).params
        assert found["model"] is None and found["hf_file"] == "x.gguf", "a file of any repository"
        assert found["drafts"] == () and [name.repo for name in found["hf_drafts"]] == ["u/e"]


def test_variables_for_chats_do_not_hinder_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CHAT_TEMPLATE_FILE", "no.jinja")
    done = finish(1, ["run", "-md", "none", "-p", "x", "-n", "2"])
    assert done.returncode == 0 and "options are given by LLAMA_ARG_CHAT_TEMPLATE_FILE" in done.stderr, done.stderr
    assert finish(1, ["run", "-md", "none", "-p", "x", "-n", "2", "--chat"]).returncode == 2


@pytest.mark.parametrize("command", [batch_command, serve_command])
def test_who_batches_anyway_may_be_asked_to(command: click.Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["in.jsonl", "-o", "out.jsonl"] if command is batch_command else []
    parsed(command, [*words, "--cont-batching", "-cb", "--no-mmap"], monkeypatch)
    with pytest.raises(click.UsageError, match="one prompt a run"):
        parsed(run, ["-p", "x", "-cb"], monkeypatch)


def test_a_server_takes_what_it_does_anyway_and_answers_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed(serve_command, ["--reasoning-format", "deepseek", "--prefill-assistant", "--cache-prompt"], monkeypatch)
    parsed(serve_command, ["--no-skip-chat-parsing", "--reasoning", "auto"], monkeypatch)
    for words, says in (
        (["--reasoning-format", "none"], "requests say reasoning_format"),
        (["-rea", "off"], "requests say reasoning_format"),
        (["--skip-chat-parsing"], "requests say reasoning_format"),
        (["--verbose-prompt"], "POST /tokenize"),
    ):
        with pytest.raises(click.UsageError, match=says):
            parsed(serve_command, words, monkeypatch)
    with pytest.raises(click.UsageError, match="printed as the model writes it"):
        parsed(run, ["-p", "x", "--reasoning-format", "deepseek"], monkeypatch)
    taken = {"LLAMA_ARG_CONT_BATCHING": "1", "LLAMA_ARG_THINK": "deepseek", "LLAMA_ARG_CACHE_PROMPT": "1"}
    assert not list(ignored_variables(serve_command, taken))
    for name, value in (("THINK", "none"), ("REASONING", "off")):
        (line,) = ignored_variables(serve_command, {f"LLAMA_ARG_{name}": value})
        assert "requests say reasoning_format" in line
    assert any("one prompt a run" in line for line in ignored_variables(run, taken))


def test_a_chat_takes_or_answers_what_run_has_for_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(chat_command, ["-cnv", "-p", "-cnv"], monkeypatch).params["prompt"] == "-cnv"
    for flag, says in (("-st", "run --chat` asks"), ("--chat", "run --chat` asks"), ("--trace", "`pipeinfer run` has")):
        with pytest.raises(click.UsageError, match=f"{flag}: .*{says}"):
            parsed(chat_command, [flag], monkeypatch)
    assert OF_RUN.keys() <= {name for param in run.params for name in param.opts}


def test_bench_names_its_own_ablations_to_who_gives_those_of_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in ("--no-cancel", "--no-partitions", "--no-continuous", "--no-async"):
        with pytest.raises(click.UsageError, match=f"{flag}: .*bench --ablate cancel,"):
            parsed(bench, [flag], monkeypatch)


def test_what_counts_nodes_is_named_to_who_counts_ranks() -> None:
    for number in ("1", "4"):
        with pytest.raises(click.UsageError, match="-np: here --nodes N says how many nodes there are"):
            simulate_command.make_context("pipeinfer", ["-np", number])
        with pytest.raises(click.UsageError, match="-np: here --stages N says how many stages there are"):
            split_command.make_context("pipeinfer", ["-np", number])


def test_options_of_other_programs_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    for command, flag, says in ((perplexity_command, "-p", "-f FILE"), (bench, "-pg", "-p 512 -p 1024")):
        with pytest.raises(click.UsageError, match=f"{flag}: .*{says}"):
            parsed(command, [flag, "x"], monkeypatch)
    assert parsed(perplexity_command, ["-f", "x", "--chunks", "-1"], monkeypatch).params["chunks"] == -1


def test_variables_without_effect_are_named() -> None:
    def said(**variables: str) -> str:
        return "\n".join(ignored_variables(run, {f"LLAMA_ARG_{name}": value for name, value in variables.items()}))

    assert said(CTX_SIZE="5", PORT="8080", FLASH_ATTN="on", CPU_MOE="0", NO_CONTEXT_SHIFT="1", JINJA="1") == ""
    assert said(UBATCH="64") == said(MLOCK="1") == said(NO_MMAP="1") == "", "as the flags"
    assert said(MAIN_GPU="1") == f"LLAMA_ARG_MAIN_GPU is set and not read: {INSTEAD['-mg']}"
    assert said(FLASH_ATTN="off").endswith(INSTEAD["-fa"])
    assert "--policy" in said(DRAFT_MAX="4") and "give --draft" in said(DRAFT_MAX="4")
    assert "not known" in said(FROBNICATE="1")
    assert said(HF_REPO="x/y", OFFLINE="1", SPEC_DRAFT_HF_REPO="x/z") == "", "these are read"
    assert said(MAIN_GPU="1", MIROSTAT="1").count("\n") == 1


def test_variables_that_switch_off_do_so_with_any_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("1", "0", ""):
        monkeypatch.setenv("LLAMA_ARG_NO_REPACK", value)
        assert parsed(run, ["-p", "x"], monkeypatch).params["repack"] is False
    monkeypatch.delenv("LLAMA_ARG_NO_REPACK")
    for value, is_on in (("enabled", True), ("disabled", False), ("off", False)):
        monkeypatch.setenv("LLAMA_ARG_REPACK", value)
        assert parsed(run, ["-p", "x"], monkeypatch).params["repack"] is is_on
    assert parsed(run, ["-p", "x", "--repack"], monkeypatch).params["repack"] is True


def test_a_command_s_own_options_have_variables_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_N_PREDICT", "3")
    assert parsed(batch_command, ["in.jsonl", "-o", "out"], monkeypatch).params["predict"] == 3


def test_a_run_reads_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_N_PREDICT", "3")
    monkeypatch.setenv("LLAMA_ARG_UBATCH", "64")
    assert len(run_json(1, ["-md", "none", "-p", "x", "-t", "1", "--ignore-eos"])["tokens"]) == 3


def test_habits_of_llama_cpp_that_change_nothing_are_taken() -> None:
    words = [
        "-p",
        "x",
        "-ub",
        "64",
        "-tb",
        "8",
        "--color",
        "--log-disable",
        "-t",
        "-1",
        "--no-webui",
        "--color",
        "auto",
    ]
    found = run.make_context("run", [*words, "-st", "-n", "3"]).params
    assert (found["prompt"], found["predict"], found["threads"], found["single_turn"]) == ("x", 3, (), True)
    found = run.make_context("run", ["-p", "x", "--ubatch-size=64", "--json", "--threads-batch=4", "-n", "3"]).params
    assert found["json"] and found["predict"] == 3
    with pytest.raises(click.UsageError, match="-ub needs a value"):
        run.make_context("run", ["-p", "x", "-ub"])


@pytest.mark.parametrize(("given", "meant"), [("chta", "did you mean chat?"), ("frobnicate", "there are batch, bench")])
def test_a_command_that_is_misspelt_is_answered(given: str, meant: str) -> None:
    result = CliRunner().invoke(cli, [given])
    assert result.exit_code == 2 and f"there is no command '{given}'; {meant}" in result.output


def test_help_does_not_change() -> None:
    assert "-c, --ctx-size" in CliRunner().invoke(run, ["--help"]).output


def test_kinds_of_guesses_have_llama_cpp_s_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def guesses(*words: str, **variables: str) -> tuple[list[str], bool | None, str]:
        values = parsed(run, ["-p", "x", "-m", "m.gguf", *words], monkeypatch, **variables).params
        asking = ("chat", "conversation", "single_turn")
        options = run_options({name: value for name, value in values.items() if name not in asking})
        speculation = options.speculation
        return [str(draft) for draft in options.models.drafts], speculation.lookup, speculation.policy.name

    draft = ["-md", "d.gguf"]
    assert guesses("--spec-type", "none") == ([], None, "iterative") == guesses("--spec-type", "ngram-mod,none")
    assert guesses("--spec-type", "none", "--policy", "auto") == ([], False, "auto")
    assert (
        guesses("--spec-type", "ngram-simple") == ([], True, "auto") == guesses("--spec-type", "ngram-cache,ngram-mod")
    )
    assert guesses(*draft, "--spec-type", "draft-simple") == (["d.gguf"], None, "auto") == guesses(*draft)
    assert guesses(*draft, "--spec-type", "draft-eagle3,ngram-map-k") == (["d.gguf"], True, "auto")
    assert guesses("--spec-type", "draft-mtp") == (["mtp"], None, "auto")
    assert guesses("--spec-type", "draft-simple", "--no-lookup", *draft) == (["d.gguf"], False, "auto")
    for words, why in (
        (["--spec-type", "draft-simple"], "guesses with a draft, and -md names none; give -md FILE"),
        (["--spec-type", "draft-mtp", "-md", "none"], "guesses with a draft, and -md names none"),
        (["--spec-type", "none", *draft], "has no draft, and -md names one"),
        (["--spec-type", "ngram-simple", *draft], "or add draft-simple"),
        (["--spec-type", "ngram-simple", "--no-lookup"], "contradict each other"),
        (["--spec-type", "draft-dflash"], "cannot be loaded here"),
        (["--spec-type", "draft"], "'draft' is not one of"),
    ):
        with pytest.raises((click.BadParameter, UserError), match=why):
            guesses(*words)
    assert guesses(SPEC_TYPE="ngram-map-k4v") == ([], True, "auto")


def test_adapters_are_joined_by_commas_too(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-p", "x", "--lora", 'a.gguf,"b,c.gguf"', "--lora", "d.gguf", "--lora-scaled", "e:0.5,f:2"]
    values = parsed(run, words, monkeypatch).params
    assert list(map(str, values["lora"])) == ["a.gguf", "b,c.gguf", "d.gguf"]
    assert (
        list(map(str, values["lora_scaled"])) == ["e:0.5", "f:2"]
        and parsed(run, ["-p", "x"], monkeypatch).params["lora"] == ()
    )
    for wrong in ("a,,b", ",a", "a,"):
        with pytest.raises(click.BadParameter, match="has an empty part"):
            parsed(run, ["-p", "x", "--lora", wrong], monkeypatch)
    with pytest.raises(click.BadParameter, match="is not FILE:SCALE"):
        parsed(run, ["-p", "x", "--lora-scaled", "e:0.5,f"], monkeypatch)


@pytest.mark.parametrize("flag", ["--mmproj", "-mm", "--image", "--audio"])
def test_pictures_are_refused_with_a_way_out(flag: str) -> None:
    for command in (run, chat_command, serve_command):
        with pytest.raises(click.UsageError, match=r"models here read text alone.*llama-server of llama.cpp"):
            command.make_context("x", [flag, "a.png"])
