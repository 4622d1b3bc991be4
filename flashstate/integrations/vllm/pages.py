"""States in the pages of vLLM, with their scales where the format has some.

vLLM gives a layer one page per block: so many bytes for each tensor of its state, one behind the other. A layer whose
states are int8, int16 or float8 asks for wider rows, of which only the bytes count: in each page all data come first,
as (heads, rows, cols), then all scales, as (heads, rows) float32. So vLLM copies, pads and frees both as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashstate.errors import dtype_name
from flashstate.ops.states import read_states, write_states
from flashstate.state.formats import FORMATS
from flashstate.state.state import State

NULL_BLOCK = 0  # vLLM's block for rows that are padding


def columns_of_scale(dtype: torch.dtype) -> int:
    """How many columns a row has to be wider for its scale to fit; 0 for formats without scales."""
    return torch.float32.itemsize // dtype.itemsize if FORMATS[dtype].scaled else 0


def widened(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape that vLLM is asked for, of a state of this shape and format."""
    return (*shape[:-1], shape[-1] + columns_of_scale(dtype))


def data_and_scale(pages: Tensor) -> tuple[Tensor, Tensor | None]:
    """The data (blocks, heads, rows, cols) and the scales (blocks, heads, rows) in pages (blocks, heads, rows, …) of
    the shape that vLLM was asked for; other formats have no scales."""
    wider = columns_of_scale(pages.dtype)
    if not wider:
        return pages, None
    if pages.stride(0) * pages.itemsize % torch.float32.itemsize or pages.data_ptr() % torch.float32.itemsize:
        wanted = "begin at a multiple of 4 bytes, in pages of a multiple of 4 bytes"
        raise ValueError(f"states of {dtype_name(pages.dtype)} with scales must {wanted}")
    _, heads, rows, cols = pages.shape
    flat, cols = pages.view(len(pages), -1), cols - wider  # never a copy
    data, scale = flat.split([heads * rows * cols, heads * rows * wider], 1)
    return data.unflatten(1, (heads, rows, cols)), scale.view(torch.float32).unflatten(1, (heads, rows))


class PagedState:
    """What a layer of vLLM finds in place of a tensor of states: prefill reads and stores float32 by blocks.

    Decode takes `state`. call: calls what it is given, with what follows; it may say more of an error.
    """

    dtype = torch.float32

    def __init__(self, state: State, call: Callable[..., Any]) -> None:
        self.state, self._call = state, call

    @property
    def shape(self) -> torch.Size:
        return self.state.data.shape

    @property
    def device(self) -> torch.device:
        return self.state.data.device

    def __getitem__(self, blocks: Tensor) -> Tensor:
        """The states in these blocks: (n, heads, rows, cols) float32; zeros of the null block."""
        return self._call(read_states, self.state, blocks.contiguous(), NULL_BLOCK)

    def __setitem__(self, blocks: Tensor, states: Any) -> None:
        """Round states (n, heads, rows, cols), or a number for all of them, and store them in these blocks, but for the
        null block."""
        if not isinstance(states, Tensor):
            one = torch.full((1, 1, 1, 1), states, dtype=self.dtype, device=self.device)
            states = one.expand(len(blocks), *self.shape[1:])
        self._call(write_states, self.state, blocks.contiguous(), states, NULL_BLOCK)


def initial_states(stock: Callable[..., Any], states: Any, blocks: Tensor, known: Tensor) -> Any:
    """Return the states (n, heads, rows, cols) in these blocks, and zeros where a request has none yet."""
    if not isinstance(states, PagedState):
        return stock(states, blocks, known)
    return torch.where(known[:, None, None, None], states[blocks], 0)


def scan(stock: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Run vLLM's scan of prompts; store the last states here if its kernel cannot write the pages of a layer."""
    pages = more.get("final_states_out")
    if not isinstance(pages, PagedState):
        return stock(*args, **more)
    pages[more["final_state_indices"]] = stock(*args, **{**more, "final_states_out": None, "final_state_indices": None})
    return None


# Functions that run vLLM's own on states that it can take, and do their part of the work on pages with scales.
AROUND = {"gather_initial_states": initial_states, "mamba_chunk_scan_combined_varlen": scan}
