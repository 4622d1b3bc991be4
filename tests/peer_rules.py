"""The gated delta rules of FlashInfer, vLLM, SGLang and fla: calls in every mode and form that they have."""

from collections.abc import Callable
from functools import partial
from typing import Any

import models_of_peers as models
import torch
from models_of_peers import BUFFER, Arguments
from peer_calls import BRAIN, DIM, DSTATE, FLOAT, HALF, HEADS, SLOTS, Adapter, Calls, in_turn
from peer_selective import PARENTS

from flashstate.compat import fla, flashinfer, sglang_delta, vllm_delta, vllm_kda
from flashstate.proof.inputs import Source

L2NORM = "use_qk_l2norm_in_kernel"


def rule_arguments(
    device: torch.device,
    shape: tuple[int, int] = (3, 1),
    pool: str = "initial_state",
    slots: int = SLOTS,
    gates: tuple[str, str] = ("a", "b"),
    heads: int = 2,
    per_channel: bool = False,
    flat: bool = False,
    state_dtype: torch.dtype = FLOAT,
    x_dtype: torch.dtype = FLOAT,
    weights_dtype: torch.dtype = FLOAT,
    buffer: tuple[int, int] | None = None,
    normal: bool = False,
    finish: Callable[[Arguments], Arguments] = dict,
) -> Arguments:
    """The arguments of gated delta rules, for tokens (B, T), as `finish` changes them.

    pool, gates: the names of the states and of the gates, which are raw as a and b. heads: of q and k. flat: gates have
    one token axis. buffer: rows and steps of it.
    """
    random, tokens = Source(device, shape[1] + heads), (shape[0] * shape[1],) if flat else shape
    channels = (DSTATE,) if per_channel else ()
    a, b = random.normal(*tokens, HEADS, *channels).to(x_dtype), random.uniform(*tokens, HEADS).to(x_dtype)
    arguments: Arguments = {
        "q": random.normal(*shape, heads, DSTATE).to(x_dtype),
        "k": random.normal(*shape, heads, DSTATE).to(x_dtype),
        "v": random.normal(*shape, HEADS, DIM).to(x_dtype),
        pool: random.normal(slots, HEADS, DIM, DSTATE).to(state_dtype),
        gates[0]: a if gates == ("a", "b") else -a.abs(),
        gates[1]: b,
    }
    if gates == ("a", "b"):
        arguments["A_log"] = random.normal(HEADS).to(weights_dtype)
        arguments["dt_bias"] = random.normal(HEADS, *channels).to(weights_dtype)
    if buffer is not None:
        arguments[BUFFER] = torch.full((*buffer, HEADS, DIM, DSTATE), 7.0, dtype=state_dtype, device=device)
    return finish({**arguments, L2NORM: True} if normal else arguments)


def packed(made: Arguments) -> Arguments:
    """The arguments of packed decodes, for three rows: q, k and v side by side."""
    made["mixed_qkv"] = torch.cat([made.pop(name).flatten(1) for name in "qkv"], 1)
    made |= {"a": made["a"].flatten(1), "dt_bias": made["dt_bias"].flatten(), "scale": 0.3}
    return {**made, "out": made["mixed_qkv"].new_full((3, 1, HEADS, DIM), 5.0)}


def raw_kda(made: Arguments) -> Arguments:
    """The arguments of the delta rules of Kimi layers."""
    made |= {"raw_g": made.pop("a"), "raw_beta": made.pop("b"), "dt_bias": made["dt_bias"].flatten()}
    return {**made, "lower_bound": None}


def raw_packed(made: Arguments) -> Arguments:
    """The same for packed decodes."""
    made["mixed_qkv"] = torch.cat([made.pop(name)[0].flatten(1) for name in "qkv"], 1)
    return raw_kda(made)


