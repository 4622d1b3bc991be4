"""Layers of SGLang as its sources set them up, small: pools, activations and metadata, in their layouts and dtypes.

Names are those of its attention backends and mixers; sglang_facts.py says where each is from.
"""

from dataclasses import dataclass

import torch
from models_of_peers import Arguments
from peer_calls import CPU, Random
from peer_conv1d import TREE
from peer_selective import PARENTS
from torch import Tensor

BRAIN, FLOAT, HALF = torch.bfloat16, torch.float32, torch.float16
LAYERS, SLOTS, WIDTH, DRAFT = 3, 9, 4, 4  # slot 0 is SGLang's own; as many drafts as the trees of other tests have
HEADS, GROUPS, DIM, DSTATE = 4, 2, 8, 16  # of Mamba-2 and GDN
PADDED = [7, -1, 2]  # slots of a batch of three in a graph, of which one is padding
ROWS = [0, 1, 2]  # of buffers, one for every request


@dataclass(frozen=True)
class Pool:
    """States of layers; those of one layer are a view. `others` is all that this layer must leave alone."""

    conv: Tensor  # (slots, channels, width - 1)
    temporal: Tensor  # (slots, heads, dim, dstate)
    windows: Tensor  # (rows, draft tokens, channels, width - 1)
    drafts: Tensor  # (rows, draft tokens, heads, dim, dstate)
    others: tuple[Tensor, ...]


def pool(
    channels: int, state: tuple[int, int, int], dtype: torch.dtype, page_major: bool, last: bool, sliding: bool,
    device: torch.device = CPU,
) -> Pool:  # fmt: skip
    """The pool of a layer between two others.

    page_major: the states of all layers of a slot lie together. last: windows lie with channels last, as those of KDA.
    sliding: windows of drafts share their inputs in memory, as SGLang has them where drafts are no trees.
    """
    random, here = Random(device, channels), LAYERS // 2
    window = (WIDTH - 1, channels) if last else (channels, WIDTH - 1)
    states = random.normal(LAYERS, SLOTS, *window, dtype=BRAIN), random.normal(LAYERS, SLOTS, *state, dtype=dtype)
    conv, temporal = in_entries(*states) if page_major else states
    inputs = torch.zeros(LAYERS, len(ROWS) + 1, channels, DRAFT + WIDTH - 2, dtype=BRAIN, device=device)
    windows = torch.zeros(LAYERS, len(ROWS) + 1, DRAFT, *window, dtype=BRAIN, device=device)
    if sliding:
        shape, strides = (*inputs.shape[:2], DRAFT, channels, WIDTH - 1), inputs.stride()
        windows = inputs.as_strided(shape, (*strides[:2], strides[3], *strides[2:]))
    drafts = torch.zeros(LAYERS, len(ROWS) + 1, DRAFT, *state, dtype=dtype, device=device)
    every = (conv, temporal, windows, drafts)
    views = conv[here].mT if last else conv[here], temporal[here], windows[here].mT if last else windows[here]
    return Pool(*views, drafts[here], tuple(t[n] for t in every for n in range(LAYERS) if n != here))


def in_entries(*states: Tensor) -> list[Tensor]:
    """States (layers, slots, …) as views of bytes in which all that belongs to a slot is one entry."""
    parts = [t.transpose(0, 1).reshape(SLOTS, -1).view(torch.uint8) for t in states]
    memory = torch.cat(parts, 1).split([part.shape[1] for part in parts], 1)
    views = [part.view(t.dtype) for part, t in zip(memory, states, strict=True)]
    return [v.unflatten(1, (LAYERS, *t.shape[2:])).transpose(0, 1) for v, t in zip(views, states, strict=True)]


