"""Layers of vLLM without its engine: small ones, on pages of bytes, that run batches which are written out."""

from tests_vllm import oldest, triton_on_cpu  # noqa: F401, they prepare vLLM

# isort: split
import contextlib
import dataclasses
import functools
import importlib
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.mamba.ops import ssu_dispatch
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata, compute_varlen_chunk_metadata
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadata
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

from flashstate.integrations.vllm import register, upstream
from flashstate.integrations.vllm.kinds import KDA, KINDS, LAYERS

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from models_of_peers import decoded
from peer_calls import Adapter
from peer_conv1d import VLLM_CONV
from peer_rules import VLLM_DECAYS, VLLM_DECODE, VLLM_KDA, VLLM_RAW_DECODE, VLLM_RAW_KDA, VLLM_RULE
from peer_selective import VLLM

vars(_custom_ops).pop("causal_conv1d_weight_pack", None)  # packs bfloat16 weights, on CPUs that have kernels for that
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VERSION = upstream.sources().version
PREFIX, BLOCKS, PADDING = "model.layers.0.mixer", 14, 20  # PADDING: bytes behind the states of a page
HIDDEN, HEADS, KEYS, WIDTH, CHUNK = 32, 4, 32, 4, 16
VALUES = KEYS if torch.cuda.is_available() else 16  # vLLM's kernel for prompts compiles for heads of equal sizes alone


