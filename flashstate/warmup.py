"""warmup: compiles every kernel that a server will need, before it starts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any

import torch

from flashstate.errors import check_choice, check_int
from flashstate.launch.call import OPS, Op
from flashstate.launch.config import LARGE
from flashstate.launch.environment import uses_kernels
from flashstate.launch.start import Launch, collecting
from flashstate.launch.variants import compile_variants, variants_of
from flashstate.ops.conv1d import CONV1D_STEP, conv1d_step
from flashstate.ops.mamba2_fold import mamba2_fold
from flashstate.ops.mamba2_replay import MAMBA2_REPLAY, mamba2_replay
from flashstate.ops.mamba3 import MAMBA3_STEP, mamba3_step
from flashstate.ops.states import read_states, write_states
from flashstate.pool.layers import ssm_of
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
    check_choice("op", op, [name.removesuffix("_step") for name, declared in OPS.items() if steps_layers(declared)])
    for name, numbers in (("batches", batches), ("tokens", tokens)):
        for number in numbers:
            check_int(name, number, 1, MOST_TOKENS)
    layers = [pool.layer(i) for i in range(pool.layers)]
    stepped = [i for i, layer in enumerate(layers) if isinstance(layer, Mamba3State) is (op == "mamba3")]
    if not stepped:
        raise ValueError(f"op={op!r} is not for any layer of this pool")
    device = ssm_of(layers[0]).data.device
    if not uses_kernels(device):
        return {}
    samples, declared = Samples(activations, parameters, device), OPS[f"{op}_step"]
    free = {"groups": groups, "G": groups, "H": key_heads}
    gated = "A_log" in declared.tensors
    left_out = absent(D=D, z=z, A_log=A_log, dt_bias=dt_bias and (A_log or not gated))
    wide = ("a", "dt_bias") if per_channel and gated else ()
    flags = {"exact": exact, "early": early, "trap_logit": trap_logit, "update_kv": update_kv}
    flags = {name: value for name, value in flags.items() if name in declared.flags}
    step = partial(_step, pool, samples, declared, free, left_out, wide, flags)
    if op == "mamba3":
        given = {"D": D, "z": z, "Wx": Wx, "Wz": Wz if z else False, "Wo": Wo}
        step = partial(_step_mamba3, pool, samples, groups, given, rotary, biases, flags)
    replay = partial(_replay_mamba2, pool, samples, groups, absent(D=D, z=z, dt_bias=dt_bias))
    convolve = partial(_convolve, pool, samples, conv_width, conv_bias, early)
    slots = [Slots(torch.full((batch,), pool.null, dtype=index, device=device), null=pool.null) for batch in batches]
    everywhere = range(pool.layers)
    calls: Iterable[Call] = chain(
        (partial(pool.advance, of_batch) for of_batch in slots),
        (call for layer in layers for call in _pool_calls(ssm_of(layer), activations)),
        (partial(step, *at) for at in product(() if pool.has_rings else stepped, slots, tokens)),
        (partial(replay, *at) for at in product(everywhere if pool.has_rings else (), slots, tokens)),
        (partial(convolve, *at) for at in product(everywhere if pool.has_windows else (), slots, tokens)),
        () if also is None else (also,),
    )
    variants = variants_of(_launches(calls))
    compile_variants(variants, progress)
    counts = dict(Counter(launch.kernel.__name__.removesuffix("_kernel") for launch in variants))
    if progress:
        listed = ", ".join(f"{count} of {name}" for name, count in counts.items())
        print(f"flashstate compiled {len(variants)} kernels: {listed}", file=sys.stderr)
    return counts


def steps_layers(op: Op) -> bool:
    """Whether an op steps the layers of a pool, and keeps nothing beside them."""
    return (op.takes_state or op is MAMBA3_STEP) and "ring" not in op.hints


def absent(**given: bool | None) -> frozenset[str]:
    """The names of arguments that are not given."""
    return frozenset(name for name, there in given.items() if not there)


@dataclass(frozen=True)
class Samples:
    """Makes arguments for an op from its declaration: activations of every token, which take the memory of one, and
    parameters."""

    activations: torch.dtype
    parameters: torch.dtype
    device: torch.device

    def of(
        self,
        op: Op,
        sizes: Mapping[str, int],
        slots: Slots,
        tokens: int,
        absent: Collection[str] = (),
        wide: Collection[str] = (),
        other: Mapping[str, torch.dtype] | None = None,
    ) -> dict[str, Any]:
        """The tensors of a call of an op but those that are absent. `wide`: those that have their optional axes;
        `other`: dtypes of those that have another than activations and parameters."""
        lead = (len(slots.read),) if tokens == 1 else (len(slots.read), tokens)
        found: dict[str, Any] = {}
        for name, axes in op.tensors.items():
            if name not in absent:
                dtype = (other or {}).get(name, self.activations if axes.tokens else self.parameters)
                shape = [sizes[axis] for axis in (*axes.names, *(axes.optional if name in wide else ()))]
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
                found[name] = tensor.expand(*lead, *shape) if axes.tokens else tensor
        return found


def _launches(calls: Iterable[Call]) -> Iterator[Launch]:
    """What these calls would launch, call by call."""
    for call in calls:
        with collecting() as launches:
            call()
        yield from launches


def _pool_calls(state: State, activations: torch.dtype) -> Iterator[Call]:
    """Writing states that a prefill leaves in either dtype, and reading them: few, and so many that configs change."""
    for count in (1, -(-LARGE // state.data.shape[1])):
        slots = torch.zeros(count, dtype=torch.int64, device=state.data.device)
        for dtype in {torch.float32, activations}:
            states = torch.empty((count, *state.data.shape[1:]), dtype=dtype, device=state.data.device)
            yield partial(write_states, state, slots, states)
        yield partial(read_states, state, slots)


def _sizes(op: Op, state: State, **others: int) -> dict[str, int]:
    """Sizes of all axes of an op."""
    return {**dict(zip(op.inner, state.data.shape[1:], strict=True)), **others}


def _step(
    pool: StatePool[Any], samples: Samples, op: Op, free: Mapping[str, int], absent: Collection[str],
    wide: Collection[str], flags: Mapping[str, Any], i: int, slots: Slots, tokens: int,
) -> None:  # fmt: skip
    """A step of the batch in `slots` by an op, of layer i. `free`: sizes of axes that a state does not say."""
    state = pool.layer(i)
    op.function(
        state, **samples.of(op, {**free, **_sizes(op, state)}, slots, tokens, absent, wide), slots=slots, **flags
    )


def _replay_mamba2(
    pool: StatePool[Any], samples: Samples, groups: int, absent: Collection[str], i: int, slots: Slots, tokens: int
) -> None:
    """A step of the batch in `slots` by replay, of layer i, and a fold."""
    state, ring, accepted = pool.layer(i), pool.ring(i), torch.zeros_like(slots.read)
    tensors = samples.of(MAMBA2_REPLAY, _sizes(MAMBA2_REPLAY, state, groups=groups), slots, tokens, absent)
    plan = pool.plan(slots, tokens)
    mamba2_replay(state, ring, **tensors, plan=plan)
    pool.commit(plan, accepted)
    pool.commit(plan)
    mamba2_fold(state, ring, tensors["A"], slots=slots)
    pool.folded(slots)


def _step_mamba3(
    pool: StatePool[Any], samples: Samples, groups: int, given: Mapping[str, bool | None], rotary: bool | None,
    biases: bool, flags: Mapping[str, Any], i: int, slots: Slots, tokens: int,
) -> None:  # fmt: skip
    """A step of Mamba-3 of the batch in `slots`, of layer i. `given`: None where the rank decides."""
    state = pool.layer(i)
    sizes = _sizes(MAMBA3_STEP, state.ssm, R=state.rank, G=groups)
    per_head = dict.fromkeys(("A", "dt") if flags["trap_logit"] else ("A", "dt", "trap"), samples.parameters)
    left_out = absent(**{name: state.rank > 1 if there is None else there for name, there in given.items()})
    tensors, turned = samples.of(MAMBA3_STEP, sizes, slots, tokens, left_out, other=per_head), None
    if state.angle is not None if rotary is None else rotary:
        shape = (state.rank, sizes["H"], sizes["N"])
        bias = torch.empty(shape, dtype=samples.parameters, device=samples.device) if biases else None
        S = 1 if state.angle is None else state.angle.shape[2]  # without angles the op refuses it
        lead = tensors["x"].shape[:-2]
        angle = torch.empty(S, dtype=samples.activations, device=samples.device).expand(*lead, S)
        turned = Rotary(angle, bias_B=bias, bias_C=bias)
    mamba3_step(state, **tensors, rotary=turned, slots=slots, **flags)


def _convolve(
    pool: StatePool[Any], samples: Samples, width: int | None, bias: bool, early: bool, i: int, slots: Slots,
    tokens: int,
) -> None:  # fmt: skip
    """A convolution of the batch in `slots`, on the window of layer i, with weights in the dtype of activations."""
    window = pool.window(i)
    _, channels, length = window.shape
    if pool.drafts:
        slots = replace(slots, accepted=torch.zeros_like(slots.read))
    sizes = {"channels": channels, "width": length - pool.drafts + 1 if width is None else width}
    left_out = {"window", "positions", "snapshots", *(() if bias else ("bias",))}
    alike = replace(samples, parameters=samples.activations)
    tensors = alike.of(CONV1D_STEP, sizes, slots, tokens, left_out)
    conv1d_step(window, **tensors, slots=slots, early=early)
