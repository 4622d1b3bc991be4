"""Layers of SGLang, run from its sources over flashstate, on pools as it makes them: every call keeps its contract."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import test_integration_sglang_facts as facts
import torch
from peer_calls import BRAIN, CPU, DIM, DSTATE, FLOAT, HEADS, Adapter, equal_bytes, require_contract
from peer_conv1d import SGLANG_CONV, TREE
from peer_rules import SGLANG_DECODE, SGLANG_KDA, SGLANG_RULE
from peer_selective import GROUPS, SGLANG_STATE
from sglang_modules import DISPATCH, LINEAR, MAMBA, Engine, needs_sources, read
from test_integration_sglang import OURS, in_process
from torch import Tensor

from flashstate.compat import sglang as compat
from flashstate.integrations.sglang import kernels, register
from flashstate.proof.inputs import Source

pytestmark = needs_sources
LAYERS, WIDTH, DRAFT = 3, 4, 4  # as many drafts as the trees of other tests have
SLOTS, ROWS = [7, -1, 2], [0, 1, 2]  # of a batch of three in a graph, of which one is padding; of buffers
CHANNELS = {"Mamba": HEADS * DIM + 2 * GROUPS * DSTATE, "GDN": HEADS * (DSTATE + DIM), "KDA": 3 * HEADS * DSTATE}
STATES = {"Mamba": (HEADS, DIM, DSTATE), "GDN": (HEADS, DIM, DSTATE), "KDA": (HEADS, DSTATE, DSTATE)}


def indices(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True)
class Batch:
    """A batch that decodes, a token each, or whose drafts are verified."""

    verify: bool = False
    trees: bool = False

    @property
    def tokens(self) -> int:
        return len(SLOTS) * (DRAFT if self.verify else 1)

    @property
    def metadata(self) -> SimpleNamespace:
        """The data that attention backends keep of a batch."""
        names = ("retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token")
        tree = {name: torch.tensor(TREE.get(name, [[0] * DRAFT] * 3)).int() if self.trees else None for name in names}
        bounds = torch.arange(0, self.tokens + 1, DRAFT if self.verify else 1, dtype=torch.int32)
        return SimpleNamespace(
            query_start_loc=bounds, mamba_cache_indices=indices(*SLOTS), num_prefills=0, num_prefill_tokens=0,
            num_decodes=len(SLOTS), is_target_verify=self.verify, draft_token_num=DRAFT, replayssm_write_pos=None,
            replayssm_force_flush=None, **tree,
        )  # fmt: skip


BATCHES = {"decode": Batch(), "verify": Batch(verify=True), "verify trees": Batch(verify=True, trees=True)}
EVERY_BATCH = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())


def cache_of(kind: str, batch: Batch) -> tuple[SimpleNamespace, Callable[[], bool]]:
    """The memory of a layer between two others under SGLang's names, and whether that of the others is as it was.

    All that belongs to a slot lies together. Windows of drafts share their inputs, where drafts are no trees.
    """
    random, kimi, channels = Source(CPU, 6), kind == "KDA", CHANNELS[kind]
    window = (WIDTH - 1, channels) if kimi else (channels, WIDTH - 1)
    states = random.normal(LAYERS, 9, *window).to(BRAIN), random.normal(LAYERS, 9, *STATES[kind])
    parts = [t.transpose(0, 1).reshape(9, -1).view(torch.uint8) for t in states]
    memory = torch.cat(parts, 1)
    entries = zip(memory.split([part.shape[1] for part in parts], 1), states, strict=True)
    conv, temporal = (e.view(t.dtype).unflatten(1, (LAYERS, *t.shape[2:])).transpose(0, 1) for e, t in entries)
    windows = torch.zeros(4, DRAFT, *window, dtype=BRAIN)
    if not kimi and not batch.trees:
        inputs = torch.zeros(4, channels, DRAFT + WIDTH - 2, dtype=BRAIN)
        shape, strides = (4, DRAFT, channels, WIDTH - 1), inputs.stride()
        windows = inputs.as_strided(shape, (strides[0], strides[2], *strides[1:]))
    others = [t[n] for t in (conv, temporal) for n in (0, 2)]
    before = [t.clone() for t in others]
    rings = dict.fromkeys(f"replayssm_{name}" for name in ("d", "k", "g", "rawv", "rawk", "beta"))
    drafts = torch.zeros(4, DRAFT, *STATES[kind])
    cache = SimpleNamespace(
        conv=[conv[1]], temporal=temporal[1], intermediate_conv_window=[windows], intermediate_ssm=drafts, **rings
    )
    return cache, lambda: all(map(equal_bytes, others, before))


def requiring(adapter: Adapter, calls: list[str]) -> Callable[..., Any]:
    """The function of an adapter, which requires the contract of every call, and keeps its name."""
    signature = inspect.signature(adapter.function)

    def call(*args: Any, **kwargs: Any) -> Any:
        outputs: list[Any] = []
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        calls.append(adapter.function.__name__)
        kept = replace(adapter, function=lambda **a: outputs.append(adapter.function(**a)) or outputs[0])
        require_contract(kept, dict(given.arguments))
        return outputs[0]

    return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the adapters that are called, each of which keeps its contract."""
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


