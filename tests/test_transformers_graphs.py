"""Steps that become CUDA graphs have few shapes, and find all that they read and write where it was; a step compiles as
a whole, and once.

No graph is captured here: a stand-in runs the step that would be, and looks where things are."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding import LONG, OPTIONS, PROMPT, STATIC, TOKENS, call, greedy
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers import graphs
from flashstate.integrations.transformers.tiny import tiny_model


class Standin:
    """What a step reads and writes when it is first met, and the step itself."""

    def __init__(self, step: Any, kept: Any, leaves: list[Any], pool: Any) -> None:
        self.step, self.kept, self.places, self.shapes = step, kept, places(kept), shapes(leaves)
        self.graph = SimpleNamespace(pool=lambda: None)
        self.replays = 0

    def replay(self, leaves: list[Any]) -> Any:
        assert (places(self.kept), shapes(leaves)) == (self.places, self.shapes)
        outputs = self.step(self.kept, leaves)
        self.call = self.kept.latest
        self.replays += 1
        assert places(self.kept) == self.places
        return outputs


def shapes(leaves: list[Any]) -> list[torch.Size]:
    return [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]


def places(cache: Any) -> list[int]:
    """Where in memory a cache has its tensors."""
    owners = [*cache.layers, *cache.stores.values()]
    return [it.data_ptr() for owner in owners for it in vars(owner).values() if isinstance(it, Tensor)]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(graphs, "Graph", Standin)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # which needs a torch with CUDA


def replays(cache: Any) -> list[int]:
    """How often every shape of a step was replayed; 0: it was met once."""
    return [0 if graph is None else graph.replays for graph in cache.graphs.graphs.values()]


@pytest.mark.parametrize(("family", "more"), [("jamba", {}), ("falcon_h1", {"num_beams": 3})], ids=str)
def test_all_steps_of_one_number_of_rows_are_one_graph(family: str, more: dict[str, Any]) -> None:
    model: Any = tiny_model(family)
    cache = fs.StateCache(model, max_cache_len=32)
    for prompt, counts in ((LONG, [10]), (LONG, [21]), (LONG[:1], [10]), (LONG, [10])):
        stock = fs.disable(model).generate(prompt, **OPTIONS, **more)
        fs.enable(model)
        assert torch.equal(model.generate(prompt, past_key_values=cache, **OPTIONS, **more), stock)
        assert replays(cache)[-1:] == counts  # tokens but the one behind the prompt, and the first step
        cache.reset()


@pytest.mark.parametrize(("family", "more"), [("nemotron_h", {}), ("qwen3_next", {"replay": 5})], ids=str)
def test_steps_with_drafts_are_a_graph_for_every_number_of_tokens(family: str, more: dict[str, int]) -> None:
    model: Any = tiny_model(family)
    prompt, few = LONG[:1], {"suppress_tokens": list(range(4, 96))}  # so that tokens repeat
    options = {**OPTIONS, "max_new_tokens": 24} | few
    stock = model.generate(prompt, **options)
    cache = fs.StateCache(model, max_cache_len=48, drafts=3, **more)
    generated = model.generate(prompt, past_key_values=cache, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(generated, stock)
    assert 2 <= len(replays(cache)) <= 4
    assert sum(replays(cache)) > 4
    cache.reset()
    with torch.no_grad():  # also where no number beside the tokens says how many there are
        for first, last in ((0, 4), (4, 5), (5, 6), (6, 8), (8, 10)):
            assert call(model, prompt[:, first:last], cache, first).shape[1] == last - first


def test_after_a_replay_that_failed_a_cache_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("mamba2")
    cache = fs.StateCache(model, max_cache_len=32)
    monkeypatch.setattr(Standin, "replay", lambda graph, leaves: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.generate(LONG, past_key_values=cache, **OPTIONS)
    with pytest.raises(RuntimeError, match="failed half way"):
        model.generate(LONG, past_key_values=cache, **OPTIONS)


def test_models_whose_attention_waits_and_outputs_that_stay_have_no_graph() -> None:
    for family, more in (("glm5_next", {}), ("mamba2", {"output_hidden_states": True})):
        model: Any = tiny_model(family)
        stock = model.generate(LONG, **OPTIONS)
        cache = fs.StateCache(model, max_cache_len=32)
        given = {**OPTIONS, **more, "return_dict_in_generate": True}
        assert torch.equal(model.generate(LONG, past_key_values=cache, **given).sequences, stock)
        assert not replays(cache)


def test_weights_that_were_written_or_moved_have_other_graphs() -> None:
    model: Any = tiny_model("mamba2")
    cache = fs.StateCache(model, max_cache_len=32)

    weight = model.backbone.layers[0].mixer.A_log

    def moved() -> None:
        weight.data = weight.data.clone()

    def written() -> None:
        with torch.no_grad():
            weight.add_(1)

    for change in (lambda: None, moved, written):
        change()
        fs.disable(model)
        stock = model.generate(LONG, **OPTIONS)
        fs.enable(model)
        for again in range(2):
            assert torch.equal(model.generate(LONG, past_key_values=cache, **OPTIONS), stock)
            assert replays(cache) == [10 + 11 * again]
            cache.reset()


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
