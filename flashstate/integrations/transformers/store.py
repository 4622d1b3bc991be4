"""Store: what the recurrent layers of a model keep on one device, for every row of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from flashstate.errors import check_dtype
from flashstate.integrations.transformers.families import Found
from flashstate.integrations.transformers.memory import Memory, Sizes
from flashstate.pool.pool import StatePool
from flashstate.state.ring import Plan
from flashstate.state.slots import Slots
from flashstate.state.state import State

Made = TypeVar("Made")
SPREAD = 6364136223846793005  # of a linear congruential generator of 64 bits
KEPT_AFTER_PROMPT = (0, 1)  # no token that windows could take back, and the first slot of a row


class Format(NamedTuple):
    """How states are stored, and how many tokens can be taken back."""

    dtype: torch.dtype
    rounding: str
    rounds: int
    replay: int  # the window of rings; 0: none
    drafts: int


class Where(NamedTuple):
    """Which windows and states the rows of a batch have in a call of so many tokens."""

    windows: Slots
    states: Slots
    kept: Tensor  # (2, 1), what `accepted` is after the call, as long as nothing is taken back


class Store:
    """The windows and states of layers on one device, with room for so many rows; row b of a batch is row b here.

    With drafts a row has one slot more than drafts for its states, one for each token of a call, and a window that
    holds the tokens of a call beside those before it. Which of them a row continues from, `accepted` says: (2, rows),
    tokens of the call before that its window keeps, and from 1 on the slot of its state. With replay the ring of a
    row takes tokens back, so one slot is enough.
    """

    def __init__(self, found: Mapping[int, Found], format: Format, rows: int, seeds: Sequence[int] | Tensor) -> None:
        sizes = sizes_of(found)
        self.found, self.format, self.rows = found, format, rows
        self.numbers = {layer: i for i, layer in enumerate(found)}
        weight = next(convolution(each.mixer).weight for each in found.values())
        self.device, self.history = weight.device, sizes.width - 1
        self.columns = 1 + format.drafts if sizes.state is not None and not format.replay else 1
        shape = len(found), rows, self.history + (format.drafts + 1 if format.drafts else 0), sizes.channels
        with torch.inference_mode(False):  # else only inference mode could write them again
            self.seeds = torch.as_tensor(seeds, dtype=torch.int64, device=self.device)  # that rows begin with
            self.windows = torch.zeros(shape, dtype=weight.dtype, device=self.device)  # channels side by side
            self.window_pool = StatePool.wrap([State(window[:, None]) for window in self.windows])
            self.pool = None if sizes.state is None else self._pool(sizes.state, weight.dtype)
            self.replayed = self.pool if format.replay else None  # the pool, where it has rings
            seed = None if self.pool is None else self.pool.layer(0).seed
            self.seed = None if seed is None else seed.view(rows, self.columns)  # that rows have now
            self.table = torch.arange(rows * self.columns, dtype=torch.int32, device=self.device).view(rows, -1)
            self.row_numbers = torch.arange(rows, dtype=torch.int32, device=self.device)
            self.accepted = torch.zeros(2, rows, dtype=torch.int32, device=self.device)
            self.seen = torch.zeros((), dtype=torch.int64, device=self.device)
        self._where: dict[tuple[int, ...], Where] = {}
        self._memory: dict[tuple[int, ...], Memory] = {}
        self.reset()

    def _pool(self, state: tuple[int, int, int], dtype: torch.dtype) -> StatePool:
        """A pool of the states of any recurrence, all of its slots held; with replay, rings for tokens of a call."""
        format, first = self.format, next(iter(self.found.values()))
        given: dict[str, Any] = {
            "slots": self.rows * self.columns, "layers": len(self.found), "dtype": format.dtype,
            "rounding": format.rounding, "rounds": format.rounds, "device": self.device,
        }  # fmt: skip
        if format.replay and first.replays is not None:
            given |= {"window": format.replay, "tokens": format.drafts + 1, "ring_dtype": dtype}
            pool = first.replays.pool(first.mixer, **given)
        else:
            heads, rows, cols = state
            pool = StatePool.mamba2(heads=heads, rows=rows, cols=cols, **given)
        pool.acquire(pool.slots)
        return pool

    @property
    def bytes(self) -> int:
        """Bytes of windows, states and rings."""
        own = self.windows.numel() * self.windows.element_size()
        return own if self.pool is None else own + self.pool.slots * self.pool.bytes_per_slot

    def reset(self) -> None:
        """Make every row as it was at first: nothing before its next token, and the seeds it began with."""
        self.windows.zero_()
        if self.pool is not None:
            self.pool.reset(range(self.pool.slots), self.seeds.repeat_interleave(self.columns))
        self.keep(self.rows, KEPT_AFTER_PROMPT)
        self.seen.zero_()

    def keep(self, batch: int, kept: Tensor | tuple[int, int]) -> None:
        """Set what the first rows continue from."""
        if not isinstance(kept, Tensor):
            kept = torch.tensor(kept, dtype=torch.int32, device=self.device)[:, None]
        self.accepted[:, :batch] = kept

    def where(self, batch: int, tokens: int, first: int = 0) -> Where:
        """Where a call of so many rows and tokens finds things; states after its tokens go to slots from `first` on."""
        return once(self._where, self._where_of, batch, tokens, first)

    def _where_of(self, batch: int, tokens: int, first: int) -> Where:
        rows = Slots(self.row_numbers[:batch])
        windows = states = rows
        if self.format.drafts:
            windows = replace(rows, accepted=self.accepted[0, :batch])
        if self.columns > 1:
            table = self.table[:batch]
            states = Slots(table, accepted=self.accepted[1, :batch], write=table[:, first : first + tokens])
        kept = torch.tensor([[tokens], [first + tokens]], dtype=torch.int32, device=self.device)
        return Where(windows, states, kept)

    def memory(self, layer: int, batch: int, tokens: int, first: int, plan: Plan | None) -> Memory:
        """What the mixer of a layer gets in a call that steps the rows."""
        memory = once(self._memory, self._memory_of, layer, batch, tokens, first)
        return memory if plan is None else replace(memory, plan=plan)

    def _memory_of(self, layer: int, batch: int, tokens: int, first: int) -> Memory:
        i, where = self.numbers[layer], self.where(batch, tokens, first)
        history = self.history if self.format.drafts else None
        state = None if self.pool is None else self.pool.layer(i)
        ring = None if self.replayed is None else self.replayed.ring(i)
        return Memory(self.windows[i].mT, where.windows, history, state, where.states, ring)

    def plan(self, batch: int, tokens: int) -> Plan | None:
        """Return the plan of rings for a step; None where there are none. The ring makes it, since a pool voids its own
        plans when slots are written: in a call with a prompt and candidates the prompt is written later."""
        return None if self.replayed is None else self.replayed.ring(0).plan(self.where(batch, tokens).states, tokens)

    def finish(self, batch: int, tokens: int, first: int, plan: Plan | None) -> None:
        """What follows a step of all layers; the plan of rings that can take tokens back is still to be settled."""
        where = self.where(batch, tokens, first)
        if self.pool is not None:
            self.pool.advance(where.states)
        if self.format.drafts:
            self.keep(batch, where.kept)
        elif plan is not None and self.replayed is not None:
            self.replayed.commit(plan)

    def settle(self, plan: Plan) -> None:
        """Keep in rings the tokens of a step that were not taken back."""
        assert self.replayed is not None
        self.replayed.commit(plan, self.accepted[0, : plan.batch])

    def take_back(self, batch: int, tokens: int) -> None:
        """Let the first rows continue from where they were so many tokens before, all of the last call."""
        self.accepted[:, :batch] -= tokens

    def fold(self, batch: int) -> None:
        """Make the states of rows those after all of their tokens, with empty rings."""
        pool, rows = self.replayed, self.row_numbers[:batch]
        if pool is None:
            return
        for layer, i in self.numbers.items():
            found = self.found[layer]
            assert found.replays is not None
            found.replays.fold(found.mixer, pool.layer(i), pool.ring(i), rows)
        pool.folded(rows)

    def before(self, layer: int, batch: int) -> tuple[Tensor, Tensor | None]:
        """The last inputs of a layer's convolution, (batch, channels, K - 1), and its states in float32."""
        i = self.numbers[layer]
        entries = self.accepted[0, :batch, None].long() + torch.arange(self.history, device=self.device)
        window = self.windows[i, :batch].gather(1, entries[..., None].expand(-1, -1, self.windows.shape[-1]))
        return window.mT, None if self.pool is None else self.pool.read(i, self._slots(batch))

    def take_over(self, layer: int, window: Tensor, state: Tensor | None) -> None:
        """Store what a prompt left: last inputs (batch, channels, K - 1) and states of ops' axes, rounded once."""
        i, batch = self.numbers[layer], len(window)
        self.windows[i, :batch, : self.history] = window.mT
        if self.pool is not None and state is not None:
            self.pool.write(i, self.table[:batch, 0].contiguous(), state)

    def rearrange(self, rows: Tensor) -> None:
        """Make row i of the batch a copy of row rows[i], with a seed of its own."""
        rows = rows.to(self.device)
        seeds = self._seeds_of_copies(rows)
        self.window_pool.copy(rows.int(), self.row_numbers[: len(rows)])
        if self.pool is not None:
            self.pool.copy(self._slots(self.rows)[rows], self.table[: len(rows), 0].contiguous(), keep_seed=True)
        if self.seed is not None and seeds is not None:
            self.seed[: len(rows)] = seeds
        self.accepted[0, : len(rows)] = self.accepted[0, rows]
        self.accepted[1, : len(rows)] = KEPT_AFTER_PROMPT[1]

    def _seeds_of_copies(self, rows: Tensor) -> Tensor | None:
        """Seeds for copies of rows, if there are any. They follow from the seeds of the rows and from where the copies
        go, so that a cache draws the same again after a reset; copies of one row get different ones."""
        return None if self.seed is None else self.seed[rows] * SPREAD + self.seeds[: len(rows), None]

    def grown(self, rows: int, seeds: Sequence[int] | Tensor) -> Store:
        """A store for as many rows or more, the first of them those of this one."""
        new = Store(self.found, self.format, rows, seeds)
        new.window_pool.load(self.row_numbers, self.window_pool.export(self.row_numbers))
        if new.pool is not None and self.pool is not None:
            new.pool.load(self.table.flatten(), self.pool.export(self.table.flatten()))
        new.accepted[:, : self.rows] = self.accepted
        new.seen.copy_(self.seen)
        return new

    def _slots(self, batch: int) -> Tensor:
        """The slot that each of the first rows continues from."""
        if self.columns == 1:
            return self.table[:batch, 0].contiguous()
        return self.table[:batch].gather(1, self.accepted[1, :batch, None].long() - 1)[:, 0]


