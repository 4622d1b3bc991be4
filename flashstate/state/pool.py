"""StatePool: the states of all layers of a model, handed out to requests slot by slot."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from flashstate.errors import INDEX_DTYPES, check_flag, check_int, check_tensor, dtype_name
from flashstate.launch import uses_kernels
from flashstate.launch.arguments import as_bytes
from flashstate.ops.pool import read_states, write_states
from flashstate.ops.seeds import advance_seeds
from flashstate.state.formats import FORMATS
from flashstate.state.slots import Slots, as_slots
from flashstate.state.state import POOL_AXES, State

INT64 = (-(1 << 63), (1 << 63) - 1)
SlotNumbers = int | Sequence[int] | Tensor


class StatePool:
    """What a model keeps per request: a slot in the state of every layer, and one seed. Who has which slot, it knows.

    Made by `StatePool.mamba2` or `StatePool.gated_delta`, which allocate, or by `StatePool.wrap` over states there are.

    slots, layers: how many it has.
    null: the slot number that means "no request", as in Slots; no request gets a slot of that number.

    Which slots are held is known on the host: what `release`, `reset`, `write`, `read` and `copy` take is an int, a
    sequence of ints or an integer tensor, and a tensor on a GPU makes the host wait for it. Otherwise nothing here
    waits. All of them are for slots that are held, and raise before anything changes. What they do on a device is
    queued on the current stream; only `advance` can be captured in a CUDA graph.

    A pool that rounds to nearest allocates no seeds, and code that serves it need not know: `advance` does nothing
    then, and seeds that are given are checked and not used.
    """

    def __init__(
        self, states: Sequence[State], memory: list[tuple[Tensor, int]], *, held: bool, null: int, seed: int | None
    ) -> None:
        """`memory`: tensors with the slots on their first axis, and what fills them in a slot that is reset."""
        check_int("null", null, *INT64)
        self.null = null
        self.slots = states[0].data.shape[0]
        self.layers = len(states)
        self._states = tuple(states)
        self._memory = memory
        self._seed = next((state.seed for state in states if state.seed is not None), None)
        self._device = states[0].data.device
        self._generator = _generator(seed)
        usable = [slot for slot in range(self.slots) if slot != null]
        self._held = set(usable) if held else set()
        self._free = [] if held else usable[::-1]  # the last is the next to be acquired

    @classmethod
    def mamba2(
        cls,
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
    ) -> StatePool:
        """A pool for `mamba2_step`; every slot is free.

        heads, rows, cols: the shape of a layer's state in a slot.
        dtype, rounding, rounds: the format of all layers, as in State.
        stream: of layer 0; layer i has stream + i. Tensor-parallel ranks take streams that are `layers` apart.
        seed: what the seeds of requests are drawn from; None: entropy.
        """
        sizes = {"heads": heads, "rows": rows, "cols": cols}
        return cls._allocate(slots, layers, sizes, dtype, rounding, rounds, stream, seed, null, device)

    @classmethod
    def gated_delta(
        cls,
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
    ) -> StatePool:
        """A pool for the gated delta rule, whose states are (value heads, value_dim, key_dim); the rest as `mamba2`."""
        sizes = {"heads": heads, "value_dim": value_dim, "key_dim": key_dim}
        return cls._allocate(slots, layers, sizes, dtype, rounding, rounds, stream, seed, null, device)

    @classmethod
    def _allocate(
        cls,
        slots: int,
        layers: int,
        sizes: dict[str, int],
        dtype: torch.dtype,
        rounding: str,
        rounds: int,
        stream: int,
        seed: int | None,
        null: int,
        device: torch.device | str | None,
    ) -> StatePool:
        for name, size in {"slots": slots, "layers": layers, **sizes}.items():
            check_int(name, size, 1, (1 << 31) - 1)
        check_int("stream", stream, 0, (1 << 32) - layers)
        if dtype not in FORMATS:
            got = dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
            raise TypeError(f"dtype must be {' or '.join(f.name for f in FORMATS.values())}, got {got}")
        shape = (layers, slots, *sizes.values())
        with torch.inference_mode(False):  # else only inference mode could change them
            data = torch.zeros(shape, dtype=dtype, device=device)
            uses_kernels(data.device)  # refuses devices that no op runs on
            scale = torch.ones(shape[:-1], device=device) if FORMATS[dtype].scaled else None
            seeds = None if rounding == "nearest" else torch.zeros(slots, dtype=torch.int64, device=device)
            memory = [(as_bytes(data).transpose(0, 1), 0)]
            if scale is not None:
                memory.append((scale.transpose(0, 1), 1))
            states = [
                State(data[i], None if scale is None else scale[i],
                      rounding=rounding, rounds=rounds, seed=seeds, stream=stream + i)
                for i in range(layers)
            ]  # fmt: skip
        return cls(states, memory, held=False, null=null, seed=seed)

    @classmethod
    def wrap(cls, states: Sequence[State], *, null: int = -1, seed: int | None = None) -> StatePool:
        """A pool over states that the caller allocated, one per layer: the pages of a server's cache, say.

        states: equally many slots on one device; formats may differ. Layers that have a seed share one tensor. Their
            streams stay as they are; layers of one stream draw equal random bits.

        The caller holds every slot at first, with whatever is in it; `release` hands slots to the pool.
        """
        _check_states(states)
        memory = [(as_bytes(state.data), 0) for state in states]
        memory += [(state.scale, 1) for state in states if state.scale is not None]
        return cls(states, memory, held=True, null=null, seed=seed)

    @property
    def free(self) -> int:
        """How many slots can be acquired."""
        return len(self._free)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of memory one slot takes: the states and scales of all layers, and its seed, where they have them."""
        seed = 0 if self._seed is None else self._seed.element_size()
        return sum(tensor[0].nbytes for tensor, _ in self._memory) + seed

    def layer(self, i: int) -> State:
        """The state of layer i, for ops; the same object every time."""
        if not isinstance(i, int) or isinstance(i, bool):
            raise TypeError(f"layer must be an int, got {i!r}")
        if not 0 <= i < self.layers:
            raise IndexError(f"layer must be from 0 to {self.layers - 1}, got {i}")
        return self._states[i]

    def acquire(self, n: int = 1, seed: int | Sequence[int] | Tensor | None = None) -> Tensor:
        """n free slots, which are held from now on: (n,) int64 on the pool's device, their states zero.

        Those released last come first, then those never used, from 0 on. `seed` is one for all or one each; None: drawn
        by the pool. RuntimeError if fewer than n are free.
        """
        check_int("n", n, 0, (1 << 31) - 1)
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
        """Make slots as `acquire` hands them out: zero states, scales of 1, and seeds that are new or given."""
        numbers = self._check_held("slots", slots, unique=True)
        self._reset(numbers, self._seeds(seed, len(numbers)))

    def write(self, i: int, slots: SlotNumbers, states: Tensor) -> None:
        """Store states that something else computed, a prefill say, in layer i: rounded as the layer's are.

        states: (slots, heads, rows, cols) float32, bfloat16 or float16; all axes but the last may have any stride.

        Stochastic rounding draws the bits of token -1, so no token of a step that follows has the same.
        """
        state, numbers = self.layer(i), self._check_held("slots", slots, unique=True)
        write_states(state, self._on_device(numbers), states)

    def read(self, i: int, slots: SlotNumbers) -> Tensor:
        """The states of layer i in these slots, which may repeat: (slots, heads, rows, cols) float32."""
        state, numbers = self.layer(i), self._check_held("slots", slots)
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
            _copy_slots(tensor, sources, targets)
        if self._seed is not None and keep_seed:
            _copy_slots(self._seed, sources, targets)
        elif self._seed is not None:
            _put(self._seed, targets, self._on_device(self._seeds(None, len(targets))).unbind())

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
            _put(self._seed, slots, self._on_device(seeds).unbind())
        return index

    def _seeds(self, seed: int | Sequence[int] | Tensor | None, n: int) -> Tensor:
        """A seed for each of n slots, (n,) int64: as given, or drawn."""
        if seed is None:
            return torch.empty(n, dtype=torch.int64, device="cpu").random_(INT64[0], None, generator=self._generator)
        if isinstance(seed, Tensor):
            on_host = seed.device.type == "cpu"
            check_tensor("seed", seed, ("slots",), (n,), dtypes=INDEX_DTYPES, device=None if on_host else self._device)
            return seed.to(torch.int64, copy=True)  # the upload of a pinned tensor would see later changes
        seeds = _as_numbers("seed", seed)
        for number in seeds:
            check_int("seed", number, *INT64)
        if isinstance(seed, int):
            seeds *= n
        if len(seeds) != n:
            raise ValueError(f"seed must be one int, or one for each of {n} slots, got {len(seeds)}")
        return torch.tensor(seeds, dtype=torch.int64, device="cpu")

    def _check_held(self, name: str, slots: SlotNumbers, unique: bool = False) -> list[int]:
        """The slot numbers, if all are held."""
        numbers = _as_numbers(name, slots)
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


