"""The selective_state_update of mamba_ssm, vLLM, FlashInfer and SGLang, and mamba_ssm's mamba3_step_fn: calls in every
mode and form that they have."""

from functools import partial
from typing import Any

import models_of_peers as models
import torch
from models_of_peers import BUFFER, Arguments
from peer_calls import BRAIN, DIM, DSTATE, FLOAT, HALF, HEADS, SHORT, SLOTS, Adapter, Calls, in_turn
from torch import Tensor

from flashstate.compat import flashinfer, mamba_ssm, sglang, vllm
from flashstate.proof.inputs import Source

GROUPS = 2
READ, WRITE = [[5, 1, 2], [9, 3, 4], [8, 6, 7]], [[10, 11, 12], [3, 9, 13], [8, 1, 6]]  # slots of rows
FIRST_READ, FIRST_WRITE = [5, 9, 8], [10, 3, 8]
LENGTHS = [3, 2, 1]
PARENTS = [[0, 0, 0, 1], [0, 0, 1, 2], [7, 0, 1, 0]]  # of trees of four tokens; that of a root, the first, says nothing


def selective_arguments(
    device: torch.device,
    tokens: tuple[int, ...] = (3,),
    lengths: list[int] | None = None,
    unused: int = 0,
    heads: int | None = HEADS,
    state_dtype: torch.dtype = FLOAT,
    x_dtype: torch.dtype = FLOAT,
    weights_dtype: torch.dtype = FLOAT,
    tied: bool = True,
    optional: bool = True,
    dt_softplus: bool = True,
    buffer: bool = False,
) -> Arguments:
    """The arguments of every selective_state_update; with an int16 state its scale.

    tokens: sizes of the token axes. lengths: of packed rows, with unused tokens behind them. heads: None: no head axis.
    x_dtype: of x, z, B and C. weights_dtype: of dt, D and dt_bias. tied: dt, A, D and dt_bias are expanded from one
    value per head. optional: D, z and dt_bias are there. buffer: for states of every token.
    """
    tokens = tokens if lengths is None else (sum(lengths) + unused,)
    random = Source(device, sum(tokens))
    of_heads, of_groups = ((), ()) if heads is None else ((heads,), (GROUPS,))

    def per_head(*sizes: int, of: int, dtype: torch.dtype, sign: int = 0) -> Tensor:
        """Expanded along the last `of` axes if parameters are tied; of one sign, or of both."""
        values = random.normal(*sizes[:-of], *((1,) * of if tied else sizes[-of:])).to(dtype)
        return (sign * values.abs() if sign else values).expand(sizes)

    positive = 0 if dt_softplus else 1
    state = random.normal(SLOTS, *of_heads, DIM, DSTATE)
    scale = None if state_dtype.is_floating_point else state.abs().amax(-1) / torch.iinfo(state_dtype).max
    arguments = {
        "state": state.to(state_dtype) if scale is None else (state / scale[..., None]).round().to(state_dtype),
        "x": random.normal(*tokens, *of_heads, DIM).to(x_dtype),
        "dt": per_head(*tokens, *of_heads, DIM, of=1, dtype=weights_dtype, sign=positive),
        "A": per_head(*of_heads, DIM, DSTATE, of=2, dtype=FLOAT, sign=-1),
        "B": random.normal(*tokens, *of_groups, DSTATE).to(x_dtype),
        "C": random.normal(*tokens, *of_groups, DSTATE).to(x_dtype),
        "dt_softplus": dt_softplus,
    }
    others = {
        "D": per_head(*of_heads, DIM, of=1, dtype=weights_dtype),
        "z": random.normal(*tokens, *of_heads, DIM).to(x_dtype),
        "dt_bias": per_head(*of_heads, DIM, of=1, dtype=weights_dtype, sign=positive),
    }
    arguments |= others if optional else dict.fromkeys(others)
    if lengths is not None:
        arguments["cu_seqlens"] = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    if buffer:
        arguments[BUFFER] = torch.ones_like(arguments["state"])[:, None].repeat(1, 4, 1, 1, 1)
    if scale is not None:
        arguments |= {"state_scale": scale}
        arguments |= {"intermediate_state_scales": arguments[BUFFER][..., 0].float()} if buffer else {}
    return arguments


