"""StatePool: requests that come and go in any order have what they would have on their own, whatever a pool keeps."""

import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, NamedTuple

import pools
import pytest
import torch
from pools import bytes_of, dirty, gaps_are_poison, kept_by, poison, seed_of
from torch import Tensor

import flashstate
from flashstate import Mamba3State, Slots, StatePool
from flashstate.pool.layers import ssm_of
from flashstate.state.formats import PORTABLE_FORMATS, bits_of, decode, encode
from flashstate.state.rounding import SEED_STEP, random_bits

NULL, FLOATS = 5, (torch.float32, torch.float16, torch.bfloat16)
WINDOWS = {"conv_channels": 7, "drafts": 2, "conv_dtype": torch.float32}
KINDS: dict[str, Callable[..., StatePool[Any]]] = {
    "states": partial(pools.make_pool, cols=130),
    "states, windows": partial(pools.make_pool, null=NULL, **WINDOWS),
    "states, windows in pages": pools.beside_other_memory,
    "mamba3": partial(pools.make_pool, kind="mamba3"),
    "mamba3 beside others": pools.mamba3_beside_others,
    "rings, windows": partial(pools.make_pool, kind="rings", null=0, **WINDOWS),
    "rings of the delta rule": partial(pools.make_pool, kind="rings of the delta rule", null=NULL),
    "rings of the delta rule per channel": partial(pools.make_pool, kind="rings of the delta rule", per_channel=True),
    "rings of both, windows": partial(pools.rings_of_both, null=NULL, **WINDOWS),
}


class Named(NamedTuple):
    """Slots as a caller names them, how many entries that has, and which of these are the slots."""

    given: Any
    count: int
    at: list[int]


