"""The architectures that are known, one record each. Data; every record is proved in tests/test_architectures.py."""

from __future__ import annotations

from pipeinfer.models.gguf.architecture import PART, Architecture

PLAIN, PARTLY = Architecture(), Architecture(heads=PART)
HEADED, PARTLY_HEADED = Architecture(own_output=True), Architecture(own_output=True, heads=PART)


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
    # not to be cut ---------------------------------------------------------------------------------------------------
    **_refused(
        """bert clip eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert nomic-bert
        nomic-bert-moe pockettts qwen3tts t5 t5encoder wavtokenizer-dec""",
        "it does not write text, one token after the other",
    ),
    **_refused("dream llada llada-moe rnd1", "it fills in many tokens at once (diffusion), not one after the other"),
    **_refused("dflash eagle3 gemma4-assistant", "it guesses for another model, from that one's states"),
    **_refused("gemma3n graniteswitch qwen4exp", "its later layers need the tokens themselves"),
    **_refused("arwkv7 kimi-k3 rwkv7", "its later layers need what earlier ones computed, not the last one alone"),
    **_refused("talkie", "its later layers need the embeddings of the tokens"),
    **_refused("hrm_text", "its layers are gone through several times"),
    **_refused("rwkv6", "libllama normalises what comes into a slice once more"),
    **_refused("deepseek4 glm5-next hy_v4", "several residual streams run through its layers"),
    **_refused("baichuan minicpm3 minimax-01", "libllama computes a layer differently by how many layers the file has"),
    **_refused("cogvlm", "libllama takes what comes into a slice for an image"),
    **_refused("gptj", "libllama cannot compute it"),
}
