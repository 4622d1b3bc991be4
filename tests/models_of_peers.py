"""The results of other libraries' functions, by their contracts: loops over rows and tokens.

The contract of a function says for every row of the batch where it starts and where its states go; one token of the
reference, in float64 or float32, says what they are.
"""

from collections.abc import Callable
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

    tokens: on the flat token axis. start: a slot; None: from zero. goes: the places of the state after each token.
    parents: of a tree, the token before each, -1: the start; None: they follow each other.
    """

    tokens: list[int]
    start: int | None
    goes: list[list[Place]]
    parents: list[int] | None


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
            outcome.stored |= dict.fromkeys(row.goes[t], s)
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


# Contracts


def rows_of(
    arguments: Arguments,
    goes: Callable[[int, int, bool, list[int], int], list[Place]],
    pool: str = "state",
    read: str = "state_batch_indices",
    null: int = -1,
    fresh: bool = False,
) -> list[Row]:
    """Rows that start at their first slot, or at the one that the count of accepted tokens chooses.

    goes: the places of the state after a token, told the row, the token, whether it is the last, the slots of the row
    and the one that it reads; negative places and null are none. A row whose slot is null, negative or past the pool
    does nothing, or if `fresh` starts from zero and stores nothing.
    """
    main = next(arguments[name] for name in ("x", "v", "mixed_qkv") if name in arguments)
    table, tree = numbers(arguments.get(read)), arguments.get("retrieve_parent_token")
    accepted, rows = arguments.get("num_accepted_tokens"), []
    steps = main.shape[1] if main.dim() == 4 else 1
    for b, tokens in enumerate(tokens_of_rows(len(main), steps, arguments.get("cu_seqlens"))):
        slots, column = table[b] if table else [b], 0 if accepted is None else max(int(accepted[b]) - 1, 0)
        slot = slots[column] if column < len(slots) else -1
        live = slot != null and 0 <= slot < len(arguments[pool])
        if live or fresh:
            found = [goes(b, t, t + 1 == len(tokens), slots, slot) if live else [] for t in range(len(tokens))]
            kept = [[place for place in places if min(place[1]) >= 0 and place[1] != (null,)] for places in found]
            parents = None if tree is None else [-1, *tree[b, 1 : len(tokens)].tolist()]
            rows.append(Row(tokens, slot if live else None, kept, parents))
    return rows


def in_buffer(arguments: Arguments, b: int, token: int, row: int) -> list[Place]:
    """The place of a state in the buffer, if there is one: in this row, unless rows have indices into it."""
    rows = numbers(arguments.get("intermediate_state_indices"))
    return [] if arguments.get(BUFFER) is None else [(BUFFER, (rows[b][0] if rows else row, token))]


def mamba_ssm(arguments: Arguments) -> list[Row]:
    """The state of a row goes where it was read, or to the same slot of `state_out`."""
    goes = "state" if arguments.get("state_out") is None else "state_out"
    return rows_of(arguments, lambda b, t, last, slots, slot: [(goes, (slot,))])


def vllm(arguments: Arguments) -> list[Row]:
    """With accepted counts every state has a place, else the last has the first. Only rows with slots can be null."""
    write, every = numbers(arguments.get("dst_state_batch_indices")), arguments.get("num_accepted_tokens") is not None
    null = -1 if arguments.get("state_batch_indices") is None else arguments.get("null_block_id", 0)

    def goes(b: int, t: int, last: bool, slots: list[int], slot: int) -> list[Place]:
        return [("state", ((write[b] if write else slots)[t if every else 0],))] * (every or last)

    return rows_of(arguments, goes, null=null)


def flashinfer(arguments: Arguments) -> list[Row]:
    """States go to the buffer if there is one, else to `dst`, after every token where it is a table, else where they
    were read."""
    dst, disabled = arguments.get("dst_state_batch_indices"), arguments.get("disable_state_update")
    write, every = numbers(dst), dst is not None and dst.dim() == 2

    def goes(b: int, t: int, last: bool, slots: list[int], slot: int) -> list[Place]:
        target = write[b][t if every else 0] if write else slot
        return in_buffer(arguments, b, t, slot) or [("state", (target,))] * (not disabled and (every or last))

    return rows_of(arguments, goes, null=arguments.get("pad_slot_id", -1), fresh=True)


def each_kept(
    arguments: Arguments, pool: str = "state", read: str = "state_batch_indices", fresh: bool = True
) -> list[Row]:
    """The buffer receives every state, in SGLang's selective_state_update at the row of its slot. The last one goes
    where an output index says, or where it was read, unless updates are disabled."""
    write = numbers(arguments.get("output_state_indices"))
    pool = "state" if arguments.get(pool) is None else pool

    def goes(b: int, t: int, last: bool, slots: list[int], slot: int) -> list[Place]:
        moves = last and not arguments.get("disable_state_update")
        row = slot if read == "state_batch_indices" else b
        return in_buffer(arguments, b, t, row) + [(pool, (write[b][0] if write else slot,))] * moves

    return rows_of(arguments, goes, pool, read, arguments.get("pad_slot_id", -1), fresh)


def flashinfer_mtp(arguments: Arguments) -> list[Row]:
    """The buffer receives every state of its row, and so does the pool, with a table of slots for them. The last state
    goes where its output index says, and without a table, if updates are not disabled, else where it was read."""
    write, every = (numbers(arguments.get(name)) for name in ("output_state_indices", "ssm_state_indices"))
    moves = every or arguments.get("disable_state_update") is False

    def goes(b: int, t: int, last: bool, slots: list[int], slot: int) -> list[Place]:
        targets = [every[b][t]] if every else []
        if last and moves and (write or not every):
            targets.append(write[b][0] if write else slot)
        return in_buffer(arguments, b, t, b) + [("initial_state", (target,)) for target in targets]

    return rows_of(arguments, goes, "initial_state", "initial_state_indices")


def blocks(arguments: Arguments, null: int = 0) -> list[Row]:
    """A table has a block for every state, a list one for the last."""
    every = arguments["ssm_state_indices"].dim() == 2

    def goes(b: int, t: int, last: bool, slots: list[int], slot: int) -> list[Place]:
        return [("initial_state", (slots[t] if every else slot,))] * (every or last)

    return rows_of(arguments, goes, "initial_state", "ssm_state_indices", null)


# Mamba-2


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
    if state is None:
        rows = tokens_of_rows(len(v), v.shape[1], arguments.get("cu_seqlens"))
        state = torch.zeros(len(rows), *v.shape[2:], q.shape[3])
    elif not (arguments.get("state_v_first") or arguments.get("transpose_state_layout")):
        state = state.mT
    decay = arguments["g"] if arguments.get("gk") is None else arguments["gk"]

    def contract(given: Arguments) -> list[Row]:
        return rows_of(given, lambda b, *_: [("final", (b,))], "initial_state")

    outcome = rule(contract, "initial_state", {**arguments, "initial_state": state, "g": decay}, dtype)
    finals = [outcome.stored.get(("final", (b,)), before) for b, before in enumerate(state.to(dtype))]
    return outcome.y, torch.stack(finals)


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
