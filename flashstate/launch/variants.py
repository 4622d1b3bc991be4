"""The variants of kernels: what Triton compiles one for, and compiling many of them side by side."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import torch
from torch import Tensor

from flashstate.launch.start import Launch


def variants_of(launches: Iterable[Launch]) -> list[Launch]:
    """One launch of each variant among these; the others are let go while they come."""
    return list({variant_key(launch): launch for launch in launches}.values())


def variant_key(launch: Launch) -> Hashable:
    """What decides which compiled kernel a launch gets."""
    kinds = tuple(map(_kind, launch.arguments))
    return launch.kernel, launch.device, kinds, tuple(launch.constants.items()), tuple(launch.options.items())


def _kind(value: Any) -> Hashable:
    """All that Triton compiles into a kernel of an argument that it does not specialise on: its type."""
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if isinstance(value, float):
        return "fp32"
    return value


def compile_variants(variants: Sequence[Launch], progress: bool = False) -> None:
    """Compile each of these and load it to its device, as many at a time as there are cores; launch nothing. The
    compiler's passes, ptxas and the C compiler run beside each other; what is Python in Triton does not."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(_compile, launch) for launch in variants]
        for future in _with_bar(futures) if progress else futures:
            future.result()
    # Threads that use a kernel for the first time may each make it a cache, and all but one are lost. So ask again.
    for launch in variants:
        _compile(launch)


def _with_bar(futures: Sequence[Future[None]]) -> Iterable[Future[None]]:
    """Futures as they complete, with a progress bar on stderr."""
    from rich.console import Console  # takes as long to import as flashstate, and few need it
    from rich.progress import track

    return track(as_completed(futures), "compiling", len(futures), console=Console(stderr=True), transient=True)


def _compile(launch: Launch) -> None:
    with torch.cuda.device(launch.device):
        compiled = launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.constants, **launch.options)
        compiled.run  # noqa: B018  (loads it)
