"""Layers of SGLang, run from its sources over flashstate, on pools as it makes them: every call keeps its contract."""

import __future__

import ast
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_facts as facts
import sglang_layers as layers
import torch
from peer_calls import Adapter, Random, require_contract
from peer_conv1d import SGLANG_CONV
from peer_rules import SGLANG_DECODE, SGLANG_KDA, SGLANG_RULE
from peer_selective import SGLANG_STATE
from sglang_layers import BRAIN, DIM, DRAFT, DSTATE, HEADS, WIDTH, Batch, Pool
from sglang_modules import DISPATCH, Engine, needs_sources, source
from test_integration_sglang import BATCHES, EVERY_BATCH, OURS, STATES, in_process, memory
from torch import Tensor

from flashstate.compat import sglang as compat
from flashstate.integrations.sglang import kernels, register

pytestmark = needs_sources
CPU = torch.device("cpu")


def read(path: str, place: str, **names: Any) -> Callable[..., Any]:
    """A function of SGLang's sources, or a method as a function, that knows these names."""
    *owners, name = place.split(".")
    body = ast.parse(source(path)).body
    for owner in owners:
        body = next(n.body for n in body if isinstance(n, ast.ClassDef) and n.name == owner)
    tree = ast.Module([n for n in body if isinstance(n, ast.FunctionDef) and n.name == name], [])
    space = {"torch": torch, **names}
    exec(compile(tree, path, "exec", __future__.annotations.compiler_flag), space)
    return space[name]


def requiring(adapter: Adapter, calls: list[str]) -> Callable[..., Any]:
    """The function of a adapter, which requires the contract of every call, and keeps its name."""
    signature = inspect.signature(adapter.function)

    def call(*args: Any, **kwargs: Any) -> Any:
        outputs: list[Any] = []
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        calls.append(adapter.function.__name__)

        def run(**arguments: Any) -> Any:
            outputs.append(adapter.function(**arguments))
            return outputs[0]

        require_contract(replace(adapter, function=run), dict(given.arguments))
        return outputs[0]

    return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which doors are called, each of which keeps its contract."""
    made: list[str] = []
    for adapter in (SGLANG_CONV, SGLANG_STATE, SGLANG_RULE):
        monkeypatch.setattr(compat, adapter.function.__name__, requiring(adapter, made))
    for rule, adapter in ((kernels.DeltaRule, SGLANG_DECODE), (kernels.KimiDeltaRule, SGLANG_KDA)):
        monkeypatch.setattr(rule, "packed_rule", staticmethod(requiring(adapter, made)))
    monkeypatch.setattr(kernels, "causal_conv1d_update", requiring(SGLANG_CONV, made))
    return made


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> Engine:
    made = in_process(monkeypatch, read=True)
    made.load(register)
    return made


class SpeculativeState(SimpleNamespace):
    """What a layer has in the pool, with room for drafts."""


def cache_of(pool: Pool, kind: str) -> SpeculativeState:
    """The pool of a layer under SGLang's names; windows of KDA as they lie in memory."""
    turned = [t.mT if kind == "KDA" else t for t in (pool.conv, pool.windows)]
    rings = dict.fromkeys(f"replayssm_{name}" for name in ("d", "k", "g", "rawv", "rawk", "beta"))
    return SpeculativeState(
        conv=[turned[0]], temporal=pool.temporal, intermediate_conv_window=[turned[1]], intermediate_ssm=pool.drafts,
        **rings,
    )  # fmt: skip


def metadata_of(batch: Batch) -> SimpleNamespace:
    """What attention backends know of a batch."""
    return SimpleNamespace(
        query_start_loc=batch.query_start_loc, mamba_cache_indices=layers.indices(*batch.slots), num_prefills=0,
        num_prefill_tokens=0, num_decodes=len(batch.slots), is_target_verify=batch.verify, draft_token_num=DRAFT,
        replayssm_write_pos=None, replayssm_force_flush=None, **(layers.tree() if batch.trees else layers.no_tree()),
    )  # fmt: skip


