"""The gated delta rules of vLLM and of SGLang: calls in every mode and form that they have."""

from functools import partial
from typing import Any

import models_of_rules as models
import torch
from models_of_peers import Arguments
from peer_calls import AT_ONCE, BUFFER, DIM, DSTATE, GIVEN, HEADS, SLOTS, Calls, Door, Random, crossed, some

from flashstate.compat import sglang_delta, vllm_delta, vllm_kda

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
RAW, LOG = ("a", "b"), ("g", "beta")  # what gates are called, with and without A_log


def rule_arguments(
    pool: str,
    gates: tuple[str, str],
    device: torch.device,
    shape: tuple[int, int] = (3, 1),
    heads: int = 2,
    per_channel: bool = False,
    flat: bool = False,
    state_dtype: torch.dtype = FLOAT,
    x_dtype: torch.dtype = FLOAT,
    buffer: tuple[int, int] | None = None,
) -> Arguments:
    """What gated delta rules have, for tokens (B, T).

    pool: the name of the states. heads: of q and k. flat: gates have one token axis. buffer: rows and steps of it.
    """
    random, tokens = Random(device, shape[1] + heads), (shape[0] * shape[1],) if flat else shape
    channels = (DSTATE,) if per_channel else ()
    arguments: Arguments = {
        "q": random.normal(*shape, heads, DSTATE, dtype=x_dtype),
        "k": random.normal(*shape, heads, DSTATE, dtype=x_dtype),
        "v": random.normal(*shape, HEADS, DIM, dtype=x_dtype),
        pool: random.normal(SLOTS, HEADS, DIM, DSTATE, dtype=state_dtype),
        gates[0]: random.normal(*tokens, HEADS, *channels, dtype=x_dtype),
        gates[1]: random.uniform(*tokens, HEADS, dtype=x_dtype),
        "use_qk_l2norm_in_kernel": True,
    }
    if gates == RAW:
        arguments |= {"A_log": random.normal(HEADS), "dt_bias": random.normal(HEADS, *channels)}
    else:
        arguments["g"] = -arguments["g"].abs()
    if buffer is not None:
        arguments[BUFFER] = torch.full((*buffer, HEADS, DIM, DSTATE), 7.0, dtype=state_dtype, device=device)
    return arguments


def decode_arguments(
    device: torch.device, per_channel: bool = False, state_dtype: torch.dtype = FLOAT, x_dtype: torch.dtype = FLOAT
) -> Arguments:
    """What packed decodes have, for three rows: q, k and v side by side."""
    random, per_gate = Random(device, 5), HEADS * (DSTATE if per_channel else 1)
    return {
        "mixed_qkv": random.normal(3, 2 * 2 * DSTATE + HEADS * DIM, dtype=x_dtype),
        "a": random.normal(3, per_gate, dtype=x_dtype),
        "b": random.normal(3, HEADS, dtype=x_dtype),
        "A_log": random.normal(HEADS),
        "dt_bias": random.normal(per_gate),
        "scale": 0.3,
        "initial_state": random.normal(SLOTS, HEADS, DIM, DSTATE, dtype=state_dtype),
        "out": torch.full((3, 1, HEADS, DIM), 5.0, dtype=x_dtype, device=device),
        "use_qk_l2norm_in_kernel": True,
    }


def raw_kda_arguments(
    device: torch.device, shape: tuple[int, int] = (1, 3), packed: bool = False, state_dtype: torch.dtype = FLOAT,
    x_dtype: torch.dtype = FLOAT,
) -> Arguments:  # fmt: skip
    """What the delta rules of Kimi layers have, for tokens (1, tokens). packed: q, k and v side by side."""
    made = rule_arguments("initial_state", RAW, device, shape, HEADS, True, False, state_dtype, x_dtype)
    del made["use_qk_l2norm_in_kernel"]
    made |= {"raw_g": made.pop("a"), "raw_beta": made.pop("b"), "dt_bias": made["dt_bias"].flatten()}
    if packed:
        made["mixed_qkv"] = torch.cat([made.pop(name)[0].flatten(1) for name in "qkv"], 1)
    return {**made, "lower_bound": None}


