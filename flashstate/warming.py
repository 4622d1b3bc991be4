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
from torch import Tensor

from flashstate.errors import check_choice, check_int
from flashstate.launch.call import OPS, Op
from flashstate.launch.config import LARGE
from flashstate.launch.environment import uses_kernels
from flashstate.launch.start import Launch, collecting
from flashstate.launch.variants import compile_variants, variants_of
from flashstate.ops.conv1d import CONV1D_STEP, conv1d_step
from flashstate.ops.gated_delta_fold import gated_delta_fold
from flashstate.ops.gated_delta_replay import GATED_DELTA_REPLAY
from flashstate.ops.mamba2_fold import mamba2_fold
from flashstate.ops.mamba2_replay import MAMBA2_REPLAY
from flashstate.ops.mamba3 import MAMBA3_STEP
from flashstate.ops.moving import copied_at_once
from flashstate.ops.numbers import as_numbers
from flashstate.pool.layers import ssm_of
from flashstate.pool.pool import StatePool
from flashstate.state.mamba3 import Mamba3State, Rotary
from flashstate.state.ring import DeltaRing, Ring
from flashstate.state.slots import MOST_TOKENS, Slots

Call = Callable[[], object]
PER_CHANNEL = ("a", "dt_bias")  # tensors of the delta rule that may have a value for each channel
REPLAYS: dict[type, tuple[Op, Callable[..., None], tuple[str, ...]]] = {  # by rings; with what folds take of calls
    Ring: (MAMBA2_REPLAY, mamba2_fold, ("A",)),
    DeltaRing: (GATED_DELTA_REPLAY, gated_delta_fold, ("A_log", "dt_bias")),
}


def warmup(
    pool: StatePool[Any],
    batches: int | Sequence[int],
    *,
    op: str = "mamba2",
    tokens: int | Sequence[int] = 1,
    groups: int = 1,
    activations: torch.dtype = torch.bfloat16,
    parameters: torch.dtype = torch.float32,
    D: bool = True,
    z: bool = True,
    dt_bias: bool = True,
    dt_limit: tuple[float, float] | None = None,
    key_heads: int = 1,
    A_log: bool = True,
    b_logit: bool | None = None,
    per_channel: bool = False,
    exact: bool = True,
    rotary: bool | None = None,
    biases: bool = True,
    Wx: bool | None = None,
    Wz: bool | None = None,
    Wo: bool | None = None,
    trap_logit: bool = False,
    update_kv: bool = True,
    index: torch.dtype = torch.int32,
    early: bool = False,
    conv_width: int | None = None,
    conv_bias: bool = True,
    also: Call | None = None,
    progress: bool = True,
) -> dict[str, int]:
    """Compile the kernels that serving a pool with `mamba2_step`, `gated_delta_step` or `mamba3_step` needs, and with
    `conv1d_step` if it has windows: none of their calls compiles anything later. Of a pool with rings, instead of
    steps, those of `mamba2_replay` or `gated_delta_replay` with a plan, as the ring of each layer is, of `commit`, of
    `mamba2_fold` or `gated_delta_fold` in place, and of `folded`.

    batches, tokens: every size of a batch, and every number of tokens per row; one number or several.
    op: "mamba2", "gated_delta" or "mamba3"; it steps the layers that it is for. Rings say it themselves, and groups,
        key_heads and per_channel too.
    activations: the dtype of everything that tokens bring: x, z, B, C and dt, or q, k, v, a and b; of "mamba3" x, z, B,
        C, angles, and trap if that is a logit.
    parameters: the dtype of A, D, A_log and dt_bias, which have one value per head; of "mamba3" of A, dt, trap, D,
        weights and biases.
    groups, D, z: of "mamba2" and "mamba3": groups of B and C, and whether D and z are given.
    key_heads, A_log, per_channel: of "gated_delta": heads of q and k, whether A_log is given, and whether a and dt_bias
        have a value for each channel.
    exact: of "mamba2" and "gated_delta", as in the op, for several tokens.
    b_logit: of "gated_delta", as in the op.
    rotary, biases: of "mamba3": whether there is a Rotary (None: where layers have angles), and whether it has biases.
    Wx, Wz, Wo: of "mamba3": whether they are given, Wz only with z; None: where the rank is above 1.
    trap_logit, update_kv: as in `mamba3_step`.
    dt_bias: whether it is given.
    dt_limit: of "mamba2", as in the op; all limits share their kernels.
    index: the dtype of slot numbers, as `acquire` gave them.
    early: as in the ops; not of "mamba3".
    conv_width, conv_bias: of convolutions with silu, whose weights have the dtype of activations; None: one more than
        the entries of a window without its drafts. Windows with drafts roll back.
    also: makes other calls as the server will: with snapshots, packed tokens, a tree, other dtypes.
    progress: show a bar, and how many variants there are, on stderr.

    The kernels behind `advance` and all that the pool does to slots are compiled too, of `write` with states whose rows
    are contiguous and start at multiples of 16 bytes. Nothing is launched, by `also` neither, so the pool stays as it
    is. Variants are compiled side by side, one per core. Returns how many each kernel has, by its name; none on a CPU,
    which has no kernels.
    """
    stepping = [one for one in OPS.values() if (one.takes_state or one is MAMBA3_STEP) and "ring" not in one.hints]
    check_choice("op", op, [one.name.removesuffix("_step") for one in stepping])
    batches, tokens = as_numbers("batches", batches), as_numbers("tokens", tokens)
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
    declared = OPS[f"{op}_step"]
    given = {
        "D": D, "z": z, "A_log": A_log, "dt_bias": dt_bias, "Wx": Wx, "Wz": Wz if z else False, "Wo": Wo,
        "rotary": rotary, "biases": biases, "bias": conv_bias,
        **dict.fromkeys(("window", "positions", "snapshots"), False),
    }  # fmt: skip
    serving = Serving(
        pool, activations, parameters, {"groups": groups, "G": groups, "H": key_heads}, given, per_channel,
        options={
            "exact": exact, "early": early, "trap_logit": trap_logit, "update_kv": update_kv, "dt_limit": dt_limit,
            "b_logit": b_logit,
        }, conv_width=conv_width,
    )  # fmt: skip
    slots = [Slots(torch.full((batch,), pool.null, dtype=index, device=device), null=pool.null) for batch in batches]
    everywhere = range(pool.layers)
    calls: Iterable[Call] = chain(
        (partial(pool.advance, of_batch) for of_batch in slots),
        _pool_calls(pool, activations, index),
        (partial(serving.step, declared, *at) for at in product(() if pool.has_rings else stepped, slots, tokens)),
        (partial(serving.replay, *at) for at in product(everywhere if pool.has_rings else (), slots, tokens)),
        (partial(serving.convolve, *at) for at in product(everywhere if pool.has_windows else (), slots, tokens)),
        () if also is None else (also,),
    )
    variants = variants_of(_launches(calls))
    compile_variants(variants, progress)
    counts = dict(Counter(launch.kernel.__name__.removesuffix("_kernel") for launch in variants))
    if progress:
        listed = ", ".join(f"{count} of {name}" for name, count in counts.items())
        print(f"flashstate compiled {len(variants)} kernels: {listed}", file=sys.stderr)
    return counts