def backend_of(engine: Engine, kind: str, batch: Batch, pool: Pool) -> SimpleNamespace:
    """An attention backend with the dispatcher of SGLang's sources."""
    cache = cache_of(pool, kind)
    pools = SimpleNamespace(
        mamba2_layer_cache=lambda layer_id: cache, mamba_pool=SimpleNamespace(), size=len(layers.ROWS)
    )
    return SimpleNamespace(
        req_to_token_pool=pools, forward_metadata=metadata_of(batch), kernel_dispatcher=engine.dispatcher(kind),
        verify_intermediate_state_indices=layers.indices(*layers.ROWS), mis_metadata=None, accept_lens_pool=None,
        requires_contiguous_prefill_state=True, _use_strided_target_verify_qkv=True, _fused_chain_verify_fn=None,
        _track_mamba_state_decode=lambda *args: None, _can_run_dspark_cutedsl_mtp=lambda **kwargs: False,
        _can_run_fused_chain_verify=lambda **kwargs: False,
    )  # fmt: skip


def layer_of(kind: str) -> SimpleNamespace:
    """A layer with its weights, as its model makes it."""
    random, kimi, (heads, V, K) = Random(CPU, 6), kind == "KDA", STATES[kind]
    keys = heads if kimi else heads // 2
    channels = 2 * keys * K + heads * V
    return SimpleNamespace(
        layer_id=3, num_q_heads=keys, num_k_heads=keys, num_v_heads=heads, head_q_dim=K, head_k_dim=K, head_v_dim=V,
        q_dim=keys * K, k_dim=keys * K, v_dim=heads * V, bias=None, activation="silu", lower_bound=None,
        conv_weights=random.normal(channels, 1, WIDTH, dtype=torch.float32 if kimi else BRAIN).squeeze(1),
        A_log=random.normal(1, 1, heads, 1) if kimi else random.normal(heads),
        dt_bias=random.normal(heads * K) if kimi else random.normal(heads, dtype=BRAIN),
    )  # fmt: skip