@dataclass
class Requests:
    """A pool, and a model of it: tensors of every request on its own, one slot each, by the names of kept_by."""

    pool: StatePool[Any]
    draw: Random
    held: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    seeds: set[int] = field(default_factory=set)  # that requests had
    fault: bool = False  # whether a number past the pool is in the next call

    def __post_init__(self) -> None:
        self.free = [slot for slot in range(self.pool.slots) if slot != self.pool.null][::-1]
        self.layers = [self.pool.layer(i) for i in range(self.pool.layers)]
        self.device = kept_by(self.pool)["data 0"].device
        self.wrapped = "wrapped" in repr(self.pool)
        if self.pool.free == 0:
            self.pool.release(self.free[::-1])
        dirty(self.pool)

    @property
    def actions(self) -> list[Callable[[], None]]:
        found = [self.acquire, self.release, self.reset, self.copy, self.move, self.write, self.read, self.advance]
        found += [self.serve] + [self.write_window] * self.pool.has_windows + [self.resize] * (not self.wrapped)
        found += [self.replay, self.replay, self.fold] if self.pool.has_rings else []
        return found + [self.write_kv] * isinstance(self.layers[0], Mamba3State)

    def some(self, repeat: bool = False, size: int | None = None) -> list[int]:
        """Slots that are held."""
        held, size = sorted(self.held), self.draw.randint(0, 3) if size is None else size
        return (
            self.draw.choices(held, k=size if held else 0) if repeat else self.draw.sample(held, min(size, len(held)))
        )

    def outside(self) -> int:
        """A number that names no slot."""
        number = self.draw.choice([-1, -7, self.pool.null, self.pool.slots, 1 << 20])
        self.fault |= number >= self.pool.slots and number != self.pool.null
        return number

    def on_device(self, numbers: Sequence[int]) -> Tensor:
        """On its own, or as a column of a table."""
        table = torch.tensor([[0, n] for n in numbers], dtype=self.draw.choice([torch.int32, torch.int64]))
        column = table.view(-1, 2).to(self.device)[:, 1]
        return column if self.draw.random() < 0.5 else column.contiguous()

    def named(self, slots: list[int]) -> Named:
        """Slots named in any way; of numbers on the device some name no slot."""
        if self.draw.random() < 0.5:
            forms: list[Callable[[list[int]], Any]] = [list, tuple, torch.IntTensor, torch.LongTensor]
            forms += [lambda one: one[0], lambda one: torch.tensor(one[0])] * (len(slots) == 1)
            return Named(self.draw.choice(forms)(slots), len(slots), [*range(len(slots))])
        numbers = list(slots)
        for _ in range(self.draw.randint(0, 3)):
            numbers.insert(self.draw.randint(0, len(numbers)), self.outside())
        return Named(self.on_device(numbers), len(numbers), [i for i, slot in enumerate(numbers) if slot in self.held])

    def where(self, named: Named) -> Any:
        """Slots as `plan`, `folded` and `advance` take them: of numbers on the device with the null of the pool."""
        if isinstance(named.given, Tensor) and named.given.device.type == self.device.type:
            return Slots(named.given.reshape(-1), null=self.pool.null)
        return named.given.tolist() if isinstance(named.given, Tensor) else named.given

    def do(self, call: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Call inside or outside of inference mode and of debug(); numbers past the pool are faults."""
        with self.draw.choice([nullcontext, torch.inference_mode, *[flashstate.debug] * (not self.fault)])():
            found = call(*given, **options)
        with pytest.raises(IndexError, match=r"^out of range: ") if self.fault else nullcontext():
            flashstate.check_faults()
        self.fault = False
        return found

    def values(self, named: Named, *shape: int, kind: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Random numbers for slots; and as they are given, with NaN for no slot, of any strides."""
        generator = torch.Generator().manual_seed(self.draw.randrange(1 << 30))
        rows = torch.rand(len(named.at), *shape, generator=generator)
        if len(shape) == 3:  # states: of every magnitude
            factors = torch.tensor([0, 2**-12, 1, 2**12, torch.inf])
            rows *= factors[torch.randint(5, (*rows.shape[:3], 1), generator=generator)]
        rows = rows.nan_to_num(0, torch.inf).to(kind)
        filled = torch.full((named.count, *shape), torch.nan, dtype=kind)
        filled[named.at] = rows
        axes = self.draw.sample(range(filled.dim()), filled.dim())
        turned = filled.permute(axes).contiguous().permute([axes.index(axis) for axis in range(len(axes))])
        return rows.to(self.device), turned.to(self.device)

    def poison_rest(self) -> None:
        poison(self.pool, [slot for slot in range(self.pool.slots) if slot not in self.held])

    # Requests come and go

    def begin(self, slot: int, seed: int | None) -> None:
        """The request in a slot is new."""
        parts = kept_by(self.pool).items()
        new = {part: torch.zeros(1, *t.shape[1:], dtype=t.dtype, device=self.device) for part, t in parts}
        self.held[slot] = {part: t + 1 if "scale" in part else t for part, t in new.items()}
        self.give_seed(slot, seed)

    def give_seed(self, slot: int, wanted: int | None) -> None:
        """A request has the seed that it should have, or one that no request had before."""
        if "seed" in self.held[slot]:
            seed = self.held[slot]["seed"] = seed_of(self.pool)[slot : slot + 1].clone()
            assert int(seed) not in self.seeds if wanted is None else int(seed) == wanted
            self.seeds.add(int(seed))

    def some_seeds(self, count: int) -> tuple[Any, list[int | None]]:
        """As they are given, and as they are."""
        one, each = self.draw.choice([-(1 << 63), 5, (1 << 63) - 1]), [self.draw.randrange(99) for _ in range(count)]
        given = [(None, [None] * count), (one, [one] * count), (each, each), (torch.LongTensor(each), each)]
        return self.draw.choice(given)

    def acquire(self) -> None:
        n, kind = self.draw.randint(0, 3), self.draw.choice([torch.int32, torch.int64])
        seed, each = self.some_seeds(n)
        if n > len(self.free):
            with pytest.raises(RuntimeError, match=rf"^acquire needs {n} free slots, but only {len(self.free)} of"):
                self.pool.acquire(n, seed)
            return
        slots, want = self.do(self.pool.acquire, n, seed, kind), [self.free.pop() for _ in range(n)]
        assert (slots.tolist(), slots.dtype, slots.device.type) == (want, kind, self.device.type)
        for slot, own in zip(want, each, strict=True):
            self.begin(slot, own)

    def release(self) -> None:
        slots = self.some(size=self.draw.choice([1, 1, 2]))
        self.pool.release(slots if len(slots) > 1 else list(torch.tensor(slots)))
        self.free += slots[::-1]
        for slot in slots:
            del self.held[slot]
            with pytest.raises(ValueError, match=f"^slots must be held, but slot {slot} is free"):
                self.pool.release(slot)
        self.poison_rest()

    def reset(self) -> None:
        named = self.named(slots := self.some())
        seed, each = self.some_seeds(named.count)
        self.do(self.pool.reset, named.given, seed)
        for slot, at in zip(slots, named.at, strict=True):
            self.begin(slot, each[at])

    def copy(self) -> None:
        targets, keep_seed, on_device = self.some(), self.draw.random() < 0.5, self.draw.random() < 0.5
        pairs = [*zip(self.some(repeat=True, size=len(targets)), targets, strict=True)]
        clones = [{part: t.clone() for part, t in self.held[source].items()} for source, _ in pairs]
        if on_device:
            pairs += [(self.outside(), slot) for slot in [slot for slot in self.held if slot not in targets][:1]]
            pairs += [(slot, self.outside()) for slot in self.some()] + [(-1, -1)] * self.draw.choice([0, 0, 16])
        given = [[pair[side] for pair in pairs[::-1]] for side in (0, 1)]
        self.do(self.pool.copy, *(map(self.on_device, given) if on_device else given), keep_seed=keep_seed)
        for target, clone in zip(targets, clones, strict=True):
            self.held[target] = clone
            if not keep_seed:
                self.give_seed(target, None)

    def move(self) -> None:
        """Requests leave as bytes, which come back in other slots as another process would bring them."""
        targets, memory = self.some(), io.BytesIO()
        named = self.named(sources := self.some(repeat=True, size=len(targets)))
        named = named if len(named.at) == len(sources) else Named(sources, len(sources), [*range(len(sources))])
        torch.save(self.do(self.pool.export, named.given), memory)
        memory.seek(0)
        exported = torch.load(memory, weights_only=True, map_location="cpu")
        packed = exported["bytes"]
        assert not packed[[at for at in range(named.count) if at not in named.at]].any()
        back = self.named(targets)
        exported["bytes"] = torch.full((back.count, self.pool.bytes_per_slot), 7, dtype=torch.uint8)
        exported["bytes"][back.at] = packed[named.at]
        self.do(self.pool.load, back.given, exported)
        clones = [{part: t.clone() for part, t in self.held[source].items()} for source in sources]
        self.held |= dict(zip(targets, clones, strict=True))

    def resize(self) -> None:
        """A new pool takes over; nothing of it is in the old one."""
        old, kept, slots = self.pool, kept_by(self.pool), self.draw.randint(max(self.held, default=0) + 1, 8)
        self.pool = self.do(old.resized, slots)
        assert (self.pool.slots, self.pool.bytes_per_slot) == (slots, old.bytes_per_slot)
        assert all(t.stride()[1:] == kept[part].stride()[1:] for part, t in kept_by(self.pool).items())
        dirty(old)
        released = [slot for slot in self.free if slot < slots]
        new = {*range(slots)} - {*released, *self.held, self.pool.null}
        self.free = sorted(new, reverse=True) + released
        self.poison_rest()

    # What is stored

    def write(self) -> None:
        i, named = self.draw.randrange(self.pool.layers), self.named(slots := self.some())
        state = ssm_of(self.layers[i])
        rows, values = self.values(named, *state.data.shape[1:], kind=self.draw.choice(FLOATS))
        self.do(self.pool.write, i, named.given, values)
        for slot, value in zip(slots, rows.cpu().float()[:, None], strict=True):
            kept, random = {part: t.clone() for part, t in self.held[slot].items()}, None
            if state.rounding == "stochastic":  # with the bits of the token before the first
                kinds = state.stream, state.rounds, state.data.dtype
                random = random_bits(kept["seed"].cpu(), value.shape[1:], -1, *kinds)
            for part, stored in zip(("data", "scale"), encode(value, state.data.dtype, random), strict=True):
                kept |= {} if stored is None else {f"{part} {i}": stored.to(self.device)}
            if "count" in kept:
                kept["count"].zero_()
            self.held[slot] = kept

    def write_window(self) -> None:
        i, named = self.draw.randrange(self.pool.layers), self.named(slots := self.some())
        _, channels, length = self.pool.window(i).shape
        end, n = length - self.pool.drafts, self.draw.randint(1, length - self.pool.drafts)
        rows, values = self.values(named, channels, n, kind=self.pool.window(i).dtype)
        self.do(self.pool.write_window, i, named.given, values)
        for slot, row in zip(slots, rows, strict=True):
            self.held[slot][f"window {i}"].zero_()[0, :, end - n : end] = row

    def write_kv(self) -> None:
        i, named = self.draw.randrange(2 - self.wrapped), self.named(slots := self.some())
        kept = {part: t for part in ("k", "v", "angle") if (t := getattr(self.layers[i], part)) is not None}
        kinds = {part: self.draw.choice(FLOATS[: 1 if part == "angle" else 3]) for part in kept}
        left = {part: self.values(named, *t.shape[1:], kind=kinds[part]) for part, t in kept.items()}
        self.do(self.pool.write_kv, i, named.given, **{part: given for part, (_, given) in left.items()})
        for part, (rows, _) in left.items():
            for slot, row in zip(slots, rows, strict=True):
                self.held[slot][f"{part} {i}"][0] = row.to(kept[part].dtype)

    def read(self) -> None:
        i, named = self.draw.randrange(self.pool.layers), self.named(slots := self.some(repeat=True))
        found = self.do(self.pool.read, i, named.given)
        want = torch.zeros_like(found)
        for slot, at in zip(slots, named.at, strict=True):
            want[at] = decode(self.held[slot][f"data {i}"], self.held[slot].get(f"scale {i}"))[0]
        assert torch.equal(found.nan_to_num(-1.0), want.nan_to_num(-1.0))

    def advance(self) -> None:
        everyone, slots = self.draw.random() < 0.2, self.some()
        if everyone:
            slots = sorted(self.held)
            self.do(self.pool.advance)
            self.poison_rest()
        else:
            self.do(self.pool.advance, self.where(self.named(slots)) if "seed" in kept_by(self.pool) else slots)
        for slot in slots:
            self.held[slot].get("seed", torch.zeros(1)).add_(SEED_STEP)

    # What ops do

    def serve(self) -> None:
        """They leave anything in some slots."""
        with torch.inference_mode():
            for slot in self.some():
                for part, kept in self.held[slot].items():
                    if part not in ("seed", "start", "count"):
                        kept.fill_(self.draw.randrange(100))
                        kept.flatten()[:: self.draw.randint(1, 9)] = 1
                        bits_of(kept_by(self.pool)[part])[slot] = bits_of(kept)[0]

    def ring_of(self, request: dict[str, Tensor]) -> Any:
        """What the model has of a request's first ring."""
        ring = self.pool.ring(0)
        kept = {part: request[f"ring.{part} 0"] for part in ring.written}
        return replace(ring, **kept, start=request["start"], count=request["count"])

    def replay(self) -> None:
        """A step of which any tokens are accepted; slots may have other requests by then."""
        n, named = self.draw.randint(1, pools.RINGS["tokens"]), self.named(slots := self.some())
        plan, planned = self.do(self.pool.plan, self.where(named), n), [self.held[slot] for slot in slots]
        self.draw.choice([self.reset, self.copy, self.write, self.move, self.acquire, *[lambda: None] * 5])()
        accepted = torch.LongTensor([self.draw.randint(0, n) for _ in range(named.count)]).to(self.device)
        accepted = accepted if self.draw.random() < 0.8 else None
        self.pool.commit(plan, accepted)
        for slot, request, at in zip(slots, planned, named.at, strict=True):
            if self.held[slot] is request:
                ring = self.ring_of(request)
                ring.commit(ring.plan(None, n), None if accepted is None else accepted[at : at + 1])

    def fold(self) -> None:
        """All live tokens of some requests."""
        self.do(self.pool.folded, self.where(self.named(slots := self.some())))
        for slot in slots:
            self.ring_of(self.held[slot]).folded()

    def require_all(self) -> None:
        """Requests are as on their own, and the rest is poison."""
        for part, tensor in kept_by(self.pool).items():
            want = torch.zeros(tensor.shape, dtype=tensor.dtype)
            bits_of(want).fill_(-1)
            for slot, kept in self.held.items():
                bits_of(want)[slot] = bits_of(kept[part].cpu())[0]
            assert torch.equal(bytes_of(tensor.cpu()), bytes_of(want)), part
        assert self.pool.free == len(self.free)
        assert gaps_are_poison(self.pool)


PLACES = [
    *(pytest.param("reference", kind, 6, id=kind) for kind in KINDS),
    *(pytest.param("interpreter", kind, 1, id=f"{kind}, kernels", marks=pytest.mark.interpreted) for kind in KINDS),
    *(pytest.param("gpu", kind, 6, id=f"{kind}, gpu", marks=pytest.mark.gpu) for kind in KINDS),
]


@pytest.mark.parametrize(("device", "kind", "rounds"), PLACES, indirect=["device"])
def test_requests_live_in_a_pool_as_on_their_own(kind: str, rounds: int, device: torch.device) -> None:
    number = [*KINDS].index(kind)
    known = PORTABLE_FORMATS[number :: 4 if rounds > 1 and device.type == "cpu" else 9]
    for turn, (name, rounding) in enumerate(known):
        sizes = {"rows": 64, "cols": 128} if device.type == "cuda" and kind == "states" else {}
        with torch.inference_mode(number % 2 > 0):
            pool = KINDS[kind](name, rounding, device=device, **sizes)
        requests = Requests(pool, Random(10 * number + turn))
        requests.acquire()
        for _ in range(rounds):
            for action in requests.draw.sample(requests.actions, len(requests.actions)):
                action()
                requests.require_all()
