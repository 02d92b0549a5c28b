"""A small random model of every architecture that can be cut: metadata beside the common ones. Data."""

from __future__ import annotations

from dataclasses import replace

from tests.support.architecture_factory import EXPERTS, Metadata, RandomModel

PLAIN = """arcee bitnet chatglm codeshell ernie4_5 exaone exaone4 falcon gemma glm4 hunyuan-dense internlm2 jais jais2
    llama maincoder minicpm mistral3 nemotron olmo orion pangu-embedded phi2 phi3 plamo qwen2 qwen3 refact seed_oss
    stablelm starcoder starcoder2 xverse"""
WITH_EXPERTS = "arctic hunyuan-moe hy_v3 minimax-m2 phimoe qwen2moe qwen3moe"

ALL_HEADS: Metadata = {"attention.head_count_kv": 4}
SHARED: Metadata = {**EXPERTS, "expert_shared_count": 1, "expert_shared_feed_forward_length": 32}
DENSE_FIRST: Metadata = {**SHARED, "leading_dense_block_count": 2}
SCALED: Metadata = {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0}
PLANES: Metadata = {"rope.dimension_sections": [4, 2, 2, 0]}
SHORT_HEADS: Metadata = {"attention.key_length": 16, "attention.value_length": 16}
LATENT: Metadata = {
    **DENSE_FIRST,
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 96,
    "attention.value_length": 64,
    "attention.key_length_mla": 64,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 32,
}

INDEXER: Metadata = {
    **LATENT,
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 4,
}

FOUR: dict[str, Metadata] = {
    "apertus": {
        "xielu.alpha_n": [0.5, 0.6, 0.7, 0.8],
        "xielu.alpha_p": [1.0, 1.1, 1.2, 1.3],
        "xielu.beta": [0.5, 0.6, 0.7, 0.8],
        "xielu.eps": [1e-6, 1e-5, 1e-6, 1e-5],
    },
    "bailingmoe": SHARED,
    "bailingmoe2": DENSE_FIRST,
    "bloom": ALL_HEADS,
    "command-r": {"logit_scale": 0.5},
    "dbrx": {**EXPERTS, "attention.clamp_kqv": 8.0},
    "deepseek": DENSE_FIRST,
    "deepseek2": LATENT,
    "deepseek32": INDEXER,
    "glm-dsa": INDEXER,
    "deepseek2-ocr": {**DENSE_FIRST, **ALL_HEADS},
    "dots1": {**DENSE_FIRST, **ALL_HEADS},
    "ernie4_5-moe": {**DENSE_FIRST, "interleave_moe_layer_step": 1},
    "glm4moe": {**DENSE_FIRST, "rope.dimension_count": 8},
    "gpt2": ALL_HEADS,
    "gptneox": {**ALL_HEADS, "use_parallel_residual": True},
    "granite": SCALED,
    "granitemoe": {**SCALED, **EXPERTS},
    "grok": {**EXPERTS, "embedding_scale": 3.0},
    "grovemoe": {**EXPERTS, "expert_chunk_feed_forward_length": 32, "expert_group_scale": 0.5, "experts_per_group": 2},
    "hunyuan_vl": PLANES,
    "mistral4": LATENT,
    "mpt": ALL_HEADS,
    "nanbeige": {},
    "olmoe": {**EXPERTS, **ALL_HEADS},
    "openelm": {
        **SHORT_HEADS,
        "attention.head_count": [4, 4, 8, 8],
        "attention.head_count_kv": [2, 2, 4, 4],
        "feed_forward_length": [64, 96, 128, 160],
    },
    "paddleocr": PLANES,
    "qwen": {**ALL_HEADS, "feed_forward_length": 128},
    "qwen2vl": PLANES,
    "qwen3vl": {**PLANES, "n_deepstack_layers": 2},
    "qwen3vlmoe": {**EXPERTS, **PLANES, "n_deepstack_layers": 2},
}

WINDOW: Metadata = {"attention.sliding_window": 8}
WINDOW_ARRAY: Metadata = {**WINDOW, "attention.sliding_window_pattern": [True, True, False, True, True, False]}
BASES: Metadata = {"rope.freq_base": 1e5, "rope.freq_base_swa": 1e3}

