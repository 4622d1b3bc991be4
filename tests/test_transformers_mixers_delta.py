"""Mixers of the gated delta rule on flashstate's ops give what Transformers' own forwards give."""

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from stock_mixers import BATCH, KNOWN, Result, Stock, stock, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashstate.integrations.transformers.memory import Memory
from flashstate.integrations.transformers.mixers.delta import GATED_DELTA, KDA, Delta
from flashstate.proof import interpreted
from flashstate.state.state import State

PROMPT = 20
STEPS = 1, 1, 3, 3, 1  # tokens of the calls behind a prompt


class Case(NamedTuple):
    """A family, its kind, how often a mixer copies what it projects, and settings of the tiny model."""

    family: str
    kind: Delta
    copies: int
    changes: dict[str, Any]

    def stock(self, dtype: torch.dtype = torch.float32) -> Stock:
        return stock(self.family, dtype, **self.changes)


CASES = {
    "qwen3_next": Case("qwen3_next", GATED_DELTA, 2, {}),
    "qwen3_next, heads alone": Case("qwen3_next", GATED_DELTA, 1, {"linear_num_key_heads": 4}),
    "qwen3_5": Case("qwen3_5", GATED_DELTA, 0, {}),
    "qwen3_5_moe": Case("qwen3_5_moe", GATED_DELTA, 0, {}),
    "olmo_hybrid": Case("olmo_hybrid", GATED_DELTA, 1, {}),
    "olmo_hybrid, beta below 1": Case("olmo_hybrid", GATED_DELTA, 1, {"linear_allow_neg_eigval": False}),
    "kimi_linear": Case("kimi_linear", KDA, 1, {}),
    "bailing_hybrid": Case("bailing_hybrid", KDA, 1, {}),
    "bailing_hybrid, no bound": Case("bailing_hybrid", KDA, 1, {"kda_safe_gate": False}),
    "glm5_next": Case("glm5_next", KDA, 1, {}),
    "glm5_next, no bound": Case("glm5_next", KDA, 1, {"linear_lower_bound": None}),
}
INTERPRETED = ("qwen3_next", "kimi_linear")


@pytest.fixture(params=[name for name in CASES if CASES[name].family in KNOWN])
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def memory_of(kind: Delta, window: Tensor, recurrent: Tensor) -> Memory:
    return Memory(window, state=State(kind.view(recurrent)))


def zeros(case: Case, given: Stock) -> tuple[Tensor, Tensor]:
    """A window and a state, as Transformers has them, of a mixer that has seen nothing."""
    channels, width, (heads, rows, columns) = case.kind.sizes(given.mixer)
    return torch.zeros(BATCH, channels, width), torch.zeros(BATCH, heads, columns, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_tokens_behind_a_prompt_equal_the_stock_forward(case: Case, dtype: torch.dtype) -> None:
    given, calls = case.stock(dtype), tokens(PROMPT, *STEPS, dtype=dtype)
    exact, plain = given.expected(calls)
    cache = given.cache()
    outputs = [given.forward(calls[0], cache)]
    window, recurrent = given.kept(cache)
    memory = memory_of(case.kind, window, recurrent)
    outputs += [case.kind.forward(given.mixer, hidden, memory, None, False) for hidden in calls[1:]]
    assert Result(outputs, window[..., 1:], recurrent).holds(exact, plain)


@torch.no_grad()
def test_prompts_padded_on_the_left_equal_the_stock_forward(case: Case) -> None:
    given, calls = case.stock(), tokens(PROMPT)
    mask = (torch.arange(PROMPT) >= torch.tensor([0, 7, PROMPT - 2])[:, None]).long()
    window, recurrent = zeros(case, given)
    output = case.kind.forward(given.mixer, calls[0], memory_of(case.kind, window, recurrent), mask, True)
    assert Result([output], window[..., 1:], recurrent).holds(*given.expected(calls, mask))


class Copies(TorchDispatchMode):
    """Counts operations that only move values, by name."""

    moves = "clone", "copy_", "_to_copy", "cat", "index_select", "index", "gather", "repeat", "repeat_interleave"

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.seen[name] += name in self.moves
        return function(*arguments, **(named or {}))


@torch.no_grad()
def test_projections_are_copied_only_for_the_convolution_and_to_part_interleaved_gates(case: Case) -> None:
    given, (hidden,) = case.stock(), tokens(1)
    case.kind.project(given.mixer, hidden)  # what is derived from parameters is kept
    with Copies() as copies:
        case.kind.project(given.mixer, hidden)
    assert copies.seen.total() == case.copies, +copies.seen


@pytest.mark.interpreted
@pytest.mark.parametrize("name", INTERPRETED)
@torch.no_grad()
def test_kernels_take_all_views_of_projections(name: str) -> None:
    """One token and three, with a state that is transposed in memory as in Transformers."""
    case = CASES[name]
    given, calls = case.stock(torch.bfloat16), tokens(1, 3, dtype=torch.bfloat16)
    window, recurrent = zeros(case, given)
    memory = memory_of(case.kind, window, recurrent)
    with interpreted():
        outputs = [case.kind.forward(given.mixer, hidden, memory, None, False) for hidden in calls]
    assert Result(outputs, window[..., 1:], recurrent).holds(*given.expected(calls))


@pytest.mark.interpreted
@pytest.mark.parametrize("name", INTERPRETED)
@torch.no_grad()
def test_kernels_of_replay_take_all_views_of_projections(name: str) -> None:
    """One token, and three with which the ring is folded first; then the ring is folded by itself."""
    case = CASES[name]
    given, calls = case.stock(torch.bfloat16), tokens(1, 3, dtype=torch.bfloat16)
    window, _ = zeros(case, given)
    rings: dict[str, Any] = {"window": 3, "tokens": 3, "ring_dtype": torch.bfloat16}
    pool = case.kind.pool(given.mixer, torch.float32, slots=BATCH, layers=1, device="cpu", **rings)
    state, ring, slots, outputs = pool.layer(0), pool.ring(0), pool.acquire(BATCH), []
    with interpreted():
        for hidden in calls:
            plan = pool.plan(slots, hidden.shape[1])
            memory = Memory(window, state=state, ring=ring, plan=plan)
            outputs.append(case.kind.forward(given.mixer, hidden, memory, None, False))
            pool.commit(plan)
        case.kind.fold(given.mixer, state, ring, slots)
    assert Result(outputs, window[..., 1:], state.data.mT).holds(*given.expected(calls))


def test_other_activations_are_refused() -> None:
    given = stock("qwen3_5")
    given.mixer.activation = "gelu"
    with pytest.raises(ValueError, match=r"Qwen3_5GatedDeltaNet.activation must be one of silu, swish, got 'gelu'"):
        GATED_DELTA.sizes(given.mixer)
