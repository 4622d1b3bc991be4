"""The recurrent mixers of Transformers that flashstate knows: their classes, their sources, and supported versions."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import nn

from flashstate.integrations.fingerprints import fingerprint_of, statements
from flashstate.integrations.transformers.mixers import KINDS
from flashstate.integrations.transformers.mixers.kind import Kind, Replays

OLDEST, NEWEST = (5, 21), (5, 23)  # versions of transformers
INSTALL = "pip install 'flashstate[transformers]'"
LISTED = "docs/transformers.md lists the models that it knows"

# Every class of a mixer: the model that it is in, and its kind.
MIXERS: dict[str, tuple[str, str]] = {
    "MambaMixer": ("mamba", "mamba1"),
    "FalconMambaMixer": ("falcon_mamba", "mamba1"),
    "JambaMambaMixer": ("jamba", "mamba1"),
    "ZambaMambaMixer": ("zamba", "mamba1"),
    "Mamba2Mixer": ("mamba2", "mamba2"),
    "BambaMixer": ("bamba", "mamba2"),
    "NemotronHMamba2Mixer": ("nemotron_h", "mamba2"),
    "FalconH1Mixer": ("falcon_h1", "mamba2"),
    "GraniteMoeHybridMambaLayer": ("granitemoehybrid", "mamba2"),
    "Zamba2MambaMixer": ("zamba2", "mamba2"),
    "Qwen3NextGatedDeltaNet": ("qwen3_next", "delta"),
    "Qwen3_5GatedDeltaNet": ("qwen3_5", "delta"),
    "Qwen3_5MoeGatedDeltaNet": ("qwen3_5_moe", "delta"),
    "OlmoHybridGatedDeltaNet": ("olmo_hybrid", "delta"),
    "KimiLinearDeltaAttention": ("kimi_linear", "kda"),
    "BailingHybridDeltaAttention": ("bailing_hybrid", "kda"),
    "Glm5NextTextLinearAttention": ("glm5_next", "kda"),
    "Lfm2ShortConv": ("lfm2", "short_conv"),
    "Lfm2MoeShortConv": ("lfm2_moe", "short_conv"),
    "Lfm3ShortConv": ("lfm3", "short_conv"),
}

# Types of layers for which a cache of Transformers keeps a recurrent state or a window.
RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding")

# Fingerprints of these mixers and of the modules inside them, in all supported versions. `python -m
# tools.transformers_fingerprints` prints what the installed version adds.
KNOWN: dict[str, tuple[str, ...]] = {
    "MambaMixer": ("f333e64153b0",),
    "FalconMambaMixer": ("d1ea0380c4eb",),
    "FalconMambaWeightlessRMSNorm": ("0ce57102f3b8",),
    "JambaMambaMixer": ("490769facd52",),
    "JambaRMSNorm": ("761d8170c0e0",),
    "ZambaMambaMixer": ("419222a9852b",),
    "Mamba2Mixer": ("336cb4a79ada",),
    "MambaRMSNormGated": ("c704edd81e23", "a1b3471d7492"),
    "BambaMixer": ("336cb4a79ada",),
    "BambaRMSNormGated": ("c704edd81e23", "a1b3471d7492"),
    "NemotronHMamba2Mixer": ("336cb4a79ada",),
    "NemotronHRMSNormGated": ("a1b3471d7492",),
    "FalconH1Mixer": ("181a3d0a497d",),
    "FalconH1RMSNormGated": ("54cedcd5caa5", "bf94510c0327"),
    "GraniteMoeHybridMambaLayer": ("336cb4a79ada",),
    "GraniteMoeHybridRMSNormGated": ("c704edd81e23", "a1b3471d7492"),
    "Zamba2MambaMixer": ("336cb4a79ada",),
    "Zamba2RMSNormGated": ("a1b3471d7492",),
    "Qwen3NextGatedDeltaNet": ("7124529caf5f", "241d27f2e5da"),
    "Qwen3NextRMSNormGated": ("599e6061c43b",),
    "Qwen3_5GatedDeltaNet": ("ede221d18e3a", "a15a310c9a40"),
    "Qwen3_5RMSNormGated": ("599e6061c43b",),
    "Qwen3_5MoeGatedDeltaNet": ("ede221d18e3a", "a15a310c9a40"),
    "Qwen3_5MoeRMSNormGated": ("599e6061c43b",),
    "OlmoHybridGatedDeltaNet": ("618c0acdfc0b", "a328e2b39808"),
    "OlmoHybridRMSNormGated": ("599e6061c43b",),
    "KimiLinearDeltaAttention": ("01478f8c41a4",),
    "KimiLinearForgetGate": ("86626fa144a8",),
    "KimiLinearRMSNormGated": ("d1dbb733f445",),
    "BailingHybridDeltaAttention": ("ecda298dbdce",),
    "BailingHybridForgetGate": ("0b784265818b",),
    "BailingHybridRMSNormGated": ("d1dbb733f445",),
    "Glm5NextTextLinearAttention": ("01478f8c41a4",),
    "Glm5NextTextForgetGate": ("224c6edb6df9",),
    "Glm5NextTextRMSNormGated": ("d1dbb733f445",),
    "Lfm2ShortConv": ("af33b484fc6d", "45eda1c14e11"),
    "Lfm2MoeShortConv": ("af33b484fc6d", "45eda1c14e11"),
    "Lfm3ShortConv": ("45eda1c14e11",),
}


class Found(NamedTuple):
    """A mixer in a model, and the name of its kind."""

    name: str
    mixer: Any

    @property
    def kind(self) -> Kind:
        """How it is run."""
        return KINDS[self.name]

    @property
    def replays(self) -> Replays | None:
        """How its tokens are kept in rings; None: they cannot be."""
        return self.kind if isinstance(self.kind, Replays) else None

    @property
    def cache_name(self) -> str:
        """The argument of its forward that is the cache."""
        return "past_key_values" if self.name == "short_conv" else "cache_params"


def found_as(mixer: nn.Module) -> Found:
    """What a mixer of a known class is found as."""
    return Found(MIXERS[type(mixer).__name__][1], mixer)


def installed() -> str:
    """The version of Transformers; ImportError if there is none."""
    try:
        import transformers
    except ImportError as absent:
        raise ImportError(f"transformers is not installed: {INSTALL}") from absent
    return str(transformers.__version__)


def check_version() -> None:
    """Raise ImportError unless a supported version of Transformers is installed."""
    version = installed()
    if not OLDEST <= tuple(map(int, re.findall(r"\d+", version)[:2])) <= NEWEST:
        oldest, newest = (".".join(map(str, end)) for end in (OLDEST, NEWEST))
        raise ImportError(f"transformers must be {oldest} to {newest}, got {version}: {INSTALL}")


def mixers_of(model: nn.Module) -> dict[int, Found]:
    """The recurrent mixers of a model by their layers, whatever the model has around its text model.

    ValueError if it has none, if some of its recurrent layers are unknown, or if a forward is.
    """
    check_version()
    check_model(model)
    found: dict[int, Found] = {}
    for mixer in filter(is_mixer, model.modules()):
        layer: Any = mixer.layer_idx
        if layer in found:
            raise ValueError(f"{type(model).__name__} has two mixers of layer {layer}; a cache has one state for each")
        check_forward(mixer)
        found[layer] = found_as(mixer)
    name, unknown = type(model).__name__, recurrent_layers(model) - set(found)
    if unknown:
        layers = f"layers {', '.join(map(str, sorted(unknown)))} of {name}, which has {', '.join(classes_in(model))}"
        raise ValueError(f"flashstate does not know {layers}; {LISTED}")
    if not found:
        raise ValueError(f"{name} has no recurrent layer that flashstate knows; {LISTED}")
    return dict(sorted(found.items()))


def check_model(model: Any) -> None:
    """Raise unless it is a model of Transformers."""
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "get_text_config"):
        words = "a model of Transformers, as from_pretrained returns it"
        raise TypeError(f"model must be {words}, got {type(model).__name__}")


def is_mixer(module: nn.Module) -> bool:
    """Whether a module is of a class in MIXERS, and not of a subclass or a namesake."""
    cls = type(module)
    name, _ = MIXERS.get(cls.__name__, ("", ""))
    return cls.__module__ == f"transformers.models.{name}.modeling_{name}"


def recurrent_layers(model: nn.Module) -> set[int]:
    """The layers of a model for which a cache keeps a recurrent state or a window, as its configuration has them."""
    config: Any = model.config
    types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    return {layer for layer, name in enumerate(types) if name in RECURRENT}


def classes_in(model: nn.Module) -> list[str]:
    """The names of the modules in a model that a file of Transformers or of the model's author defines."""
    _, *inside = map(type, model.modules())
    return sorted({cls.__name__ for cls in inside if ".modeling_" in cls.__module__})