# Batches


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests, in the order that vLLM has them.

    decodes: their blocks. drafts: of each request its blocks, how many tokens it has, and how many were accepted of the
    step before. prefills: of each its block, how many tokens it has, and whether it continues. padding: requests that
    a graph has besides, in the null block. drafts_last: whether prompts come before drafts. moves: in mode `all` of the
    prefix cache, the block that each request goes on to behind its own, or None where it stays.
    """

    decodes: Sequence[int] = ()
    drafts: Sequence[tuple[Sequence[int], int, int]] = ()
    prefills: Sequence[tuple[int, int, bool]] = ()
    padding: int = 0
    drafts_last: bool = False
    moves: Sequence[int | None] = ()

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(n for _, n, _ in self.drafts) + sum(n for _, n, _ in self.prefills)

    @property
    def padded_tokens(self) -> int:
        return self.tokens + self.padding * max([n for _, n, _ in self.drafts], default=1)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def bounds(lengths: Sequence[int]) -> Tensor:
    return ints(0, *accumulate(lengths))


def of_class(kind: type, **fields: Any) -> Any:
    """Metadata with these fields, as far as this version of vLLM has them, and None for others."""
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    return kind(**{name: fields.get(name) for name in names})


def conv_metadata(lengths: Sequence[int]) -> dict[str, Any]:
    found = compute_causal_conv1d_metadata(bounds(lengths).cpu(), device=DEVICE)
    return dict(zip(("nums_dict", "batch_ptr", "token_chunk_offset_ptr"), found, strict=True))


def gdn_metadata(batch: Batch) -> GDNAttentionMetadata:
    """What vLLM says of a batch to layers of delta rules."""
    nulls, prefills = [0] * batch.padding, batch.prefills
    blocks = [*batch.decodes, *([] if batch.drafts else nulls), *(block for block, _, _ in prefills)]
    lengths = [1] * len(batch.decodes) + ([] if batch.drafts else nulls) + [n for _, n, _ in prefills]
    known = torch.tensor([True] * (len(blocks) - len(prefills)) + [c for _, _, c in prefills], device=DEVICE)
    fields: dict[str, Any] = {
        "num_prefills": len(prefills),
        "num_prefill_tokens": sum(n for _, n, _ in prefills),
        "num_decodes": len(blocks) - len(prefills),
        "num_decode_tokens": len(batch.decodes),
        "num_actual_tokens": batch.padded_tokens,
        "non_spec_query_start_loc": bounds(lengths),
        "non_spec_state_indices_tensor": ints(*blocks),
        "num_spec_decodes": len(batch.drafts),
        "num_spec_decode_tokens": sum(n for _, n, _ in batch.drafts),
    }
    if prefills:
        first = 0 if batch.drafts else len(blocks) - len(prefills)  # whose states the chunked kernel takes
        fields |= {
            "has_initial_state": known,
            "prefill_query_start_loc": bounds(lengths[first:]),
            "prefill_state_indices": ints(*blocks[first:]),
            "prefill_has_initial_state": known[first:],
            **chunk_metadata(lengths[first:]),
            **conv_metadata(lengths),
        }
    return of_class(GDNAttentionMetadata, **fields, **(draft_metadata(batch) if batch.drafts else {}))


def chunk_metadata(lengths: Sequence[int]) -> dict[str, Tensor]:
    from vllm.third_party.flash_linear_attention.ops import index
    from vllm.third_party.flash_linear_attention.ops.utils import FLA_CHUNK_SIZE

    found = bounds(lengths).cpu()
    return {
        "chunk_indices": index.prepare_chunk_indices(found, FLA_CHUNK_SIZE).to(DEVICE),
        "chunk_offsets": index.prepare_chunk_offsets(found, FLA_CHUNK_SIZE).to(DEVICE),
    }


def draft_metadata(batch: Batch) -> dict[str, Any]:
    """What is said of requests with drafts; those of padding have the null block, no tokens and a count of one."""
    lengths, rows = [n for _, n, _ in batch.drafts], [ints(*blocks) for blocks, _, _ in batch.drafts]
    rows += [torch.zeros_like(rows[0])] * batch.padding
    drafts, others = torch.arange(batch.tokens).split([sum(lengths), batch.tokens - sum(lengths)])
    if batch.drafts_last:
        others, drafts = torch.arange(batch.tokens).split([len(others), len(drafts)])
    return {
        "spec_query_start_loc": bounds([*lengths, *([0] * batch.padding)]),
        "spec_state_indices_tensor": torch.stack(rows),
        "spec_sequence_masks": torch.ones(len(rows), dtype=torch.bool, device=DEVICE),
        "spec_token_indx": drafts.to(DEVICE),
        "non_spec_token_indx": others.to(DEVICE),
        "num_accepted_tokens": ints(*(count for _, _, count in batch.drafts), *([1] * batch.padding)),
    }


def mamba_metadata(kind: type, batch: Batch) -> Any:
    """What vLLM says of a batch to other layers."""
    lengths = [n for _, n, _ in batch.prefills]
    fields: dict[str, Any] = {
        "num_prefills": len(batch.prefills),
        "num_prefill_tokens": sum(lengths),
        "num_decodes": len(batch.decodes) + len(batch.drafts) + batch.padding,
        "num_decode_tokens": batch.padded_tokens - sum(lengths),
        "num_reqs": len(batch.decodes) + len(batch.drafts) + len(lengths) + batch.padding,
        "state_indices_tensor_d": ints(*batch.decodes, *([0] * batch.padding)),
        "state_indices_tensor_p": ints(*(block for block, _, _ in batch.prefills)),
    }
    if batch.drafts:
        drafts = draft_metadata(batch)
        fields["num_accepted_tokens"] = drafts["num_accepted_tokens"]
        fields["state_indices_tensor_d"] = drafts["spec_state_indices_tensor"]
        fields["query_start_loc_d"] = drafts["spec_query_start_loc"]
    if lengths:
        continues = torch.tensor([c for _, _, c in batch.prefills], device=DEVICE)
        fields |= {"has_initial_states_p": continues, "query_start_loc_p": bounds(lengths), **conv_metadata(lengths)}
        names = ("cu_chunk_seqlen_p", "last_chunk_indices_p", "seq_idx_p")
        fields |= dict(zip(names, compute_varlen_chunk_metadata(bounds(lengths).cpu(), CHUNK), strict=True))
        fields |= {"chunk_size": CHUNK, "prep_initial_states": bool(continues.any())}
    if batch.moves:
        fields |= moving_metadata(batch, fields["state_indices_tensor_d"])
    return of_class(kind, **fields)


def moving_metadata(batch: Batch, blocks: Tensor) -> dict[str, Tensor]:
    """What is said in mode `all`: all blocks of requests, in which the state is, and to which it goes."""
    moves = [*batch.moves, *([None] * batch.padding)]
    behind = ints(*(block or 0 for block in moves))
    first = torch.zeros(len(moves), dtype=torch.int32, device=DEVICE)
    return {
        "state_indices_tensor_d": torch.cat([blocks.reshape(len(moves), -1), behind[:, None]], 1),
        "block_idx_last_computed_token": first,
        "block_idx_last_scheduled_token": ints(*(block is not None for block in moves)),
        "block_idx_last_scheduled_token_prev_step": first,
    }


# Layers


@dataclasses.dataclass(frozen=True)
class Family:
    """A class of layers: its module and name, what makes one, what says the batch, and the method that runs it.

    ssu: whether it calls selective_state_update. own_dtype: whether the model has the dtype of its states.
    """

    module: str
    name: str
    make: Callable[[type, VllmConfig], Any]
    metadata: Callable[[Batch], Any]
    method: str = "forward"
    ssu: bool = False
    own_dtype: bool = False

    @property
    def stock(self) -> type:
        return getattr(importlib.import_module(self.module), self.name)


def delta_config(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        hidden_size=HIDDEN, hidden_act="silu", rms_norm_eps=1e-6, linear_num_key_heads=2, linear_num_value_heads=HEADS,
        linear_key_head_dim=KEYS, linear_value_head_dim=VALUES, linear_conv_kernel_dim=WIDTH, torch_dtype=torch.float32,
        **more,
    )  # fmt: skip


def make_delta(kind: type, config: VllmConfig, **more: Any) -> Any:
    return kind(delta_config(**more), config, prefix=PREFIX)


def make_kimi(kind: type, config: VllmConfig, **more: Any) -> Any:
    sizes = {"head_dim": KEYS, "num_heads": HEADS, "short_conv_kernel_size": WIDTH}
    return kind(delta_config(linear_attn_config={**sizes, **more}), config, prefix=PREFIX)


def make_mamba(kind: type, config: VllmConfig) -> Any:
    return kind(
        hidden_size=HIDDEN, ssm_state_size=16, conv_kernel_size=WIDTH, intermediate_size=48, time_step_rank=8,
        use_conv_bias=True, use_bias=False, use_rms_norm=False, model_config=config.model_config,
        cache_config=config.cache_config, prefix=PREFIX,
    )  # fmt: skip


def make_mamba2(kind: type, config: VllmConfig) -> Any:
    return kind(
        hidden_size=HIDDEN, ssm_state_size=16, conv_kernel_size=WIDTH, intermediate_size=64, n_groups=2,
        num_heads=HEADS, head_dim=16, use_conv_bias=True, use_bias=False, model_config=config.model_config,
        cache_config=config.cache_config, prefix=PREFIX,
    )  # fmt: skip


def make_short_conv(kind: type, config: VllmConfig) -> Any:
    sizes = SimpleNamespace(conv_L_cache=WIDTH, conv_bias=False)
    return kind(sizes, HIDDEN, 0, config.model_config, config.cache_config, prefix=PREFIX)


MAMBA = f"vllm.{LAYERS.replace('/', '.')}"
GDN = f"{MAMBA}.gdn"
QWEN = Family(
    f"{GDN}.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention", make_delta, gdn_metadata, method="forward_cuda"
)
OLMO = Family(
    f"{GDN}.olmo_gdn_linear_attn", "OlmoHybridGatedDeltaNetAttention",
    functools.partial(make_delta, linear_allow_neg_eigval=True), gdn_metadata,
)  # fmt: skip
KIMI = Family(f"{GDN}.kimi_gdn_linear_attn", "KimiGatedDeltaNetAttention", make_kimi, gdn_metadata)
BOUNDED_KIMI = dataclasses.replace(KIMI, make=functools.partial(make_kimi, gate_lower_bound=-5.0))
MAMBA1 = Family(
    f"{MAMBA}.mamba_mixer", "MambaMixer", make_mamba, functools.partial(mamba_metadata, Mamba1AttentionMetadata),
    ssu=True, own_dtype=True,
)  # fmt: skip
MAMBA2 = Family(
    f"{MAMBA}.mamba_mixer2", "MambaMixer2", make_mamba2, functools.partial(mamba_metadata, Mamba2AttentionMetadata),
    ssu=True,
)  # fmt: skip
SHORT_CONV = Family(
    f"{MAMBA}.short_conv", "ShortConv", make_short_conv, functools.partial(mamba_metadata, ShortConvAttentionMetadata),
    method="forward_cuda",
)  # fmt: skip


def start_alone() -> None:
    """Be the only rank of a model, once per process."""
    if not parallel_state.model_parallel_is_initialized():
        where = f"file://{tempfile.mkdtemp()}/ranks"
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(DEVICE.type))):
            parallel_state.init_distributed_environment(1, 0, where, 0, backend="gloo")
            parallel_state.initialize_model_parallel(1, 1, backend="gloo")


def config_of(options: dict[str, Any] | None, batch: Batch, dtype: torch.dtype) -> VllmConfig:
    """A model that runs on flashstate with these options, or on vLLM's kernels, and can have such a batch."""
    register()
    config = VllmConfig(device_config=DeviceConfig(DEVICE.type))
    config.model_config = SimpleNamespace(dtype=dtype, hf_text_config=delta_config(), is_hybrid=True)
    config.cache_config.mamba_block_size = 64
    config.additional_config = {"gdn_prefill_backend": "triton", "flashstate": options or {}}
    config.cache_config.mamba_cache_mode = "all" if batch.moves else "none"
    drafts = max([len(blocks) - 1 for blocks, _, _ in batch.drafts], default=0)
    if drafts:
        config.speculative_config = SimpleNamespace(num_speculative_tokens=drafts)
    if options is not None:
        config.mamba_config.backend = upstream.add_backend()
    return config


