"""flashstate inside SGLang: the plugin, and calls with the tensors and metadata that SGLang's sources make."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import sglang_facts as facts
import sglang_layers as layers
import torch
from models_of_peers import Arguments
from peer_calls import CPU, Adapter, copied, equal_bytes, require_contract
from peer_conv1d import SGLANG_CONV
from peer_rules import SGLANG_DECODE, SGLANG_KDA, SGLANG_RULE
from peer_selective import SGLANG_STATE
from sglang_layers import BRAIN, DIM, DSTATE, FLOAT, HALF, HEADS, Batch, Pool
from sglang_modules import DISPATCH, LINEAR, MAMBA, Engine, needs_sources, own_conv
from torch import Tensor

from flashstate.compat import sglang as compat
from flashstate.integrations.sglang import kernels, plugin, register, upstream

OURS = {f"linear_attn_{mode}_backend": "flashstate" for mode in ("decode", "verify")}
BATCHES = {
    "decode": Batch(), "verify": Batch(verify=True), "verify trees": Batch(verify=True, trees=True),
}  # fmt: skip
EVERY_BATCH = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
Form = tuple[bool, torch.dtype]  # of a pool: whether it is page-major, and of which states
FORMS: dict[str, Form] = {
    "float32": (False, FLOAT), "page-major float32": (True, FLOAT), "page-major bfloat16": (True, BRAIN),
    "float16": (False, HALF),
}  # fmt: skip
RUNS = {f"{name}-{where}": (form, where) for name, form in FORMS.items() for where in ("reference", "gpu")}
RUNS["page-major bfloat16-interpreter"] = (FORMS["page-major bfloat16"], "interpreter")
MARKS = {"reference": (), "gpu": pytest.mark.gpu, "interpreter": pytest.mark.interpreted}
EVERY_FORM = pytest.mark.parametrize(
    ("form", "device"),
    [pytest.param(*run, marks=MARKS[run[1]], id=name) for name, run in RUNS.items()], indirect=["device"],
)  # fmt: skip
DELTA_LAYERS = pytest.mark.parametrize("kind", ["GDN", "KDA"])
CHANNELS = {"Mamba": HEADS * DIM + 2 * layers.GROUPS * DSTATE, "GDN": HEADS * (DSTATE + DIM), "KDA": 3 * HEADS * DSTATE}
STATES = {"Mamba": (HEADS, DIM, DSTATE), "GDN": (HEADS, DIM, DSTATE), "KDA": (HEADS, DSTATE, DSTATE)}


def in_process(monkeypatch: pytest.MonkeyPatch, read: bool = False, **options: str) -> Engine:
    kernels.say.cache_clear()
    return Engine(monkeypatch, **{"version": facts.VERSION, "platform": "cuda", **options}, read=read)


@pytest.fixture(params=["made", pytest.param("read", marks=needs_sources)])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A process of SGLang that has loaded the plugin; `read`: with what can be run of its sources."""
    made = in_process(monkeypatch, request.param == "read")
    made.load(register)
    return made


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    handler, messages, level = logging.Handler(), [], kernels.logger.level
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    kernels.logger.addHandler(handler)
    kernels.logger.setLevel(logging.INFO)
    yield messages
    kernels.logger.removeHandler(handler)
    kernels.logger.setLevel(level)


def memory(kind: str, batch: Batch, form: Form = (True, FLOAT), device: torch.device = CPU) -> Pool:
    """The pool of a layer of this kind; windows of drafts share inputs where SGLang lets them."""
    (page_major, dtype), sliding = form, kind != "KDA" and not batch.trees
    return layers.pool(CHANNELS[kind], STATES[kind], dtype, page_major, kind == "KDA", sliding, device)


def require_served(adapter: Adapter, function: Callable[..., Any], arguments: Arguments, pool: Pool) -> None:
    """The function gives what the contract of the adapter says, and leaves the memory of other layers alone."""
    before = [t.clone() for t in pool.others]
    require_contract(replace(adapter, function=function), arguments)
    assert all(equal_bytes(now, then) for now, then in zip(pool.others, before, strict=True))


def updating(engine: Engine) -> Callable[..., Tensor]:
    """selective_state_update as mixers call it: up to D by position, and nothing is returned."""

    def call(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, **more: Any) -> Tensor:
        assert engine[DISPATCH].selective_state_update(state, x, dt, A, B, C, D, **more) is None
        return more["out"]

    return call


