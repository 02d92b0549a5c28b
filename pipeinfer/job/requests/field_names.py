"""Names of a request's fields: those that are read, and those that are accepted with some values alone. Reads no other
field."""

import json
from collections.abc import Container, Mapping
from typing import Any

from pipeinfer.core.sampling import SamplingParams
from pipeinfer.core.settings import settings_of
from pipeinfer.job.requests.chat_fields import CHAT_FIELDS
from pipeinfer.job.requests.fields import PassedOver, refuse, shown

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
"""As what may be asked."""

LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens")
PROMPTS = ("prompt", "messages")
WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_prompt",
    "stream_options", "prompt_cache_retention", "verbosity", "mirostat_tau", "mirostat_eta", "dynatemp_exponent",
    "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
)  # fmt: skip
ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "echo": (False,),
    "suffix": ("",), "modalities": (["text"],), "functions": ([],), "function_call": ("none", "auto"),
    # samplers that are off
    "typical_p": (1,), "typ_p": (1,), "tfs_z": (1,), "tfs": (1,), "mirostat": (0,), "mirostat_mode": (0,),
    "dynatemp_range": (0,), "dry_multiplier": (0,), "xtc_probability": (0,), "top_n_sigma": (-1, 0), "top_a": (0,),
    "epsilon_cutoff": (0,), "eta_cutoff": (0,), "min_keep": (0,), "min_tokens": (0,),
    # as it is anyway
    "post_sampling_probs": (False,), "use_beam_search": (False,), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
}  # fmt: skip
"""Fields that are accepted with these values alone, with which they change nothing. Others would change the text, and
cannot be served."""

IN_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "n_keep": (0, -1), "n_discard": (0,), "id_slot": (-1,), "t_max_predict_ms": (0, -1), "n_indent": (0,),
    "penalize_nl": (False,), "return_tokens": (False,), "length_penalty": (1,), "early_stopping": (False,),
    "spaces_between_special_tokens": (True,), "lora": ([],),
}  # fmt: skip
"""Fields that are passed over: with these values nothing is said of it."""

FORMS = ("grammar", "json_schema", "response_format")
"""What the text must be: one of them."""

ALIASES = {alias: name for name, _, setting in settings_of(SamplingParams) for alias in setting.aliases}
"""Other names of fields."""

KNOWN = {
    *(name for name, _, _ in settings_of(SamplingParams)), *ALIASES, *LENGTHS, *PROMPTS, *WITHOUT_EFFECT, *ONLY, *FORMS,
    *IN_EFFECT, *CHAT_FIELDS, "stop", "ignore_eos", "logit_bias", "logprobs", "top_logprobs", "n_probs", "priority",
    "parse_special", "add_special_tokens", "stop_token_ids",
}  # fmt: skip
"""Fields that a request may have."""


def served(given: Mapping[str, Any], passed: PassedOver, known: Container[str] = ()) -> dict[str, Any]:
    """The fields that are read here. `known`: further ones that somebody else reads. Raises UserError for a value that
    would change the text and cannot be served."""
    found = {}
    for name, value in given.items():
        if name in ONLY and name not in known and not any(value == each for each in ONLY[name]):
            offered = " or ".join(json.dumps(each) for each in ONLY[name])
            refuse(f"{name} is {shown(value)}; only {offered} can be served")
        if name in IN_EFFECT and not any(value == each for each in IN_EFFECT[name]):
            offered = " or ".join(json.dumps(each) for each in IN_EFFECT[name])
            passed.add(name, f"{name} is {shown(value)}; only {offered} can be served")
        elif name not in KNOWN and name not in known:
            passed.add(name, f"the field {shown(name)} is unknown; leave it out")
        else:
            found[name] = value
    return found
