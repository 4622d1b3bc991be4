"""What decides the memory of a model's recurrent states: its shape; presets, and shapes from a Transformers config."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashstate.basics import LARGEST_WINDOW

KINDS = ("mamba2", "gated_delta")
NECESSARY = ("layers", "heads", "rows", "cols", "groups")  # what a shape cannot do without
ARCHITECTURE = {"kind", "conv_width", "per_channel", *NECESSARY}  # what training fixed; the others a server chooses
RECURRENT_LAYERS = ("mamba", "linear_attention", "hybrid")  # names of layers with a state; hybrid: attention beside it


@dataclass(frozen=True)
class ModelShape:
    """The layers of a model that have a recurrent state, all of one shape."""

    kind: str  # "mamba2", or "gated_delta" for Gated DeltaNet and KDA
    layers: int
    heads: int  # of a state; of the delta rule: value heads
    rows: int  # of a head; of the delta rule: their dimension V
    cols: int  # of a head; of the delta rule: that of the keys, K
    groups: int  # of B and C; of the delta rule: key heads
    conv_width: int = 4  # of the convolution before it, which keeps its last conv_width - 1 inputs; 0: there is none
    activations: str = "bfloat16"  # the dtype of those inputs and of the replay ring
    window: int = 0  # of the replay ring; 0: there is none
    tokens: int = 1  # of the longest call that a ring takes
    per_channel: bool = False  # whether every column of a head has a decay of its own, as in KDA

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be {' or '.join(KINDS)}, got {self.kind!r}")
        if self.layers < 1:
            raise ValueError(f"at least 1 of the layers must have a recurrent state, got {self.layers}")
        for name in ("heads", "rows", "cols", "groups", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.groups:
            raise ValueError(f"the number of groups must divide the {self.heads} heads, got {self.groups}")
        if self.conv_width < 0 or self.conv_width == 1:
            raise ValueError(f"conv_width must be 0, for no convolution, or at least 2, got {self.conv_width}")
        if self.per_channel and self.kind != "gated_delta":
            raise ValueError(f"per_channel is for gated_delta, got kind={self.kind!r}")
        self._check_ring()

    def _check_ring(self) -> None:
        if not 0 <= self.window <= LARGEST_WINDOW:
            raise ValueError(f"window must be from 0, for no ring, to {LARGEST_WINDOW}, got {self.window}")
        if not self.window and self.tokens > 1:
            raise ValueError(f"tokens={self.tokens} needs a window: it sizes the replay ring and nothing else")
        if self.window and self.tokens > self.window:
            raise ValueError(f"tokens must be at most the window, {self.window}, got {self.tokens}")

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: x, B and C of Mamba-2; v, q and k of the delta rule."""
        return self.heads * self.rows + 2 * self.groups * self.cols

    def split(self, ranks: int) -> ModelShape:
        """What one of so many tensor-parallel ranks holds; where groups are fewer than ranks, several hold the same."""
        if ranks < 1 or self.heads % ranks:
            raise ValueError(f"tensor parallel must divide the {self.heads} heads, got {ranks}")
        if self.groups % ranks and ranks % self.groups:
            raise ValueError(f"tensor parallel must divide the {self.groups} groups or be a multiple, got {ranks}")
        return replace(self, heads=self.heads // ranks, groups=max(1, self.groups // ranks))


# From the config.json of the model that a comment names; the last from the README and code of state-spaces/mamba.
PRESETS = {
    # nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16: 40 of its 88 layers are M in hybrid_override_pattern.
    "nemotron-3-super-120b": ModelShape("mamba2", layers=40, heads=128, rows=64, cols=128, groups=8),
    # Qwen/Qwen3-Next-80B-A3B-Instruct: 48 layers, every fourth with full attention.
    "qwen3-next-80b": ModelShape("gated_delta", layers=36, heads=32, rows=128, cols=128, groups=16),
    # Qwen/Qwen3.5-397B-A17B: 60 layers, every fourth with full attention.
    "qwen3.5-397b": ModelShape("gated_delta", layers=45, heads=64, rows=128, cols=128, groups=16),
    # state-spaces/mamba2-2.7b: 64 layers of model dimension 2560; the rest are the defaults of its class Mamba2.
    "mamba2-2.7b": ModelShape("mamba2", layers=64, heads=80, rows=64, cols=128, groups=1),
}
DEFAULT_PRESET = "nemotron-3-super-120b"


def choose_shape(preset: str | None, config: Path | None, changes: dict[str, Any]) -> tuple[str, ModelShape]:
    """A name and the shape of a preset or a config.json, with some fields changed; or a shape of given fields alone."""
    if preset is not None and config is not None:
        raise ValueError("a model comes from a preset or from a config.json, got both")
    changed = bool(changes.keys() & ARCHITECTURE)
    if preset is None and config is None and changed:
        missing = [name for name in NECESSARY if name not in changes]
        if missing:
            raise ValueError(f"without a preset or a config.json a shape also needs {', '.join(missing)}")
        return "this shape", ModelShape(**{"kind": "mamba2", **changes})
    name = str(config) if config is not None else preset or DEFAULT_PRESET
    shape = shape_from_config(config) if config is not None else PRESETS[name]
    return f"{name} with changes" if changed else name, replace(shape, **changes)


def shape_from_config(path: Path) -> ModelShape:
    """The shape that a Transformers config.json describes; `path` is the file, or the folder that holds it."""
    config = _read_config(path / "config.json" if path.is_dir() else path)
    if config.model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ValueError(f"{config.path}: model_type {config.model_type!r} is not supported, only {supported}")
    kind, heads, rows, *others = FAMILIES[config.model_type]
    try:
        layers, of_head = _recurrent_layers(config), _rows(config, heads, rows)
        cols, groups, conv_width = (config.number(field) for field in others)
        per_channel = config.model_type in PER_CHANNEL
        return ModelShape(
            kind, layers, config.number(heads), of_head, cols, groups, conv_width, per_channel=per_channel
        )
    except ValueError as error:
        raise ValueError(f"{config.path} ({config.model_type}): {error}") from None


@dataclass(frozen=True)
class ConfigJson:
    """The fields of a config.json that describe the language model."""

    path: Path
    model_type: str
    fields: dict[str, Any]

    def get(self, name: str) -> Any:
        """The value of a field, None where it is missing; a dot leads into an object."""
        value: Any = self.fields
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def number(self, name: str) -> int:
        """The value of a field that is an integer above 0; ValueError where it is none."""
        value = self.get(name)
        return self._known(name, value, type(value) is int and value > 0, "an integer above 0")

    def items(self, name: str) -> list[Any]:
        """The value of a field that is a list; ValueError where it is none."""
        value = self.get(name)
        return self._known(name, value, isinstance(value, list), "a list")

    def _known(self, name: str, value: Any, right: bool, what: str) -> Any:
        if not right:
            found = "but it is missing" if value is None else f"got {value!r}"
            raise ValueError(f"the field {name} must be {what}, {found}")
        return value


def _read_config(path: Path) -> ConfigJson:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold an object, as a Transformers config.json does")
    text = fields.get("text_config")  # of models that also see
    text = {"model_type": fields.get("model_type"), **text} if isinstance(text, dict) else fields
    return ConfigJson(path, str(text.get("model_type")).removesuffix("_text"), text)


# By model_type: the kind, and the fields that have heads, rows, columns, groups and the width of the convolution.
_BAMBA = ("mamba2", "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
_QWEN = (
    "gated_delta", "linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim", "linear_num_key_heads",
    "linear_conv_kernel_dim",
)  # fmt: skip
_KDA = "linear_attn_config"
FAMILIES: dict[str, tuple[str, str, str | None, str, str, str]] = {
    "mamba2": ("mamba2", "num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"),
    "nemotron_h": ("mamba2", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
    "bamba": _BAMBA,
    "granitemoehybrid": _BAMBA,
    "falcon_h1": _BAMBA,
    "zamba2": ("mamba2", "n_mamba_heads", None, "mamba_d_state", "mamba_ngroups", "mamba_d_conv"),
    "qwen3_next": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "kimi_linear": (
        "gated_delta", f"{_KDA}.num_heads", f"{_KDA}.head_dim", f"{_KDA}.head_dim", f"{_KDA}.num_heads",
        f"{_KDA}.short_conv_kernel_size",
    ),
}  # fmt: skip
PER_CHANNEL = ("kimi_linear",)  # families that have a decay per channel


def _rows(config: ConfigJson, heads: str, rows: str | None) -> int:
    """Rows of a head, from their field, or from all channels of x in a layer."""
    if rows is not None and config.get(rows) != "auto":
        return config.number(rows)
    if config.get("mamba_d_ssm") is not None:
        return config.number("mamba_d_ssm") // config.number(heads)
    return config.number("mamba_expand") * config.number("hidden_size") // config.number(heads)


def _recurrent_layers(config: ConfigJson) -> int:
    """How many layers have a state, from whichever field of the model's family tells."""
    if config.model_type == "kimi_linear":
        return len(config.items(f"{_KDA}.kda_layers"))
    for name in ("layer_types", "layers_block_type"):
        if config.model_type != "mamba2" and config.get(name) is not None:
            return sum(config.items(name).count(layer) for layer in RECURRENT_LAYERS)
    if config.model_type == "nemotron_h":
        pattern = config.get("hybrid_override_pattern")
        if not isinstance(pattern, str):
            raise ValueError(
                "it needs the field hybrid_override_pattern or layers_block_type, to count its Mamba layers"
            )
        return pattern.count("M")
    layers = config.number("num_hidden_layers")
    if config.model_type.startswith("qwen"):
        return layers - layers // config.number("full_attention_interval")
    if config.model_type == "bamba" and config.get("attn_layer_indices") is not None:
        return layers - len(config.items("attn_layer_indices"))
    return layers
