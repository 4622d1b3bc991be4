"""What functions of other libraries give, by their contracts: loops over rows and tokens.

The contract of a function says for every row of the batch where it starts and where its states go; a recurrence says
what they are, in float64 or float32. Nothing here uses flashstate.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]
Place = tuple[str, tuple[int, ...]]  # an entry of an argument that holds states, by its name


@dataclass
class Row:
    """A row of the batch that runs.

    tokens: on the flat token axis. start: a slot; None: from zero. goes: where the state after each token goes.
    parents: of a tree, the token before each, -1: the start; None: they follow each other.
    """

    tokens: list[int]
    start: int | None
    goes: dict[int, list[Place]] = field(default_factory=dict)
    parents: list[int] | None = None

    def store(self, token: int, name: str, *entry: int) -> None:
        self.goes.setdefault(token, []).append((name, entry))


Contract = Callable[[Arguments], list[Row]]


@dataclass
class Outcome:
    """What a call gives.

    y: the output. ran: which entries of it rows have computed. stored: states, in the dtype of a pool where they are
    kept to the byte. read: slots.
    """

    y: Tensor
    ran: Tensor
    stored: dict[Place, Tensor] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)


def run(rows: list[Row], y: Tensor, start: Callable[[int | None], Any], step: Callable[..., Any]) -> Outcome:
    """The outcome of rows, each from its start on, step by step. y: (tokens, ...), the output where no row runs."""
    outcome = Outcome(y, torch.zeros_like(y, dtype=torch.bool))
    for row in rows:
        states = [s := start(row.start)]
        outcome.read |= {row.start} - {None}
        for t, token in enumerate(row.tokens):
            before = s if row.parents is None else states[row.parents[t] + 1]
            outcome.y[token], s = step(before, token, row.start)
            states.append(s)
            outcome.ran[token] = True
            outcome.stored |= dict.fromkeys(row.goes.get(t, []), s)
    return outcome


def shaped(outcome: Outcome, shape: torch.Size) -> Outcome:
    outcome.y, outcome.ran = outcome.y.reshape(shape), outcome.ran.reshape(shape)
    return outcome


def numbers(indices: Tensor | None) -> list[list[int]] | None:
    """Rows of a table; a list is a table of one column."""
    return None if indices is None else (indices[:, None] if indices.dim() == 1 else indices).tolist()


def tokens_of_rows(rows: int, length: int, bounds: Tensor | None) -> list[list[int]]:
    """Where the tokens of every row are, on the flat token axis: so many each, or as their bounds say."""
    if bounds is None:
        return [list(range(b * length, b * length + length)) for b in range(rows)]
    return [list(range(first, last)) for first, last in pairwise(bounds.tolist())]


def rows_read(arguments: Arguments) -> Iterator[tuple[int, list[int], list[int], int]]:
    """Every row: its number, its tokens, its slots, and the slot that it reads, or -1.

    That is its first, or the one that the count of accepted tokens chooses; a count below 1 chooses the first too.
    """
    x, read, accepted = arguments["x"], arguments.get("state_batch_indices"), arguments.get("num_accepted_tokens")
    tokens = tokens_of_rows(len(x), x.shape[1] if x.dim() == 4 else 1, arguments.get("cu_seqlens"))
    for b in range(len(tokens)):
        slots = numbers(read)[b] if read is not None else [b]
        column = 0 if accepted is None else max(int(accepted[b]) - 1, 0)
        yield b, tokens[b], slots, slots[column] if 0 <= column < len(slots) else -1


def mamba_ssm(arguments: Arguments) -> list[Row]:
    """Rows with a slot that the pool does not have do nothing, and their output is zero."""
    slots = numbers(arguments.get("state_batch_indices")) or [[b] for b in range(len(arguments["x"]))]
    goes = "state" if arguments.get("state_out") is None else "state_out"
    rows = [Row([b], slot) for b, (slot,) in enumerate(slots) if 0 <= slot < len(arguments["state"])]
    for row in rows:
        row.store(0, goes, row.start)
    return rows


def vllm(arguments: Arguments) -> list[Row]:
    """Rows in the null block do nothing. With accepted counts every token has a place, else the last has the first."""
    rows, write = [], numbers(arguments.get("dst_state_batch_indices"))
    every, named = arguments.get("num_accepted_tokens") is not None, arguments.get("state_batch_indices") is not None
    null = arguments.get("null_block_id", 0) if named else -1
    for b, tokens, slots, slot in rows_read(arguments):
        if slot < 0 or slot == null:
            continue
        rows.append(row := Row(tokens, slot))
        for t in range(len(tokens)) if every else [len(tokens) - 1] if tokens else []:
            target = (write[b] if write else slots)[t if every else 0]
            if target >= 0 and target != null:
                row.store(t, "state", target)
    return rows


def flashinfer(arguments: Arguments) -> list[Row]:
    """Padding rows start from zero and store nothing.

    States go to the buffer if there is one, else to `dst`, after every token where it is a table, else where they were
    read.
    """
    rows, write = [], numbers(arguments.get("dst_state_batch_indices"))
    pad, buffer_rows = arguments.get("pad_slot_id", -1), numbers(arguments.get("intermediate_state_indices"))
    for b, tokens, _, slot in rows_read(arguments):
        if slot < 0 or slot == pad:
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


def sglang(arguments: Arguments) -> list[Row]:
    """Padding rows start from zero and store nothing. The buffer receives every state, at the row of its slot or of its
    own; the last one goes where it was read, unless updates are disabled."""
    rows, tree = [], arguments.get("retrieve_parent_token")
    buffer_rows = numbers(arguments.get("intermediate_state_indices"))
    for b, tokens, _, slot in rows_read(arguments):
        live = slot >= 0 and slot != arguments.get("pad_slot_id", -1)
        rows.append(row := Row(tokens, slot if live else None))
        row.parents = None if tree is None else [-1, *tree[b, 1 : len(tokens)].tolist()]
        for t in range(len(tokens)) if live and arguments.get("intermediate_states_buffer") is not None else ():
            row.store(t, "intermediate_states_buffer", buffer_rows[b][0] if buffer_rows else slot, t)
        if live and not arguments.get("disable_state_update"):
            row.store(len(tokens) - 1, "state", slot)
    return rows


def flashinfer_decode(arguments: Arguments) -> list[Row]:
    """Rows with a negative slot do nothing.

    The last state of a row goes where its output index says, or where it was read; no state goes to a negative index.
    """
    pool, length = "state" if arguments.get("initial_state") is None else "initial_state", arguments["v"].shape[1]
    read = numbers(arguments.get("initial_state_indices")) or [[b] for b in range(len(arguments["v"]))]
    write = numbers(arguments.get("output_state_indices")) or read
    rows = []
    for b, ((slot,), (target,)) in enumerate(zip(read, write, strict=True)):
        if slot >= 0:
            rows.append(row := Row(list(range(b * length, b * length + length)), slot))
            for t in range(length) if arguments.get("intermediate_states_buffer") is not None else ():
                row.store(t, "intermediate_states_buffer", b, t)
            if target >= 0 and not arguments.get("disable_state_update"):
                row.store(length - 1, pool, target)
    return rows


def flashinfer_mtp(arguments: Arguments) -> list[Row]:
    """Rows with a negative slot do nothing; the buffer receives every state of its row.

    A table of slots for every token is for the pool, and so is the last state, if its output index says where, or
    without a table if updates are not disabled.
    """
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
        target = -1 if every is not None and write is None else slot if write is None else write[b][0]
        if (every is not None or arguments.get("disable_state_update") is False) and target >= 0:
            row.store(length - 1, "initial_state", target)
    return rows


def selective(contract: Contract, arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """What a selective_state_update of this contract gives, on arguments that are on the CPU."""
    state = decoded(arguments["state"], arguments.get("state_scale"))
    heads, dim, dstate = state.shape[-3] if state.dim() == 4 else 1, *state.shape[-2:]
    values = with_every_axis(arguments, dtype, heads, dim, dstate)
    zero = torch.zeros(heads, dim, dstate, dtype=dtype)
    outcome = run(
        contract(arguments),
        torch.zeros_like(values["x"]),
        lambda slot: zero if slot is None else state[slot].to(dtype).reshape(zero.shape),
        lambda s, token, _: one_token(s, token, values, arguments["dt_softplus"]),
    )
    return shaped(outcome, arguments["x"].shape)


def with_every_axis(arguments: Arguments, dtype: torch.dtype, heads: int, dim: int, dstate: int) -> Arguments:
    """What a selective step is given, with all tokens on one axis, and axes for heads, dim and dstate."""
    tokens = arguments["x"].numel() // (heads * dim)
    wide = {**dict.fromkeys(("x", "dt", "z"), (tokens, heads, dim)), **dict.fromkeys("BC", (tokens, -1, dstate))}
    wide |= {"A": (heads, dim, dstate), "D": (heads, dim), "dt_bias": (heads, dim)}
    values = {name: arguments.get(name) for name in wide}
    return {name: None if t is None else t.to(dtype).reshape(wide[name]) for name, t in values.items()}


def one_token(s: Tensor, token: int, values: Arguments, dt_softplus: bool) -> tuple[Tensor, Tensor]:
    """The output (heads, dim) of a token, and the state (heads, dim, dstate) after it."""
    x, dt = values["x"][token], values["dt"][token]  # (heads, dim)
    B, C = (per_head(values[name][token], len(s))[:, None] for name in "BC")  # (heads, 1, dstate)
    if values["dt_bias"] is not None:
        dt = dt + values["dt_bias"]
    dt = softplus(dt) if dt_softplus else dt
    s = s * torch.exp(dt[..., None] * values["A"]) + (dt * x)[..., None] * B
    y = (s * C).sum(-1)
    if values["D"] is not None:
        y = y + values["D"] * x
    if values["z"] is not None:
        y = y * silu(values["z"][token])
    return y, s


def per_head(groups: Tensor, heads: int) -> Tensor:
    """A row for every head from one for every group."""
    return groups.repeat_interleave(heads // len(groups), 0)


def softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gated_delta(contract: Contract, arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """What a gated delta rule of this contract gives: outputs (B, T, HV, V), states (HV, V, K).

    Rows of several tokens that do nothing leave what is in the output.
    """
    pool = arguments["state"] if arguments.get("initial_state") is None else arguments["initial_state"]
    per_token = {name: arguments[name].to(dtype).flatten(0, 1) for name in ("q", "k", "v", "a", "b")}
    per_head = {name: arguments[name].to(dtype) for name in ("A_log", "dt_bias")}
    scale, normalise = arguments.get("scale"), arguments.get("use_qk_l2norm", True)
    scale = per_token["q"].shape[-1] ** -0.5 if scale is None else scale
    left = torch.zeros_like(per_token["v"])
    if arguments.get("output") is not None and arguments["v"].shape[1] > 1:
        left = arguments["output"].to(dtype).flatten(0, 1)

    def step(s: Tensor, token: int, _: int | None) -> tuple[Tensor, Tensor]:
        here = {name: values[token] for name, values in per_token.items()}
        return one_delta_token(s, {**here, **per_head}, scale, normalise)

    outcome = run(contract(arguments), left, lambda slot: pool[slot].to(dtype), step)
    return shaped(outcome, arguments["v"].shape)


def one_delta_token(s: Tensor, values: Arguments, scale: float, normalise: bool) -> tuple[Tensor, Tensor]:
    """The output (HV, V) of a token, and the state (HV, V, K) after it."""
    q, k = (per_head(values[name], len(s)) for name in "qk")  # (HV, K)
    if normalise:
        q, k = (vectors / torch.sqrt((vectors * vectors).sum(-1, keepdim=True) + 1e-6) for vectors in (q, k))
    decay = torch.exp(-torch.exp(values["A_log"]) * softplus(values["a"] + values["dt_bias"]))  # (HV,)
    s = s * decay[:, None, None]
    new = (values["v"] - (s * k[:, None]).sum(-1)) / (1 + torch.exp(-values["b"]))[:, None]  # (HV, V)
    s = s + new[..., None] * k[:, None]
    return (s * (q * scale)[:, None]).sum(-1), s


def mamba3(arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """What mamba3_step_fn gives: outputs (batch, H, D), or without outproj (batch, R, H, D).

    With update_kv_state also what replaces Bstate and Xstate, to the byte.
    """
    state, Bstate, Xstate, x, B = (arguments[name] for name in ("state", "Bstate", "Xstate", "x", "B"))
    B_kept = B.repeat_interleave(state.shape[1] // B.shape[2], 2).to(Bstate.dtype)  # (batch, R, H, N)
    shared = {name: arguments.get(name) for name in ("D", "xproj", "zproj", "outproj")}

    def step(s: Tensor, b: int, slot: int) -> tuple[Tensor, Tensor]:
        values = {"s": s, "k": Bstate[slot], "v": Xstate[slot], "B": B_kept[b], **shared}
        for name in ("x", "A", "dt", "trap", "C", "z"):
            values[name] = None if arguments.get(name) is None else arguments[name][b]
        return one_mamba3_token({name: t if t is None else t.to(dtype) for name, t in values.items()})

    rows = mamba_ssm(arguments)
    y = torch.zeros(len(x), *Bstate.shape[1:3], x.shape[-1], dtype=dtype)
    outcome = run(rows, y, lambda slot: state[slot], step)
    for row in rows if arguments.get("update_kv_state") else []:
        b, slot = row.tokens[0], row.start
        outcome.stored |= {("Bstate", (slot,)): B_kept[b], ("Xstate", (slot,)): x[b].to(Xstate.dtype)}
    if arguments.get("outproj") is not None:
        outcome.y, outcome.ran = outcome.y.sum(1), outcome.ran[:, 0]
    return outcome


def one_mamba3_token(values: Arguments) -> tuple[Tensor, Tensor]:
    """The output (R, H, D) of a token, times outproj if there is one, and the state (H, D, N), rank by rank."""
    s, dt, trap, x = values["s"], values["dt"][:, None], values["trap"][:, None], values["x"]
    ranks = range(len(values["B"]))
    in_, gate, out = (torch.ones_like(x) if values[w] is None else values[w] for w in ("xproj", "zproj", "outproj"))
    in_, gate, out = (w.expand(len(ranks), *x.shape) for w in (in_, gate, out))  # (R, H, D)
    decay = torch.exp(values["A"][:, None] * dt)  # (H, 1)
    s = decay[..., None] * s
    for r in ranks:
        s = s + (trap * dt * x * in_[r])[..., None] * values["B"][r][:, None]
        s = s + ((1 - trap) * dt * decay * values["v"] * in_[r])[..., None] * values["k"][r][:, None]
    y = torch.stack([(s * per_head(values["C"][r], len(s))[:, None]).sum(-1) for r in ranks])
    if values["D"] is not None:
        y = y + values["D"][:, None] * x * in_
    if values["z"] is not None:
        y = y * silu(values["z"] * gate)
    return y * out, s


def decoded(data: Tensor, scale: Tensor | None) -> Tensor:
    """Stored states as float32; those with a scale per row of the last axis multiplied with it."""
    return data.float() if scale is None else data.float() * scale.reshape(*data.shape[:-1], 1)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values as a plain implementation stores them, to nearest; integers with a scale per row."""
    if dtype.is_floating_point:
        return values.to(dtype).float()
    step = values.abs().amax(-1, keepdim=True) / torch.iinfo(dtype).max
    return torch.where(step > 0, (values / step).round() * step, 0.0)
