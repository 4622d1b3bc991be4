"""FlashInfer's checkpointing_ssu and vLLM's two ways of replay: calls in every mode and form that they have."""

from functools import partial, wraps
from typing import Any

import models_of_replay as models
import torch
from models_of_peers import Arguments
from peer_calls import CPU, CURSORS, DIM, DSTATE, HEADS, SLOTS, Call, Calls, Door, Random, crossed
from torch import Tensor

from flashstate.compat import flashinfer, vllm

FLOAT, HALF, BRAIN, BYTE = torch.float32, torch.float16, torch.bfloat16, torch.int8
GROUPS, LENGTH = 2, 7
READ = [5, 9, 8]
START, LIVE = [6, 2, 0], [4, 3, 0]  # of the slots in READ; the first ring wraps


def replay_arguments(
    device: torch.device,
    tokens: tuple[int, ...] = (3, 3),
    lengths: list[int] | None = None,
    state_dtype: torch.dtype = FLOAT,
    x_dtype: torch.dtype = FLOAT,
    optional: bool = True,
    gate: bool = True,
    dt_softplus: bool = True,
    apart: bool = False,
    entries: int = LENGTH,
) -> Arguments:
    """What every replay has: a checkpoint, a ring of so many entries, and tokens.

    lengths: of packed rows. optional: D and dt_bias are there. gate: z is. apart: the heads of rings do not lie side by
    side.
    """
    tokens = tokens if lengths is None else (1, sum(lengths))
    random, positive = Random(device, sum(tokens)), 0 if dt_softplus else 1

    def per_head(*sizes: int, of: int, sign: int = 0) -> Tensor:
        values = random.normal(*sizes[:-of], *(1,) * of)
        return (sign * values.abs() if sign else values).expand(sizes)

    def ring(heads: int, *sizes: int, dtype: torch.dtype = x_dtype) -> Tensor:
        return random.normal(SLOTS, heads, entries + apart, *sizes, dtype=dtype)[:, :, :entries]

    state = random.normal(SLOTS, HEADS, DIM, DSTATE)
    scale = None if state_dtype.is_floating_point else state.abs().amax(-1) / torch.iinfo(state_dtype).max
    arguments = {
        "state": state.to(state_dtype) if scale is None else (state / scale[..., None]).round().to(state_dtype),
        "x_cache": ring(HEADS, DIM),
        "B_cache": ring(GROUPS, DSTATE),
        "dt_cache": ring(HEADS, dtype=FLOAT).abs_(),
        "x": random.normal(*tokens, HEADS, DIM, dtype=x_dtype),
        "dt": per_head(*tokens, HEADS, DIM, of=1, sign=positive),
        "A": per_head(HEADS, DIM, DSTATE, of=2, sign=-1),
        "B": random.normal(*tokens, GROUPS, DSTATE, dtype=x_dtype),
        "C": random.normal(*tokens, GROUPS, DSTATE, dtype=x_dtype),
        "D": per_head(HEADS, DIM, of=1) if optional else None,
        "dt_bias": per_head(HEADS, DIM, of=1, sign=positive) if optional else None,
        "dt_softplus": dt_softplus,
    }
    arguments |= {"z": random.normal(*tokens, HEADS, DIM, dtype=x_dtype)} if gate else {}
    arguments |= {} if scale is None else {"state_scale": scale}
    if lengths is not None:
        arguments["cu_seqlens"] = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return {**arguments, "out": torch.full_like(arguments["x"], 5.0)}


passes_on = wraps(replay_arguments, assigned=(), updated=())  # its options


@passes_on
def ring_arguments(device: torch.device, **options: Any) -> Arguments:
    """What checkpointing_ssu has, but for slots."""
    start, live = (torch.zeros(SLOTS, dtype=torch.int32, device=device) for _ in range(2))
    start[READ], live[READ] = (torch.tensor(given, dtype=torch.int32, device=device) for given in (START, LIVE))
    return {**replay_arguments(device, **options), "ring_start": start, "prev_num_accepted_tokens": live}


@passes_on
def tracked_arguments(device: torch.device, tokens: tuple[int, ...] = (3,), **options: Any) -> Arguments:
    """What selective_state_update_replayssm_flashinfer has, but for slots."""
    arguments = ring_arguments(device, tokens=tokens, gate=False, **options)
    taken = max(options["lengths"]) if "lengths" in options else 1 if len(tokens) == 1 else tokens[1]
    window = arguments["x_cache"].shape[2] - taken
    return {**arguments, "prev_query_len": torch.zeros_like(arguments["ring_start"]), "logical_window": window}


@passes_on
def buffer_arguments(device: torch.device, **options: Any) -> Arguments:
    """What selective_state_update_replayssm_output_only has, but for slots and cursors."""
    arguments = replay_arguments(device, tokens=(3,), **options)
    entries = arguments["x_cache"].shape[2]
    return {**arguments, "max_cache_len": entries, "bc_pre": torch.zeros(3, GROUPS, entries, device=device)}