def packing(kernel: Any, kind: str) -> Callable[..., Any]:
    """A packed decode as attention backends call it; its output is (1, batch, HV, V), as b is of KDA."""

    def call(initial_state: Tensor, ssm_state_indices: Tensor, out: Tensor, b: Tensor, **more: Any) -> Any:
        del more["use_qk_l2norm_in_kernel"]
        also = {"b": b[None], "lower_bound": None} if kind == "KDA" else {"b": b}
        y = kernel.packed_decode(
            **more, **also, ssm_states=initial_state, cache_indices=ssm_state_indices, num_v_heads=out.shape[2],
            head_v_dim=out.shape[3], **dict.fromkeys(facts.RINGS),
        )  # fmt: skip
        return out.copy_(y.transpose(0, 1)), initial_state

    return call


def stepping(kernel: Any, kind: str) -> Callable[..., Tensor]:
    """A decode with bounds, or a verification, as attention backends call it; slots have an entry too many."""

    def call(initial_state_source: Tensor, initial_state_indices: Tensor, cu_seqlens: Tensor, **more: Any) -> Tensor:
        left_out = ("softplus_beta", "softplus_threshold", "use_qk_l2norm_in_kernel", "is_kda", "disable_state_update")
        given = {name: value for name, value in more.items() if name not in left_out}
        verify = bool(more.get("disable_state_update"))
        also = {"lower_bound": None} if kind == "KDA" else {"stable_rows": False} if verify else {}
        slots = torch.cat([initial_state_indices, initial_state_indices.new_tensor([-1])])
        return (kernel.target_verify if verify else kernel.decode)(
            **given, **also, ssm_states=initial_state_source, cache_indices=slots, query_start_loc=cu_seqlens
        )

    return call


def test_the_plugin_is_an_entry_point_of_sglang() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."sglang.srt.plugins"]\nflashstate = "flashstate.integrations.sglang:register"' in text


def test_every_flag_offers_it(engine: Engine) -> None:
    notes = engine["sglang.srt.server_args"].ServerArgs.__annotations__
    for flag in plugin.FLAGS:
        assert notes[flag].__metadata__[0].choices[-1] == "flashstate"
        assert notes[flag].__metadata__[0].choices.count("flashstate") == 1


def test_nothing_changes_until_a_flag_chooses_it(engine: Engine, said: list[str]) -> None:
    engine.serve(linear_attn_decode_backend="triton")
    for kind in ("GDN", "KDA"):
        made = engine.dispatcher(kind)
        assert not any(isinstance(kernel, kernels.DeltaRule) for kernel in vars(made).values())
        assert engine[f"{LINEAR}.{kind.lower()}_backend"].causal_conv1d_update is own_conv
    assert engine[f"{MAMBA}.mamba"].causal_conv1d_update is own_conv
    assert said == []


def test_mamba_backend_binds_state_updates_and_convolutions_and_says_so_once(engine: Engine, said: list[str]) -> None:
    for _ in range(2):
        engine.serve(mamba_backend="flashstate")
    for module, name in product(("mamba", "mamba1"), ("causal_conv1d_update", "causal_conv1d_update_triton")):
        assert getattr(engine[f"{MAMBA}.{module}"], name) is kernels.causal_conv1d_update
    assert engine[f"{LINEAR}.gdn_backend"].causal_conv1d_update is own_conv
    assert said == ["flashstate is active: Mamba states, rounded to nearest, and convolutions"]


