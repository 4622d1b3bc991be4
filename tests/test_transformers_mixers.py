"""Mixers of Transformers on flashstate's ops give what their own forwards give."""

import copy
import gc
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

from flashstate.integrations.transformers.memory import Memory
from flashstate.integrations.transformers.mixers.kind import Kind
from flashstate.integrations.transformers.mixers.mamba1 import MAMBA1
from flashstate.integrations.transformers.mixers.mamba2 import MAMBA2
from flashstate.integrations.transformers.mixers.parameters import DERIVED, decay, derived
from flashstate.integrations.transformers.mixers.short_conv import SHORT_CONV
from flashstate.integrations.transformers.tiny import tiny_model
from flashstate.state.state import State

transformers = pytest.importorskip("transformers")

BATCH, HIDDEN, PROMPT, SEVERAL = 3, 32, 7, 3
FAR = 1e-5  # of the largest value: what rounding in float32 may do
WORSE = 1.2  # times the error of Transformers' own bfloat16, whose scans of prompts are in float32


class Case(NamedTuple):
    """A mixer of a tiny model, and the settings by which that model differs from others of its family."""

    family: str
    name: str  # of its class
    kind: Kind
    settings: dict[str, Any]

    @property
    def clamps(self) -> bool:
        """Whether time steps of prompts are clamped."""
        return any(setting.startswith("time_step") for setting in self.settings)


def case(family: str, name: str, kind: Kind, **settings: Any) -> Case:
    return Case(family, name, kind, settings)


MULTIPLIED = {"ssm_in_multiplier": 0.7, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.9]}
CASES = {
    "mamba": case("mamba", "MambaMixer", MAMBA1),
    "falcon_mamba": case("falcon_mamba", "FalconMambaMixer", MAMBA1),
    "jamba": case("jamba", "JambaMambaMixer", MAMBA1),
    "zamba": case("zamba", "ZambaMambaMixer", MAMBA1),
    "mamba2": case("mamba2", "Mamba2Mixer", MAMBA2, time_step_limit=(0.1, 0.2)),
    "mamba2-one-group": case("mamba2", "Mamba2Mixer", MAMBA2, n_groups=1),
    "bamba": case("bamba", "BambaMixer", MAMBA2),
    "nemotron_h": case("nemotron_h", "NemotronHMamba2Mixer", MAMBA2, time_step_min=0.1),
    "falcon_h1": case("falcon_h1", "FalconH1Mixer", MAMBA2, **MULTIPLIED),
    "falcon_h1-gate-first": case(
        "falcon_h1", "FalconH1Mixer", MAMBA2, mamba_rms_norm=True, mamba_norm_before_gate=False
    ),
    "falcon_h1-norm-first": case(
        "falcon_h1", "FalconH1Mixer", MAMBA2, mamba_rms_norm=True, mamba_norm_before_gate=True
    ),
    "granitemoehybrid": case("granitemoehybrid", "GraniteMoeHybridMambaLayer", MAMBA2),
    "zamba2": case("zamba2", "Zamba2MambaMixer", MAMBA2, time_step_min=0.1),
    "lfm2": case("lfm2", "Lfm2ShortConv", SHORT_CONV),
    "lfm2_moe": case("lfm2_moe", "Lfm2MoeShortConv", SHORT_CONV),
    "lfm3": case("lfm3", "Lfm3ShortConv", SHORT_CONV),
}
NORMS_SINCE = Version("5.23")  # before it Falcon-H1's norm drops an axis of single tokens
HERE = [name for name, case in CASES.items() if case.family in transformers.CONFIG_MAPPING]
CONTINUED = [name for name in HERE if CASES[name].kind is not MAMBA1]  # whose own forwards go on from a state