def activations(kind: str, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """mixed_qkv, a and b, as models of these layers hand them over."""
    random, (heads, _, K), layer = Random(CPU, 7), STATES[kind], layer_of(kind)
    mixed = random.normal(tokens, layer.q_dim + layer.k_dim + layer.v_dim, dtype=BRAIN)
    if kind == "KDA":
        return mixed, random.normal(tokens, heads * K, dtype=BRAIN), random.normal(tokens, heads, dtype=BRAIN)[None]
    b, a = random.normal(tokens, 2 * heads, dtype=BRAIN).chunk(2, -1)
    return mixed, a, b


def chosen_rows(default: Tensor, *_: Any) -> Tensor:
    return default


NAMES: dict[str, Any] = {
    "_is_hip": False, "MambaPool": SimpleNamespace(SpeculativeState=SpeculativeState), "is_cpu": lambda: False,
    "is_cuda": lambda: False, "is_hip": lambda: False, "is_xpu": lambda: False, "is_gfx95_supported": lambda: False,
    "select_verify_intermediate_state_indices": chosen_rows, "pp_spec_stable_rows_enabled": lambda: False,
    "MAX_FUSED_QKV_SPLIT_DIM": 0,
}  # fmt: skip
METHODS = {
    ("GDN", False): (facts.GDN, "GDNAttnBackend.forward_decode"),
    ("GDN", True): (facts.GDN, "GDNAttnBackend.forward_extend"),
    ("KDA", False): (facts.KDA, "KDAAttnBackend.forward_decode"),
    ("KDA", True): (facts.KDA, "KDAAttnBackend._forward_target_verify"),
}


def batch_of(batch: Batch, ragged: bool = False) -> SimpleNamespace:
    """A batch as layers get it."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: batch.verify), batch_size=len(batch.slots),
        spec_info=SimpleNamespace(draft_token_num=DRAFT, ragged_verify_layout=ragged or None), req_pool_indices=None,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["GDN", "KDA"])
@EVERY_BATCH
def test_layers_of_delta_rules_run(engine: Engine, calls: list[str], kind: str, batch: Batch) -> None:
    engine.serve(**OURS)
    backend = backend_of(engine, kind, batch, memory(kind, batch))
    conv = engine[f"sglang.srt.layers.attention.linear.{kind.lower()}_backend"].causal_conv1d_update
    forward = read(*METHODS[kind, batch.verify], **NAMES, causal_conv1d_update=conv)
    y = forward(backend, layer_of(kind), batch_of(batch), *activations(kind, batch.tokens))
    assert y.shape == (1, batch.tokens, *STATES[kind][:2])
    decode = (SGLANG_KDA if kind == "KDA" else SGLANG_DECODE).function.__name__
    assert calls == ["causal_conv1d_update", SGLANG_RULE.function.__name__ if batch.verify else decode]


@EVERY_BATCH
def test_layers_of_mamba2_run(engine: Engine, calls: list[str], batch: Batch) -> None:
    engine.serve(mamba_backend="flashstate")
    module = engine["sglang.srt.layers.attention.mamba.mamba"]
    names = {name: getattr(module, name) for name in ("causal_conv1d_update", "causal_conv1d_update_triton")}
    update = engine[DISPATCH].selective_state_update
    forward = read(facts.MIXER, "MambaMixer2.forward", **NAMES, **names, selective_state_update=update)
    random, inner, groups = Random(CPU, 8), HEADS * DIM, layers.GROUPS * DSTATE
    channels = inner + 2 * groups
    projected = random.normal(batch.tokens, inner + channels + HEADS, dtype=BRAIN)
    weight, bias = random.normal(channels, 1, WIDTH, dtype=BRAIN), random.normal(channels, dtype=BRAIN)
    mixer = SimpleNamespace(
        in_proj=lambda hidden: (projected, None), out_proj=lambda hidden: (hidden, None), norm=lambda y, gate: y,
        intermediate_size=inner, conv_dim=channels, num_heads=HEADS, tp_size=1, n_groups=layers.GROUPS,
        groups_ssm_state_size=groups, head_dim=DIM, ssm_state_size=DSTATE, activation="silu",
        conv1d=SimpleNamespace(weight=weight, bias=bias), A=-random.normal(HEADS).abs(),
        D=random.normal(HEADS, dtype=BRAIN), dt_bias=random.normal(HEADS, dtype=BRAIN),
    )  # fmt: skip
    y, _, _ = forward(
        mixer, hidden_states=projected[:, :inner], layer_cache=cache_of(memory("Mamba", batch), "Mamba"),
        metadata=metadata_of(batch), use_triton_causal_conv=batch.verify,
    )  # fmt: skip
    assert y.shape == (batch.tokens, inner)
    assert calls == ["causal_conv1d_update", "selective_state_update"]


def test_drafts_of_different_lengths_run(engine: Engine, calls: list[str]) -> None:
    engine.serve(**OURS)
    batch = BATCHES["verify"]
    backend = backend_of(engine, "KDA", batch, memory("KDA", batch))
    backend.forward_metadata.query_start_loc = layers.indices(0, 4, 5, 8)
    names = {
        "causal_conv1d_update": engine["sglang.srt.layers.attention.linear.kda_backend"].causal_conv1d_update,
        "ragged_verify_dense_scatter_indices": read(facts.KDA, "ragged_verify_dense_scatter_indices"),
    }
    forward = read(*METHODS["KDA", True], **NAMES, **names)
    y = forward(backend, layer_of("KDA"), batch_of(batch, ragged=True), *activations("KDA", 9))
    assert y.shape == (1, 9, *STATES["KDA"][:2])
    assert not y[:, 8:].any()  # of no row
    assert calls == ["causal_conv1d_update", SGLANG_RULE.function.__name__]