LONGER = [
    RandomModel("afmoe", 12, {**DENSE_FIRST, **WINDOW}),
    RandomModel("cohere2", 6, {**WINDOW, "logit_scale": 0.5}),
    RandomModel("cohere2moe", 6, {**DENSE_FIRST, **WINDOW, "logit_scale": 0.5}),
    RandomModel(
        "deci",
        6,
        {
            **SHORT_HEADS,
            "attention.head_count": [4, 0, 4, 8, 4, 4],
            "attention.head_count_kv": [2, 0, 0, 4, 2, 2],
            "feed_forward_length": [64, 96, 128, 160, 0, 96],
        },
    ),
    RandomModel("exaone-moe", 6, {**DENSE_FIRST, **WINDOW}),
    RandomModel("gemma2", 6, {**WINDOW, "attn_logit_softcapping": 50.0}, without=("/output.weight", "attn_q.bias")),
    RandomModel("gemma3", 8, {**WINDOW, **BASES}),
    RandomModel(
        "gemma4",
        6,
        {
            **WINDOW_ARRAY,
            **BASES,
            "embedding_length_per_layer_input": 0,
            "attention.head_count_kv": [2, 2, 1, 2, 2, 1],
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.key_length_swa": 16,
            "attention.value_length_swa": 16,
            "rope.dimension_count": 32,
            "rope.dimension_count_swa": 16,
        },
    ),
    RandomModel("gpt-oss", 6, {**EXPERTS, **WINDOW}),
    RandomModel("granite_swa", 6, {**WINDOW_ARRAY, **SCALED}),
    RandomModel(
        "laguna",
        12,
        {
            **SHARED,
            **WINDOW,
            **SHORT_HEADS,
            "leading_dense_block_count": 1,
            "attention.head_count": [4, 2, 2, 2] * 3,
            "rope.dimension_count": 8,
            "rope.dimension_count_swa": 16,
        },
    ),
    RandomModel("llama4", 12, {**SHARED, "interleave_moe_layer_step": 2}),
    RandomModel("maple", 6, {**EXPERTS, **WINDOW_ARRAY, "swiglu_clamp_exp": [7.0, 6.0, 5.0, 1.0, 0.5, 0.3]}),
    RandomModel("mellum", 6, {**EXPERTS, **WINDOW}),
    RandomModel("mimo2", 6, {**EXPERTS, **WINDOW_ARRAY}),
    RandomModel("muse-glimmer", 6, {**WINDOW, "logit_scale": 0.5}),
    RandomModel("olmo2", 6, WINDOW),
    RandomModel("plamo3", 9, WINDOW),
    RandomModel("smallthinker", 24, {**EXPERTS, **WINDOW}),
    RandomModel("smollm3", 12),
    RandomModel("spark2_5", 6, WINDOW_ARRAY),
    RandomModel("step35", 6, {**SHARED, **WINDOW_ARRAY, **BASES}),
]

SCAN: Metadata = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.time_step_rank": 4}
GROUPS: Metadata = {**SCAN, "ssm.group_count": 2}
DELTA: Metadata = {
    **PLANES,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
    "full_attention_interval": 2,
}
NO_HEADS: Metadata = {"attention.head_count": 0, "attention.head_count_kv": None, "feed_forward_length": 0}
HALF: Metadata = {"attention.head_count_kv": [0, 2] * 4}
KDA: Metadata = {**LATENT, "ssm.conv_kernel": 4, "kda.head_dim": 16, "attention.head_count_kv": [0, 1] * 4}
THIRDS: Metadata = {"attention.head_count_kv": [0, 2, 0] * 3, "feed_forward_length": [0, 0, 96] * 3}

STATES = [
    RandomModel(
        "bailingmoe3",
        8,
        {**KDA, "kda.gate_lower_bound": -5.0, "swiglu_clamp_exp": [0.0, 4.0] * 4, "swiglu_clamp_shexp": [0.0, 5.0] * 4},
    ),
    RandomModel("falcon-h1", 4, GROUPS),
    RandomModel("granitehybrid", 8, {**GROUPS, **HALF, **SCALED}),
    RandomModel("jamba", 8, {**SCAN, **HALF, **EXPERTS}),
    RandomModel("kimi-linear", 8, KDA),
    RandomModel("lfm2", 8, {**HALF, "shortconv.l_cache": 3}),
    RandomModel("lfm2moe", 8, {**HALF, **DENSE_FIRST, "shortconv.l_cache": 3}),
    RandomModel("mamba", 4, {**SCAN, **NO_HEADS}),
    RandomModel("mamba2", 4, {**GROUPS, **NO_HEADS}),
    RandomModel("nemotron_h", 9, {**GROUPS, **THIRDS}),
    RandomModel("nemotron_h_moe", 9, {**GROUPS, **THIRDS, **SHARED}),
    RandomModel("plamo2", 8, {**SCAN, **HALF, "ssm.group_count": 0}),
    RandomModel("qwen35", 8, DELTA),
    RandomModel("qwen35moe", 8, {**DELTA, **SHARED}),
    RandomModel("qwen3next", 8, {**DELTA, **SHARED}),
]

MODELS: dict[str, RandomModel] = {
    **{name: RandomModel(name) for name in PLAIN.split()},
    **{name: RandomModel(name, metadata=EXPERTS) for name in WITH_EXPERTS.split()},
    **{name: RandomModel(name, metadata=metadata) for name, metadata in FOUR.items()},
    **{model.architecture: model for model in (*LONGER, *STATES)},
}

WITH_EXTRA_LAYERS = """bailingmoe3 cohere2moe deepseek2 deepseek32 glm-dsa glm4moe hy_v3 mimo2 qwen35 qwen35moe
    qwen3next step35"""


def with_extra_layer(model: RandomModel) -> RandomModel:
    """The same with one more layer, which guesses ahead."""
    metadata = {
        key: [*value, value[-1]] if isinstance(value, list) and len(value) == model.n_layer else value
        for key, value in model.metadata.items()
    }
    return replace(model, n_layer=model.n_layer + 1, metadata={**metadata, "nextn_predict_layers": 1})
