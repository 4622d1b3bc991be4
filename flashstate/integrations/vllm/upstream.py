"""Everything of vLLM that is not its public interface: names, versions, and where the plugin reaches in.

No other file of flashstate imports vLLM.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flashstate.compat import vllm as compat
from flashstate.compat import vllm_kda
from flashstate.errors import dtype_name
from flashstate.integrations.reports import unknown_version
from flashstate.integrations.vllm.layers import Kind, Served, subclass, with_dtype, with_room_for_scales
from flashstate.integrations.vllm.options import Options, parse
from flashstate.integrations.vllm.serving import Seeds, Serving, answered, current

VERSIONS = ("0.26.0", "0.32.0")
BACKEND = "flashstate"
MOST_LAYERS = 1 << 12  # of a stage of a pipeline, for streams
MAMBA = "vllm.model_executor.layers.mamba"

logger = logging.getLogger("vllm.flashstate")  # below vLLM's own logger, which has a handler

GDN = f"{MAMBA}.gdn"
GATHER = f"{MAMBA}.ops.gather_initial_states"
KDA = tuple(f"vllm.models.kimi_k3.{vendor}.ops.third_party.kda" for vendor in ("nvidia", "amd"))

# Classes of layers, by module.
KINDS = {
    (f"{MAMBA}.mamba_mixer2", "MambaMixer2"): Kind(("conv_ssm_forward",), everywhere=True),
    (f"{MAMBA}.mamba_mixer", "MambaMixer"): Kind(("forward_impl",), every_format=False),
    (f"{MAMBA}.short_conv", "ShortConv"): Kind(("forward_cuda",)),
    (f"{GDN}.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention"): Kind(
        ("_forward_core", "_forward_core_fused_norm_packed"), settings=(("gdn_decode_kernel", "triton"),)
    ),
    (f"{GDN}.olmo_gdn_linear_attn", "OlmoHybridGatedDeltaNetAttention"): Kind(("_forward_core",)),
    (f"{GDN}.kimi_gdn_linear_attn", "KimiGatedDeltaNetAttention"): Kind(("_forward",), float32_prefill=True),
}


def update_own_tokens(a: Any, b: Any, q: Any, **more: Any) -> Any:
    """fused_sigmoid_gating_delta_rule_update where a and b may have more tokens than q. vLLM 0.26.0 gives it those of a
    whole batch where only some rows have drafts; its own kernel then takes the first, whichever they are."""
    if len(a) != q.shape[1]:
        tokens = metadata_of(current()).spec_token_indx
        a, b = a.index_select(0, tokens), b.index_select(0, tokens)
    return compat.fused_sigmoid_gating_delta_rule_update(a=a, b=b, q=q, **more)


def initial_states(states: Any, blocks: Tensor, known: Tensor) -> Tensor:
    """The states (n, heads, rows, cols) in these blocks, and zeros where a request has none yet."""
    if isinstance(states, Tensor):
        stock: Tensor = importlib.import_module(GATHER).gather_initial_states(states, blocks, known)
        return stock
    return torch.where(known[:, None, None, None], states[blocks], 0)


@dataclasses.dataclass(frozen=True)
class Call:
    """A function that layers of a module call.

    state: its argument that has the states. modules: where they find it, if not in their own module. ours: what answers
    it, if not what flashstate.compat.vllm has under its name. versions: those of vLLM in which it is called.
    """

    name: str
    state: str | None = None
    modules: tuple[str, ...] = ()
    ours: Callable[..., Any] | None = None
    versions: tuple[str, ...] = VERSIONS


CONV = Call("causal_conv1d_update")
CALLS = {
    f"{MAMBA}.mamba_mixer2": (CONV,),
    f"{MAMBA}.mamba_mixer": (CONV,),
    f"{MAMBA}.short_conv": (CONV,),
    f"{GDN}.qwen_gdn_linear_attn": (
        CONV,
        Call("fused_recurrent_gated_delta_rule_packed_decode", "initial_state"),
        Call("fused_sigmoid_gating_delta_rule_update", "initial_state", ours=update_own_tokens),
    ),
    f"{GDN}.olmo_gdn_linear_attn": (CONV, Call("fused_recurrent_gated_delta_rule", "initial_state")),
    f"{GDN}.kimi_gdn_linear_attn": (
        CONV,
        Call("gather_initial_states", ours=initial_states, versions=("0.32.0",)),
        Call("fused_recurrent_kda", "initial_state", versions=("0.26.0",)),
        *(
            Call(name, "initial_state", KDA, getattr(vllm_kda, name), ("0.32.0",))
            for name in ("fused_recurrent_kda", "fused_recurrent_kda_packed_decode")
        ),
    ),
}


def install() -> None:
    """Add flashstate to what vLLM can choose. Calling it again changes nothing."""
    found = version()
    if found not in VERSIONS:
        logger.warning(unknown_version("vLLM", VERSIONS, found))
        return
    add_backend()
    serve_layers()


def version() -> str:
    """The version of vLLM; its builds for CPUs are a package of their own."""
    import vllm

    return str(vllm.__version__).partition("+")[0]


def add_backend() -> Any:
    """The member FLASHSTATE of MambaBackendEnum, which is added if it is not there."""
    from vllm.config.mamba import MambaBackendEnum

    name = BACKEND.upper()
    if name not in MambaBackendEnum.__members__:
        member = object.__new__(MambaBackendEnum)
        member._name_, member._value_, member.__objclass__ = name, BACKEND, MambaBackendEnum
        member._sort_order_ = len(MambaBackendEnum.__members__)
        type.__setattr__(MambaBackendEnum, name, member)
        MambaBackendEnum._member_names_.append(name)
        MambaBackendEnum._member_map_[name] = member
        MambaBackendEnum._value2member_map_[BACKEND] = member
        copyreg.pickle(MambaBackendEnum, _reduce)
    return MambaBackendEnum[name]


def _reduce(member: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """How a member is pickled: a process that unpickles ours may not have loaded plugins yet."""
    return (add_backend, ()) if member.value == BACKEND else (type(member), (member.value,))


def options_of(vllm_config: Any) -> Options | None:
    """The options of a model that runs on flashstate; None if it runs on something else."""
    mamba = vllm_config.mamba_config
    if mamba.backend is not add_backend():
        return None
    extra = vllm_config.additional_config
    given = extra.get(BACKEND, {}) if isinstance(extra, dict) else {}
    return parse(given, mamba.enable_stochastic_rounding, mamba.stochastic_rounding_philox_rounds)


def serve_layers() -> None:
    """Let vLLM make layers of ours, and pages of their size, where flashstate is selected."""
    from vllm.model_executor.custom_op import CustomOp, PluggableLayer
    from vllm.platforms.interface import Platform

    if not _is_ours(PluggableLayer.__new__):
        for base in (PluggableLayer, CustomOp):  # which in vLLM 0.26.0 is the base of ShortConv
            base.__new__ = staticmethod(_ours(_make(base.__new__)))
        stock = Platform.__dict__["_align_hybrid_block_size"].__func__
        Platform._align_hybrid_block_size = classmethod(_ours(_align(stock)))


def _ours(function: Any) -> Any:
    function.of_flashstate = True
    return function


def _is_ours(function: Any) -> bool:
    return getattr(function, "of_flashstate", False)


def _make(stock: Callable[..., Any]) -> Callable[..., Any]:
    """__new__ of layers. vLLM's way to replace a class, `register_oot`, would import all classes at start-up, and
    replace them for models that run on something else too."""

    def make(cls: type, *args: Any, **more: Any) -> Any:
        if hasattr(cls, "get_state_shape") and not issubclass(cls, Served):
            options = _current_options()
            kind = KINDS.get((cls.__module__, cls.__name__))
            if options is not None and kind is not None and (kind.everywhere or on_cuda()):
                return object.__new__(_class_of(cls, kind))
            if options is not None:
                _leave(cls.__name__, options)
        return stock(cls, *args, **more)

    return make


def _current_options() -> Options | None:
    """The options of the model that vLLM is making; None if it runs on something else, or if there is none."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return None if config is None else options_of(config)


