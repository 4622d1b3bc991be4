"""StateCache: what a model of Transformers keeps while it generates, its recurrent states in flashstate's pools."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass, field
from pickle import PicklingError
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from flashstate.basics import LARGEST_WINDOW
from flashstate.errors import LARGEST_INT32, bytes_text, check_int, counted, dtype_name
from flashstate.integrations.transformers.enabling import enable
from flashstate.integrations.transformers.families import mixers_of
from flashstate.integrations.transformers.graphs import Graphs
from flashstate.integrations.transformers.layers import StateLayer, cache_layers, forget, reorder_in_place
from flashstate.integrations.transformers.prompts import goes_stock, stepped_prompt, stock_prompt
from flashstate.integrations.transformers.store import (
    KEPT_AFTER_PROMPT,
    Format,
    Store,
    by_device,
    check_stored,
    convolution,
    sizes_of,
)
from flashstate.integrations.transformers.use import CACHES, Use, alone
from flashstate.state.formats import DTYPES, FORMATS, label_of
from flashstate.state.ring import Plan

LARGEST_SEED = 2**63 - 1


@dataclass
class Call:
    """One call of the model: so many rows, of which each has tokens of a prompt and then tokens that are stepped."""

    batch: int
    prompt: int
    stepped: int
    plans: dict[Store, Plan | None] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """The slot of a row for the state after its first stepped token: the prompt has one too."""
        return int(self.prompt > 0)


class StateCache(Cache):
    """The cache of a model with recurrent layers: their states in a pool, in any format, and attention layers as
    Transformers has them. `model.generate(ids, past_key_values=cache)` takes it.

    model: a model of a family that flashstate knows; it is enabled if it is not yet.
    dtype, rounding, rounds: of the recurrent states, as in State; the dtype may also be given by its name.
    seed: what stochastic rounding draws from; the same seed gives the same generation. None: entropy.
    replay: window of replay, for models of Mamba-2, Gated DeltaNet and KDA: states are written once in so many tokens.
    drafts: tokens that can be taken back of one call, for assisted generation.
    max_batch: the most rows, for which room is made at once; None: room for those of the first call, and later more.
    max_cache_len: tokens to make room for in attention layers, which are static then; on a GPU the decode step then
        runs as a CUDA graph. None: they grow. Models without attention need only some number.

    bytes, bytes_of_state: of all it keeps, and of recurrent layers alone; both 0 until the first call unless max_batch
    is given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype | str = torch.float32,
        rounding: str = "nearest",
        rounds: int = 10,
        seed: int | None = None,
        replay: int | None = None,
        drafts: int = 0,
        max_batch: int | None = None,
        max_cache_len: int | None = None,
    ) -> None:
        check_int("drafts", drafts, 0, LARGEST_WINDOW - 1)
        for name, number, most in (("replay", replay, LARGEST_WINDOW), ("max_batch", max_batch, LARGEST_INT32)):
            if number is not None:
                check_int(name, number, 1, most)
        if max_cache_len is not None:
            check_int("max_cache_len", max_cache_len, 1, LARGEST_INT32)
        if seed is not None:
            check_int("seed", seed, 0, LARGEST_SEED)
        self.found = mixers_of(model)
        stored: Any = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
        self.format = Format(stored, rounding, rounds, replay or 0, drafts)
        check_stored(self.found, self.format)
        # Candidates may go past the last token.
        self.longest = None if max_cache_len is None else max_cache_len + drafts
        layers = cache_layers(model.config, self.found, self.longest, croppable=drafts > 0)
        CACHES[enable(model)].add(self)
        super().__init__(layers=layers)
        self.model_name, self.convolution = type(model).__name__, convolution(self.found[min(self.found)].mixer)
        self.dtype = self.convolution.weight.dtype
        self.seed, self.static, self.max_batch = seed, max_cache_len is not None, max_batch
        self.length = 0  # tokens of every row, but of steps that torch.compile made
        self.first, self.last = min(self.found), max(self.found)
        self.attention = [layer for layer in self.layers if isinstance(layer, CacheLayerMixin)]
        self.stores: dict[torch.device, Store] = {}
        self.store_of: dict[int, Store] = {}
        self.batch: int | None = None  # rows that there is something of
        self.call: Call | None = None  # that is under way
        self.latest = Call(0, 0, 0)
        self.sure: int | None = None  # tokens of the next call that are not candidates
        self.croppable = 0  # tokens of the last call that can still be taken back
        self.unsettled: Call | None = None  # whose tokens rings do not have yet
        self.graphs = Graphs(self)
        self.use = Use()
        if max_batch is not None:
            self._make_stores(max_batch)

    @property
    def bytes_of_state(self) -> int:
        """Bytes of recurrent states, their scales, windows and rings."""
        return sum(store.bytes for store in self.stores.values())

    @property
    def bytes(self) -> int:
        """Bytes of all that is kept."""
        kept = [part for layer in self.attention for part in vars(layer).values() if isinstance(part, Tensor)]
        return self.bytes_of_state + sum(part.numel() * part.element_size() for part in kept)

    def mix(self, mixer: Any, hidden: Tensor, mask: Tensor | None, more: dict[str, Any]) -> Tensor:
        """The outputs of a mixer for tokens (batch, T, hidden size), which the state of its layer is moved on by.

        mask: (batch, T or more), of which the last are of these tokens; None: none is padding.
        """
        layer, mask = mixer.layer_idx, None if mask is None else mask[:, -hidden.shape[1] :]
        if layer not in self.found or self.found[layer].mixer is not mixer:
            raise ValueError(f"this StateCache is for another model than that of this {type(mixer).__name__}")
        if layer == self.first:
            self._begin(hidden)
        call = self.call
        assert call is not None
        outputs = []
        if call.prompt:
            of_prompt = None if mask is None else mask[:, : call.prompt]
            outputs.append(self._prompt(layer, hidden[:, : call.prompt], of_prompt, more))
        if call.stepped:
            found, store = self.found[layer], self.store_of[layer]
            memory = store.memory(layer, call.batch, call.stepped, call.first, call.plans[store])
            of_steps = None if mask is None else mask[:, call.prompt :]
            outputs.append(found.kind.forward(found.mixer, hidden[:, call.prompt :], memory, of_steps, prompt=False))
        if layer == self.last:
            self._end(call)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _begin(self, hidden: Tensor) -> None:
        """Decide how the tokens of a call go through all layers."""
        if not torch.compiler.is_compiling():
            with self.use:  # also where layers are called one by one
                self.use.torn |= self.call is not None
                self.use.check()
        batch, tokens, _ = hidden.shape
        self._check_rows(batch)
        fresh = self.batch is None
        if not fresh and hidden.requires_grad and torch.is_grad_enabled():
            raise ValueError("a StateCache has no gradients behind its prompt: call the model inside torch.no_grad()")
        self.use.begun = True
        self.settle()
        candidates = 0 if self.sure is None else tokens - self.sure
        self.sure = None
        steps = tokens if not fresh and tokens <= self.format.drafts + 1 else candidates
        self.call = call = Call(batch, tokens - steps, steps)
        if fresh and (not self.stores or batch > self._rows):
            self._make_stores(batch)
        for store in self.stores.values():
            if call.prompt and not fresh:
                store.fold(batch)
            call.plans[store] = store.plan(batch, steps) if steps else None

    def _check_rows(self, batch: int) -> None:
        if self.batch is not None and batch != self.batch:
            raise ValueError(f"this cache has {self.batch} rows, got a batch of {batch}; reset() makes it empty")
        self._check_most(batch)

    def _check_most(self, rows: int) -> None:
        if self.max_batch is not None and rows > self.max_batch:
            raise ValueError(f"this cache has room for max_batch={self.max_batch} rows, got {rows}")

    def _end(self, call: Call) -> None:
        """What follows when all layers have had the tokens of a call."""
        for store in self.stores.values():
            if call.prompt:
                store.keep(call.batch, KEPT_AFTER_PROMPT)
            if call.stepped:
                store.finish(call.batch, call.stepped, call.first, call.plans[store])
            store.seen.add_(call.prompt + call.stepped)
        if self.batch is None:
            self.batch = call.batch
            self._mark_states(True)
        self.called(call)

    def _mark_states(self, there: bool) -> None:
        for layer in self.found:
            self.layers[layer].has_previous_state[0] = there

    def called(self, call: Call) -> None:
        """Note which call was the last, and what can be taken back of it."""
        self.call, self.latest = None, call
        if self.format.drafts:
            self.croppable = call.stepped - 1 + call.first if call.stepped else 0
            self.unsettled = call if self.format.replay and call.stepped else None

    def settle(self) -> None:
        """Let rings keep what was not taken back of the last call."""
        if self.unsettled is not None:
            for store, plan in self.unsettled.plans.items():
                if plan is not None:
                    store.settle(plan)
            self.unsettled, self.croppable = None, 0

    def _prompt(self, layer: int, hidden: Tensor, mask: Tensor | None, more: dict[str, Any]) -> Tensor:
        """Tokens of a prompt through one layer; what they leave is stored."""
        found, store, batch = self.found[layer], self.store_of[layer], len(hidden)
        if self.batch is None and goes_stock(found, store.device):
            left = stock_prompt(found, hidden, mask, store.history + 1, more)
        else:
            left = stepped_prompt(found, hidden, mask, *store.before(layer, batch))
        store.take_over(layer, left.window, left.state)
        return left.outputs

    @property
    def _rows(self) -> int:
        return next(iter(self.stores.values())).rows

    def _make_stores(self, rows: int) -> None:
        """Make room for so many rows, on every device that has recurrent layers."""
        self.graphs.clear()
        for number, (device, found) in enumerate(by_device(self.found)):
            self.stores[device] = store = Store(found, self.format, rows, self._seeds(rows, number))
            self.store_of |= dict.fromkeys(found, store)

    def _seeds(self, rows: int, number: int) -> list[int]:
        """A seed for every row in the store of a number; the first rows have the same in a larger store."""
        draw = random.Random(None if self.seed is None else self.seed + number)
        return [draw.randint(0, LARGEST_SEED) for _ in range(rows)]

    def check_call(self, tokens: int) -> None:
        """Raise where this cache cannot take a call of the model: the model has another dtype than when the cache was
        made, or static attention layers have no room for the tokens of the call."""
        dtype = self.convolution.weight.dtype
        if dtype != self.dtype:
            words = f"was made for a model in {dtype_name(self.dtype)}, but the model is in {dtype_name(dtype)} now"
            raise TypeError(f"this StateCache {words}: make another")
        if self.longest is not None and self.attention and self.length + tokens > self.longest:
            room = f"max_cache_len={self.longest - self.format.drafts} tokens, of which {self.length} are taken"
            raise ValueError(f"this cache has room for {room}, got {tokens} more")

    def check_prompt(self, tokens: int | None) -> None:
        """Raise where a prompt for `generate` is not longer than the tokens in the cache. tokens: of the prompt; None:
        unknown."""
        self.use.check()
        held = 0 if self.batch is None else self.get_seq_length()
        if tokens is not None and tokens <= held:
            words = "give all tokens so far, or reset()"
            raise ValueError(f"this cache holds {counted(held, 'token')} and the prompt has {tokens}: {words}")

    @alone
    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens, all of them of the last call."""
        if not -self.croppable <= tokens_to_remove <= 0:
            words = f"tokens of the last call can be taken back, with drafts={self.format.drafts}"
            raise ValueError(f"crop must be given 0 or less, and {self.croppable} {words}, got {tokens_to_remove}")
        if tokens_to_remove and self.batch is not None:
            for store in self.stores.values():
                store.take_back(self.batch, -tokens_to_remove)
                store.seen.add_(tokens_to_remove)
            self.croppable += tokens_to_remove
            self.length += tokens_to_remove
        for layer in self.attention:
            layer.crop(tokens_to_remove)

    @alone
    def reset(self) -> None:
        """Make the cache empty; its memory stays."""
        super().reset()
        self._mark_states(False)
        self.batch = self.call = self.sure = self.unsettled = None
        self.croppable = self.length = 0
        for store in self.stores.values():
            store.reset()
        self.use.torn = False

    @alone
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue from row beam_idx[i]."""
        self._rearrange(beam_idx)
        for layer in self.attention:
            (reorder_in_place if self.static else type(layer).reorder_cache)(layer, beam_idx)

    @alone
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have every row so many times, one behind the other."""
        check_int("repeats", repeats, 1, LARGEST_INT32)
        self._refuse_static("repeat rows of")
        if self.batch is not None:
            self._rearrange(torch.arange(self.batch).repeat_interleave(repeats))
        for layer in self.attention:
            layer.batch_repeat_interleave(repeats)

    @alone
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of these numbers, in their order."""
        self._refuse_static("select rows of")
        self._rearrange(indices)
        for layer in self.attention:
            layer.batch_select_indices(indices)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """What an attention layer has with these keys and values."""
        layer = self.layers[layer_idx]
        self._fit(layer, len(key_states))
        if self.static and not layer.is_initialized:
            with torch.inference_mode(False):  # else only inference mode could write them again
                layer.lazy_initialization(key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """What the indexer of an attention layer has with these keys."""
        self._fit(self.layers[layer_idx], len(indexer_key_states))
        return super().update_indexer(indexer_key_states, layer_idx)

    def _fit(self, layer: Any, batch: int) -> None:
        """Let a static layer that was made for another number of rows be made anew."""
        self._check_rows(batch)
        if getattr(layer, "batch_size", batch) != batch:
            forget(layer)
            self.graphs.clear()
        self.use.begun = True

    @alone
    def __deepcopy__(self, memo: dict[int, Any]) -> StateCache:
        """A cache for the same model that has the same tokens, as a prompt that several requests begin with."""
        self.settle()
        new = object.__new__(type(self))
        new.__dict__.update(vars(self))
        new.layers = deepcopy(self.layers, memo)
        new.attention = [layer for layer in new.layers if isinstance(layer, CacheLayerMixin)]
        new.stores = {device: store.grown(store.rows, store.seeds) for device, store in self.stores.items()}
        new.store_of = {layer: store for store in new.stores.values() for layer in store.numbers}
        new.graphs, new.use = Graphs(new), Use()
        new.use.torn = self.use.torn
        return new

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PicklingError("a StateCache belongs to its model and cannot be pickled; copy.deepcopy copies it")

    def __repr__(self) -> str:
        state, format = sizes_of(self.found).state, self.format
        held = "empty" if self.batch is None else f"{counted(self.batch, 'row')} of {self.get_seq_length()} tokens"
        layers = "" if state is None else f" of {' x '.join(map(str, state))}"
        parts = [self.model_name, held, counted(len(self.found), "recurrent layer") + layers]
        parts.append(label_of(FORMATS[format.dtype].name, format.rounding))
        parts += [f"{name} {n}" for name, n in (("replay", format.replay), ("drafts", format.drafts)) if n]
        parts += ["static"] * self.static
        devices = " and ".join(str(device) for device, _ in by_device(self.found))
        return f"StateCache({', '.join(parts)}, {bytes_text(self.bytes)}, {devices})"

    def _refuse_static(self, what: str) -> None:
        if self.static and self.attention:
            raise ValueError(f"cannot {what} static attention layers: leave max_cache_len out")

    def _rearrange(self, rows: Tensor) -> None:
        """Make the rows of these numbers the rows of the batch."""
        if self.batch is None:
            return
        self.settle()
        if len(rows) > self._rows:
            self._check_most(len(rows))
            self.graphs.clear()
            for number, (device, store) in enumerate(self.stores.items()):
                self.stores[device] = grown = store.grown(len(rows), self._seeds(len(rows), number))
                self.store_of |= dict.fromkeys(grown.numbers, grown)
        for store in self.stores.values():
            store.rearrange(rows)
        self.batch, self.croppable = len(rows), 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens there are before the next one."""
        if self.attention:
            return super().get_seq_length(layer_idx)
        return int(next(iter(self.stores.values())).seen) if self.stores else 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether recurrent layers have a state."""
        return super().has_previous_state(self.last if layer_idx is None else layer_idx, state_idx)

    @property
    def is_compileable(self) -> bool:
        """Whether nothing in it changes its shape while the model decodes."""
        return self.static and super().is_compileable

    @property
    def is_croppable(self) -> bool:
        return self.format.drafts > 0

    @property
    def is_linear(self) -> list[bool]:
        """Which layers have a recurrence and no attention."""
        return [isinstance(layer, StateLayer) and not isinstance(layer, CacheLayerMixin) for layer in self.layers]
