"""The known architectures, one record each: where a model may be cut, and what the metadata of a slice say. Data; every
record is proved in tests/models/test_architectures.py."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Number = int | float

WHOLE, PART, FREE = "whole", "part", "free"


@dataclass(frozen=True, slots=True)
class Windows:
    """Layers with a sliding window: those of the metadata's array, else of every `period` layers all but the last, or
    all but the first with `full_first`. A number in the metadata replaces `period`.

    Without `always` a model has them if its window is more than 0, and a slice need not have one; with it libllama ends
    the process for a slice without. With `leads` the first layer of a slice must have no window: libllama takes the
    size of heads from it. With `chunks` the window is a chunk of the text: it begins at a multiple of its size."""

    period: int = 0
    full_first: bool = False
    always: bool = True
    leads: bool = False
    chunks: bool = False


@dataclass(frozen=True, slots=True)
class StateLayers:
    """Layers that have a state instead of keys and values: those with a 0 in all arrays under `zero`, the first of them
    that of heads; else those of the metadata's array under `key`, or of every `period` layers all but the last (a
    number under `period_key` replaces it). With `all` every layer has a state."""

    zero: tuple[str, ...] = ()
    key: str = ""
    period: int = 0
    period_key: str = ""
    all: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Models that cannot be cut: their `key` is `at_least` this, or one of `values`. `models`: their name for users."""

    models: str
    key: str
    why: str
    at_least: int | None = None
    values: tuple[int, ...] = ()

    def holds(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        return number in self.values or (self.at_least is not None and number >= self.at_least)


@dataclass(frozen=True, slots=True)
class Rescaled:
    """libllama divides queries by the root of n_embd / n_head in files with `n_layer` layers, and by the root of a
    head's length in all others, slices too. So `tensor` of each layer of a slice is multiplied with the quotient of the
    two, or is this quotient where the model has no such tensor. Results are the same up to rounding."""

    n_layer: int
    tensor: str


@dataclass(frozen=True, slots=True)
class Architecture:
    """own_output   libllama requires an output head beside the token table, also where only one of them is used
    heads        possible lengths of heads: WHOLE, keys and values of one length, all of it rotated; PART, not all of
                 it rotated; FREE, any
    states       its layers with a state: a slice must have some with and some without, and a sequence cannot go back,
                 so that there is no speculation
    of_full      tensors without a layer that only layers without a window use: a slice without such has none
    always       numbers of the metadata that every slice has instead of the model's
    missing      numbers that slices have where the model's metadata lack them, from the numbers of layers and tokens
    scaled       libllama scales the embeddings of tokens by the root of their length, but not incoming embeddings
    input_node   in slices after the first, the node of the graph that is the first layer's input, where incoming
                 embeddings are changed before
    by_tokens    libllama takes no embeddings, or reads their positions otherwise: all input, embeddings of tokens too,
                 overwrites `input_node`
    selects      the metadata's key of how many earlier tokens a row sees at most, those with the highest scores; ties
                 depend on the place of cells, so that `exact` holds for texts of so many tokens alone
    flash        libllama gives it flash attention, which prompts in blocks need: others are read as guesses are. Else
                 sums depend on the place of cells: `exact` holds for one text at a time without guesses"""

    refused: str = ""  # why no model of it can be cut; empty if they can
    refusals: tuple[Refusal, ...] = ()  # the same for some of its models
    own_output: bool = False
    heads: str = WHOLE
    headless: bool = False  # some layers may have no heads
    windows: Windows | None = None  # its layers with a sliding window
    states: StateLayers | None = None
    step: int | str = 1  # cuts are possible before every `step`th layer only; a text: the metadata's key of that number
    least: int = 1  # the fewest layers of a slice
    first_with: tuple[str, ...] = ()  # arrays of the metadata that have no 0 for the first layer of a slice
    last_with: tuple[str, ...] = ()  # the same for the last layer
    lengths_not: tuple[int, ...] = ()  # impossible numbers of layers: libllama would treat the slice as another model
    of_full: tuple[str, ...] = ()
    always: Mapping[str, Number] = field(default_factory=dict)
    later: Mapping[str, Number] = field(default_factory=dict)  # the same for slices after the first
    missing: Mapping[str, Callable[[int, int], Number]] = field(default_factory=dict)
    rescaled: Rescaled | None = None  # the correction of attention in slices of one size of model
    scaled: bool = False
    input_node: str = ""
    by_tokens: bool = False
    layer_node: str = "l_out"  # the node that is a layer's result, without its number
    end_node: str = ""  # the same for a file's last layer, where it has another name
    selects: str = ""
    exact: bool = True  # a row has the same bits in every batch with exact numerics
    flash: bool = True


PLAIN, PARTLY = Architecture(), Architecture(heads=PART)
HEADED, PARTLY_HEADED = Architecture(own_output=True), Architecture(own_output=True, heads=PART)

GEMMA4 = Refusal("E2B, E4B", "embedding_length_per_layer_input", "later layers need the tokens themselves", at_least=1)
BY_NUMBER = "libllama gives it a sliding window by the number of layers"
EXAONE4 = Refusal("with 64 layers (32B)", "block_count", BY_NUMBER, values=(64,))
COMMAND_R = Refusal("with 64 layers (R+)", "block_count", "libllama loads norms by the number of layers", at_least=64)
BUT_LAST = "libllama rotates all layers but the last of a file"
LLAMA4 = Refusal("without a sliding window", "attention.sliding_window", BUT_LAST, values=(0,))
BY_PLACE = "libllama knows which layers share an indexer by their place in the file"
GLM = Refusal("5.2", "context_length", BY_PLACE, at_least=1048576)
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
QWEN = StateLayers(key="attention.recurrent_layers", period=4, period_key="full_attention_interval")
HEADLESS = StateLayers(zero=("attention.head_count_kv",))
NEMOTRON = Architecture(
    heads=FREE,
    headless=True,
    states=StateLayers(zero=("attention.head_count_kv", "feed_forward_length")),
    layer_node="nemotron_h_block_out",
)


def _each(names: str, architecture: Architecture) -> dict[str, Architecture]:
    return dict.fromkeys(names.split(), architecture)


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
        heads=FREE, windows=Windows(), least=2, scaled=True, refusals=(GEMMA4,), of_full=("rope_freqs.weight",)
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
    "llama4": Architecture(windows=Windows(4, chunks=True), step=4, refusals=(LLAMA4,)),
    "afmoe": Architecture(heads=PART, windows=Windows(4, always=False), step=4, input_node="inp_embd_scaled"),
    "smallthinker": Architecture(windows=Windows(4, full_first=True), step=4, least=8),
    # input and numbers of layers --------------------------------------------------------------------------------------
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
    "falcon-h1": Architecture(heads=FREE, states=StateLayers(all=True)),
    **_each("mamba mamba2", Architecture(heads=FREE, headless=True, states=StateLayers(all=True))),
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