def layer_of(kind: str) -> SimpleNamespace:
    """A layer with its weights, as its model makes it."""
    random, kimi, (heads, V, K) = Source(CPU, 6), kind == "KDA", STATES[kind]
    keys = heads if kimi else heads // 2
    return SimpleNamespace(
        layer_id=3, num_q_heads=keys, num_k_heads=keys, num_v_heads=heads, head_q_dim=K, head_k_dim=K, head_v_dim=V,
        q_dim=keys * K, k_dim=keys * K, v_dim=heads * V, bias=None, activation="silu", lower_bound=None,
        conv_weights=random.normal(CHANNELS[kind], 1, WIDTH).to(FLOAT if kimi else BRAIN).squeeze(1),
        A_log=random.normal(1, 1, heads, 1) if kimi else random.normal(heads),
        dt_bias=random.normal(heads * K) if kimi else random.normal(heads).to(BRAIN),
    )  # fmt: skip


def activations(kind: str, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """mixed_qkv, a and b, as models of these layers hand them over."""
    random, (heads, _, K) = Source(CPU, 7), STATES[kind]
    mixed = random.normal(tokens, CHANNELS[kind]).to(BRAIN)
    if kind == "KDA":
        return mixed, random.normal(tokens, heads * K).to(BRAIN), random.normal(tokens, heads).to(BRAIN)[None]
    b, a = random.normal(tokens, 2 * heads).to(BRAIN).chunk(2, -1)
    return mixed, a, b


def never(*_: Any, **__: Any) -> bool:
    return False


NAMES: dict[str, Any] = {
    "_is_hip": False, "MambaPool": SimpleNamespace(SpeculativeState=SimpleNamespace), "MAX_FUSED_QKV_SPLIT_DIM": 0,
    "select_verify_intermediate_state_indices": lambda default, *_: default,
    **dict.fromkeys(("is_cpu", "is_cuda", "is_hip", "is_xpu", "is_gfx95_supported"), never),
    "pp_spec_stable_rows_enabled": never,
}  # fmt: skip
METHODS = {
    ("GDN", False): (facts.GDN, "GDNAttnBackend.forward_decode"),
    ("GDN", True): (facts.GDN, "GDNAttnBackend.forward_extend"),
    ("KDA", False): (facts.KDA, "KDAAttnBackend.forward_decode"),
    ("KDA", True): (facts.KDA, "KDAAttnBackend._forward_target_verify"),
}


def run_layer(engine: Engine, kind: str, batch: Batch, *bounds: int) -> Tensor:
    """The output of a layer on an attention backend with the dispatcher of SGLang's sources. bounds: of drafts of
    different lengths."""
    engine.serve(**OURS)
    cache, others_stay = cache_of(kind, batch)
    backend = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(
            mamba2_layer_cache=lambda layer_id: cache, mamba_pool=SimpleNamespace(), size=len(ROWS)
        ),
        forward_metadata=batch.metadata, kernel_dispatcher=engine.dispatcher(kind),
        verify_intermediate_state_indices=indices(*ROWS), mis_metadata=None, accept_lens_pool=None,
        requires_contiguous_prefill_state=True, _use_strided_target_verify_qkv=True, _fused_chain_verify_fn=None,
        _track_mamba_state_decode=never, _can_run_dspark_cutedsl_mtp=never, _can_run_fused_chain_verify=never,
    )  # fmt: skip
    if bounds:
        backend.forward_metadata.query_start_loc = indices(*bounds)
    names = {"causal_conv1d_update": engine[f"{LINEAR}.{kind.lower()}_backend"].causal_conv1d_update}
    if kind == "KDA":
        names["ragged_verify_dense_scatter_indices"] = read(facts.KDA, "ragged_verify_dense_scatter_indices")
    given = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: batch.verify), batch_size=len(SLOTS),
        spec_info=SimpleNamespace(draft_token_num=DRAFT, ragged_verify_layout=bool(bounds) or None),
        req_pool_indices=None,
    )  # fmt: skip
    forward, tokens = read(*METHODS[kind, batch.verify], **NAMES, **names), 9 if bounds else batch.tokens
    y = forward(backend, layer_of(kind), given, *activations(kind, tokens))
    assert y.shape == (1, tokens, *STATES[kind][:2])
    assert others_stay()
    return y


