"""A long prompt on the hosts of a cluster: `python benchmarks/long_prompt.py -m TARGET --questions FOLDER`.

A server over 1, 2, 4 and 8 hosts, network namespaces with a rank each (root, MPICH), is asked a chat of two turns with
twelve tools, as an agent's first turns are. Ranks and messages take the times of a profile, in which some real seconds
count as one (`--pace PROFILE*K`). Beside the time to the first token stands that of one host, and what a pipeline
whose stages are never empty would take.

Texts over all numbers of hosts are compared; the exit code is 1 if one differs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from harness import late_ranks

from pipeinfer.cluster.hosts.host import processor_name
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.text import count_text, markdown_table
from tests.support.namespaces import Hosts, hosts, missing

PORT = 8080
START_S, STOP_S = 600, 30
SYSTEM = "You are an assistant with tools. Call one where it helps, and answer in one sentence otherwise."
TURNS = ("What do these reports have in common?", "Which of them would you read first, and why?")
TOOLS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "read_file": ("Read a text file of the project.", {"path": "string", "first_line": "integer"}),
    "write_file": ("Write a text file, and replace what is there.", {"path": "string", "content": "string"}),
    "list_folder": ("List the files of a folder.", {"path": "string", "recursive": "boolean"}),
    "search_text": ("Find lines that match a regular expression.", {"pattern": "string", "folder": "string"}),
    "run_command": ("Run a shell command and return its output.", {"command": "string", "timeout_s": "number"}),
    "fetch_page": ("Fetch a web page as plain text.", {"url": "string", "most_characters": "integer"}),
    "search_web": ("Search the web and return titles with addresses.", {"query": "string", "n_results": "integer"}),
    "send_mail": ("Send a message to a person of the address book.", {"to": "string", "text": "string"}),
    "add_event": ("Add an event to the calendar.", {"title": "string", "begin": "string", "minutes": "integer"}),
    "query_table": ("Run a query on the database, read-only.", {"sql": "string", "n_rows": "integer"}),
    "draw_chart": ("Draw a chart of columns of a table.", {"columns": "string", "kind": "string"}),
    "translate": ("Translate a text.", {"text": "string", "language": "string"}),
}
COLUMNS = ("hosts", "turn", "read", "cached", "first token", "read/s", "of one host", "of a full pipeline", "K", "late")

PAGE = """# A long prompt on the hosts of a cluster

A chat with {n_tools} tools and reports of {n_tokens} tokens in its first question, on {model}, without
guesses, exact numerics. Measured by `python benchmarks/long_prompt.py` on {machine}: one rank a host of
the profile [`{profile}`](../reference/profiles.md), pair `{pair}`. Ranks, messages and texts are real. The times of a
rank are those of the profile for the pair's target: this model computes less, for ranks to keep the times.
{same}

* `read`, `cached`: tokens of the prompt that were evaluated, and that were there from the turn before. `first token`:
  seconds from the request to it. `read/s`: tokens evaluated, over that time.
* `of one host`: `read/s` over that of one host. `of a full pipeline`: the same over the number of hosts; 1.00 would be
  stages that are never empty, and messages that take no time.
* `K`: real seconds that count as one; `late`: ranks that needed more time than the profile gives, and for how
  much of it; the figures are smaller by up to as much.

{table}
"""


@dataclass(frozen=True)
class Turn:
    """An answer and its times."""

    n_hosts: int
    number: int
    timings: Mapping[str, Any]
    text: str
    dilation: float
    late: str

    @property
    def speed(self) -> float:
        """Tokens of the prompt a second."""
        return float(self.timings["prompt_n"] / self.timings["ttft_s"])


@click.command(help=__doc__)
@click.option("-m", "target", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--profile", default="ethernet", show_default=True, help="As for `--pace`.")
@click.option("--pair", default="qwen-1.5b-0.5b", show_default=True)
@click.option("--hosts", "counts", default="1,2,4,8", show_default=True)
@click.option("--questions", type=click.Path(exists=True, path_type=Path), default=Path("../shared/prompts"))
@click.option("--prompt", "n_prompt", default=25_000, show_default=True, help="Tokens of the reports.")
@click.option("--tokens", default=32, show_default=True, help="Of an answer.")
@click.option("--dilation", default=3.0, show_default=True, help="K where each host has one core.")
@click.option("-o", "output", type=click.Path(path_type=Path), required=True, help="The page.")
def main(
    target: Path,
    profile: str,
    pair: str,
    counts: str,
    questions: Path,
    n_prompt: int,
    tokens: int,
    dilation: float,
    output: Path,
) -> None:
    if why := missing():
        raise click.ClickException(f"no hosts can be made here: {why}")
    reports = reports_of(questions / "sum.jsonl", target, n_prompt)
    turns = list[Turn]()
    for n_hosts in map(int, counts.split(",")):
        # all stages compute at once, so that each has its share of the cores
        n_cores = len(os.sched_getaffinity(0))
        n_threads = max(1, n_cores // n_hosts)
        factor = dilation * max(1.0, n_hosts / n_cores) / n_threads
        pace = f"{profile}:{pair}*{factor:g}"
        words = ["-m", str(target), "-md", "none", "--policy", "iterative", "-c", str(n_prompt + 6000), "-np", "1"]
        with tempfile.TemporaryDirectory() as folder, hosts(n_hosts, Path(folder)) as on:
            with server(on, [*words, "-t", str(n_threads), "--pace", pace], Path(folder)) as log:
                answers = list(chat(on, Path(folder), reports, tokens))
            late = late_ranks(log.read_text())
        turns += [
            Turn(n_hosts, number, each["timings"], text_of(each), factor, late)
            for number, each in enumerate(answers, 1)
        ]
        same = all(turn.text == first.text for turn in turns for first in turns if first.number == turn.number)
        output.write_text(
            PAGE.format(
                n_tools=len(TOOLS),
                n_tokens=n_prompt,
                model=target.stem,
                machine=processor_name(),
                profile=profile,
                pair=pair,
                same="All texts are those of one host." if same else "**Texts differ.**",
                table="\n".join(markdown_table(COLUMNS, list(rows(turns)), COLUMNS[2:9])),
            )
        )
        print(f"  {n_hosts} hosts: {', '.join(f'{turn.speed:.1f}' for turn in turns[-2:])} tokens/s", file=sys.stderr)
    sys.exit(not same)


def reports_of(path: Path, target: Path, n_tokens: int) -> str:
    """The set's texts one after the other, so many tokens of them."""
    texts = [json.loads(line)["turns"][0] for line in path.read_text().splitlines()]
    tokenizer = Tokenizer(target)
    tokens = tokenizer.encode("\n\n".join(texts), add_special=False)[:n_tokens]
    return b"".join(map(tokenizer.decode_piece, tokens)).decode(errors="ignore")


