"""What functions of other libraries give, by their contracts: loops over rows, tokens and heads.

A model says for every row of the batch where it starts and where its states go. simulate() computes them for
selective_state_update, and simulate_delta() for gated delta rules, in float64 or float32. simulate_mamba3() does both
for mamba3_step_fn. Nothing here uses flashstate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]
Place = tuple[str, tuple[int, ...]]  # an entry of an argument that holds states, by its name


@dataclass
class Row:
    """A row of the batch: its tokens on the flat token axis, the slot it starts from (None: from zero), and where the
    state after each token goes."""

    tokens: list[int]
    start: int | None
    goes: dict[int, list[Place]] = field(default_factory=dict)

    def store(self, token: int, name: str, *entry: int) -> None:
        self.goes.setdefault(token, []).append((name, entry))


Model = Callable[[Arguments], list[Row]]


@dataclass
class Outcome:
    """Outputs (tokens, heads, dim), zero for tokens of no row, and the states (heads, dim, dstate) that are stored."""

    y: Tensor
    stored: dict[Place, Tensor]


def mamba_ssm(arguments: Arguments) -> list[Row]:
    """Rows with a negative index do nothing, and their output is zero."""
    slots = numbers(arguments["state_batch_indices"]) or [[b] for b in range(len(arguments["x"]))]
    rows = [Row([b], slot) for b, (slot,) in enumerate(slots) if slot >= 0]
    for row in rows:
        row.store(0, "state", row.start)
    return rows


def vllm(arguments: Arguments) -> list[Row]:
    """Rows in the null block do nothing. With accepted counts every token has a place, else the last has the first."""
    rows = []
    read, write = numbers(arguments.get("state_batch_indices")), numbers(arguments.get("dst_state_batch_indices"))
    accepted, null = arguments.get("num_accepted_tokens"), arguments.get("null_block_id", 0)
    for b, tokens in enumerate(tokens_of_rows(arguments)):
        slots = read[b] if read else [b]
        slot = slots[0] if accepted is None else chosen(slots, int(accepted[b]))
        if read and (slot is None or slot < 0 or slot == null):
            continue
        row, targets = Row(tokens, slot), write[b] if write else slots
        for t in range(len(tokens)) if accepted is not None else [len(tokens) - 1]:
            target = targets[t if accepted is not None else 0]
            if tokens and (not read or (target >= 0 and target != null)):
                row.store(t, "state", target)
        rows.append(row)
    return rows


def flashinfer(arguments: Arguments) -> list[Row]:
    """Padding rows start from zero and store nothing. States go to the buffer if there is one, else to `dst`, after
    every token where it is a table, else where they were read."""
    rows = []
    read, write = numbers(arguments.get("state_batch_indices")), numbers(arguments.get("dst_state_batch_indices"))
    accepted, pad = arguments.get("num_accepted_tokens"), arguments.get("pad_slot_id", -1)
    buffer_rows = numbers(arguments.get("intermediate_state_indices"))
    for b, tokens in enumerate(tokens_of_rows(arguments)):
        slots = read[b] if read else [b]
        slot = slots[0] if accepted is None else chosen(slots, int(accepted[b]))
        if slot is None or slot < 0 or slot == pad:
            rows.append(Row(tokens, None))
            continue
        rows.append(row := Row(tokens, slot))
        for t in range(len(tokens)):
            if arguments.get("intermediate_states_buffer") is not None:
                row.store(t, "intermediate_states_buffer", buffer_rows[b][0] if buffer_rows else slot, t)
            elif not arguments.get("disable_state_update"):
                per_token = write is not None and arguments["dst_state_batch_indices"].dim() == 2
                target = slot if write is None else write[b][t] if per_token else write[b][0]
                if (per_token or t == len(tokens) - 1) and target >= 0 and target != pad:
                    row.store(t, "state", target)
    return rows


def flashinfer_decode(arguments: Arguments) -> list[Row]:
    """One token per row. Rows with a negative slot do nothing. States go where their output index says, or where they
    were read; no state goes to a negative index."""
    pool = "state" if arguments.get("initial_state") is None else "initial_state"
    read = numbers(arguments.get("initial_state_indices")) or [[b] for b in range(len(arguments["v"]))]
    write = numbers(arguments.get("output_state_indices")) or read
    rows = []
    for b, ((slot,), (target,)) in enumerate(zip(read, write, strict=True)):
        if slot >= 0:
            rows.append(row := Row([b], slot))
            if target >= 0:
                row.store(0, pool, target)
    return rows


def flashinfer_mtp(arguments: Arguments) -> list[Row]:
    """Rows with a negative slot do nothing. The buffer receives every state of its row. In the pool, a table of slots
    for every token stands for all other writes; else the last state is written if updates are not disabled."""
    length = arguments["v"].shape[1]
    read = numbers(arguments["initial_state_indices"])
    write, every = (numbers(arguments.get(name)) for name in ("output_state_indices", "ssm_state_indices"))
    rows = []
    for b, (slot,) in enumerate(read):
        if slot < 0:
            continue
        rows.append(row := Row(list(range(b * length, b * length + length)), slot))
        for t in range(length):
            if arguments.get("intermediate_states_buffer") is not None:
                row.store(t, "intermediate_states_buffer", b, t)
            if every is not None and every[b][t] >= 0:
                row.store(t, "initial_state", every[b][t])
        target = slot if write is None else write[b][0]
        if every is None and arguments.get("disable_state_update") is False and target >= 0:
            row.store(length - 1, "initial_state", target)
    return rows


def numbers(indices: Tensor | None) -> list[list[int]] | None:
    """Rows of a table; a list is a table of one column."""
    return None if indices is None else indices.reshape(len(indices), -1).tolist()


def chosen(slots: list[int], accepted: int) -> int | None:
    return slots[accepted - 1] if 1 <= accepted <= len(slots) else None


def tokens_of_rows(arguments: Arguments) -> list[list[int]]:
    """Where the tokens of every row are, on the flat token axis."""
    x = arguments["x"]
    if arguments.get("cu_seqlens") is None:
        length = x.shape[1] if x.dim() == 4 else 1
        return [list(range(b * length, b * length + length)) for b in range(len(x))]
    bounds = arguments["cu_seqlens"].tolist()
    return [list(range(first, last)) for first, last in pairwise(bounds)]


def simulate(model: Model, arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """What a call on these arguments, which are on the CPU, gives by this model, computed in `dtype`."""
    state = decoded(arguments["state"], arguments.get("state_scale"))
    heads, dim, dstate = state.shape[-3] if state.dim() == 4 else 1, *state.shape[-2:]
    wide = {"x": (-1, heads, dim), "dt": (-1, heads, dim), "z": (-1, heads, dim), "A": (heads, dim, dstate)}
    wide |= {"D": (heads, dim), "dt_bias": (heads, dim)}
    values = {name: arguments.get(name) for name in wide}
    values = {name: None if t is None else t.to(dtype).reshape(wide[name]) for name, t in values.items()}
    tokens = len(values["x"])
    values |= {name: arguments[name].to(dtype).reshape(tokens, -1, dstate) for name in ("B", "C")}
    outcome = Outcome(torch.zeros(tokens, heads, dim, dtype=dtype), {})
    for row in model(arguments):
        s = torch.zeros(heads, dim, dstate, dtype=dtype)
        if row.start is not None:
            s = state[row.start].to(dtype).reshape(heads, dim, dstate)
        for t, token in enumerate(row.tokens):
            outcome.y[token], s = one_token(s, token, values, arguments["dt_softplus"])
            outcome.stored |= dict.fromkeys(row.goes.get(t, []), s)
    return outcome


def one_token(s: Tensor, token: int, values: Arguments, dt_softplus: bool) -> tuple[Tensor, Tensor]:
    """The output (heads, dim) of a token, and the state after it, head by head."""
    outputs, states = [], []
    for h in range(len(s)):
        group = h * values["B"].shape[1] // len(s)
        x, dt = values["x"][token, h], values["dt"][token, h]  # (dim,)
        if values["dt_bias"] is not None:
            dt = dt + values["dt_bias"][h]
        if dt_softplus:
            dt = torch.where(dt > 20, dt, torch.log1p(torch.exp(dt)))
        decay = torch.exp(dt[:, None] * values["A"][h])  # (dim, dstate)
        states.append(s[h] * decay + torch.outer(dt * x, values["B"][token, group]))
        y = states[-1] @ values["C"][token, group]
        if values["D"] is not None:
            y = y + values["D"][h] * x
        if values["z"] is not None:
            y = y * values["z"][token, h] * torch.sigmoid(values["z"][token, h])
        outputs.append(y)
    return torch.stack(outputs), torch.stack(states)


def simulate_delta(model: Model, arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """The same for a gated delta rule. Outputs are (tokens, HV, V), states (HV, V, K)."""
    pool = arguments["state"] if arguments.get("initial_state") is None else arguments["initial_state"]
    per_token = {name: arguments[name].to(dtype).flatten(0, 1) for name in ("q", "k", "v", "a", "b")}
    per_head = {name: arguments[name].to(dtype) for name in ("A_log", "dt_bias")}
    scale, normalise = arguments.get("scale"), arguments.get("use_qk_l2norm", True)
    scale = per_token["q"].shape[-1] ** -0.5 if scale is None else scale
    outcome = Outcome(torch.zeros_like(per_token["v"]), {})
    for row in model(arguments):
        s = pool[row.start].to(dtype)
        for t, token in enumerate(row.tokens):
            here = {name: values[token] for name, values in per_token.items()}
            outcome.y[token], s = one_delta_token(s, {**here, **per_head}, scale, normalise)
            outcome.stored |= dict.fromkeys(row.goes.get(t, []), s)
    return outcome


def one_delta_token(s: Tensor, values: Arguments, scale: float, normalise: bool) -> tuple[Tensor, Tensor]:
    """The output (HV, V) of a token, and the state after it, head by head."""
    outputs, states = [], []
    for h in range(len(s)):
        key_head = h // (len(s) // len(values["k"]))
        q, k, v = values["q"][key_head], values["k"][key_head], values["v"][h]  # (K,), (K,), (V,)
        if normalise:
            q, k = (vector / torch.sqrt(vector @ vector + 1e-6) for vector in (q, k))
        x = values["a"][h] + values["dt_bias"][h]
        rate = x if x > 20 else torch.log1p(torch.exp(x))
        decayed = s[h] * torch.exp(-torch.exp(values["A_log"][h]) * rate)  # (V, K)
        beta = 1 / (1 + torch.exp(-values["b"][h]))
        states.append(decayed + torch.outer(beta * (v - decayed @ k), k))
        outputs.append(states[-1] @ (q * scale))
    return torch.stack(outputs), torch.stack(states)


def simulate_mamba3(arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """What a call of mamba3_step_fn gives: outputs (batch, H, D), or without outproj (batch, R, H, D), zero for rows
    with a slot that the pool does not have; states, and with update_kv_state what replaces Bstate and Xstate, as it is
    kept there."""
    state, Bstate, Xstate = (arguments[name] for name in ("state", "Bstate", "Xstate"))
    x, B, goes = arguments["x"], arguments["B"], "state" if arguments.get("state_out") is None else "state_out"
    indices = arguments.get("state_batch_indices")
    slots = range(len(x)) if indices is None else indices.tolist()
    B_kept = B.repeat_interleave(state.shape[1] // B.shape[2], 2).to(Bstate.dtype)  # (batch, R, H, N)
    outcome = Outcome(torch.zeros(len(x), *Bstate.shape[1:3], x.shape[-1], dtype=dtype), {})
    for b, slot in enumerate(slots):
        if not 0 <= slot < len(state):
            continue
        kept = {"s": state[slot], "k": Bstate[slot], "v": Xstate[slot], "B": B_kept[b]}
        here = {name: arguments[name][b] for name in ("x", "A", "dt", "trap", "C")}
        shared = {name: arguments.get(name) for name in ("D", "xproj", "zproj", "outproj")}
        z = None if arguments.get("z") is None else arguments["z"][b]
        values = {name: t if t is None else t.to(dtype) for name, t in {**kept, **here, **shared, "z": z}.items()}
        outcome.y[b], outcome.stored[goes, (slot,)] = one_mamba3_token(values)
        if arguments.get("update_kv_state"):
            outcome.stored["Bstate", (slot,)], outcome.stored["Xstate", (slot,)] = B_kept[b], x[b].to(Xstate.dtype)
    if arguments.get("outproj") is not None:
        outcome.y = outcome.y.sum(1)
    return outcome


def one_mamba3_token(values: Arguments) -> tuple[Tensor, Tensor]:
    """The output (R, H, D) of a token, times outproj if there is one, and the state (H, D, N), number by number along
    heads and ranks."""
    R, H = values["B"].shape[:2]
    y, states = torch.zeros(R, *values["x"].shape, dtype=values["x"].dtype), []
    one = torch.ones_like(values["x"])
    in_, gate, out = (
        one.expand(R, *one.shape) if values[w] is None else values[w] for w in ("xproj", "zproj", "outproj")
    )
    for h in range(H):
        dt, trap, group = values["dt"][h], values["trap"][h], h * values["C"].shape[1] // H
        decay = torch.exp(values["A"][h] * dt)
        s = decay * values["s"][h]  # (D, N)
        for r in range(R):
            s = s + trap * dt * torch.outer(values["x"][h] * in_[r, h], values["B"][r, h])
            s = s + (1 - trap) * dt * decay * torch.outer(values["v"][h] * in_[r, h], values["k"][r, h])
        for r in range(R):
            y[r, h] = s @ values["C"][r, group]
            if values["D"] is not None:
                y[r, h] += values["D"][h] * values["x"][h] * in_[r, h]
            if values["z"] is not None:
                wide = values["z"][h] * gate[r, h]
                y[r, h] *= wide * torch.sigmoid(wide)
            y[r, h] *= out[r, h]
        states.append(s)
    return y, torch.stack(states)


def decoded(data: Tensor, scale: Tensor | None) -> Tensor:
    """Stored states as float32; those with a scale per row of the last axis multiplied with it."""
    return data.float() if scale is None else data.float() * scale.reshape(*data.shape[:-1], 1)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values as a plain implementation stores them, to nearest; integers with a scale per row."""
    if dtype.is_floating_point:
        return values.to(dtype).float()
    step = values.abs().amax(-1, keepdim=True) / torch.iinfo(dtype).max
    return torch.where(step > 0, (values / step).round() * step, 0.0)
