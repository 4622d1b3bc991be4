"""The selective_state_update of mamba_ssm, vLLM and FlashInfer: calls in every mode and form that they have."""

from functools import partial
from typing import Any

import models_of_peers as models
import torch
from models_of_peers import Arguments
from peer_calls import AT_ONCE, BUFFER, DIM, DSTATE, HEADS, SLOTS, Calls, Door, Random, crossed, some
from torch import Tensor

from flashstate.compat import flashinfer, mamba_ssm, vllm

FLOAT, HALF, BRAIN, SHORT = torch.float32, torch.float16, torch.bfloat16, torch.int16
GROUPS = 2
READ, WRITE = [[5, 1, 2], [9, 3, 4], [8, 6, 7]], [[10, 11, 12], [3, 9, 13], [8, 1, 6]]  # slots of rows
FIRST_READ, FIRST_WRITE = [5, 9, 8], [10, 3, 8]
LENGTHS = [3, 2, 1]


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
    """What every selective_state_update has; with an int16 state its scale.

    tokens: sizes of the token axes. lengths: of packed rows, with unused tokens behind them. heads: None: no head axis.
    x_dtype: of x, z, B and C. weights_dtype: of dt, D and dt_bias. tied: dt, A, D and dt_bias are expanded from one
    value per head. optional: D, z and dt_bias are there. buffer: for states of every token.
    """
    tokens = tokens if lengths is None else (sum(lengths) + unused,)
    random = Random(device, sum(tokens))
    of_heads, of_groups = ((), ()) if heads is None else ((heads,), (GROUPS,))

    def per_head(*sizes: int, of: int, dtype: torch.dtype, sign: int = 0) -> Tensor:
        """Expanded along the last `of` axes if parameters are tied; of one sign, or of both."""
        values = random.normal(*sizes[:-of], *((1,) * of if tied else sizes[-of:]), dtype=dtype)
        return (sign * values.abs() if sign else values).expand(sizes)

    positive = 0 if dt_softplus else 1
    state = random.normal(SLOTS, *of_heads, DIM, DSTATE)
    scale = None if state_dtype.is_floating_point else state.abs().amax(-1) / torch.iinfo(state_dtype).max
    arguments = {
        "state": state.to(state_dtype) if scale is None else (state / scale[..., None]).round().to(state_dtype),
        "x": random.normal(*tokens, *of_heads, DIM, dtype=x_dtype),
        "dt": per_head(*tokens, *of_heads, DIM, of=1, dtype=weights_dtype, sign=positive),
        "A": per_head(*of_heads, DIM, DSTATE, of=2, dtype=FLOAT, sign=-1),
        "B": random.normal(*tokens, *of_groups, DSTATE, dtype=x_dtype),
        "C": random.normal(*tokens, *of_groups, DSTATE, dtype=x_dtype),
        "dt_softplus": dt_softplus,
    }
    others = {
        "D": per_head(*of_heads, DIM, of=1, dtype=weights_dtype),
        "z": random.normal(*tokens, *of_heads, DIM, dtype=x_dtype),
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
    "indices": ("state_batch_indices", "dst_state_batch_indices", "num_accepted_tokens", "intermediate_state_indices"),
}
SELECTIVE_FORMS: Calls = {
    "per channel": {"tied": False},
    "no softplus": {"dt_softplus": False, "weights_dtype": HALF},
    "no softplus, per channel": {"dt_softplus": False, "tied": False},
    "nothing optional": {"optional": False, "state_dtype": BRAIN},
    "float16": {"state_dtype": HALF, "x_dtype": HALF, "weights_dtype": HALF},
    "bfloat16": {"state_dtype": BRAIN, "x_dtype": BRAIN, "weights_dtype": BRAIN},
    "bfloat16 on float32": {"x_dtype": BRAIN, "weights_dtype": BRAIN},
    "bfloat16 on float16": {"x_dtype": BRAIN, "weights_dtype": BRAIN, "state_dtype": HALF},
}
HEADLESS: Calls = {
    "headless": {"heads": None, "x_dtype": HALF}, "headless, per channel": {"heads": None, "tied": False},
}  # fmt: skip

