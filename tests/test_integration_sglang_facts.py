"""Signatures of SGLang 0.5.23, compared with its sources where they are (FLASHSTATE_SGLANG_SOURCES)."""

import ast
from typing import Any

import pytest
from peer_calls import signature_of
from sglang_modules import needs_sources, source

from flashstate.compat import sglang
from flashstate.integrations.sglang import upstream

VERSION = "0.5.23"
LINEAR, MAMBA = "srt/layers/attention/linear", "srt/layers/attention/mamba"
GDN, KDA = f"{LINEAR}/gdn_backend.py", f"{LINEAR}/kda_backend.py"
MIXER = f"{MAMBA}/mamba.py"
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

WEIGHTS = ("A_log", "dt_bias", "scale", "ssm_states", "cache_indices", "num_v_heads", "head_v_dim")  # of packed decodes
RINGS = ("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_write_pos", "replayssm_force_flush")


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
def test_the_version_is_recorded() -> None:
    assert f"'{VERSION}'" in source("_version.py")
    assert upstream.SUPPORTED == (VERSION,)
