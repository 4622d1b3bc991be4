"""SGLang's modules as far as flashstate touches them, put into sys.modules: made here, or a few read from its sources.

What is private in them, and so recorded, is in test_integration_sglang_facts.py.
"""

import __future__

import ast
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, Optional

import pytest
import torch

LINEAR, MAMBA = "sglang.srt.layers.attention.linear", "sglang.srt.layers.attention.mamba"
HOOKS, STEPS = "sglang.srt.plugins.hook_registry", "sglang.srt.arg_groups.resolution_hooks"
DISPATCH = "sglang.kernels.ops.mamba.triton_ops.ssu_dispatch"
READ = (HOOKS, STEPS, DISPATCH)  # need nothing but torch
SOURCES = os.environ.get("FLASHSTATE_SGLANG_SOURCES")
needs_sources = pytest.mark.skipif(
    SOURCES is None, reason="needs FLASHSTATE_SGLANG_SOURCES: the folder with SGLang's package `sglang`"
)


def source(path: str) -> str:
    """The text of a file of SGLang's package."""
    return (Path(SOURCES or "") / "sglang" / path).read_text(encoding="utf-8")


def choice(*names: str) -> SimpleNamespace:
    return SimpleNamespace(choices=list(names))


def server_args_class() -> type:
    """ServerArgs with the fields that plugins and checks read, and the notes that a command line is made from."""
    linear = choice("triton", "flashinfer")  # one list for three flags

    class ServerArgs:
        mamba_backend: Annotated[str, choice("triton", "flashinfer")] = "triton"
        linear_attn_backend: Annotated[str, linear] = "triton"
        linear_attn_decode_backend: Annotated[str | None, linear] = None
        linear_attn_prefill_backend: Annotated[str | None, linear] = None
        linear_attn_verify_backend: Annotated[str | None, choice("triton", "nv_cutedsl")] = None
        enable_linear_replayssm: bool = False
        enable_linear_replayssm_spec: bool = False
        enable_mamba_cache_stochastic_rounding: bool = False
        mamba_cache_philox_rounds: int = 0

        def __init__(self, **fields: Any) -> None:
            vars(self).update(fields)

        def resolve_once(self) -> None:
            """Run the steps of resolution that plugins wrap; the last knows kernels by their names."""
            for step in (handle_mamba_backend, handle_linear_attn_backend, handle_page_major_kv_layout):
                sys.modules[STEPS].run_hook(step, self)

    return ServerArgs


def handle_mamba_backend(server_args: Any) -> None: ...


def handle_linear_attn_backend(server_args: Any) -> None: ...


def handle_page_major_kv_layout(server_args: Any) -> None:
    cfg = resolving_view(server_args)
    assert cfg.mamba_backend in (None, "triton"), cfg.mamba_backend
    assert (cfg.linear_attn_decode_backend or cfg.linear_attn_backend) in ("triton", "flashinfer")


def resolving_view(server_args: Any) -> SimpleNamespace:
    """Arguments as far as they are resolved: what was declared last, else what was given."""
    view = SimpleNamespace(**{name: getattr(server_args, name) for name in type(server_args).__annotations__})
    for _, fields in getattr(server_args, "_resolved_overrides", []):
        vars(view).update(fields)
    return view


def declare_resolution(server_args: Any, source: str, **fields: Any) -> None:
    vars(server_args).setdefault("_resolved_overrides", []).append((source, fields))


class HookType(Enum):
    BEFORE, AFTER, AROUND = "before", "after", "around"


class HookRegistry:
    """Hooks by their targets; each target is wrapped once, when hooks are applied."""

    hooks: dict[str, list[tuple[Callable[..., Any], HookType]]]
    patched: set[str]

    @classmethod
    def reset(cls) -> None:
        cls.hooks, cls.patched = defaultdict(list), set()

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType, *, source: Any = None) -> None:
        cls.hooks[target].append((hook, hook_type))

    @classmethod
    def apply_hooks(cls) -> None:
        for target in cls.hooks.keys() - cls.patched:
            path, _, name = target.rpartition(".")
            module, _, owner = path.rpartition(".")
            holder = sys.modules[path] if path in sys.modules else getattr(sys.modules[module], owner)
            for hook, kind in cls.hooks[target]:
                setattr(holder, name, wrapped(getattr(holder, name), hook, kind))
            cls.patched.add(target)


