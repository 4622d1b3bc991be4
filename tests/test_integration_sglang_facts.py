"""Facts about SGLang 0.5.23, with the files and lines of its package that show them.

Our side takes what is recorded, and sources are compared with it where they are (FLASHSTATE_SGLANG_SOURCES).
"""

import ast
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from peer_calls import signature_of
from sglang_modules import needs_sources, source

from flashstate.compat import sglang
from flashstate.compat import sglang as compat
from flashstate.integrations.sglang import kernels, upstream

VERSION = "0.5.23"
LINEAR, MAMBA = "srt/layers/attention/linear", "srt/layers/attention/mamba"
GDN, KDA = f"{LINEAR}/gdn_backend.py", f"{LINEAR}/kda_backend.py"
MIXER, MIXER1 = f"{MAMBA}/mamba.py", f"{MAMBA}/mamba1.py"
DISPATCH = "kernels/ops/mamba/triton_ops/ssu_dispatch.py"

ATTENTION = "kernels/ops/attention"
FUSED = f"{ATTENTION}/fla/fused_recurrent.py"
# Functions that adapters stand in for, with their signatures, and others.
SIGNATURES = {
    **{(path, function.__name__): signature_of(function) for path, function in (
        ("kernels/ops/mamba/causal_conv1d_triton.py", sglang.causal_conv1d_update),
        ("kernels/ops/mamba/triton_ops/mamba_ssm.py", sglang.selective_state_update),
        (f"{ATTENTION}/linear/fused_sigmoid_gating_recurrent.py", sglang.fused_sigmoid_gating_delta_rule_update),
        (FUSED, sglang.fused_recurrent_gated_delta_rule_packed_decode),
        (FUSED, sglang.fused_recurrent_kda_packed_decode))},
    (GDN, "GDNKernelDispatcher.__init__"): "self, decode_backend, prefill_backend, verify_backend=None",
    (KDA, "KDAKernelDispatcher.__init__"): "self, decode_backend, prefill_backend, verify_backend",
    (f"{LINEAR}/utils.py", "resolve_linear_attn_backends"): "prefill_default=None",
    (DISPATCH, "initialize_mamba_selective_state_update_backend"): "server_args",
    ("srt/arg_groups/resolution_hooks.py", "register_resolution_hook"): "name",
    ("srt/arg_groups/overrides.py", "declare_resolution"): "server_args, source, **fields",
    ("srt/arg_groups/model_override_base.py", "resolving_view"): "server_args",
    ("srt/plugins/hook_registry.py", "HookRegistry.register"):
        "cls, target, hook, hook_type=HookType.AFTER, *, source=None",
    ("srt/server_args.py", "ServerArgs.resolve_once"): "self",
    ("srt/runtime_context.py", "get_exec"): "",
    ("srt/utils/common.py", "is_cuda"): "",
    ("srt/utils/common.py", "is_hip"): "",
}  # fmt: skip