TABLE = [[5, 1, 2], [9, 3, 4], [8, 6, 7]]
LENGTHS = {"shape": (1, 6), "cu_seqlens": [0, 3, 5, 6]}
FORMATS: Calls = {
    "": {},
    "not normalised": {"use_qk_l2norm_in_kernel": False, "scale": 0.5, "heads": 4},
    "bfloat16": {"x_dtype": BRAIN, "state_dtype": BRAIN, "indices": torch.int64},
}
VLLM_MODES: Calls = {
    "a token each": {"ssm_state_indices": [5, 0, 8], "flat": True},
    "packed": {**LENGTHS, "ssm_state_indices": [5, -1, 8], "flat": True},
    "several tokens": {"shape": (3, 3), "ssm_state_indices": [5, 9, 8]},
    "blocks": {"shape": (3, 2), "ssm_state_indices": [[5, 1, 2], [9, 0, 4], [8, 6, 7]]},
    "packed blocks": {**LENGTHS, "ssm_state_indices": TABLE},
}
VLLM_COUNTED: Calls = {
    "accepted": {**LENGTHS, "ssm_state_indices": TABLE, "num_accepted_tokens": [2, 3, 1], "flat": True},
    "accepted, a row skipped": {
        **LENGTHS, "ssm_state_indices": [[5, 1, 2], [0, 0, 0], [8, 6, 7]], "num_accepted_tokens": [1, 1, 3],
    },
    "accepted, more rows than the batch has": {
        "shape": (1, 4), "cu_seqlens": [0, 1, 4], "ssm_state_indices": TABLE, "num_accepted_tokens": [1, 2, 1],
    },
}  # fmt: skip
PARENTS = [[0, 0, 0, 1], [0, 0, 1, 2], [7, 0, 1, 0]]  # of roots, which come first, they say nothing
SGLANG_MODES: Calls = {
    "a token each": {"shape": (1, 3), "cu_seqlens": [0, 1, 2, 3], "initial_state_indices": [5, 0, 8]},
    "padding": {"initial_state_indices": [5, -1, 8]},
    "several tokens": {"shape": (3, 4), "initial_state_indices": [5, -1, 8]},
    "verify": {
        "shape": (1, 12), "cu_seqlens": [0, 4, 8, 12], "initial_state_indices": [5, 0, 8], "buffer": (4, 5),
        "intermediate_state_indices": [3, 0, 1], "cache_steps": 4, "disable_state_update": True,
    },
    "verify, and update": {
        "shape": (3, 2), "initial_state_indices": [5, -1, 8], "buffer": (3, 4),
        "intermediate_state_indices": [2, 1, -1],
    },
}  # fmt: skip
SGLANG_MODES |= {
    "a tree": {**SGLANG_MODES["verify"], "retrieve_parent_token": PARENTS},
    "a tree, dense": {
        "shape": (3, 4), "initial_state_indices": [5, 2, 8], "retrieve_parent_token": PARENTS,
        "disable_state_update": True,
    },
}  # fmt: skip
DECODES: Calls = {
    "": {"ssm_state_indices": [5, 9, 8]},
    "rows skipped": {"ssm_state_indices": [0, -1, 8], "indices": torch.int64},
    "bfloat16": {"ssm_state_indices": [5, 9, 8], "x_dtype": BRAIN, "state_dtype": BRAIN},
}
KDA: Calls = {"per channel": {"per_channel": True}}
OF_VLLM_RULE = crossed(VLLM_MODES | VLLM_COUNTED, FORMATS) | crossed(
    some(VLLM_MODES, "a token each") | some(VLLM_COUNTED, "accepted"), {"kda": {"per_channel": True, "is_kda": True}}
)
OF_SGLANG_RULE = crossed(SGLANG_MODES, FORMATS) | crossed(
    some(SGLANG_MODES, "a token each", "a tree"), {"kda": {"per_channel": True, "is_kda": True}}
)
OF_SGLANG_RULE["packed on two axes"] = {"shape": (2, 3), "cu_seqlens": [0, 4, 6], "initial_state_indices": [5, 8]}
POOL_MAY = "longer 0, shorter 0"
SOFTPLUS = {"softplus_beta": 1.0, "softplus_threshold": 20.0}
SHARED: dict[str, Any] = {"tokens": ("v", "q", "k"), "indices": ()}
GATES_MAY = {"A_log": "one more axis", "dt_bias": "one more axis"}