@DELTA_LAYERS
@pytest.mark.parametrize("modes", [("decode",), ("verify",), ("decode", "verify")], ids=" and ".join)
def test_linear_backends_bind_what_was_chosen_and_no_more(
    engine: Engine, said: list[str], kind: str, modes: tuple[str, ...]
) -> None:
    engine.serve(**{f"linear_attn_{mode}_backend": "flashstate" for mode in modes})
    for _ in range(2):  # a target and its draft
        made = engine.dispatcher(kind)
        assert isinstance(made.decode_kernel, kernels.DeltaRule) == ("decode" in modes) == made.supports_packed_decode
        assert isinstance(made.verify_kernel, kernels.DeltaRule) == ("verify" in modes)
        assert kind == "KDA" or isinstance(made.tree_verify_kernel, kernels.DeltaRule) == ("verify" in modes)
        assert not isinstance(made.extend_kernel, kernels.DeltaRule)
    assert engine[f"{LINEAR}.{kind.lower()}_backend"].causal_conv1d_update is kernels.causal_conv1d_update
    assert engine[f"{MAMBA}.mamba"].causal_conv1d_update is own_conv
    assert said == [f"flashstate is active: {kind} {' and '.join(modes)}, and convolutions"]


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.23.post1", "0.6.0"])
@pytest.mark.parametrize("flag", [*plugin.FLAGS, *plugin.PREFILL])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, said: list[str], version: str, flag: str) -> None:
    engine = in_process(monkeypatch, version=version)
    engine.load(register)
    message = f"flashstate is not active: it knows SGLang 0.5.23, and this is {version}"
    assert said == [message]
    assert "flashstate" not in engine["sglang.srt.server_args"].ServerArgs.__annotations__[flag].__metadata__[0].choices
    assert "flashstate" not in engine[DISPATCH]._BACKEND_REGISTRY
    engine.serve()
    with pytest.raises(RuntimeError, match=message):
        engine.serve(**{flag: "flashstate"})


def test_a_build_of_a_supported_version_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = in_process(monkeypatch, version="0.5.23+cu130")
    engine.load(register)
    engine.serve(mamba_backend="flashstate")


@pytest.mark.parametrize(
    ("flags", "platform", "message"),
    [
        ({"linear_attn_backend": "flashstate"}, "cuda", "-attn-backend must not be flashstate, which has no prefill"),
        ({"linear_attn_prefill_backend": "flashstate"}, "cuda", "--linear-attn-prefill-backend must not be flashstate"),
        ({"mamba_backend": "flashstate"}, "rocm", "--mamba-backend flashstate needs cuda"),
        (OURS, "another", "--linear-attn-decode-backend flashstate needs cuda or rocm"),
        ({**OURS, "enable_linear_replayssm": True}, "cuda", "with --enable-linear-replayssm: it writes no rings"),
        (
            {"linear_attn_verify_backend": "flashstate", "enable_linear_replayssm_spec": True}, "cuda",
            "--linear-attn-verify-backend must not be flashstate with --enable-linear-replayssm-spec",
        ),
    ],
)  # fmt: skip
def test_servers_that_cannot_be_served_do_not_start(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], platform: str, message: str
) -> None:
    engine = in_process(monkeypatch, platform=platform)
    engine.load(register)
    with pytest.raises(ValueError, match=message):
        engine.serve(**flags)


def test_page_major_pools_are_allowed_and_flags_stay_as_they_were(engine: Engine) -> None:
    server_args = engine.serve(mamba_backend="flashstate", **OURS)
    assert server_args._resolved_overrides == []
    assert upstream.resolved(server_args).mamba_backend == "flashstate"


@EVERY_BATCH
@EVERY_FORM
def test_mamba_layers_are_stepped(engine: Engine, batch: Batch, form: Form, device: torch.device) -> None:
    engine.serve(mamba_backend="flashstate")
    conv, update = layers.mamba2(batch, pool := memory("Mamba", batch, form, device))
    require_served(SGLANG_CONV, engine[f"{MAMBA}.mamba"].causal_conv1d_update_triton, conv, pool)
    require_served(SGLANG_STATE, updating(engine), update, pool)


def test_float16_states_are_rounded_stochastically(engine: Engine, said: list[str]) -> None:
    engine.serve(mamba_backend="flashstate", enable_mamba_cache_stochastic_rounding=True, mamba_cache_philox_rounds=5)
    pool = memory("Mamba", batch := Batch(), FORMS["float16"])
    _, update = layers.mamba2(batch, pool)
    again, direct = copied(update), copied(update)
    require_served(SGLANG_STATE, updating(engine), update, pool)  # with this seed
    updating(engine)(**again)
    assert not equal_bytes(update["state"][7], again["state"][7])
    torch.manual_seed(0)
    compat.selective_state_update(**direct, enable_stochastic_rounding=True, cache_philox_rounds=5)
    assert equal_bytes(update["state"][7], direct["state"][7])
    assert said == [
        "flashstate is active: Mamba states, rounded stochastically but for those of drafts, and convolutions"
    ]


