"""llama.cpp's environment variables, LLAMA_ARG_*: those of options that are there are read, of others it is said that
they are not. The names are those of the pinned llama.cpp and of a few older ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import click

from pipeinfer.cli.options.llama_flags import HARMLESS, INSTEAD, NOT_SERVED, OFF, SERVER

PREFIX = "LLAMA_ARG_"
NEGATION = f"{PREFIX}NO_"

_VARIABLES = (
    "THREADS -t CTX_SIZE -c KV_UNIFIED_PER_SLOT --kv-unified-per-slot N_PREDICT -n BATCH -b UBATCH -ub "
    "SWA_FULL --swa-full CTX_CHECKPOINTS -ctxcp CHECKPOINT_MIN_SPACING_NT -cms CACHE_RAM -cram KV_UNIFIED -kvu "
    "CACHE_IDLE_SLOTS --cache-idle-slots CONTEXT_SHIFT --context-shift FLASH_ATTN -fa PERF --perf "
    "SHOW_TIMINGS --show-timings TEMPERATURE --temp TOP_K --top-k TOP_P --top-p MIN_P --min-p "
    "REPEAT_PENALTY --repeat-penalty PRESENCE_PENALTY --presence-penalty FREQUENCY_PENALTY --frequency-penalty "
    "BACKEND_SAMPLING -bs POOLING --pooling ROPE_SCALING_TYPE --rope-scaling ROPE_SCALE --rope-scale "
    "ROPE_FREQ_BASE --rope-freq-base ROPE_FREQ_SCALE --rope-freq-scale YARN_ORIG_CTX --yarn-orig-ctx "
    "YARN_EXT_FACTOR --yarn-ext-factor YARN_ATTN_FACTOR --yarn-attn-factor YARN_BETA_SLOW --yarn-beta-slow "
    "YARN_BETA_FAST --yarn-beta-fast GRP_ATTN_N -gan GRP_ATTN_W -gaw KV_OFFLOAD -kvo REPACK --repack "
    "NO_HOST --no-host CACHE_TYPE_K -ctk CACHE_TYPE_V -ctv DEFRAG_THOLD -dt N_PARALLEL --parallel CONT_BATCHING -cb "
    "MMPROJ -mm MMPROJ_URL -mmu MMPROJ_AUTO --mmproj-auto MMPROJ_OFFLOAD --mmproj-offload "
    "IMAGE_MIN_TOKENS --image-min-tokens IMAGE_MAX_TOKENS --image-max-tokens "
    "MTMD_BATCH_MAX_TOKENS --mtmd-batch-max-tokens VIDEO_FPS --video-fps "
    "VIDEO_TIMESTAMP_INTERVAL --video-timestamp-interval VIDEO_FFMPEG_DIR --video-ffmpeg-dir RPC --rpc "
    "LOAD_MODE -lm LAZY_MODE -lzm NUMA --numa DEVICE -dev OVERRIDE_TENSOR -ot CPU_MOE -cmoe N_CPU_MOE -ncmoe "
    "N_CPU_FFN -ncffn N_GPU_LAYERS -ngl SPLIT_MODE -sm TENSOR_SPLIT -ts MAIN_GPU -mg FIT -fit FIT_TARGET -fitt "
    "FIT_CTX -fitc ALIAS -a TAGS --tags MODEL -m MODEL_URL -mu DOCKER_REPO -dr HF_REPO -hf HF_FILE -hff HOST --host "
    "PORT --port REUSE_PORT --reuse-port STATIC_PATH --path CORS_ORIGINS --cors-origins CORS_METHODS --cors-methods "
    "CORS_HEADERS --cors-headers CORS_CREDENTIALS --cors-credentials API_PREFIX --api-prefix UI_CONFIG --ui-config "
    "UI_CONFIG_FILE --ui-config-file UI_MCP_PROXY --ui-mcp-proxy TOOLS --tools TOOLS_RUNTIME --tools-runtime "
    "MCP_SERVERS_CONFIG --mcp-servers-config MCP_SERVERS_JSON --mcp-servers-json AGENT -ag UI --ui "
    "EMBEDDINGS --embedding RERANKING --rerank API_KEY_FILE --api-key-file SSL_KEY_FILE --ssl-key-file "
    "SSL_CERT_FILE --ssl-cert-file CHAT_TEMPLATE_KWARGS --chat-template-kwargs TIMEOUT -to "
    "SSE_PING_INTERVAL --sse-ping-interval THREADS_HTTP --threads-http CACHE_PROMPT --cache-prompt "
    "CACHE_REUSE --cache-reuse ENDPOINT_METRICS --metrics ENDPOINT_PROPS --props ENDPOINT_SLOTS --slots "
    "MODELS_DIR --models-dir MODELS_PRESET --models-preset MODELS_MAX --models-max "
    "MODELS_AUTOLOAD --models-autoload JINJA --jinja THINK --reasoning-format REASONING -rea "
    "REASONING_EFFORT --reasoning-effort THINK_BUDGET --reasoning-budget "
    "THINK_BUDGET_MESSAGE --reasoning-budget-message REASONING_PRESERVE --reasoning-preserve "
    "CHAT_TEMPLATE --chat-template CHAT_TEMPLATE_FILE --chat-template-file SKIP_CHAT_PARSING --skip-chat-parsing "
    "PREFILL_ASSISTANT --prefill-assistant LOG_FILE --log-file LOG_JSONL --log-jsonl LOG_COLORS --log-colors "
    "OFFLINE --offline LOG_VERBOSITY -lv LOG_PREFIX --log-prefix LOG_TIMESTAMPS --log-timestamps "
    "SPEC_DRAFT_HF_REPO --spec-draft-hf SPEC_DRAFT_CACHE_TYPE_K --spec-draft-type-k "
    "SPEC_DRAFT_CACHE_TYPE_V --spec-draft-type-v SPEC_DRAFT_CPU_MOE --spec-draft-cpu-moe "
    "SPEC_DRAFT_N_CPU_MOE --spec-draft-n-cpu-moe SPEC_DRAFT_N_MAX --spec-draft-n-max "
    "SPEC_DRAFT_N_MIN --spec-draft-n-min SPEC_SYNTH_LEN --spec-synth-len SPEC_SYNTH_RATES --spec-synth-rates "
    "SPEC_DRAFT_P_SPLIT --spec-draft-p-split SPEC_DRAFT_P_MIN --spec-draft-p-min "
    "SPEC_DRAFT_BACKEND_SAMPLING --spec-draft-backend-sampling N_GPU_LAYERS_DRAFT --spec-draft-ngl "
    "SPEC_DRAFT_MODEL --spec-draft-model SPEC_TYPE --spec-type DRAFT_MAX --draft DRAFT_MIN --draft-min"
    " MODEL_DRAFT -md"
)

VARIABLES: Mapping[str, str] = dict(
    zip((PREFIX + name for name in _VARIABLES.split()[::2]), _VARIABLES.split()[1::2], strict=True)
)
"""Variable -> the flag that it stands for."""

GUESSING = frozenset(("--draft", "--spec-draft-n-max", "--spec-draft-p-split", "--spec-draft-p-min"))
"""Options that only some policies have: the command line alone gives them."""


def read_variables(option: click.Parameter) -> None:
    """Let an option be given by these variables too; what the command line says comes first."""
    flags = {*option.opts, *option.secondary_opts} - GUESSING
    option.envvar = [name for name, flag in VARIABLES.items() if flag in flags] or None


def ignored_variables(command: click.Command, environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that is set and has no effect on the command, though it asks for something."""
    known = {name for option in command.params for name in _listed(option.envvar)}
    for name, value in sorted(environment.items()):
        of_others = command.name != "serve" and INSTEAD.get(VARIABLES.get(name, "")) in (SERVER, NOT_SERVED)
        is_unread = name.startswith(PREFIX) and name not in known and value and not of_others
        if is_unread and (line := _why(name, value)):
            yield line


def _why(name: str, value: str) -> str:
    """Why a variable has no effect; empty where nobody would expect one."""
    flag = VARIABLES.get(name, "")
    if not flag:
        is_negation = name.replace(NEGATION, PREFIX, 1) in VARIABLES  # what it switches off is not there anyway
        return "" if is_negation else f"{name} is set, which is not known here"
    if flag in GUESSING:
        return f"{name} is set and not read: which options guesses have depends on --policy; give {flag}"
    values = HARMLESS.get(flag, OFF)  # an option that is not there is as if it was switched off
    if values is None or value in values:
        return ""
    return f"{name} is set and not read: {INSTEAD.get(flag, f'{flag} {value} cannot be had here')}"


def _listed(names: str | Iterable[str] | None) -> Iterable[str]:
    return (names,) if isinstance(names, str) else names or ()
