"""FlashInfer's checkpointing_ssu and vLLM's two ways of replay: calls in every mode and form that they have."""

from functools import partial, wraps
from typing import Any

import models_of_replay as models
import torch
from models_of_peers import Arguments
from peer_calls import BRAIN, BYTE, CPU, CURSORS, DIM, DSTATE, FLOAT, HALF, HEADS, SLOTS, Adapter, Call, Random, in_turn
from peer_selective import GROUPS, selective_arguments
from torch import Tensor

from flashstate.compat import flashinfer, vllm

LENGTH = 7
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
    """The arguments of every replay: a checkpoint, a ring of so many entries, and tokens.

    lengths: of packed rows. optional: D and dt_bias are there. gate: z is. apart: the heads of rings do not lie side by
    side.
    """
    made = selective_arguments(
        device, tokens, lengths, 0, HEADS, state_dtype, x_dtype, FLOAT, True, optional, dt_softplus, False
    )
    if lengths is not None:
        made |= {name: made[name][None] for name in ("x", "dt", "B", "C", "z") if made[name] is not None}
    random = Random(device, sum(tokens))

    def ring(heads: int, *sizes: int, dtype: torch.dtype = x_dtype) -> Tensor:
        return random.normal(SLOTS, heads, entries + apart, *sizes, dtype=dtype)[:, :, :entries]

    made |= {"x_cache": ring(HEADS, DIM), "B_cache": ring(GROUPS, DSTATE), "dt_cache": ring(HEADS, dtype=FLOAT).abs_()}
    if not gate:
        del made["z"]
    return {**made, "out": torch.full_like(made["x"], 5.0)}


passes_on = wraps(replay_arguments, assigned=(), updated=())  # its options


@passes_on
def ring_arguments(device: torch.device, **options: Any) -> Arguments:
    """The arguments of checkpointing_ssu, but for slots."""
    start, live = (torch.zeros(SLOTS, dtype=torch.int32, device=device) for _ in range(2))
    start[READ], live[READ] = (torch.tensor(given, dtype=torch.int32, device=device) for given in (START, LIVE))
    return {**replay_arguments(device, **options), "ring_start": start, "prev_num_accepted_tokens": live}


@passes_on
def tracked_arguments(device: torch.device, tokens: tuple[int, ...] = (3,), **options: Any) -> Arguments:
    """The arguments of selective_state_update_replayssm_flashinfer, but for slots."""
    arguments = ring_arguments(device, tokens=tokens, gate=False, **options)
    taken = max(options["lengths"]) if "lengths" in options else 1 if len(tokens) == 1 else tokens[1]
    window = arguments["x_cache"].shape[2] - taken
    return {**arguments, "prev_query_len": torch.zeros_like(arguments["ring_start"]), "logical_window": window}


@passes_on
def buffer_arguments(device: torch.device, **options: Any) -> Arguments:
    """The arguments of selective_state_update_replayssm_output_only, but for slots and cursors."""
    arguments = replay_arguments(device, tokens=(3,), **options)
    entries = arguments["x_cache"].shape[2]
    return {**arguments, "max_cache_len": entries, "bc_pre": torch.zeros(3, GROUPS, entries, device=device)}


class BufferAdapter(Adapter):
    """Cursors are int32, and whether rows flush is said in one byte each."""

    def arguments(self, call: str | Call, device: torch.device = CPU) -> Arguments:
        arguments = super().arguments(call, device)
        return {**arguments, "write_pos": arguments["write_pos"].int(), "is_flush": arguments["is_flush"].bool()}


