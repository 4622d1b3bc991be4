"""Everything inside SGLang that flashstate touches, of the versions in SUPPORTED and of no others.

Modules are imported by the functions that need them: they are heavy, and SGLang may not be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, get_type_hints

SUPPORTED = ("0.5.23",)
NAME = "flashstate"  # what flags call it
LINEAR = "sglang.srt.layers.attention.linear"
MAMBA = "sglang.srt.layers.attention.mamba"
SERVER_ARGS = "sglang.srt.server_args"
CONV = "causal_conv1d_update"  # a global of the modules below, looked up by every call
CONV_OF_MAMBA = {f"{MAMBA}.mamba": (CONV, f"{CONV}_triton"), f"{MAMBA}.mamba1": (CONV, f"{CONV}_triton")}
CONV_OF_LINEAR = {f"{LINEAR}.gdn_backend": (CONV,), f"{LINEAR}.kda_backend": (CONV,)}
DISPATCHERS = {"GDN": f"{LINEAR}.gdn_backend.GDNKernelDispatcher", "KDA": f"{LINEAR}.kda_backend.KDAKernelDispatcher"}


def version() -> str:
    """The version of SGLang, without what a build adds to it."""
    return str(import_module("sglang.version").__version__).partition("+")[0]


def add_choice(flag: str) -> None:
    """Let a flag of the server take our name: its list of choices is that of the field's annotation."""
    hint = get_type_hints(import_module(SERVER_ARGS).ServerArgs, include_extras=True)[flag]
    choices = next(note.choices for note in hint.__metadata__ if hasattr(note, "choices"))
    if NAME not in choices:
        choices.append(NAME)


def add_state_update(backend: type) -> None:
    """Make `--mamba-backend` build this class: with the options of rounding, once in every scheduler."""
    import_module("sglang.kernels.ops.mamba.triton_ops.ssu_dispatch")._BACKEND_REGISTRY[NAME] = backend


def wrap_step(step: str, wrapper: Callable[[Any, Callable[[Any], None]], None]) -> None:
    """Call this with the server's arguments and the step of their resolution that has this name, instead of it."""
    import_module("sglang.srt.arg_groups.resolution_hooks").register_resolution_hook(step)(wrapper)


def resolved(server_args: Any) -> Any:
    """The server's arguments, as far as their resolution has come."""
    return import_module("sglang.srt.arg_groups.overrides").resolving_view(server_args)


@contextmanager
def declared(server_args: Any, **fields: Any) -> Iterator[None]:
    """Let these fields of the server's arguments have other values for a while."""
    import_module("sglang.srt.arg_groups.overrides").declare_resolution(server_args, NAME, **fields)
    entry = server_args._resolved_overrides[-1]
    try:
        yield
    finally:
        server_args._resolved_overrides[:] = [kept for kept in server_args._resolved_overrides if kept is not entry]


def hook(target: str, function: Callable[..., Any], kind: str) -> None:
    """Register a function that SGLang calls BEFORE, AFTER or AROUND one of its own."""
    hooks = import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(target, function, hooks.HookType[kind], source=hooks.HookSource(NAME, NAME))


def before_resolution(function: Callable[..., None]) -> None:
    """Call this with the arguments of a server before they are resolved, in versions that we know nothing else of."""
    owner = import_module(SERVER_ARGS).ServerArgs
    for method in ("resolve_once", "__post_init__"):
        if hasattr(owner, method):
            return hook(f"{SERVER_ARGS}.ServerArgs.{method}", function, "BEFORE")


def after_linear_choice(function: Callable[..., None]) -> None:
    """Call this when a model with linear attention chooses its kernels, before it makes their dispatcher."""
    hook(f"{LINEAR}.utils.resolve_linear_attn_backends", function, "AFTER")


def linear_choices() -> tuple[str, ...]:
    """For which of decode and verify the model that is being set up has chosen us."""
    mamba = import_module("sglang.srt.runtime_context").get_exec().mamba
    return tuple(mode for mode in ("decode", "verify") if getattr(mamba, f"linear_attn_{mode}_backend") == NAME)


def wrap_dispatcher(layers: str, kernel: Callable[[tuple[str, ...]], Any]) -> None:
    """Give the dispatcher of GDN or KDA layers our kernel for the modes that chose us, and Triton's to begin with."""
    triton = import_module(f"{LINEAR}.utils").LinearAttnKernelBackend.TRITON

    def made(init: Any, self: Any, decode: Any, prefill: Any, verify: Any = None) -> None:  # instead of its __init__
        modes = linear_choices()
        init(self, triton if "decode" in modes else decode, prefill, triton if "verify" in modes else verify)
        if modes:
            fill(self, kernel(modes), modes)

    hook(f"{DISPATCHERS[layers]}.__init__", made, "AROUND")


def apply_hooks() -> None:
    """Let hooks take effect that were registered after SGLang loaded its plugins; none does so twice."""
    import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()


def fill(dispatcher: Any, kernel: Any, modes: tuple[str, ...]) -> None:
    """Give a dispatcher a kernel for these modes."""
    if "decode" in modes:
        dispatcher.decode_kernel, dispatcher.supports_packed_decode = kernel, True
    if "verify" in modes:
        dispatcher.verify_kernel = dispatcher.tree_verify_kernel = kernel  # GDN layers have one for trees


def triton_kda_kernel() -> type:
    """The class that the dispatcher of KDA layers wants to see where a gate has a lower bound."""
    return import_module(f"{LINEAR}.kernels.kda_triton").TritonKDAKernel


def bind(function: Callable[..., Any], names: Mapping[str, tuple[str, ...]]) -> None:
    """Let these globals of modules be a function; they must be there already."""
    for path, attributes in names.items():
        module = import_module(path)
        for attribute in attributes:
            getattr(module, attribute)
            setattr(module, attribute, function)


def runs_on() -> str:
    """The platform that this process serves on: cuda, rocm or another."""
    utils = import_module("sglang.srt.utils")
    return "cuda" if utils.is_cuda() else "rocm" if utils.is_hip() else "another"


def layer_of(frame: FrameType | None) -> int | None:
    """The number of the layer that a frame was called for: attention backends keep it, or the layer, in a local."""
    while frame is not None:
        number = getattr(frame.f_locals.get("layer"), "layer_id", frame.f_locals.get("layer_id"))
        if isinstance(number, int):
            return number
        frame = frame.f_back
    return None