def wrapped(function: Callable[..., Any], hook: Callable[..., Any], kind: HookType) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if kind is HookType.AROUND:
            return hook(function, *args, **kwargs)
        if kind is HookType.BEFORE:
            hook(*args, **kwargs)
        result = function(*args, **kwargs)
        return (kind is HookType.AFTER and hook(result, *args, **kwargs)) or result

    return run


class LinearAttnKernelBackend(Enum):
    TRITON, CUSTOM = "triton", "custom"

    @classmethod
    def _missing_(cls, value: object) -> "LinearAttnKernelBackend":
        return cls.CUSTOM


def says(word: str) -> Callable[..., str]:
    return lambda self, *args, **kwargs: f"{word} by SGLang"


class Stock:
    """A kernel of SGLang, which says only that it ran."""

    decode, extend, target_verify = map(says, ("decoded", "prefilled", "verified"))

    def __init__(self, **options: Any) -> None:
        pass


class TritonKDAKernel(Stock):
    pass


def dispatcher(kernel: type[Stock]) -> type:
    """A class that has a kernel for each mode, and knows no backend but triton."""

    class KernelDispatcher:
        def __init__(self, decode_backend: Any, prefill_backend: Any, verify_backend: Any = None) -> None:
            for backend in (decode_backend, prefill_backend, verify_backend):
                assert backend is LinearAttnKernelBackend.TRITON, f"Unsupported backend: {backend}"
            self.decode_kernel = self.extend_kernel = self.verify_kernel = self.tree_verify_kernel = kernel()
            self.supports_packed_decode = False

    return KernelDispatcher


def read(path: str, place: str, **names: Any) -> Any:
    """A class or a function of SGLang's sources, or a method as a function, that knows these names."""
    *owners, name = place.split(".")
    body = ast.parse(source(path)).body
    for owner in owners:
        body = next(n.body for n in body if isinstance(n, ast.ClassDef) and n.name == owner)
    tree = ast.Module([n for n in body if getattr(n, "name", None) == name], [])
    space = {"torch": torch, "Optional": Optional, "Enum": Enum, "rank0_log": lambda message: None, **names}
    exec(compile(tree, path, "exec", __future__.annotations.compiler_flag), space)
    return space[name]


def read_dispatchers() -> dict[str, dict[str, Any]]:
    """The dispatchers of SGLang's sources, over kernels that only say that they ran."""
    folder = LINEAR.partition(".")[2].replace(".", "/")
    names = {"LinearAttnKernelBackend": read(f"{folder}/utils.py", "LinearAttnKernelBackend")}
    stock = {"TritonGDNKernel": Stock, "TritonKDAKernel": TritonKDAKernel}
    made = {f"{LINEAR}.utils": dict(names)}
    for kind in ("GDN", "KDA"):
        backend, name = f"{kind.lower()}_backend", f"{kind}KernelDispatcher"
        made[f"{LINEAR}.{backend}"] = {name: read(f"{folder}/{backend}.py", name, **names, **stock)}
    return made


def own_conv(*args: Any, **kwargs: Any) -> str:
    return "convolved by SGLang"


def resolve_linear_attn_backends(prefill_default: str | None = None) -> Any:
    """The backends of a runner, each by the flag of its mode."""
    mamba, backend = sys.modules["sglang.srt.runtime_context"].get_exec().mamba, sys.modules[f"{LINEAR}.utils"]
    default = {"decode": mamba.linear_attn_backend, "prefill": mamba.linear_attn_backend, "verify": "triton"}
    modes = {mode: getattr(mamba, f"linear_attn_{mode}_backend") or name for mode, name in default.items()}
    return SimpleNamespace(**{mode: backend.LinearAttnKernelBackend(name) for mode, name in modes.items()})


def state_updates() -> dict[str, Any]:
    """Where SGLang looks for a state update: by name, with one made for the server."""
    made: list[Any] = []
    registry: dict[str, type] = {"triton": Stock, "flashinfer": Stock}

    def initialize(server_args: Any) -> None:
        stochastic, rounds = server_args.enable_mamba_cache_stochastic_rounding, server_args.mamba_cache_philox_rounds
        backend = registry[server_args.mamba_backend]
        made[:] = [backend(enable_stochastic_rounding=stochastic, cache_philox_rounds=rounds)]

    def update(*tensors: Any, **options: Any) -> None:
        """Up to D by position."""
        made[0](*tensors[:6], D=tensors[6], **options)

    return {
        "_BACKEND_REGISTRY": registry, "selective_state_update": update,
        "initialize_mamba_selective_state_update_backend": initialize,
    }  # fmt: skip