IN_PLACE = {"state_batch_indices": READ}
FORMS = {
    "bfloat16": {"x_dtype": BRAIN, "state_dtype": BRAIN, "apart": True},
    "no softplus": {"dt_softplus": False, "optional": False},
}
PACKED = {"lengths": [3, 2, 0], "max_seqlen": 3}  # two rows fold, and one has no tokens
CURSOR = {"write_pos": [6, 2, 0], "is_flush": [1, 1, 0]}
TABLE = {"state_batch_indices": [[5, 1], [0, 1], [8, 1]]}
COMMON: dict[str, Any] = {"tokens": ("x", "dt", "B", "C", "z")}
POOLS = {"state": "state_scale", "x_cache": "", "B_cache": "", "dt_cache": ""}
CHECKPOINTING = Adapter(
    flashinfer.checkpointing_ssu,
    "state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, out, D=None, z=None, "
    "dt_bias=None, dt_softplus=False, state_batch_indices=None, pad_slot_id=-1, state_scale=None, rand_seed=None, "
    "philox_rounds=10, d_split=None, cu_seqlens=None, max_seqlen=None, enable_pdl=False, cb_scaled=None, "
    "cumAdt_vec=None, cb_old=None, precompute_heads_per_cta=0, algorithm='auto'",
    make=ring_arguments, model=partial(models.replay, models.flashinfer_rings), pools=POOLS, **COMMON,
    calls={
        **in_turn({"3 tokens": IN_PLACE, "packed": {**IN_PLACE, **PACKED}}, FORMS),
        "one token": {**IN_PLACE, "tokens": (3, 1), "state_dtype": HALF, "rand_seed": [7], "indices": torch.int64},
        "int8, padding": {
            "state_batch_indices": [5, 3, 8], "pad_slot_id": 3, "indices": torch.int64, "gate": False,
            "state_dtype": BYTE,
        },
    },
    edges={
        "in order": {"tokens": (3, 2)},
        "a seed that float32 does not need": {**IN_PLACE, "rand_seed": [7], "indices": torch.int64},
    },
)  # fmt: skip
TRACKED = Adapter(
    vllm.selective_state_update_replayssm_flashinfer,
    "state, x, dt, A, B, C, out, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, prev_query_len, "
    "logical_window, D=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, null_block_id=0, scratch=None, "
    "update_trackers=True, enable_stochastic_rounding=False, stochastic_rounding_philox_rounds=0, cu_seqlens=None, "
    "max_seqlen=None, enable_pdl=False",
    make=tracked_arguments, model=partial(models.replay, models.vllm_trackers),
    pools={**POOLS, **dict.fromkeys(CURSORS, "")}, **COMMON,
    calls={
        **in_turn({"one token": IN_PLACE, "a table": TABLE}, FORMS),
        "3 tokens": {**IN_PLACE, "tokens": (3, 3), "update_trackers": False},
        "stochastic": {**IN_PLACE, "state_dtype": HALF, "enable_stochastic_rounding": True},
    },
    edges={"in order": {}, "packed": {**IN_PLACE, **PACKED, "update_trackers": False}},
)  # fmt: skip
BUFFERED = BufferAdapter(
    vllm.selective_state_update_replayssm_output_only,
    "state, x, dt, A, B, C, D=None, dt_bias=None, z=None, dt_softplus=False, x_cache=None, dt_cache=None, "
    "B_cache=None, bc_pre=None, write_pos=None, is_flush=None, max_cache_len=16, state_batch_indices=None, "
    "null_block_id=0, out=None, enable_stochastic_rounding=False, cache_philox_rounds=0",
    make=buffer_arguments, model=partial(models.replay, models.vllm_buffers), pools=POOLS, **COMMON,
    calls={
        "in place": {**CURSOR, **IN_PLACE},
        **in_turn({"a table, the null block": {**CURSOR, **TABLE}, "in order": {**CURSOR, "gate": False}}, FORMS),
        "stochastic": {**CURSOR, **IN_PLACE, "state_dtype": HALF, "enable_stochastic_rounding": True},
    },
    edges={
        "16 entries": {"write_pos": [15, 14, 0], "is_flush": [1, 0, 1], "entries": 16, **IN_PLACE},
        "another null block": {**CURSOR, "state_batch_indices": [0, 9, 8], "null_block_id": 9},
        "a buffer that is full": {
            "write_pos": [6, 7, 0], "is_flush": [0, 1, 0], **IN_PLACE, "fault": "tokens to fold 7",
        },
    },
)  # fmt: skip
