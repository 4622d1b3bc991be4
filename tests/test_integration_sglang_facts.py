"""What is recorded of SGLang: our side takes it, and where its sources are, they say so."""

import ast
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import sglang_facts as facts
from sglang_modules import needs_sources, source

from flashstate.compat import sglang as compat
from flashstate.integrations.sglang import kernels, upstream

TARGETS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_update": kernels.causal_conv1d_update, "causal_conv1d_update_triton": kernels.causal_conv1d_update,
    "ccu": kernels.causal_conv1d_update, "selective_state_update": compat.selective_state_update,
    "backend_cls": kernels.StateUpdate,
    **{name: getattr(kernels.DeltaRule, name) for name in ("packed_decode", "decode", "target_verify")},
}  # fmt: skip


@pytest.mark.parametrize("call", [call for call in facts.CALLS if call[2] in TARGETS], ids=lambda call: f"{call[2]}")
def test_our_side_takes_what_every_call_gives(call: tuple[str, int, str]) -> None:
    by_position, names = facts.CALLS[call]
    target, own = TARGETS[call[2]], [None] if call[2] in ("packed_decode", "decode", "target_verify") else []
    inspect.signature(target).bind(*own, *[None] * by_position, **dict.fromkeys(names))


@needs_sources
@pytest.mark.parametrize("place", facts.SIGNATURES, ids=lambda place: place[1])
def test_recorded_signatures_are_those_of_the_sources(place: tuple[str, str]) -> None:
    nodes: Any = ast.parse(source(place[0])).body
    for name in place[1].split("."):
        node = next(n for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
        nodes = node.body
    for argument in (*node.args.args, *node.args.kwonlyargs, node.args.kwarg, node.args.vararg):
        if argument is not None:
            argument.annotation = None
    written = ast.unparse(node.args).replace("PAD_SLOT_ID", "-1")
    assert written == facts.SIGNATURES[place]


@needs_sources
@pytest.mark.parametrize("call", facts.CALLS, ids=lambda call: f"{call[2]}-{call[1]}")
def test_recorded_calls_are_those_of_the_sources(call: tuple[str, int, str]) -> None:
    path, line, name = call
    found = [node for node in ast.walk(ast.parse(source(path))) if isinstance(node, ast.Call) and node.lineno == line]
    node = next(n for n in found if getattr(n.func, "attr", getattr(n.func, "id", None)) == name)
    names = tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None)
    by_position, wanted = facts.CALLS[call]
    assert (len(node.args), sorted(names)) == (by_position, sorted(wanted))


@needs_sources
def test_the_version_is_recorded() -> None:
    assert f"'{facts.VERSION}'" in source("_version.py")
    assert upstream.SUPPORTED == (facts.VERSION,)