def _generator(seed: int | None) -> torch.Generator:
    """A generator on the host, from `seed` or from entropy."""
    generator = torch.Generator("cpu")
    if seed is None:
        generator.seed()
        return generator
    check_int("seed", seed, *INT64)
    return generator.manual_seed(seed)


def _as_numbers(name: str, numbers: SlotNumbers) -> list[int]:
    """What methods accept as numbers of slots, as a list; a tensor on a GPU is waited for."""
    if isinstance(numbers, Tensor):
        numbers = numbers[None] if numbers.dim() == 0 else numbers  # what a loop over acquired slots gives
        check_tensor(name, numbers, ("slots",), (None,), dtypes=INDEX_DTYPES)
        return numbers.tolist()
    if isinstance(numbers, Sequence) and not isinstance(numbers, (str, bytes)):
        return list(numbers)
    if isinstance(numbers, int):
        return [numbers]
    raise TypeError(f"{name} must be an int, a sequence of ints or an integer tensor, got {type(numbers).__name__}")


def _check_states(states: Sequence[State]) -> None:
    """Raise unless these can be the layers of one pool."""
    if not isinstance(states, Sequence):
        raise TypeError(f"states must be a sequence of States, got {type(states).__name__}")
    if not states:
        raise ValueError("states must have one State per layer, got none")
    for i, state in enumerate(states):
        name = f"states[{i}]"
        if not isinstance(state, State):
            raise TypeError(f"{name} must be a State, got {type(state).__name__}")
        first = states[0].data
        check_tensor(f"{name}.data", state.data, POOL_AXES, (first.shape[0], None, None, None), dtypes=tuple(FORMATS))
        uses_kernels(state.data.device)  # refuses devices that no op runs on
        if state.data.device != first.device:
            raise ValueError(f"{name} is on {state.data.device}, but states[0] is on {first.device}")
        for other in states[:i]:
            for a, b in itertools.product(_slotted(state), _slotted(other)):
                if _share_memory(a, b):
                    raise ValueError(f"{name} must not share the memory of another layer")
    seeds = {state.seed.data_ptr() for state in states if state.seed is not None}
    if len(seeds) > 1:
        raise ValueError(f"states must share one seed tensor, from which all layers draw, got {len(seeds)}")