def check_stored(found: Mapping[int, Found], format: Format) -> None:
    """Raise unless stores can keep what these layers need, in this format on their devices."""
    if format.replay:
        check_replays(found, format.replay, format.drafts)
    one: dict[str, Any] = {"slots": 1, "layers": 1, "heads": 1, "rows": 1, "cols": 1}
    for device, here in by_device(found):
        sizes_of(here)
        for each in here.values():
            check_dtype("model", convolution(each.mixer).weight.dtype)
        StatePool.mamba2(**one, dtype=format.dtype, rounding=format.rounding, rounds=format.rounds, device=device)


def check_replays(found: Mapping[int, Found], replay: int, drafts: int) -> None:
    """Raise unless layers can replay tokens with a window of this length."""
    others = {type(each.mixer).__name__ for each in found.values() if each.replays is None}
    if others:
        known = "Mamba-2, Gated DeltaNet and KDA"
        raise ValueError(f"replay is for mixers of {known}, but this model has {', '.join(sorted(others))}")
    every = {type(each.mixer).__name__ for each in found.values()}
    if len({each.name for each in found.values()}) > 1:
        raise ValueError(f"replay is for mixers of one recurrence, but this model has {', '.join(sorted(every))}")
    if replay < drafts + 1:
        raise ValueError(
            f"replay must be {drafts + 1} or more, the tokens of a call with drafts={drafts}, got {replay}"
        )