SELECTIVE: dict[str, Any] = {
    "make": selective_arguments,
    "pools": {"state": "state_scale", BUFFER: "intermediate_state_scales"},
    "tokens": ("x", "dt", "B", "C", "z"),
}
FORMATS: Calls = {
    "": {},
    "per channel": {"tied": False},
    "no softplus": {"dt_softplus": False, "weights_dtype": HALF},
    "nothing optional": {"optional": False, "state_dtype": BRAIN},
    "bfloat16 on float16": {"x_dtype": BRAIN, "weights_dtype": BRAIN, "state_dtype": HALF},
}
HEADLESS = {"heads": None, "tied": False}
STOCHASTIC = {"state_dtype": HALF, "enable_stochastic_rounding": True}
IN_PLACE = {"state_batch_indices": FIRST_READ}
TABLES = {"state_batch_indices": READ, "dst_state_batch_indices": WRITE}

SSM = Adapter(
    mamba_ssm.selective_state_update,
    model=partial(models.selective, models.mamba_ssm), **SELECTIVE,
    calls={
        **in_turn(
            {
                "in order": {},
                "indexed": {"state_batch_indices": [5, 0, 9], "indices": torch.int64},
                "padding": {"tokens": (4,), "state_batch_indices": [5, -1, 9, -7]},
            },
            FORMATS,
        ),
        "headless, in order": {**HEADLESS, "x_dtype": HALF},
    },
    edges={"a slot past the pool": {"state_batch_indices": [5, SLOTS, 9], "fault": f"read slot {SLOTS}"}},
)  # fmt: skip

PADDED_READ, PADDED_WRITE = [READ[0], [9] * 3, READ[2]], [[9] * 3, *WRITE[1:]]
VLLM = Adapter(
    vllm.selective_state_update,
    model=partial(models.selective, models.vllm), **SELECTIVE,
    calls={
        **in_turn(
            {
                "in place": IN_PLACE,
                "first columns": TABLES,
                "packed in place": {"lengths": LENGTHS, **IN_PLACE},
                "accepted tokens elsewhere": {"lengths": LENGTHS, **TABLES, "num_accepted_tokens": [2, 1, 1]},
                "one accepted token": {"state_batch_indices": READ, "num_accepted_tokens": [3, 1, 2]},
                "in order": {},
                "packed, first columns": {"lengths": LENGTHS, **TABLES},
                "elsewhere": {**IN_PLACE, "dst_state_batch_indices": FIRST_WRITE},
            },
            {**FORMATS, "stochastic": STOCHASTIC, "out given": {"given": True}, "headless": HEADLESS},
        ),
        "null block 0, stochastic": {"state_batch_indices": [5, 0, 8], **STOCHASTIC, "cache_philox_rounds": 5},
        "null block 9, packed": {
            "lengths": LENGTHS, "state_batch_indices": PADDED_READ, "dst_state_batch_indices": PADDED_WRITE,
            "num_accepted_tokens": [2, 1, 1], "null_block_id": 9,
        },
    },
    edges={
        "packed in order": {"lengths": LENGTHS},
        "accepted counts out of range": {
            "lengths": LENGTHS, **TABLES, "num_accepted_tokens": [0, 4, -3], "fault": "acc",
        },
        "a row without tokens": {
            "lengths": [2, 0, 3], "state_batch_indices": READ, "num_accepted_tokens": [1, 2, 3], "given": True,
        },
        "more rows than the batch has": {"lengths": [3, 2], **TABLES, "num_accepted_tokens": [2, 1]},
        "tokens of no row": {"lengths": [3, 1], "unused": 2, "state_batch_indices": FIRST_READ[:2]},
    },
)  # fmt: skip

