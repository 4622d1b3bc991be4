"""FlashInfer's checkpointing_ssu and vLLM's two ways of replay: their results by their contracts, and calls in every
mode and form that they have."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import models_of_peers as models
import torch
from models_of_peers import Arguments, Outcome
from peer_calls import BRAIN, BYTE, CPU, CURSORS, DIM, DSTATE, FLOAT, HALF, HEADS, SLOTS, Adapter, Call, in_turn
from peer_selective import GROUPS, selective_arguments
from torch import Tensor

from flashstate.compat import flashinfer, vllm
from flashstate.proof.inputs import Source
from flashstate.reference.mamba2 import state_after, time_steps


@dataclass
class RingRow:
    """A row of the batch that continues from a checkpoint and the tokens of a ring.

    tokens: on the flat token axis. start, live: which entries of the ring. folds: after how many tokens of both the
    state is stored; 0: never. moved: what its cursors become.
    """

    tokens: list[int]
    slot: int
    start: int
    live: int
    folds: int
    moved: dict[str, int] = field(default_factory=dict)


def rows_with(arguments: Arguments, null: int) -> list[models.Row]:
    """Rows that are not padding, which only those with slots can be."""
    named = arguments.get("state_batch_indices") is not None
    return models.rows_of(arguments, lambda *_: [], null=null if named else -1)


def flashinfer_rings(arguments: Arguments) -> list[RingRow]:
    """A row whose live entries and tokens are more than what fits beside the tokens of the longest folds the former."""
    x, rings, names = arguments["x"], [], ("ring_start", "prev_num_accepted_tokens")
    window = arguments["x_cache"].shape[2] - (arguments.get("max_seqlen") or (x.shape[1] if x.dim() == 4 else 1))
    for row in rows_with(arguments, arguments.get("pad_slot_id", arguments.get("null_block_id", -1))):
        start, live = (int(arguments[name][row.start]) for name in names)
        rings.append(RingRow(row.tokens, row.start, start, live, live if live + len(row.tokens) > window else 0))
    return [row for row in rings if row.tokens]


def vllm_trackers(arguments: Arguments) -> list[RingRow]:
    """As FlashInfer has it; the cursors of rows that name their slots move on by a token, past what was folded."""
    rows = flashinfer_rings({"null_block_id": 0, **arguments})
    moves = arguments.get("update_trackers", True) and arguments.get("state_batch_indices") is not None
    for row in rows if moves else []:
        start = (row.start + row.folds) % arguments["x_cache"].shape[2]
        row.moved = {"ring_start": start, "prev_num_accepted_tokens": row.live - row.folds + 1}
    return rows


def vllm_buffers(arguments: Arguments) -> list[RingRow]:
    """Entries from 0 on; a row that flushes stores the state after its token."""
    rings = []
    for row in rows_with(arguments, arguments.get("null_block_id", 0)):
        live, flushes = (int(arguments[name][row.tokens[0]]) for name in ("write_pos", "is_flush"))
        rings.append(RingRow(row.tokens, row.start, 0, live, live + 1 if flushes else 0))
    return [row for row in rings if row.live < arguments["x_cache"].shape[2]]


def replay(contract: Callable[[Arguments], list[RingRow]], arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """The outcome of a replay of this contract: outputs, states, and rows appended to rings, with the dt that counts.

    Where tokens have 16 bits, a plain output is made of a state and C of as many. `out` stays where no row runs.
    """
    state = models.decoded(arguments["state"], arguments.get("state_scale")).to(dtype)
    given, length = models.with_every_axis(arguments, *state.shape[1:]), arguments["x_cache"].shape[2]
    short = arguments["x"].dtype == torch.bfloat16 and dtype == torch.float32
    softplus = bool(arguments.get("dt_softplus"))
    dt, bias = (None if given[name] is None else given[name].to(dtype) for name in ("dt", "dt_bias"))
    sizes = time_steps(dt, bias, softplus, None)[..., 0]  # (tokens, heads)
    left = arguments["out"].to(dtype).reshape(given["x"].shape)
    outcome = Outcome(left, torch.zeros_like(left, dtype=torch.bool))
    for row in contract(arguments):
        s, here = state[row.slot], (row.slot,)
        outcome.read.add(row.slot)
        for j in range(row.live + len(row.tokens)):
            entry = (row.start + j) % length
            if j < row.live:
                x, B, dt = (arguments[f"{name}_cache"][row.slot, :, entry].to(dtype)[None] for name in ("x", "B", "dt"))
                s = state_after(s[None], x, dt[..., None], given["A"], B)[0]
            else:
                token = row.tokens[j - row.live]
                operand = (lambda t: t.bfloat16().float()) if short else (lambda t: t)
                outcome.y[token], s = models.selective_token(s, token, given, softplus, operand=operand)
                outcome.ran[token] = True
                for name, appended in (("x", given["x"]), ("B", given["B"]), ("dt", sizes)):
                    places = [(f"{name}_cache", (row.slot, i, entry)) for i in range(appended.shape[1])]
                    outcome.stored |= zip(places, appended[token], strict=True)
            outcome.stored |= {("state", here): s} if j + 1 == row.folds else {}
        for name, cursor in row.moved.items():
            outcome.stored |= {(name, here): torch.tensor(cursor, dtype=torch.int32)}
    return models.shaped(outcome, arguments["x"].shape)


# Calls

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
    finish: Callable[[Arguments], Arguments] = dict,
) -> Arguments:
    """The arguments of every replay, as `finish` changes them: a checkpoint, a ring of so many entries, and tokens.

    lengths: of packed rows. optional: D and dt_bias are there. gate: z is. apart: the heads of rings do not lie side by
    side.
    """
    made = selective_arguments(
        device, tokens, lengths, 0, HEADS, state_dtype, x_dtype, FLOAT, True, optional, dt_softplus, False
    )
    if lengths is not None:
        made |= {name: made[name][None] for name in ("x", "dt", "B", "C", "z") if made[name] is not None}
    random = Source(device, sum(tokens))

    def ring(heads: int, *sizes: int, dtype: torch.dtype = x_dtype) -> Tensor:
        return random.normal(SLOTS, heads, entries + apart, *sizes).to(dtype)[:, :, :entries]

    made |= {"x_cache": ring(HEADS, DIM), "B_cache": ring(GROUPS, DSTATE), "dt_cache": ring(HEADS, dtype=FLOAT).abs_()}
    if not gate:
        del made["z"]
    return finish({**made, "out": torch.full_like(made["x"], 5.0)})


def with_rings(made: Arguments) -> Arguments:
    """The arguments of checkpointing_ssu, but for slots."""
    start, live = (torch.zeros(SLOTS, dtype=torch.int32, device=made["x"].device) for _ in range(2))
    start[READ], live[READ] = (torch.tensor(given, dtype=torch.int32, device=start.device) for given in (START, LIVE))
    return {**made, "ring_start": start, "prev_num_accepted_tokens": live}


def with_trackers(made: Arguments) -> Arguments:
    """The arguments of selective_state_update_replayssm_flashinfer, but for slots."""
    x, made = made["x"], with_rings(made)
    taken = made["cu_seqlens"].diff().max() if "cu_seqlens" in made else x.shape[1] if x.dim() == 4 else 1
    return {**made, "prev_query_len": torch.zeros_like(made["ring_start"]), "logical_window": LENGTH - int(taken)}


def with_buffer(made: Arguments) -> Arguments:
    """The arguments of selective_state_update_replayssm_output_only, but for slots and cursors."""
    entries = made["x_cache"].shape[2]
    return {**made, "max_cache_len": entries, "bc_pre": made["x"].new_zeros(3, GROUPS, entries, dtype=FLOAT)}


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
POOLS = {"state": "state_scale", "x_cache": "", "B_cache": "", "dt_cache": ""}
COMMON: dict[str, Any] = {"tokens": ("x", "dt", "B", "C", "z"), "pools": POOLS}
CHECKPOINTING = Adapter(
    flashinfer.checkpointing_ssu,
    make=partial(replay_arguments, finish=with_rings), model=partial(replay, flashinfer_rings), **COMMON,
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
    make=partial(replay_arguments, tokens=(3,), gate=False, finish=with_trackers), model=partial(replay, vllm_trackers),
    **{**COMMON, "pools": {**POOLS, **dict.fromkeys(CURSORS, "")}},
    calls={
        **in_turn({"one token": IN_PLACE, "a table": TABLE}, FORMS),
        "3 tokens": {**IN_PLACE, "tokens": (3, 3), "update_trackers": False},
        "stochastic": {**IN_PLACE, "state_dtype": HALF, "enable_stochastic_rounding": True},
    },
    edges={"in order": {}, "packed": {**IN_PLACE, **PACKED, "update_trackers": False}},
)  # fmt: skip
BUFFERED = BufferAdapter(
    vllm.selective_state_update_replayssm_output_only,
    make=partial(replay_arguments, tokens=(3,), finish=with_buffer), model=partial(replay, vllm_buffers), **COMMON,
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