def modules(version: str, platform: str) -> dict[str, dict[str, Any]]:
    """What is in every module."""
    HookRegistry.reset()
    convolutions = dict.fromkeys(("causal_conv1d_update", "causal_conv1d_update_triton"), own_conv)
    steps: dict[str, list[Any]] = defaultdict(list)

    def run_hook(builtin: Callable[[Any], None], server_args: Any) -> None:
        step = builtin
        for wrapper in steps[builtin.__name__]:
            step = partial(wrapper, previous=step)
        step(server_args)

    return {
        "sglang.version": {"__version__": version},
        "sglang.srt.server_args": {"ServerArgs": server_args_class()},
        "sglang.srt.utils": {"is_cuda": lambda: platform == "cuda", "is_hip": lambda: platform == "rocm"},
        "sglang.srt.runtime_context": {},
        "sglang.srt.arg_groups.overrides": {f.__name__: f for f in (resolving_view, declare_resolution)},
        HOOKS: {"HookRegistry": HookRegistry, "HookType": HookType, "HookSource": lambda *names: names},
        STEPS: {
            "register_resolution_hook": lambda name: lambda wrapper: steps[name].append(wrapper), "run_hook": run_hook,
        },
        DISPATCH: state_updates(),
        DISPATCH.replace("ssu_dispatch", "mamba_ssm"): {"selective_state_update": own_conv},
        f"{MAMBA}.mamba": dict(convolutions),
        f"{MAMBA}.mamba1": dict(convolutions),
        f"{LINEAR}.utils": {
            "LinearAttnKernelBackend": LinearAttnKernelBackend,
            "resolve_linear_attn_backends": resolve_linear_attn_backends,
        },
        f"{LINEAR}.kernels.kda_triton": {"TritonKDAKernel": TritonKDAKernel},
        f"{LINEAR}.gdn_backend": {"causal_conv1d_update": own_conv, "GDNKernelDispatcher": dispatcher(Stock)},
        f"{LINEAR}.kda_backend": {"causal_conv1d_update": own_conv, "KDAKernelDispatcher": dispatcher(TritonKDAKernel)},
    }  # fmt: skip


class Engine:
    """A process of SGLang: its modules, which plugins and servers it has, and models that it sets up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str, platform: str, read: bool) -> None:
        for path, names in modules(version, platform).items():
            for package in parents(path):
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
            monkeypatch.setitem(sys.modules, path, module := ModuleType(path))
            vars(module).update(names)
            if read and path in READ:
                exec(compile(source(path.partition(".")[2].replace(".", "/") + ".py"), path, "exec"), vars(module))
        if read:
            sys.modules[HOOKS].HookRegistry.reset()
            for path, names in read_dispatchers().items():
                vars(sys.modules[path]).update(names)

    def __getitem__(self, path: str) -> Any:
        return sys.modules[path]

    def load(self, register: Callable[[], None]) -> None:
        """As load_plugins does it."""
        register()
        self[HOOKS].HookRegistry.apply_hooks()

    def serve(self, **flags: Any) -> Any:
        """A server with these flags, whose arguments are resolved; its scheduler makes the state update."""
        server_args = self["sglang.srt.server_args"].ServerArgs(**flags)
        server_args.resolve_once()
        self["sglang.srt.runtime_context"].get_exec = lambda: SimpleNamespace(mamba=server_args)
        self[DISPATCH].initialize_mamba_selective_state_update_backend(server_args)
        return server_args

    def dispatcher(self, layers: str) -> Any:
        """What a model with GDN or KDA layers sets up."""
        backends = self[f"{LINEAR}.utils"].resolve_linear_attn_backends()
        made = getattr(self[f"{LINEAR}.{layers.lower()}_backend"], f"{layers}KernelDispatcher")
        return made(backends.decode, backends.prefill, backends.verify)


def parents(path: str) -> list[str]:
    """The packages of a module that are not there yet."""
    parts = path.split(".")
    return [package for n in range(1, len(parts)) if (package := ".".join(parts[:n])) not in sys.modules]
