"""enable and disable change one model and nothing else, also beside hooks that move what it reads, as accelerate has
them, and with parts of it on several devices."""

import copy
from collections.abc import Iterator
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import pytest
import torch
from decoding import LONG, OPTIONS, PROMPT, TOKENS, call, greedy, own_cache_name, stock_cache
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import flashstate.integrations.transformers as fs
from flashstate.integrations.transformers import cache as caches
from flashstate.integrations.transformers.families import Found, mixers_of
from flashstate.integrations.transformers.tiny import tiny_model


def test_copies_of_an_enabled_model_and_others_of_its_class_run_by_themselves() -> None:
    model, other = tiny_model("qwen3_next"), tiny_model("qwen3_next")
    before = {name: dict(vars(module)) for name, module in other.named_modules()}
    logits = call(other, TOKENS, stock_cache(other), 0)
    want = greedy(fs.enable(model), past_key_values=fs.StateCache(model))
    assert {name: dict(vars(module)) for name, module in other.named_modules()} == before
    assert torch.equal(call(other, TOKENS, stock_cache(other), 0), logits)
    twin = copy.deepcopy(model)
    for found in mixers_of(twin).values():
        assert found.mixer.forward.__self__ is found.mixer
    with torch.no_grad():
        for weight in mixers_of(model)[min(mixers_of(model))].mixer.parameters():
            weight.zero_()
    assert not torch.equal(greedy(model, past_key_values=fs.StateCache(model)), want)
    fs.disable(model)
    assert torch.equal(greedy(twin, past_key_values=fs.StateCache(twin)), want)
    twin.compile(backend="eager")
    for each in (copy.copy(twin), copy.deepcopy(twin)):
        assert each._compiled_call_impl is None  # which would run the weights of the first


def test_a_shallow_copy_of_an_enabled_model_runs_its_own_methods_on_the_same_mixers() -> None:
    model: Any = tiny_model("mamba2")
    want = greedy(model)
    cache = fs.StateCache(model)
    for module in (model, model.backbone, model.backbone.norm_f, *mixers(model)):
        twin = copy.copy(module)
        assert twin.forward.__self__ is twin
        assert vars(twin).keys() == vars(module).keys()
    twin = copy.copy(model)
    assert torch.equal(greedy(twin, past_key_values=fs.StateCache(twin)), want)
    fs.disable(twin)
    fs.enable(model)  # whose mixers were disabled with it
    assert torch.equal(greedy(model, past_key_values=cache), want)
    for each in (twin, model):
        assert torch.equal(greedy(fs.disable(each)), want)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5"])