EVERY_TOKEN = {**IN_PLACE, "dst_state_batch_indices": WRITE}
A_BUFFER = {**IN_PLACE, "buffer": True}
SHAPES: Calls = {
    "one token": {},
    "several tokens": {"tokens": (3, 3)},
    "packed": {"lengths": [3, 1, 2], "unused": 1, "cache_steps": 3},
}
ACCEPTED_EVERY = {**SHAPES["packed"], "state_batch_indices": READ, "dst_state_batch_indices": READ}
FLASHINFER = Adapter(
    flashinfer.selective_state_update,
    model=partial(models.selective, models.flashinfer), **SELECTIVE,
    calls={
        **in_turn(
            {
                "in place": IN_PLACE,
                "every token": EVERY_TOKEN,
                "a buffer": A_BUFFER,
                "accepted": {"state_batch_indices": READ, "num_accepted_tokens": [2, 1, 3]},
                "a buffer, rows of their own": {**A_BUFFER, "intermediate_state_indices": [4, 0, 2]},
                "some tokens": {**IN_PLACE, "dst_state_batch_indices": [[10, -1, 12], [-1, -1, 3], [8, 1, -1]]},
                "elsewhere": {**IN_PLACE, "dst_state_batch_indices": FIRST_WRITE},
                "disabled, every token": {**EVERY_TOKEN, "disable_state_update": True},
            },
            {
                **FORMATS,
                "int16": {"state_dtype": SHORT, "x_dtype": BRAIN},
                "stochastic": {"state_dtype": HALF, "rand_seed": [12345], "indices": torch.int64},
            },
            {name: SHAPES[name] for name in ("several tokens", "one token", "packed")},
        ),
        "padding, in place, one token": {"state_batch_indices": [5, -1, 8], "state_dtype": SHORT, "given": True},
        "padding, elsewhere": {**IN_PLACE, "dst_state_batch_indices": FIRST_WRITE, "pad_slot_id": 9},
        "padding, a buffer": {
            **SHAPES["packed"], "state_batch_indices": [5, SLOTS + 5, 8], "pad_slot_id": SLOTS + 5, "buffer": True,
            "state_dtype": SHORT,
        },
        "padding, every int16 token": {
            **EVERY_TOKEN, **SHAPES["several tokens"], "pad_slot_id": 9, "state_dtype": SHORT,
        },
        "padding, accepted, every token": {
            **ACCEPTED_EVERY, "state_batch_indices": [READ[0], [-1] * 3, READ[2]], "num_accepted_tokens": [2, 1, 3],
        },
    },
    edges={
        "in order": {},
        "first column": {"state_batch_indices": READ},
        "accepted, a buffer": {"state_batch_indices": READ, "num_accepted_tokens": [2, 1, 3], "buffer": True},
        "out of order, elsewhere": {"dst_state_batch_indices": FIRST_WRITE},
        "disabled, a buffer": {**A_BUFFER, "disable_state_update": True},
        "headless": {**HEADLESS, **IN_PLACE},
        "headless, cache_steps": {**HEADLESS, **IN_PLACE, "cache_steps": 1},
        "accepted counts out of range": {**ACCEPTED_EVERY, "num_accepted_tokens": [0, 4, -3], "fault": "accept"},
    },
)  # fmt: skip

SEVERAL = {"tokens": (3, 4), "state_batch_indices": [5, 0, 8]}
FROZEN = {"disable_state_update": True, "buffer": True, "cache_steps": 4}
VERIFY = {**SEVERAL, **FROZEN, "intermediate_state_indices": [2, 0, 1]}
SGLANG_STATE = Adapter(
    sglang.selective_state_update,
    model=partial(models.selective, models.each_kept), **SELECTIVE,
    calls={
        "padding": {"state_batch_indices": [5, -1, 8]},
        "verify, an output given": {**SEVERAL, **FROZEN, "given": True},
        "a tree": {**VERIFY, "retrieve_parent_token": PARENTS},
        "stochastic": {**SEVERAL, **STOCHASTIC},
        "verify, rows of the slots, and update": {"tokens": (3, 2), "state_batch_indices": [5, -1, 8], "buffer": True},
    },
    edges={
        "in order": {},
        "another padding": {**SEVERAL, "pad_slot_id": 0},
        "headless": {**HEADLESS, "state_batch_indices": [5, 0, 8]},
        "verify": VERIFY,
        "a tree without a buffer": {
            **SEVERAL, "disable_state_update": True, "state_dtype": BRAIN, "retrieve_parent_token": PARENTS,
        },
    },
)  # fmt: skip


