"""The columns of results.csv and load.csv, and the values of those that name an experiment. Knows no job."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import KEY as SETTING
from pipeinfer.core.settings import settings_of, value_text

HASH_DIGITS = 16
Record = dict[str, Any]  # a row: the name of a column -> its cell
ColumnKind = Literal["text", "integer", "number", "integers", "numbers"]


@dataclass(frozen=True, slots=True)
class Column:
    """`is_key`: known before anything is measured. Rows that differ in such a column are different experiments."""

    name: str
    kind: ColumnKind
    meaning: str
    is_key: bool = False


def _key(name: str, kind: ColumnKind, meaning: str) -> Column:
    return Column(name, kind, meaning, is_key=True)


_KINDS: dict[type, ColumnKind] = {int: "integer", float: "number", str: "text"}
_SAMPLED = {
    "seed": "of sampling; of `simulate`, of the choices",
    "temp": "temperature; 0 is greedy",
    "dry_sequence_breakers": "`--dry-sequence-breaker`, a JSON list; empty: those by default",
    "sampler_order": "`--samplers` in another order than llama.cpp's",
    "logit_bias": "`--logit-bias`, by token",
    "grammar": "16 digits that two different grammars do not share; empty: none",
}
"""Meanings of columns that their options do not tell."""

NOT_SAMPLED = ("n_logprobs", "n_prompt_logprobs", "base_chunk", "dry_breakers", "ends", "ends_from", "reasoning")
SAMPLED = tuple(
    _key(each.name, _KINDS[type(each.default)], _SAMPLED.get(each.name) or f"`{each.metadata[SETTING].flag}`")
    for each in fields(SamplingParams)
    if each.name not in NOT_SAMPLED
)
"""Everything that decides which tokens are chosen."""

SAMPLING = tuple(column.name for column in SAMPLED)

COLUMNS = (
    Column("prompt_per_second", "number", "tokens of the prompt that were evaluated, not cached ones / `ttft_s`"),
    Column("predicted_per_second", "number", "tokens a second of text, from the first token to the last"),
    Column("itl_mean_s", "number", "mean inter-token latency (s); tokens of one verdict share the gap before it"),
    Column("ttft_s", "number", "time to first token (s), from submission"),
    _key("policy", "text", "as `--policy` names it"),
    _key("variant", "text", "what an ablation switched off, by its flags; empty: nothing"),
    _key("settings", "text", "what steers policy and drafts: main options, and all that are not as by default"),
    _key("options", "text", "context, batch and other options of the job that are not as by default"),
    _key("model", "text", "the target's file; of `simulate`, the profile, and the pair of models"),
    _key("model_bytes", "integer", "size of the target's file"),
    _key(
        "model_hash",
        "text",
        "16 digits of its size, its header and samples of each tensor: files that differ in few bytes may share them",
    ),
    _key("quantisation", "text", "of the target, as its header says"),
    _key("model_draft", "text", "the draft's file, several joined with +; empty for `iterative`"),
    _key("model_draft_bytes", "integer", "size of the draft's file, of several together"),
    _key("model_draft_hash", "text", "as `model_hash`, several joined with +"),
    _key("quantisation_draft", "text", "of the draft, several joined with +"),
    _key("ranks", "integer", "MPI ranks"),
    _key("layers", "integers", "the target's layers on each stage"),
    _key("threads", "integers", "threads of each rank"),
    _key("prompt", "text", "its name: file, file/question or file/question.turn; `pp128`: 128 tokens of text"),
    _key("prompt_hash", "text", "of its tokens; of a later turn, of all that was said to the model"),
    _key("prompt_n", "integer", "tokens of the prompt, cached ones included"),
    _key("predicted_n", "integer", "tokens generated"),
    *SAMPLED,
    _key("numerics", "text", "`exact` or `fast`; `virtual` in `simulate`"),
    _key("pace", "text", "profile that the ranks were slowed down to; *K: times are in units of K seconds"),
    _key("pace_hash", "text", "of what that profile says"),
    _key("choices", "text", "of `simulate`: how often the first, second, … guess is right, or the recorded text"),
    _key("repetition", "integer", "which repetition of the same measurement this is, from 1 on"),
    Column("acceptance_rate", "number", "guesses that were right / guesses that got a verdict; wide trees lower it"),
    Column("sent_acceptance", "number", "guesses accepted / guesses sent to the target: the papers' acceptance rate"),
    Column("top1_rate", "number", "tokens that the likeliest guess named / tokens in whose place a guess stood"),
    Column("hit_rate", "number", "tokens that had been guessed / tokens in whose place at least one guess stood"),
    Column("accepted_length", "number", "tokens a verdict: mean of how many tokens came at once, 1 without guesses"),
    Column("tokens_per_turn", "number", "tokens a turn of the pipeline, as long as its slowest stage's run: ALT"),
    Column("tokens_per_round", "number", "tokens until no run in flight stands for the newest one: ALR"),
    Column("draft_n", "integer", "guesses drafted"),
    Column("draft_n_sent", "integer", "guesses that went to the target; 0: it worked as without a draft"),
    Column("draft_steps", "integer", "evaluations of the draft"),
    Column("draft_steps_inflight", "integer", "those of them that began while a run was in flight"),
    Column("ttft_after_prompt_s", "number", "time (s) from the prompt's own token to the next: PipeInfer's TTFT"),
    Column("tpot_s", "number", "mean time per output token (s) after the first"),
    Column("itl_p50_s", "number", "median inter-token latency (s)"),
    Column("itl_p95_s", "number", "its 95th percentile"),
    Column("itl_p99_s", "number", "its 99th percentile"),
    Column("itl_percentiles_s", "numbers", "all its percentiles, 0 to 100"),
    Column("total_s", "number", "time from submission to the end (s)"),
    Column("runs", "integer", "runs sent to the target"),
    Column("rows", "integer", "rows (tokens) of these runs"),
    Column("branches", "integer", "guesses sent beside another guess after the same token: sequences copied"),
    Column("inflight_max", "integer", "most runs in flight at a time, chunks of the prompt too; cancelled ones not"),
    Column("runs_cancelled", "integer", "runs given up"),
    Column("messages", "integer", "messages from rank to rank, without cancellations"),
    Column("message_bytes", "integer", "bytes of these"),
    Column("cancel_messages", "integer", "cancellations sent, one a stage"),
    Column(
        "joules_per_token",
        "number",
        "energy (J) a token, prompt included, of the hosts' processors and memory by "
        "RAPL; empty where a host has no meter that can be read",
    ),
    Column("rss_bytes", "integers", "memory of each rank at the end, mapped pages counted"),
    Column("peak_rss_bytes", "integers", "the most of it since loading"),
    Column("busy_s", "numbers", "time of each rank (s) spent working"),
    Column("cancelled_s", "numbers", "… on runs that were given up"),
    Column("waiting_s", "numbers", "… waiting for a run on its way"),
    Column("idle_s", "numbers", "… while no run was on its way"),
    Column("late_s", "numbers", "time (s) by which work of each rank ended later than `--pace` says, added up"),
    Column("roles", "text", "of each rank, separated by semicolons: `draft`, `head`, `stage 0`, …"),
    Column("numerics_name", "text", "of all that decides bits: rows of the same name, models and prompt have one text"),
    Column("plan_hash", "text", "12 digits of the job's plan, hosts' names apart; as `plan --json` has it"),
    Column("version", "text", "of pipeinfer"),
    Column("date", "text", "when the row was written, UTC"),
    Column("hosts", "text", "of each rank, separated by commas"),
)

NAMES = tuple(column.name for column in COLUMNS)
KEY = tuple(column.name for column in COLUMNS if column.is_key)
"""Rows that agree in these are the same measurement: the key of `--resume`, of the tables and of the figures."""


STATISTICS = {"mean": "mean", "p50": "median", **{f"p{share}": f"{share}th percentile" for share in (90, 95, 99)}}
LATENCIES = {
    "ttft": "time to first token (s) over requests, from when each came",
    "tpot": "mean time per output token (s) after the first, over requests",
    "itl": "inter-token latency (s) over all tokens but the first ones; tokens of one verdict share the gap before it",
}


def _shared(*names: str) -> tuple[Column, ...]:
    """Columns of results.csv with the same meaning."""
    return tuple(COLUMNS[NAMES.index(name)] for name in names)


def _latency(name: str, meaning: str) -> tuple[Column, ...]:
    figures = (Column(f"{name}_{key}_s", "number", f"{shown}: {meaning}") for key, shown in STATISTICS.items())
    return (*figures, Column(f"{name}_percentiles_s", "numbers", "all its percentiles, 0 to 100"))


LOAD_COLUMNS = (
    *_shared("policy", "variant", "settings", "options", "model", "model_bytes", "model_hash", "quantisation"),
    *_shared("model_draft", "model_draft_bytes", "model_draft_hash", "quantisation_draft"),
    *_shared("ranks", "layers", "threads"),
    Column("prompt", "text", "names of the files that prompts are of, joined with +", is_key=True),
    Column("prompt_hash", "text", "of the tokens of all prompts, in the order in which they are asked", is_key=True),
    Column("n_requests", "integer", "requests; where prompts are fewer they are asked again", is_key=True),
    Column("predict", "integer", "tokens generated for each", is_key=True),
    Column("concurrency", "integer", "clients, each asks when it has its text; 0: they come at a `rate`", is_key=True),
    Column("rate", "number", "requests a second, a Poisson process; empty: as clients ask", is_key=True),
    Column("parallel", "integer", "requests at a time that the job was loaded for, and has open at most", is_key=True),
    Column("seed", "integer", "of when requests come, and of the first one's sampling", is_key=True),
    *(column for column in SAMPLED if column.name != "seed"),
    *_shared("numerics", "pace", "pace_hash", "choices", "repetition"),
    Column("wall_s", "number", "time (s) from when the first request came to the last token"),
    Column("prompt_n", "integer", "tokens of all prompts, cached ones included"),
    Column("cache_n", "integer", "of these, those that another request which begins alike had evaluated"),
    Column("predicted_n", "integer", "tokens generated, of all requests"),
    Column("requests_per_second", "number", "requests / `wall_s`"),
    Column("offered_per_second", "number", "of those of a `rate`, how many a second came, from the first to the last"),
    Column("served_per_second", "number", "of these, how many a second ended, from the first end to the last"),
    Column("prompt_per_second", "number", "tokens of all prompts / `wall_s`"),
    Column("predicted_per_second", "number", "tokens generated / `wall_s`: the throughput"),
    *(column for name, meaning in LATENCIES.items() for column in _latency(name, meaning)),
    Column("draft_n_judged", "integer", "guesses that got a verdict"),
    Column("draft_n_accepted", "integer", "those that were right"),
    *_shared("acceptance_rate"),
    Column("open_max", "integer", "most requests open at a time"),
    Column("busy", "numbers", "share of each stage's time, from the first token to the last, spent on runs"),
    Column("busy_s", "numbers", "time of each rank (s) spent working, from the first token to the last"),
    *_shared("cancelled_s", "waiting_s", "idle_s", "late_s", "peak_rss_bytes", "roles", "numerics_name", "plan_hash"),
    *_shared("version", "date", "hosts"),
)


# -- values


def digest(value: object) -> str:
    """Digits of a hash of the value's `repr`, which must show all of it."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:HASH_DIGITS]


