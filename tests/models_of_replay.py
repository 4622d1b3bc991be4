"""The results of other libraries' replays of Mamba-2, by their contracts."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from models_of_peers import (
    Arguments,
    Outcome,
    decoded,
    numbers,
    selective_token,
    shaped,
    tokens_of_rows,
    with_every_axis,
)

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


def flashinfer_rings(arguments: Arguments) -> list[RingRow]:
    """A row in the padding slot does nothing. One whose live entries and tokens are more than what fits beside the
    tokens of the longest folds its live entries."""
    x, rows = arguments["x"], []
    longest = arguments.get("max_seqlen") or (x.shape[1] if x.dim() == 4 else 1)
    window = arguments["x_cache"].shape[2] - longest
    tokens = tokens_of_rows(len(x), longest, arguments.get("cu_seqlens"))
    slots = numbers(arguments.get("state_batch_indices")) or [[b] for b in range(len(tokens))]
    pad = arguments.get("pad_slot_id", arguments.get("null_block_id", -1))
    for (slot, *_), here in zip(slots, tokens, strict=True):
        named = arguments.get("state_batch_indices") is not None
        if (named and (slot < 0 or slot == pad)) or not here:
            continue
        start, live = int(arguments["ring_start"][slot]), int(arguments["prev_num_accepted_tokens"][slot])
        rows.append(RingRow(here, slot, start, live, live if live + len(here) > window else 0))
    return rows


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
    rows, null = [], arguments.get("null_block_id", 0)
    slots = numbers(arguments.get("state_batch_indices"))
    for b in range(len(arguments["x"])):
        slot, live = slots[b][0] if slots else b, int(arguments["write_pos"][b])
        if (slots is None or slot not in (-1, null)) and 0 <= live < arguments["x_cache"].shape[2]:
            rows.append(RingRow([b], slot, 0, live, live + 1 if arguments["is_flush"][b] else 0))
    return rows


def replay(contract: Callable[[Arguments], list[RingRow]], arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """The outcome of a replay of this contract: outputs, states, and rows appended to rings, with the dt that counts.

    Where tokens have 16 bits, a plain output is made of a state and C of as many. `out` stays where no row runs.
    """
    state = decoded(arguments["state"], arguments.get("state_scale")).to(dtype)
    given, length = with_every_axis(arguments, *state.shape[1:]), arguments["x_cache"].shape[2]
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
                outcome.y[token], s = selective_token(s, token, given, softplus, operand=operand)
                outcome.ran[token] = True
                for name, appended in (("x", given["x"]), ("B", given["B"]), ("dt", sizes)):
                    places = [(f"{name}_cache", (row.slot, i, entry)) for i in range(appended.shape[1])]
                    outcome.stored |= zip(places, appended[token], strict=True)
            outcome.stored |= {("state", here): s} if j + 1 == row.folds else {}
        for name, cursor in row.moved.items():
            outcome.stored |= {(name, here): torch.tensor(cursor, dtype=torch.int32)}
    return shaped(outcome, arguments["x"].shape)