_left: set[str] = set()


def _leave(name: str, options: Options) -> None:
    """Leave layers of this class to vLLM, and say so once; raise where options would then be lost."""
    if options.dtype is not None or options.rounding != "nearest":
        raise ValueError(f"flashstate does not serve layers of {name}: leave out state and stochastic rounding")
    add_ssu_backend()
    if name not in _left:
        logger.warning("flashstate does not serve layers of %s: vLLM runs them", name)
    _left.add(name)


def on_cuda() -> bool:
    """Whether vLLM runs on GPUs of NVIDIA."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


_classes: dict[type, type] = {}


def _class_of(base: type, kind: Kind) -> type:
    """The class of layers that run on flashstate in place of `base`, whose module asks for it the first time."""
    if base not in _classes:
        add_ssu_backend()
        answer_calls(base.__module__)
        from vllm.compilation.breakable_cudagraph import eager_break_during_capture

        _classes[base] = subclass(base, kind, _begin, eager_break_during_capture)
    return _classes[base]


def _begin(layer: Served) -> None:
    """Let a layer that vLLM has just initialised run on flashstate."""
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform

    config = get_current_vllm_config()
    options = options_of(config) or Options()
    check_engine(config, options, hasattr(layer, "gdn_decode_kernel"))
    layers = config.compilation_config.static_forward_context.values()
    others = [other for other in layers if isinstance(other, Served) and other is not layer]
    seeds = others[0].served.seeds if others and others[0].served else Seeds(layer.prefix)
    serving = Serving(layer.prefix, options, stream_of(len(others)), seeds)
    checkpoints = not current_platform.is_cpu()  # where vLLM's scan returns the last state alone
    layer.serve(serving, config.model_config.dtype, checkpoints)
    if not others:
        dtype = layer.get_state_dtype()[-1]
        logger.info("flashstate is active: states are %s, rounded %s", dtype_name(dtype), options.rounding)


def check_engine(config: Any, options: Options, chooses_kernel: bool) -> None:
    """Raise where an engine would lose states, or what its user has chosen.

    chooses_kernel: whether its layers look at VLLM_GDN_DECODE_KERNEL.
    """
    # Model runner V1, and V2 of vLLM 0.26.0, count accepted drafts for hybrid models alone; others stay at one.
    counts = config.model_config.is_hybrid or (config.use_v2_model_runner and version() != "0.26.0")
    if config.speculative_config is not None and not counts:
        raise ValueError("vLLM cannot roll back the states of a model without attention: leave out speculative_config")
    if config.kv_transfer_config is not None and options.dtype is not None:
        kept = "vLLM cannot tell what takes pages over how states are stored"
        raise ValueError(f"{kept}: leave out state, or kv_transfer_config and kv_offloading_size")
    if chooses_kernel and os.environ.get("VLLM_GDN_DECODE_KERNEL", "").strip().lower() == "cuda":
        raise ValueError("VLLM_GDN_DECODE_KERNEL=cuda asks for a kernel of vLLM: leave it out, or mamba_backend")


def stream_of(index: int) -> int:
    """The stream of random bits of the layer with this index in its process, unlike those of all layers and ranks."""
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    stage = get_pp_group().rank_in_group * MOST_LAYERS
    return (stage + index) * get_tensor_model_parallel_world_size() + get_tensor_model_parallel_rank()


def answer_calls(module: str) -> None:
    """Let flashstate answer what a module of layers calls, while a layer of ours runs."""
    for call in CALLS[module]:
        if version() in call.versions:
            for place in map(importlib.import_module, call.modules or (module,)):
                stock = getattr(place, call.name)
                if not _is_ours(stock):
                    ours = call.ours or getattr(compat, call.name)
                    setattr(place, call.name, _ours(answered(call.name, stock, ours, call.state)))


def metadata_of(layer: Serving | None) -> Any:
    """What vLLM says of the batch that a layer runs on."""
    from vllm.forward_context import get_forward_context

    return get_forward_context().attn_metadata[layer.name]  # type: ignore[union-attr]


def _update(layer: Serving, pages: Any, *args: Any, **more: Any) -> None:
    """selective_state_update of the state in these pages of a layer."""
    compat.selective_state_update(layer.state_in(pages), *args, **more)


def add_ssu_backend() -> None:
    """Add what answers selective_state_update to the backends that vLLM starts by their names."""
    from vllm.model_executor.layers.mamba.ops import ssu_dispatch

    class FlashstateSSUBackend(ssu_dispatch.MambaSSUBackend):
        """Answers vLLM's selective_state_update for layers that run on flashstate, and leaves others to vLLM.

        It is no TritonSSUBackend: vLLM would keep it for a model that asks for that one.
        """

        def __init__(self, mamba_config: Any) -> None:
            super().__init__(mamba_config)
            self.stock = ssu_dispatch.TritonSSUBackend(mamba_config)

        @property
        def name(self) -> str:
            return BACKEND

        def __call__(self, state: Any, *args: Any, **more: Any) -> None:
            layer = current()
            if layer is None:
                self.stock(state, *args, **more)
            else:
                layer.call("selective_state_update", _update, layer, state, *args, **more)

    ssu_dispatch._BACKEND_REGISTRY.setdefault(add_backend(), FlashstateSSUBackend)


def _align(stock: Callable[..., None]) -> Callable[..., None]:
    """Platform._align_hybrid_block_size, which sizes pages by what the class of a model says of its states."""

    def align(cls: Any, vllm_config: Any, backend_cls: Any) -> None:
        from vllm.model_executor.models import ModelRegistry

        options = options_of(vllm_config)
        if options is None or options.dtype is None:
            stock(cls, vllm_config, backend_cls)
            return
        config = vllm_config.model_config
        model, _ = ModelRegistry.resolve_model_cls(config.architecture, model_config=config)
        if hasattr(model, "get_mamba_specs_from_config"):
            raise ValueError(f"flashstate cannot size the pages of {model.__name__}: leave out state")
        with sized(model, options):
            stock(cls, vllm_config, backend_cls)

    return align


@contextmanager
def sized(model: Any, options: Options) -> Iterator[None]:
    """Let a class of models say what layers on flashstate keep."""
    changes: dict[str, Callable[[Any, Options], Any]] = {
        "get_mamba_state_shape_from_config": with_room_for_scales,
        "get_mamba_state_dtype_from_config": with_dtype,
    }
    own = {name: model.__dict__.get(name) for name in changes}
    try:
        for name, change in changes.items():
            setattr(model, name, functools.partial(_changed, change, getattr(model, name), options))
        yield
    finally:
        for name, stock in own.items():
            if stock is None:
                delattr(model, name)
            else:
                setattr(model, name, stock)


def _changed(change: Callable[[Any, Options], Any], stock: Callable[[Any], Any], options: Options, config: Any) -> Any:
    return change(stock(config), options)