def _slotted(state: State) -> list[Tensor]:
    """What a state keeps for every slot of its layer alone."""
    return [state.data] if state.scale is None else [state.data, state.scale]


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether slots of two tensors overlap. Where they take turns, as in pages, they must have pages of one size, and
    are told apart by their places in a page."""
    (first, end, page, size), (other, other_end, other_page, other_size) = _place_of(a), _place_of(b)
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or end <= other or other_end <= first:
        return False
    return page != other_page or (other - first) % page < size or (first - other) % page < other_size


def _place_of(tensor: Tensor) -> tuple[int, int, int, int]:
    """In bytes of its storage: where a tensor starts and ends, from slot to slot, and how long a slot is."""
    width = tensor.element_size()
    first, page, size = int(tensor.storage_offset()) * width, tensor.stride(0) * width, tensor[0].numel() * width
    return first, first + (len(tensor) - 1) * page + size, max(page, 1), size


def _copy_slots(tensor: Tensor, sources: list[int], targets: list[int]) -> None:
    """Copy slots of a tensor that has them on its first axis; those that are also overwritten are read before."""
    _put(tensor, targets, [tensor[slot].clone() if slot in targets else tensor[slot] for slot in sources])


def _put(tensor: Tensor, slots: list[int], values: Sequence[Tensor]) -> None:
    """One launch per slot. Where deterministic algorithms are asked for, indexed assignment copies the whole of a
    strided tensor, and in some versions of torch it waits for the device."""
    for slot, value in zip(slots, values, strict=True):
        tensor[slot].copy_(value)
