"""The doors of flashstate/compat, and tables of right calls of each, in every mode and form that its contract has."""

from __future__ import annotations

from functools import partial
from typing import Any

import models_of_peers as models
import torch
from models_of_peers import Arguments
from peer_calls import Calls, Door, crossed, some
from torch import Tensor

from flashstate.compat import causal_conv1d, flashinfer, mamba_ssm, vllm

HEADS, GROUPS, DIM, DSTATE, SLOTS = 4, 2, 8, 16, 14
FLOAT, HALF, BRAIN, SHORT = torch.float32, torch.float16, torch.bfloat16, torch.int16
BUFFER = "intermediate_states_buffer"
READ, WRITE = [[5, 1, 2], [9, 3, 4], [8, 6, 7]], [[10, 11, 12], [3, 9, 13], [8, 1, 6]]  # slots of rows
FIRST_READ, FIRST_WRITE = [5, 9, 8], [10, 3, 8]
LENGTHS = [3, 2, 1]


class Random:
    """Random tensors on a device, the same values on every one."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(seed)

    def normal(self, *sizes: int, dtype: torch.dtype = FLOAT) -> Tensor:
        return torch.randn(sizes, generator=self.generator).to(dtype).to(self.device)

    def uniform(self, *sizes: int, dtype: torch.dtype = FLOAT) -> Tensor:
        return torch.rand(sizes, generator=self.generator).to(dtype).to(self.device)


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
    """What every selective_state_update has, for these token axes, or for packed rows of these lengths and tokens of no
    row behind them; with an int16 state its scale.

    heads: None: no head axis. x_dtype: of x, z, B and C. weights_dtype: of dt, D and dt_bias. tied: dt, A, D and
    dt_bias are expanded from one value per head. optional: D, z and dt_bias are there. buffer: for states of every
    token.
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
HALVES = {"state_dtype": HALF, "x_dtype": HALF, "weights_dtype": HALF}