def test_an_enabled_model_trains_and_runs_without_a_cache_as_before(family: str) -> None:
    model: Any = tiny_model(family, dtype=torch.bfloat16)
    before = model(PROMPT).logits
    before.float().square().sum().backward()
    gradients = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    fs.enable(model)
    after = model(PROMPT).logits
    after.float().square().sum().backward()
    assert torch.equal(after, before)
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        assert (weight.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(weight.grad, gradient)
    cache = fs.StateCache(model)
    call(model, PROMPT, cache, 0)
    with pytest.raises(ValueError, match=r"^a StateCache has no gradients .* inside torch.no_grad\(\)"):
        model(TOKENS[:, 6:7], **{own_cache_name(model): cache})
    call(model, TOKENS[:, 6:7], cache, 6)


def test_a_norm_that_somebody_has_replaced_keeps_its_forward() -> None:
    model: Any = tiny_model("mamba2")
    norm = model.backbone.norm_f

    def forward(hidden: Tensor) -> Tensor:
        return 2 * hidden

    norm.forward = forward
    for change in (fs.enable, fs.disable):
        change(model)
        assert norm.forward is forward


def test_disable_leaves_alone_what_somebody_has_replaced_since_enable() -> None:
    model: Any = tiny_model("mamba2")
    before = [dict(vars(module)) for module in model.modules()]
    norm, mixer = model.backbone.norm_f, mixers(fs.enable(model))[0]
    norm.forward = model.backbone.forward = forward = nn.Identity().forward
    del mixer.forward
    fs.disable(model)
    assert norm.forward is model.backbone.forward is forward
    del norm.forward, model.backbone.forward
    assert [dict(vars(module)) for module in model.modules()] == before


def test_an_enabled_model_takes_layers_of_others() -> None:
    model: Any = fs.enable(tiny_model("mamba2"))
    other: Any = tiny_model("mamba2")
    model.backbone.layers[1] = other.backbone.layers[1]
    stock = greedy(fs.disable(copy.deepcopy(model)))
    assert torch.equal(greedy(model, past_key_values=fs.StateCache(model)), stock)


@pytest.mark.parametrize(("family", "place"), [("mamba2", 2), ("falcon_mamba", 3), ("qwen3_next", 3)])
@torch.no_grad()
def test_a_forward_that_passes_all_arguments_on_takes_a_cache(family: str, place: int) -> None:
    model: Any = tiny_model(family)

    class Around(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **given: Any) -> Any:
            return super().forward(*args, **given)

    def logits(cache: fs.StateCache, named: bool) -> list[Tensor]:
        args: Any = [] if named else [*[None] * (place - 1), cache]
        given: Any = {"past_key_values": cache} if named else {}
        return [model(tokens, *args, **given).logits for tokens in TOKENS[:, :7].split(6, 1)]

    want = logits(fs.StateCache(model), named=True)
    fs.disable(model).__class__ = Around
    for named in (True, False):
        cache = fs.StateCache(model)
        assert all(map(torch.equal, logits(cache, named), want))
        assert cache.length == cache.get_seq_length() == 7


def test_packed_sequences_are_refused() -> None:
    """With a StateCache, and in a step over a stock cache."""
    model: Any = fs.enable(tiny_model("bamba"))
    stock = stock_cache(model)
    call(model, PROMPT, stock, 0)
    message = "seq_idx and cu_seq_lens_q are not for a model that decodes on flashstate"
    for name, cache in (("seq_idx", fs.StateCache(model)), ("cu_seq_lens_q", stock)):
        with pytest.raises(ValueError, match=message):
            call(model, TOKENS[:, 6:7], cache, 6, **{name: torch.zeros(2, 1, dtype=torch.int32)})


class Hook:
    """What accelerate has in front of a module's forward: here it moves tensors to a device, and counts calls."""

    def __init__(self, module: Any, device: str = "cpu") -> None:
        self.module, self.device, self.calls = module, device, 0
        module._hf_hook, module._old_forward = self, module.forward
        module.forward = update_wrapper(partial(self, module), module.forward)

    def __call__(self, module: Any, *args: Any, **given: Any) -> Any:
        self.calls += 1
        args, given = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.device), (args, given))
        return module._old_forward(*args, **given)

    def remove(self) -> None:
        self.module.forward = self.module._old_forward
        del self.module._hf_hook, self.module._old_forward


def hooked(model: Any) -> list[Hook]:
    """Put hooks on a model, on the one inside it, on its layers and on their mixers."""
    return [Hook(module) for module in (model, model.base_model, *model.base_model.layers, *mixers(model))]


def mixers(model: Any) -> list[Any]:
    return [found.mixer for found in mixers_of(model).values()]


@pytest.mark.parametrize(("family", "first"), [("lfm2", True), ("mamba2", False)])
def test_hooks_and_flashstate_work_beside_each_other_and_leave_alone(family: str, first: bool) -> None:
    """first: hooks are there when the model is enabled, and go before it is disabled; else they come and go later."""
    model: Any = tiny_model(family)
    stock = model.generate(LONG, **OPTIONS)
    for step in (hooked, fs.enable) if first else (fs.enable, hooked):
        step(model)
    for cache in (None, fs.StateCache(model)):
        assert torch.equal(model.generate(LONG, past_key_values=cache, **OPTIONS), stock)
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    assert all(hook.calls == 2 * OPTIONS["max_new_tokens"] for hook in hooks)
    undo = [*(hook.remove for hook in hooks), lambda: fs.disable(model)]
    for step in undo if first else reversed(undo):
        step()
    assert all(module.forward.__func__ is type(module).forward for module in (model, model.base_model, *mixers(model)))
    assert torch.equal(model.generate(LONG, **OPTIONS), stock)