VLLM_RULE = Door(
    vllm_delta.fused_sigmoid_gating_delta_rule_update,
    "A_log, a, b, dt_bias, q, k, v, beta=1.0, threshold=20.0, scale=None, initial_state=None, "
    "inplace_final_state=True, cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, "
    "use_qk_l2norm_in_kernel=False, is_kda=False" + AT_ONCE,
    make=partial(rule_arguments, "initial_state", RAW), model=partial(models.rule, models.vllm, "initial_state"),
    pools={"initial_state": ""}, calls=OF_VLLM_RULE, **SHARED,
    right={
        "accepted": (
            VLLM_COUNTED["accepted"],
            {
                "initial_state": POOL_MAY, "ssm_state_indices": "longer 0, longer 1", "num_accepted_tokens": "longer 0",
                "cu_seqlens": "shorter 0", **GATES_MAY, "a": "one more axis", "b": "one more axis",
            },
        ),
    },
)  # fmt: skip
VLLM_KDA = Door(
    vllm_delta.fused_recurrent_kda,
    "q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, use_qk_l2norm_in_kernel=True, "
    "cu_seqlens=None, ssm_state_indices=None, **kwargs",
    make=partial(rule_arguments, "initial_state", LOG), model=partial(models.rule, models.vllm, "initial_state"),
    pools={"initial_state": ""}, calls=crossed(VLLM_MODES, KDA), **SHARED,
    right={
        "packed": (
            {**VLLM_MODES["packed"], **KDA["per channel"]},
            {
                "initial_state": POOL_MAY, "ssm_state_indices": "longer 0", "cu_seqlens": "shorter 0",
                "g": "one more axis", "beta": "one more axis",
            },
        ),
    },
)  # fmt: skip
VLLM_DECAYS = Door(
    vllm_delta.fused_recurrent_gated_delta_rule,
    "q, k, v, g, beta=None, scale=None, initial_state=None, inplace_final_state=True, cu_seqlens=None, "
    "ssm_state_indices=None, num_accepted_tokens=None, use_qk_l2norm_in_kernel=False" + AT_ONCE,
    make=partial(rule_arguments, "initial_state", LOG), model=partial(models.rule, models.vllm, "initial_state"),
    pools={"initial_state": ""}, **SHARED,
    calls={**VLLM_MODES, **VLLM_COUNTED, "no beta": {**VLLM_MODES["several tokens"], "beta": None}},
    right={
        "accepted": (
            {**VLLM_COUNTED["accepted"], "flat": False},
            {
                "initial_state": POOL_MAY, "ssm_state_indices": "longer 0, longer 1", "num_accepted_tokens": "longer 0",
                "cu_seqlens": "shorter 0",
            },
        ),
    },
)  # fmt: skip
RAW_KDA: Calls = {
    "a token each": {"cu_seqlens": [0, 1, 2, 3], "ssm_state_indices": [5, 0, 8]},
    "no bias": {"cu_seqlens": [0, 1, 2, 3], "ssm_state_indices": [5, 9, 8], "dt_bias": None},
    **{
        name: {option: value for option, value in call.items() if option != "flat"}
        for name, call in VLLM_COUNTED.items()
    },
}
RAW_KDA_MAY = {"A_log": "one more axis", "dt_bias": "missing, one more axis", "out": "overlapping"}  # in one row
BOUNDS: Calls = {"": {}, "a lower bound": {"lower_bound": -5.0}}
VLLM_RAW_KDA = Door(
    vllm_kda.fused_recurrent_kda,
    "q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens, ssm_state_indices, "
    "num_accepted_tokens=None, out=None, fuse_gate=None",
    make=raw_kda_arguments, model=partial(models.raw_kda, models.vllm), pools={"initial_state": ""},
    calls=crossed(RAW_KDA, BOUNDS, GIVEN), **SHARED,
    right={
        "accepted": (
            {**RAW_KDA["accepted"], "given": True},
            {
                "initial_state": POOL_MAY, "ssm_state_indices": "longer 0, longer 1", "num_accepted_tokens": "longer 0",
                "cu_seqlens": "shorter 0", **RAW_KDA_MAY,
            },
        ),
    },
)  # fmt: skip
SGLANG_RULE = Door(
    sglang_delta.fused_sigmoid_gating_delta_rule_update,
    "A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices, "
    "scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None, is_kda=False, lower_bound=None, "
    "disable_state_update=False, intermediate_states_buffer=None, intermediate_state_indices=None, cache_steps=None, "
    "retrieve_parent_token=None, cache_ring=False, replayssm_rawv=None, replayssm_rawk=None, replayssm_g=None, "
    "replayssm_beta=None, match_cutedsl_decode=False",
    make=partial(rule_arguments, "initial_state_source", RAW),
    model=partial(models.rule, models.sglang, "initial_state_source"),
    pools={"initial_state_source": "", BUFFER: ""}, calls=crossed(OF_SGLANG_RULE, {"": SOFTPLUS}), **SHARED,
    right={
        "a tree": (
            {**SGLANG_MODES["a tree"], **SOFTPLUS},
            {
                "initial_state_source": POOL_MAY, BUFFER: "longer 0, longer 1, shorter 0", **GATES_MAY,
                "intermediate_state_indices": "longer 0", "retrieve_parent_token": "longer 0, longer 1",
            },
        ),
    },
)  # fmt: skip
SGLANG_UPDATE = Door(
    sglang_delta.fused_recurrent_gated_delta_rule_update,
    "q, k, v, g, beta=None, scale=None, initial_state_source=None, initial_state_indices=None, cu_seqlens=None, "
    "use_qk_l2norm_in_kernel=False, disable_state_update=False, disable_output_calculation=False, "
    "intermediate_states_buffer=None, intermediate_state_indices=None, cache_steps=None, retrieve_parent_token=None",
    make=partial(rule_arguments, "initial_state_source", LOG),
    model=partial(models.rule, models.sglang, "initial_state_source"),
    pools={"initial_state_source": "", BUFFER: ""},
    calls={**SGLANG_MODES, "no beta": {**SGLANG_MODES["several tokens"], "beta": None}}, **SHARED,
    right={
        "a tree": (
            {**SGLANG_MODES["a tree"], "cache_steps": None, "buffer": (4, 4)},
            {
                "initial_state_source": POOL_MAY, BUFFER: "longer 0, shorter 0",
                "intermediate_state_indices": "longer 0", "retrieve_parent_token": "longer 0, longer 1",
            },
        ),
    },
)  # fmt: skip
PACKED_DECODE = (
    "mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel=False"
)
DECODE: dict[str, Any] = {
    "pools": {"initial_state": ""}, "tokens": ("mixed_qkv", "a", "b"), "indices": ("ssm_state_indices",),
    "right": {"three rows": (DECODES[""], {"initial_state": POOL_MAY, **GATES_MAY})},
}  # fmt: skip
VLLM_DECODE = Door(
    vllm_delta.fused_recurrent_gated_delta_rule_packed_decode, PACKED_DECODE, make=decode_arguments,
    model=partial(models.rule, partial(models.packed_decode, 0), "initial_state"), calls=DECODES, **DECODE,
)  # fmt: skip
VLLM_RAW_DECODE = Door(
    vllm_kda.fused_recurrent_kda_packed_decode,
    "mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, state_indices, scale=None, out=None",
    make=partial(raw_kda_arguments, packed=True), model=partial(models.raw_kda, partial(models.packed_decode, 0)),
    pools={"initial_state": ""}, tokens=("raw_g", "raw_beta"), indices=(),
    calls=crossed(
        {
            "": {"state_indices": [5, 9, 8], "scale": 0.3},
            "rows skipped": {"state_indices": [0, -1, 8], "indices": torch.int64},
            "bfloat16": {"state_indices": [5, 9, 8], "x_dtype": BRAIN, "state_dtype": BRAIN},
        },
        BOUNDS,
    ),
    right={
        "three rows": (
            {"state_indices": [5, 9, 8], "out": torch.full((1, 3, HEADS, DIM), 5.0)},
            {"initial_state": POOL_MAY, **RAW_KDA_MAY},
        ),
    },
)  # fmt: skip
SGLANG_DECODE = Door(
    sglang_delta.fused_recurrent_gated_delta_rule_packed_decode, PACKED_DECODE, make=decode_arguments,
    model=partial(models.rule, partial(models.packed_decode, -1), "initial_state"), calls=DECODES, **DECODE,
)  # fmt: skip
SGLANG_KDA = Door(
    sglang_delta.fused_recurrent_kda_packed_decode, PACKED_DECODE + ", lower_bound=None",
    make=partial(decode_arguments, per_channel=True),
    model=partial(models.rule, partial(models.packed_decode, -1), "initial_state"), calls=DECODES, **DECODE,
)  # fmt: skip
OF_VLLM = (VLLM_RULE, VLLM_DECAYS, VLLM_KDA, VLLM_DECODE, VLLM_RAW_KDA, VLLM_RAW_DECODE)
RULES = (*OF_VLLM, SGLANG_RULE, SGLANG_UPDATE, SGLANG_DECODE, SGLANG_KDA)