OF_MAMBA_SSM: Calls = crossed(
    {
        "headless, per channel": {"heads": None, "tied": False},
        "headless, tied": {"heads": None, "x_dtype": HALF},
        "per channel": {"tied": False, "x_dtype": HALF},
        "tied": {"state_dtype": HALF},
        "nothing optional": {"optional": False, "state_dtype": BRAIN},
        "no softplus": {"dt_softplus": False, "weights_dtype": HALF},
        "no softplus, per channel": {"dt_softplus": False, "tied": False},
    },
    {
        "in order": {"state_batch_indices": None},
        "indexed": {"state_batch_indices": [5, 0, 9]},
        "a row of padding": {"state_batch_indices": [5, -1, 9]},
    },
) | {
    "negative indices": {"tokens": (4,), "state_dtype": BRAIN, "state_batch_indices": [5, -1, 9, -7]},
    "a slot past the pool": {"state_batch_indices": [5, SLOTS, 9], "fault": f"read slot {SLOTS}"},
    **crossed(
        {"bfloat16": {"x_dtype": BRAIN, "weights_dtype": BRAIN, "indices": torch.int64}},
        {"on float32": {}, "on bfloat16": {"state_dtype": BRAIN}, "on float16": {"state_dtype": HALF}},
        {"": {"state_batch_indices": [5, 0, 9]}},
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
    "accepted counts out of range": {"lengths": LENGTHS, **TABLES, "num_accepted_tokens": [0, 4, 2], "fault": "accept"},
    "a row without tokens": {"lengths": [2, 0, 3], "state_batch_indices": READ, "num_accepted_tokens": [1, 2, 3]},
    "more rows than the batch has": {"lengths": [3, 2], **TABLES, "num_accepted_tokens": [2, 1]},
    "tokens of no row": {"lengths": [3, 1], "unused": 2, "state_batch_indices": FIRST_READ[:2]},
}
OF_VLLM |= crossed(
    {
        "headless, per channel": {"heads": None, "tied": False},
        "per channel": {"tied": False, "dt_softplus": False},
        "no z": {"optional": False},
        "float16": HALVES,
        "bfloat16": {"state_dtype": BRAIN, "x_dtype": BRAIN, "weights_dtype": BRAIN},
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
    **crossed({"a buffer, rows of their own": {**IN_PLACE, "intermediate_state_indices": [4, 0, 2]}}, FORMS),
    **crossed({"disabled": {"disable_state_update": True}}, some(MODES, "every token") | A_BUFFER, FORMS),
    **crossed(
        {
            "per channel": {"tied": False},
            "nothing optional": {"optional": False},
            "no softplus": {"dt_softplus": False},
            "float16": HALVES,
            "bfloat16": {"state_dtype": BRAIN, "x_dtype": BRAIN},
            "bfloat16 weights": {"x_dtype": BRAIN, "weights_dtype": BRAIN},
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
        **FORMS["packed"], **MODES["accepted, every token"], "num_accepted_tokens": [0, 4, 2], "fault": "accept",
    },
}  # fmt: skip


def delta_arguments(
    device: torch.device,
    tokens: int = 1,
    heads: tuple[int, int] = (2, HEADS),
    state_dtype: torch.dtype = FLOAT,
    x_dtype: torch.dtype = FLOAT,
    weights_dtype: torch.dtype = FLOAT,
    pool: bool = True,
    buffer: tuple[int, int] | None = None,
    every: list[list[int]] | None = None,
) -> Arguments:
    """What gated delta rules have, for three rows.

    heads: of q and k, and of v. x_dtype: of what tokens bring. weights_dtype: of A_log and dt_bias. pool: there is
    one of states, not a state for every row. buffer: how many rows it has, and how many steps more than
    there are tokens. every: slots for the first tokens of each row.
    """
    random, (H, HV) = Random(device, tokens + 3), heads
    arguments = {
        "q": random.normal(3, tokens, H, DSTATE, dtype=x_dtype),
        "k": random.normal(3, tokens, H, DSTATE, dtype=x_dtype),
        "v": random.normal(3, tokens, HV, DIM, dtype=x_dtype),
        "initial_state" if pool else "state": random.normal(SLOTS if pool else 3, HV, DIM, DSTATE, dtype=state_dtype),
        "A_log": random.normal(HV, dtype=weights_dtype),
        "a": random.normal(3, tokens, HV, dtype=x_dtype),
        "dt_bias": random.normal(HV, dtype=weights_dtype),
        "b": random.normal(3, tokens, HV, dtype=x_dtype),
    }
    if buffer is not None:
        sizes = (buffer[0], tokens + buffer[1], HV, DIM, DSTATE)
        arguments[BUFFER] = torch.full(sizes, 7.0, dtype=state_dtype, device=device)
    if every is not None:
        arguments["ssm_state_indices"] = [row[:tokens] for row in every]
    return arguments


DELTA: dict[str, Any] = {
    "make": delta_arguments,
    "pools": {"state": "", "initial_state": "", BUFFER: ""},
    "tokens": ("v", "q", "k", "a", "b"),
    "indices": ("initial_state_indices", "output_state_indices", "ssm_state_indices"),
    "out": "output",
}
GIVEN: Calls = {"": {}, "output given": {"given": True}}
EVERY = [[10, 0, 1, 2, 3], [7, 4, 5, 11, 6], [13, 8, -1, -1, -1]]
HERE, THERE = [12, 7, 9], [8, 13, 9]  # in the upper half of the pool
SKIPPED = [12, -1, 9]
DECODE: Calls = {
    "in order": {"pool": False},
    "in place": {"initial_state_indices": HERE},
    "elsewhere": {"initial_state_indices": HERE, "output_state_indices": THERE},
    "a row skipped": {"initial_state_indices": SKIPPED},
    "a row skipped, elsewhere": {"initial_state_indices": SKIPPED, "output_state_indices": THERE},
    "a row not written": {"initial_state_indices": HERE, "output_state_indices": [8, 13, -5]},
    "rows skipped and not written": {"initial_state_indices": SKIPPED, "output_state_indices": [-1, 13, 9]},
}
DECODE = {name: call if "pool" in call else {**call, "state": None} for name, call in DECODE.items()}
UPDATE = {"disable_state_update": False}
MTP: Calls = {
    "output alone": {"initial_state_indices": HERE},
    "update disabled": {"initial_state_indices": HERE, "disable_state_update": True, "output_state_indices": THERE},
    "in place": {"initial_state_indices": HERE, **UPDATE},
    "elsewhere": {"initial_state_indices": HERE, "output_state_indices": THERE, **UPDATE},
    "a row skipped": {"initial_state_indices": SKIPPED, "output_state_indices": THERE, **UPDATE},
    "a row not written": {"initial_state_indices": HERE, "output_state_indices": [8, -1, 9], **UPDATE},
    "a buffer": {"initial_state_indices": SKIPPED, "buffer": (3, 0)},
    "a large buffer": {"initial_state_indices": HERE, "buffer": (5, 2), "disable_state_update": True},
    "a buffer, in place": {"initial_state_indices": SKIPPED, "buffer": (4, 0), **UPDATE},
    "a buffer, elsewhere": {
        "initial_state_indices": HERE, "output_state_indices": [8, -1, 9], "buffer": (3, 1), **UPDATE,
    },
    "every token": {"initial_state_indices": HERE, "every": EVERY, **UPDATE},
    "every token, a row skipped": {"initial_state_indices": SKIPPED, "every": EVERY, **UPDATE},
    "every token, unless disabled by default": {"initial_state_indices": HERE, "every": EVERY},
    "every token, unless disabled": {"initial_state_indices": HERE, "every": EVERY, "disable_state_update": True},
    "every token, and nothing elsewhere": {
        "initial_state_indices": HERE, "every": EVERY, "output_state_indices": [11, 6, 12], **UPDATE,
    },
}  # fmt: skip
TOKENS: Calls = {
    f"{n} tokens": {"tokens": n, "indices": torch.int64 if n % 2 else torch.int32} for n in (1, 2, 3, 4, 5)
}
DELTA_FORMS: Calls = {
    **{f"heads {heads}": {"heads": heads} for heads in ((1, 1), (4, 4), (3, 9), (1, 4), (2, 10), (1, 8))},
    "not normalised": {"use_qk_l2norm": False, "scale": 0.02},
    "a scale": {"scale": 1.5},
    "no scale": {"scale": None, "use_qk_l2norm": True},
    "bfloat16 tokens": {"x_dtype": BRAIN},
    "float16 tokens": {"x_dtype": HALF},
    "a bfloat16 state": {"state_dtype": BRAIN, "x_dtype": BRAIN},
    "a float16 state": {"state_dtype": HALF, "x_dtype": BRAIN},
    "bfloat16 weights": {"x_dtype": BRAIN, "weights_dtype": BRAIN},
}
SMALL: Calls = {  # for the interpreter
    "small": {"heads": (1, 2)},
    "small, float16": {"heads": (1, 2), "state_dtype": HALF, "x_dtype": HALF},
    "not normalised": {"use_qk_l2norm": False, "scale": 0.1},
}
OF_DECODE: Calls = crossed(
    DECODE, {"int32": {}, "int64": {"indices": torch.int64}}, GIVEN
) | crossed(some(DECODE, "in order", "rows skipped and not written"), DELTA_FORMS | SMALL, GIVEN)  # fmt: skip
OF_MTP: Calls = crossed(MTP, TOKENS, GIVEN) | crossed(
    crossed(some(MTP, "a row skipped"), some(TOKENS, "3 tokens"))
    | crossed(some(MTP, "a buffer, elsewhere"), some(TOKENS, "4 tokens"))
    | crossed(some(MTP, "every token, a row skipped"), some(TOKENS, "5 tokens")),
    DELTA_FORMS | SMALL,
    GIVEN,
) | crossed(
    some(MTP, "output alone", "a large buffer", "every token, and nothing elsewhere"),
    some(TOKENS, "2 tokens"), some(SMALL, "not normalised"),
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
    """What mamba3_step_fn has, but for outputs and slots.

    x_dtype: of x, z, B and C. kv_dtype: of Bstate and Xstate. weights_dtype: of A, dt, trap, D and the projections.
    elsewhere: states go to a state_out that has something in it.
    """
    random = Random(device, batch + rank)
    arguments = {
        "state": random.normal(SLOTS, HEADS, DIM, DSTATE, dtype=state_dtype),
        "Bstate": random.normal(SLOTS, rank, HEADS, DSTATE, dtype=kv_dtype),
        "Xstate": random.normal(SLOTS, HEADS, DIM, dtype=kv_dtype),
        "A": -random.uniform(batch, HEADS, dtype=weights_dtype),
        "B": random.normal(batch, rank, groups, DSTATE, dtype=x_dtype),
        "C": random.normal(batch, rank, groups, DSTATE, dtype=x_dtype),
        "D": random.normal(HEADS, dtype=weights_dtype),
        "x": random.normal(batch, HEADS, DIM, dtype=x_dtype),
        "dt": random.uniform(batch, HEADS, dtype=weights_dtype),
        "trap": random.uniform(batch, HEADS, dtype=weights_dtype),
        "z": random.normal(batch, HEADS, DIM, dtype=x_dtype),
        **{name: random.normal(rank, HEADS, DIM, dtype=weights_dtype) for name in ("xproj", "zproj", "outproj")},
    }
    return {**arguments, "state_out": torch.full_like(arguments["state"], 7.0)} if elsewhere else arguments


READS: Calls = {
    "in order": {},
    "indexed": {"state_batch_indices": [12, 0, 9]},
    "a row of padding": {"state_batch_indices": [12, -1, 9]},
    "rows of padding": {"state_batch_indices": [-7, 3, -1]},
    "padding alone": {"state_batch_indices": [-1, -2, -1]},
    "a slot past the pool": {"state_batch_indices": [12, SLOTS, 0], "fault": f"read slot {SLOTS}"},
}
PLACES: Calls = {"here": {}, "elsewhere": {"elsewhere": True}}
UPDATES: Calls = {"": {}, "k and v too": {"update_kv_state": True}}
RANKS: Calls = {f"rank {rank}": {"rank": rank} for rank in (1, 4)}
SUMS: Calls = {"summed": {}, "per rank": {"outproj": None}}
OF_MAMBA3: Calls = {
    **crossed(READS, {"int32": {}, "int64": {"indices": torch.int64}}, PLACES, UPDATES, {"rank 2": {"rank": 2}}),
    **crossed(READS, RANKS, UPDATES),
    **crossed(
        {
            "all": {},
            "no zproj": {"zproj": None},
            "no gate": {"z": None, "zproj": None},
            "no outproj": {"outproj": None},
            "no outproj, no zproj": {"outproj": None, "zproj": None},
            "no outproj, no gate": {"outproj": None, "z": None, "zproj": None},
            "no xproj, no D": {"xproj": None, "D": None},
            "no projections": {"xproj": None, "zproj": None, "outproj": None},
        },
        {"in order": {}, "padded": {**READS["a row of padding"], "update_kv_state": True}},
        RANKS,
    ),
    **crossed(
        {f"{groups} groups": {"groups": groups, **READS["indexed"]} for groups in (1, 2, 4)},
        RANKS,
        {"": {"update_kv_state": True}},
    ),
    **crossed({"2 groups, padded": {"groups": 2, **READS["a row of padding"]}}, RANKS, SUMS, PLACES, UPDATES),
    **crossed(
        {
            "a bfloat16 model": {"x_dtype": BRAIN, "kv_dtype": BRAIN},
            "bfloat16 weights too": {"x_dtype": BRAIN, "kv_dtype": BRAIN, "weights_dtype": BRAIN},
            "a bfloat16 state": {"state_dtype": BRAIN, "x_dtype": BRAIN, "kv_dtype": BRAIN},
            "a float16 state": {"state_dtype": HALF, "x_dtype": BRAIN, "weights_dtype": HALF},
            "k and v wider than tokens": {"x_dtype": HALF},
            "k and v narrower than tokens": {"kv_dtype": BRAIN},
        },
        SUMS,
        PLACES,
        {"": {**READS["a row of padding"], "rank": 2, "update_kv_state": True}},
    ),
    **crossed({"out given": {**READS["a row of padding"], "given": True}}, SUMS, RANKS),
    **crossed({"no rows": {"batch": 0}}, {"": {}, "indexed": {"state_batch_indices": []}}, PLACES, UPDATES),
}


def conv1d_arguments(
    device: torch.device,
    *sizes: int,
    shape: tuple[int, ...] = (3, 6),
    width: int = 4,
    length: int = 3,
    dtype: torch.dtype = HALF,
    channels_last: bool = False,
) -> Arguments:
    """What every causal_conv1d_update has, for x of this shape and windows of this length, of 9 slots."""
    random, dim = Random(device, width + length), shape[1]
    window = random.normal(9, dim, length, dtype=dtype)
    arguments = {"x": random.normal(*shape, dtype=dtype), "weight": random.normal(dim, width, dtype=dtype)}
    arguments |= {"bias": random.normal(dim, dtype=dtype), "activation": "silu"}
    return {**arguments, "conv_state": window.mT.contiguous().mT if channels_last else window}


CONV1D: dict[str, Any] = {
    "make": conv1d_arguments, "pools": {"conv_state": ""}, "tokens": ("x",), 
    "indices": (
        "conv_state_indices", "cache_seqlens", "num_accepted_tokens", "initial_state_idx",
        "block_idx_last_scheduled_token",
    ),
}  # fmt: skip
LAST: Calls = {"channels first": {}, "channels last": {"channels_last": True}}
OF_CAUSAL_CONV1D: Calls = crossed(
    {
        "one token": {},
        "a longer window": {"length": 4, "bias": None, "activation": None},
        "several tokens": {"shape": (2, 6, 5), "width": 3, "length": 2, "activation": "swish"},
        "several tokens, a longer window": {"shape": (2, 6, 3), "width": 2, "length": 6, "dtype": FLOAT},
        "slots, one of them negative": {"conv_state_indices": [7, -1, 2]},
        "a ring": {"length": 5, "cache_seqlens": [0, 4, 123]},
        "a ring, several tokens, slots": {
            "shape": (2, 6, 4), "length": 7, "cache_seqlens": [6, 3], "conv_state_indices": [8, 0],
        },
    },
    LAST,
)  # fmt: skip
PACKED = {"query_start_loc": [0, 3, 3, 4], "max_query_len": 3, "conv_state_indices": [4, 0, 2], "shape": (4, 6)}
BLOCKS = {"shape": (2, 6), "conv_state_indices": [[1, 2, 3], [4, 5, 6]]}
OF_VLLM_CONV1D: Calls = crossed(
    {
        "one token": {"conv_state_indices": [7, 0, 2]},
        "no slots": {"bias": None, "activation": False},
        "another null block": {"length": 5, "conv_state_indices": [7, 0, -1], "null_block_id": -1},
        "several tokens": {
            "shape": (2, 6, 5), "width": 3, "length": 2, "conv_state_indices": [1, 5], "activation": True,
        },
        "packed": {"length": 6, **PACKED},
        "accepted counts": {
            "shape": (3, 6, 4), "length": 6, "conv_state_indices": [8, 0, 3], "num_accepted_tokens": [1, 1, 4],
        },
        "accepted counts, packed": {
            **PACKED, "width": 3, "length": 4, "num_accepted_tokens": [3, 1, 2], "null_block_id": 5,
        },
        "accepted counts of one token": {
            "shape": (2, 6), "length": 5, "conv_state_indices": [8, 3], "num_accepted_tokens": [3, 1],
        },
        "blocks to read and to write": {
            **BLOCKS, "initial_state_idx": [0, 2], "block_idx_last_scheduled_token": [1, 2],
        },
        "blocks to read that are not there": {**BLOCKS, "initial_state_idx": [-1, 3]},
        "blocks to write that are not there": {
            **BLOCKS, "initial_state_idx": [0, 0], "block_idx_last_scheduled_token": [3, -1],
        },
    },
    LAST,
    GIVEN,
)  # fmt: skip

SLOTS_VARY, MORE, MORE_OF_BOTH = ("longer 0", "shorter 0"), ("longer 0",), ("longer 0", "longer 1")
WINDOWS_VARY, MAY_MISS = (*SLOTS_VARY, "longer 2", "gaps"), ("missing",)
SSM = Door(
    mamba_ssm.selective_state_update,
    "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None",
    model=partial(models.selective, models.mamba_ssm), calls=OF_MAMBA_SSM, **SELECTIVE,
    right={"one token": ({"state_batch_indices": [5, 0, 9]}, {"state": SLOTS_VARY})},
)  # fmt: skip
VLLM = Door(
    vllm.selective_state_update,
    "state, x, dt, A, B, C, D, dt_bias, z=None, dt_softplus=False, state_batch_indices=None, "
    "dst_state_batch_indices=None, null_block_id=0, out=None, num_accepted_tokens=None, cu_seqlens=None, "
    "is_blackwell=False, enable_stochastic_rounding=False, cache_philox_rounds=0",
    model=partial(models.selective, models.vllm), calls=OF_VLLM, **SELECTIVE,
    right={
        "accepted tokens": (
            {**OF_VLLM["accepted tokens elsewhere"], "given": True},
            {
                "state": SLOTS_VARY, "D": MAY_MISS, "dt_bias": MAY_MISS, "cu_seqlens": ("shorter 0",),
                "state_batch_indices": MORE, "dst_state_batch_indices": MORE_OF_BOTH, "num_accepted_tokens": MORE,
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
    "backend='auto'",
    model=partial(models.selective, models.flashinfer), calls=OF_FLASHINFER, **SELECTIVE,
    right={
        "a buffer": (
            {
                **FORMS["several tokens"], **IN_PLACE, "buffer": True, "state_dtype": SHORT,
                "intermediate_state_indices": [4, 0, 2], "given": True,
            },
            {"D": MAY_MISS, "state_batch_indices": MORE, "intermediate_state_indices": MORE},
        ),
        "a seed": (
            {**FORMS["packed"], **MODES["accepted, every token"], "state_dtype": HALF, "rand_seed": torch.tensor([1])},
            {
                "state": SLOTS_VARY, "D": MAY_MISS, "cu_seqlens": ("shorter 0",), "rand_seed": ("one more axis",),
                "state_batch_indices": MORE_OF_BOTH, "dst_state_batch_indices": MORE_OF_BOTH,
                "num_accepted_tokens": MORE,
            },
        ),
    },
)  # fmt: skip
DECODING = Door(
    flashinfer.gated_delta_rule_decode_pretranspose,
    "q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True, initial_state=None, "
    "initial_state_indices=None, output_state_indices=None",
    model=partial(models.gated_delta, models.flashinfer_decode), calls=OF_DECODE, **DELTA,
    right={
        "a pool": ({**DECODE["elsewhere"], "given": True}, {"initial_state": SLOTS_VARY}),
        "in order": (DECODE["in order"], {}),
    },
)  # fmt: skip
SEVERAL = Door(
    flashinfer.gated_delta_rule_mtp,
    "q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale=None, output=None, "
    "intermediate_states_buffer=None, ssm_state_indices=None, disable_state_update=None, use_qk_l2norm=True, "
    "output_state_indices=None",
    model=partial(models.gated_delta, models.flashinfer_mtp), calls=OF_MTP, **DELTA,
    right={
        "a buffer": (
            {**MTP["elsewhere"], "buffer": (3, 0), "tokens": 3, "given": True},
            {"initial_state": SLOTS_VARY, BUFFER: MORE_OF_BOTH},
        ),
        "every token": ({**MTP["every token"], "tokens": 3}, {"initial_state": SLOTS_VARY}),
    },
)  # fmt: skip
MAMBA3 = Door(
    mamba_ssm.mamba3_step_fn,
    "state, Bstate, Xstate, A, B, C, D, x, dt, trap, xproj, outproj=None, state_out=None, out=None, z=None, "
    "zproj=None, tile_D=64, num_warps=2, state_batch_indices=None, update_kv_state=False",
    model=models.mamba3, calls=OF_MAMBA3, make=mamba3_arguments,
    pools=dict.fromkeys(("state", "Bstate", "Xstate", "state_out"), ""),
    tokens=("x", "A", "B", "C", "dt", "trap", "z"), indices=("state_batch_indices",),
    right={
        place: (
            {**READS["indexed"], **PLACES[place], "given": True, "update_kv_state": True},
            {"D": MAY_MISS, "xproj": MAY_MISS},
        )
        for place in PLACES
    },
)  # fmt: skip
CONV = Door(
    causal_conv1d.causal_conv1d_update,
    "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None",
    model=models.causal_conv1d, calls=OF_CAUSAL_CONV1D, **CONV1D,
    right={
        "one token": ({"conv_state_indices": [7, 0, 2]}, {"conv_state": WINDOWS_VARY}),
        "a ring": (
            {"shape": (2, 6, 4), "cache_seqlens": [6, 3], "conv_state_indices": [8, 0]},
            {"x": ("longer 2",), "conv_state": WINDOWS_VARY},
        ),
    },
)  # fmt: skip
VLLM_CONV = Door(
    vllm.causal_conv1d_update,
    "x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, num_accepted_tokens=None, "
    "query_start_loc=None, max_query_len=-1, null_block_id=0, block_idx_last_scheduled_token=None, "
    "initial_state_idx=None, validate_data=False, out=None",
    model=models.vllm_conv1d, calls=OF_VLLM_CONV1D, in_place=True, **CONV1D,
    right={
        "packed": (
            {**PACKED, "length": 5, "num_accepted_tokens": [3, 1, 2], "given": True},
            {
                "conv_state": WINDOWS_VARY, "out": ("gaps",), "conv_state_indices": ("shorter 0", "one more axis"),
                "query_start_loc": MORE, "num_accepted_tokens": MORE,
            },
        ),
        "blocks": (
            {**BLOCKS, "initial_state_idx": [0, 2], "block_idx_last_scheduled_token": [1, 2]},
            {
                "x": ("shorter 0",), "conv_state": WINDOWS_VARY, "conv_state_indices": MORE_OF_BOTH,
                "initial_state_idx": MORE, "block_idx_last_scheduled_token": MORE,
            },
        ),
    },
)  # fmt: skip
DOORS = (SSM, VLLM, FLASHINFER, DECODING, SEVERAL, MAMBA3, CONV, VLLM_CONV)
