"""warmup: compiles every kernel that a server will need, before it starts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from flashstate.errors import check_choice, check_int
from flashstate.launch.backend import uses_kernels
from flashstate.launch.config import LARGE
from flashstate.launch.start import Launch, collecting
from flashstate.launch.variants import compile_variants, variants_of
from flashstate.ops.conv1d import conv1d_step
from flashstate.ops.gated_delta import gated_delta_step
from flashstate.ops.mamba2 import mamba2_step
from flashstate.ops.mamba2_fold import mamba2_fold
from flashstate.ops.mamba2_replay import mamba2_replay
from flashstate.ops.mamba3 import mamba3_step
from flashstate.ops.states import read_states, write_states
from flashstate.pool.kv import ssm_of
from flashstate.pool.pool import StatePool
from flashstate.state.mamba3 import Mamba3State, Rotary
from flashstate.state.slots import MOST_TOKENS, Slots
from flashstate.state.state import State

Call = Callable[[], object]


def warmup(
    pool: StatePool[Any],
    batches: Sequence[int],
    *,
    op: str = "mamba2",
    tokens: Sequence[int] = (1,),
    groups: int = 1,
    activations: torch.dtype = torch.bfloat16,
    parameters: torch.dtype = torch.float32,
    D: bool = True,
    z: bool = True,
    dt_bias: bool = True,
    key_heads: int = 1,
    A_log: bool = True,
    per_channel: bool = False,
    exact: bool = True,
    rotary: bool | None = None,
    biases: bool = True,
    Wx: bool | None = None,
    Wz: bool | None = None,
    Wo: bool | None = None,
    trap_logit: bool = False,
    update_kv: bool = True,
    index: torch.dtype = torch.int64,
    early: bool = False,
    conv_width: int | None = None,
    conv_bias: bool = True,
    also: Call | None = None,
    progress: bool = True,
) -> dict[str, int]:
    """Compile the kernels that serving a pool with `mamba2_step`, `gated_delta_step` or `mamba3_step` needs, and with
    `conv1d_step` if it has windows: none of their calls compiles anything later. Of a pool with rings, those of
    `mamba2_replay` with a plan, `commit`, `mamba2_fold` in place and `folded` instead of `mamba2_step`.

    batches, tokens: every size of a batch, and every number of tokens per row.
    op: "mamba2", "gated_delta" or "mamba3"; it steps the layers that it is for.
    activations: the dtype of everything that tokens bring: x, z, B, C and dt, or q, k, v, a and b; of "mamba3" x, z, B,
        C, angles, and trap if that is a logit.
    parameters: the dtype of A, D, A_log and dt_bias, which have one value per head; of "mamba3" of A, dt, trap, D,
        weights and biases.
    groups, D, z: of "mamba2" and "mamba3": groups of B and C, and whether D and z are given.
    key_heads, A_log, per_channel, exact: of "gated_delta": heads of q and k, whether A_log is given, whether a and
        dt_bias have a value for each channel, and `exact` as in the op, for several tokens.
    rotary, biases: of "mamba3": whether there is a Rotary (None: where layers have angles), and whether it has biases.
    Wx, Wz, Wo: of "mamba3": whether they are given, Wz only with z; None: where the rank is above 1.
    trap_logit, update_kv: as in `mamba3_step`.
    dt_bias: whether it is given.
    index: the dtype of slot numbers.
    early: as in the ops; not of "mamba3".
    conv_width, conv_bias: of convolutions with silu, whose weights have the dtype of activations; None: one more than
        the entries of a window without its drafts. Windows with drafts roll back.
    also: makes other calls as the server will: with snapshots, packed tokens, a tree, other dtypes.
    progress: show a bar, and how many variants there are, on stderr.

    The kernels behind `advance`, `write` and `read` of the pool are compiled too. Nothing is launched, by `also`
    neither, so the pool stays as it is. Variants are compiled side by side, one per core. Returns how many each kernel
    has, by its name; none on a CPU, which has no kernels.
    """
    check_choice("op", op, ("mamba2", "gated_delta", "mamba3"))
    for name, numbers in (("batches", batches), ("tokens", tokens)):
        for number in numbers:
            check_int(name, number, 1, MOST_TOKENS)
    layers = [pool.layer(i) for i in range(pool.layers)]
    stepped = [layer for layer in layers if isinstance(layer, Mamba3State) is (op == "mamba3")]
    if not stepped:
        raise ValueError(f"op={op!r} is not for any layer of this pool")
    if not uses_kernels(ssm_of(layers[0]).data.device):
        return {}
    dtypes = (activations, parameters)
    step: Callable[[Any, Slots, int], None] = partial(_step_mamba2, *dtypes, dt_bias, early, groups, D, z)
    if op == "gated_delta":
        step = partial(_step_gated_delta, *dtypes, dt_bias, early, key_heads, A_log, per_channel, exact)
    elif op == "mamba3":
        step = partial(_step_mamba3, *dtypes, groups, D, z, rotary, biases, Wx, Wz, Wo, trap_logit, update_kv)
    slots = [_no_requests(pool, batch, index) for batch in batches]
    calls: Iterable[Call] = chain(
        (partial(pool.advance, of_batch) for of_batch in slots),
        (call for layer in layers for call in _pool_calls(ssm_of(layer), activations)),
        (
            partial(step, layer, of_batch, count)
            for layer, of_batch, count in product(() if pool.has_rings else stepped, slots, tokens)
        ),
        (
            partial(_replay_mamba2, *dtypes, dt_bias, groups, D, z, pool, i, of_batch, count)
            for i, of_batch, count in product(range(pool.layers if pool.has_rings else 0), slots, tokens)
        ),
        (
            partial(_convolve, pool, i, of_batch, count, conv_width, activations, conv_bias, early)
            for i, of_batch, count in product(range(pool.layers if pool.has_windows else 0), slots, tokens)
        ),
        () if also is None else (also,),
    )
    variants = variants_of(_launches(calls))
    compile_variants(variants, progress)
    counts = dict(Counter(launch.kernel.__name__.removesuffix("_kernel") for launch in variants))
    if progress:
        listed = ", ".join(f"{count} of {name}" for name, count in counts.items())
        print(f"flashstate compiled {len(variants)} kernels: {listed}", file=sys.stderr)
    return counts


def _launches(calls: Iterable[Call]) -> Iterator[Launch]:
    """What these calls would launch, call by call."""
    for call in calls:
        with collecting() as launches:
            call()
        yield from launches


def _no_requests(pool: StatePool[Any], batch: int, index: torch.dtype) -> Slots:
    """A batch of padding."""
    device = ssm_of(pool.layer(0)).data.device
    return Slots(torch.full((batch,), pool.null, dtype=index, device=device), null=pool.null)


def _pool_calls(state: State, activations: torch.dtype) -> Iterator[Call]:
    """Writing states that a prefill leaves in either dtype, and reading them: few, and so many that configs change."""
    for count in (1, -(-LARGE // state.data.shape[1])):
        slots = torch.zeros(count, dtype=torch.int64, device=state.data.device)
        for dtype in {torch.float32, activations}:
            states = torch.empty((count, *state.data.shape[1:]), dtype=dtype, device=state.data.device)
            yield partial(write_states, state, slots, states)
        yield partial(read_states, state, slots)


def _step_mamba2(
    activations: torch.dtype,
    parameters: torch.dtype,
    dt_bias: bool,
    early: bool,
    groups: int,
    D: bool,
    z: bool,
    state: State,
    slots: Slots,
    tokens: int,
) -> None:
    """A step of the batch in `slots`, on activations that take the memory of one token."""
    _, heads, rows, cols = state.data.shape
    per_token = partial(_per_token, slots, tokens, activations)
    x, bc = per_token(heads, rows), per_token(groups, cols)
    per_head = torch.empty(heads, dtype=parameters, device=state.data.device)
    mamba2_step(
        state,
        x,
        per_token(heads),
        per_head,
        bc,
        bc,
        D=per_head if D else None,
        z=x if z else None,
        dt_bias=per_head if dt_bias else None,
        slots=slots,
        early=early,
    )


def _replay_mamba2(
    activations: torch.dtype,
    parameters: torch.dtype,
    dt_bias: bool,
    groups: int,
    D: bool,
    z: bool,
    pool: StatePool[Any],
    i: int,
    slots: Slots,
    tokens: int,
) -> None:
    """A step of the batch in `slots` by replay, of layer i, and a fold."""
    state, ring, accepted = pool.layer(i), pool.ring(i), torch.zeros_like(slots.read)
    _, heads, rows, cols = state.data.shape
    per_token = partial(_per_token, slots, tokens, activations)
    x, bc = per_token(heads, rows), per_token(groups, cols)
    per_head = torch.empty(heads, dtype=parameters, device=state.data.device)
    plan = pool.plan(slots, tokens)
    mamba2_replay(
        state,
        ring,
        x,
        per_token(heads),
        per_head,
        bc,
        bc,
        D=per_head if D else None,
        z=x if z else None,
        dt_bias=per_head if dt_bias else None,
        plan=plan,
    )
    pool.commit(plan, accepted)
    pool.commit(plan)
    mamba2_fold(state, ring, per_head, slots=slots)
    pool.folded(slots)


def _step_gated_delta(
    activations: torch.dtype,
    parameters: torch.dtype,
    dt_bias: bool,
    early: bool,
    key_heads: int,
    A_log: bool,
    per_channel: bool,
    exact: bool,
    state: State,
    slots: Slots,
    tokens: int,
) -> None:
    """The same of the gated delta rule."""
    _, heads, rows, cols = state.data.shape
    per_token = partial(_per_token, slots, tokens, activations)
    channels = (cols,) if per_channel else ()
    qk, per_head = per_token(key_heads, cols), partial(torch.empty, heads, dtype=parameters, device=state.data.device)
    gated_delta_step(
        state,
        qk,
        qk,
        per_token(heads, rows),
        per_token(heads, *channels),
        per_token(heads),
        A_log=per_head() if A_log else None,
        dt_bias=per_head(*channels) if A_log and dt_bias else None,
        exact=exact,
        slots=slots,
        early=early,
    )


def _step_mamba3(
    activations: torch.dtype,
    parameters: torch.dtype,
    groups: int,
    D: bool,
    z: bool,
    rotary: bool | None,
    biases: bool,
    Wx: bool | None,
    Wz: bool | None,
    Wo: bool | None,
    trap_logit: bool,
    update_kv: bool,
    state: Mamba3State,
    slots: Slots,
    tokens: int,
) -> None:
    """The same of Mamba-3."""
    (_, heads, rows, cols), R = state.ssm.data.shape, state.rank
    per_token = partial(_per_token, slots, tokens)
    shared = partial(torch.empty, dtype=parameters, device=state.k.device)
    x, bc = per_token(activations, heads, rows), per_token(activations, R, groups, cols)
    per_head, turned = per_token(parameters, heads), None
    if state.angle is not None if rotary is None else rotary:
        bias = shared(R, heads, cols) if biases else None
        S = 1 if state.angle is None else state.angle.shape[2]  # without angles the op refuses it
        turned = Rotary(per_token(activations, S), bias_B=bias, bias_C=bias)

    def weight(wanted: bool | None) -> Tensor | None:
        return shared(R, heads, rows) if (R > 1 if wanted is None else wanted) else None

    mamba3_step(
        state,
        x,
        per_head,
        per_head,
        per_token(activations, heads) if trap_logit else per_head,
        bc,
        bc,
        Wx=weight(Wx),
        Wz=weight(Wz) if z else None,
        Wo=weight(Wo),
        D=shared(heads) if D else None,
        z=x if z else None,
        rotary=turned,
        trap_logit=trap_logit,
        update_kv=update_kv,
        slots=slots,
    )


def _convolve(
    pool: StatePool[Any],
    i: int,
    slots: Slots,
    tokens: int,
    width: int | None,
    activations: torch.dtype,
    bias: bool,
    early: bool,
) -> None:
    """A convolution of the batch in `slots`, on the window of layer i."""
    window = pool.window(i)
    _, channels, length = window.shape
    if pool.drafts:
        slots = replace(slots, accepted=torch.zeros_like(slots.read))
    width = length - pool.drafts + 1 if width is None else width
    weight = torch.empty(channels, width, dtype=activations, device=window.device)
    x = _per_token(slots, tokens, activations, channels)
    conv1d_step(window, x, weight, weight[:, 0].contiguous() if bias else None, slots=slots, early=early)


def _per_token(slots: Slots, tokens: int, dtype: torch.dtype, *sizes: int) -> Tensor:
    """Activations of every token, which take the memory of one."""
    leading = (len(slots.read),) if tokens == 1 else (len(slots.read), tokens)
    return torch.empty(sizes, dtype=dtype, device=slots.read.device).expand(*leading, *sizes)