@dataclasses.dataclass
class Driven:
    """A layer of vLLM, and its pages (blocks, bytes)."""

    family: Family
    layer: Any
    config: VllmConfig
    pages: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of its states, as views of pages."""
        return self.layer.kv_cache

    def scaled(self) -> tuple[Tensor, Tensor]:
        """The data (blocks, heads, rows, cols) and the scales (blocks, heads, rows) of states with scales."""
        heads, rows, cols = self.family.stock.get_state_shape(self.layer)[-1]
        flat = self.tensors[-1].flatten(1)
        data, scale = flat[:, : heads * rows * cols], flat[:, heads * rows * cols :]
        return data.unflatten(1, (heads, rows, cols)), scale.view(torch.float32).unflatten(1, (heads, rows))

    def run(self, batch: Batch, hidden: Tensor) -> Tensor:
        """The output of the layer."""
        metadata = {PREFIX: self.family.metadata(batch)}
        method = getattr(self.layer, self.family.method)
        hidden = hidden.to(self.config.model_config.dtype, copy=True)
        given = {"hidden_states": hidden, "output": torch.zeros_like(hidden), "positions": None, "mup_vector": None}
        wanted = {name: given[name] for name in inspect.signature(method).parameters}
        with set_current_vllm_config(self.config), set_forward_context(metadata, self.config), torch.inference_mode():
            y = method(**wanted)
        return given["output"] if y is None else y


def drive(
    family: Family, batch: Batch, options: dict[str, Any] | None = None, state: torch.dtype = torch.float32
) -> Driven:
    """A layer with random weights, the same for all that are made so, and pages with random states.

    options: of flashstate; None: it runs on vLLM's kernels. state: the dtype of states.
    """
    start_alone()
    dtype = torch.float16 if batch.prefills else torch.float32  # which vLLM's kernels of prompts do not take
    if family.own_dtype and state.is_floating_point:
        dtype = state
    config = config_of(options, batch, dtype)
    with set_current_vllm_config(config), torch.device(DEVICE), set_default_torch_dtype(dtype):
        layer = family.make(family.stock, config)
        if family.ssu:
            ssu_dispatch._mamba_ssu_backend = ssu_backend(options is not None)(config.mamba_config)
    fill(layer)
    shapes, dtypes = list(layer.get_state_shape()), list(layer.get_state_dtype())
    if options is None and len(dtypes) > 1:
        dtypes[-1] = state
    driven = Driven(family, layer, config, bind(layer, shapes, dtypes))
    fill_states(driven)
    return driven


def ssu_backend(served: bool) -> Any:
    """What answers selective_state_update."""
    return ssu_dispatch._BACKEND_REGISTRY[upstream.add_backend()] if served else ssu_dispatch.TritonSSUBackend


def fill(layer: Any) -> None:
    """Random parameters, in the order of their names, and what vLLM makes of them after it has loaded them."""
    random = torch.Generator().manual_seed(1)
    for name, parameter in sorted(layer.named_parameters()):
        values = torch.randn(parameter.shape, generator=random)
        if name == "A":
            values = -values.exp()
        elif parameter.dim() > 1:
            values /= parameter.shape[-1] ** 0.5
        parameter.data.copy_(values)
    for module in layer.modules():
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)


def bind(layer: Any, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> Tensor:
    """Give a layer pages as vLLM does: so many bytes for each tensor of its state, one behind the other, and more."""
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    pages = torch.empty(BLOCKS, sum(sizes) + PADDING, dtype=torch.int8, device=DEVICE)
    tensors, end = [], 0
    for shape, dtype, size in zip(shapes, dtypes, sizes, strict=True):
        tensors.append(pages[:, end : end + size].view(dtype).view(BLOCKS, *shape))
        end += size
    layer.kv_cache = tuple(tensors)
    pages[:, end:] = 77
    return pages


def is_scaled(driven: Driven) -> bool:
    return driven.tensors[-1].shape[1:] != driven.family.stock.get_state_shape(driven.layer)[-1]


def fill_states(driven: Driven) -> None:
    """Random states. The null block too has some, which must stay."""
    random = torch.Generator().manual_seed(2)
    for tensor in driven.tensors:
        values = torch.randn(tensor.shape, generator=random)
        tensor.copy_(values if tensor.is_floating_point() else values * 30)
    if is_scaled(driven):
        scale = driven.scaled()[1]
        scale.copy_(torch.rand(scale.shape, generator=random) / 50)


def starts_of(driven: Driven) -> Tensor:
    """Its states (blocks, heads, rows, cols), in float32."""
    return decoded(*driven.scaled()) if is_scaled(driven) else driven.tensors[-1].float()


def tokens_of(batch: Batch) -> Tensor:
    """Hidden states of a batch."""
    return torch.randn(batch.padded_tokens, HIDDEN, generator=torch.Generator().manual_seed(3)).to(DEVICE)


# Models of calls


ADAPTERS = {
    "causal_conv1d_update": VLLM_CONV,
    "fused_recurrent_gated_delta_rule_packed_decode": VLLM_DECODE,
    "fused_sigmoid_gating_delta_rule_update": VLLM_RULE,
    "fused_recurrent_gated_delta_rule": VLLM_DECAYS,
    "fused_recurrent_kda": VLLM_KDA,
}
RAW_ADAPTERS = {"fused_recurrent_kda": VLLM_RAW_KDA, "fused_recurrent_kda_packed_decode": VLLM_RAW_DECODE}


def modelled(adapter: Adapter, dtype: torch.dtype) -> Callable[..., Any]:
    """A function that gives what the contract of a call says, computed in this dtype."""

    def call(*args: Any, **more: Any) -> Any:
        arguments = inspect.signature(adapter.function).bind(*args, **more).arguments
        if adapter is VLLM_RULE:
            arguments |= with_own_gates(**arguments)
        if adapter is VLLM_CONV and arguments.get("query_start_loc") is not None:
            arguments["query_start_loc"] = arguments["query_start_loc"][: len(arguments["conv_state_indices"]) + 1]
        copies = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in arguments.items()}
        outcome = adapter.model(copies, dtype)
        for (name, entry), state in outcome.stored.items():
            arguments[name][entry] = state.to(DEVICE, arguments[name].dtype)
        out = arguments.get("out")
        if out is None:
            like = arguments["x"] if adapter.in_place else arguments.get("v", arguments.get("mixed_qkv"))
            out = like if adapter.in_place else torch.empty(outcome.y.shape, dtype=like.dtype, device=DEVICE)
        out.copy_(outcome.y)
        return out if adapter in (VLLM_CONV, VLLM) else (out, arguments["initial_state"])

    return call


def with_own_gates(a: Tensor, b: Tensor, q: Tensor, **_: Any) -> dict[str, Tensor]:
    """The gates of the tokens of q, where vLLM gives those of all tokens of a batch."""
    if len(a) == q.shape[1]:
        return {}
    tokens = get_forward_context().attn_metadata[PREFIX].spec_token_indx
    return {"a": a[tokens], "b": b[tokens]}


@contextlib.contextmanager
def on_models(family: Family, dtype: torch.dtype) -> Iterator[None]:
    """Let models in this dtype answer what layers of a family call."""
    ssu = ssu_dispatch._mamba_ssu_backend
    with contextlib.ExitStack() as stack:
        (kind,) = (kind for kind in KINDS if kind.name == family.name)
        sources = upstream.sources()
        for call in kind.calls:
            for module in (family.module, *call.modules):
                adapter, there = (RAW_ADAPTERS if module in KDA else ADAPTERS).get(call.name), sources.file_of(module)
                if adapter and sources.text(there) and hasattr(importlib.import_module(module), call.name):
                    stack.enter_context(changed(module, call.name, modelled(adapter, dtype)))
        ssu_dispatch._mamba_ssu_backend = modelled(VLLM, dtype)
        stack.callback(setattr, ssu_dispatch, "_mamba_ssu_backend", ssu)
        yield


@contextlib.contextmanager
def changed(module: str, name: str, value: Any) -> Iterator[None]:
    """Another value of a name in a module."""
    place = importlib.import_module(module)
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)