@contextmanager
def server(on: Hosts, words: Sequence[str], folder: Path) -> Iterator[Path]:
    """A server on all hosts, which hears on the first one; gives the file of its standard error. Raises ClickException
    when it ends by itself."""
    log = folder / "serve.log"
    with log.open("w") as errors:
        job = on.start(["serve", "--port", str(PORT), *words], stderr=errors)
        try:
            end_s = time.monotonic() + START_S
            while post(on, "health").returncode:
                if job.poll() is not None or time.monotonic() > end_s:
                    raise click.ClickException(f"{len(on.names)} hosts: {log.read_text()}")
                time.sleep(1)
            yield log
            job.send_signal(2)
            job.wait(STOP_S)
        finally:
            on.end_all()


def post(on: Hosts, path: str, body: Path | None = None) -> subprocess.CompletedProcess[str]:
    """curl on the first host."""
    data = f"-H 'Content-Type: application/json' -d @{body}" if body else ""
    command = on.inside(on.names[0], f"exec curl -sSf http://127.0.0.1:{PORT}/{path} {data}")
    return subprocess.run(command, capture_output=True, text=True)


def chat(on: Hosts, folder: Path, reports: str, n_tokens: int) -> Iterator[dict[str, Any]]:
    """The answers of both turns. Raises ClickException for one that failed."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{reports}\n\n{TURNS[0]}"}]
    for question in (*TURNS[1:], ""):
        body = {"messages": messages, "tools": tools(), "max_tokens": n_tokens, "temperature": 0}
        (path := folder / "body.json").write_text(json.dumps(body))
        done = post(on, "v1/chat/completions", path)
        if done.returncode:
            raise click.ClickException(f"{len(on.names)} hosts: {done.stderr}")
        yield (answer := json.loads(done.stdout))
        messages += [{"role": "assistant", "content": text_of(answer)}, {"role": "user", "content": question}]


def tools() -> list[dict[str, Any]]:
    """TOOLS as a request has them."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": text,
                "parameters": {
                    "type": "object",
                    "properties": {each: {"type": kind} for each, kind in arguments.items()},
                    "required": list(arguments)[:1],
                },
            },
        }
        for name, (text, arguments) in TOOLS.items()
    ]


def text_of(answer: Mapping[str, Any]) -> str:
    message = answer["choices"][0]["message"]
    return str(message.get("content") or json.dumps(message.get("tool_calls")))


def rows(turns: Sequence[Turn]) -> Iterator[tuple[str, ...]]:
    alone = {turn.number: turn.speed for turn in turns if turn.n_hosts == 1}
    for turn in sorted(turns, key=lambda turn: (turn.n_hosts, turn.number)):
        over = turn.speed / alone[turn.number] if alone else None
        yield (
            str(turn.n_hosts),
            str(turn.number),
            str(turn.timings["prompt_n"]),
            str(turn.timings["cache_n"]),
            f"{turn.timings['ttft_s']:.1f}",
            f"{turn.speed:.1f}",
            f"{over:.2f}" if over else "-",
            f"{over / turn.n_hosts:.2f}" if over else "-",
            f"{turn.dilation:g}",
            late_text(turn.late),
        )


def late_text(late: str) -> str:
    """`7 ranks, at most 13%`: of what `late_ranks` gives."""
    shares = [int(share) for share in re.findall(r"(\d+)%", late)]
    return f"{count_text(len(shares), 'rank')}, at most {max(shares)}%" if shares else "-"


if __name__ == "__main__":
    main()