NORMAL = partial(rule_arguments, normal=True)
PACKED, RAW = (
    partial(NORMAL, flat=True, finish=packed),
    partial(rule_arguments, shape=(1, 3), heads=HEADS, per_channel=True),
)
FORMATS: Calls = {
    "": {},
    "bfloat16": {"x_dtype": BRAIN, "state_dtype": BRAIN, "indices": torch.int64},
    "not normalised": {L2NORM: False, "scale": 0.5, "heads": 4},
}
KDA: Calls = {"": {}, "kda": {"per_channel": True, "is_kda": True}}
SHARED: dict[str, Any] = {"tokens": ("v", "q", "k"), "pools": {"initial_state": ""}}

# FlashInfer

EVERY = [[10, 0, 1, 2], [7, 4, 5, 11], [13, 8, -1, -1]]
HERE, THERE = [12, 7, 9], [8, 13, 9]  # in the upper half of the pool
SKIPPED = [12, -1, 9]
FLASHINFER_FORMS: Calls = {
    "": {},
    "output given": {"given": True},
    "not normalised": {"use_qk_l2norm": False, "scale": 0.02, "heads": 1},
    "a bfloat16 model": {"state_dtype": BRAIN, "x_dtype": BRAIN, "weights_dtype": BRAIN},
    "a float16 state, output given": {"state_dtype": HALF, "x_dtype": BRAIN, "given": True},
}
ROWS = {"initial_state_indices": HERE, "state": None}
FLASHINFER_DECODE = partial(models.each_kept, pool="initial_state", read="initial_state_indices", fresh=False)
DECODING_MODES: Calls = {
    "in order": {"pool": "state", "slots": 3},
    "in place": {**ROWS, "indices": torch.int64},
    "rows skipped and not written": {**ROWS, "initial_state_indices": SKIPPED, "output_state_indices": [-1, 13, 9]},
    "elsewhere": {**ROWS, "output_state_indices": THERE},
    "skipped, 3 tokens": {**ROWS, "initial_state_indices": SKIPPED, "shape": (3, 3)},
    "a buffer": {**ROWS, "shape": (3, 2), "buffer": (3, 3), "output_state_indices": [8, 13, -5]},
}  # fmt: skip
DECODING = Adapter(
    flashinfer.gated_delta_rule_decode_pretranspose,
    make=rule_arguments, model=partial(models.rule, FLASHINFER_DECODE, "initial_state"), out="output",
    tokens=("v", "q", "k", "a", "b"), pools={"state": "", "initial_state": "", BUFFER: ""},
    calls=in_turn(DECODING_MODES,
        FLASHINFER_FORMS,
    ),
    edges={
        "update disabled": {"pool": "state", "slots": 3, "shape": (3, 2), "disable_state_update": 1},
        "bfloat16 in, float32 out": {**ROWS, "x_dtype": BRAIN, "given": FLOAT},
    },
)  # fmt: skip

ROWS, UPDATE = {"initial_state_indices": HERE}, {"disable_state_update": False}


def for_tokens(T: int, skipped: bool = False) -> dict[str, Any]:
    rows = {"initial_state_indices": SKIPPED if skipped else HERE, "indices": torch.int64 if T % 2 else torch.int32}
    return {"shape": (3, T), **rows, "ssm_state_indices": [row[:T] for row in EVERY]}


