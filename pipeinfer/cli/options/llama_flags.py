"""llama.cpp's flags that a command here lacks: what to use instead, and those without effect. Knows no click."""

from collections.abc import Mapping, Set

OFF = ("off", "0", "false", "disabled", "auto", "-1")

ANY = ()
"""A flag's value, whatever it is."""

OPTIONAL = ("on", "off", "auto")
"""The value that may follow --color."""

HARMLESS: Mapping[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("-fa", "--flash-attn"), ("on", "1", "true", "enabled", "auto", "-1")),
    **dict.fromkeys(("-co", "--color"), OPTIONAL),
    "--log-colors": OFF,
    **dict.fromkeys(("-ub", "--ubatch-size", "-tb", "--threads-batch"), ANY),
    **dict.fromkeys(("-fit", "--fit"), OFF[:4]),
    **dict.fromkeys(("-sm", "--split-mode"), ("layer",)),
    **dict.fromkeys(("-np", "--parallel"), ("1",)),
    **dict.fromkeys(
        ("-no-cnv", "--no-conversation", "--no-display-prompt", "--simple-io", "--perf", "--warmup", "--no-warmup",
         "--no-context-shift", "-kvu", "--kv-unified", "--swa-full", "--no-op-offload", "--jinja",
         "--log-disable", "--no-webui",
         "--no-show-timings", "--skip-chat-parsing", "--mmap", "--no-mmap", "--mlock"),
    ),
}  # fmt: skip
"""Flag -> the values that change nothing here; None: it takes none. They are accepted and do nothing."""

_BATCHING = frozenset(("-cb", "--cont-batching"))
ANYWAY: Mapping[str, Set[str]] = {
    "serve": _BATCHING, "batch": _BATCHING, "chat": frozenset(("-cnv", "--conversation")),
}  # fmt: skip
"""Command -> flags that ask for what it does in any case."""

_CHAT = "`pipeinfer chat`, or -cnv, talks with the model; `run --chat` asks it once"
_REASONING = "reasoning is printed as the model writes it; --chat-template-kwargs sets what its template looks at"
_DOWNLOAD = "give a model of the hub with -hf USER/MODEL[:QUANT], a file with -m FILE (drafts with -hfd and -md)"
_SAMPLER = "there is no such sampler; --temp, --top-k, --top-p, --min-p and the penalties are there"
SERVER = "`pipeinfer serve` has this option: it is the server, other commands have no use for it"
NOT_SERVED = "`pipeinfer serve` is the server, and has nothing of this kind"
_MEDIA = "there are no images, sounds or videos; models read text"
_CONTEXT = "a model's context is used as its file says; -c sets the size"
_CACHE = "a rank has one cache for all texts, and packs it when that is worth it"
_DEVICES = "each rank uses its own GPUs; -ngl and --layer-split say how many layers, --device which GPUs"
_DRAFT_DEVICES = "a draft follows -ngl and --device of its rank"
_OFFLOAD = "weights go to a GPU by whole layers: -ngl N"
_CORES = "cores are the launcher's: mpirun --bind-to, srun --cpu-bind; -t sets the threads of each rank"
_THREADS = "a rank has one number of threads for prompts and text: -t, one value or one a rank (rank 0 drafts)"
_LOADING = "a rank maps its layers or reads them, as --numerics wants; --slice-cache DIR keeps them on disk"
_LORA = "there are no adapters and no control vectors; merge them into the model file"
_KEPT = "no prompt is kept between runs; texts go on after a restart with --resume or `pipeinfer supervise`"
_SPLIT_DRAFT = "-pa, -ps, --width and --draft shape what is guessed"
_NGRAM = "guesses come from draft models: -md FILE; " + _SPLIT_DRAFT
_LOGS = "-v says more; what is said goes to standard error"
_MEASURE = "no quality is measured; `pipeinfer bench` measures speed"
_TEXT = "no such text is added; write it into -p or the file of -f"

