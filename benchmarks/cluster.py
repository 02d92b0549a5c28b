"""Real models on the hosts of a cluster: `python benchmarks/cluster.py -m TARGET -md DRAFT --questions FOLDER`.

Each host is a network namespace with a name and an address of its own, and has one rank (root, MPICH). Ranks and
messages take the times of a profile, in which some real seconds count as one (`--pace PROFILE*K`): so the cores of this
machine keep the times of all hosts. Models, messages, guesses and cancellations are real. K is doubled for each policy
until no rank is late. Beside each speed stands what `simulate` gives for the same tokens and guesses. It takes hours;
with `--keep` it goes on where it was.

Texts of all policies are compared; the exit code is 1 if one differs. Writes a page, and beside it a picture of the
speeds and a timeline of the first and the last setting on the most hosts.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from harness import answers, batch_words, job, late_ranks
from matplotlib import pyplot as plt

from experiments.record import Prompt, read_prompts, record_pair
from pipeinfer.cluster.hosts.host import processor_name
from pipeinfer.observe.figures import timings
from pipeinfer.policies import make_policy
from pipeinfer.text import markdown_table
from pipeinfer.virtual.choices import RecordedChoices, read_choices, write_choices
from pipeinfer.virtual.profile import load_profile
from pipeinfer.virtual.simulation import simulate
from plots.timeline import draw_timelines
from tests.support.namespaces import Hosts, hosts, missing

SETS = ("humaneval", "gsm8k", "mt_bench", "qa", "alpaca", "sum")
CODE = "humaneval"
N_CUT = 500  # characters of a question: what is measured is decoding
MAX_DILATION = 128
COLUMNS = ("hosts", "policy", "tokens/s", "of iterative", "on code", "simulated", "K", "late")


@dataclass(frozen=True)
class Setting:
    """A policy with its flags, and its name in `simulate`, which looks nothing up. `pipelined`: several hosts are at
    work at once."""

    title: str
    flags: Sequence[str]
    simulated: str = ""
    pipelined: bool = True

    @property
    def drafts(self) -> bool:
        return "none" not in self.flags


SETTINGS = (
    Setting("iterative", ("--policy", "iterative", "-md", "none"), "iterative", pipelined=False),
    Setting("speculative", ("--policy", "speculative"), "speculative", pipelined=False),
    Setting("pipeinfer, preset paper", ("--policy", "pipeinfer", "--preset", "paper")),
    Setting("pipeinfer", ("--policy", "pipeinfer"), "pipeinfer"),
    Setting("pipedec", ("--policy", "pipedec"), "pipedec"),
    Setting("flowspec", ("--policy", "flowspec"), "flowspec"),
    Setting("auto with the draft", ("--policy", "auto", "--no-lookup"), "auto"),
    Setting("auto with lookup", ("--policy", "auto", "-md", "none", "--lookup")),
    Setting("auto with both", ("--policy", "auto")),
)

PAGE = """# Real models on the hosts of a cluster

{target} with {draft} on {n_hosts} hosts of the profile [`{profile}`](../reference/profiles.md), pair `{pair}`,
measured by `python benchmarks/cluster.py` on {machine}: one rank a host. Ranks, messages, guesses and
cancellations are real, times are the profile's. Texts of
{n_tokens} tokens after questions of {n_sets} sets, {n_texts} in all, greedy, exact numerics; {rounds}.
{same}

* `tokens/s`: the mean over texts, and the least and the most of them; `of iterative`: the geometric mean over texts.
* `on code`: the same on HumanEval. `simulated`: what `simulate` gives for the same tokens and guesses, with prompts in
  blocks as exact numerics have them, as a share of the measured speed in the geometric mean; it looks nothing up and
  has no presets of papers there.
* Lookup copies from the question: where an answer begins by repeating it, as code does, texts of {n_tokens} tokens
  flatter it.
* `K`: real seconds that count as one, doubled until no rank needs more time than the profile gives it for over 2% of
  the time; `late`: ranks that do nevertheless.

{table}

![Speeds]({stem}.png)