SEVERAL_MODES: Calls = {
    "every token": for_tokens(4),
    "a buffer, elsewhere": {**ROWS, "shape": (3, 4), "output_state_indices": [8, -1, 9], "buffer": (3, 5), **UPDATE},
    "a row skipped": {"shape": (3, 3), "initial_state_indices": SKIPPED, "output_state_indices": THERE, **UPDATE},
    "every token, the last also elsewhere": {**for_tokens(3, True), "output_state_indices": [-1, 12, 9], **UPDATE},
    "output alone": {**ROWS, "shape": (3, 2)},
    "in place": {**ROWS, "shape": (3, 3), **UPDATE},
}  # fmt: skip
SEVERAL = Adapter(
    flashinfer.gated_delta_rule_mtp,
    make=rule_arguments, model=partial(models.rule, models.flashinfer_mtp, "initial_state"), out="output",
    tokens=("v", "q", "k", "a", "b"), pools={"initial_state": "", BUFFER: ""},
    calls=in_turn(SEVERAL_MODES,
        FLASHINFER_FORMS,
    ),
    edges={
        "output alone, 1 token": ROWS,
        "a row skipped, 2 tokens, output given": {
            "shape": (3, 2), "initial_state_indices": SKIPPED, "given": True, **UPDATE,
        },
        "update disabled": {**ROWS, "disable_state_update": True, "output_state_indices": THERE, "given": True},
        "a large buffer": {**ROWS, "shape": (3, 2), "buffer": (5, 4), "disable_state_update": True},
        "every token, a row skipped": {**for_tokens(2, True), "disable_state_update": True, "given": True},
        "every token, the last also elsewhere, 2 tokens": {
            **for_tokens(2, True), "output_state_indices": [-1, 12, 9], **UPDATE,
        },
    },
)  # fmt: skip

# vLLM

TABLE = [[5, 1, 2], [9, 3, 4], [8, 6, 7]]
LENGTHS = {"shape": (1, 6), "cu_seqlens": [0, 3, 5, 6]}
ACCEPTED = {**LENGTHS, "ssm_state_indices": TABLE, "num_accepted_tokens": [2, 3, 1]}
MODES: Calls = {
    "accepted": {**ACCEPTED, "flat": True},
    "blocks": {"shape": (3, 2), "ssm_state_indices": [[5, 1, 2], [9, 0, 4], [8, 6, 7]]},
    "packed": {**LENGTHS, "ssm_state_indices": [5, -1, 8], "flat": True},
    "several tokens": {"shape": (3, 3), "ssm_state_indices": [5, 9, 8]},
    "a token each": {"ssm_state_indices": [5, 0, 8], "flat": True},
}
SKIPS = {"ssm_state_indices": [[5, 1, 2], [0, 0, 0], [8, 6, 7]], "num_accepted_tokens": [1, 1, 3]}
MORE_ROWS = {**ACCEPTED, "shape": (1, 4), "cu_seqlens": [0, 1, 4]}  # in the table than in the batch
VLLM_RULE = Adapter(
    vllm_delta.fused_sigmoid_gating_delta_rule_update,
    make=NORMAL, model=partial(models.rule, models.blocks, "initial_state"), **SHARED,
    calls={**in_turn(MODES, FORMATS), "accepted, kda": {**ACCEPTED, **KDA["kda"]}},
    edges={"accepted, a row skipped": {**LENGTHS, **SKIPS}, "more rows": MORE_ROWS},
)  # fmt: skip
VLLM_DECAYS = Adapter(
    vllm_delta.fused_recurrent_gated_delta_rule,
    make=partial(NORMAL, gates=("g", "beta")), model=VLLM_RULE.model, **SHARED,
    calls=MODES, edges={"no beta": {**MODES["several tokens"], "beta": None}},
)  # fmt: skip
VLLM_KDA = Adapter(
    vllm_delta.fused_recurrent_kda,
    make=partial(NORMAL, gates=("g", "beta"), per_channel=True), model=VLLM_RULE.model, **SHARED,
    calls={name: MODES[name] for name in ("packed", "blocks")},
)  # fmt: skip
BOUNDS: Calls = {"": {}, "a lower bound": {"lower_bound": -5.0}, "output given": {"given": True}}
VLLM_RAW_KDA = Adapter(
    vllm_kda.fused_recurrent_kda,
    make=partial(RAW, finish=raw_kda), model=partial(models.raw_kda, models.blocks), **SHARED,
    calls=in_turn(
        {"accepted": ACCEPTED, "a token each": {"cu_seqlens": [0, 1, 2, 3], "ssm_state_indices": [5, 0, 8]}}, BOUNDS
    ),
    edges={
        "no bias, a lower bound": {
            "cu_seqlens": [0, 1, 2, 3], "ssm_state_indices": [5, 9, 8], "dt_bias": None, "lower_bound": -5.0,
        },
        "more rows": MORE_ROWS,
    },
)  # fmt: skip
DECODES: Calls = {
    "bfloat16": {"ssm_state_indices": [5, 9, 8], "x_dtype": BRAIN, "state_dtype": BRAIN},
    "rows skipped": {"ssm_state_indices": [0, -1, 8], "indices": torch.int64},
}
DECODE: dict[str, Any] = {"calls": DECODES, "tokens": ("mixed_qkv", "a", "b"), "pools": {"initial_state": ""}}
VLLM_DECODE, SGLANG_DECODE = (
    Adapter(
        package.fused_recurrent_gated_delta_rule_packed_decode, make=PACKED,
        model=partial(models.rule, partial(models.blocks, null=null), "initial_state"), **DECODE,
    )
    for package, null in ((vllm_delta, 0), (sglang_delta, -1))
)  # fmt: skip
VLLM_RAW_DECODE = Adapter(
    vllm_kda.fused_recurrent_kda_packed_decode,
    make=partial(RAW, finish=raw_packed), model=partial(models.raw_kda, models.blocks),
    tokens=("raw_g", "raw_beta"), pools={"initial_state": ""},
    calls={
        "": {"state_indices": [5, 9, 8], "scale": 0.3, "out": torch.full((1, 3, HEADS, DIM), 5.0)},
        "rows skipped, a lower bound": {"state_indices": [0, -1, 8], "indices": torch.int64, "lower_bound": -5.0},
    },
)  # fmt: skip