_INSTEAD = {
    "-cl --cache-list": "pipeinfer models list",
    "-mu --model-url -dr --docker-repo --spec-default --mtp --dflash --eagle3 --embd-gemma-default "
    "--fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec "
    "--fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default "
    "--vision-gemma-12b-default": _DOWNLOAD,
    "-i --interactive -if --interactive-first -mli --multiline-input -ins --instruct": _CHAT,
    "--chat-template": "the model's own template is used, or that of --chat-template-file FILE",
    "--no-jinja": "chat templates are always rendered by Jinja, without --chat none is",
    "-rea --reasoning --reasoning-format --reasoning-effort --reasoning-budget --reasoning-budget-message "
    "--reasoning-preserve --no-reasoning-preserve --no-skip-chat-parsing": _REASONING,
    "--prefill-assistant --no-prefill-assistant": "an answer begins empty; without --chat -p may hold its beginning",
    "--in-prefix --in-suffix --in-prefix-bos": _TEXT,
    "-sp --special": "tokens are shown as text, special ones as the vocabulary writes them",
    "--display-prompt": "the prompt is not repeated; standard output is the text that follows it",
    "--verbose-prompt": "--json tells the prompt's tokens",
    "-bf --binary-file": "a prompt is UTF-8 text: -f FILE",
    "--in-file --context-file": "one prompt a job: -f FILE; `bench -p` takes several",
    "-o --output --output-file": "redirect standard output: > FILE",
    "-td --threads-draft --spec-draft-threads -tbd --threads-batch-draft --spec-draft-threads-batch": _THREADS,
    "-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch "
    "--cpu-strict-batch --prio-batch --poll-batch -Cd --cpu-mask-draft --spec-draft-cpu-mask -Crd --cpu-range-draft "
    "--spec-draft-cpu-range --cpu-strict-draft --spec-draft-cpu-strict --prio-draft --spec-draft-prio --poll-draft "
    "--spec-draft-poll -Cbd --cpu-mask-batch-draft --spec-draft-cpu-mask-batch -Crbd --cpu-range-batch-draft "
    "--spec-draft-cpu-range-batch --cpu-strict-batch-draft --spec-draft-cpu-strict-batch --prio-batch-draft "
    "--spec-draft-prio-batch --poll-batch-draft --spec-draft-poll-batch": _CORES,
    "-cd --ctx-size-draft": "a draft has the target's context: -c",
    "--keep --context-shift": "the text ends when the context is full; -c N makes it larger",
    "-fa --flash-attn": "attention is flash attention wherever --numerics allows it; it cannot be switched off",
    "-fit --fit -fitp --fit-print -fitt --fit-target -fitc --fit-ctx": "nothing is changed to make a model fit; -c, "
    "-ngl and --layer-split do, or more ranks",
    "--log-colors": "nothing is coloured; the text is printed as it comes",
    "-np --parallel -cb --cont-batching -nocb --no-cont-batching": "one prompt a run; "
    "pipeinfer batch and pipeinfer serve have many and --parallel, mpirun -np N starts ranks, --sequences sets the "
    "branches of a tree",
    "--no-perf --show-timings": "the figures go to standard error (2>/dev/null), and into --json",
    "--samplers --sampler-seq --sampling-seq": "the order of samplers is llama.cpp's and fixed; threads "
    "that sample are --sampler-threads",
    "--top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical "
    "--typical-p --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker "
    "--adaptive-target --adaptive-decay --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent "
    "-bs --backend-sampling --spec-draft-backend-sampling --no-spec-draft-backend-sampling "
    "--tfs": _SAMPLER,
    "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
    "--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -gan --grp-attn-n -gaw --grp-attn-w --override-kv "
    "--pooling --attention": _CONTEXT,
    "-dt --defrag-thold -no-kvu --no-kv-unified --kv-unified-per-slot": _CACHE,
    "-kvo --kv-offload -nkvo --no-kv-offload -ot --override-tensor -otd --override-tensor-draft "
    "--spec-draft-override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn -cmoed --cpu-moe-draft "
    "--spec-draft-cpu-moe -ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe --op-offload "
    "--no-host": _OFFLOAD,
    "-nr": "--no-repack",
    "-sm --split-mode -ts --tensor-split -mg --main-gpu": _DEVICES,
    "--list-devices": "pipeinfer info",
    "-devd --device-draft --spec-draft-device": _DRAFT_DEVICES,
    "--rpc": "the machines are those that mpirun starts ranks on: mpirun -f hosts -np N pipeinfer run …",
    "-mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload --no-mmproj-offload "
    "-mmdev --mmproj-device --image --audio --video --image-min-tokens --image-max-tokens --mtmd-batch-max-tokens "
    "--video-fps --video-timestamp-interval --video-ffmpeg-dir --media-path": _MEDIA,
    "-lm --load-mode -lzm --lazy-mode -dio --direct-io --check-tensors": _LOADING,
    "--lora --lora-scaled --lora-init-without-apply --control-vector --control-vector-scaled "
    "--control-vector-layer-range": _LORA,
    "--prompt-cache --prompt-cache-all --prompt-cache-ro --slot-save-path "
    "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic": _KEPT,
    "--draft-min --draft-n-min --spec-draft-n-min": "a tree has no least size; " + _SPLIT_DRAFT,
    "--spec-type": "-md FILE is known by its file; -md mtp is the head in the target's own, --lookup takes n-grams",
    "--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n "
    "--spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m "
    "--spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits "
    "--spec-synth-len --spec-synth-rates --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits": _NGRAM,
    "-ptc --print-token-count": "progress and the count of tokens are on standard error",
    "--log-file --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --log-jsonl "
    "--no-log-jsonl --log-prompts-dir -lv --verbosity --log-verbosity --log-verbose": _LOGS,
    "--timeout": "of a client that does not read `pipeinfer serve` has this option, of a rank that gives no sign "
    "it is --rank-timeout",
    "--host --port --api-key --api-key-file --ssl-key-file --ssl-cert-file -to --metrics --slots --no-slots "
    "-a --alias --ui --no-ui": SERVER,
    "--path --api-prefix --threads-http --props --embedding --embeddings "
    "--rerank --reranking --server-base --webui --tools -cram --cache-ram --cache-reuse "
    "-ctxcp --ctx-checkpoints --swa-checkpoints -sps --slot-prompt-similarity --models-dir --models-max "
    "--models-preset --models-autoload --no-models-autoload -cms --checkpoint-min-step --cache-idle-slots "
    "--no-cache-idle-slots --spm-infill --tags --embd-normalize --reuse-port --cors-methods "
    "--cors-headers --cors-credentials --no-cors-credentials "
    "--ui-config --webui-config --ui-config-file --webui-config-file --ui-mcp-proxy "
    "--webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy --tools-runtime --mcp-servers-config --mcp-servers-json "
    "-ag --agent -no-ag --no-agent --sse-ping-interval --sleep-idle-seconds": NOT_SERVED,
    "--cache-prompt --no-cache-prompt": "`pipeinfer chat` and `serve` keep what was said, `run` has nothing to",
    "--hellaswag --winogrande --multiple-choice --kl-divergence --ppl-stride --chunks": _MEASURE,
    "--completion-bash": "_PIPEINFER_COMPLETE=bash_source pipeinfer prints the completion script",
    "--usage": "-h lists the options",
    "--version": "`pipeinfer` itself has this option: write it before any command",
}

INSTEAD: Mapping[str, str] = {name: says for names, says in _INSTEAD.items() for name in names.split()}
"""Flag -> why there is none, and the nearest that there is."""

OF_RUN: Mapping[str, str] = {
    **dict.fromkeys(("-st", "--single-turn", "--chat"), "`pipeinfer run --chat` asks a model once"),
    **dict.fromkeys(("-cnv", "--conversation"), "`pipeinfer chat` talks with a model"),
    **dict.fromkeys(("--trace", "--results"), "it is of one text: `pipeinfer run` has this option"),
}
"""The same of flags that `run` has, for other commands."""

RANKS = "-np"
"""The launcher's, where nothing is launched; to llama.cpp it is how many texts there are at a time."""
NODES = "--nodes"
"""What counts them in the commands that have it."""
