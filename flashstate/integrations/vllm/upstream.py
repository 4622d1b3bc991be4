"""Everything of vLLM that is not its public interface: names, and where the plugin reaches in.

No other file of flashstate imports vLLM.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from flashstate.compat import vllm as compat
from flashstate.compat import vllm_kda
from flashstate.errors import dtype_name
from flashstate.integrations.vllm import contract
from flashstate.integrations.vllm.kinds import CHOOSING, DRAFTS, KDA, KINDS, PAGES, SSU, V2_STATES, Call, Kind
from flashstate.integrations.vllm.layers import Served, subclass, with_dtype, with_room_for_scales
from flashstate.integrations.vllm.options import Options, parse
from flashstate.integrations.vllm.pages import AROUND
from flashstate.integrations.vllm.serving import Function, Seeds, Serving, answered, current

BACKEND = "flashstate"
MOST_LAYERS = 1 << 12  # of a stage of a pipeline, for streams

logger = logging.getLogger("vllm.flashstate")  # below vLLM's own logger, which has a handler


def update_own_tokens(a: Any, b: Any, q: Any, **more: Any) -> Any:
    """Answer fused_sigmoid_gating_delta_rule_update where a and b may have more tokens than q.

    vLLM up to 0.27 gives it the gates of a whole batch where only some rows have drafts; its own kernel then takes the
    first, whichever they are.
    """
    if len(a) != q.shape[1]:
        tokens = metadata_of(current()).spec_token_indx
        a, b = a.index_select(0, tokens), b.index_select(0, tokens)
    return compat.fused_sigmoid_gating_delta_rule_update(a=a, b=b, q=q, **more)


OURS = {"fused_sigmoid_gating_delta_rule_update": update_own_tokens}  # in place of the adapters of flashstate.compat


def install() -> None:
    """Add flashstate to the backends that vLLM can choose. Calling it again changes nothing."""
    try:
        _install()
    except Exception as error:  # of a vLLM that nobody has asked to run on flashstate
        logger.warning("flashstate is not active in vLLM %s: %s", sources().version, error)


def _install() -> None:
    if changed := contract.changes(sources(), CHOOSING):
        logger.warning("flashstate is not active in vLLM %s: it does not know that %s", sources().version, changed)
        return
    add_backend()
    serve_layers()


def sources() -> contract.Sources:
    """Return the sources of the vLLM of this process."""
    found = contract.installed()
    assert found is not None  # vLLM itself loads the plugin
    return found


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
    mamba = getattr(vllm_config, "mamba_config", None)
    if mamba is None or mamba.backend is not add_backend():
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
        align = Platform.__dict__.get("_align_hybrid_block_size")
        if isinstance(align, classmethod):  # else check_pages refuses formats that it would be needed for
            Platform._align_hybrid_block_size = classmethod(_ours(_align(align.__func__)))


def _ours(function: Any) -> Any:
    function.of_flashstate = True
    return function


def _is_ours(function: Any) -> bool:
    return getattr(function, "of_flashstate", False)


def _make(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return __new__ of layers, which makes ours for a model that runs on flashstate.

    vLLM's way to replace a class, `register_oot`, would import all classes at start-up, and replace them for models
    that run on something else too.
    """
    from vllm.config import get_current_vllm_config_or_none  # fails now, not when a layer is made

    def make(cls: type, *args: Any, **more: Any) -> Any:
        if hasattr(cls, "get_state_shape") and not issubclass(cls, Served):
            config = get_current_vllm_config_or_none()
            options = None if config is None else options_of(config)
            if options is not None and (served := _class_of(cls, options)) is not None:
                return object.__new__(served)
        return stock(cls, *args, **more)

    return make


def on_cuda() -> bool:
    """Whether vLLM runs on GPUs of NVIDIA."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


_classes: dict[type, type] = {}
_left: set[str] = set()


def _class_of(base: type, options: Options) -> type | None:
    """Return the class that runs on flashstate in place of `base`, or None where its layers are left to vLLM.

    Say so once for each class that is left; raise where options would then be lost.
    """
    kind = next((kind for kind in KINDS if kind.name == base.__name__), None)
    why = "flashstate does not serve them"
    with suppress(Exception):  # vLLM names a backend that it lacks
        add_ssu_backend()
    if kind is not None and (kind.everywhere or on_cuda()):
        try:
            moved = f"{kind.name} is in {base.__module__}" if base.__module__ != kind.module else ""
            if not (changed := moved or contract.changes(sources(), kind)):
                return _classes.get(base) or _classes.setdefault(base, _served(base, kind))
            why = f"flashstate does not know that {changed}"
        except Exception as error:  # other kinds are served all the same
            why = f"flashstate failed: {error}"
    left = f"vLLM {sources().version} runs layers of {base.__name__} itself, since {why}"
    if options.dtype is not None or options.rounding != "nearest":
        raise ValueError(f"leave out state and stochastic rounding: {left}")
    if base.__name__ not in _left:
        logger.warning("%s", left)
    _left.add(base.__name__)
    return None


def _served(base: type, kind: Kind) -> type:
    """Make the class of layers that run on flashstate, whose calls are answered from now on."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    answer_calls(kind)
    return subclass(base, kind, _begin, eager_break_during_capture)


