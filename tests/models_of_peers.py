"""The results of other libraries' functions, by their contracts: loops over rows and tokens.

The contract of a function says for every row of the batch where it starts and where its states go; one token of the
reference, in float64 or float32, says what they are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashstate.reference.gated_delta import gated_delta_token
from flashstate.reference.mamba2 import mamba2_token
from flashstate.reference.mamba3 import FourStates, Parameters, mamba3_token

Arguments = dict[str, Any]
Place = tuple[str, tuple[int, ...]]  # an entry of an argument that holds states, by its name
BUFFER = "intermediate_states_buffer"


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
    """The result of a call.

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
    """Where the tokens of every row are on the flat token axis: `length` each, or between their bounds."""
    if bounds is None:
        return [list(range(b * length, b * length + length)) for b in range(rows)]
    return [list(range(first, last)) for first, last in pairwise(bounds.tolist())]


# selective_state_update


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
            if arguments.get(BUFFER) is not None:
                row.store(t, BUFFER, buffer_rows[b][0] if buffer_rows else slot, t)
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
        for t in range(len(tokens)) if live and arguments.get(BUFFER) is not None else ():
            row.store(t, BUFFER, buffer_rows[b][0] if buffer_rows else slot, t)
        if live and not arguments.get("disable_state_update"):
            row.store(len(tokens) - 1, "state", slot)
    return rows