@pytest.mark.parametrize("kind", ["GDN", "KDA"])
@EVERY_BATCH
def test_layers_of_delta_rules_run(engine: Engine, calls: list[str], kind: str, batch: Batch) -> None:
    run_layer(engine, kind, batch)
    decode = (SGLANG_KDA if kind == "KDA" else SGLANG_DECODE).function.__name__
    assert calls == ["causal_conv1d_update", SGLANG_RULE.function.__name__ if batch.verify else decode]


def test_drafts_of_different_lengths_run(engine: Engine, calls: list[str]) -> None:
    assert not run_layer(engine, "KDA", BATCHES["verify"], 0, 4, 5, 8)[:, 8:].any()  # of no row
    assert calls == ["causal_conv1d_update", SGLANG_RULE.function.__name__]


@EVERY_BATCH
def test_layers_of_mamba2_run(engine: Engine, calls: list[str], batch: Batch) -> None:
    engine.serve(mamba_backend="flashstate")
    module, (cache, others_stay) = engine[f"{MAMBA}.mamba"], cache_of("Mamba", batch)
    names = {name: getattr(module, name) for name in ("causal_conv1d_update", "causal_conv1d_update_triton")}
    update = engine[DISPATCH].selective_state_update
    forward = read(facts.MIXER, "MambaMixer2.forward", **NAMES, **names, selective_state_update=update)
    random, inner, groups, channels = Source(CPU, 8), HEADS * DIM, GROUPS * DSTATE, CHANNELS["Mamba"]
    projected = random.normal(batch.tokens, inner + channels + HEADS).to(BRAIN)
    weight, bias = random.normal(channels, 1, WIDTH).to(BRAIN), random.normal(channels).to(BRAIN)
    mixer = SimpleNamespace(
        in_proj=lambda hidden: (projected, None), out_proj=lambda hidden: (hidden, None), norm=lambda y, gate: y,
        intermediate_size=inner, conv_dim=channels, num_heads=HEADS, tp_size=1, n_groups=GROUPS,
        groups_ssm_state_size=groups, head_dim=DIM, ssm_state_size=DSTATE, activation="silu",
        conv1d=SimpleNamespace(weight=weight, bias=bias), A=-random.normal(HEADS).abs(),
        D=random.normal(HEADS).to(BRAIN), dt_bias=random.normal(HEADS).to(BRAIN),
    )  # fmt: skip
    y, *_ = forward(
        mixer, hidden_states=projected[:, :inner], layer_cache=cache, metadata=batch.metadata,
        use_triton_causal_conv=batch.verify,
    )  # fmt: skip
    assert y.shape == (batch.tokens, inner)
    assert others_stay()
    assert calls == ["causal_conv1d_update", "selective_state_update"]
