"""flashstate inside SGLang: the plugin, what it binds, and calls as SGLang's layers make them."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import test_integration_sglang_facts as facts
import torch
from models_of_peers import Arguments
from peer_calls import copied, equal_bytes, require_contract
from peer_conv1d import SGLANG_CONV
from peer_rules import SGLANG_DECODE, SGLANG_KDA, SGLANG_RULE, VERIFY
from peer_selective import PARENTS, SGLANG_STATE
from sglang_modules import DISPATCH, LINEAR, MAMBA, Engine, needs_sources, own_conv
from torch import Tensor

from flashstate.compat import sglang as compat
from flashstate.integrations.sglang import kernels, plugin, register, upstream

OURS = {f"linear_attn_{mode}_backend": "flashstate" for mode in ("decode", "verify")}
DELTA_LAYERS = pytest.mark.parametrize("kind", ["GDN", "KDA"])


def in_process(monkeypatch: pytest.MonkeyPatch, read: bool = False, **options: str) -> Engine:
    kernels.say.cache_clear()
    return Engine(monkeypatch, **{"version": facts.VERSION, "platform": "cuda", **options}, read=read)


@pytest.fixture(params=["made", pytest.param("read", marks=needs_sources)])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A process of SGLang that has loaded the plugin; `read`: with the modules of its sources that can run alone."""
    made = in_process(monkeypatch, request.param == "read", version=f"{facts.VERSION}+cu130")  # as a build calls it
    made.load(register)
    return made


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Messages that are logged meanwhile."""
    handler, messages, level = logging.Handler(), [], kernels.logger.level
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    kernels.logger.addHandler(handler)
    kernels.logger.setLevel(logging.INFO)
    yield messages
    kernels.logger.removeHandler(handler)
    kernels.logger.setLevel(level)


def updating(engine: Engine) -> Callable[..., Tensor]:
    """selective_state_update as mixers call it: up to D by position, into an output, and nothing is returned."""

    def call(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, **more: Any) -> Tensor:
        more = {"out": torch.empty_like(x), **more}
        assert engine[DISPATCH].selective_state_update(state, x, dt, A, B, C, D, **more) is None
        return more["out"]

    return call


def packing(kernel: Any, kind: str) -> Callable[..., Any]:
    """A packed decode as attention backends call it; its output is (1, batch, HV, V), as b is of KDA."""

    def call(initial_state: Tensor, ssm_state_indices: Tensor, out: Tensor, b: Tensor, **more: Any) -> Any:
        del more["use_qk_l2norm_in_kernel"]
        also = {"b": b[None], "lower_bound": None} if kind == "KDA" else {"b": b}
        y = kernel.decode_kernel.packed_decode(
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
        return (kernel.verify_kernel.target_verify if verify else kernel.decode_kernel.decode)(
            **given, **also, ssm_states=initial_state_source, cache_indices=slots, query_start_loc=cu_seqlens
        )

    return call


# The plugin


def test_the_plugin_is_an_entry_point_of_sglang() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."sglang.srt.plugins"]\nflashstate = "flashstate.integrations.sglang:register"' in text


def test_every_flag_offers_it_and_nothing_changes_until_one_chooses_it(engine: Engine, said: list[str]) -> None:
    notes = engine["sglang.srt.server_args"].ServerArgs.__annotations__
    for flag in plugin.FLAGS:
        assert notes[flag].__metadata__[0].choices[-1] == "flashstate"
        assert notes[flag].__metadata__[0].choices.count("flashstate") == 1
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


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23.post1"])
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


# Calls


def test_calls_of_mamba_layers_are_served(engine: Engine) -> None:
    engine.serve(mamba_backend="flashstate")
    conv = replace(SGLANG_CONV, function=engine[f"{MAMBA}.mamba"].causal_conv1d_update_triton)
    state = replace(SGLANG_STATE, function=updating(engine))
    for adapter in (conv, state):
        for call in adapter.calls:
            if call != "stochastic":  # which the server asks for, not the call
                require_contract(adapter, adapter.arguments(call))


@DELTA_LAYERS
def test_calls_of_layers_with_delta_rules_are_served(engine: Engine, kind: str) -> None:
    """Also drafts of different lengths, with four tokens of no row."""
    engine.serve(**OURS)
    made, is_kda = engine.dispatcher(kind), kind == "KDA"
    step = replace(SGLANG_RULE, function=stepping(made, kind))
    gates = {"per_channel": is_kda, "is_kda": is_kda, "softplus_beta": 1.0, "softplus_threshold": 20.0}
    verify = {**VERIFY, **gates, "retrieve_parent_token": None}
    for call in (
        {**gates, "shape": (1, 3), "cu_seqlens": [0, 1, 2, 3], "initial_state_indices": [5, 0, 8]},
        verify, {**verify, "retrieve_parent_token": PARENTS}, {**verify, "cu_seqlens": [0, 4, 5, 8]},
    ):  # fmt: skip
        require_contract(step, step.arguments(call))
    packed = SGLANG_KDA if is_kda else SGLANG_DECODE
    for call in packed.calls:
        require_contract(replace(packed, function=packing(made, kind)), packed.arguments(call))
    none = {name: t[:0] for name, t in packed.arguments("bfloat16").items() if name in (*packed.tokens, "out")}
    none["ssm_state_indices"] = torch.zeros(0, dtype=torch.int32)
    y, _ = packing(made, kind)(**{**packed.arguments("bfloat16"), **none})  # of a rank without requests
    assert len(y) == 0


def test_float16_states_are_rounded_stochastically(engine: Engine, said: list[str]) -> None:
    engine.serve(mamba_backend="flashstate", enable_mamba_cache_stochastic_rounding=True, mamba_cache_philox_rounds=5)
    update = SGLANG_STATE.arguments({"state_batch_indices": [5, -1, 8], "state_dtype": torch.float16})
    again, direct = copied(update), copied(update)
    require_contract(replace(SGLANG_STATE, function=updating(engine)), update)  # with this seed
    updating(engine)(**again)
    assert not equal_bytes(update["state"][5], again["state"][5])
    torch.manual_seed(0)
    compat.selective_state_update(**direct, enable_stochastic_rounding=True, cache_philox_rounds=5)
    assert equal_bytes(update["state"][5], direct["state"][5])
    assert said == [
        "flashstate is active: Mamba states, rounded stochastically but for those of drafts, and convolutions"
    ]


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


def test_errors_name_the_call_and_the_layer_and_nothing_is_written(engine: Engine) -> None:
    engine.serve(mamba_backend="flashstate", **OURS)
    made = engine.dispatcher("GDN")
    packed, update = SGLANG_DECODE.arguments("bfloat16"), SGLANG_STATE.arguments("padding")
    step, conv = SGLANG_RULE.arguments("a token each"), SGLANG_CONV.arguments("one token, channels first")

    def forward_decode(layer: Any, function: Callable[..., Any], arguments: Arguments) -> None:
        function(**arguments)

    def forward(layer_id: int, function: Callable[..., Any], arguments: Arguments) -> None:
        function(**arguments)

    class Layer:
        layer_id = 11

    for call, function, arguments, name, where in (
        (forward_decode, packing(made, "GDN"), packed, "a", "GDN packed_decode of layer 11"),
        (forward_decode, stepping(made, "GDN"), step, "dt_bias", "GDN decode of layer 11"),
        (forward_decode, kernels.causal_conv1d_update, conv, "conv_state_indices", "causal_conv1d_update of layer 11"),
        (forward, updating(engine), update, "B", "selective_state_update of layer 3"),
    ):
        before = copied(arguments)
        with pytest.raises(RuntimeError, match=f"flashstate failed in {where}: {name} must have") as raised:
            call(Layer() if call is forward_decode else 3, function, {**arguments, name: arguments[name][..., :-1]})
        assert isinstance(raised.value.__cause__, ValueError)
        assert all(equal_bytes(t, before[name]) for name, t in arguments.items() if isinstance(t, Tensor))
    with pytest.raises(RuntimeError, match="in GDN packed_decode of a layer without a number: replayssm_d"):
        made.decode_kernel.packed_decode(
            *[torch.ones(1, 1)] * 3, **dict.fromkeys(facts.WEIGHTS), replayssm_d=torch.ones(1)
        )
