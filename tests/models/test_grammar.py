"""Grammars: which tokens may follow, whatever was asked before; texts that are the same however they are computed."""

from __future__ import annotations

import ctypes
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from llama_cpp import llama_grammar

from pipeinfer.child import LimitedProcess
from pipeinfer.cluster.stages.runs import LocalPrunings, Samplers
from pipeinfer.cluster.stages.stage import StageWorker, room_for
from pipeinfer.cluster.wire import encode
from pipeinfer.core.drafting import guess_next
from pipeinfer.core.interfaces import Batch
from pipeinfer.core.runs import KvOp, Opening, OpKind, Row, Run, Verdict
from pipeinfer.core.sampling import SamplingParams, choose
from pipeinfer.core.types import ConstraintFailed, FloatArray
from pipeinfer.errors import HostFault, UserError
from pipeinfer.job.options.text_sections import GrammarOptions
from pipeinfer.job.requests import request
from pipeinfer.job.requests.request import check_constraints
from pipeinfer.models.demo import TARGET
from pipeinfer.models.llama.ggml import load_library
from pipeinfer.models.text.grammar import MAX_BYTES, TOO_MUCH, Grammar, Grammars, check_grammar
from pipeinfer.models.text.json_schema import read_schema, schema_grammar
from pipeinfer.models.text.reasoning import Constraints
from pipeinfer.models.text.tokenizer import Tokenizer, VocabularyFile
from tests.cluster.test_samplers import OneBuffer
from tests.support.gguf_factory import write_model
from tests.support.jobs import finish, plain_tokens_after, run_json
from tests.support.paces import pace_words, slow_target

ASSIGNMENT = 'root ::= [a-z]{1,8} " = " [0-9]{1,6} "\\n"'
SCHEMA = """{"type": "object", "required": ["name", "n"], "properties": {"name": {"type": "string", "maxLength": 12},
"n": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}}}"""
OBJECT = r"""root ::= "{" ws "\"name\":" ws string "," ws "\"n\":" ws list "}"
string ::= "\"" [a-z_]{0,12} "\"" # short
list ::= "[" ( [0-9]{1,4} ("," ws [0-9]{1,4}){0,2} )? "]"
ws ::= ([ \n] ws)? """
PROMPT = ["-p", "def read_lines(path):\\n    ", "-n", "64"]


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    found = Tokenizer(TARGET)
    yield found
    found.close()


@lru_cache(maxsize=1)
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: tokenizer)


def grammar_of(tokenizer: Tokenizer, text: str) -> Grammar:
    return grammars(tokenizer)(text)


def noise(seed: int, n_vocab: int = 4096) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, n_vocab).astype(np.float32)


def written(grammar: Grammar, params: SamplingParams, n: int = 40, seed: int = 0) -> list[int]:
    output = list[int]()
    while len(output) < n and output[-1:] != [2]:
        output.append(choose(noise(seed + len(output)), params, len(output), (), grammar.after(output)))
    return output


@pytest.mark.parametrize("params", [SamplingParams(temp=0.0), SamplingParams(seed=3), SamplingParams(seed=3, top_k=0)])
def test_what_is_written_is_what_the_grammar_says_and_then_it_ends(
    tokenizer: Tokenizer, params: SamplingParams
) -> None:
    texts = set()
    for seed in range(5):
        output = written(grammar_of(tokenizer, ASSIGNMENT), params, 200, 1000 * seed)
        text = b"".join(map(tokenizer.decode_piece, output)).decode()
        name, number = text.split(" = ")
        assert output[-1] == 2 and name.isalpha() and name.islower() and number[-1] == "\n" and number[:-1].isdigit()
        texts.add(text)
    assert len(texts) == 5


def allowed_by(grammar: Grammar, output: Sequence[int]) -> list[int]:
    logits = np.zeros(4096, np.float32)
    grammar.after(output).restrict(logits)
    return np.flatnonzero(np.isfinite(logits)).tolist()