def test_mixers_that_are_offloaded_or_replaced_are_refused_by_name_and_nothing_changes() -> None:
    """Accelerate leaves the weights of what it offloads on the device meta between calls."""
    model: Any = tiny_model("mamba2")
    mixers(model)[-1].to("meta")
    with pytest.raises(ValueError, match=r"this Mamba2Mixer is offloaded: flashstate needs its weights on"):
        fs.enable(model)
    assert not any("forward" in vars(module) for module in model.modules())
    for hook in (lambda mixer: None, Hook):
        model = tiny_model("mamba2")
        mixer = mixers(model)[1]
        mixer.forward = MethodType(nn.Identity.forward, mixer)
        hook(mixer)
        with pytest.raises(ValueError, match=r"the forward of this Mamba2Mixer has been replaced already"):
            fs.enable(model)


def test_layers_are_grouped_by_the_device_of_their_mixers() -> None:
    model: Any = tiny_model("mamba2", num_hidden_layers=4)
    found = mixers_of(model)
    for layer in (1, 2):
        found[layer].mixer.to("meta")
    groups = {device.type: list(layers) for device, layers in caches.by_device(found)}
    assert groups == {"cpu": [0, 3], "meta": [1, 2]}


def in_two(found: dict[int, Found]) -> Iterator[tuple[torch.device, dict[int, Found]]]:
    """Layers in two groups, in turns, as if they were on two devices."""
    for number, device in enumerate(("cpu:0", "cpu:1")):
        yield torch.device(device), {layer: found[layer] for layer in list(found)[number::2]}


@pytest.mark.parametrize(
    ("family", "of_cache", "of_generate"),
    [
        ("jamba", {"dtype": torch.bfloat16}, {"num_beams": 3}),
        ("qwen3_next", {"drafts": 3, "replay": 5, "dtype": torch.int8}, {"prompt_lookup_num_tokens": 3}),
        ("lfm2", {"max_cache_len": 32}, {}),
    ],
    ids=str,
)
def test_two_stores_give_what_one_gives(
    family: str, of_cache: dict[str, Any], of_generate: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_model(family)
    prompt = LONG[:1] if "drafts" in of_cache else LONG
    one = fs.StateCache(model, **of_cache)
    expected = model.generate(prompt, past_key_values=one, **OPTIONS, **of_generate)
    monkeypatch.setattr(caches, "by_device", in_two)
    two = fs.StateCache(model, **of_cache)
    for _ in range(2):
        assert torch.equal(model.generate(prompt, past_key_values=two, **OPTIONS, **of_generate), expected)
        assert len(two.stores) == 2
        assert two.get_seq_length() == one.get_seq_length()
        two.reset()


def test_stores_draw_other_random_bits_and_a_seed_repeats_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("mamba2")
    monkeypatch.setattr(caches, "by_device", in_two)
    options: dict[str, Any] = {"dtype": torch.float16, "rounding": "stochastic", "max_batch": 2}
    first, again, other = (fs.StateCache(model, seed=seed, **options) for seed in (3, 3, 7))
    seeds = [[store.seeds.tolist() for store in cache.stores.values()] for cache in (first, again, other)]
    assert seeds[0] == seeds[1] != seeds[2]
    assert len({seed for rows in seeds[0] for seed in rows}) == 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "near", "far", "options"),
    [("mamba2", "cpu", "cuda", {"max_cache_len": 64}), ("qwen3_next", "cuda", "cpu", {"drafts": 3})],
    ids=str,
)
def test_a_model_on_a_cpu_and_a_gpu_gives_what_it_gives_on_one(
    family: str, near: str, far: str, options: dict[str, Any]
) -> None:
    """Its last layers are far from all others, and hooks move what goes into them and what comes out."""
    model: Any = tiny_model(family)
    prompt, more = (LONG[:1], {"prompt_lookup_num_tokens": 3}) if "drafts" in options else (LONG, {})
    stock = model.generate(prompt, **OPTIONS)
    decoder = model.to(near).get_decoder()
    for layer in decoder.layers[len(decoder.layers) // 2 :]:
        Hook(layer.to(far), far)
    Hook(next(module for name, module in decoder.named_children() if name.startswith("norm")), near)
    cache = fs.StateCache(model, **options)
    generated = model.generate(prompt.to(near), past_key_values=cache, **OPTIONS, **more)
    assert torch.equal(generated.cpu(), stock)
    assert {device.type for device in cache.stores} == {"cpu", "cuda"}
    assert not cache.graphs.graphs
