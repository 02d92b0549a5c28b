"""Train the shipped demonstration pair from scratch: `python experiments/train_demo.py --out DIR`.

The text is the source of Python's own standard library, which every machine with Python has. Two steps, each
restartable from what the one before left in `--work`: the target on next-token prediction, then the draft, distilled
from the target on the same vocabulary. Writes `target.gguf`, `draft.gguf` and `MODEL_CARD.md`. Needs the `train` extra.
"""

from __future__ import annotations

import hashlib
import io
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import gguf
import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from demo_net import Net, NetConfig, export_gguf, load_net, save_net
from schedule import Schedule, optimisers
from torch import Tensor

N_VOCAB = 4096
HELD_OUT_OF = 20  # one file in twenty is never trained on
LEFT_OUT = {"site-packages", "__pycache__", "encodings", "pydoc_data"}  # other people's code; tables, not text
TARGET = NetConfig(N_VOCAB, n_layer=9, n_embd=288, n_head=9, n_head_kv=3, n_ff=768)
DRAFT = NetConfig(N_VOCAB, n_layer=2, n_embd=128, n_head=4, n_head_kv=2, n_ff=352)


def source_files() -> list[Path]:
    """The standard library's Python files, sorted by name, without tables and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    return [path for path in files if not LEFT_OUT & set(path.relative_to(root).parts)]


def is_held_out(path: Path) -> bool:
    return int(hashlib.sha256(path.name.encode()).hexdigest(), 16) % HELD_OUT_OF == 0


def read_text(paths: list[Path]) -> list[str]:
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # a handful of files test other encodings on purpose
    return [text for text in texts if text.strip()]


def train_tokenizer(texts: list[str]) -> bytes:
    """A BPE vocabulary with byte fallback over exact text: no normalisation, no added space. Serialised model."""
    model = io.BytesIO()
    lines = (line for text in texts for line in text.split("\n") if line)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type="bpe",
        vocab_size=N_VOCAB,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        character_coverage=0.9995,
        input_sentence_size=300_000,
        shuffle_input_sentence=True,
        minloglevel=2,
    )
    return model.getvalue()


def encode(texts: list[str], tokenizer: sentencepiece.SentencePieceProcessor) -> np.ndarray:
    """All texts as one stream of ids, each text between BOS and EOS."""
    newline = tokenizer.piece_to_id("<0x0A>")
    stream: list[int] = []
    for text in texts:
        stream.append(tokenizer.bos_id())
        for index, ids in enumerate(tokenizer.encode(text.split("\n"))):
            if index:
                stream.append(newline)
            stream.extend(ids)
        stream.append(tokenizer.eos_id())
    return np.array(stream, dtype=np.int32)


def tokenizer_keys(model: bytes) -> Callable[[gguf.GGUFWriter], None]:
    """What puts the SentencePiece vocabulary into a GGUF file."""
    spm = sentencepiece.SentencePieceProcessor(model_proto=model)

    def kind(index: int) -> gguf.TokenType:
        if spm.is_unknown(index):
            return gguf.TokenType.UNKNOWN
        if spm.is_control(index):
            return gguf.TokenType.CONTROL
        return gguf.TokenType.BYTE if spm.is_byte(index) else gguf.TokenType.NORMAL

    def add(writer: gguf.GGUFWriter) -> None:
        ids = range(spm.vocab_size())
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([spm.id_to_piece(index).encode() for index in ids])
        writer.add_token_scores([spm.get_score(index) for index in ids])
        writer.add_token_types([kind(index) for index in ids])
        writer.add_bos_token_id(spm.bos_id())
        writer.add_eos_token_id(spm.eos_id())
        writer.add_unk_token_id(spm.unk_id())
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(False)

    return add


def batches(stream: np.ndarray, n_pos: int, n_rows: int, seed: int) -> Iterator[Tensor]:
    """Random windows of the stream, (n_rows, n_pos + 1), for ever."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(stream) - n_pos - 1, n_rows)
        yield torch.from_numpy(np.stack([stream[s : s + n_pos + 1] for s in starts]).astype(np.int64))