@dataclass(frozen=True)
class Serving:
    """Calls of a server on a pool, with arguments made from the declarations of ops."""

    pool: StatePool[Any]
    activations: torch.dtype
    parameters: torch.dtype
    free: Mapping[str, int]  # sizes of axes that a state does not say
    given: Mapping[str, bool | None]  # arguments that may be left out; None: the layer says whether they are
    per_channel: bool  # of steps of the delta rule
    options: Mapping[str, Any]  # of all ops, by name
    conv_width: int | None

    def tensors(
        self,
        op: Op,
        sizes: Mapping[str, int],
        slots: Slots,
        tokens: int,
        dtypes: Mapping[str, torch.dtype],
        wide: Collection[str] = (),
    ) -> dict[str, Any]:
        """The tensors of a call, activations of every token in the memory of one. `dtypes`: of those that have another
        than activations and parameters. `wide`: those that have their optional axes."""
        lead = (len(slots.read),) if tokens == 1 else (len(slots.read), tokens)
        found = {}
        for name, axes in op.tensors.items():
            there = self.takes(op, name)
            if sizes.get("R", 1) > 1 if there is None else there:
                dtype = dtypes.get(name, self.activations if axes.tokens else self.parameters)
                named = (*axes.names, *(axes.optional if name in wide else ()))
                if unknown := [axis for axis in named if axis not in sizes]:
                    raise ValueError(
                        f"{name} of {op.name} has {unknown[0]}, whose size warmup cannot know: give `also`"
                    )
                shape = [sizes[axis] for axis in named]
                tensor = torch.empty(shape, dtype=dtype, device=slots.read.device)
                found[name] = tensor.expand(*lead, *shape) if axes.tokens else tensor
        return found

    def takes(self, op: Op, name: str) -> bool | None:
        """Whether calls of an op have a tensor; None: the layer says it. The delta rule has dt_bias only with A_log."""
        there = self.given.get(name, True)
        return there and self.given["A_log"] if name == "dt_bias" and "A_log" in op.tensors else there

    def options_of(self, op: Op) -> dict[str, Any]:
        """The options that calls of an op have."""
        return {name: value for name, value in self.options.items() if name in op.options}

    def step(self, op: Op, i: int, slots: Slots, tokens: int) -> None:
        """A step of the batch in `slots`, of layer i."""
        state, more = self.pool.layer(i), {}
        sizes = {**self.free, **dict(zip(op.inner, ssm_of(state).data.shape[1:], strict=True)), **op.sizes(state)}
        per_head = ("A", "dt") if self.options["trap_logit"] else ("A", "dt", "trap")
        dtypes = dict.fromkeys(per_head if op is MAMBA3_STEP else (), self.parameters)
        wide = PER_CHANNEL if self.per_channel and "A_log" in op.tensors else ()
        tensors = self.tensors(op, sizes, slots, tokens, dtypes, wide)
        if op is MAMBA3_STEP:
            more["rotary"] = self.rotary(state, tensors["x"])
        op.function(state, **tensors, **more, slots=slots, **self.options_of(op))

    def rotary(self, state: Mamba3State, x: Tensor) -> Rotary | None:
        """What turns B and C of a layer, if anything does; without angles the op refuses it."""
        given = self.given["rotary"]
        if not (state.angle is not None if given is None else given):
            return None
        bias = torch.empty(state.k.shape[1:], dtype=self.parameters, device=x.device) if self.given["biases"] else None
        S = 1 if state.angle is None else state.angle.shape[2]
        angle = torch.empty(S, dtype=self.activations, device=x.device).expand(*x.shape[:-2], S)
        return Rotary(angle, bias_B=bias, bias_C=bias)

    def replay(self, i: int, slots: Slots, tokens: int) -> None:
        """A step of the batch in `slots` by replay, of layer i, and a fold."""
        pool, state, ring = self.pool, self.pool.layer(i), self.pool.ring(i)
        op, fold, taken = REPLAYS[type(ring)]
        shared = dict(zip(ring.axes[ring.of_cols], getattr(ring, ring.of_cols).shape, strict=True))
        sizes = {**shared, **dict(zip(op.inner, state.data.shape[1:], strict=True))}
        wide = PER_CHANNEL if isinstance(ring, DeltaRing) and ring.per_channel else ()
        tensors = self.tensors(op, sizes, slots, tokens, {}, wide)
        plan = pool.plan(slots, tokens)
        op.function(state, ring, **tensors, plan=plan, **self.options_of(op))
        pool.commit(plan, torch.zeros_like(slots.read))
        pool.commit(plan)
        fold(state, ring, **{name: tensors[name] for name in taken if name in tensors}, slots=slots)
        pool.folded(slots)

    def convolve(self, i: int, slots: Slots, tokens: int) -> None:
        """A convolution of the batch in `slots`, on the window of layer i, with weights in the dtype of activations."""
        window, drafts = self.pool.window(i), self.pool.drafts
        _, channels, length = window.shape
        sizes = {"channels": channels, "width": length - drafts + 1 if self.conv_width is None else self.conv_width}
        weights = dict.fromkeys(("weight", "bias"), self.activations)
        tensors = self.tensors(CONV1D_STEP, sizes, slots, tokens, weights)
        slots = replace(slots, accepted=torch.zeros_like(slots.read)) if drafts else slots
        conv1d_step(window, **tensors, slots=slots, early=self.options["early"])