def test_what_may_follow_depends_on_the_output_alone(tokenizer: Tokenizer) -> None:
    """A tree of right and wrong branches, asked about in any order, also when there are more than are kept."""
    text = schema_grammar(read_schema(SCHEMA))
    output, rng = written(grammar_of(tokenizer, text), SamplingParams(seed=8), 30), random.Random(4)
    paths = [output[:end] for end in range(len(output) + 1)]
    paths += [
        [*output[: rng.randrange(len(output))], *rng.choices(range(4096), k=rng.randrange(4))] for _ in range(120)
    ]
    paths += [[2], [2, 2], [*output, 2], [4095, 0, 1]]
    expected = [allowed_by(grammar_of(tokenizer, text), path) for path in paths]
    order, shared = rng.sample(range(len(paths)), len(paths)), grammar_of(tokenizer, text)
    assert {at: allowed_by(shared, paths[at]) for at in order} == dict(enumerate(expected))
    assert expected[-1] == expected[-3] == [2] and len({len(each) for each in expected}) > 5
    for path, ids in zip(paths[:60], expected, strict=False):
        tried = [*ids[:3], *rng.sample(range(4096), 3)]
        assert [shared.after(path).has(token) for token in tried if token != 2] == [
            token in ids for token in tried if token != 2
        ]


def test_where_nothing_may_follow_the_text_ends(tokenizer: Tokenizer) -> None:
    grammar = grammar_of(tokenizer, 'root ::= "a"')
    for logit_bias in ("", "2-inf"):
        params = SamplingParams(seed=1, logit_bias=logit_bias)
        assert choose(noise(1), params, 5, (), grammar.after(tokenizer.encode("b", False))) == 2


def tree_runs(params: SamplingParams, words: Sequence[int]) -> list[Run]:
    """A prompt; then runs of two branches each, the second of which has tokens that the grammar does not let pass."""
    runs = [Run(1, [Row(1, 300 + at, at, (0,), int(at == 4)) for at in range(5)], opens={1: Opening(params, 5)})]
    for number in range(6):
        first = 5 + 2 * number
        ops = [KvOp(OpKind.COPY, 0, 1, 0, first)]
        rows = [Row(1, words[first], first, (0,)), Row(1, words[first + 1], first + 1, (0,))]
        rows += [Row(1, 3, first, (1,)), Row(1, 2, first + 1, (1,))]
        runs.append(Run(number + 2, rows, ops))
    return [*runs, Run(9, [Row(1, 7, 17, (0,))], [KvOp(OpKind.CLOSE, 1)], {})]