def fit(
    net: Net, stream: np.ndarray, schedule: Schedule, loss_of: Callable[[Tensor], Tensor], note: Callable[[str], None]
) -> None:
    """Train `net` in place. `loss_of(window)` is the loss of one batch of windows (B, T + 1)."""
    optims = optimisers(net, schedule)
    short = batches(stream, 512, schedule.n_batch_tokens // 512, seed=1)
    long = batches(stream, 1024, schedule.n_batch_tokens // 1024, seed=2)
    start, mean = time.monotonic(), 0.0
    for step in range(schedule.steps):
        progress = max(step / schedule.steps, (time.monotonic() - start) / (60 * schedule.minutes))
        if progress >= 1:
            break
        schedule.set_rates(optims, step, progress)
        net.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(next(long if progress > 0.85 else short))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for optim, _ in optims:
            optim.step()
        mean = loss.item() if step == 0 else 0.97 * mean + 0.03 * loss.item()
        if step % 100 == 0:
            note(f"{schedule.name} step {step:5d}  {(time.monotonic() - start) / 60:5.1f} min  loss {mean:.3f}")
    note(f"{schedule.name} done: {step + 1} steps, {(time.monotonic() - start) / 60:.1f} min, loss {mean:.3f}")


def next_token_loss(net: Net) -> Callable[[Tensor], Tensor]:
    def loss(window: Tensor) -> Tensor:
        logits = net(window[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())

    return loss


def distillation_loss(draft: Net, target: Net, n_taught: int = 16) -> Callable[[Tensor], Tensor]:
    """Cross-entropy with the target's likeliest `n_taught` tokens, half of it with the first alone.

    The distribution serves sampled acceptance, the first token greedy acceptance; the tail is not worth its time.
    """

    def loss(window: Tensor) -> Tensor:
        tokens = window[:, :-1]
        with torch.no_grad():
            taught, ids = target(tokens).flatten(0, 1).topk(n_taught)
            weights = 0.5 * F.softmax(taught.float(), -1)
            weights[:, 0] += 0.5
        logits = draft(tokens).flatten(0, 1).float()
        log_probs = logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)
        return -(weights * log_probs).sum(-1).mean()

    return loss


@torch.no_grad()
def evaluate(target: Net, draft: Net | None, stream: np.ndarray, n_windows: int = 64) -> dict[str, float]:
    """Losses on held-out text, and how often the draft's first (or first four) tokens hold the target's first."""
    sums: dict[str, float] = {"target_loss": 0.0}
    windows = batches(stream, 512, 1, seed=3)
    for _ in range(n_windows):
        window = next(windows)
        logits = target(window[:, :-1]).flatten(0, 1)
        sums["target_loss"] += F.cross_entropy(logits, window[:, 1:].flatten()).item()
        if draft is not None:
            guess = draft(window[:, :-1]).flatten(0, 1)
            best = logits.argmax(-1, keepdim=True)
            for name, value in (
                ("draft_loss", F.cross_entropy(guess, window[:, 1:].flatten())),
                ("top1_agreement", (guess.argmax(-1, keepdim=True) == best).float().mean()),
                ("top4_agreement", (guess.topk(4).indices == best).any(-1).float().mean()),
            ):
                sums[name] = sums.get(name, 0.0) + value.item()
    return {name: value / n_windows for name, value in sums.items()}


CARD = """\
# The demonstration pair

Trained from scratch by `python experiments/train_demo.py`. It exists so that every command of this project runs
at once, with real numbers, on any machine. It writes text that looks like Python; it is of no other use.

| | target | draft |
|---|---|---|
| parameters | {target.n_params:,} | {draft.n_params:,} |
| layers x width | {target.n_layer} x {target.n_embd} | {draft.n_layer} x {draft.n_embd} |
| heads (key-value heads) | {target.n_head} ({target.n_head_kv}) | {draft.n_head} ({draft.n_head_kv}) |
| feed-forward width | {target.n_ff} | {draft.n_ff} |
| held-out loss (nats a token) | {metrics[target_loss]:.3f} | {metrics[draft_loss]:.3f} |

On held-out files the draft's most likely token is the target's at {metrics[top1_agreement]:.3f} of the positions; the
target's token is among the draft's first four at {metrics[top4_agreement]:.3f}.

* **Text**: {data}
* **Licence of the text**: Python Software Foundation License 2.0; the weights are shared under the same terms.
* **Vocabulary**: SentencePiece BPE, {target.n_vocab} pieces with byte fallback, no normalisation, same text.
* **Architecture**: llama (RMS norm, rotary embedding, grouped-query attention, SwiGLU), tied embeddings, Q8_0.
* **Draft**: distilled from the target's likeliest 16 tokens, half of the weight on the first.

## Log

```
{log}
```
"""


class Log:
    """Lines for the model card, printed as they come and kept in a file so that a later step can quote them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = path.read_text().splitlines() if path.exists() else []

    def note(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)
        self.path.write_text("\n".join(self.lines) + "\n")


def once(path: Path, make: Callable[[], bytes]) -> bytes:
    if not path.exists():
        path.write_bytes(make())
    return path.read_bytes()


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where the two GGUF files and the card go.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("build/demo"), show_default=True)
@click.option("--target-steps", default=4000, show_default=True)
@click.option("--target-minutes", default=60.0, show_default=True)
@click.option("--draft-steps", default=8000, show_default=True)
@click.option("--draft-minutes", default=60.0, show_default=True)
def main(
    out: Path, work: Path, target_steps: int, target_minutes: float, draft_steps: int, draft_minutes: float
) -> None:
    torch.manual_seed(0)
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    log = Log(work / "log.txt")
    files = source_files()
    training = read_text([path for path in files if not is_held_out(path)])
    held_out = read_text([path for path in files if is_held_out(path)])
    proto = once(work / "tokenizer.model", lambda: train_tokenizer(training))
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=proto)
    stream, test_stream = encode(training, tokenizer), encode(held_out, tokenizer)
    data = (
        f"the standard library of Python {sys.version.split()[0]}: {len(training)} files, "
        f"{sum(map(len, training)) / 1e6:.1f} million characters, {len(stream) / 1e6:.2f} million tokens; "
        f"{len(held_out)} files ({len(test_stream) / 1e6:.2f} million tokens) held out"
    )

    target_path, draft_path = work / "target.pt", work / "draft.pt"
    if not target_path.exists():
        log.note(f"data: {data}")
        target = Net(TARGET)
        fit(target, stream, Schedule("target", target_steps, target_minutes), next_token_loss(target), log.note)
        save_net(target, target_path)
    target = load_net(target_path).requires_grad_(False)
    if not draft_path.exists():
        draft = Net(DRAFT)
        schedule = Schedule("draft", draft_steps, draft_minutes, n_batch_tokens=2048)
        fit(draft, stream, schedule, distillation_loss(draft, target), log.note)
        save_net(draft, draft_path)
    draft = load_net(draft_path)
    metrics = evaluate(target, draft, test_stream)
    log.note("held out: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    export_gguf(target, out / "target.gguf", "pipeinfer demo target", tokenizer_keys(proto))
    export_gguf(draft, out / "draft.gguf", "pipeinfer demo draft", tokenizer_keys(proto))
    card = CARD.format(target=TARGET, draft=DRAFT, metrics=metrics, data=data, log="\n".join(log.lines))
    (out / "MODEL_CARD.md").write_text(card)


if __name__ == "__main__":
    main()
