"""What the doors share: head axes, strides that ops do not take, and tables with more than they read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashstate.errors import INDEX_DTYPES, check_device, check_int, check_tensor, dtype_name
from flashstate.launch.axes import Axes
from flashstate.launch.call import Op
from flashstate.ops.at_once import MOST_AT_ONCE
from flashstate.ops.conv1d import LARGEST_WIDTH, SMALLEST_WIDTH
from flashstate.ops.mamba2 import MAMBA2_STEP, mamba2_step
from flashstate.state.formats import FORMATS
from flashstate.state.slots import MOST_TOKENS
from flashstate.state.state import State

PARAMETERS = {"A": (2, 3, 0), "D": (1, 2, 0), "dt_bias": (1, 2, 0)}  # with_axes of those that no token brings
STATE_WORDS = {"rows": "dim", "cols": "dstate"}  # what other libraries call these axes of mamba2_step


def with_axes(name: str, tensor: Any, fewest: int, rank: int, axis: int = 1) -> Tensor:
    """A tensor of `fewest` axes or more, with axes of one put in at `axis` until it has that rank."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dim() < fewest:
        raise ValueError(f"{name} must have {fewest} axes or more, got shape {tuple(tensor.shape)}")
    while tensor.dim() < rank:
        tensor = tensor.unsqueeze(axis)
    return tensor


def with_these_axes(name: str, tensor: Any, *axes: str) -> Tensor:
    """The tensor, if it has so many axes; their sizes are left to the op."""
    if not isinstance(tensor, Tensor) or tensor.dim() != len(axes):
        check_tensor(name, tensor, axes, (None,) * len(axes))
    return tensor


def step_tensors(state: Tensor, packed: bool = False, rank: int = 3, **tensors: Any) -> dict[str, Any]:
    """Return the given tensors of mamba2_step, x first, with a head axis and in strides that it takes.

    state: (slots, heads, dim, dstate). packed: one token axis holds all rows. rank: axes that activations get.
    """
    given = {name: t for name, t in tensors.items() if t is not None or name not in MAMBA2_STEP.optional}
    wide = {name: with_axes(name, t, *PARAMETERS.get(name, (2, rank, 1))) for name, t in given.items()}
    check_step_tensors(given, wide, ("tokens",) if packed else ("batch", "T")[: wide["x"].dim() - 2], state)
    return fitted(MAMBA2_STEP, **wide)


def check_step_tensors(
    given: dict[str, Any], wide: dict[str, Tensor], lead: tuple[str, ...], state: Tensor, **sizes: int
) -> None:
    """Check the shapes of tensors of mamba2_step, x first; errors name the shapes that the caller gave.

    wide: the same with axes of one put in. lead: their token axes. sizes: of token axes that x does not say.
    """
    with_these_axes("state", state, "slots", "heads", "dim", "dstate")
    sizes |= dict(zip(("heads", "rows", "cols"), state.shape[1:], strict=True))
    for name, tensor in wide.items():
        axes = MAMBA2_STEP.tensors["x" if name == "out" else name]
        names = (lead if axes.tokens else ()) + axes.names + axes.optional
        put_in = PARAMETERS.get(name, (2, 3, int(lead[0] != "one")))[2]
        added = range(put_in, put_in + tensor.dim() - given[name].dim())
        wanted = [sizes.get(axis, 1 if i in added else None) for i, axis in enumerate(names)]
        if tensor.dim() != len(names) or any(map(_differs, tensor.shape, wanted)):
            kept = [i for i, size in enumerate(wanted) if i not in added or size != 1]
            named = tuple(STATE_WORDS.get(names[i], names[i]) for i in kept)
            check_tensor(name, given[name], named, tuple(wanted[i] for i in kept))
        sizes = {
            **dict(zip(names, tensor.shape, strict=True)),
            **sizes,
        }  # others have the tokens of x, and C groups of B


def _differs(size: int, wanted: int | None) -> bool:
    return wanted is not None and size != wanted


def selective_step(state: Any, like: Tensor, tensors: dict[str, Any], out: Tensor | None = None, **more: Any) -> Tensor:
    """Call mamba2_step; return `out`, or an output of the shape of `like`, which may lack axes."""
    y = mamba2_step(state, **tensors, **more, out=room_for_output(tensors["x"], out, like))
    return y.reshape(like.shape) if out is None else out


def fitted(op: Op, **tensors: Any) -> dict[str, Any]:
    """Arguments of an op, copied where they have strides that it does not take; what is no tensor it will refuse."""
    return {name: _fitted(op.tensors[name], tensor) for name, tensor in tensors.items()}