class Run:
    """One mixer, run by Transformers on `cache` and by flashstate on `memory`, which begin with equal contents."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.case, model = CASES[name], model_of(name)
        if "mamba_rms_norm" in self.case.settings and Version(transformers.__version__) < NORMS_SINCE:
            pytest.skip("the norm of this version of transformers drops an axis")
        self.config, self.kind = model.config, self.case.kind
        self.mixer = copy.deepcopy(next(m for m in model.modules() if type(m).__name__ == self.case.name)).to(dtype)
        self.cache = transformers.DynamicCache(config=self.config)
        self.random = torch.Generator().manual_seed(0)

    def tokens(self, number: int) -> Tensor:
        """So many tokens of every row."""
        return torch.randn(BATCH, number, HIDDEN, generator=self.random).to(self.mixer.out_proj.weight.dtype)

    def stock(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the mixer's own forward gives."""
        names = inspect.signature(self.mixer.forward).parameters
        name = "cache_params" if "cache_params" in names else "past_key_values"
        return self.mixer(tokens, attention_mask=mask, **{name: self.cache})

    def stock_by_one(self, tokens: Tensor) -> Tensor:
        """What the mixer's own forward gives, one token after the other."""
        return torch.cat([self.stock(token) for token in tokens.split(1, dim=1)], dim=1)

    def ours(self, tokens: Tensor, mask: Tensor | None = None, prompt: bool = False) -> Tensor:
        return self.kind.forward(self.mixer, tokens, self.memory, mask, prompt)

    def continued(self) -> "Run":
        """Both after a prompt, which Transformers ran."""
        self.stock(self.tokens(PROMPT))
        window, recurrent = (None if t is None else t.clone() for t in self.kept())
        self.memory = Memory(window=window, state=None if recurrent is None else State(recurrent))
        return self

    def begun(self) -> "Run":
        """Both with nothing kept."""
        channels, width, state = self.kind.sizes(self.mixer)
        window = torch.zeros(BATCH, channels, width, dtype=self.mixer.out_proj.weight.dtype)
        self.memory = Memory(window=window, state=None if state is None else State(torch.zeros(BATCH, *state)))
        return self

    def kept(self) -> tuple[Tensor, Tensor | None]:
        """Transformers' window and state."""
        window = self.cache.get_conv_state(self.mixer.layer_idx, state_idx=0)
        recurrent = self.cache.get_recurrent_state(self.mixer.layer_idx, state_idx=0)
        return window, None if recurrent is None else self.kind.view(recurrent)

    def check_kept(self) -> None:
        """Both have kept the same."""
        window, recurrent = self.kept()
        check_near(self.memory.window, window)
        assert (self.memory.state is None) == (recurrent is None)
        if recurrent is not None:
            assert recurrent.shape[1:] == self.kind.sizes(self.mixer).state
            check_near(self.memory.state.data, recurrent)


@cache
def model_of(name: str) -> Any:
    return tiny_model(CASES[name].family, **CASES[name].settings)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def check_near(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=0, atol=FAR * wanted.abs().max().item())


@pytest.mark.parametrize("name", HERE)
def test_tokens_that_continue_a_prompt_are_as_stock_has_them_one_by_one(name: str) -> None:
    run = Run(name).continued()
    for number in (1, 1, SEVERAL, 1):
        tokens = run.tokens(number)
        check_near(run.ours(tokens), run.stock_by_one(tokens))
        run.check_kept()


@pytest.mark.parametrize("name", CONTINUED)
def test_a_prompt_that_continues_another_is_as_stock_has_it(name: str) -> None:
    run = Run(name).continued()
    tokens = run.tokens(SEVERAL)
    check_near(run.ours(tokens, prompt=True), run.stock(tokens))
    run.check_kept()


@pytest.mark.parametrize("name", HERE)
def test_a_prompt_in_pieces_is_as_stock_has_it_whole(name: str) -> None:
    run = Run(name).begun()
    tokens = run.tokens(PROMPT)
    got = [run.ours(piece, prompt=True) for piece in tokens.split(SEVERAL, dim=1)]
    check_near(torch.cat(got, dim=1), run.stock(tokens))
    run.check_kept()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("name", HERE)