def test_layers_of_mamba1_are_stepped(engine: Engine) -> None:
    engine.serve(mamba_backend="flashstate")
    pool = layers.pool(HEADS * DIM, (HEADS * DIM, 1, DSTATE), FLOAT, page_major=True, last=False, sliding=False)
    require_served(SGLANG_STATE, updating(engine), layers.mamba1(Batch(), pool), pool)


@DELTA_LAYERS
@EVERY_BATCH
@EVERY_FORM
def test_layers_of_delta_rules_are_stepped(
    engine: Engine, kind: str, batch: Batch, form: Form, device: torch.device
) -> None:
    engine.serve(**OURS)
    made = engine.dispatcher(kind)
    conv, packed, step = layers.delta(kind, batch, pool := memory(kind, batch, form, device))
    require_served(SGLANG_CONV, engine[f"{LINEAR}.{kind.lower()}_backend"].causal_conv1d_update, conv, pool)
    require_served(SGLANG_RULE, stepping(made, kind), step, pool)
    if not batch.verify:
        _, packed, _ = layers.delta(kind, batch, pool := memory(kind, batch, form, device))
        require_served(SGLANG_KDA if kind == "KDA" else SGLANG_DECODE, packing(made, kind), packed, pool)


def test_drafts_of_different_lengths_are_verified(engine: Engine) -> None:
    engine.serve(**OURS)
    batch = BATCHES["verify"]
    _, _, step = layers.delta("KDA", batch, pool := memory("KDA", batch))
    step["cu_seqlens"] = layers.indices(0, 4, 5, 8)  # and four tokens of no row
    require_served(SGLANG_RULE, stepping(engine.dispatcher("KDA"), "KDA"), step, pool)


@DELTA_LAYERS
def test_a_tree_is_verified_by_the_parents_that_its_convolution_found(engine: Engine, kind: str) -> None:
    engine.serve(**OURS)
    engine.dispatcher(kind)
    batch = BATCHES["verify trees"]
    conv, _, _ = layers.delta(kind, batch, memory(kind, batch))
    y = engine[f"{LINEAR}.{kind.lower()}_backend"].causal_conv1d_update(**conv)
    assert torch.equal(conv["retrieve_parent_token"][:, 1:], layers.parents()[:, 1:])
    assert y.transpose(1, 2).view(batch.tokens, -1).shape == (batch.tokens, CHANNELS[kind])  # as layers go on with it


@DELTA_LAYERS
def test_a_batch_of_padding_touches_nothing(engine: Engine, kind: str) -> None:
    engine.serve(mamba_backend="flashstate", **OURS)
    made = engine.dispatcher(kind)
    for batch in (Batch(slots=(-1, -1, -1)), Batch(verify=True, slots=(-1, -1, -1))):
        pool = memory(kind, batch)
        conv, packed, step = layers.delta(kind, batch, pool)
        before = [t.clone() for t in (pool.conv, pool.temporal, pool.windows, pool.drafts)]
        engine[f"{LINEAR}.{kind.lower()}_backend"].causal_conv1d_update(**conv)
        stepping(made, kind)(**step)
        if not batch.verify:
            packing(made, kind)(**packed)
        now = (pool.conv, pool.temporal, pool.windows, pool.drafts)
        assert all(equal_bytes(one, other) for one, other in zip(now, before, strict=True))


@DELTA_LAYERS
def test_a_rank_without_requests_gets_an_output_without_rows(engine: Engine, kind: str) -> None:
    engine.serve(**OURS)
    _, packed, _ = layers.delta(kind, batch := Batch(slots=()), memory(kind, batch))
    y, _ = packing(engine.dispatcher(kind), kind)(**packed)
    assert y.shape == (0, 1, *STATES[kind][:2])


def test_rows_that_share_the_slot_of_eager_padding_harm_no_other(engine: Engine) -> None:
    engine.serve(mamba_backend="flashstate")
    _, padded = layers.mamba2(batch := Batch(slots=(7, 0, 0)), memory("Mamba", batch))
    _, alone = layers.mamba2(batch := Batch(slots=(7, -1, -1)), memory("Mamba", batch))
    for update in (padded, alone):
        updating(engine)(**update)
    assert equal_bytes(padded["out"][0], alone["out"][0])
    assert equal_bytes(padded["state"][1:], alone["state"][1:])


