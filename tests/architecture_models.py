"""A small random model of every architecture that can be cut: metadata beside the common ones. Data."""

from __future__ import annotations

from tests.architecture_factory import EXPERTS, Metadata, RandomModel

PLAIN = """arcee bitnet chatglm codeshell ernie4_5 exaone falcon hunyuan-dense internlm2 jais jais2 llama maincoder
    mistral3 nemotron olmo orion pangu-embedded phi2 phi3 plamo qwen2 qwen3 refact seed_oss stablelm starcoder2
    xverse"""
WITH_EXPERTS = "arctic bailingmoe hunyuan-moe hy_v3 minimax-m2 phimoe qwen2moe qwen3moe"
ALL_HEADS: Metadata = {"attention.head_count_kv": 4}
SHARED: Metadata = {**EXPERTS, "expert_shared_count": 1}

MORE: dict[str, Metadata] = {
    "apertus": {
        "xielu.alpha_n": [0.5, 0.6, 0.7, 0.8],
        "xielu.alpha_p": [1.0, 1.1, 1.2, 1.3],
        "xielu.beta": [0.5, 0.6, 0.7, 0.8],
        "xielu.eps": [1e-6, 1e-5, 1e-6, 1e-5],
    },
    "bailingmoe": SHARED,
    "bailingmoe2": {**SHARED, "leading_dense_block_count": 2},
    "dbrx": {**EXPERTS, "attention.clamp_kqv": 8.0},
    "deepseek": {**SHARED, "leading_dense_block_count": 2},
    "dots1": {**SHARED, **ALL_HEADS, "leading_dense_block_count": 1},
    "gptneox": {**ALL_HEADS, "use_parallel_residual": True},
    "grovemoe": {**EXPERTS, "expert_chunk_feed_forward_length": 32, "expert_group_scale": 0.5, "experts_per_group": 2},
    "olmoe": {**EXPERTS, **ALL_HEADS},
    "qwen": {**ALL_HEADS, "feed_forward_length": 128},
}

MODELS: dict[str, RandomModel] = {
    **{name: RandomModel(name) for name in PLAIN.split()},
    **{name: RandomModel(name, metadata=EXPERTS) for name in WITH_EXPERTS.split()},
    **{name: RandomModel(name, metadata=metadata) for name, metadata in MORE.items()},
}
