"""StatePool: the states of all layers of a model, handed out to requests slot by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

import torch
from torch import Tensor

from flashstate.errors import INDEX_DTYPES, INT64, LARGEST_INT32, check_flag, check_int, check_tensor
from flashstate.ops.seeds import advance_seeds
from flashstate.ops.states import read_states, write_states
from flashstate.pool.layers import LayerT, as_kept, memory_of, ssm_of, with_history
from flashstate.pool.memory import Allocator, Memory, SlotNumbers, as_numbers, copy_slots, put
from flashstate.state.mamba3 import Mamba3State
from flashstate.state.ring import Plan, Ring
from flashstate.state.slots import Slots, as_slots
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

    Which slots are held is known on the host: what `release`, `reset`, `copy`, `read` and all that write take is an
    int, a sequence of ints or an integer tensor, and a tensor on a GPU makes the host wait for it. Otherwise nothing
    here waits. All of them are for slots that are held, and raise before anything changes. What they do on a device is
    queued on the current stream; only `advance`, `plan`, `commit` and `folded` can be captured in a CUDA graph.

    A pool that rounds to nearest allocates no seeds, and code that serves it need not know: `advance` does nothing
    then, and seeds that are given are checked and not used.
    """

    def __init__(
        self,
        states: Sequence[LayerT],
        memory: Memory,
        windows: Sequence[Tensor] = (),
        drafts: int = 0,
        rings: Sequence[Ring] = (),
        *,
        null: int,
        seed: int | None,
        held: bool = False,
    ) -> None:
        """`windows`: one per layer, or none, with room for `drafts`; `rings`: the same. `memory`: of all of them."""
        check_int("null", null, *INT64)
        self.null = null
        ssm = [ssm_of(state) for state in states]
        self.slots = ssm[0].data.shape[0]
        self.layers = len(states)
        self._states = tuple(states)
        self._windows = tuple(windows)
        self._rings = tuple(rings)
        self.drafts = drafts
        self._memory = memory
        self._seed = next((state.seed for state in ssm if state.seed is not None), None)
        self._device = ssm[0].data.device
        self._generator = torch.Generator("cpu")
        if seed is None:
            self._generator.seed()  # from entropy
        else:
            check_int("seed", seed, *INT64)
            self._generator.manual_seed(seed)
        usable = [slot for slot in range(self.slots) if slot != null]
        self._held = set(usable) if held else set()
        self._free = [] if held else usable[::-1]  # the last is the next to be acquired

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
        groups: int = 1,
        ring_dtype: torch.dtype = torch.bfloat16,
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
        groups, ring_dtype: of B, and the dtype of x and B, in a ring.
        """
        allocate = Allocator(layers, slots, device)
        states = allocate.states({"heads": heads, "rows": rows, "cols": cols}, dtype, rounding, rounds, stream)
        rings = allocate.rings(states, window, tokens, groups, ring_dtype)
        windows = allocate.windows(conv_channels, conv_width, drafts, conv_dtype)
        return cls(states, allocate.memory, windows, drafts, rings, null=null, seed=seed)

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
        return cls(allocate.mamba3(states, rank, angles, kv_dtype), allocate.memory, null=null, seed=seed)

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
    ) -> StatePool[State]:
        """A pool for the gated delta rule, whose states are (value heads, value_dim, key_dim); the rest as `mamba2`."""
        sizes = {"heads": heads, "value_dim": value_dim, "key_dim": key_dim}
        allocate = Allocator(layers, slots, device)
        states = allocate.states(sizes, dtype, rounding, rounds, stream)
        windows = allocate.windows(conv_channels, conv_width, drafts, conv_dtype)
        return cls(states, allocate.memory, windows, drafts, null=null, seed=seed)

    @classmethod
    def wrap(
        cls,
        states: Sequence[LayerT],
        *,
        windows: Sequence[Tensor] | None = None,
        drafts: int = 0,
        rings: Sequence[Ring] | None = None,
        null: int = -1,
        seed: int | None = None,
    ) -> StatePool[LayerT]:
        """A pool over states that the caller allocated, one per layer: the pages of a server's cache, say.

        states: State or Mamba3State, equally many slots on one device; formats may differ. Layers that have a seed
            share one tensor. Their streams stay as they are; layers of one stream draw equal random bits. No tensors
            share memory, but they may take turns in pages of one size.
        windows: of the convolutions, one per layer, as `conv1d_step` takes them; None: no windows.
        drafts: the last entries of each window that are for tokens which can be rolled back.
        rings: for `mamba2_replay`, one per layer, which share start, count, window and length; None: no rings.

        The caller holds every slot at first, with whatever is in it; `release` hands slots to the pool.
        """
        memory = memory_of(states, windows, drafts, rings)
        return cls(states, memory, windows or (), drafts, rings or (), null=null, seed=seed, held=True)

    @property
    def free(self) -> int:
        """How many slots can be acquired."""
        return len(self._free)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of memory one slot takes: states, scales, windows and rings of all layers, and its seed."""
        seed = 0 if self._seed is None else self._seed.element_size()
        return sum(tensor[0].nbytes for tensor, _ in self._memory) + seed

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

    def ring(self, i: int) -> Ring:
        """The ring of layer i, for `mamba2_replay`; the same object every time."""
        self.layer(i)
        if not self.has_rings:
            raise ValueError("this pool has no rings: it was made without a window")
        return self._rings[i]

    def plan(self, slots: Slots | Tensor | None = None, tokens: int | None = None) -> Plan:
        """Which rows of a batch fold their rings in this step of the model: for `mamba2_replay` of all layers, and then
        for `commit`. Slots and tokens are as Ring.plan has them."""
        return self.ring(0).plan(slots, tokens)

    def commit(self, plan: Plan, accepted: Tensor | None = None) -> None:
        """Keep the first `accepted` tokens, (batch,), of every row of the step that was planned, in all layers; None:
        all. Exactly once per step, after all layers, as Ring.commit says."""
        self.ring(0).commit(plan, accepted)

    def folded(self, slots: Slots | Tensor | None = None, tokens: Tensor | int | None = None) -> None:
        """Drop the live tokens that `mamba2_fold` folded in place in all layers; slots and tokens as it had them."""
        self.ring(0).folded(slots, tokens)

    def acquire(self, n: int = 1, seed: int | Sequence[int] | Tensor | None = None) -> Tensor:
        """n free slots, which are held from now on: (n,) int64 on the pool's device, their states zero.

        Those released last come first, then those never used, from 0 on. `seed` is one for all or one each; None: drawn
        by the pool. RuntimeError if fewer than n are free.
        """
        check_int("n", n, 0, LARGEST_INT32)
        if n > self.free:
            raise RuntimeError(f"acquire needs {n} free slots, but only {self.free} of {self.slots} are free")
        slots = self._free[: -n - 1 : -1]
        index = self._reset(slots, self._seeds(seed, n))
        del self._free[self.free - n :]
        self._held.update(slots)
        return index

    def release(self, slots: SlotNumbers) -> None:
        """Give slots back. Their memory is left as it is: `acquire` clears what it hands out."""
        numbers = self._check_held("slots", slots, unique=True)
        self._held.difference_update(numbers)
        self._free += numbers[::-1]

    def reset(self, slots: SlotNumbers, seed: int | Sequence[int] | Tensor | None = None) -> None:
        """Make slots as `acquire` hands them out: states and windows zero, rings empty, scales of 1, seeds new."""
        numbers = self._check_held("slots", slots, unique=True)
        self._reset(numbers, self._seeds(seed, len(numbers)))

    def write(self, i: int, slots: SlotNumbers, states: Tensor) -> None:
        """Store states that something else computed, a prefill say, in layer i: rounded as the layer's are. Of a layer
        of Mamba-3 these are the ssm states; `write_kv` stores the others.

        states: (slots, heads, rows, cols) float32, bfloat16 or float16; all axes but the last may have any stride.

        Stochastic rounding draws the bits of token -1, so no token of a step that follows has the same. Rings of
        these slots, if there are any, are empty afterwards, in all layers.
        """
        state, numbers = ssm_of(self.layer(i)), self._check_held("slots", slots, unique=True)
        index = self._on_device(numbers)
        write_states(state, index, states)
        if self.has_rings:  # the state is now that after all tokens there were
            self._rings[i].count.index_fill_(0, index, 0)

    @torch.no_grad()
    def write_window(self, i: int, slots: SlotNumbers, windows: Tensor) -> None:
        """Store the last inputs of something else, a prefill say, in the window of layer i, as they are.

        windows: (slots, channels, n) in the dtype of the window, newest last, any strides; n may be less than a window
            holds, as after a short prompt: there were no inputs before. With `drafts` the next call has accepted = 0.
        """
        window, numbers = self.window(i), self._check_held("slots", slots, unique=True)
        put(window, numbers, with_history(window, windows, self.drafts, len(numbers)).unbind())

    @torch.no_grad()
    def write_kv(self, i: int, slots: SlotNumbers, k: Tensor, v: Tensor, angle: Tensor | None = None) -> None:
        """Store what something else left beside the states, a prefill say, in layer i, which is of Mamba-3.

        k: (slots, R, H, N), v: (slots, H, D): float32, bfloat16 or float16, any strides; rounded to nearest.
        angle: (slots, H, S) float32, any strides, stored in [0, 2π); given exactly if the layer has angles.
        """
        layer = self.layer(i)
        if not isinstance(layer, Mamba3State):
            raise ValueError(f"write_kv is for layers of Mamba-3, which layer {i} is not")
        numbers = self._check_held("slots", slots, unique=True)
        for tensor, values in as_kept(layer, len(numbers), k, v, angle):
            put(tensor, numbers, values.unbind())

    def read(self, i: int, slots: SlotNumbers) -> Tensor:
        """The states that `write` stores in layer i: (slots, heads, rows, cols) float32. Slots may repeat. With
        rings these are the checkpoints; `mamba2_fold` gives states after live tokens."""
        state, numbers = ssm_of(self.layer(i)), self._check_held("slots", slots)
        return read_states(state, self._on_device(numbers))

    @torch.no_grad()
    def copy(self, src: SlotNumbers, dst: SlotNumbers, keep_seed: bool = False) -> None:
        """Make the requests in `dst` clones of those in `src`, in all layers, with new seeds unless `keep_seed`.

        A slot may be copied several times, and may be copied to: everything is read before it is overwritten.
        """
        check_flag("keep_seed", keep_seed)
        sources, targets = self._check_held("src", src), self._check_held("dst", dst, unique=True)
        if len(sources) != len(targets):
            raise ValueError(f"dst must have as many slots as src, {len(sources)}, got {len(targets)}")
        for tensor, _ in self._memory:
            copy_slots(tensor, sources, targets)
        if self._seed is not None and keep_seed:
            copy_slots(self._seed, sources, targets)
        elif self._seed is not None:
            put(self._seed, targets, self._on_device(self._seeds(None, len(targets))).unbind())

    def advance(self, slots: Slots | Tensor | None = None) -> None:
        """Move the seeds of the read slots on (None: of all slots), so that the next step draws new random bits.

        Call it once per model step, after all layers: it is one small launch, and a CUDA graph captures it. `slots` is
        what the ops got: of a row with n slots to read all n move on, so that a request whose slots got equal seeds is
        reproducible from that seed. Without seeds it does nothing.
        """
        where = as_slots(slots)
        if self._seed is not None:
            advance_seeds(self._seed, where)

    @torch.no_grad()
    def _reset(self, slots: list[int], seeds: Tensor) -> Tensor:
        """Clear slots and give them these seeds; returns their numbers as a tensor on the device."""
        index = self._on_device(slots)
        for tensor, value in self._memory:
            tensor.index_fill_(0, index, value)
        if self._seed is not None:
            put(self._seed, slots, self._on_device(seeds).unbind())
        return index

    def _seeds(self, seed: int | Sequence[int] | Tensor | None, n: int) -> Tensor:
        """A seed for each of n slots, (n,) int64: as given, or drawn."""
        if seed is None:
            return torch.empty(n, dtype=torch.int64, device="cpu").random_(INT64[0], None, generator=self._generator)
        if isinstance(seed, Tensor):
            on_host = seed.device.type == "cpu"
            check_tensor("seed", seed, ("slots",), (n,), dtypes=INDEX_DTYPES, device=None if on_host else self._device)
            return seed.to(torch.int64, copy=True)  # the upload of a pinned tensor would see later changes
        seeds = as_numbers("seed", seed)
        for number in seeds:
            check_int("seed", number, *INT64)
        if isinstance(seed, int):
            seeds *= n
        if len(seeds) != n:
            raise ValueError(f"seed must be one int, or one for each of {n} slots, got {len(seeds)}")
        return torch.tensor(seeds, dtype=torch.int64, device="cpu")

    def _check_held(self, name: str, slots: SlotNumbers, unique: bool = False) -> list[int]:
        """The slot numbers, if all are held."""
        numbers = as_numbers(name, slots)
        for slot in numbers:
            check_int(name, slot, 0, self.slots - 1)
            if slot not in self._held:
                why = "the null slot" if slot == self.null else "free"
                raise ValueError(f"{name} must be held, but slot {slot} is {why}")
        if unique and len(set(numbers)) < len(numbers):
            twice = next(slot for slot in numbers if numbers.count(slot) > 1)
            raise ValueError(f"{name} must be distinct, got slot {twice} more than once")
        return numbers

    def _on_device(self, numbers: list[int] | Tensor) -> Tensor:
        """Whole numbers as int64 on the pool's device; the host does not wait."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a pool hands out slots on the host, which a CUDA graph cannot capture")
        with torch.inference_mode(False):  # else only inference mode could change what acquire returns
            host = torch.tensor(numbers, dtype=torch.int64, device="cpu") if isinstance(numbers, list) else numbers
            if host.device == self._device:
                return host
            return host.pin_memory().to(self._device, non_blocking=True)