def test_a_rank_with_half_of_the_heads_gives_the_bytes_of_these_heads(engine: Engine) -> None:
    engine.serve(mamba_backend="flashstate")
    _, whole = layers.mamba2(Batch(), memory("Mamba", Batch()))
    updating(engine)(**whole)
    for rank in range(2):
        _, given = layers.mamba2(Batch(), memory("Mamba", Batch()))
        part = {**given, **{name: of_rank(given[name], axis, rank) for name, axis in HEAD_AXES.items()}}
        updating(engine)(**part)
        for name in ("state", "out"):
            assert equal_bytes(part[name], of_rank(whole[name], 1, rank))


HEAD_AXES = {"state": 1, "x": 1, "dt": 1, "A": 0, "B": 1, "C": 1, "D": 0, "dt_bias": 0, "out": 1}


def of_rank(tensor: Tensor, axis: int, rank: int) -> Tensor:
    """The heads, or groups, of one of two ranks: a view."""
    return tensor.chunk(2, axis)[rank]


def test_gates_with_a_lower_bound_are_left_to_sglang(engine: Engine, said: list[str]) -> None:
    engine.serve(**OURS)
    made = engine.dispatcher("KDA")
    assert isinstance(made.decode_kernel, engine[f"{LINEAR}.kernels.kda_triton"].TritonKDAKernel)
    for _ in range(2):
        assert made.decode_kernel.decode(lower_bound=-5.0) == "decoded by SGLang"
        assert made.verify_kernel.target_verify(lower_bound=-5.0) == "verified by SGLang"
    assert made.decode_kernel.extend() == "prefilled by SGLang"
    why = "gated_delta_step has no gate with a lower bound"
    assert said[1:] == [f"flashstate leaves KDA {call} to SGLang: {why}" for call in ("decode", "target_verify")]


def wrong(arguments: Arguments, name: str) -> Arguments:
    """The arguments, of which one has lost its last entry."""
    return {**arguments, name: arguments[name][..., :-1]}


def test_errors_name_the_call_and_the_layer_and_nothing_is_written(engine: Engine) -> None:
    engine.serve(mamba_backend="flashstate", **OURS)
    made, batch = engine.dispatcher("GDN"), Batch()
    conv, packed, step = layers.delta("GDN", batch, pool := memory("GDN", batch))
    _, update = layers.mamba2(batch, mamba := memory("Mamba", batch))
    before = [t.clone() for t in (pool.conv, pool.temporal, mamba.temporal)]

    def forward_decode(layer: Any, function: Callable[..., Any], arguments: Arguments) -> None:
        function(**arguments)

    def forward(layer_id: int, function: Callable[..., Any], arguments: Arguments) -> None:
        function(**arguments)

    class Layer:
        layer_id = 11

    with pytest.raises(RuntimeError, match="flashstate failed in GDN packed_decode of layer 11: a must have shape"):
        forward_decode(Layer(), packing(made, "GDN"), wrong(packed, "a"))
    with pytest.raises(RuntimeError, match="flashstate failed in GDN decode of layer 11: dt_bias must have shape"):
        forward_decode(Layer(), stepping(made, "GDN"), wrong(step, "dt_bias"))
    with pytest.raises(RuntimeError, match="failed in causal_conv1d_update of layer 11: conv_state_indices must have"):
        forward_decode(Layer(), kernels.causal_conv1d_update, wrong(conv, "conv_state_indices"))
    with pytest.raises(RuntimeError, match="failed in selective_state_update of layer 3: B must have shape"):
        forward(3, updating(engine), wrong(update, "B"))
    with pytest.raises(RuntimeError, match="in GDN packed_decode of a layer without a number: replayssm_d") as raised:
        made.packed_decode(*[torch.ones(1, 1)] * 3, **dict.fromkeys(facts.PACKED[3:]), replayssm_d=torch.ones(1))
    assert isinstance(raised.value.__cause__, ValueError)
    now = (pool.conv, pool.temporal, mamba.temporal)
    assert all(equal_bytes(one, other) for one, other in zip(now, before, strict=True))