def indices(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def beside(memory: Pool, arguments: Arguments) -> Arguments:
    """Arguments on the device of a pool; what is there already, as views of other memory are, is as it was."""
    device = memory.conv.device
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def tree() -> dict[str, Tensor]:
    """The tables of a tree of drafts; parents are memory that the convolution fills."""
    tables = {name: torch.tensor(rows, dtype=torch.int32) for name, rows in TREE.items()}
    return {**tables, "retrieve_parent_token": torch.zeros_like(tables["retrieve_next_token"])}


def no_tree() -> dict[str, None]:
    return dict.fromkeys(tree())


def parents() -> Tensor:
    return torch.tensor(PARENTS, dtype=torch.int32)


@dataclass(frozen=True)
class Batch:
    """A batch that decodes, a token each, or whose drafts are verified: as a graph pads it."""

    verify: bool = False
    trees: bool = False
    slots: tuple[int, ...] = tuple(PADDED)

    @property
    def tokens(self) -> int:
        return len(self.slots) * (DRAFT if self.verify else 1)

    @property
    def query_start_loc(self) -> Tensor:
        return torch.arange(0, self.tokens + 1, DRAFT if self.verify else 1, dtype=torch.int32)

    def conv(self, x: Tensor, memory: Pool, weight: Tensor, bias: Tensor | None) -> Arguments:
        """Arguments of causal_conv1d_update: x (tokens, channels), drafts with their axes turned."""
        drafts = x.view(len(self.slots), DRAFT, -1).transpose(1, 2) if self.verify else x
        call = {"x": drafts, "conv_state": memory.conv, "weight": weight, "bias": bias, "activation": "silu"}
        call["conv_state_indices"] = indices(*self.slots)
        if self.verify:
            rows = {"intermediate_conv_window": memory.windows, "intermediate_state_indices": indices(*ROWS)}
            call |= {**rows, **(tree() if self.trees else no_tree())}
        return beside(memory, call)

    def buffers(self, memory: Pool) -> Arguments:
        """Where the states of drafts go, by rows of which there are more than the batch has."""
        return {
            "intermediate_states_buffer": memory.drafts, "intermediate_state_indices": indices(*ROWS, len(ROWS)),
            "cache_steps": DRAFT, "retrieve_parent_token": parents() if self.trees else None,
        }  # fmt: skip


def mamba2(batch: Batch, memory: Pool) -> tuple[Arguments, Arguments]:
    """Arguments of a Mamba-2 layer's convolution, and of its state update; both are given parts of one projection."""
    random, inner, tokens = Random(memory.conv.device, 3), HEADS * DIM, batch.tokens
    sizes = [inner, inner + 2 * GROUPS * DSTATE, HEADS]
    _, x, dt = random.normal(tokens, sum(sizes), dtype=BRAIN).split(sizes, -1)
    weight, bias = random.normal(sizes[1], WIDTH, dtype=BRAIN), random.normal(sizes[1], dtype=BRAIN)
    convolved = random.normal(tokens, sizes[1], dtype=BRAIN)
    hidden, B, C = convolved.split([inner, GROUPS * DSTATE, GROUPS * DSTATE], -1)
    lead = (len(batch.slots), DRAFT) if batch.verify else (tokens,)
    call = {
        "state": memory.temporal,
        "x": hidden.view(-1, HEADS, DIM).view(*lead, HEADS, DIM),
        "dt": dt[:, :, None].expand(-1, -1, DIM).view(*lead, HEADS, DIM),
        "A": -random.normal(HEADS).abs()[:, None, None].expand(-1, DIM, DSTATE),
        "B": B.view(-1, GROUPS, DSTATE).view(*lead, GROUPS, DSTATE),
        "C": C.view(-1, GROUPS, DSTATE).view(*lead, GROUPS, DSTATE),
        "D": random.normal(HEADS, dtype=BRAIN)[:, None].expand(-1, DIM),
        "z": None,
        "dt_bias": random.normal(HEADS, dtype=BRAIN)[:, None].expand(-1, DIM),
        "dt_softplus": True,
        "state_batch_indices": indices(*batch.slots),
        "out": torch.full((tokens, inner), 5.0, dtype=BRAIN).view(*lead, HEADS, DIM),
    }
    if batch.verify:
        call |= {**batch.buffers(memory), "disable_state_update": True}
        call["intermediate_state_indices"] = indices(*ROWS)
    return batch.conv(x, memory, weight, bias), beside(memory, call)


def mamba1(batch: Batch, memory: Pool) -> Arguments:
    """Arguments of a Mamba-1 layer's state update: a head for every channel, of one row, with decays of its own."""
    random, channels, tokens = Random(memory.conv.device, 4), HEADS * DIM, batch.tokens
    x, z = (random.normal(tokens, channels, dtype=BRAIN).view(tokens, channels, 1) for _ in range(2))
    call = {
        "state": memory.temporal, "x": x, "dt": random.normal(tokens, channels, dtype=FLOAT).view(tokens, channels, 1),
        "A": -random.normal(channels, DSTATE).abs()[:, None], "B": random.normal(tokens, 1, DSTATE, dtype=BRAIN),
        "C": random.normal(tokens, 1, DSTATE, dtype=BRAIN), "D": random.normal(channels)[:, None], "z": z,
        "dt_bias": torch.zeros(channels, 1), "dt_softplus": True, "state_batch_indices": indices(*batch.slots),
        "out": torch.full_like(x, 5.0),
    }  # fmt: skip
    return beside(memory, call)


def delta(layers: str, batch: Batch, memory: Pool) -> tuple[Arguments, Arguments, Arguments]:
    """Arguments of a GDN or KDA layer's convolution, of its packed decode, and of its step between bounds."""
    random, tokens, kimi = Random(memory.conv.device, 5), batch.tokens, layers == "KDA"
    heads, V, K = memory.temporal.shape[1:]
    keys = heads if kimi else heads // 2
    sizes, channels = [keys * K, keys * K, heads * V], 2 * keys * K + heads * V
    weight = random.normal(channels, WIDTH, dtype=FLOAT if kimi else BRAIN)
    conv = batch.conv(random.normal(tokens, channels, dtype=BRAIN), memory, weight, None)
    mixed = random.normal(tokens, channels, dtype=BRAIN)
    gates = {
        "a": random.normal(tokens, heads * K, dtype=BRAIN) if kimi else random.normal(tokens, 2 * heads, dtype=BRAIN),
        "b": random.normal(1, tokens, heads, dtype=BRAIN),
        "A_log": random.normal(1, 1, heads, 1) if kimi else random.normal(heads),
        "dt_bias": random.normal(heads * K) if kimi else random.normal(heads, dtype=BRAIN),
    }
    if not kimi:
        gates["b"], gates["a"] = gates["a"].split([heads, heads], -1)  # of one projection
    packed = {
        "mixed_qkv": mixed, **gates, "b": gates["b"].view(tokens, heads), "scale": K**-0.5,
        "initial_state": memory.temporal, "out": torch.full((tokens, 1, heads, V), 5.0, dtype=BRAIN),
        "ssm_state_indices": indices(*batch.slots),
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    shapes = (keys, K), (keys, K), (heads, V)
    parts = (part.view(1, tokens, *shape) for part, shape in zip(mixed.split(sizes, -1), shapes, strict=True))
    step = {
        **dict(zip("qkv", parts, strict=True)), **gates, "softplus_beta": 1.0, "softplus_threshold": 20.0,
        "initial_state_source": memory.temporal, "initial_state_indices": indices(*batch.slots),
        "use_qk_l2norm_in_kernel": True, "cu_seqlens": batch.query_start_loc, "is_kda": kimi,
    }  # fmt: skip
    if batch.verify:
        step |= {**batch.buffers(memory), "disable_state_update": True}
    return conv, beside(memory, packed), beside(memory, step)
