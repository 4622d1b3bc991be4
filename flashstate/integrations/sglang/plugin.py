"""The plugin that SGLang loads: which flags choose flashstate, and what is refused before a server starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashstate.integrations.reports import unknown_version
from flashstate.integrations.sglang import kernels, upstream
from flashstate.integrations.sglang.upstream import NAME

FLAGS = ("mamba_backend", "linear_attn_decode_backend", "linear_attn_verify_backend")
PREFILL = ("linear_attn_backend", "linear_attn_prefill_backend")


def register() -> None:
    """Offer flashstate as a choice of `--mamba-backend` and of `--linear-attn-{decode,verify}-backend`.

    Nothing else changes until one of them is `flashstate`. In versions of SGLang that are not supported it is no
    choice, and servers that ask for it do not start.
    """
    version = upstream.version()
    if version in upstream.SUPPORTED:
        offer()
    else:
        kernels.logger.warning(refusal(version))
        upstream.before_resolution(refuse_all)


def offer() -> None:
    """Add our name to flags, our classes to registries, and our checks to the resolution of arguments."""
    upstream.add_state_update(kernels.StateUpdate)
    for flag in FLAGS:
        upstream.add_choice(flag)
    upstream.wrap_step("handle_mamba_backend", check_mamba)
    upstream.wrap_step("handle_linear_attn_backend", check_linear)
    upstream.wrap_step("handle_page_major_kv_layout", allow_page_major)
    upstream.after_linear_choice(serve_linear)


def refusal(version: str) -> str:
    return unknown_version("SGLang", upstream.SUPPORTED, version)


def refuse_all(server_args: Any) -> None:
    """Raise where a server of an unsupported version asks for flashstate."""
    if any(getattr(server_args, flag, None) == NAME for flag in (*FLAGS, *PREFILL)):
        raise RuntimeError(refusal(upstream.version()))


def check_mamba(server_args: Any, previous: Callable[[Any], None]) -> None:
    if upstream.resolved(server_args).mamba_backend == NAME:
        check_platform("mamba_backend", "cuda")
    previous(server_args)


def check_linear(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Raise where flashstate is to prefill, where it cannot run, and where states are kept in SGLang's rings."""
    chosen = upstream.resolved(server_args)
    for field in PREFILL:
        if getattr(chosen, field) == NAME:
            also = " and ".join(map(option, FLAGS[1:]))
            raise ValueError(f"{option(field)} must not be {NAME}, which has no prefill; it is for {also}")
    for field in FLAGS[1:]:
        if getattr(chosen, field) == NAME:
            check_platform(field, "cuda", "rocm")
            check_no_rings(field, chosen)
    previous(server_args)


def check_platform(field: str, *platforms: str) -> None:
    if upstream.runs_on() not in platforms:
        raise ValueError(f"{option(field)} {NAME} needs {' or '.join(platforms)}")


def check_no_rings(field: str, chosen: Any) -> None:
    for ring in ("enable_linear_replayssm", "enable_linear_replayssm_spec"):
        if getattr(chosen, ring):
            raise ValueError(f"{option(field)} must not be {NAME} with {option(ring)}: it writes no rings of SGLang's")


def option(field: str) -> str:
    """What the command line calls a field of the server's arguments."""
    return f"--{field.replace('_', '-')}"


def allow_page_major(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Let the check of page-major pools take us for triton, which it lets pass: our ops take slots that are apart."""
    chosen = upstream.resolved(server_args)
    ours = {field: "triton" for field in FLAGS if getattr(chosen, field) == NAME}
    if not ours:
        return previous(server_args)
    with upstream.declared(server_args, **ours):
        previous(server_args)


def serve_linear(*_: Any, **__: Any) -> None:
    """Bind convolutions and dispatchers of GDN and KDA layers, if the model that is being set up has chosen us."""
    if upstream.linear_choices():
        upstream.bind(kernels.causal_conv1d_update, upstream.CONV_OF_LINEAR)
        for layers, kernel in kernels.delta_kernels().items():
            upstream.wrap_dispatcher(layers, kernel)
        upstream.apply_hooks()