*Bars: the mean over texts; thin lines: the least and the most; white marks: `simulate`.*

![Timeline]({stem}-timeline.png)

*Real jobs on {most} hosts over the same time, that of the profile.*
"""
N_PICTURED = 24  # tokens of the timeline's job


@dataclass(frozen=True)
class Measured:
    """Tokens a second of a setting in each text, the medians over rounds. `subject`: see `Bench.subject`. `same`: its
    texts are those of one rank."""

    subject: str
    n_hosts: int
    title: str
    speeds: Sequence[float]
    dilation: float
    late: str
    same: bool


@dataclass(frozen=True)
class Bench:
    """What all jobs share."""

    target: Path
    draft: Path
    profile: str
    pair: str
    prompts: Sequence[tuple[str, str]]
    choices: Sequence[RecordedChoices]
    n_tokens: int
    n_rounds: int
    folder: Path

    @property
    def subject(self) -> str:
        """What figures have in common that may stand on one page."""
        texts = f"{len(self.prompts)} texts of {self.n_tokens} tokens, {self.n_rounds} rounds"
        return f"{self.target.stem}, {self.draft.stem}, {self.profile}:{self.pair}, {texts}"

    def job(self, on: Hosts, setting: Setting, dilation: float) -> tuple[list[dict[str, Any]], str]:
        """The answers in the prompts' order, and late ranks. Raises ClickException when it fails."""
        words, output = batch_words(self.folder, self._requests, self.n_tokens)
        errors = self._run(on, setting, dilation, [*words, "--parallel", "1"])
        return answers(output), late_ranks(errors)

    def trace(self, on: Hosts, setting: Setting, dilation: float) -> Path:
        """Of a job that answers the last question."""
        trace, (_, text) = self.folder / f"{setting.title}.json", self.prompts[-1]
        words = ["run", "--chat", "-p", text, "--temp", "0", "-n", str(N_PICTURED), "--trace", str(trace)]
        self._run(on, setting, dilation, words)
        return trace

    def _run(self, on: Hosts, setting: Setting, dilation: float, words: Sequence[str]) -> str:
        """What the job prints on standard error. Raises ClickException when it fails."""
        draft = ["-md", str(self.draft)] if setting.drafts else []
        paced = ["-t", "1", "--pace", f"{self.profile}:{self.pair}*{dilation:g}"]
        done = on.run([*words, "-m", str(self.target), *draft, *setting.flags, *paced], timeout_s=7200)
        if done.returncode:
            raise click.ClickException(f"{setting.title} on {len(on.names)} hosts: {done.stderr}")
        return done.stderr

    @property
    def _requests(self) -> list[dict[str, Any]]:
        return [{"messages": [{"role": "user", "content": text}]} for _, text in self.prompts]

    def of_one_rank(self) -> list[str]:
        """The texts of one rank at full speed."""
        words, output = batch_words(self.folder, self._requests, self.n_tokens)
        job(1, [*words, "-m", str(self.target), "-md", "none", "--parallel", "1"])
        return [str(answer["text"]) for answer in answers(output)]

    def foretold(self, measured: Measured) -> list[float]:
        """Tokens a second of each text in `simulate`; none of settings that it lacks."""
        n_hosts, setting = measured.n_hosts, next(each for each in SETTINGS if each.title == measured.title)
        if not setting.simulated:
            return []
        profile = load_profile(self.profile).lay_out(n_hosts, self.pair, setting.drafts)
        profile = replace(profile, blocks=True, parked=True)  # as exact numerics have it
        found = (
            simulate(profile, each, make_policy(setting.simulated).begin(), self.n_tokens) for each in self.choices
        )
        return [timings(each.metrics)["predicted_per_second"] for each in found]