def _begin(layer: Served) -> None:
    """Let a layer that vLLM has just initialised run on flashstate."""
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform

    config = get_current_vllm_config()
    options = options_of(config) or Options()
    check_engine(config, options, hasattr(layer, "gdn_decode_kernel"))
    check_pages(options)
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
    if config.speculative_config is not None and not _counts_drafts(config):
        raise ValueError("vLLM cannot roll back the states of a model without attention: leave out speculative_config")
    if config.kv_transfer_config is not None and options.dtype is not None:
        kept = "vLLM cannot tell what takes pages over how states are stored"
        raise ValueError(f"{kept}: leave out state, or kv_transfer_config and kv_offloading_size")
    if chooses_kernel and os.environ.get("VLLM_GDN_DECODE_KERNEL", "").strip().lower() == "cuda":
        raise ValueError("VLLM_GDN_DECODE_KERNEL=cuda asks for a kernel of vLLM: leave it out, or mamba_backend")


def _counts_drafts(config: Any) -> bool:
    """Return whether vLLM counts accepted drafts; of models without attention, model runner V2 does since 0.28."""
    if config.model_config.is_hybrid:
        return True
    known = not contract.unknown(sources(), DRAFTS)
    return config.use_v2_model_runner and known and "is_attention_free" in sources().text(V2_STATES)


def stream_of(index: int) -> int:
    """The stream of random bits of the layer with this index in its process, unlike those of all layers and ranks."""
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    stage = get_pp_group().rank_in_group * MOST_LAYERS
    return (stage + index) * get_tensor_model_parallel_world_size() + get_tensor_model_parallel_rank()


def check_pages(options: Options) -> None:
    """Raise if states have another format than vLLM's, and vLLM's way to size and copy pages is not known."""
    if options.dtype is not None and (changed := contract.changes(sources(), PAGES)):
        raise ValueError(f"leave out state: flashstate does not know that in vLLM {sources().version} {changed}")


def answer_calls(kind: Kind) -> None:
    """Let flashstate answer the calls of a kind of layers, while one that it serves runs."""
    for call in kind.calls:
        there = [module for module in (kind.module, *call.modules) if sources().text(sources().file_of(module))]
        places = [place for place in map(importlib.import_module, there) if hasattr(place, call.name)]
        if not places and sources().origins(kind.file, call.name):
            raise AttributeError(f"{call.name} is not in {' or '.join(there)}")
        for place in places:
            stock = getattr(place, call.name)
            if not _is_ours(stock):
                setattr(place, call.name, _ours(_answer(call, stock, vllm_kda if place.__name__ in KDA else compat)))


def _answer(call: Call, stock: Function, adapters: Any) -> Function:
    """Return the function that takes the place of vLLM's own for a call."""
    if call.name in AROUND:
        return functools.partial(AROUND[call.name], stock)
    ours = OURS.get(call.name) or getattr(adapters, call.name)
    return answered(call.name, stock, ours, call.state)


def metadata_of(layer: Serving | None) -> Any:
    """What vLLM says of the batch that a layer runs on."""
    from vllm.forward_context import get_forward_context

    return get_forward_context().attn_metadata[layer.name]  # type: ignore[union-attr]


def _update(layer: Serving, pages: Any, *args: Any, **more: Any) -> None:
    """selective_state_update of the state in these pages of a layer."""
    compat.selective_state_update(layer.state_in(pages), *args, **more)


def add_ssu_backend() -> None:
    """Add a backend of selective_state_update under our name: vLLM's own where it is not known how to answer it."""
    from vllm.model_executor.layers.mamba.ops import ssu_dispatch

    backends, ours = ssu_dispatch._BACKEND_REGISTRY, add_backend()
    if ours in backends:
        return
    if contract.unknown(sources(), SSU):
        backends[ours] = backends[type(ours).TRITON]
        return

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

    backends[ours] = FlashstateSSUBackend


def _align(stock: Callable[..., None]) -> Callable[..., None]:
    """Platform._align_hybrid_block_size, which sizes pages by what the class of a model says of its states."""

    def align(cls: Any, vllm_config: Any, *args: Any, **more: Any) -> None:  # also for models of other backends
        from vllm.model_executor.models import ModelRegistry

        options = options_of(vllm_config)
        if options is None or options.dtype is None:
            stock(cls, vllm_config, *args, **more)
            return
        check_pages(options)
        config = vllm_config.model_config
        model, _ = ModelRegistry.resolve_model_cls(config.architecture, model_config=config)
        if hasattr(model, "get_mamba_specs_from_config"):
            raise ValueError(f"flashstate cannot size the pages of {model.__name__}: leave out state")
        with sized(model, options):
            stock(cls, vllm_config, *args, **more)

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
