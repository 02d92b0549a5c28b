"""Plain llama-cpp-python, whole model, one process, greedy: what every run must reproduce.

Run as `python -m tests.plain_llama MODEL N ID,ID,…`; prints the generated token ids as JSON.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["GGML_CPU_TILED_MM"] = "0"  # before libggml loads

import llama_cpp
import numpy as np

SILENT = llama_cpp.llama_log_callback(lambda *_: None)  # kept: libllama calls it for as long as it lives


def greedy(path: str, prompt: list[int], n_predict: int, n_threads: int = 2) -> list[int]:
    """Token ids under the exact settings: no repacked weights, flash attention, K in F16 and V in BF16."""
    llama_cpp.llama_log_set(SILENT, None)
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = len(prompt) + n_predict + 8
    params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = n_threads
    params.flash_attn_type, params.type_k, params.type_v = 1, 1, 30
    context = llama_cpp.llama_init_from_model(model, params)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    out: list[int] = []
    feed = list(prompt)
    while len(out) < n_predict:
        for start in range(0, len(feed), 512):
            chunk = feed[start : start + 512]
            ids = (llama_cpp.llama_token * len(chunk))(*chunk)
            assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, len(chunk))) == 0
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (n_vocab,))
        out.append(int(np.argmax(logits)))
        feed = out[-1:]
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return out


if __name__ == "__main__":
    print(json.dumps(greedy(sys.argv[1], [int(token) for token in sys.argv[3].split(",")], int(sys.argv[2]))))
