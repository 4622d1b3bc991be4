"""What other libraries' replays of Mamba-2 give, by their contracts. Nothing here uses flashstate."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from models_of_peers import Arguments, Outcome, decoded, numbers, per_head, shaped, silu, softplus, tokens_of_rows
from models_of_peers import with_every_axis as wide
from torch import Tensor


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
    """What a replay of this contract gives: outputs, states, and what is appended to rings, whose dt is as it counts.

    Where tokens have 16 bits, a plain output is made of a state and C of as many. `out` stays where no row runs.
    """
    state = decoded(arguments["state"], arguments.get("state_scale"))
    values, length = wide(arguments, dtype, *state.shape[1:]), arguments["x_cache"].shape[2]
    short = arguments["x"].dtype == torch.bfloat16 and dtype == torch.float32
    kept = {name: arguments[name].reshape(values[name].shape) for name in "xB"}
    left = arguments["out"].to(dtype).reshape(values["x"].shape)
    outcome = Outcome(left, torch.zeros_like(left, dtype=torch.bool))

    def stepped(s: Tensor, x: Tensor, dt: Tensor, B: Tensor) -> Tensor:
        return s * torch.exp(dt[..., None] * values["A"]) + (dt * x)[..., None] * per_head(B, len(s))[:, None]

    def output(s: Tensor, token: int) -> Tensor:
        C = per_head(values["C"][token], len(s))[:, None]  # (heads, 1, dstate)
        s, C = (s.bfloat16().float(), C.bfloat16().float()) if short else (s, C)
        y = (s * C).sum(-1) + (0 if values["D"] is None else values["D"] * values["x"][token])
        return y if values["z"] is None else y * silu(values["z"][token])

    for row in contract(arguments):
        s, here = state[row.slot].to(dtype), (row.slot,)
        outcome.read.add(row.slot)
        for j in range(row.live + len(row.tokens)):
            entry = (row.start + j) % length
            if j < row.live:
                x, B, dt = (arguments[f"{name}_cache"][row.slot, :, entry].to(dtype) for name in ("x", "B", "dt"))
                s = stepped(s, x, dt[:, None], B)
            else:
                token = row.tokens[j - row.live]
                dt = values["dt"][token] + (0 if values["dt_bias"] is None else values["dt_bias"])  # (heads, dim)
                dt = softplus(dt) if arguments.get("dt_softplus") else dt
                s = stepped(s, values["x"][token], dt, values["B"][token])
                outcome.y[token], outcome.ran[token] = output(s, token), True
                for name, appended in (("x", kept["x"][token]), ("B", kept["B"][token]), ("dt", dt[:, 0])):
                    outcome.stored |= {(f"{name}_cache", (row.slot, i, entry)): one for i, one in enumerate(appended)}
            outcome.stored |= {("state", here): s} if j + 1 == row.folds else {}
        for name, cursor in row.moved.items():
            outcome.stored |= {(name, here): torch.tensor(cursor, dtype=torch.int32)}
    return shaped(outcome, arguments["x"].shape)