class Tree(OneBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[int, int] = {}

    def next_position(self, seq: int) -> int:
        return self.ends.get(seq, 0)

    def apply(self, ops: Sequence[KvOp]) -> None:
        self.ends |= {op.dst: op.last for op in ops if op.kind is OpKind.COPY}

    def evaluate(self, batch: Batch, stop: Callable[[], bool]) -> FloatArray | None:
        for position, (seq, *_) in zip(batch.positions.tolist(), batch.seqs, strict=True):
            self.ends[seq] = position + 1
        logits = super().evaluate(batch, stop)
        return None if logits is None else logits[:, :4096]


def test_a_stage_that_is_first_asked_in_the_middle_of_an_output_knows_where_that_began(tokenizer: Tokenizer) -> None:
    """The output so far is "ab": after it the grammar lets digits pass and nothing else."""
    text, params = tokenizer.encode("ab", False), SamplingParams(temp=0.0, grammar='root ::= "ab" [0-9]+')
    worker = StageWorker(Tree(), time.monotonic, True, constrain=Constraints(Grammars(lambda: tokenizer)))
    rows = [Row(1, 300, 0, (0,), 0), *(Row(1, token, at, (0,), 0) for at, token in enumerate(text, 1))]
    rows[-1].n_wanted = 1
    verdict = worker.process(room_for(encode(Run(1, rows, opens={1: Opening(params, 1)})), 4), LocalPrunings())
    assert isinstance(verdict, Verdict)
    assert verdict.tokens[-1] in allowed_by(grammar_of(tokenizer, params.grammar), text)


@pytest.mark.parametrize("temp", [0.0, 0.9])
def test_threads_choose_the_same_in_a_tree_with_wrong_branches(tokenizer: Tokenizer, temp: float) -> None:
    params = SamplingParams(seed=2, temp=temp, grammar="root ::= [a-z ]+", repeat_penalty=1.1)
    verdicts, words = [], allowed_by(grammar_of(tokenizer, params.grammar), [])
    for n_threads in (0, 1, 3):
        worker = StageWorker(Tree(), time.monotonic, True, constrain=Constraints(Grammars(lambda: tokenizer)))
        samplers, nothing = Samplers(n_threads, lambda: True) if n_threads else None, LocalPrunings()
        transactions = [room_for(encode(run), 4) for run in tree_runs(params, words)]
        found: list[Any] = [worker.process(each, nothing, samplers) for each in transactions[:-1]]
        if samplers:
            samplers.close()
            found = list(iter(samplers.ready, None))
            assert worker.stats.n_for_samplers == len(found)
        verdicts.append([verdict.tokens for verdict in found])
        assert len(worker._constraints) == 1
        worker._keep_books(transactions[-1])
        assert not worker._constraints and not worker._opened, "what is kept of a request goes when it ends"
    assert verdicts[0] == verdicts[1] == verdicts[2] and len({*verdicts[0]}) > 4
    free = SamplingParams(seed=2, temp=temp, repeat_penalty=1.1)
    worker = StageWorker(Tree(), time.monotonic, True, constrain=Constraints(Grammars(lambda: tokenizer)))
    found = [worker.process(room_for(encode(run), 4), nothing) for run in tree_runs(free, words)[:-1]]
    assert [verdict.tokens for verdict in found] != verdicts[0]


def test_a_vocabulary_stays_though_its_file_goes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_model(tmp_path / "m.gguf", part_tensors=10)
    part = next(tmp_path.glob("m-00001-*"), path)
    whole = Tokenizer(part)
    held = VocabularyFile(part)
    part.unlink()
    found = held.open()
    held.close()
    assert found.pieces == whole.pieces and found.encode("the model a b") == whole.encode("the model a b")
    shipped = VocabularyFile(Path(TARGET)).open()
    assert shipped.pieces == tokenizer.pieces and shipped.is_end(2)


def test_threads_that_need_a_vocabulary_at_once_open_it_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    openings = []

    def open_slowly(file: VocabularyFile) -> Tokenizer:
        openings.append(file)
        time.sleep(0.1)
        return tokenizer

    monkeypatch.setattr(VocabularyFile, "_open", open_slowly)
    file = VocabularyFile(Path(TARGET))
    with ThreadPoolExecutor(2) as threads:
        assert [each.result() for each in [threads.submit(file.open) for _ in range(2)]] == [tokenizer] * 2
    file.close()
    assert len(openings) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("root ::= b", "it has no rule b"),
        ('x ::= "a"', "it has no rule root"),
        ("root ::= " + "(" * 9, "a ( is not closed"),
        ('root ::= "a" )', "a ) closes nothing"),
        ("root ::= [z-a]", "ends before it begins"),
        ('root ::= "a"{3,2}', "{3,2} are no bounds"),
        ('root ::= "\\q"', "is no escape"),
        ('root ::= "\ud800"', "lone surrogate"),
        ("root ::= <nothing>", "names the token <nothing>, which the vocabulary does not have"),
        ("root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, TOO_MUCH),
        ("root ::= " + "(" * 5000 + '"a"' + ")?" * 5000, TOO_MUCH),
        ('root ::= r2\nr1 ::= ("\\n")*\nr2 ::= (((r1){2,5}){1,5} ((r2)+)+)*', TOO_MUCH),
    ],
    ids=lambda value: value[:40].encode("ascii", "replace"),
)
def test_what_is_no_grammar_is_said_and_ends_nothing(tokenizer: Tokenizer, text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_grammar(tokenizer, text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "n_asked"),
    [
        ({"tokens": [], "wrong": "some fault"}, 1),
        ({"error": "takes more than 1 s"}, 1),
        (HostFault("is not done after 120 s"), 2),
    ],
)
def test_what_is_refused_is_checked_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any] | HostFault, n_asked: int
) -> None:
    ask = Mock(side_effect=[answer] * 2)
    monkeypatch.setattr(LimitedProcess, "ask", ask)
    for _ in range(2):
        with pytest.raises(UserError):
            check_grammar(tokenizer, f"root ::= # {answer}")
    assert ask.call_count == n_asked


