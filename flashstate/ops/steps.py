"""What the ops whose states are a State share around their launches: outputs, tokens, what is stored, programs."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from flashstate.errors import check_no_overlap, check_row_contiguous, check_tensor
from flashstate.launch.arguments import as_bytes, outer_strides
from flashstate.ops.tokens import Tokens, slots_of
from flashstate.state.faults import fault_flag
from flashstate.state.slots import Slots
from flashstate.state.state import State


def check_out(out: Tensor, x: Tensor, tokens: Tokens, widths: tuple[str, str]) -> None:
    """Raise unless the output is like x, whose axes behind the tokens have these names."""
    check_tensor("out", out, (*tokens.axes, *widths), tuple(x.shape), dtypes=(x.dtype,), device=x.device)
    check_row_contiguous("out", out)
    check_no_overlap("out", out)


class Extent(NamedTuple):
    """How many rows and tokens a call has, as its kernel counts them."""

    batch: int
    token_axes: int  # of activations
    packed: bool
    num_tokens: int  # length of the token axis
    longest: int  # entries that tables and snapshots have for the tokens of a row

    @property
    def one_token(self) -> bool:
        return self.num_tokens == 1 and not self.packed


def extent_of(x: Tensor, read: Tensor | None, cu_seqlens: Tensor | None, max_len: int | None) -> Extent:
    """Of activations x (batch, heads, ...), (batch, T, heads, ...) or packed (tokens, heads, ...)."""
    packed, token_axes = cu_seqlens is not None, x.dim() - 2
    num_tokens = x.shape[token_axes - 1] if packed or token_axes == 2 else 1
    batch = x.shape[0] if read is None else read.shape[0]
    return Extent(batch, token_axes, packed, num_tokens, (max_len or 0) if packed else num_tokens)


def stores_of(update: bool, write: Tensor | None) -> str:
    """After which tokens a kernel writes the pool: "last", "every" or "none"."""
    return "none" if not update else "every" if write is not None and write.dim() == 2 else "last"


def stored_of(stores: str, snapshots: Tensor | None, one_token: bool) -> str:
    """What a launch config is chosen for, of the states after several tokens: "last", "each" or "nothing"."""
    if one_token:
        return "last"
    return "each" if stores == "every" or snapshots is not None else "nothing" if stores == "none" else "last"


def programs_of(name: str, x: Tensor, batch_heads: int, rows: int, rows_each: int) -> int:
    """How many programs a launch has; ValueError where there are too many for a grid."""
    programs = batch_heads * -(-rows // rows_each)
    if programs >= 1 << 31:
        raise ValueError(f"{name} must need fewer than 2^31 programs, got {programs} for shape {tuple(x.shape)}")
    return programs


def pool_arguments(
    data: Tensor, scale: Tensor | None, stream: int, tables: tuple[Tensor | None, ...], snapshot_data: Tensor | None,
    snapshot_scale: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """What kernels take between an op's own pointers and its strides: tables of slots, snapshots, the stream, the fault
    flag, strides of states and snapshots, and how many snapshots there are."""
    return (
        *tables, None if snapshot_data is None else as_bytes(snapshot_data), snapshot_scale,
        stream, fault_flag(data.device), *outer_strides(data, scale, 1),
        *outer_strides(snapshot_data, snapshot_scale, 2), 0 if snapshot_data is None else snapshot_data.shape[0],
    )  # fmt: skip


def for_reference(
    data: Tensor, scale: Tensor | None, seed: Tensor | None, rounding: str, rounds: int, stream: int,
    read: Tensor | None, write: Tensor | None, accepted: Tensor | None, snapshot_rows: Tensor | None,
    cu_seqlens: Tensor | None, max_len: int | None, parents: Tensor | None, null: int, padding: str,
    snapshot_data: Tensor | None, snapshot_scale: Tensor | None, snapshot_rounding: str,
) -> tuple[State, Slots | None, State | None]:  # fmt: skip
    """The state, the slots and the snapshots that a registered op was given in pieces."""
    state, slots, snapshots = State(data, scale, rounding=rounding, rounds=rounds, seed=seed, stream=stream), None, None
    if read is not None:
        slots = slots_of(read, write, accepted, snapshot_rows, cu_seqlens, max_len, parents, null, padding)
    if snapshot_data is not None:
        snapshots = State(snapshot_data, snapshot_scale, rounding=snapshot_rounding, rounds=rounds, stream=stream)
    return state, slots, snapshots
