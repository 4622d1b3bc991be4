"""StatePool: the states of all layers of a model, handed out to requests slot by slot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Generic

import torch
from torch import Tensor

from flashstate.errors import INDEX_DTYPES, LARGEST_INT32, bytes_text, check_dtype, check_flag, check_int, counted
from flashstate.ops import moving
from flashstate.ops.debug import note_rings, settle
from flashstate.ops.numbers import uploaded
from flashstate.ops.rings import renew
from flashstate.ops.seeds import advance_seeds
from flashstate.ops.states import read_states, write_states
from flashstate.pool.exporting import VERSION, bytes_for, layout_of
from flashstate.pool.holding import Holding, Seeds
from flashstate.pool.layers import LayerT, all_parts, as_kept, check_layers, ssm_of, with_history
from flashstate.pool.memory import Allocator
from flashstate.pool.resizing import resized_layers
from flashstate.state.faults import fault_flag
from flashstate.state.mamba3 import Mamba3State
from flashstate.state.ring import AnyRing, Plan, generation_of, plan_of
from flashstate.state.slots import SlotNumbers, Slots, as_slots
from flashstate.state.state import State


class StatePool(Generic[LayerT]):
    """What a model keeps per request: a slot in the state of every layer, one in the windows of its convolutions and in
    the rings for replay if it has some, and one seed. Who has which slot, it knows.

    Made by `StatePool.mamba2`, `StatePool.mamba3` or `StatePool.gated_delta`, which allocate, or by `StatePool.wrap`
    over states there are. To type checkers a bare StatePool is one whose layers are State; with layers of Mamba-3 it is
    StatePool[Mamba3State], and StatePool[State | Mamba3State] with both.

    slots, layers: how many it has.
    null: the slot number that means "no request", as in Slots; no request gets a slot of that number.
    drafts: tokens of a call that its windows can roll back.

    Slots have one form everywhere: an int, a sequence of ints or an integer tensor. Which of them are held is known on
    the host. Numbers that come from there must be held, and raise before anything changes. A tensor of int32 or int64
    on the pool's device stays there, and the host does not wait: a number past the pool is skipped and sets the flag
    that `flashstate.check_faults()` reports, a negative one or null is skipped; inside `flashstate.debug()` numbers
    past the pool, slots that are not held and slots that are written twice raise. `acquire` and `release` are for the
    host alone: `release` waits for a tensor on a GPU.

    What is done on a device is queued on the current stream, in one launch for all slots and layers of a call; a pool
    with rings needs a second one where slots get other contents. With slots on the device a CUDA graph captures all of
    it but `acquire`, `release`, `resized` and seeds that come from the host.

    A pool that rounds to nearest allocates no seeds, and code that serves it need not know: `advance` does nothing
    then, and seeds that are given are checked and not used.
    """

    def __init__(
        self,
        states: Sequence[LayerT],
        windows: Sequence[Tensor] = (),
        drafts: int = 0,
        rings: Sequence[AnyRing] = (),
        *,
        null: int,
        seed: int | None,
        kind: str,
        holding: Holding | None = None,
    ) -> None:
        """`windows`: one per layer, or none, with room for `drafts`; `rings`: the same. `kind`: the class method that
        made it, or "wrapped": all of it is the caller's, who holds every slot. `holding`: of a pool of the same
        requests."""
        ssm = [ssm_of(state) for state in states]
        self.slots = ssm[0].data.shape[0]
        self.layers = len(states)
        self._states = tuple(states)
        self._windows = tuple(windows)
        self._rings = tuple(rings)
        self.drafts = drafts
        self._kind = kind
        self._wrapped = kind == "wrapped"
        self._seed = next((state.seed for state in ssm if state.seed is not None), None)
        self._device = ssm[0].data.device
        self._holding = holding or Holding(self.slots, null, self._device, seed, held=self._wrapped)
        self.null = null
        self._generation: Tensor | None = None  # how often slots got other contents, for plans
        if rings:
            note_rings(ssm, rings)
            self._generation = generation_of(rings[0])
        self._parts = all_parts(states, windows, rings)
        if self._device.type == "cuda":  # what cannot be made while a CUDA graph is captured
            self._parts.prepare()
            fault_flag(self._device)

    @classmethod
    def mamba2(
        cls: type[StatePool[Any]],
        *,
        slots: int,
        layers: int,
        heads: int,
        rows: int,
        cols: int,
        dtype: torch.dtype = torch.float32,
        rounding: str = "nearest",
        rounds: int = 10,
        stream: int = 0,
        seed: int | None = None,
        null: int = -1,
        device: torch.device | str | None = None,
        conv_channels: int = 0,
        conv_width: int = 4,
        conv_dtype: torch.dtype = torch.bfloat16,
        drafts: int = 0,
        window: int = 0,
        tokens: int = 1,
        groups: int | None = None,
        ring_dtype: torch.dtype | None = None,
    ) -> StatePool[State]:
        """A pool for `mamba2_step`, or with a window for `mamba2_replay`; every slot is free.

        heads, rows, cols: the shape of a layer's state in a slot.
        dtype, rounding, rounds: the format of all layers, as in State.
        stream: of layer 0; layer i has stream + i. Tensor-parallel ranks take streams that are `layers` apart.
        seed: what the seeds of requests are drawn from; None: entropy.
        conv_channels, conv_width: of the convolution before the recurrence, whose windows the pool then has too; 0
            channels: none.
        conv_dtype: of the windows, that of its inputs or float32.
        drafts: tokens of a call that its windows can roll back, with slots.accepted of `conv1d_step`.
        window: of the rings for replay, 1 to 64; 0: none.
        tokens: the most per row and call that a ring takes, at most the window.
        groups, ring_dtype: of B, and the dtype of x and B, in a ring; None: 1 and bfloat16. Only with a window.
        """
        allocate = Allocator(layers, slots, device)
        states = allocate.states({"heads": heads, "rows": rows, "cols": cols}, dtype, rounding, rounds, stream)
        rings = allocate.rings(states, window, tokens, groups, ring_dtype)
        windows = allocate.windows(conv_channels, conv_width, drafts, conv_dtype)
        return cls(states, windows, drafts, rings, null=null, seed=seed, kind="mamba2")

    @classmethod
    def mamba3(
        cls: type[StatePool[Any]],
        *,
        slots: int,
        layers: int,
        heads: int,
        rows: int,
        cols: int,
        rank: int = 1,
        angles: int = 0,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype = torch.bfloat16,
        rounding: str = "nearest",
        rounds: int = 10,
        stream: int = 0,
        seed: int | None = None,
        null: int = -1,
        device: torch.device | str | None = None,
    ) -> StatePool[Mamba3State]:
        """A pool for `mamba3_step`, whose layers are Mamba3State: all four states zero at first; the rest as `mamba2`.

        rank: R, how many B, C and outputs a head has.
        angles: S, how many pairs of columns are turned, 0 to cols // 2; 0: the layers have no angles.
        kv_dtype: of k and v, float32, bfloat16 or float16; angles are float32.
        """
        allocate = Allocator(layers, slots, device)
        states = allocate.states({"heads": heads, "rows": rows, "cols": cols}, dtype, rounding, rounds, stream)
        return cls(allocate.mamba3(states, rank, angles, kv_dtype), null=null, seed=seed, kind="mamba3")

    @classmethod
    def gated_delta(
        cls: type[StatePool[Any]],
        *,
        slots: int,
        layers: int,
        heads: int,
        value_dim: int,
        key_dim: int,
        dtype: torch.dtype = torch.float32,
        rounding: str = "nearest",
        rounds: int = 10,
        stream: int = 0,
        seed: int | None = None,
        null: int = -1,
        device: torch.device | str | None = None,
        conv_channels: int = 0,
        conv_width: int = 4,
        conv_dtype: torch.dtype = torch.bfloat16,
        drafts: int = 0,
        window: int = 0,
        tokens: int = 1,
        key_heads: int | None = None,
        per_channel: bool | None = None,
        ring_dtype: torch.dtype | None = None,
        u_dtype: torch.dtype | None = None,
    ) -> StatePool[State]:
        """A pool for `gated_delta_step`, or with a window for `gated_delta_replay`; the rest as `mamba2`.

        heads, value_dim, key_dim: the shape of a layer's state in a slot; these are value heads.
        key_heads, per_channel: of a ring: heads of k, None: as many as value heads; and whether a has a value for each
            channel, as in KDA, None: it has not. Only with a window.
        ring_dtype, u_dtype: of a ring: the dtype of k, and of a per channel, None: bfloat16; and that of corrected
            values, None: float16. Only with a window.
        """
        sizes = {"heads": heads, "value_dim": value_dim, "key_dim": key_dim}
        allocate = Allocator(layers, slots, device)
        states = allocate.states(sizes, dtype, rounding, rounds, stream)
        rings = allocate.delta_rings(states, window, tokens, key_heads, per_channel, ring_dtype, u_dtype)
        windows = allocate.windows(conv_channels, conv_width, drafts, conv_dtype)
        return cls(states, windows, drafts, rings, null=null, seed=seed, kind="gated_delta")

    @classmethod
    def wrap(
        cls,
        states: Sequence[LayerT],
        *,
        windows: Sequence[Tensor] | None = None,
        drafts: int = 0,
        rings: Sequence[AnyRing] | None = None,
        null: int = -1,
        seed: int | None = None,
    ) -> StatePool[LayerT]:
        """A pool over states that the caller allocated, one per layer: the pages of a server's cache, say.

        states: State or Mamba3State, equally many slots on one device; formats may differ. Layers that have a seed
            share one tensor. Their streams stay as they are; layers of one stream draw equal random bits. No tensors
            share memory, but they may take turns in pages of one size.
        windows: of the convolutions, one per layer, as `conv1d_step` takes them; None: no windows.
        drafts: the last entries of each window that are for tokens which can be rolled back.
        rings: one per layer, a Ring for `mamba2_replay` or a DeltaRing for `gated_delta_replay`, which share start,
            count, window and length; None: no rings.

        The caller holds every slot at first, with whatever is in it; `release` hands slots to the pool.
        """
        check_layers(states, windows, drafts, rings)
        return cls(states, windows or (), drafts, rings or (), null=null, seed=seed, kind="wrapped")

    def __repr__(self) -> str:
        layers = Counter(state.layout for state in self._states)
        parts = [self._kind, counted(self.slots, "slot"), f"{self.free} free"]
        parts += [f"{counted(n, 'layer')} of {layout}" for layout, n in layers.items()]
        parts += ["windows"] * self.has_windows + ["rings"] * self.has_rings
        return f"StatePool({', '.join(parts)}, {bytes_text(self.bytes_per_slot)} per slot, {self._device})"

    @property
    def free(self) -> int:
        """How many slots can be acquired."""
        return len(self._holding.free)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of memory one slot takes: states, scales, windows and rings of all layers, and its seed."""
        return self._parts.offsets[-1]

    @property
    def has_windows(self) -> bool:
        """Whether it has windows of convolutions."""
        return len(self._windows) > 0

    @property
    def has_rings(self) -> bool:
        """Whether it has rings for replay."""
        return len(self._rings) > 0  # torch.compile cannot take a tuple for a truth value

    def layer(self, i: int) -> LayerT:
        """The state of layer i, for ops, a Mamba3State where it is of Mamba-3; the same object every time."""
        if not isinstance(i, int) or isinstance(i, bool):
            raise TypeError(f"layer must be an int, got {i!r}")
        if not 0 <= i < self.layers:
            raise IndexError(f"layer must be from 0 to {self.layers - 1}, got {i}")
        return self._states[i]

    def window(self, i: int) -> Tensor:
        """The window of the convolution of layer i, for `conv1d_step`: (slots, channels, length)."""
        self.layer(i)  # which raises if there is none
        if not self.has_windows:
            raise ValueError("this pool has no windows: it was made without conv_channels")
        return self._windows[i]

    def ring(self, i: int) -> Any:
        """The ring of layer i: a Ring for `mamba2_replay`, a DeltaRing for `gated_delta_replay`; the same object every
        time."""
        self.layer(i)
        if not self.has_rings:
            raise ValueError("this pool has no rings: it was made without a window")
        return self._rings[i]

    def plan(self, slots: Slots | SlotNumbers | None = None, tokens: int | None = None) -> Plan:
        """Which rows of a batch fold their rings in this step of the model: for replay in all layers, and then for
        `commit`.

        slots: where the rows live; None: row b is slot b. With cu_seqlens, and then max_len, tokens are packed.
        tokens: per row and call; of packed tokens left out.
        """
        return plan_of(self.ring(0), self._where(slots), tokens, self._generation)

    def commit(self, plan: Plan, accepted: Tensor | None = None) -> None:
        """Keep the first `accepted` tokens, (batch,), of every row of the step that was planned, in all layers; None:
        all. Exactly once per step, after all layers. A row that folded drops what it folded. Slots that `acquire`,
        `reset`, `copy`, `load` or `write` gave other contents since the plan are left alone."""
        self.ring(0).commit(plan, accepted)

    def folded(self, slots: Slots | SlotNumbers | None = None, tokens: Tensor | int | None = None) -> None:
        """Drop the live tokens that `mamba2_fold` or `gated_delta_fold` folded in place in all layers; slots and tokens
        as these had them."""
        self.ring(0).folded(self._where(slots), tokens)

    def acquire(self, n: int = 1, seed: Seeds = None, dtype: torch.dtype = torch.int32) -> Tensor:
        """n free slots, which are held from now on: (n,) on the pool's device, their states zero.

        Those released last come first, then those never used, from 0 on. `seed` is one for all or one each; None: drawn
        by the pool. `dtype`: of the numbers, int32 or int64. RuntimeError if fewer than n are free: `resized` gives a
        larger pool.
        """
        check_int("n", n, 0, LARGEST_INT32)
        check_dtype("dtype", dtype, INDEX_DTYPES)
        if n > self.free:
            grow = "wrap a pool over more memory" if self._wrapped else "resized(slots) gives a pool with more"
            raise RuntimeError(f"acquire needs {n} free slots, but only {self.free} of {self.slots} are free; {grow}")
        slots = self._holding.next(n)
        index = uploaded(slots, self._device, dtype)
        self._clear(index, seed, on_host=True)
        self._holding.hold(slots)
        return index

    def release(self, slots: SlotNumbers) -> None:
        """Give slots back. Their memory is left as it is: `acquire` clears what it hands out."""
        self._holding.release(slots)

    def reset(self, slots: SlotNumbers, seed: Seeds = None) -> None:
        """Make slots as `acquire` hands them out: states and windows zero, rings empty, scales of 1, seeds new.

        `seed` is one for all or one each; None: drawn by the pool, of slots on the device in a sequence of their own,
        which a CUDA graph continues at every replay.
        """
        index = self._holding.on_device("slots", slots, unique=True)
        self._clear(index, seed, self._holding.on_host(slots))

    def write(self, i: int, slots: SlotNumbers, states: Tensor) -> None:
        """Store states that something else computed, a prefill say, in layer i: rounded as the layer's are. Of a layer
        of Mamba-3 these are the ssm states; `write_kv` stores the others.

        states: (slots, heads, rows, cols) float32, bfloat16 or float16, of any strides.

        Stochastic rounding draws the bits of token -1, so no token of a step that follows has the same. Rings of
        these slots, if there are any, are empty afterwards, in all layers.
        """
        state, index = ssm_of(self.layer(i)), self._holding.on_device("slots", slots, unique=True)
        count = self._rings[i].count if self.has_rings else None  # the state is now that after all tokens there were
        write_states(state, index, states, self.null, count)
        self._renew(index)

    @torch.no_grad()
    def write_window(self, i: int, slots: SlotNumbers, windows: Tensor) -> None:
        """Store the last inputs of something else, a prefill say, in the window of layer i, as they are.

        windows: (slots, channels, n) in the dtype of the window, newest last, any strides; n may be less than a window
            holds, as after a short prompt: there were no inputs before. With `drafts` the next call has accepted = 0.
        """
        window, index = self.window(i), self._holding.on_device("slots", slots, unique=True)
        values = with_history(window, windows, self.drafts, len(index))
        moving.store(self._parts, index, self.null, f"windows[{i}]", [values])

    @torch.no_grad()
    def write_kv(self, i: int, slots: SlotNumbers, k: Tensor, v: Tensor, angle: Tensor | None = None) -> None:
        """Store what something else left beside the states, a prefill say, in layer i, which is of Mamba-3.

        k: (slots, R, H, N), v: (slots, H, D): float32, bfloat16 or float16, any strides; rounded to nearest.
        angle: (slots, H, S) float32, any strides, stored in [0, 2π); given exactly if the layer has angles.
        """
        layer = self.layer(i)
        if not isinstance(layer, Mamba3State):
            raise ValueError(f"write_kv is for layers of Mamba-3, which layer {i} is not")
        index = self._holding.on_device("slots", slots, unique=True)
        values = as_kept(layer, len(index), k, v, angle)
        moving.store(self._parts, index, self.null, f"states[{i}].k", values)

    def read(self, i: int, slots: SlotNumbers) -> Tensor:
        """The states that `write` stores in layer i: (slots, heads, rows, cols) float32, zero where a number on the
        device names no slot. Slots may repeat. With rings these are the checkpoints; `mamba2_fold` and
        `gated_delta_fold` give states after live tokens."""
        return read_states(ssm_of(self.layer(i)), self._holding.on_device("slots", slots), self.null)

    def copy(self, src: SlotNumbers, dst: SlotNumbers, keep_seed: bool = False) -> None:
        """Make the requests in `dst` clones of those in `src`, in all layers, with new seeds unless `keep_seed`.

        A slot may be copied several times, and may be copied to: everything is read before it is overwritten. Where
        either number names no slot, nothing is copied.
        """
        check_flag("keep_seed", keep_seed)
        sources = self._holding.on_device("src", src)
        targets = self._holding.on_device("dst", dst, unique=True)
        if len(sources) != len(targets):
            raise ValueError(f"dst must have as many slots as src, {len(sources)}, got {len(targets)}")
        if keep_seed or self._seed is None:
            moving.copy(self._parts, sources, targets, self.null)
        else:
            seeds = self._holding.seeds(None, len(targets), self._holding.on_host(dst))
            moving.copy(self._parts, sources, targets, self.null, self._seed, seeds)
        self._renew(targets, sources)

    def export(self, slots: SlotNumbers) -> dict[str, Any]:
        """The exact bytes of requests, in all layers: for host offload, preemption, or another process that decodes.

        Returns "version", 1; "layout", what the bytes mean, in plain types; and "bytes", (slots, bytes per slot) uint8
        on the pool's device, zeros where a number on the device names no slot. State, scale, window, ring, cursors and
        seed are in it; streams are not. `torch.save` takes it, and `torch.load` with `weights_only`.
        """
        packed = moving.gather(self._parts, self._holding.on_device("slots", slots), self.null)
        return {"version": VERSION, "layout": layout_of(self._parts, self.drafts, self._rings), "bytes": packed}

    def load(self, slots: SlotNumbers, exported: Mapping[str, Any]) -> None:
        """Make slots the requests that `export` gave, of this pool or of another whose slots keep the same: other
        numbers of slots, pages, orders of axes and devices are fine. Streams should be the same, or the bits of
        stochastic rounding are others. The bytes are stored as they are: take them from where you trust."""
        index = self._holding.on_device("slots", slots, unique=True)
        layout = layout_of(self._parts, self.drafts, self._rings)
        packed = bytes_for(self._parts, layout, exported, len(index))
        moving.scatter(self._parts, index, packed, self.null)
        self._renew(index)

    def resized(self, slots: int) -> StatePool[LayerT]:
        """A new pool of so many slots, more or fewer, with every request that is held under its number: all that it
        keeps, seeds too. This pool stays as it is, and what both draw later differs. ValueError if a slot that is held
        would not be in it, or if the memory is the caller's: then wrap a pool over more."""
        check_int("slots", slots, 1, LARGEST_INT32)
        if self._wrapped:
            raise ValueError("resized is not for a wrapped pool: its memory is the caller's, who wraps another")
        holding = self._holding.resized(slots)
        states, windows, rings = resized_layers(self._parts, self._states, self._windows, self._rings, slots)
        return type(self)(
            states, windows, self.drafts, rings, null=self.null, seed=None, kind=self._kind, holding=holding
        )

    def advance(self, slots: Slots | SlotNumbers | None = None) -> None:
        """Move the seeds of the read slots on (None: of all slots), so that the next step draws new random bits.

        Call it once per model step, after all layers: it is one small launch, and a CUDA graph captures it. `slots` is
        what the ops got: of a row with n slots to read all n move on, so that a request whose slots got equal seeds is
        reproducible from that seed. Without seeds it does nothing.
        """
        where = as_slots(self._where(slots))
        if self._seed is not None:
            advance_seeds(self._seed, where)

    def _renew(self, index: Tensor, sources: Tensor | None = None) -> None:
        """Let `commit` of earlier plans leave these slots alone; with `sources`, only slots whose source is a slot."""
        if self._generation is not None:
            settle(self._rings[0].count, index)
            renew(self._generation, index, self.null, sources)

    def _where(self, slots: Slots | SlotNumbers | None) -> Slots | Tensor | None:
        """Return slots as ops take them; slots given as numbers of the host must be held and distinct."""
        if slots is None or isinstance(slots, (Slots, Tensor)):
            return slots
        return self._holding.on_device("slots", slots, unique=True)

    def _clear(self, index: Tensor, seed: Seeds, on_host: bool) -> None:
        """Clear slots and give them seeds, if the pool has some."""
        self._renew(index)
        if self._seed is not None:
            seeds = self._holding.seeds(seed, len(index), on_host)
            moving.clear(self._parts, index, self.null, self._seed, seeds)
            return
        if seed is not None:
            self._holding.seeds(seed, len(index), on_host)  # which raises if they are none
        moving.clear(self._parts, index, self.null)
