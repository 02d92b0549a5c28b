"""The known architectures, one record each. Data; every record is proved in tests/models/test_architectures.py."""

import math

from pipeinfer.models.gguf.architecture import FREE, PART, Architecture, Refusal, Rescaled, States, Windows

PLAIN, PARTLY = Architecture(), Architecture(heads=PART)
HEADED, PARTLY_HEADED = Architecture(own_output=True), Architecture(own_output=True, heads=PART)

GEMMA4 = Refusal("E2B, E4B", "embedding_length_per_layer_input", "later layers need the tokens themselves", at_least=1)
EXAONE4 = Refusal(
    "with 64 layers (32B)", "block_count", "libllama gives it a sliding window by the number of layers", values=(64,)
)
COMMAND_R = Refusal("with 64 layers (R+)", "block_count", "libllama loads norms by the number of layers", at_least=64)
LLAMA4 = Refusal(
    "without a sliding window", "attention.sliding_window", "libllama rotates all layers but the last of a file",
    values=(0,),
)  # fmt: skip
GLM = Refusal(
    "5.2", "context_length", "libllama knows which layers share an indexer by their place in the file", at_least=1048576
)
NANBEIGE = Refusal("with loops", "num_loops", "its layers are gone through several times", at_least=2)
INDEXED = "attention.indexer.top_k"
LATENT = Architecture(
    heads=FREE,
    lengths_not=(26, 27),
    missing={
        "attention.q_lora_rank": lambda *_: 0,
        "expert_gating_func": lambda n_layer, n_vocab: 2 if n_layer in (47, 48) and n_vocab == 154880 else 1,
    },
)
QWEN = States(key="attention.recurrent_layers", period=4, period_key="full_attention_interval")
HEADLESS = States(zero=("attention.head_count_kv",))
NEMOTRON = Architecture(
    heads=FREE,
    headless=True,
    states=States(zero=("attention.head_count_kv", "feed_forward_length")),
    layer_node="nemotron_h_block_out",
)


def _each(names: str, known: Architecture) -> dict[str, Architecture]:
    return dict.fromkeys(names.split(), known)


def _refused(names: str, why: str) -> dict[str, Architecture]:
    return _each(names, Architecture(refused=why))