def test_modules_of_the_current_directory_are_not_imported(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    check_grammar(tokenizer, 'root ::= "only checked here"')


LATE = 'root ::= "' + "a" * 600 + '" r2\nr1 ::= ("\\n")*\nr2 ::= (((r1){2,5}){1,5} ((r2)+)+)*'
"""What takes all there is comes behind what is looked at beforehand."""


def test_what_takes_too_much_fails_whatever_was_asked_before(tokenizer: Tokenizer) -> None:
    check_grammar(tokenizer, LATE)
    newline = tokenizer.encode("\n", False)[-1:]
    grammar, before = grammar_of(tokenizer, LATE), tokenizer.encode("x" + "a" * 600, False)[1:]
    assert b"".join(map(tokenizer.decode_piece, before)) == b"a" * 600
    begin_s, n = time.monotonic(), 0
    with pytest.raises(ConstraintFailed):
        for n in range(1000):
            allowed_by(grammar, [*before, *newline * n])
    assert time.monotonic() - begin_s < 30
    fresh = grammar_of(tokenizer, LATE)
    for _ in range(2):
        with pytest.raises(ConstraintFailed):
            allowed_by(fresh, [*before, *newline * n])
        assert allowed_by(fresh, before[:-1]) == allowed_by(grammar, before[:-1]) != []


WORDS = ("self", "return", "select", "delete", "left", "nets", "date", "rats")


def test_what_is_allowed_does_not_depend_on_what_was_asked_before(tokenizer: Tokenizer) -> None:
    """From one branch of a tree to another with as many bytes, after which words go on with the same letter."""
    text = f"root ::= {' | '.join(map(json.dumps, WORDS))}"
    for first, second in permutations(WORDS, 2):
        for n in range(1, min(len(first), len(second))):
            before, output = (tokenizer.encode(f"({word[:n]}", False) for word in (first, second))
            grammar = grammar_of(tokenizer, text)
            allowed_by(grammar, before[1:])
            assert allowed_by(grammar, output[1:]) == allowed_by(grammar_of(tokenizer, text), output[1:]), (
                first,
                second,
            )


def test_limits_of_a_grammar(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="131072 are possible"):
        check_grammar(tokenizer, "#" * (MAX_BYTES + 1))
    assert grammar_of(tokenizer, 'root ::= "(((" [(] # (((').after([]).has(tokenizer.encode("(", False)[0])
    with pytest.raises(UserError, match="leave one of them out"):
        check_constraints(SamplingParams(grammar='root ::= "a"'), True, tokenizer)


@pytest.mark.parametrize("params", [SamplingParams(temp=0.0), SamplingParams(seed=3), SamplingParams(seed=3, top_k=0)])
def test_a_draft_guesses_what_the_target_would_choose_and_only_what_may_follow(
    tokenizer: Tokenizer, params: SamplingParams
) -> None:
    grammar = grammar_of(tokenizer, ASSIGNMENT)
    output = written(grammar, params, 200)
    for at, token in enumerate(output):
        allowed = grammar.after(output[:at])
        guesses = guess_next(noise(at), params, at, (), 4, True, allowed)
        assert guesses[0].token == token and all(allowed.has(guess.token) for guess in guesses)
        assert all(0 < guess.probability <= 1 for guess in guesses)


def test_a_schema_may_ask_for_much_but_not_for_all_memory(tokenizer: Tokenizer) -> None:
    schema: dict[str, Any] = {"type": "array", "items": {"type": "string", "maxLength": 1500}, "maxItems": 900}
    text = schema_grammar(schema)
    check_grammar(tokenizer, text)
    first, second = (tokenizer.encode(text, False) for text in ("[", "]"))
    assert grammar_of(tokenizer, text).after(first[-1:]).has(second[-1])
    check_grammar(tokenizer, schema_grammar({**schema, "maxItems": 10**9}))
    pair = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 3}
    grammar = grammar_of(tokenizer, schema_grammar(pair))
    said = [tokenizer.encode(text, False)[1:] for text in ("a[1", "a[1,1", "a[1,1,1", "a[1,1,1,1")]
    assert [grammar.after(output).has(second[-1]) for output in said] == [False, True, True, False]
    with pytest.raises(UserError, match="minItems"):
        check_grammar(tokenizer, schema_grammar({**pair, "maxItems": 1}))


