"""The plugin of vLLM without vLLM: options, pages, seeds, errors and refusals. tests_vllm/ has the rest."""

import dataclasses
import functools
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from flashstate import State
from flashstate.integrations.vllm import contract, layers, options, pages, register, serving, upstream
from flashstate.integrations.vllm.contract import Sources
from flashstate.integrations.vllm.kinds import V2_STATES, Kind
from flashstate.state.formats import FORMATS

HEADS, ROWS, COLS, BLOCKS = 2, 3, 16, 4
SCALED = [dtype for dtype, form in FORMATS.items() if form.scaled]


def paged(dtype: torch.dtype, padding: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of pages with other things before and behind a state, and the tensor of the state that vLLM makes of it."""
    shape = pages.widened((HEADS, ROWS, COLS), dtype)
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.randint(0, 255, (BLOCKS, 16 + size + padding), dtype=torch.uint8)
    return memory, memory[:, 16 : 16 + size].view(dtype).view(BLOCKS, *shape)


@pytest.mark.parametrize("dtype", FORMATS)
def test_data_and_scales_fill_the_bytes_that_vllm_was_asked_for(dtype: torch.dtype) -> None:
    memory, states = paged(dtype)
    data, scale = pages.data_and_scale(states)
    assert data.shape == (BLOCKS, HEADS, ROWS, COLS)
    assert data.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert sum(t[0].numel() * t.itemsize for t in (data, scale) if t is not None) == states[0].numel() * dtype.itemsize


@pytest.mark.parametrize("dtype", SCALED)
def test_prefill_reads_and_stores_by_blocks_and_leaves_other_bytes(dtype: torch.dtype) -> None:
    memory, states = paged(dtype)
    before = memory.clone()
    state = State(*pages.data_and_scale(states))
    found = pages.PagedState(state, lambda function, *args: function(*args))
    blocks, values = torch.tensor([3, 0, 1], dtype=torch.int32), torch.randn(3, HEADS, ROWS, COLS)
    found[blocks] = values
    plain = State(torch.zeros(BLOCKS, HEADS, ROWS, COLS, dtype=dtype), torch.zeros(BLOCKS, HEADS, ROWS))
    plain.write([3, 1], values[[0, 2]])
    assert torch.equal(found[blocks[[0, 2]]], plain.read([3, 1]))
    assert found[blocks[1:2]].count_nonzero() == 0  # of the null block
    found[blocks[:2]] = 0
    assert found[blocks[:1]].count_nonzero() == 0
    assert torch.equal(found[blocks[2:]], plain.read([1]))
    for kept in ([0, 2], (slice(None), slice(16)), (slice(None), slice(-12, None))):
        assert torch.equal(memory[kept], before[kept])


def test_pages_that_scales_do_not_fit_in_are_refused() -> None:
    _, states = paged(torch.int8, padding=13)
    with pytest.raises(ValueError, match="states of int8 with scales must begin at a multiple of 4 bytes"):
        pages.data_and_scale(states)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "must be a mapping"),
        ({"dtype": "int8"}, "may have state, rounding, rounds, got 'dtype'"),
        ({"state": "int4"}, "state must be one of"),
        ({"rounding": "up"}, "rounding must be one of"),
        ({"rounds": 0}, "rounds must be from 1 to 16"),
        ({"state": "float32", "rounding": "stochastic"}, "rounding='stochastic' is not for float32"),
    ],
)
def test_wrong_options_are_refused(given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        options.parse(given)


def test_options_override_the_flags_of_vllm() -> None:
    assert options.parse({}, stochastic=True, rounds=6) == options.Options(None, "stochastic", 6)
    assert options.parse({"rounding": "nearest"}, stochastic=True).rounding == "nearest"
    assert options.parse({"state": "int8"}).scaled
    assert not options.parse({"state": "bfloat16"}).scaled


def test_layers_of_a_step_share_a_seed_that_the_first_draws() -> None:
    seeds = serving.Seeds("first")
    chosen = options.parse({"state": "float16", "rounding": "stochastic"})
    layers = [serving.Serving(name, chosen, i, seeds) for i, name in enumerate(("first", "second"))]
    _, states = paged(torch.float16)
    drawn = []
    for _ in range(2):
        first, second = (layer.state_in(states) for layer in layers)
        assert first.seed is not None
        assert first.seed is second.seed
        drawn.append(int(first.seed))
        assert (first.stream, second.stream) == (0, 1)
    assert drawn[0] != drawn[1]


def test_calls_are_answered_while_a_layer_runs_and_errors_name_it() -> None:
    layer = serving.Serving("model.layers.3.mixer", options.Options(), 0, serving.Seeds("model.layers.3.mixer"))

    def ours(x: int, state: Any = None) -> tuple[str, Any]:
        if x < 0:
            raise ValueError("x must be from 0 to 9, got -1")
        return "ours", state

    answer = serving.answered("step", lambda x, state=None: ("stock", state), ours, "state")
    _, states = paged(torch.float32)
    assert answer(1, state=states) == ("stock", states)
    with serving.running(layer):
        name, state = answer(1, state=states)
        assert (name, type(state)) == ("ours", State)
        with pytest.raises(RuntimeError, match=r"flashstate failed in step of layer 'model\.layers\.3\.mixer': x must"):
            answer(-1, state=states)
    assert answer(1, state=states) == ("stock", states)

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError, match=r"flashstate failed in step of layer .*: CUDA out of memory"):
        layer.call("step", full)


def engine_of(**changes: Any) -> types.SimpleNamespace:
    """The configuration of an engine: a hybrid model without drafts, as far as it is looked at."""
    model = types.SimpleNamespace(is_hybrid=changes.pop("is_hybrid", True))
    given = {"speculative_config": None, "kv_transfer_config": None, "use_v2_model_runner": False, **changes}
    return types.SimpleNamespace(model_config=model, **given)


def test_drafts_are_refused_where_vllm_does_not_count_those_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model without attention only model runner V2 counts them, if its sources say so."""
    monkeypatch.setattr(upstream, "sources", lambda: Sources(tmp_path))
    known: tuple[str, ...] = ()
    monkeypatch.setattr(contract, "unknown", lambda sources, of: known)
    file = tmp_path / V2_STATES
    file.parent.mkdir(parents=True)
    alone: dict[str, Any] = {"is_hybrid": False}
    second = {**alone, "use_v2_model_runner": True}
    for text in ("if config.is_hybrid: ...", "if config.is_hybrid or config.is_attention_free: ..."):
        file.write_text(text)
        for changes in ({}, alone, second):
            upstream.check_engine(engine_of(**changes), options.Options(), False)
            counts = not changes or (changes is second and "is_attention_free" in text)
            message = "vLLM cannot roll back the states of a model without attention"
            with nullcontext() if counts else pytest.raises(ValueError, match=message):
                upstream.check_engine(engine_of(speculative_config="ngram", **changes), options.Options(), False)
    known = ("init_model_state has another source",)
    with pytest.raises(ValueError, match=message):
        upstream.check_engine(engine_of(speculative_config="ngram", **second), options.Options(), False)


def test_choices_that_would_be_lost_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that another engine would misread, and a kernel of vLLM that was asked for."""
    config = engine_of(kv_transfer_config="nixl")
    upstream.check_engine(config, options.Options(), False)
    with pytest.raises(ValueError, match="takes pages over how states are stored: leave out state"):
        upstream.check_engine(config, options.parse({"state": "int8"}), False)
    monkeypatch.setenv("VLLM_GDN_DECODE_KERNEL", "cuda")
    upstream.check_engine(engine_of(), options.Options(), False)
    with pytest.raises(ValueError, match="VLLM_GDN_DECODE_KERNEL=cuda asks for a kernel of vLLM: leave it out"):
        upstream.check_engine(engine_of(), options.Options(), True)


@dataclasses.dataclass
class Spec:
    """What vLLM keeps for a layer that stores a second state on the way of a prefill."""

    num_prefill_checkpoint_blocks: int = 1
    prefill_checkpoint_alignment: int | None = 64


KIND = Kind("layer.py", "Stock", ("plain", "broken", "missing"), (), ())


class Stock:
    """A class of layers as vLLM has them."""

    prefix = "layer"

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def plain(self) -> None:
        self.seen.append(serving.current())

    broken = plain

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return torch.float32, torch.float32


def test_breaks_of_graphs_stay_outermost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay calls what the decorator of breaks is around, which must make the layer run on flashstate itself."""
    captured: list[Any] = []

    def eager(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any) -> None:
            captured.append(lambda: function(*args))

        return wrapper

    monkeypatch.setattr(Stock, "broken", eager(Stock.broken))
    layer_serving = serving.Serving("layer", options.Options(), 0, serving.Seeds("layer"))
    made = layers.subclass(
        Stock, KIND,
        lambda layer: layer.serve(layer_serving, torch.float32, checkpoints=False), eager,
    )  # fmt: skip
    layer = made()
    layer.kv_cache = ()
    layer.plain()
    layer.broken()
    assert layer.seen == [layer_serving]
    for replay in captured:
        replay()
    assert layer.seen == [layer_serving, layer_serving]
    with pytest.raises(AttributeError, match="Stock has no missing"):
        layers.subclass(Stock, dataclasses.replace(KIND, methods=("missing",)), lambda layer: None, eager)


class Exporting(Stock):
    """A layer whose prefill stores a second state."""

    def get_prefill_checkpoint_alignment(self) -> int:
        return 64

    def get_kv_cache_spec(self, config: Any) -> Spec:
        return Spec()


def test_the_plugin_is_inert_where_it_does_not_know_how_layers_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    (tmp_path / "_version.py").write_text("__version__ = version = '0.99.0'\n")
    monkeypatch.setattr(upstream, "sources", lambda: Sources(tmp_path))
    monkeypatch.setattr(upstream.logger, "warning", lambda message, *args: said.append(message % args))
    register()
    assert said == [
        "flashstate is not active in vLLM 0.99.0: it does not know that MambaBackendEnum is missing (the first of 4 "
        "unknown facts, which `flashstate info vllm` lists)"
    ]


def test_a_plugin_that_fails_says_so_and_lets_vllm_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls plugins of everybody, whether they are chosen or not."""
    said: list[str] = []
    monkeypatch.setattr(upstream, "sources", lambda: types.SimpleNamespace(version="0.99.0"))
    monkeypatch.setattr(upstream.logger, "warning", lambda message, *args: said.append(message % args))
    monkeypatch.setattr(contract, "changes", mock.Mock(side_effect=OSError("no such file")))
    register()
    assert said == ["flashstate is not active in vLLM 0.99.0: no such file"]
    assert upstream.options_of(types.SimpleNamespace()) is None


@pytest.mark.parametrize("scaled", [True, False], ids=["pages with scales", "a tensor"])
def test_a_scan_stores_last_states_where_its_kernel_cannot(scaled: bool) -> None:
    """vLLM's kernel writes them into a tensor of pages; into pages with scales they go by blocks."""
    given: dict[str, Any] = {}
    values = torch.randn(2, HEADS, ROWS, COLS)

    def stock(x: int, **more: Any) -> torch.Tensor:
        given.update(more)
        return values

    _, states = paged(torch.int8)
    state = State(*pages.data_and_scale(states))
    found = pages.PagedState(state, lambda function, *args: function(*args)) if scaled else torch.zeros(4)
    blocks = torch.tensor([3, 1], dtype=torch.int32)
    y = pages.scan(stock, 1, out=2, final_states_out=found, final_state_indices=blocks)
    if scaled:
        assert isinstance(found, pages.PagedState)
        assert (y, given) == (None, {"out": 2, "final_states_out": None, "final_state_indices": None})
        plain = State(torch.zeros(BLOCKS, HEADS, ROWS, COLS, dtype=torch.int8), torch.zeros(BLOCKS, HEADS, ROWS))
        plain.write([3, 1], values)
        assert torch.equal(found[blocks], plain.read([3, 1]))
    else:
        assert y is values
        assert given == {"out": 2, "final_states_out": found, "final_state_indices": blocks}
    assert pages.scan(stock, 1, out=3) is values


def test_no_second_state_is_stored_on_the_way_of_a_prefill_where_pages_have_scales() -> None:
    """vLLM then ends prefills at boundaries, and gives no block for a second state."""
    for options_of_layer, stored in (({"state": "int8"}, None), ({}, 64)):
        layer = layers.subclass(Exporting, KIND, lambda layer: None, lambda function: function)()
        layer.prefix, layer.served = "layer", None
        chosen = options.parse(options_of_layer)
        layer.serve(serving.Serving("layer", chosen, 0, serving.Seeds("layer")), torch.float32, checkpoints=True)
        assert layer.get_prefill_checkpoint_alignment() == stored
        spec = layer.get_kv_cache_spec(None)
        assert (spec.num_prefill_checkpoint_blocks, spec.prefill_checkpoint_alignment) == (int(bool(stored)), stored)