OF_MAMBA_SSM: Calls = {
    "negative indices": {"tokens": (4,), "state_dtype": BRAIN, "state_batch_indices": [5, -1, 9, -7]},
    "a slot past the pool": {"state_batch_indices": [5, SLOTS, 9], "fault": f"read slot {SLOTS}"},
    **crossed(
        {"plain": {"x_dtype": HALF}, **SELECTIVE_FORMS, **HEADLESS},
        {
            "in order": {"state_batch_indices": None},
            "indexed": {"state_batch_indices": [5, 0, 9]},
            "int64": {"state_batch_indices": [5, 0, 9], "indices": torch.int64},
            "a row of padding": {"state_batch_indices": [5, -1, 9]},
        },
    ),
}
STOCHASTIC = {"state_dtype": HALF, "enable_stochastic_rounding": True}
TABLES = {"state_batch_indices": READ, "dst_state_batch_indices": WRITE}
OF_VLLM: Calls = {
    "in order": {},
    "in place": {"state_batch_indices": FIRST_READ},
    "elsewhere": {"state_batch_indices": FIRST_READ, "dst_state_batch_indices": FIRST_WRITE},
    "first columns": TABLES,
    "one accepted token": {"state_batch_indices": READ, "num_accepted_tokens": [3, 1, 2]},
    "packed in order": {"lengths": LENGTHS},
    "packed in place": {"lengths": LENGTHS, "state_batch_indices": FIRST_READ},
    "packed, first columns": {"lengths": LENGTHS, **TABLES},
    "accepted tokens in place": {"lengths": LENGTHS, "state_batch_indices": READ, "num_accepted_tokens": [1, 3, 2]},
    "accepted tokens elsewhere": {"lengths": LENGTHS, **TABLES, "num_accepted_tokens": [2, 1, 1]},
    "accepted counts out of range": {"lengths": LENGTHS, **TABLES, "num_accepted_tokens": [0, 4, -3], "fault": "acc"},
    "a row without tokens": {"lengths": [2, 0, 3], "state_batch_indices": READ, "num_accepted_tokens": [1, 2, 3]},
    "more rows than the batch has": {"lengths": [3, 2], **TABLES, "num_accepted_tokens": [2, 1]},
    "tokens of no row": {"lengths": [3, 1], "unused": 2, "state_batch_indices": FIRST_READ[:2]},
}
OF_VLLM |= crossed(
    {
        **SELECTIVE_FORMS,
        **HEADLESS,
        "stochastic": STOCHASTIC,
        "stochastic, 5 rounds": {**STOCHASTIC, "cache_philox_rounds": 5},
        "out given": {"given": True},
    },
    some(OF_VLLM, "in place", "packed in place", "accepted tokens elsewhere"),
)
for null in (0, 9):
    padded = [READ[0], [null] * 3, READ[2]]
    OF_VLLM |= crossed(
        {f"null block {null}": {"null_block_id": null}},
        {
            "in place": {"state_batch_indices": [5, null, 8]},
            "elsewhere": {"state_batch_indices": [5, null, 8], "dst_state_batch_indices": [null, 3, 8]},
            "packed in place": {"lengths": LENGTHS, "state_batch_indices": [5, null, 8]},
            "accepted tokens elsewhere": {
                "lengths": LENGTHS, "state_batch_indices": padded, "num_accepted_tokens": [2, 1, 1],
                "dst_state_batch_indices": [[null] * 3, *WRITE[1:]],
            },
        },
        {"": {}, "stochastic": STOCHASTIC},
    )  # fmt: skip

IN_PLACE = {"state_batch_indices": FIRST_READ}
MODES: Calls = {
    "in order": {},
    "in place": IN_PLACE,
    "first column": {"state_batch_indices": READ},
    "accepted": {"state_batch_indices": READ, "num_accepted_tokens": [2, 1, 3]},
    "elsewhere": {**IN_PLACE, "dst_state_batch_indices": FIRST_WRITE},
    "every token": {**IN_PLACE, "dst_state_batch_indices": WRITE},
    "some tokens": {**IN_PLACE, "dst_state_batch_indices": [[10, -1, 12], [-1, -1, 3], [8, 1, -1]]},
    "accepted, every token": {**TABLES, "dst_state_batch_indices": READ, "num_accepted_tokens": [2, 1, 3]},
    "out of order, elsewhere": {"dst_state_batch_indices": FIRST_WRITE},
}
A_BUFFER: Calls = {"a buffer": {**IN_PLACE, "buffer": True}}
FORMS: Calls = {
    "one token": {},
    "several tokens": {"tokens": (3, 3)},
    "packed": {"lengths": [3, 1, 2], "unused": 1, "cache_steps": 3},
}
PADDED: Calls = {
    "padding, in place": {"state_batch_indices": [5, -1, 8], "pad_slot_id": -1, "state_dtype": SHORT},
    "padding, elsewhere": {
        "state_batch_indices": [5, 9, 8], "dst_state_batch_indices": FIRST_WRITE, "pad_slot_id": 9, "state_dtype": HALF,
    },
    "padding, every token": {
        "state_batch_indices": [5, 9, 8], "dst_state_batch_indices": WRITE, "pad_slot_id": 9,
    },
    "padding, a buffer": {"state_batch_indices": [5, SLOTS + 5, 8], "pad_slot_id": SLOTS + 5, "buffer": True},
    "padding, an int16 buffer": {"state_batch_indices": [5, -1, 8], "state_dtype": SHORT, "buffer": True},
    "padding, every int16 token": {
        "state_batch_indices": [5, -1, 8], "dst_state_batch_indices": WRITE, "state_dtype": SHORT,
    },
    "padding, accepted, every token": {
        "state_batch_indices": [READ[0], [-1] * 3, READ[2]], "dst_state_batch_indices": READ,
        "num_accepted_tokens": [2, 1, 3],
    },
}  # fmt: skip
OF_FLASHINFER: Calls = {
    **crossed(MODES | PADDED, FORMS),
    **crossed(some(MODES, "in order", "in place", "accepted"), {"a buffer": {"buffer": True}}, FORMS),
    **crossed(A_BUFFER, {"rows of their own": {"intermediate_state_indices": [4, 0, 2]}}, FORMS),
    **crossed({"disabled": {"disable_state_update": True}}, some(MODES, "every token") | A_BUFFER, FORMS),
    **crossed(
        {
            **SELECTIVE_FORMS,
            "int16": {"state_dtype": SHORT, "x_dtype": BRAIN},
            "stochastic": {"state_dtype": HALF, "rand_seed": [12345], "indices": torch.int64},
        },
        some(MODES, "in place", "every token") | A_BUFFER,
        FORMS,
    ),
    **crossed({"out given": {"given": True}}, some(MODES, "in place"), FORMS),
    "headless": {"heads": None, **IN_PLACE},
    "headless, cache_steps": {"heads": None, **IN_PLACE, "cache_steps": 1},
    "accepted counts out of range": {
        **FORMS["packed"], **MODES["accepted, every token"], "num_accepted_tokens": [0, 4, -3], "fault": "accept",
    },
}  # fmt: skip

