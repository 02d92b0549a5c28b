"""The columns of results.csv: their kinds, what they mean, and which say what was asked. Knows no file and no row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "integer", "number", "integers", "numbers"]


@dataclass(frozen=True, slots=True)
class Column:
    """`asked`: known before anything is measured. Rows that differ in such a column are of different experiments; all
    else was measured, or says where and when."""

    name: str
    kind: Kind
    meaning: str
    asked: bool = False


def _asked(name: str, kind: Kind, meaning: str) -> Column:
    return Column(name, kind, meaning, asked=True)


COLUMNS = (
    Column("prompt_per_second", "number", "tokens of the prompt / `ttft_s`"),
    Column("predicted_per_second", "number", "tokens a second of text, from the first token to the last"),
    Column("itl_mean_s", "number", "mean inter-token latency (s); tokens of one verdict share the gap before it"),
    Column("ttft_s", "number", "time to first token (s), from submission"),
    _asked("policy", "text", "as `--policy` names it"),
    _asked("variant", "text", "what an ablation switched off, by its flags; empty: nothing"),
    _asked("settings", "text", "what steers policy and drafts: main options, and all that are not as by default"),
    _asked("options", "text", "context, batch and other options of the job that are not as by default"),
    _asked("model", "text", "the target's file; of `simulate`, the profile"),
    _asked("model_bytes", "integer", "size of the target's file"),
    _asked("model_hash", "text", "16 digits that two different targets do not share"),
    _asked("quantisation", "text", "of the target, as its header says"),
    _asked("model_draft", "text", "the draft's file, several joined with +; empty for `iterative`"),
    _asked("model_draft_bytes", "integer", "size of the draft's file, of several together"),
    _asked("model_draft_hash", "text", "as `model_hash`, several joined with +"),
    _asked("quantisation_draft", "text", "of the draft, several joined with +"),
    _asked("ranks", "integer", "MPI ranks"),
    _asked("layers", "integers", "the target's layers on each stage"),
    _asked("threads", "integers", "threads of each rank"),
    _asked("prompt", "text", "its name: file, file/question or file/question.turn; `pp128`: 128 tokens of text"),
    _asked("prompt_hash", "text", "of its tokens; of a later turn, of all that was said to the model"),
    _asked("prompt_n", "integer", "tokens of the prompt, cached ones included"),
    _asked("predicted_n", "integer", "tokens generated"),
    _asked("seed", "integer", "of sampling; of `simulate`, of the choices"),
    _asked("temp", "number", "temperature; 0 is greedy"),
    _asked("top_k", "integer", "`--top-k`"),
    _asked("top_p", "number", "`--top-p`"),
    _asked("min_p", "number", "`--min-p`"),
    _asked("repeat_last_n", "integer", "`--repeat-last-n`"),
    _asked("repeat_penalty", "number", "`--repeat-penalty`"),
    _asked("frequency_penalty", "number", "`--frequency-penalty`"),
    _asked("presence_penalty", "number", "`--presence-penalty`"),
    _asked("logit_bias", "text", "`--logit-bias`, by token"),
    _asked("grammar", "text", "16 digits that two different grammars do not share; empty: none"),
    _asked("numerics", "text", "`exact` or `fast`; `virtual` in `simulate`"),
    _asked("pace", "text", "profile that the ranks were slowed down to"),
    _asked("pace_hash", "text", "of what that profile says"),
    _asked("repetition", "integer", "which repetition of the same measurement this is, from 1 on"),
    Column("acceptance_rate", "number", "guesses that were right / guesses that got a verdict; wide trees lower it"),
    Column("hit_rate", "number", "tokens that had been guessed / tokens in whose place at least one guess stood"),
    Column("accepted_length", "number", "tokens a verdict: mean of how many tokens came at once, 1 without guesses"),
    Column("draft_n", "integer", "guesses drafted"),
    Column("draft_n_sent", "integer", "guesses that went to the target; 0: it worked as without a draft"),
    Column("draft_steps", "integer", "evaluations of the draft"),
    Column("draft_steps_inflight", "integer", "those of them that began while a run was in flight"),
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
    Column("rss_bytes", "integers", "memory of each rank at the end, mapped pages counted"),
    Column("peak_rss_bytes", "integers", "the most of it since loading"),
    Column("busy_s", "numbers", "time of each rank (s) spent working"),
    Column("cancelled_s", "numbers", "… on runs that were given up"),
    Column("waiting_s", "numbers", "… waiting for a run on its way"),
    Column("idle_s", "numbers", "… while no run was on its way"),
    Column("roles", "text", "of each rank, separated by semicolons: `draft`, `head`, `stage 0`, …"),
    Column("version", "text", "of pipeinfer"),
    Column("date", "text", "when the row was written, UTC"),
    Column("hosts", "text", "of each rank, separated by commas"),
)

NAMES = tuple(column.name for column in COLUMNS)
ASKED = tuple(column.name for column in COLUMNS if column.asked)
"""What makes two measurements the same one: the key of `--resume`, of the tables and of the figures."""
