"""What rank 0 is planned to hold of a vocabulary with merges, against a process that holds it."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import gguf
import numpy as np

from pipeinfer.job.placement.memory import vocabulary_bytes
from pipeinfer.models.gguf.model_info import read_model_info
from tests.support.jobs import ROOT

HELD = """
import sys
from pipeinfer.models.llama.ggml import load_library
from pipeinfer.models.text.tokenizer import Tokenizer
def peak(): return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
load_library()
before = peak()
tokenizer = Tokenizer(sys.argv[1])
print(tokenizer.n_vocab, peak() - before)
"""


def test_a_vocabulary_with_merges_takes_what_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    pairs = list(product(letters, repeat=2))[:50_000]
    tokens = letters + ["".join(pair) for pair in pairs]
    for key, value in (("context_length", 64), ("embedding_length", 32), ("block_count", 1)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for name in ("token_embd.weight", "blk.0.attn_norm.weight"):
        writer.add_tensor(name, np.zeros((len(tokens), 32), np.float16))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    command = [sys.executable, "-c", HELD, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    n_vocab, held = map(int, done.stdout.split())
    assert n_vocab == len(tokens)
    assert abs(vocabulary_bytes(read_model_info(path)) - held) < 0.2 * held, held / n_vocab
