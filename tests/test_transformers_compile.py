"""A decode step of a model on flashstate compiles as a whole, and once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding import PROMPT, STATIC, TOKENS, greedy
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.tiny import tiny_model

TWO = {"num_hidden_layers": 2}
RANDOM = {"dtype": torch.float16, "rounding": "stochastic", "seed": 3}
COMPILED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of a model of every op, and of its cache
    "mamba2": ({"num_hidden_layers": 1}, {"replay": 3, "dtype": torch.int8}),
    "qwen3_5": ({**TWO, "layer_types": ["linear_attention", "full_attention"]}, {"drafts": 2, **RANDOM}),
    "kimi_linear": (
        {**TWO, "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense"] * 2},
        {"replay": 3, "dtype": torch.int8},
    ),
}


@pytest.mark.parametrize("family", COMPILED)
@torch.no_grad()
def test_a_decode_step_is_one_graph_that_is_made_once(family: str) -> None:
    settings, options = COMPILED[family]
    model: Any = tiny_model(family, **settings)

    def logits(compile: Callable[..., Any]) -> list[Tensor]:
        """Those of three tokens behind a prompt."""
        cache = fs.StateCache(model, **STATIC, **options)
        model(input_ids=PROMPT, past_key_values=cache)
        step = compile(lambda tokens: model(input_ids=tokens, past_key_values=cache).logits)
        return [step(TOKENS[:, i : i + 1]) for i in range(6, 9)]

    torch.compiler.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = logits(lambda step: torch.compile(step, fullgraph=True, backend="aot_eager"))
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(compiled, logits(lambda step: step))


def test_generate_compiles_a_decode_step_as_the_user_says() -> None:
    model: Any = tiny_model("mamba2", num_hidden_layers=1)
    want = greedy(model)
    torch.compiler.reset()
    counters.clear()
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True  # else not on a CPU
    assert torch.equal(greedy(model, past_key_values=fs.StateCache(model, **STATIC), compile_config=config), want)
    assert counters["stats"]["unique_graphs"] == 1