SSM = Door(
    mamba_ssm.selective_state_update,
    "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None",
    model=partial(models.selective, models.mamba_ssm), calls=OF_MAMBA_SSM, **SELECTIVE,
    right={
        "one token": ({"state_batch_indices": [5, 0, 9]}, {"state": "longer 0, shorter 0"}),
        "headless": (
            {"state_batch_indices": [5, 0, 9], "heads": None},
            {"state": "longer 0, shorter 0", **dict.fromkeys(("A", "D", "dt_bias"), "one more axis")},
        ),
    },
)  # fmt: skip
VLLM = Door(
    vllm.selective_state_update,
    "state, x, dt, A, B, C, D, dt_bias, z=None, dt_softplus=False, state_batch_indices=None, "
    "dst_state_batch_indices=None, null_block_id=0, out=None, num_accepted_tokens=None, cu_seqlens=None, "
    "is_blackwell=False, enable_stochastic_rounding=False, cache_philox_rounds=0" + AT_ONCE,
    model=partial(models.selective, models.vllm), calls=OF_VLLM, **SELECTIVE,
    right={
        "accepted tokens": (
            {**OF_VLLM["accepted tokens elsewhere"], "given": True},
            {
                "state": "longer 0, shorter 0", "D": "missing", "dt_bias": "missing", "cu_seqlens": "shorter 0",
                "state_batch_indices": "longer 0", "dst_state_batch_indices": "longer 0, longer 1",
                "num_accepted_tokens": "longer 0",
            },
        ),
    },
)  # fmt: skip
FLASHINFER = Door(
    flashinfer.selective_state_update,
    "state, x, dt, A, B, C, D, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, pad_slot_id=-1, "
    "state_scale=None, out=None, disable_state_update=False, intermediate_states_buffer=None, "
    "intermediate_state_indices=None, intermediate_state_scales=None, rand_seed=None, philox_rounds=10, "
    "cache_steps=0, algorithm='auto', dst_state_batch_indices=None, cu_seqlens=None, num_accepted_tokens=None, "
    "backend='auto'" + AT_ONCE,
    model=partial(models.selective, models.flashinfer), calls=OF_FLASHINFER, **SELECTIVE,
    right={
        "a buffer": (
            {
                **FORMS["several tokens"], **IN_PLACE, "buffer": True, "state_dtype": SHORT,
                "intermediate_state_indices": [4, 0, 2], "given": True,
            },
            {"D": "missing", "state_batch_indices": "longer 0", "intermediate_state_indices": "longer 0"},
        ),
        "a seed": (
            {**FORMS["packed"], **MODES["accepted, every token"], "state_dtype": HALF, "rand_seed": torch.tensor([1])},
            {
                "state": "longer 0, shorter 0", "D": "missing", "cu_seqlens": "shorter 0", "rand_seed": "one more axis",
                "state_batch_indices": "longer 0, longer 1", "dst_state_batch_indices": "longer 0, longer 1",
                "num_accepted_tokens": "longer 0",
            },
        ),
    },
)  # fmt: skip