# -- llama.cpp's own engine


class Plain:
    """libllama's grammar, and the output it is behind."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.lib, self.tokenizer = load_library(), tokenizer
        self.sampler = self.lib.llama_sampler_init_grammar(tokenizer._vocab, text.encode(), b"root")
        assert self.sampler, text

    def allowed(self) -> set[int]:
        found = np.zeros(self.tokenizer.n_vocab, [("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
        found["id"] = np.arange(len(found))
        data = ctypes.cast(found.ctypes.data, ctypes.POINTER(self.lib.llama_token_data))
        array = self.lib.llama_token_data_array(data=data, size=len(found), selected=-1, sorted=False)
        self.lib.llama_sampler_apply(self.sampler, ctypes.byref(array))
        return {*np.flatnonzero(~np.isneginf(found["logit"])).tolist()}

    def accept(self, token: int) -> None:
        self.lib.llama_sampler_accept(self.sampler, token)

    def close(self) -> None:
        self.lib.llama_sampler_free(self.sampler)


def some_gbnf(rng: random.Random, depth: int = 3) -> str:
    kind = rng.choice("lcgrs" if depth else "lc")
    if kind == "l":
        return '"' + "".join(rng.choices(["a", "b", "é", " ", "\\n", "\\x41", "\\u00e9"], k=rng.randint(1, 3))) + '"'
    if kind == "c":
        return rng.choice(["[a-z]", "[^a]", "[é-ü]", ".", "[ \\n]", "[ab\\]-]", "[^\\x00-\\x1f]"])
    parts = some_gbnf(rng, depth - 1), some_gbnf(rng, depth - 1)
    if kind == "r":
        return f"({parts[0]}){rng.choice(['*', '+', '?', '{2}', '{1,3}', '{2,}', '{0,2}'])}"
    return f"({parts[0]} | # or\n {parts[1]})" if kind == "g" else f"{parts[0]} {parts[1]}"


def names_in(module: Any) -> list[str]:
    return [name for name in dir(module) if name.endswith("_GBNF")]


@pytest.mark.parametrize("name", [*names_in(llama_grammar), *range(30)])
def test_what_may_follow_is_what_llama_cpp_lets_follow(tokenizer: Tokenizer, name: Any) -> None:
    """Of tokens that are text: characters that no grammar can mean, and control tokens, are never let through here."""
    rng = random.Random(str(name))
    rest = rng.choice(["", " x", ' | "q"'])
    text = (
        getattr(llama_grammar, name)
        if isinstance(name, str)
        else (f'root ::= {some_gbnf(rng)} ("," x)*\nx ::= [b-d] {some_gbnf(rng)}{rest}')
    )
    texts = {token for token in range(tokenizer.n_vocab) if is_text(tokenizer, token)}
    plain, grammar, output = Plain(tokenizer, text), grammar_of(tokenizer, text), list[int]()
    for _ in range(25):
        expected = plain.allowed() & texts
        assert {*allowed_by(grammar, output)} & texts == expected, (text, output)
        if not (further := sorted(expected - {*tokenizer.ends})):
            break
        output.append(rng.choice(further))
        plain.accept(output[-1])
    plain.close()


def is_text(tokenizer: Tokenizer, token: int) -> bool:
    """Whether it is an end, or whole characters."""
    piece = tokenizer.decode_piece(token)
    try:
        return tokenizer.is_end(token) or (bool(piece) and "\0" not in piece.decode())
    except UnicodeDecodeError:
        return False


# -- jobs


def test_greedy_text_is_plain_llama_cpps_at_every_rank_count(tmp_path: Path) -> None:
    words = [*PROMPT, "--temp", "0", "--grammar", OBJECT]
    one = run_json(1, [*words, "--policy", "iterative"])
    assert one["tokens"] == plain_tokens_after(Path(TARGET), one, 64, OBJECT)
    assert one["finish"] == "end" and set(json.loads(one["text"])) == {"name", "n"} and len(one["grammar"]) == 16
    assert run_json(2, [*words, "--policy", "iterative"])["tokens"] == one["tokens"]
    pace = pace_words(tmp_path, slow_target(5.0))  # guesses are in time
    three = run_json(3, [*words, "--policy", "pipeinfer", *pace])
    assert three["tokens"] == one["tokens"]
    assert three["speculation"]["hit_rate"] > 0.5, "the draft knows the grammar too"


def test_a_schema_is_held_to_at_every_rank_count() -> None:
    words = [*PROMPT, "--temp", "0", "--json-schema", SCHEMA]
    one, three = (run_json(n, [*words, "--policy", policy]) for n, policy in ((1, "iterative"), (3, "pipeinfer")))
    assert one["tokens"] == three["tokens"] and one["finish"] == "end"
    assert set(json.loads(one["text"])) == {"name", "n"}


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_a_grammar_that_takes_too_much_ends_its_text_and_no_rank(n_ranks: int) -> None:
    done = finish(n_ranks, ["run", *PROMPT[:2], "-n", "1000", "--temp", "0", "--grammar", LATE, "--json"])
    assert done.returncode == 2 and TOO_MUCH in done.stderr and "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    assert found["finish"] == "failed" and found["text"].startswith("a" * 600)


def test_what_takes_too_much_behind_a_stop_string_is_not_asked_for(tmp_path: Path) -> None:
    """The draft is the target, so a verdict brings both."""
    (source := tmp_path / "in.jsonl").write_text(
        json.dumps({"prompt": "a", "n_predict": 1000, "temperature": 0, "grammar": LATE, "stop": ["\n" * 22]})
    )
    words = ["-m", TARGET, "-md", TARGET, "--policy", "speculative", "--draft", "16", "-t", "1"]
    done = finish(1, ["batch", str(source), "-o", str(tmp_path / "out.jsonl"), *map(str, words)])
    result = json.loads((tmp_path / "out.jsonl").read_text())
    assert result.get("finish") == "stop", (result, done.stderr)


def test_sampled_text_is_the_same_everywhere(tmp_path: Path) -> None:
    (tmp_path / "grammar.gbnf").write_text(ASSIGNMENT)
    words = [*PROMPT, "--temp", "1.2", "-s", "6", "--repeat-penalty", "1.1"]
    one = run_json(1, [*words, "--grammar-file", str(tmp_path / "grammar.gbnf"), "--policy", "iterative"])
    three = run_json(3, [*words, "--grammar", ASSIGNMENT, "--policy", "pipeinfer", "--sampler-threads", "2"])
    assert one["tokens"] == three["tokens"] and one["finish"] == "end" and " = " in one["text"]


def test_a_wrong_grammar_is_refused_before_anything_loads() -> None:
    done = finish(1, ["run", *PROMPT, "--grammar", "root ::= b"])
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "this is no grammar in llama.cpp's form (GBNF)" in done.stderr


def test_a_file_without_a_grammar_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(UserError, match=r"--grammar-file .*empty is empty"):
        request.grammar_of(GrammarOptions(grammar_file=tmp_path / "empty"))
