"""Layers of vLLM on flashstate, driven without its engine, beside the same layers on vLLM's kernels and on models.

The models are those of tests/: loops over rows and tokens in float64, which say what a call of vLLM gives. Kernels for
prompts are vLLM's in all runs. Without a GPU, vLLM's kernels run in Triton's interpreter.
"""

from tests_vllm import driving  # it prepares vLLM, and finds what tests/ has
from tests_vllm.driving import (
    BOUNDED_KIMI,
    KIMI,
    MAMBA1,
    MAMBA2,
    OLMO,
    QWEN,
    SHORT_CONV,
    VERSION,
    Batch,
    Driven,
    Family,
)

# isort: split
import contextlib
import dataclasses
import importlib
from collections.abc import Container, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from models_of_peers import rounded
from peer_calls import equal_bytes
from torch import Tensor

from flashstate.compat import delta, shapes
from flashstate.compat import vllm as compat
from flashstate.integrations.vllm import upstream
from flashstate.proof import error_ratio

FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
ON_GPU = driving.DEVICE.type == "cuda"
FAR = 64  # budgets: what vLLM's kernels may be off for another order of sums, and what is no such thing is not

DECODES, PADDED = Batch(decodes=[3, 5, 1]), Batch(decodes=[3, 5, 1], padding=2)
PROMPTS = Batch(decodes=[3, 5], prefills=[(7, 9, True), (8, 70, False)])
CHUNKS = Batch(decodes=[3, 5], prefills=[(7, 9, True), (8, 20, False)])  # of 16 tokens, of Mamba-2
FEW_TOKENS = Batch(decodes=[3], prefills=[(7, 9, True), (8, 3, False)])  # of KDA, which is interpreted slowly
DRAFTS = Batch(drafts=[((3, 4, 5), 3, 2), ((6, 7, 8), 2, 1), ((9, 10, 11), 3, 3)])
PADDED_DRAFTS = dataclasses.replace(DRAFTS, padding=1)
DRAFTS_AND_PROMPTS = Batch(drafts=DRAFTS.drafts[:2], prefills=[(1, 9, True), (2, 5, False)])
# Where some have drafts, vLLM takes every other request for a prompt, of one token if it decodes.
TOKENS_AND_DRAFTS = Batch(drafts=DRAFTS.drafts[:2], prefills=[(1, 1, True), (2, 1, True)], drafts_last=True)
DRAFTS_AND_TOKENS = dataclasses.replace(TOKENS_AND_DRAFTS, drafts_last=False)
MOVED = Batch(decodes=[3, 5, 1], moves=[9, None, 7], padding=1)
MOVED_DRAFTS = Batch(drafts=DRAFTS.drafts[:2], moves=[9, None], padding=1)

MINOR = int(VERSION.split(".")[1])


def since(minor: int) -> Any:
    """A mark for what vLLM has since 0.`minor`."""
    return pytest.mark.skipif(minor > MINOR, reason=f"vLLM has it since 0.{minor}")


gpu = pytest.mark.skipif(not ON_GPU, reason="vLLM's kernel for these prompts needs a GPU")
mode_all = pytest.mark.skipif(MINOR > 31, reason="vLLM 0.32 has no mode `all` of prefix caches")
CASES = {
    "qwen, decodes": (QWEN, DECODES),
    "qwen, padding": (QWEN, PADDED),
    "qwen, prompts": (QWEN, PROMPTS),
    "qwen, drafts": (QWEN, DRAFTS),
    "qwen, drafts and padding": (QWEN, PADDED_DRAFTS),
    "qwen, drafts and prompts": (QWEN, DRAFTS_AND_PROMPTS),
    "qwen, tokens before drafts": (QWEN, TOKENS_AND_DRAFTS),
    "qwen, drafts before tokens": (QWEN, DRAFTS_AND_TOKENS),
    "olmo, padding": (OLMO, PADDED),
    "olmo, prompts": (OLMO, PROMPTS),
    "olmo, drafts and padding": (OLMO, PADDED_DRAFTS),
    "olmo, drafts and prompts": (OLMO, DRAFTS_AND_PROMPTS),
    "olmo, tokens before drafts": (OLMO, TOKENS_AND_DRAFTS),
    "kimi, padding": (KIMI, PADDED),
    "kimi, prompts": (KIMI, FEW_TOKENS),
    "kimi, drafts and padding": (KIMI, PADDED_DRAFTS, since(27)),
    "kimi, tokens before drafts": (KIMI, TOKENS_AND_DRAFTS, since(27)),
    "kimi with a lower bound": (BOUNDED_KIMI, DECODES, since(27)),
    "kimi with a lower bound, drafts": (BOUNDED_KIMI, DRAFTS, since(27)),
    "mamba-2, padding": (MAMBA2, PADDED),
    "mamba-2, drafts and padding": (MAMBA2, PADDED_DRAFTS),
    "mamba-2, prompts": (MAMBA2, CHUNKS),
    "mamba-2, mode `all`": (MAMBA2, MOVED, mode_all),
    "mamba-2, mode `all`, drafts": (MAMBA2, MOVED_DRAFTS, mode_all),
    "mamba": (MAMBA1, PADDED),
    "mamba, mode `all`": (MAMBA1, MOVED, mode_all),
    "mamba, prompts": (MAMBA1, PROMPTS, gpu),
    "short convolution, padding": (SHORT_CONV, PADDED),
    "short convolution, prompts": (SHORT_CONV, PROMPTS),
    "short convolution, drafts and padding": (SHORT_CONV, PADDED_DRAFTS, since(29)),
}  # fmt: skip
OF_FORMATS = (
    "qwen, padding", "qwen, drafts", "qwen, prompts", "olmo, drafts and prompts", "kimi, padding",
    "mamba-2, drafts and padding",
)  # fmt: skip
SCALED = (
    *OF_FORMATS, "qwen, tokens before drafts", "qwen, drafts and prompts", "kimi, drafts and padding", "kimi, prompts",
    "mamba-2, prompts",
)  # fmt: skip