def once(made: dict[tuple[int, ...], Made], make: Callable[..., Made], *key: int) -> Made:
    """make(*key), made once. While compiling it is made anew: a graph would depend on what was made before it."""
    if torch.compiler.is_compiling():
        return make(*key)
    if key not in made:
        made[key] = make(*key)
    return made[key]


def convolution(mixer: nn.Module) -> nn.Conv1d:
    """The one convolution that every mixer has."""
    return next(module for module in mixer.modules() if isinstance(module, nn.Conv1d))


def by_device(found: Mapping[int, Found]) -> Iterator[tuple[torch.device, dict[int, Found]]]:
    """Yield every device of these layers, with its layers."""

    def device_of(layer: int) -> str:
        return str(convolution(found[layer].mixer).weight.device)

    for device, layers in groupby(sorted(found, key=lambda layer: (device_of(layer), layer)), device_of):
        yield torch.device(device), {layer: found[layer] for layer in layers}


def sizes_of(found: Mapping[int, Found]) -> Sizes:
    """What every one of these layers keeps; ValueError where they differ."""
    every = {layer: each.kind.sizes(each.mixer) for layer, each in found.items()}
    first = next(iter(every))
    for layer, sizes in every.items():
        if sizes != every[first]:
            raise ValueError(
                f"layers must keep the same, but layer {layer} keeps {sizes}, layer {first} {every[first]}"
            )
    return every[first]