# SGLang

VERIFY = {
    "shape": (1, 12), "cu_seqlens": [0, 4, 8, 12], "initial_state_indices": [5, 0, 8], "buffer": (4, 5),
    "intermediate_state_indices": [3, 0, 1], "cache_steps": 4, "disable_state_update": True,
}  # fmt: skip
SGLANG_MODES: Calls = {
    "a tree": {**VERIFY, "retrieve_parent_token": PARENTS},
    "several tokens": {"shape": (3, 4), "initial_state_indices": [5, -1, 8]},
    "verify, and update": {
        "shape": (3, 2), "initial_state_indices": [5, -1, 8], "buffer": (3, 4),
        "intermediate_state_indices": [2, 1, -1],
    },
    "a token each": {"shape": (1, 3), "cu_seqlens": [0, 1, 2, 3], "initial_state_indices": [5, 0, 8]},
}  # fmt: skip
SOFTPLUS = {"softplus_beta": 1.0, "softplus_threshold": 20.0}
SGLANG: dict[str, Any] = {
    "model": partial(
        models.rule, partial(models.each_kept, pool="initial_state_source", read="initial_state_indices"),
        "initial_state_source",
    ), "tokens": ("v", "q", "k"),
    "pools": {"initial_state_source": "", BUFFER: ""},
}  # fmt: skip
SGLANG_RULE = Adapter(
    sglang_delta.fused_sigmoid_gating_delta_rule_update,
    make=partial(NORMAL, pool="initial_state_source"), **SGLANG,
    calls=in_turn(SGLANG_MODES, FORMATS, {"": SOFTPLUS}),
    edges=in_turn(
        {
            "verify, kda": {**VERIFY, **KDA["kda"]},
            "packed on two axes": {"shape": (2, 3), "cu_seqlens": [0, 4, 6], "initial_state_indices": [5, 8]},
            "a tree, dense": {
                "shape": (3, 4), "initial_state_indices": [5, 2, 8], "retrieve_parent_token": PARENTS,
                "disable_state_update": True,
            },
        },
        {"": SOFTPLUS},
    ),
)  # fmt: skip
SGLANG_UPDATE = Adapter(
    sglang_delta.fused_recurrent_gated_delta_rule_update,
    make=partial(NORMAL, pool="initial_state_source", gates=("g", "beta")), **SGLANG,
    calls=SGLANG_MODES,
    edges={
        "no beta": {**SGLANG_MODES["several tokens"], "beta": None},
        "as many steps as the buffer": {**VERIFY, "cache_steps": None, "buffer": (4, 4)},
    },
)  # fmt: skip
SGLANG_KDA = Adapter(
    sglang_delta.fused_recurrent_kda_packed_decode,
    make=partial(PACKED, per_channel=True), model=SGLANG_DECODE.model, **DECODE,
)  # fmt: skip