# Cases for `make test-vllm-releases`: every kind, and every call that steps or fills its states.
IN_FLOAT32 = (
    "mamba", "short convolution, padding", "short convolution, prompts", "short convolution, drafts and padding",
)  # fmt: skip
IN_INT8 = (
    "qwen, padding", "qwen, drafts", "qwen, tokens before drafts", "qwen, drafts and prompts",
    "olmo, drafts and prompts", "kimi, padding", "kimi, drafts and padding", "kimi, prompts",
    "mamba-2, drafts and padding", "mamba-2, prompts",
)  # fmt: skip


def parameters(names: Iterable[str], released: Container[str] = (), **more: str) -> list[Any]:
    """Parameters of a test: a family and a batch of each of these cases, and more; some run in every release."""
    return [
        pytest.param(*CASES[name][:2], *more.values(), id=", ".join((name, *more.values())),
                     marks=(*CASES[name][2:], *[pytest.mark.release] * (name in released)))
        for name in names
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def as_on_gpus() -> Iterator[None]:
    """Layers are served as they are on GPUs, where vLLM has other methods for CPUs."""
    with mock.patch.object(upstream, "on_cuda", return_value=True):
        yield


@dataclasses.dataclass
class Run:
    """A layer that has run a batch: its output, and its pages before and after."""

    y: Tensor
    before: Tensor
    driven: Driven

    @property
    def blocks(self) -> list[int]:
        """Those that changed."""
        return (self.driven.pages != self.before).any(1).nonzero().flatten().tolist()


def run(driven: Driven, batch: Batch, models: torch.dtype | None = None) -> Run:
    """Run a batch on a layer, with models in this dtype in place of its calls, if there is one."""
    before = driven.pages.clone()
    with contextlib.nullcontext() if models is None else driving.on_models(driven.family, models):
        y = driven.run(batch, driving.tokens_of(batch))
    return Run(y, before, driven)


def runs_of(family: Family, batch: Batch, state: torch.dtype) -> dict[str, Run]:
    """The batch on flashstate, on vLLM's kernels, and on models, exact and plain."""
    options = {} if family is SHORT_CONV else {"state": str(state).removeprefix("torch.")}
    runs = {"ours": run(driving.drive(family, batch, options, state), batch)}
    for name, models in (("exact", torch.float64), ("plain", FLOAT), ("stock", None)):
        runs[name] = run(driving.drive(family, batch, state=state), batch, models)
    return runs


def budgets(got: Tensor, exact: Tensor, plain: Tensor, activations: torch.dtype) -> float:
    """The error of `got`, in budgets of the coarser of two dtypes, the one that it has and that of activations."""
    coarser = max(plain.dtype, activations, key=lambda dtype: torch.finfo(dtype).eps)
    return error_ratio(got, exact.double(), plain.to(coarser))


def comparable(family: Family, batch: Batch) -> bool:
    """Whether vLLM's kernels give what they should: Qwen layers up to 0.27 give them gates of the first tokens of a
    batch, which have no drafts here."""
    return not (family is QWEN and batch is TOKENS_AND_DRAFTS and MINOR < 28)


def require_peer(runs: dict[str, Run], batch: Batch) -> None:
    """Outputs and states on flashstate are within their budgets, or nearer than those on vLLM's kernels."""
    ours, exact = runs["ours"], runs["exact"]
    values = {"y": {name: one.y[: batch.tokens] for name, one in runs.items()}}
    for i in range(1, len(ours.driven.tensors)):
        values[f"state {i}"] = {name: one.driven.tensors[i][exact.blocks] for name, one in runs.items()}
    for what, of in values.items():
        error, stock = (
            budgets(of[name], of["exact"], of["plain"], runs["exact"].y.dtype) for name in ("ours", "stock")
        )
        if comparable(ours.driven.family, batch):
            assert stock <= FAR, what
            assert error <= max(1, stock), what
        assert error <= FAR, what


def require_untouched(ours: Run, exact: Run, batch: Batch) -> None:
    """Only the blocks of requests change, and padding gives zero."""
    assert ours.blocks == exact.blocks
    assert 0 not in ours.blocks
    assert torch.equal(ours.driven.pages[:, -driving.PADDING :], ours.before[:, -driving.PADDING :])
    assert not ours.y[batch.tokens :].any()
    assert equal_bytes(ours.driven.tensors[0], exact.driven.tensors[0])  # inputs of convolutions are kept as they are


@pytest.mark.parametrize(("family", "batch"), parameters(CASES, IN_FLOAT32))
def test_a_layer_gives_what_vllm_gives(family: Family, batch: Batch) -> None:
    runs = runs_of(family, batch, FLOAT)
    assert type(runs["ours"].driven.layer).__name__ == f"Flashstate{family.name}"
    require_peer(runs, batch)
    require_untouched(runs["ours"], runs["exact"], batch)


@pytest.mark.parametrize("state", [BRAIN, HALF], ids=str)
@pytest.mark.parametrize(("family", "batch"), parameters(OF_FORMATS))
def test_states_may_be_of_16_bits(family: Family, batch: Batch, state: torch.dtype) -> None:
    runs = runs_of(family, batch, state)
    assert all(one.driven.tensors[-1].dtype == state for one in runs.values())
    require_peer(runs, batch)
    require_untouched(runs["ours"], runs["exact"], batch)


def test_states_of_mamba_may_have_the_dtype_of_the_model() -> None:
    runs = runs_of(MAMBA1, PADDED, HALF)
    assert all(one.driven.tensors[-1].dtype == one.y.dtype == HALF for one in runs.values())
    require_peer(runs, PADDED)
    require_untouched(runs["ours"], runs["exact"], PADDED)


@pytest.mark.parametrize(
    ("family", "batch", "state"),
    [
        *parameters(SCALED, IN_INT8, state="int8"),
        *parameters(OF_FORMATS, state="int16"),
        *parameters(OF_FORMATS, state="float8_e4m3fn"),
    ],
)
def test_states_with_scales_are_as_near_as_their_format_allows(family: Family, batch: Batch, state: str) -> None:
    require_format(family, batch, state)


@pytest.mark.parametrize("state", ["bfloat16", "float16"])
def test_prompts_may_have_states_of_16_bits_where_vllm_stores_float32(state: str) -> None:
    require_format(KIMI, FEW_TOKENS, state)


def require_format(family: Family, batch: Batch, state: str) -> None:
    """Outputs and states are as near as their format allows, where vLLM has no kernels for it: the models start from
    what is stored, in float32."""
    ours = driving.drive(family, batch, {"state": state})
    starts = driving.starts_of(ours)
    runs = {"ours": run(ours, batch)}
    for name, models in (("exact", torch.float64), ("plain", FLOAT)):
        driven = driving.drive(family, batch)
        driven.tensors[-1].copy_(starts)
        runs[name] = run(driven, batch, models)
    exact = runs["exact"]
    require_untouched(runs["ours"], exact, batch)
    y, want, plain = (runs[name].y[: batch.tokens] for name in ("ours", "exact", "plain"))
    assert budgets(y, want, plain, y.dtype) <= 1
    want = exact.driven.tensors[-1][exact.blocks].double()
    plain = rounded(runs["plain"].driven.tensors[-1][exact.blocks], getattr(torch, state))
    assert error_ratio(driving.starts_of(ours)[exact.blocks], want, plain) <= 1


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (MAMBA1, {"state": "int8"}, "cannot prefill layer '.*' with states of int8: they must be float32"),
        (MAMBA1, {"state": "float16"}, "cannot prefill layer '.*' with states of float16: they must be float32"),
        (SHORT_CONV, {"state": "int8"}, "has no state but that of its convolution: leave out state"),
        (SHORT_CONV, {"rounding": "stochastic"}, "has no state but that of its convolution: leave out state"),
        (QWEN, {"rounding": "stochastic"}, "rounding='stochastic' is not for float32, the states of layer"),
    ],
)
def test_options_that_would_be_lost_or_fail_later_are_refused(
    family: Family, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        driving.drive(family, DECODES, options)


@pytest.mark.parametrize(
    ("family", "batch", "parameter", "call"),
    [
        (QWEN, DECODES, "conv1d.weight", "causal_conv1d_update"),
        (QWEN, DECODES, "A_log", "fused_recurrent_gated_delta_rule_packed_decode"),
        (QWEN, DRAFTS, "A_log", "fused_sigmoid_gating_delta_rule_update"),
        (MAMBA1, DECODES, "A", "selective_state_update"),
    ],
)
def test_an_error_names_layer_and_call_and_that_call_writes_nothing(
    family: Family, batch: Batch, parameter: str, call: str
) -> None:
    driven = driving.drive(family, batch, {})
    tensor = driven.layer.get_parameter(parameter)
    tensor.data = tensor.data.double()
    before = driven.pages.clone()
    with pytest.raises(RuntimeError, match=f"flashstate failed in {call} of layer '{driving.PREFIX}': .* must be"):
        driven.run(batch, driving.tokens_of(batch))
    states = driven.tensors[-1].clone()
    if call == "causal_conv1d_update":
        assert torch.equal(driven.pages, before)
    driven.pages.copy_(before)
    assert equal_bytes(driven.tensors[-1], states)


@pytest.mark.parametrize(
    ("family", "batch"),
    parameters(["qwen, drafts", "olmo, padding", "kimi, padding", "mamba", "short convolution, padding"]),
)
def test_a_layer_that_did_not_select_flashstate_is_stock(family: Family, batch: Batch) -> None:
    """No op of flashstate is reached, though the same calls are answered for a layer that selected it."""
    ours, tokens = driving.drive(family, batch, {}), driving.tokens_of(batch)
    with contextlib.ExitStack() as stack:
        for module, op in ((delta, "gated_delta_step"), (compat, "conv1d_step"), (shapes, "mamba2_step")):
            stack.enter_context(mock.patch.object(module, op, side_effect=AssertionError("reached")))
        with pytest.raises(RuntimeError, match="reached"):
            ours.run(batch, tokens)
        stock = driving.drive(family, batch)
        assert type(stock.layer) is family.stock
        stock.run(batch, tokens)


@pytest.mark.release
@since(28)
def test_drafts_do_not_go_through_a_kernel_that_would_pass_flashstate_by() -> None:
    """Not even where vLLM would take it: the flags say so before a graph is compiled."""
    stock = driving.drive(QWEN, DRAFTS).layer
    chosen = [name for name in ("enable_fused_gdn_decode", "enable_fused_gdn_spec_decode") if hasattr(stock, name)]
    assert len(chosen) == 1
    platform = importlib.import_module(QWEN.module).current_platform
    with (
        mock.patch.object(QWEN.stock, "_fused_gdn_decode_unsupported_reason", return_value=None),
        mock.patch.object(type(platform), "is_cuda_alike", return_value=True),
    ):
        kept, ours = driving.drive(QWEN, DRAFTS).layer, driving.drive(QWEN, DRAFTS, {}).layer
    assert (kept.gdn_decode_kernel, getattr(kept, chosen[0])) == ("cuda", True)
    assert (ours.gdn_decode_kernel, getattr(ours, chosen[0])) == ("triton", False)


@pytest.mark.parametrize("family", [QWEN, OLMO, KIMI, MAMBA1, SHORT_CONV], ids=lambda family: family.name)
def test_layers_that_run_otherwise_on_cpus_stay_on_the_kernels_of_vllm_there(family: Family) -> None:
    upstream.on_cuda.return_value = False
    with mock.patch.object(upstream.logger, "warning") as warned, mock.patch.object(upstream, "_left", set()):
        assert type(driving.drive(family, DECODES, {}).layer) is family.stock
    assert warned.call_args.args[-1].endswith(f"layers of {family.name} itself, since flashstate does not serve them")


def test_layers_that_are_not_of_flashstate_keep_the_kernel_of_vllm() -> None:
    driving.drive(MAMBA1, DECODES, {})  # adds the backend
    backend = driving.ssu_backend(served=True)(driving.config_of({}, DECODES, FLOAT).mamba_config)
    assert not isinstance(backend, driving.ssu_backend(served=False))  # else vLLM would keep it for other models
    with mock.patch.object(backend.stock, "_kernel") as stock:
        backend(*[torch.ones(1)] * 8)
    assert stock.call_count == 1