def _fitted(axes: Axes, tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    more = len(axes.optional)
    last = zip(tensor.shape[-more:], tensor.stride()[-more:], strict=True)
    one_value = more > 0 and all(size <= 1 or stride == 0 for size, stride in last)  # per head, in memory
    if axes.tokens:
        return tensor if one_value else rows_contiguous(tensor)
    if one_value and tensor.numel() and tensor.dim() == len(axes.names) + more:
        values = tensor
        for _ in axes.optional:
            values = values[..., 0]
        if values.is_contiguous():
            return tensor
        return values.reshape(*values.shape, *(1,) * more).contiguous().expand(tensor.shape)  # errors name that shape
    return tensor.contiguous()


def rows_contiguous(tensor: Any) -> Any:
    """The tensor, or a contiguous copy of it where entries of its last axis are no neighbours in memory."""
    far = isinstance(tensor, Tensor) and tensor.dim() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1
    return tensor.contiguous() if far else tensor


def room_for_output(x: Tensor, out: Tensor | None = None, given: Tensor | None = None) -> Tensor | None:
    """Return memory for an output like x: `out`, or new memory; None under torch.compile, which cannot check it.

    A call that brings its own memory can start as one before it did. given: x as the caller gave it, if it lacks axes.
    """
    if out is not None:
        wide = with_axes("out", out, 2, x.dim())
        if wide.shape != x.shape:
            check_like_x(out, x if given is None else given)
        return wide
    return None if torch.compiler.is_compiling() else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def check_like_x(out: Tensor, x: Tensor) -> None:
    """Raise unless an output has the shape of x."""
    if out.shape != x.shape:
        raise ValueError(f"out must have the shape of x, {tuple(x.shape)}, got {tuple(out.shape)}")


def check_not_both(**given: Any) -> None:
    if all(value is not None for value in given.values()):
        raise ValueError(f"{' and '.join(given)} must not both be given")


def check_seed(name: str, seed: Any, state: Tensor) -> None:
    """Raise unless it is one number, on the device of the state."""
    if not isinstance(seed, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(seed).__name__}")
    if seed.numel() != 1 or seed.dtype != torch.int64:
        got = f"{dtype_name(seed.dtype)} of shape {tuple(seed.shape)}"
        raise ValueError(f"{name} must be one int64 number, got {got}")
    check_device(name, seed, state.device)


def check_needs(of: str, other: Any, **given: Any) -> None:
    """Raise where one of these is given, but not the other argument."""
    for name, value in given.items():
        if value is not None and other is None:
            raise ValueError(f"{name} needs {of}, got None")


def check_indices(name: str, indices: Any, *axes: str, device: torch.device | None = None, **sizes: int) -> None:
    """Raise unless these are indices with axes of these names, and with axes of these names and sizes."""
    shape = {**dict.fromkeys(axes), **sizes}
    check_tensor(name, indices, tuple(shape), tuple(shape.values()), dtypes=INDEX_DTYPES, device=device)


def rows_of(x: Tensor, cu_seqlens: Tensor | None) -> tuple[int, Tensor | None]:
    """How many rows the batch has, and the bounds of their tokens if these are packed."""
    if cu_seqlens is None:
        return x.shape[0], None
    check_indices("cu_seqlens", cu_seqlens, "batch + 1")
    if len(cu_seqlens) == 0:
        raise ValueError("cu_seqlens must have shape (batch + 1), got (0,)")
    return len(cu_seqlens) - 1, cu_seqlens.contiguous()


def most_at_once(tokens: int, cu_seqlens: Tensor | None, exact: bool, max_query_len: int | None) -> int | None:
    """Return the most tokens of a packed row with exact=False; raise where no host knows that they fit a kernel.

    tokens: how many all rows have together, which bounds a row where the caller gives no max_query_len.
    """
    if max_query_len is not None:
        check_int("max_query_len", max_query_len, 1, MOST_TOKENS)
    if exact or cu_seqlens is None:
        return None
    if max_query_len is None and tokens > MOST_AT_ONCE:
        why = f"a row may have more than {MOST_AT_ONCE}, which exact=True takes"
        raise ValueError(f"exact=False needs max_query_len for {tokens} packed tokens: {why}")
    return max_query_len or MOST_AT_ONCE


def width_of(weight: Any) -> int:
    """Return the width of a convolution, of weight (dim, width)."""
    check_tensor("weight", weight, ("dim", "width"), (None, None))
    width = weight.shape[1]
    if not SMALLEST_WIDTH <= width <= LARGEST_WIDTH:
        got = f"got shape {tuple(weight.shape)}"
        raise ValueError(f"weight must have a width from {SMALLEST_WIDTH} to {LARGEST_WIDTH}, {got}")
    return width


def list_of(name: str, numbers: Any, batch: int, device: torch.device | None = None) -> Tensor | None:
    """The first numbers of a list that has one or more for every row of the batch, if there is one."""
    if numbers is None:
        return None
    check_indices(name, numbers, "batch", device=device)
    return first_of(name, numbers, batch)


def first_of(name: str, numbers: Tensor, batch: int) -> Tensor:
    """The first entries of a list that has one or more for every row of the batch."""
    if len(numbers) < batch:
        raise ValueError(f"{name} must have {batch} entries or more, got shape {tuple(numbers.shape)}")
    return numbers[:batch].contiguous()


def table_of(
    name: str, numbers: Any, batch: int | None, columns: int = 1, device: torch.device | None = None
) -> Tensor:
    """The first rows of a table (batch or more, columns or more); a list is a table of one column."""
    given = numbers
    if isinstance(numbers, Tensor) and numbers.dim() == 1:
        numbers = numbers[:, None]
    also = (("batch",), (None,))
    check_tensor(name, numbers, ("batch", "n"), (None, None), dtypes=INDEX_DTYPES, device=device, also=also)
    if numbers.shape[0] < (batch or 0) or numbers.shape[1] < columns:
        least = f"{batch} rows and {columns} columns"
        raise ValueError(f"{name} must have {least} or more, got shape {tuple(given.shape)}")
    return rows_contiguous(numbers[:batch])


_numbers: dict[tuple[bool, torch.device], Tensor] = {}  # the longest of each kind


def first_numbers(count: int, device: torch.device) -> Tensor:
    """0, 1, 2, … up to a count, int64."""
    return _kept(count, device, zeros=False)


def slot_zeros(state: Tensor) -> Tensor:
    """0 for every slot of a pool, int32."""
    return _kept(state.shape[0], state.device, zeros=True)


def _kept(count: int, device: torch.device, zeros: bool) -> Tensor:
    """So many numbers. Kept from the first call on, so that later ones make nothing, but for longer lists."""
    key = zeros, device
    numbers = None if torch.compiler.is_compiling() else _numbers.get(key)
    if numbers is None or len(numbers) < count:
        numbers = torch.zeros(count, dtype=torch.int32, device=device) if zeros else torch.arange(count, device=device)
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()  # then nothing is in it yet
        if not capturing and not torch.compiler.is_compiling():
            _numbers[key] = numbers
    return numbers[:count]


def copy_slots(into: Tensor, targets: Tensor, source: Tensor, sources: Tensor) -> None:
    """Copy slots of one tensor into slots of another, row by row; a row that names no slot of either copies nothing.

    Nothing waits for the device: a row that copies nothing does what one that copies does.
    """
    live = (sources >= 0) & (sources < len(source)) & (targets >= 0) & (targets < len(into))
    another = live.int().argmax(0, keepdim=True)
    rows = torch.where(live, first_numbers(len(live), live.device), another)
    there, here = (numbers[rows].long().clamp(0, len(of) - 1) for numbers, of in ((sources, source), (targets, into)))
    any_live = live[another].reshape(-1, *(1,) * (into.dim() - 1))
    into.index_copy_(0, here, torch.where(any_live, source[there], into[here]))


def own_slots(name: str, state: Tensor, batch: int) -> Tensor:
    """The slots of a batch for which this argument names none: row b is slot b."""
    if batch > state.shape[0]:
        raise ValueError(f"{name} must be given for a batch of {batch} on {state.shape[0]} slots")
    return first_numbers(state.shape[0], state.device)[:batch]


def check_scale(name: str, data: Any, name_of_scale: str, scale: Any) -> None:
    """Raise where data is of a format that needs a scale, and there is none."""
    if scale is None and isinstance(data, Tensor) and data.dtype in FORMATS and FORMATS[data.dtype].scaled:
        raise ValueError(f"{name_of_scale} must be given where {name} is {dtype_name(data.dtype)}, got None")


def with_new_seed(state: Tensor, rounds: int) -> State:
    """The state, rounded stochastically by one new seed for all slots; 0 rounds are as many as a State has."""
    seed = torch.randint(-(1 << 62), 1 << 62, (), device=state.device)  # new at every replay of a CUDA graph too
    return State(state, rounding="stochastic", rounds=rounds or State.rounds, seed=seed)


def activation_of(activation: Any) -> str | None:
    """What conv1d_step calls the activation that others call silu, swish or True."""
    if activation is None or activation is False:
        return None
    if activation is True or activation in ("silu", "swish"):
        return "silu"
    raise ValueError(f"activation must be silu, swish, True, False or None, got {activation!r}")


def tokens_before_channels(name: str, tensor: Any, dim: int | None = None) -> Tensor:
    """Return channels (batch, channels, tokens) as (batch, tokens, channels), and the other way round.

    One token, (batch, channels), stays as it is. dim: how many channels there must be.
    """
    tensor = with_axes(name, tensor, 2, 2)
    if tensor.dim() > 3 or (dim is not None and tensor.shape[1] != dim):
        check_tensor(name, tensor, ("batch", "dim"), (None, dim), also=(("batch", "dim", "seqlen"), (None, dim, None)))
    return tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