# fla


def of_fla(made: Arguments, raw: bool = False, v_first: bool = False) -> Arguments:
    """The arguments of fla's rules. raw: gates in the kernel. v_first: the layout of states."""
    made |= {"output_final_state": True, "g": made["g"].float(), **({"state_v_first": True} if v_first else {})}
    if not v_first:
        made["initial_state"] = made["initial_state"].mT.contiguous()
    if raw:
        weights = rule_arguments(made["v"].device, per_channel=made["g"].dim() == 4)
        made |= {name: weights[name] for name in ("A_log", "dt_bias")}
        made |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    return made


FLA_MADE = partial(NORMAL, gates=("g", "beta"), slots=3, finish=of_fla)
RAW_GATES, V_FIRST, BOTH = ({"finish": partial(of_fla, **given)} for given in (
    {"raw": True}, {"v_first": True}, {"raw": True, "v_first": True}
))  # fmt: skip
FLA: dict[str, Any] = {"model": models.fla, "pools": {}, "tokens": ("v", "q", "k", "g", "beta")}
FLA_MODES: Calls = {
    "packed": {"shape": (1, 7), "cu_seqlens": [0, 4, 4, 7], "indices": torch.int64},
    "one token": {},
    "several tokens": {"shape": (3, 4)},
}
FLA_RULE = Adapter(
    fla.fused_recurrent_gated_delta_rule,
    make=FLA_MADE, **FLA,
    calls=in_turn(
        FLA_MODES,
        {
            "raw gates": BOTH,
            "states transposed": {**V_FIRST, "heads": 4},
            "": {},
            "no states given": {"initial_state": None},
            "no states asked for": {"output_final_state": False},
            "a raw decay": {**RAW_GATES, "use_beta_sigmoid_in_kernel": False},
            "a bfloat16 model": {"x_dtype": BRAIN, "scale": 0.5, L2NORM: False},
        },
    ),
    edges={
        "no gates": {"g": None, "beta": None},
        "a raw beta": {"use_beta_sigmoid_in_kernel": True},
        "a decay per channel": {"per_channel": True, "gk": -torch.ones(3, 1, HEADS, DSTATE), "g": None},
        "as Transformers calls": {"cu_seqlens": None, "cu_seq_lens_k": None, "use_cache": True, "x_dtype": BRAIN},
        "a layout by its old name": {**V_FIRST, "state_v_first": False, "transpose_state_layout": True},
    },
)  # fmt: skip
FLA_KDA = Adapter(
    fla.fused_recurrent_kda,
    make=partial(FLA_MADE, per_channel=True), **FLA,
    calls=in_turn(FLA_MODES, {"raw gates": RAW_GATES, "a raw beta": {"use_beta_sigmoid_in_kernel": True}, "": {}}),
)  # fmt: skip
RULES = (
    DECODING, SEVERAL, VLLM_RULE, VLLM_DECAYS, VLLM_KDA, VLLM_DECODE, VLLM_RAW_KDA, VLLM_RAW_DECODE, SGLANG_RULE,
    SGLANG_UPDATE, SGLANG_DECODE, SGLANG_KDA,
)  # fmt: skip