@click.command(help=__doc__)
@click.option("-m", "target", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("-md", "draft", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--profile", default="ethernet", show_default=True, help="As for `--pace`.")
@click.option("--pair", default="qwen-1.5b-0.5b", show_default=True)
@click.option("--hosts", "counts", default="4,8,15", show_default=True, help="Of each, the draft's among them.")
@click.option("--questions", type=click.Path(exists=True, path_type=Path), default=Path("../shared/prompts"))
@click.option("--of-each-set", default=1, show_default=True, help="Questions.")
@click.option("--tokens", default=96, show_default=True, help="Of a text.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--dilation", default=4.0, show_default=True, help="The first K that is tried, for each host at work.")
@click.option("--only", default="", help="Settings whose titles contain one of these, as in auto,iterative.")
@click.option("--choices", type=click.Path(path_type=Path), help="Keep what is recorded here, and use it again.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the figures here, and measure only what lacks.")
@click.option("-o", "output", type=click.Path(path_type=Path), required=True, help="The page.")
def main(
    target: Path,
    draft: Path,
    profile: str,
    pair: str,
    counts: str,
    questions: Path,
    of_each_set: int,
    tokens: int,
    rounds: int,
    dilation: float,
    only: str,
    choices: Path | None,
    keep: Path | None,
    output: Path,
) -> None:
    if why := missing():
        raise click.ClickException(f"no hosts can be made here: {why}")
    settings = [each for each in SETTINGS if not only or any(part in each.title for part in only.split(","))]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prompts = list(asked(questions, of_each_set, target, folder))
        known = recorded(choices or folder / "choices.jsonl", target, draft, prompts, tokens)
        named_texts = [(name, text) for name, text, _ in prompts]
        bench = Bench(target, draft, profile, pair, named_texts, known, tokens, rounds, folder)
        kept = keep or folder / "measured.jsonl"
        texts, found = bench.of_one_rank(), list[Measured]()
        for n_hosts in map(int, counts.split(",")):
            with hosts(n_hosts, folder) as on:
                of_these = [
                    kept_one(bench, kept, n_hosts, setting) or measured(bench, on, setting, dilation, texts, kept)
                    for setting in settings
                ]
                found += of_these
                traces = [bench.trace(on, settings[at], of_these[at].dilation) for at in (0, -1)]
            foretold = [bench.foretold(each) for each in found]
            output.write_text(page(bench, found, foretold, output.stem))
            draw_timelines(traces, None, None).savefig(output.with_name(f"{output.stem}-timeline.png"), dpi=150)
            picture(found, foretold).savefig(output.with_suffix(".png"), dpi=150)
    sys.exit(not all(each.same for each in found))


def asked(folder: Path, of_each_set: int, target: Path, scratch: Path) -> Iterator[tuple[str, str, Prompt]]:
    """Name, text and tokens of the first questions of each set that are not too long, or the shortest."""
    for name in SETS:
        texts = [json.loads(line)["turns"][0] for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        chosen = sorted(texts, key=lambda text: max(N_CUT, len(text)))[:of_each_set]
        (path := scratch / f"{name}.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in chosen))
        for text, prompt in zip(chosen, read_prompts(path, 0, target, chat=True), strict=True):
            yield name, text, prompt


def recorded(
    path: Path, target: Path, draft: Path, prompts: Sequence[tuple[str, str, Prompt]], n_tokens: int
) -> list[RecordedChoices]:
    if not path.exists():
        write_choices(path, [record_pair(target, draft, prompt, n_tokens) for _, _, prompt in prompts])
    return read_choices(path)


def measured(bench: Bench, on: Hosts, setting: Setting, dilation: float, texts: Sequence[str], kept: Path) -> Measured:
    """A setting's speeds, also appended to `kept`. The dilation is doubled until no rank is late; it begins with
    `dilation` for each host that is at work at once. `texts`: what is to be written."""
    factor, late, same, speeds = dilation * (len(on.names) if setting.pipelined else 1), "", True, list[list[float]]()
    for turn in range(bench.n_rounds):
        answers, slow = bench.job(on, setting, factor)
        while slow and not turn and factor < MAX_DILATION:
            factor *= 2
            answers, slow = bench.job(on, setting, factor)
        late = slow or late
        same = same and [str(answer["text"]) for answer in answers] == list(texts)
        speeds.append([1 / answer["tpot_s"] for answer in answers])
        print(
            f"  {len(on.names)} hosts, round {turn + 1} of {bench.n_rounds}: {setting.title}, K {factor:g}, "
            f"{' '.join(f'{speed:.1f}' for speed in speeds[-1])} tokens/s{slow and f', late: {slow}'}",
            file=sys.stderr,
            flush=True,
        )
    medians = [statistics.median(each) for each in zip(*speeds, strict=True)]
    result = Measured(bench.subject, len(on.names), setting.title, medians, factor, late, same)
    with kept.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")
    return result


def kept_one(bench: Bench, kept: Path, n_hosts: int, setting: Setting) -> Measured | None:
    lines = kept.read_text().splitlines() if kept.exists() else []
    found, key = (Measured(**json.loads(line)) for line in lines), (bench.subject, n_hosts, setting.title)
    return next((each for each in found if (each.subject, each.n_hosts, each.title) == key), None)


def row(bench: Bench, found: Measured, foretold: Sequence[float], base: Sequence[float]) -> tuple[str, ...]:
    """`foretold`: see `Bench.foretold`; `base`: the speeds of iterative on the same hosts."""
    speeds = found.speeds
    over = [one / other for one, other in zip(speeds, base, strict=False)]
    on_code = [ratio for ratio, (name, _) in zip(over, bench.prompts, strict=False) if name == CODE]
    shares = [told / one for told, one in zip(foretold, speeds, strict=False)]
    return (
        str(found.n_hosts),
        found.title,
        f"{statistics.fmean(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})",
        *(f"{statistics.geometric_mean(each):.2f}" if each else "-" for each in (over, on_code, shares)),
        f"{found.dilation:g}",
        found.late or "-",
    )


def page(bench: Bench, found: Sequence[Measured], foretold: Sequence[Sequence[float]], stem: str) -> str:
    base = {each.n_hosts: each.speeds for each in found if each.title == "iterative"}
    rows = [row(bench, each, told, base.get(each.n_hosts, ())) for each, told in zip(found, foretold, strict=True)]
    return PAGE.format(
        target=bench.target.stem,
        draft=bench.draft.stem,
        profile=bench.profile,
        pair=bench.pair,
        n_hosts=" and ".join(map(str, sorted({each.n_hosts for each in found}))),
        machine=processor_name(),
        n_tokens=bench.n_tokens,
        n_sets=len({name for name, _ in bench.prompts}),
        n_texts=len(bench.prompts),
        rounds="one round" if bench.n_rounds == 1 else f"medians of {bench.n_rounds} rounds",
        same=(
            "All texts are those of one rank, character by character."
            if all(each.same for each in found)
            else "**Texts differ.**"
        ),
        table="\n".join(markdown_table(COLUMNS, rows, COLUMNS[3:6])),
        most=found[-1].n_hosts,
        stem=stem,
    )


def picture(found: Sequence[Measured], foretold: Sequence[Sequence[float]]) -> Any:
    """The figure of the speeds, a panel for each number of hosts."""
    counts = sorted({each.n_hosts for each in found})
    figure, panels = plt.subplots(1, len(counts), figsize=(11, 3.6), sharey=True, layout="constrained", squeeze=False)
    for axes, n_hosts in zip(panels[0], counts, strict=True):
        pairs = [pair for pair in zip(found, foretold, strict=True) if pair[0].n_hosts == n_hosts][::-1]
        shown = [each for each, _ in pairs]
        means = [statistics.fmean(each.speeds) for each in shown]
        spread = [
            [mean - min(each.speeds) for mean, each in zip(means, shown, strict=True)],
            [max(each.speeds) - mean for mean, each in zip(means, shown, strict=True)],
        ]
        axes.barh([each.title for each in shown], means, color="#0072B2", xerr=spread, error_kw={"elinewidth": 0.8})
        told = [(at, statistics.fmean(speeds)) for at, (_, speeds) in enumerate(pairs) if speeds]
        axes.plot([speed for _, speed in told], [at for at, _ in told], "d", color="white", markeredgecolor="black")
        axes.set_xlabel(f"tokens/s, {n_hosts} hosts")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