def mamba3_arguments(
    device: torch.device,
    batch: int = 3,
    rank: int = 4,
    groups: int = HEADS,
    state_dtype: torch.dtype = FLOAT,
    x_dtype: torch.dtype = FLOAT,
    kv_dtype: torch.dtype = FLOAT,
    weights_dtype: torch.dtype = FLOAT,
    elsewhere: bool = False,
) -> Arguments:
    """The arguments of mamba3_step_fn, but for outputs and slots.

    x_dtype: of x, z, B and C. kv_dtype: of Bstate and Xstate. weights_dtype: of A, dt, trap, D and the projections.
    elsewhere: states go to a state_out that has something in it.
    """
    random, of_row, of_rank = Source(device, batch + rank), (batch, HEADS), (rank, HEADS, DIM)
    sizes = (
        (state_dtype, {"state": (SLOTS, HEADS, DIM, DSTATE)}),
        (kv_dtype, {"Bstate": (SLOTS, rank, HEADS, DSTATE), "Xstate": (SLOTS, HEADS, DIM)}),
        (x_dtype, {"x": (*of_row, DIM), "z": (*of_row, DIM), **dict.fromkeys("BC", (batch, rank, groups, DSTATE))}),
        (weights_dtype, {"D": (HEADS,), **dict.fromkeys(("xproj", "zproj", "outproj"), of_rank)}),
    )
    arguments = {name: random.normal(*size).to(dtype) for dtype, named in sizes for name, size in named.items()}
    arguments |= {name: random.uniform(*of_row).to(weights_dtype) for name in ("A", "dt", "trap")}
    arguments["A"].neg_()
    return {**arguments, "state_out": torch.full_like(arguments["state"], 7.0)} if elsewhere else arguments


KV_PADDED = {"state_batch_indices": [12, -1, 9], "update_kv_state": True}
MAMBA3 = Adapter(
    mamba_ssm.mamba3_step_fn,
    model=models.mamba3, make=mamba3_arguments, pools=dict.fromkeys(("state", "Bstate", "Xstate", "state_out"), ""),
    tokens=("x", "A", "B", "C", "dt", "trap", "z"),
    calls=in_turn(
        {
            "in order": {},
            "padded, elsewhere": {**KV_PADDED, "elsewhere": True},
            "in order, per rank": {"outproj": None},
            "padded, per rank": {**KV_PADDED, "outproj": None, "given": True},
            "no gate": {"z": None, "zproj": None, "given": True},
            "no xproj, no D, elsewhere": {
                **KV_PADDED, "xproj": None, "D": None, "elsewhere": True, "indices": torch.int64,
            },
        },
        {"rank 4": {}, "rank 1": {"rank": 1}, "2 groups": {"rank": 2, "groups": 2}, "1 group": {"groups": 1}},
        {
            "": {},
            "a bfloat16 model": {"x_dtype": BRAIN, "kv_dtype": BRAIN},
            "a float16 state": {"state_dtype": HALF, "x_dtype": BRAIN, "weights_dtype": HALF},
            "k and v wider than tokens": {"x_dtype": HALF},
            "k and v narrower than tokens": {"kv_dtype": BRAIN},
        },
    ),
    edges={
        "no zproj": {"zproj": None},
        "no projections": {"xproj": None, "zproj": None, "outproj": None},
        "padding alone, elsewhere": {"state_batch_indices": [-1, -2, -1], "elsewhere": True},
        "a slot past the pool": {"state_batch_indices": [12, SLOTS, 0], "fault": f"read slot {SLOTS}"},
        "no rows": {"batch": 0, "elsewhere": True, "update_kv_state": True},
        "no rows, indexed": {"batch": 0, "state_batch_indices": [], "elsewhere": True},
    },
)  # fmt: skip