def settings_text(policy: Policy, couple: bool = True, drafting: Sequence[str] = ()) -> str:
    """The policy's main settings, and those that differ from its preset: `draft 4, width 3`. `drafting`: of guesses."""
    if not policy.drafts:
        return ""
    preset = policy.preset_values()
    shown = [
        f"{name.removeprefix('n_')} {value_text(value)}"
        for name, default, setting in settings_of(type(policy))
        if (value := getattr(policy, name)) != preset.get(name, default) or setting.shown
        if default is not True
    ]
    return ", ".join([*shown, *drafting, *([] if couple else ["no-couple-draft"])])


def variant_text(policy: Policy, cancel: bool, partitions: bool) -> str:
    """The flags that switched parts of the policy off; empty for the whole policy of its preset."""
    preset = policy.preset_values()
    off = [
        setting.flag[2:]
        for name, _, setting in settings_of(type(policy))
        if getattr(policy, name) is False and preset.get(name) is not False
    ]
    return ", ".join([*["no-cancel"] * (not cancel), *off, *["no-partitions"] * (not partitions)])


def model_columns(model: dict[str, Any], draft: dict[str, Any] | None) -> Record:
    """The columns about a target and its drafts, which are described as in `--json`."""
    fields_of = {"": "name", "_bytes": "bytes", "_hash": "hash"}
    columns = {f"model{suffix}": model[name] for suffix, name in fields_of.items()}
    columns |= {f"model_draft{suffix}": draft[name] if draft else "" for suffix, name in fields_of.items()}
    quantisation_draft = draft["quantisation"] if draft else ""
    return columns | {"quantisation": model["quantisation"], "quantisation_draft": quantisation_draft}
