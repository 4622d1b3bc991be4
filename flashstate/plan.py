"""`flashstate plan`: what one request keeps in memory, format by format, and how many requests fit."""

from __future__ import annotations

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from flashstate.basics import BINARY_UNITS, UNITS, parse_memory
from flashstate.errors import counted
from flashstate.models import ModelShape
from flashstate.state.formats import FORMATS, Format

SCALE_BYTES = 4  # float32, one per row of a block-scaled state
SEED_BYTES = 8  # int64, one per request whose states are rounded stochastically
DECAY_BYTES = 4  # float32 in a ring, dt or the logarithm of a decay, whatever the activations are
U_BYTES = 2  # float16 in a ring of the delta rule, whatever the activations are
CURSOR_BYTES = 8  # of a ring: start and count, int32 each, shared by all layers


def request_bytes(shape: ModelShape, format: Format) -> dict[str, int]:
    """Bytes that one request keeps over all layers, item by item; with a seed wherever the format can use one."""
    rows, activation = shape.heads * shape.rows, activation_bytes(shape)
    kept = {
        "state": shape.layers * rows * shape.cols * format.dtype.itemsize,
        "scales": shape.layers * rows * SCALE_BYTES if format.scaled else 0,
        "conv": shape.layers * shape.conv_channels * max(0, shape.conv_width - 1) * activation,
        "ring": shape.layers * (shape.window + shape.tokens) * ring_token(shape) + CURSOR_BYTES if shape.window else 0,
        "seed": SEED_BYTES if "stochastic" in format.roundings else 0,
    }
    return {**kept, "total": sum(kept.values())}


def activation_bytes(shape: ModelShape) -> int:
    """Bytes of one activation."""
    return getattr(torch, shape.activations).itemsize


def ring_token(shape: ModelShape) -> int:
    """Bytes of one token in the ring of a layer: of x, B and dt, or of u, k and a decay, which per channel is a."""
    activation = activation_bytes(shape)
    of_rows = activation if shape.kind == "mamba2" else U_BYTES
    decay = shape.cols * activation if shape.per_channel else DECAY_BYTES
    return shape.heads * (shape.rows * of_rows + decay) + shape.groups * shape.cols * activation


def show_plan(name: str, shape: ModelShape, memory: str, ranks: int = 1) -> None:
    """Print what a request keeps on each of so many tensor-parallel ranks, and how many fit in so much memory."""
    size, part = parse_memory(memory), shape.split(ranks)
    console = Console(highlight=False)
    console.print(f"{name}: {describe(shape)}", markup=False)
    if ranks > 1:
        console.print(f"On each of {ranks} ranks: {counted(part.heads, 'head')}, {group_count(part)}.")
    console.print(plan_table(part, size, memory))
    if part.window:
        rows = f"{part.window} + {part.tokens} tokens, the window and the longest call"
        console.print(f"The ring holds {rows}, in every layer.")
    console.print(
        f"The total includes a seed of {SEED_BYTES} bytes in formats with stochastic rounding. "
        "Not counted: weights, workspace, and the KV cache of attention layers."
    )


def describe(shape: ModelShape) -> str:
    """A shape in one sentence."""
    conv = f"a convolution of width {shape.conv_width}" if shape.conv_width else "no convolution"
    heads = f"{counted(shape.heads, 'head')} x {shape.rows} x {shape.cols}"
    decays = ", a decay per channel" if shape.per_channel else ""
    return (
        f"{shape.kind}, {counted(shape.layers, 'layer')} with a state of {heads}, "
        f"{group_count(shape)}{decays}, {conv}, {shape.activations} activations."
    )


def group_count(shape: ModelShape) -> str:
    return counted(shape.groups, "group" if shape.kind == "mamba2" else "key head")


def plan_table(shape: ModelShape, memory: int, budget: str) -> Table:
    """A row per format: its bytes, itemised, the requests that fit in memory, and its bytes relative to float32."""
    sizes = {format.name: request_bytes(shape, format) for format in FORMATS.values()}
    baseline = sizes["float32"]["total"]
    unit = next(name for name in reversed(BINARY_UNITS) if name == "B" or baseline >= 10 * UNITS[name])
    items = ("state", "scales", "conv", "ring", "total")
    parts = [item for item in items if any(size[item] for size in sizes.values())]
    names = (*parts, f"requests\nin {budget}", "of\nfloat32")
    columns = [Column(name, justify="right", overflow="fold") for name in names]
    title = f"{unit} per request, by the format of the state"
    table = Table(Column("format", no_wrap=True), *columns, title=title, title_justify="left", box=SIMPLE_HEAD)
    for name, size in sizes.items():
        cells = [amount(size[part], unit) for part in parts]
        table.add_row(name, *cells, f"{memory // size['total']:,}", f"{size['total'] / baseline:.1%}")
    return table


def amount(size: int, unit: str) -> str:
    """Bytes in a unit, without it."""
    if size == 0:
        return "-"
    return f"{size:,}" if unit == "B" else f"{size / UNITS[unit]:,.2f}"