def test_prompts_padded_on_the_left_are_as_stock_has_them(name: str, dtype: torch.dtype) -> None:
    run = Run(name).begun()
    tokens, mask = run.tokens(PROMPT), torch.arange(PROMPT) >= torch.tensor([[0], [2], [5]])
    got, wanted = (f(tokens, mask.to(dtype)) for f in (lambda *given: run.ours(*given, prompt=True), run.stock))
    check_near(got[mask], wanted[mask])
    run.check_kept()


@pytest.mark.parametrize("name", [name for name in HERE if CASES[name].clamps])
def test_only_prompts_clamp_time_steps(name: str) -> None:
    run, other = Run(name).begun(), Run(name).begun()
    tokens = run.tokens(PROMPT)
    run.ours(tokens, prompt=True)
    other.ours(tokens)
    assert (run.memory.state.data - other.memory.state.data).abs().max() > FAR


@pytest.mark.parametrize("name", HERE)
def test_bfloat16_is_no_further_from_float32_than_stock_is(name: str) -> None:
    exact, rounded = Run(name, torch.bfloat16).continued(), Run(name, torch.bfloat16).continued()
    exact.mixer.float()
    window, recurrent = exact.kept()
    exact.memory = Memory(window=window.float(), state=None if recurrent is None else State(recurrent))
    wanted, ours, stock = [], [], []
    for _ in range(8):
        tokens = rounded.tokens(1)
        wanted.append(exact.ours(tokens.float()))
        ours.append(rounded.ours(tokens))
        stock.append(rounded.stock(tokens))
    mine, theirs = (distance(torch.cat(outputs), torch.cat(wanted)) for outputs in (ours, stock))
    assert all(output.dtype == torch.bfloat16 for output in ours)
    assert mine <= WORSE * theirs


def distance(outputs: Tensor, wanted: Tensor) -> float:
    return (outputs.float() - wanted).square().mean().sqrt().item()


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_changed_parameter_is_noticed(name: str) -> None:
    run = Run(name).continued()
    parameter, changed = run.mixer.A_log, {"A_log": run.mixer.A_log - 1}

    def replaced() -> None:
        parameter.data = parameter.data + 0.5

    for change in (lambda: parameter.add_(0.3), lambda: run.mixer.load_state_dict(changed, strict=False), replaced):
        change()
        tokens = run.tokens(1)
        check_near(run.ours(tokens), run.stock(tokens))
        run.check_kept()


def test_what_is_derived_is_made_once_and_belongs_to_no_module() -> None:
    run = Run("mamba2").continued()
    names = set(run.mixer.state_dict())
    A = derived(run.mixer, decay, run.mixer.A_log)
    run.ours(run.tokens(1))
    assert derived(run.mixer, decay, run.mixer.A_log) is A
    assert set(run.mixer.state_dict()) == names
    other = copy.deepcopy(run.mixer)
    assert derived(other, decay, other.A_log) is not A
    assert torch.equal(derived(other, decay, other.A_log), A)


def test_what_is_derived_ends_with_its_module() -> None:
    module, known = nn.Linear(2, 2), len(DERIVED)
    derived(module, decay, module.bias)
    assert len(DERIVED) == known + 1
    del module
    gc.collect()
    assert len(DERIVED) <= known


def test_what_is_derived_in_inference_mode_serves_outside_it() -> None:
    module = nn.Linear(2, 2)
    with torch.inference_mode():
        A = derived(module, decay, module.bias)
        made_here = nn.Linear(2, 2)
        first = derived(made_here, decay, made_here.bias)
        made_here.bias.add_(1)
        assert not torch.equal(derived(made_here, decay, made_here.bias), first)
    assert not A.is_inference()


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_other_activations_are_refused_by_name(name: str) -> None:
    run = Run(name)
    run.mixer.activation = "gelu"
    with pytest.raises(ValueError, match=rf"{run.case.name}.activation must be one of silu, swish, got 'gelu'"):
        run.kind.sizes(run.mixer)


def test_short_convolutions_have_no_recurrent_state() -> None:
    with pytest.raises(TypeError, match="have no recurrent state"):
        SHORT_CONV.view(torch.zeros(1))
