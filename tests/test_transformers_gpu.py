"""On a GPU models give what they give on a CPU: with prompts in one launch per layer, and with steps that are CUDA
graphs where a cache is static."""

import gc
from typing import Any

import pytest
import torch
from decoding import KNOWN, LONG, OPTIONS, Steps, of_families
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers.tiny import tiny_model

pytestmark = pytest.mark.gpu

UNGRAPHED = ("glm5_next", "lfm3")  # whose attention waits for the GPU, or has a window that slides
STATIC: dict[str, Any] = {"max_cache_len": 48}
MOST_LAUNCHES = 7  # of a layer of Mamba-2 on an H200: two norms, two products, two ops and a sum


@pytest.fixture(autouse=True)
def float32_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock prompts have convolutions, for which cuDNN would round inputs."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def generated(model: Any, prompt: Tensor = LONG, **options: Any) -> Tensor:
    """What the model continues prompts with, wherever it is."""
    return model.generate(prompt.to(model.device), **{**OPTIONS, **options}).cpu()


def captured(cache: fs.StateCache) -> list[Any]:
    """The graphs that a cache has."""
    return [graph for graph in cache.graphs.graphs.values() if graph is not None]


@pytest.mark.parametrize("family", KNOWN)
def test_tokens_of_every_family_are_those_of_a_cpu(family: str) -> None:
    """Over a cache of Transformers, and over a static one with padding before a prompt, with which a step becomes a
    graph, that is used again after a reset."""
    model: Any = tiny_model(family)
    mask = (torch.arange(12) >= torch.tensor([[5], [0]])).long()
    want = generated(model, attention_mask=mask)
    fs.enable(model.cuda())
    cache = fs.StateCache(model, **STATIC)
    for kept in (None, cache, cache):
        assert torch.equal(generated(model, attention_mask=mask.cuda(), past_key_values=kept), want)
        cache.reset()
    assert len(captured(cache)) == (family not in UNGRAPHED)


@pytest.mark.parametrize(
    ("family", "options", "static"),
    [
        ("mamba", {}, STATIC),
        ("nemotron_h", {"replay": 6}, STATIC),
        ("qwen3_next", {"replay": 6}, {}),
        ("bailing_hybrid", {"replay": 16}, STATIC),
        ("lfm2", {}, {}),
    ],
    ids=str,
)
def test_drafts_change_no_token(family: str, options: dict[str, Any], static: dict[str, Any]) -> None:
    """Prompt lookup gives candidates where tokens repeat, so there are only four of them to choose from."""
    model: Any = tiny_model(family)
    few: dict[str, Any] = {"suppress_tokens": list(range(4, 96)), "max_new_tokens": 32}
    want = generated(model, LONG[:1], **few)
    cache = fs.StateCache(model.cuda(), drafts=3, **options, **static)
    steps = Steps(cache)
    for _ in range(2):
        got = generated(model, LONG[:1], past_key_values=cache, prompt_lookup_num_tokens=3, **few)
        assert torch.equal(got, want)
        cache.reset()
    steps.check(3)
    assert len(captured(cache)) in (range(1, 5) if static else (0,))  # one for every number of tokens


@of_families(mamba2={"dtype": torch.int8, "replay": 6}, qwen3_next={"dtype": torch.float8_e4m3fn})
def test_a_seed_repeats_a_generation_after_a_reset(family: str, options: dict[str, Any]) -> None:
    model: Any = tiny_model(family).cuda()
    cache = fs.StateCache(model, seed=1, rounding="stochastic", **options)
    first = generated(model, past_key_values=cache)
    cache.reset()
    assert torch.equal(generated(model, past_key_values=cache), first)


@pytest.mark.parametrize("options", [{}, {"drafts": 3, **STATIC}], ids=str)
def test_the_memory_of_a_cache_goes_with_it(options: dict[str, Any]) -> None:
    """At once, without the collection of garbage: before the next cache is made."""
    model: Any = tiny_model("nemotron_h").cuda()
    generated(model, past_key_values=fs.StateCache(model, **options))  # what a process allocates once
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        cache = fs.StateCache(model, max_batch=64, **options)
        generated(model, past_key_values=cache)
        assert torch.cuda.memory_allocated() >= before + cache.bytes > before
        del cache
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def launches_of_a_step(layers: int) -> int:
    """Return the number of kernels, copies and fills in a captured step of Mamba-2."""
    model: Any = tiny_model("mamba2", num_hidden_layers=layers).cuda()
    cache = fs.StateCache(model, **STATIC)
    tokens = LONG.cuda()
    with torch.no_grad():
        for call in (tokens, *3 * [tokens[:, :1]]):
            model(input_ids=call, past_key_values=cache)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            model(input_ids=tokens[:, 1:2], past_key_values=cache)
            torch.cuda.synchronize()
    assert captured(cache)
    return sum(event.device_type == DeviceType.CUDA for event in seen.events())


def test_a_layer_of_a_step_is_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # which is a kernel per output
    few, more = launches_of_a_step(2), launches_of_a_step(6)
    assert 0 < few < more <= few + 4 * MOST_LAUNCHES