class BufferDoor(Door):
    """Cursors are int32, and whether rows flush is said in one byte each."""

    def arguments(self, call: str | Call, device: torch.device = CPU) -> Arguments:
        arguments = super().arguments(call, device)
        return {**arguments, "write_pos": arguments["write_pos"].int(), "is_flush": arguments["is_flush"].bool()}


IN_PLACE = {"state_batch_indices": READ}
FORMS: Calls = {
    "": {},
    "bfloat16": {"x_dtype": BRAIN, "state_dtype": BRAIN},
    "no softplus": {"dt_softplus": False, "optional": False},
    "heads apart": {"apart": True, "x_dtype": BRAIN},
}
PACKED = {"lengths": [3, 2, 0], "max_seqlen": 3}  # two rows fold, and one has no tokens
OF_FLASHINFER: Calls = {
    "in order": {"tokens": (3, 2)},
    **crossed({"one token": {"tokens": (3, 1)}, "3 tokens": {}, "packed": PACKED}, {"": IN_PLACE}, FORMS),
    "padding": {"state_batch_indices": [5, 3, 8], "pad_slot_id": 3, "indices": torch.int64, "gate": False},
    "int8": {**IN_PLACE, "state_dtype": BYTE},
    "stochastic": {**IN_PLACE, "state_dtype": HALF, "rand_seed": [7], "indices": torch.int64},
    "a seed that float32 does not need": {**IN_PLACE, "rand_seed": [7], "indices": torch.int64},
}
OF_TRACKERS: Calls = {
    **crossed({"one token": {}}, {"": IN_PLACE}, FORMS),
    "a table": {"state_batch_indices": [[5, 1], [0, 1], [8, 1]]},
    "not moved": {**IN_PLACE, "update_trackers": False},
    "in order": {},
    "3 tokens": {**IN_PLACE, "tokens": (3, 3), "update_trackers": False},
    "packed": {**IN_PLACE, **PACKED, "update_trackers": False},
    "stochastic": {**IN_PLACE, "state_dtype": HALF, "enable_stochastic_rounding": True},
}
CURSOR = {"write_pos": [6, 2, 0], "is_flush": [1, 1, 0]}
OF_BUFFERS: Calls = {
    **crossed({"in place": {**CURSOR, **IN_PLACE}}, FORMS),
    "16 entries": {"write_pos": [15, 14, 0], "is_flush": [1, 0, 1], "entries": 16, **IN_PLACE},
    "in order, no gate": {**CURSOR, "gate": False},
    "a table, the null block": {**CURSOR, "state_batch_indices": [[5, 1], [0, 1], [8, 1]]},
    "another null block": {**CURSOR, "state_batch_indices": [0, 9, 8], "null_block_id": 9},
    "a buffer that is full": {"write_pos": [6, 7, 0], "is_flush": [0, 1, 0], **IN_PLACE, "fault": "tokens to fold 7"},
    "stochastic": {**CURSOR, **IN_PLACE, "state_dtype": HALF, "enable_stochastic_rounding": True},
}
COMMON: dict[str, Any] = {"tokens": ("x", "dt", "B", "C", "z"), "indices": ("state_batch_indices",), "right": {}}
POOLS = {"state": "state_scale", "x_cache": "", "B_cache": "", "dt_cache": ""}
CHECKPOINTING = Door(
    flashinfer.checkpointing_ssu,
    "state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, out, D=None, z=None, "
    "dt_bias=None, dt_softplus=False, state_batch_indices=None, pad_slot_id=-1, state_scale=None, rand_seed=None, "
    "philox_rounds=10, d_split=None, cu_seqlens=None, max_seqlen=None, enable_pdl=False, cb_scaled=None, "
    "cumAdt_vec=None, cb_old=None, precompute_heads_per_cta=0, algorithm='auto'",
    make=ring_arguments, model=partial(models.replay, models.flashinfer_rings), pools=POOLS, calls=OF_FLASHINFER,
    **COMMON,
)  # fmt: skip
TRACKED = Door(
    vllm.selective_state_update_replayssm_flashinfer,
    "state, x, dt, A, B, C, out, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, prev_query_len, "
    "logical_window, D=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, null_block_id=0, scratch=None, "
    "update_trackers=True, enable_stochastic_rounding=False, stochastic_rounding_philox_rounds=0, cu_seqlens=None, "
    "max_seqlen=None, enable_pdl=False",
    make=tracked_arguments, model=partial(models.replay, models.vllm_trackers),
    pools={**POOLS, **dict.fromkeys(CURSORS, "")}, calls=OF_TRACKERS, **COMMON,
)  # fmt: skip
BUFFERED = BufferDoor(
    vllm.selective_state_update_replayssm_output_only,
    "state, x, dt, A, B, C, D=None, dt_bias=None, z=None, dt_softplus=False, x_cache=None, dt_cache=None, "
    "B_cache=None, bc_pre=None, write_pos=None, is_flush=None, max_cache_len=16, state_batch_indices=None, "
    "null_block_id=0, out=None, enable_stochastic_rounding=False, cache_philox_rounds=0",
    make=buffer_arguments, model=partial(models.replay, models.vllm_buffers), pools=POOLS, calls=OF_BUFFERS,
    **COMMON,
)  # fmt: skip