def _launches(calls: Iterable[Call]) -> Iterator[Launch]:
    """What these calls would launch, call by call."""
    for call in calls:
        with collecting() as launches:
            call()
        yield from launches


def _pool_calls(pool: StatePool[Any], activations: torch.dtype, index: torch.dtype) -> Iterator[Call]:
    """What a pool does to slots: lists of the host become int32, those on the device are as they are."""
    device = ssm_of(pool.layer(0)).data.device
    for dtype in {torch.int32, index}:
        nowhere = torch.full((max(pool.slots, LARGE),), -1, dtype=dtype, device=device)
        for i in range(pool.layers):
            yield from _layer_calls(pool, i, activations, nowhere)
        slots = nowhere[:1]
        yield partial(pool.reset, slots)
        yield partial(_move_out_and_in, pool, slots)
        sizes = (min(size, pool.slots) for size in copied_at_once(pool.slots))
        for slots, keep_seed in product((nowhere[:size] for size in sizes), (False, True)):
            yield partial(pool.copy, slots, slots, keep_seed)


def _move_out_and_in(pool: StatePool[Any], slots: Tensor) -> None:
    pool.load(slots, pool.export(slots))


def _layer_calls(pool: StatePool[Any], i: int, activations: torch.dtype, nowhere: Tensor) -> Iterator[Call]:
    """Writing states that a prefill leaves in either dtype and either order, and reading them: few, and so many that
    configs change."""
    heads, rows, cols = ssm_of(pool.layer(i)).data.shape[1:]
    for count in (1, -(-LARGE // heads)):
        slots = nowhere[:count]
        for dtype in {torch.float32, activations}:
            states = torch.empty((2, count, heads, rows * cols), dtype=dtype, device=nowhere.device)
            yield partial(pool.write, i, slots, states[0].unflatten(2, (rows, cols)))
            yield partial(pool.write, i, slots, states[1].unflatten(2, (cols, rows)).mT)
        yield partial(pool.read, i, slots)
