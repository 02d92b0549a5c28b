"""Record what a real target writes and what a real draft guesses there, as choices for `pipeinfer simulate --choices`:
`python experiments/record.py -m TARGET.gguf -md DRAFT.gguf --prompts SET.jsonl --chat -o FILE.jsonl`.

One process, no MPI; processor time as `run` takes with one rank. The file holds token ids and probabilities, neither
weights nor prompts. Knows no cluster and no policy.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))


from pipeinfer.core.blocks import Span, spans_of
from pipeinfer.core.drafting import guess_next
from pipeinfer.core.interfaces import Batch, LoadedModel
from pipeinfer.core.runs import KvOp, OpKind
from pipeinfer.core.sampling import SamplingParams, choose
from pipeinfer.core.settings import MAX_WIDTH
from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf.model_info import read_model_info
from pipeinfer.models.gguf.slice import open_slice
from pipeinfer.models.llama.params import LlamaParams
from pipeinfer.models.llama.stage import LlamaStage
from pipeinfer.models.text.chat_template import PLAIN_TEMPLATE, ChatTemplate, encode_rendered, template_of
from pipeinfer.models.text.messages import ChatMessage
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.virtual.choices import Guesses, RecordedChoices, write_choices

N_BATCH = 128
GREEDY = SamplingParams(temp=0.0)
LEAST = 0.001
"""The probability of a guess that is worth recording; PipeInfer's published cutoff."""
N_OFF_PATH, LEAST_OFF_PATH = 16, 0.01
"""Tokens that are followed after a wrong guess, and the probability of a guess there that is worth recording."""
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class PathModel:
    """A whole model that is asked what follows any tokens; it evaluates only what differs from the question before.

    `blocks`: the first question is a prompt, which is evaluated in blocks.
    """

    def __init__(self, model: LoadedModel, blocks: bool) -> None:
        self.model, self.blocks = model, blocks
        self._tokens: list[int] = []  # those whose cells the model holds

    def close(self) -> None:
        self.model.close()

    def logits_after(self, tokens: Sequence[int]) -> FloatArray:
        """(n_vocab,), valid until the next call."""
        if self.blocks and not self._tokens:
            self._read_prompt(tokens)
        pairs = zip(self._tokens, tokens, strict=False)
        n_known = next((index for index, (one, other) in enumerate(pairs) if one != other), len(self._tokens))
        n_known = min(n_known, len(tokens) - 1)  # the last one is always evaluated: its logits are wanted
        if n_known < len(self._tokens):
            self.model.apply([KvOp(OpKind.REMOVE, 0, first=n_known)])
        self._tokens = list(tokens)
        logits = None
        for start in range(n_known, len(tokens), N_BATCH):
            logits = self._evaluate(start, tokens[start : start + N_BATCH], len(tokens))
        assert logits is not None
        return logits[0]

    def _read_prompt(self, tokens: Sequence[int]) -> None:
        start = 0
        for span in spans_of(len(tokens)):
            while start < span.end:
                end = span.chunk_end(start, N_BATCH)
                self._evaluate(start, tokens[start:end], len(tokens), span)
                start = end
        self._tokens = list(tokens[:start])

    def _evaluate(self, start: int, tokens: Sequence[int], end: int, span: Span | None = None) -> FloatArray | None:
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        batch = Batch(np.array(tokens, np.int32), positions, [(0,)] * len(tokens), None, positions == end - 1, span)
        return self.model.evaluate(batch, lambda: False)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens with a name, such as humaneval/3."""

    name: str
    tokens: Sequence[int]


def record_pair(
    target: Path,
    draft: Path,
    prompt: Prompt,
    n_predict: int,
    n_threads: int = 0,
    ends: Sequence[int] = (),
    sampling: SamplingParams = GREEDY,
) -> RecordedChoices:
    """The target's text, up to one of the tokens `ends` if it comes, and the draft's guesses, which share its noise;
    both must have one vocabulary. `sampling`: no penalties. Raises UserError for files that are no models."""
    n_cells = len(prompt.tokens) + n_predict + N_BATCH
    path, known = list(prompt.tokens), list[Guesses]()
    with closing(_open_whole(target, n_cells, n_threads, exact=True)) as model:
        while len(path) < len(prompt.tokens) + n_predict and path[-1] not in ends:
            path.append(choose(model.logits_after(path), sampling, len(path)))
    with closing(_open_whole(draft, n_cells, n_threads, exact=False)) as model:
        for end in range(len(prompt.tokens), len(path) + 1):
            known.append(_guesses_after(model, path[:end], sampling, LEAST))
        off_path = [
            _off_path(model, path[:end], guesses[0][0], sampling) if guesses[0][0] != path[end] else []
            for end, guesses in enumerate(known[:-1], len(prompt.tokens))
        ]
    return RecordedChoices(prompt.name, len(prompt.tokens), path[len(prompt.tokens) :], known, off_path)


def _off_path(model: PathModel, context: Sequence[int], wrong: int, sampling: SamplingParams) -> list[Guesses]:
    """The draft's guesses after `wrong`, and after its best guesses from there on."""
    tokens, found = [*context, wrong], []
    for _ in range(N_OFF_PATH):
        found.append(_guesses_after(model, tokens, sampling, LEAST_OFF_PATH))
        tokens.append(found[-1][0][0])
    return found