ARCHITECTURES: dict[str, Architecture] = {
    **_each(
        """arcee arctic deepseek ernie4_5 exaone falcon grovemoe hunyuan-dense hunyuan-moe hy_v3 jais2 llama maincoder
        mistral3 olmo pangu-embedded qwen2 qwen3 qwen3moe seed_oss starcoder2""",
        PLAIN,
    ),
    **_each("apertus codeshell dbrx dots1 internlm2 minimax-m2 nemotron olmoe orion plamo qwen2moe xverse", HEADED),
    **_each("bitnet chatglm phi3 refact", PARTLY),
    **_each("bailingmoe bailingmoe2 gptneox jais phi2 phimoe qwen stablelm", PARTLY_HEADED),
    # layers with a sliding window -------------------------------------------------------------------------------------
    "gpt-oss": Architecture(heads=FREE, windows=Windows(2), own_output=True),
    "gemma3": Architecture(
        heads=FREE, windows=Windows(6, always=False), scaled=True, rescaled=Rescaled(62, "attn_q_norm.weight")
    ),
    "gemma2": Architecture(
        heads=FREE, windows=Windows(2), input_node="inp_scaled", rescaled=Rescaled(46, "attn_q.scale")
    ),
    "gemma": Architecture(heads=FREE, input_node="inp_scaled"),
    "gemma4": Architecture(
        heads=FREE,
        windows=Windows(),
        least=2,
        scaled=True,
        refusals=(GEMMA4,),
        of_full=("rope_freqs.weight",),
    ),
    "olmo2": Architecture(windows=Windows(4, always=False), own_output=True),
    "mellum": Architecture(windows=Windows(4, always=False), own_output=True),
    "plamo3": Architecture(heads=FREE, windows=Windows(8, always=False)),
    "cohere2": Architecture(heads=PART, windows=Windows(4)),
    "cohere2moe": Architecture(windows=Windows(4, full_first=True)),
    "exaone-moe": Architecture(own_output=True, windows=Windows(4)),
    "granite_swa": Architecture(windows=Windows(), later={"embedding_scale": 0.0}),
    "maple": Architecture(own_output=True, heads=FREE, windows=Windows()),
    "mimo2": Architecture(own_output=True, heads=FREE, windows=Windows()),
    "spark2_5": Architecture(heads=FREE, windows=Windows()),
    "step35": Architecture(own_output=True, heads=FREE, windows=Windows(), end_node="h_nextn"),
    "muse-glimmer": Architecture(own_output=True, heads=PART, windows=Windows(4), input_node="embd_norm"),
    "laguna": Architecture(heads=PART, windows=Windows(4, full_first=True, always=False, leads=True)),
    "llama4": Architecture(windows=Windows(4), step=4, refusals=(LLAMA4,)),
    "afmoe": Architecture(heads=PART, windows=Windows(4, always=False), step=4, input_node="inp_embd_scaled"),
    "smallthinker": Architecture(windows=Windows(4, full_first=True), step=4, least=8),
    # what comes in, and how layers count ------------------------------------------------------------------------------
    "smollm3": Architecture(step=4),
    "ernie4_5-moe": Architecture(step="interleave_moe_layer_step"),
    "exaone4": Architecture(refusals=(EXAONE4,)),
    "command-r": Architecture(heads=PART, refusals=(COMMAND_R,)),
    **_each("granite granitemoe", Architecture(later={"embedding_scale": 0.0})),
    "grok": Architecture(later={"embedding_scale": 0.0}, flash=False),
    "minicpm": Architecture(
        later={"embedding_scale": 0.0}, missing={"residual_scale": lambda n_layer, _: 1.4 / math.sqrt(n_layer)}
    ),
    **_each("gpt2 starcoder mpt", Architecture(heads=PART, input_node="inpL")),
    "bloom": Architecture(heads=PART, input_node="inp_norm-0"),
    "openelm": Architecture(heads=FREE),
    "glm4": Architecture(heads=PART, input_node="embd", by_tokens=True),
    "glm4moe": Architecture(heads=PART, input_node="embd", by_tokens=True),
    **_each("qwen2vl paddleocr hunyuan_vl", Architecture(input_node="embd", by_tokens=True)),
    **_each("qwen3vl qwen3vlmoe", Architecture(input_node="embd", by_tokens=True, always={"n_deepstack_layers": 0})),
    **_each("deepseek2 mistral4", LATENT),
    "deepseek32": Architecture(heads=FREE, selects=INDEXED),
    "glm-dsa": Architecture(heads=FREE, first_with=("attention.indexer.types",), refusals=(GLM,), selects=INDEXED),
    "nanbeige": Architecture(refusals=(NANBEIGE,)),
    "deci": Architecture(
        headless=True,
        first_with=("attention.head_count", "attention.head_count_kv"),
        last_with=("feed_forward_length",),
    ),
    "deepseek2-ocr": Architecture(heads=FREE),
    # layers with states ----------------------------------------------------------------------------------------------
    **_each("qwen35 qwen35moe", Architecture(heads=PART, states=QWEN, input_node="model.input_embed", by_tokens=True)),
    "qwen3next": Architecture(heads=PART, states=QWEN),
    "granitehybrid": Architecture(heads=PART, states=HEADLESS, headless=True, later={"embedding_scale": 0.0}),
    **_each("jamba lfm2 lfm2moe", Architecture(heads=FREE, headless=True, states=HEADLESS)),
    "kimi-linear": Architecture(own_output=True, heads=FREE, headless=True, states=HEADLESS),
    "plamo2": Architecture(heads=FREE, headless=True, states=HEADLESS, layer_node="ffn_residual"),
    "bailingmoe3": Architecture(
        heads=FREE, headless=True, states=HEADLESS, input_node="model.input_embed", by_tokens=True
    ),
    **_each("nemotron_h nemotron_h_moe", NEMOTRON),
    "falcon-h1": Architecture(heads=FREE, states=States(all=True)),
    **_each("mamba mamba2", Architecture(heads=FREE, headless=True, states=States(all=True))),
    # not to be cut ---------------------------------------------------------------------------------------------------
    **_refused(
        """bert clip eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert nomic-bert
        nomic-bert-moe pockettts qwen3tts t5 t5encoder wavtokenizer-dec""",
        "it does not write text, one token after the other",
    ),
    **_refused("dream llada llada-moe rnd1", "it fills in many tokens at once (diffusion), not one after the other"),
    **_refused("eagle3", "it guesses for another model, from that one's states: give it as a draft, with -md"),
    **_refused("dflash gemma4-assistant", "it guesses for another model, from that one's states"),
    **_refused("gemma3n graniteswitch qwen4exp", "its later layers need the tokens themselves"),
    **_refused("arwkv7 kimi-k3 rwkv7", "its later layers need what earlier ones computed, not the last one alone"),
    **_refused("talkie", "its later layers need the embeddings of the tokens"),
    **_refused("hrm_text", "its layers are gone through several times"),
    **_refused("rwkv6", "libllama normalises what comes into a slice once more"),
    **_refused("deepseek4 glm5-next hy_v4", "several residual streams run through its layers"),
    **_refused("baichuan minicpm3 minimax-01", "libllama computes a layer differently by how many layers the file has"),
    **_refused("cogvlm", "libllama takes what comes into a slice for an image"),
    **_refused("chameleon", "libllama implements a half of it"),
    **_refused("dots3note", "it is not proved: several kinds of caches at once"),
    **_refused("minimax-m3", "libllama computes its sparse attention for a lone sequence only"),
    **_refused("rwkv6qwen2", "it could not be proved: libllama crashes on random models of it"),
    **_refused("plm", "libllama ends the process where several of its rows are computed with flash attention"),
    **_refused("gptj", "libllama cannot compute it"),
}
