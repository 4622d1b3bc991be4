"""What kernels are given. Parameters of a kernel, constants too, are found by their names:

x_ptr                   the tensor x; data_ptr, scale_ptr and seed_ptr those of a State, read_ptr … of Slots,
                        copy_ptr and copy_scale_ptr of snapshots
x_b x_t x_h             its strides of batch, token, and axes by their first letters; of groups too by that of heads
DT_SOFTPLUS             the flag, number or word dt_softplus
dt_limit_0 dt_limit_1   the two numbers of dt_limit; None if it is
slot_stride … VECTOR    as written out below
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashstate.launch.axes import Axes, Tokens
from flashstate.launch.config import Problem, access_width, next_power_of_2
from flashstate.launch.environment import Machine
from flashstate.launch.table import Config
from flashstate.state.faults import fault_flag
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.slots import TABLES, Slots
from flashstate.state.state import State, head_stride

if TYPE_CHECKING:
    from flashstate.launch.call import Given, Op

NO_SLOTS: dict[str, Any] = dict.fromkeys([f"{name}_ptr" for name in TABLES]) | {
    "read_stride": 0, "write_stride": 0, "parents_stride": 0, "read_width": 1, "null": -1, "PADDING": "zero",
    "AT_LEAST_ONE": False,
}  # fmt: skip


def values_of(op: Op, given: Given, problem: Problem, config: Config) -> dict[str, Any]:
    """What is known of a call, under the names that kernels have for it."""
    tokens, state = given.tokens, getattr(given, next(iter(op.hints)))
    values = {
        **{name.upper(): getattr(given, name) for name in op.options},
        "fault_ptr": fault_flag(getattr(given, op.main).device), "batch": tokens.batch, "tokens": tokens.num_tokens,
        "longest": tokens.longest or 0, "ONE_TOKEN": tokens.one_token, "STORES": given.stores,
        "EARLY": getattr(given, "early", False) and given.machine.overlaps,
        "TOGETHER": loaded_together(given, problem, config),
        **slots_values(given.slots), **tile_values(given.machine, problem, config),
    }  # fmt: skip
    for name in op.ranges:
        values |= dict(zip((f"{name}_0", f"{name}_1"), getattr(given, name) or (None, None), strict=True))
    if op.aligned:  # else no kernel may ask
        values["ALIGNED"] = all(aligned(getattr(given, name)) for name in op.aligned)
    state = getattr(state, "ssm", state)
    if isinstance(state, State):
        values |= state_values(state)
    if op.takes_snapshots:
        values |= snapshots_values(given.snapshots, state, problem.vector)
    for name, axes in op.tensors.items():
        add_tensor(values, op.aliases.get(name, name), getattr(given, name), axes, tokens)
    add_tensor(values, "out", given.out, op.tensors[op.main], tokens)
    return values | op.values(given, problem, config)


def loaded_together(given: Given, problem: Problem, config: Config) -> int:
    """How many tokens a kernel loads together: no more than there are in a dense call, whose number is fixed while a
    server runs; as many as the config says of packed rows, however long the longest is. Trees load token by token.
    Where random bits are drawn for every token at most half as many as a config may say: what draws them is unrolled,
    and takes long to compile."""
    tokens, slots = given.tokens, given.slots
    if slots is not None and slots.parents is not None:
        return 1
    together = config.tokens_together
    if draws_every_token(given):
        together = min(together, max(1, problem.knob_values[-1] // 2))
    return together if tokens.packed else min(together, next_power_of_2(tokens.num_tokens))


def draws_every_token(given: Given) -> bool:
    """Whether the state after every token is rounded stochastically, to slots of its own or to snapshots."""
    stored = getattr(given, "snapshots", None), getattr(given, "state", None) if given.stores == "every" else None
    return any(isinstance(one, State) and one.rounding != "nearest" for one in stored)


def tile_values(machine: Machine, problem: Problem, config: Config) -> dict[str, Any]:
    """What programs are, and the tile of each."""
    return {
        "TARGET": machine.target, "VECTOR": problem.vector, "BLOCK_ROWS": config.block_rows,
        "BLOCK_COLS": problem.block_cols, "CHUNK": problem.chunk(config.lanes), "TILES": config.tiles,
        "WARPS": config.num_warps, "THREADS": problem.warp * config.num_warps,
    }  # fmt: skip


def slots_values(slots: Slots | None) -> dict[str, Any]:
    """Tables of slots, and what is known of their rows."""
    if slots is None:
        return NO_SLOTS
    read = slots.read
    return {
        **{f"{name}_ptr": getattr(slots, name) for name in TABLES}, "read_stride": read.stride(0),
        "write_stride": row_stride(slots.write), "parents_stride": row_stride(slots.parents),
        "read_width": 1 if read.dim() == 1 else read.shape[1], "null": slots.null, "PADDING": slots.padding,
        "AT_LEAST_ONE": slots.at_least_one,
    }  # fmt: skip


def state_values(state: State) -> dict[str, Any]:
    """The tensors of a State, their shape and strides between slots, and how it is rounded."""
    num_slots, heads, rows, cols = state.data.shape
    return {
        "data_ptr": as_bytes(state.data), "scale_ptr": state.scale, "seed_ptr": state.seed, "stream": state.stream,
        "slot_stride": state.data.stride(0), "scale_stride": row_stride(state.scale), "num_slots": num_slots,
        "H": heads, "ROWS": rows, "COLS": cols, "TRANSPOSED": state.transposed, "HEAD_STRIDE": head_stride(state.data),
        "ROUNDING": state.rounding, "ROUNDS": state.rounds, "SHARED_SEED": state.shares_seed,
    }  # fmt: skip


def snapshots_values(snapshots: State | None, state: State, vector: int) -> dict[str, Any]:
    """The tensors of snapshots, strides of rows and of tokens, how many rows they have, and how they are stored: in
    accesses no wider than those of the state, and where they lie across its layout, which must not change, element by
    element."""
    data, scale = (None, None) if snapshots is None else (snapshots.data, snapshots.scale)
    like = state if snapshots is None else snapshots
    wide = data is not None and like.transposed == state.transposed
    values: dict[str, Any] = {
        "copy_ptr": None if data is None else as_bytes(data), "copy_scale_ptr": scale,
        "num_copies": 0 if data is None else len(data), "SNAPSHOTS_TRANSPOSED": like.transposed,
        "SNAPSHOT_ROUNDING": "nearest" if snapshots is None else snapshots.rounding,
        "SNAPSHOT_VECTOR": min(vector, access_width(like.data)) if wide else 1,
        "SNAPSHOT_HEAD_STRIDE": head_stride(like.data),
    }  # fmt: skip
    for axis, letter in enumerate("bt"):
        values[f"copy_{letter}"] = 0 if data is None else data.stride(axis)
        values[f"copy_scale_{letter}"] = 0 if scale is None else scale.stride(axis)
    return values


def add_tensor(values: dict[str, Any], name: str, tensor: Tensor | None, axes: Axes, tokens: Tokens) -> None:
    """Add a tensor, and its strides if it has tokens: of batch, token, and axes before those that lie side by side."""
    pointer, *strides = names_of(name, axes)
    values[pointer] = tensor
    if strides:
        found = token_strides(tensor, len(tokens.axes), tokens.packed, len(strides) - 2)
        values.update(zip(strides, found, strict=True))


@cache
def names_of(name: str, axes: Axes) -> tuple[str, ...]:
    """What kernels call the pointer of a tensor, and its strides if it has tokens."""
    letters = "h" if axes.strided == ("groups",) else [axis[0].lower() for axis in axes.strided]
    return f"{name}_ptr", *(f"{name}_{letter}" for letter in ("b", "t", *letters) if axes.tokens)


def token_strides(tensor: Tensor | None, token_axes: int, packed: bool, inner: int = 1) -> tuple[int, ...]:
    """Batch stride, token stride, and those of `inner` more axes, such as heads, of a tensor (batch, heads, ...),
    (batch, T, heads, ...) or packed (tokens, heads, ...)."""
    if tensor is None:
        return (0,) * (2 + inner)
    strides = tensor.stride()
    of_tokens = strides[:2] if token_axes == 2 else (0, strides[0]) if packed else (strides[0], 0)
    return (*of_tokens, *strides[token_axes : token_axes + inner])


def as_bytes(data: Tensor) -> Tensor:
    """float8 as the bytes it is."""
    return data.view(torch.uint8) if data.dtype is torch.float8_e4m3fn else data


def row_stride(table: Tensor | None) -> int:
    """The stride of the first axis; 0 where there is no tensor."""
    return 0 if table is None else table.stride(0)


def aligned(tensor: Tensor | None) -> bool:
    """Whether every row of a tensor starts at a multiple of 16 bytes, so that it can be read in wide accesses."""
    if tensor is None:
        return True
    outer = (stride * tensor.element_size() for stride in tensor.stride()[:-1])
    return not (tensor.data_ptr() % ACCESS_BYTES or any(step % ACCESS_BYTES for step in outer))


def row_alignment(tensor: Tensor) -> int:
    """Bytes that all rows of a tensor start at multiples of, as far as it matters: 16 or 1; 0 if the entries of a row
    are not neighbours."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return 0
    return ACCESS_BYTES if aligned(tensor) else 1