def check_forward(mixer: nn.Module) -> None:
    """Raise ValueError unless flashstate knows the forward of a mixer and those of the norms and gates in it."""
    for cls in parts(mixer):
        if fingerprint(cls) not in KNOWN.get(cls.__name__, ()):
            raise ValueError(
                f"flashstate does not know the forward of {cls.__module__}.{cls.__qualname__}: "
                f"transformers {installed()} or something in this process has another than those it was tested with"
            )


def parts(mixer: nn.Module) -> list[type[nn.Module]]:
    """The class of a mixer, and those of the modules in it that are defined beside it: its norms and gates."""
    children = (type(child) for child in mixer.children())
    return [type(mixer), *dict.fromkeys(cls for cls in children if cls.__module__ == type(mixer).__module__)]


def fingerprint(cls: type[nn.Module]) -> str:
    """A short hash of a module's forward and of the methods it calls, without comments, docstrings and whitespace.

    It includes which modules wrapped the forward, so that one that somebody else has wrapped has another hash.
    """
    forward: Any = cls.forward
    lines = []
    while hasattr(forward, "__wrapped__"):
        lines.append(str(forward.__globals__["__name__"]))
        forward = forward.__wrapped__
    names = forward.__code__.co_names if inspect.isfunction(forward) else ()
    for function in (forward, *filter(inspect.isfunction, map(vars(cls).get, names))):
        lines.extend(statements_of(function))
    return fingerprint_of(lines)


@cache
def statements_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The statements of a function, which take milliseconds to read."""
    return tuple(statements(source_of(function)))


def source_of(function: Callable[..., Any]) -> str:
    """The source of a function, or nothing where Python finds none."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