def selective(contract: Contract, arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """The outcome of a selective_state_update of this contract, on arguments that are on the CPU."""
    state = decoded(arguments["state"], arguments.get("state_scale")).to(dtype)
    heads, dim, dstate = state.shape[-3] if state.dim() == 4 else 1, *state.shape[-2:]
    given = with_every_axis(arguments, heads, dim, dstate)
    zero = torch.zeros(heads, dim, dstate, dtype=dtype)

    def step(s: Tensor, token: int, _: int | None) -> tuple[Tensor, Tensor]:
        return selective_token(s, token, given, arguments["dt_softplus"])

    y = torch.zeros(given["x"].shape, dtype=dtype)
    outcome = run(contract(arguments), y, lambda slot: zero if slot is None else state[slot].reshape(zero.shape), step)
    return shaped(outcome, arguments["x"].shape)


def selective_token(s: Tensor, token: int, given: Arguments, softplus: bool, **more: Any) -> tuple[Tensor, Tensor]:
    """The output (heads, dim) of a token, and the state (heads, dim, dstate) after it."""
    x, dt, B, C, z = (None if given[name] is None else given[name][token, None] for name in ("x", "dt", "B", "C", "z"))
    y, s = mamba2_token(s[None], x, dt, given["A"], B, C, given["D"], z, given["dt_bias"], softplus, **more)
    return y[0], s[0]


def with_every_axis(arguments: Arguments, heads: int, dim: int, dstate: int) -> Arguments:
    """The tensors of a selective step, with all tokens on one axis, and axes for heads, dim and dstate."""
    tokens = arguments["x"].numel() // (heads * dim)
    wide = {**dict.fromkeys(("x", "dt", "z"), (tokens, heads, dim)), **dict.fromkeys("BC", (tokens, -1, dstate))}
    wide |= {"A": (heads, dim, dstate), "D": (heads, dim), "dt_bias": (heads, dim)}
    values = {name: arguments.get(name) for name in wide}
    return {name: None if t is None else t.reshape(wide[name]) for name, t in values.items()}


# Gated delta rules


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
            for t in range(length) if arguments.get(BUFFER) is not None else ():
                row.store(t, BUFFER, b, t)
            if target >= 0 and not arguments.get("disable_state_update"):
                row.store(length - 1, pool, target)
    return rows


def flashinfer_mtp(arguments: Arguments) -> list[Row]:
    """Rows with a negative slot do nothing; the buffer receives every state of its row.

    A table of slots for every token is for the pool, and so is the last state, if its output index says where, or
    without a table if updates are not disabled.
    """
    length, read = arguments["v"].shape[1], numbers(arguments["initial_state_indices"])
    write, every = (numbers(arguments.get(name)) for name in ("output_state_indices", "ssm_state_indices"))
    rows = []
    for b, (slot,) in enumerate(read):
        if slot < 0:
            continue
        rows.append(row := Row(list(range(b * length, b * length + length)), slot))
        for t in range(length):
            if arguments.get(BUFFER) is not None:
                row.store(t, BUFFER, b, t)
            if every is not None and every[b][t] >= 0:
                row.store(t, "initial_state", every[b][t])
        target = -1 if every is not None and write is None else slot if write is None else write[b][0]
        if (every is not None or arguments.get("disable_state_update") is False) and target >= 0:
            row.store(length - 1, "initial_state", target)
    return rows


def packed_decode(null: int, arguments: Arguments) -> list[Row]:
    """One token per row. Rows whose slot is negative or `null` do nothing."""
    rows = [Row([b], slot) for b, (slot,) in enumerate(numbers(arguments["ssm_state_indices"])) if slot > null]
    for row in rows:
        row.store(0, "initial_state", row.start)
    return rows


def vllm_rule(arguments: Arguments) -> list[Row]:
    """Rows in block 0, or in none, do nothing. A table has a block for every token, a list one for the last state."""
    v, accepted, indices = arguments["v"], arguments.get("num_accepted_tokens"), arguments["ssm_state_indices"]
    rows = []
    for b, tokens in enumerate(tokens_of_rows(len(v), v.shape[1], arguments.get("cu_seqlens"))):
        blocks = numbers(indices)[b]
        start = blocks[0 if accepted is None else int(accepted[b]) - 1]
        if start <= 0:
            continue
        rows.append(row := Row(tokens, start))
        for t in range(len(tokens)) if indices.dim() == 2 else [len(tokens) - 1] if tokens else []:
            target = blocks[t] if indices.dim() == 2 else start
            if target > 0:
                row.store(t, "initial_state", target)
    return rows


def sglang_rule(arguments: Arguments) -> list[Row]:
    """Rows with a negative slot start from zero and store nothing. The buffer receives every state of its row."""
    v, tree, buffer_rows = (arguments.get(n) for n in ("v", "retrieve_parent_token", "intermediate_state_indices"))
    rows = []
    for b, tokens in enumerate(tokens_of_rows(len(v), v.shape[1], arguments.get("cu_seqlens"))):
        slot = int(arguments["initial_state_indices"][b])
        rows.append(row := Row(tokens, slot if slot >= 0 else None))
        row.parents = None if tree is None else [-1, *tree[b, 1 : len(tokens)].tolist()]
        if slot < 0:
            continue
        place = b if buffer_rows is None else int(buffer_rows[b])
        for t in range(len(tokens)) if arguments.get(BUFFER) is not None and place >= 0 else ():
            row.store(t, BUFFER, place, t)
        if tokens and not arguments.get("disable_state_update"):
            row.store(len(tokens) - 1, "initial_state_source", slot)
    return rows


def rule(contract: Contract, pool: str, arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """The outcome of a gated delta rule of this contract: outputs (B, T, HV, V), states (HV, V, K). pool: an argument.

    Rows of several tokens that do nothing leave `output`, which FlashInfer has, as it is.
    """
    states = arguments[pool if arguments.get(pool) is not None else "state"].to(dtype)
    shape, zero = arguments["v" if "v" in arguments else "out"].shape, torch.zeros(states.shape[1:], dtype=dtype)
    left = arguments.get("output") if shape[1] > 1 else None
    left = torch.zeros(shape, dtype=dtype) if left is None else left.to(dtype)
    step = delta_step(arguments, states.shape[1:], dtype)
    rows, start = contract(arguments), lambda slot: zero if slot is None else states[slot]
    return shaped(run(rows, left.reshape(-1, *shape[2:]).clone(), start, step), shape)


def delta_step(arguments: Arguments, sizes: torch.Size, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]]:
    """The output and the state after a token of a rule with states (HV, V, K).

    Gates are raw with A_log, or as fla says; else they are the logarithm of the decay, and beta itself.
    """
    HV, V, K = sizes
    parts = [arguments.get(name) for name in "qkv"]
    if "mixed_qkv" in arguments:
        keys = (arguments["mixed_qkv"].shape[1] - HV * V) // 2
        parts = arguments["mixed_qkv"].split([keys, keys, HV * V], 1)
    tokens, A_log, bias = parts[2].numel() // (HV * V), arguments.get("A_log"), arguments.get("dt_bias")
    q, k, v = (part.reshape(tokens, -1, size) for part, size in zip(parts, (K, K, V), strict=True))
    a, b = (arguments.get(name) for name in (("a", "b") if "b" in arguments else ("g", "beta")))
    a = torch.zeros(tokens, HV) if a is None else a.reshape(tokens, HV, -1)
    b = torch.ones(tokens, HV) if b is None else b.reshape(tokens, HV)
    logit = arguments.get("use_beta_sigmoid_in_kernel", A_log is not None)
    A_log, bias = A_log if A_log is None else A_log.reshape(HV), bias if bias is None else bias.reshape(HV, -1)
    if arguments.get("lower_bound") is not None:
        a = a.to(dtype) if bias is None else a.to(dtype) + bias
        a = arguments["lower_bound"] * torch.sigmoid(torch.exp(A_log.to(dtype))[:, None] * a)
        A_log = bias = None
    normal = arguments.get("use_qk_l2norm_in_kernel", arguments.get("use_qk_l2norm", True))

    def step(s: Tensor, token: int, _: int | None = None) -> tuple[Tensor, Tensor]:
        here = (t[token, None] for t in (q, k, v, a, b))
        y, s = gated_delta_token(s[None], *here, A_log, bias, logit, arguments.get("scale"), normal)
        return y[0], s[0]

    return step


def raw_kda(contract: Contract, arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """The outcome of the delta rules of vLLM's Kimi layers, which have their own names for gates and blocks."""
    names = {"raw_g": "a", "raw_beta": "b", "state_indices": "ssm_state_indices"}
    arguments = {names.get(name, name): value for name, value in arguments.items()}
    if arguments.get("out") is None:
        arguments["out"] = arguments["a"].new_empty(*arguments["b"].shape, arguments["initial_state"].shape[2])
    return rule(contract, "initial_state", {**arguments, "use_qk_l2norm_in_kernel": True}, dtype)


def fla(arguments: Arguments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs (B, T, HV, V) and states (N, HV, V, K) after the last tokens."""
    q, v, state = (arguments.get(name) for name in ("q", "v", "initial_state"))
    if arguments.get("gk") is not None:
        arguments = {**arguments, "g": arguments["gk"]}
    tokens = tokens_of_rows(len(v), v.shape[1], arguments.get("cu_seqlens"))
    if state is None:
        state = torch.zeros(len(tokens), *v.shape[2:], q.shape[3])
    elif not (arguments.get("state_v_first") or arguments.get("transpose_state_layout")):
        state = state.mT
    step, states = delta_step(arguments, state.shape[1:], dtype), list(state.to(dtype))
    y = torch.zeros(v.shape, dtype=dtype).flatten(0, 1)
    for b, row in enumerate(tokens):
        for token in row:
            y[token], states[b] = step(states[b], token)
    return y.reshape(v.shape), torch.stack(states)


# Mamba-3


def mamba3(arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """The outcome of mamba3_step_fn: outputs (batch, H, D), or without outproj (batch, R, H, D).

    With update_kv_state also what replaces Bstate and Xstate, to the byte.
    """
    state, Bstate, Xstate, x, B = (arguments[name] for name in ("state", "Bstate", "Xstate", "x", "B"))
    projections = [arguments.get(name) for name in ("xproj", "zproj", "outproj", "D")]
    shared = Parameters(*projections, None, None, "halved", False)
    shape = x.shape if projections[2] is not None else (len(x), *Bstate.shape[1:3], x.shape[-1])

    def step(s: Tensor, b: int, slot: int) -> tuple[Tensor, Tensor]:
        memory = FourStates(s[None], Bstate[slot, None], Xstate[slot, None], None)
        tokens = (arguments.get(name) for name in ("x", "A", "dt", "trap", "B", "C", "z"))
        y, after = mamba3_token(memory, *(t if t is None else t[b, None] for t in tokens), None, shared)
        return y.reshape(shape[1:]), after.s[0]

    rows = mamba_ssm(arguments)
    outcome = run(rows, torch.zeros(shape, dtype=dtype), lambda slot: state[slot].to(dtype), step)
    for row in rows if arguments.get("update_kv_state") else []:
        b, slot = row.tokens[0], row.start
        kept = B[b].repeat_interleave(state.shape[1] // B.shape[2], 1).to(Bstate.dtype)  # (R, H, N)
        outcome.stored |= {("Bstate", (slot,)): kept, ("Xstate", (slot,)): x[b].to(Xstate.dtype)}
    return outcome


# Stored states


def decoded(data: Tensor, scale: Tensor | None) -> Tensor:
    """Stored states as float32; those with a scale per row of the last axis multiplied with it."""
    return data.float() if scale is None else data.float() * scale.reshape(*data.shape[:-1], 1)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values as a plain implementation stores them, to nearest; integers with a scale per row."""
    if dtype.is_floating_point:
        return values.to(dtype).float()
    step = values.abs().amax(-1, keepdim=True) / torch.iinfo(dtype).max
    return torch.where(step > 0, (values / step).round() * step, 0.0)