CONV_DECODE = ("conv_state_indices",)
CONV_VERIFY = (
    *CONV_DECODE, "intermediate_conv_window", "intermediate_state_indices", "retrieve_next_token",
    "retrieve_next_sibling", "retrieve_parent_token",
)  # fmt: skip
UPDATE = ("z", "dt_bias", "dt_softplus", "state_batch_indices", "out")
WEIGHTS, POOLS = ("A_log", "dt_bias"), ("ssm_states", "cache_indices")
TOKENS, BOUNDS = ("q", "k", "v", "a", "b"), (*POOLS, "query_start_loc")
PACKED = ("mixed_qkv", "a", "b", *WEIGHTS, "scale", *POOLS, "num_v_heads", "head_v_dim")
RINGS = ("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_write_pos", "replayssm_force_flush")
VERIFY = (
    *WEIGHTS, *TOKENS, *BOUNDS, "intermediate_states_buffer", "intermediate_state_indices", "cache_steps",
    "retrieve_parent_token",
)  # fmt: skip
# (file, line, name) of a call: how many arguments it gives by position, and the names of the others.
CALLS: dict[tuple[str, int, str], tuple[int, tuple[str, ...]]] = {
    (MIXER, 695, "ccu"): (5, CONV_DECODE),
    (MIXER, 673, "causal_conv1d_update_triton"): (5, CONV_VERIFY),
    (MIXER, 756, "selective_state_update"): (7, UPDATE),
    (MIXER, 721, "selective_state_update"): (
        7,
        (
            *UPDATE, "disable_state_update", "intermediate_states_buffer", "cache_steps", "retrieve_parent_token",
            "intermediate_state_indices",
        ),
    ),
    (MIXER1, 435, "ccu"): (5, CONV_DECODE),
    (MIXER1, 459, "selective_state_update"): (7, UPDATE),
    (GDN, 855, "causal_conv1d_update"): (5, CONV_DECODE),
    (GDN, 1047, "causal_conv1d_update"): (5, CONV_VERIFY),
    (GDN, 867, "packed_decode"): (0, (*PACKED, *RINGS)),
    (GDN, 900, "decode"): (0, (*TOKENS, *WEIGHTS, *BOUNDS)),
    (GDN, 1147, "target_verify"): (0, (*VERIFY, "stable_rows")),
    (KDA, 955, "causal_conv1d_update"): (4, ("activation", *CONV_DECODE)),
    (KDA, 1400, "causal_conv1d_update"): (4, ("activation", *CONV_VERIFY)),
    (KDA, 973, "packed_decode"): (0, (*PACKED, "lower_bound", *RINGS)),
    (KDA, 1001, "decode"): (0, (*TOKENS, *WEIGHTS, *BOUNDS, "lower_bound")),
    (KDA, 1431, "target_verify"): (0, (*VERIFY, "lower_bound")),
    (DISPATCH, 216, "backend_cls"): (0, ("enable_stochastic_rounding", "cache_philox_rounds")),
    (GDN, 538, "GDNKernelDispatcher"): (3, ()),
    (KDA, 513, "KDAKernelDispatcher"): (3, ()),
}  # fmt: skip


TARGETS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_update": kernels.causal_conv1d_update, "causal_conv1d_update_triton": kernels.causal_conv1d_update,
    "ccu": kernels.causal_conv1d_update, "selective_state_update": compat.selective_state_update,
    "backend_cls": kernels.StateUpdate,
    **{name: getattr(kernels.DeltaRule, name) for name in ("packed_decode", "decode", "target_verify")},
}  # fmt: skip


@pytest.mark.parametrize("call", [call for call in CALLS if call[2] in TARGETS], ids=lambda call: f"{call[2]}")
def test_our_side_takes_what_every_call_gives(call: tuple[str, int, str]) -> None:
    by_position, names = CALLS[call]
    target, own = TARGETS[call[2]], [None] if call[2] in ("packed_decode", "decode", "target_verify") else []
    inspect.signature(target).bind(*own, *[None] * by_position, **dict.fromkeys(names))


@needs_sources
@pytest.mark.parametrize("place", SIGNATURES, ids=lambda place: place[1])
def test_recorded_signatures_are_those_of_the_sources(place: tuple[str, str]) -> None:
    nodes: Any = ast.parse(source(place[0])).body
    for name in place[1].split("."):
        node = next(n for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
        nodes = node.body
    for argument in (*node.args.args, *node.args.kwonlyargs, node.args.kwarg, node.args.vararg):
        if argument is not None:
            argument.annotation = None
    written = ast.unparse(node.args).replace("PAD_SLOT_ID", "-1")
    assert written == SIGNATURES[place]


@needs_sources
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[2]}-{call[1]}")
def test_recorded_calls_are_those_of_the_sources(call: tuple[str, int, str]) -> None:
    path, line, name = call
    found = [node for node in ast.walk(ast.parse(source(path))) if isinstance(node, ast.Call) and node.lineno == line]
    node = next(n for n in found if getattr(n.func, "attr", getattr(n.func, "id", None)) == name)
    names = tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None)
    by_position, wanted = CALLS[call]
    assert (len(node.args), sorted(names)) == (by_position, sorted(wanted))


@needs_sources
def test_the_version_is_recorded() -> None:
    assert f"'{VERSION}'" in source("_version.py")
    assert upstream.SUPPORTED == (VERSION,)