def _guesses_after(model: PathModel, tokens: Sequence[int], sampling: SamplingParams, least: float) -> Guesses:
    guesses = guess_next(model.logits_after(tokens), sampling, len(tokens), (), MAX_WIDTH, couple=True)
    likely = [guess for guess in guesses if guess.probability >= least] or guesses[:1]
    return [(guess.token, float(f"{guess.probability:.3g}")) for guess in likely]


def _open_whole(path: Path, n_cells: int, n_threads: int, exact: bool) -> PathModel:
    info = read_model_info(path)
    params = LlamaParams(
        n_cells=n_cells,
        n_seq_max=2,
        n_batch=N_BATCH,
        n_outputs_max=2,
        n_threads=n_threads or len(os.sched_getaffinity(0)),
        exact=exact,
    )
    return PathModel(
        LlamaStage(open_slice(info, 0, info.n_layer, None), params), exact and info.layers.architecture.flash
    )


def read_prompts(path: Path, n_questions: int, model: Path, chat: bool) -> list[Prompt]:
    """The first turns of the first questions of a .jsonl file (0: of all), or the text of another file; `chat`: in the
    model's chat template. Raises UserError as templates do; OSError, ValueError and KeyError for other files."""
    texts = [path.read_text()]
    if path.suffix == ".jsonl":
        texts = [json.loads(line)["turns"][0] for line in texts[0].splitlines()][: n_questions or None]
    tokenizer = Tokenizer(model)
    if not chat:
        return [Prompt(f"{path.stem}/{number}", tokenizer.encode(text)) for number, text in enumerate(texts)]
    template = ChatTemplate(template_of(read_model_info(model).metadata) or PLAIN_TEMPLATE, str(model))
    rendered = (template.render([ChatMessage("user", text)], tokenizer) for text in texts)
    return [Prompt(f"{path.stem}/{number}", encode_rendered(tokenizer, text)) for number, text in enumerate(rendered)]


@click.command(help=__doc__)
@click.option("-m", "target", type=FILE, required=True, help="The target.")
@click.option("-md", "draft", type=FILE, required=True, help="The draft, of the same vocabulary.")
@click.option("--prompts", type=FILE, required=True, multiple=True, help="A text, or JSON lines with `turns`.")
@click.option("--questions", default=4, show_default=True, help="Of each .jsonl file; 0: all.")
@click.option("--chat", is_flag=True, help="Ask in the target's chat template, and stop where its answer ends.")
@click.option("-n", "n_predict", default=128, show_default=True, help="Tokens of a text at most.")
@click.option("--temp", default=0.0, show_default=True, help="Temperature, without other limits; 0: greedy.")
@click.option("--seed", default=1, show_default=True)
@click.option("-t", "n_threads", default=0, help="Threads. [default: all cores]")
@click.option("-o", "output", type=click.Path(path_type=Path), required=True, help="The file of choices.")
def main(
    target: Path,
    draft: Path,
    prompts: Sequence[Path],
    questions: int,
    chat: bool,
    n_predict: int,
    temp: float,
    seed: int,
    n_threads: int,
    output: Path,
) -> None:
    ends = Tokenizer(target).ends if chat else ()
    sampling = SamplingParams(seed=seed, temp=temp, top_k=0, top_p=1.0, min_p=0.0)
    found = []
    for prompt in (each for path in prompts for each in read_prompts(path, questions, target, chat)):
        text = record_pair(target, draft, prompt, n_predict, n_threads, ends, sampling)
        print(f"{text.name}: {text.n_prompt} + {len(text.tokens)} tokens, top-1 {text.acceptance:.2f}", flush=True)
        found.append(text)
    write_choices(output, found)


if __name__ == "__main__":
    main()
