"""flashstate plan: bytes against those of pools, presets and configs, refusals, and the command."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from printed import output_of

from flashstate.basics import parse_memory
from flashstate.cli import main
from flashstate.models import FAMILIES, PRESETS, ModelShape, choose_shape, shape_from_config
from flashstate.plan import request_bytes
from flashstate.pool.pool import StatePool
from flashstate.state.formats import FORMATS, Format
from flashstate.state.state import State

SHAPES = (
    ModelShape("mamba2", layers=3, heads=6, rows=5, cols=7, groups=2),
    ModelShape("mamba2", layers=3, heads=6, rows=5, cols=7, groups=3, conv_width=2, window=16, tokens=4),
    ModelShape("gated_delta", 2, 4, 8, 16, 1, conv_width=0, activations="float32", window=64, tokens=64),
    ModelShape("gated_delta", 3, 6, 5, 7, 6, window=8, per_channel=True),
)
PATTERN = "M*E" * 40


def numbers(names: str, *values: object) -> dict[str, Any]:
    return dict(zip(names.split(), values, strict=True))


BAMBA = "mamba_n_heads mamba_d_state mamba_n_groups mamba_d_conv"
QWEN = (
    "linear_num_value_heads linear_value_head_dim linear_key_head_dim linear_num_key_heads linear_conv_kernel_dim "
    "num_hidden_layers full_attention_interval"
)
LAYERS = (["linear_attention"] * 3 + ["full_attention"]) * 15
# Of a family: the fields it needs, those it may have, and a shape. The presets, as the config.json of these models has
# them, and small models of every family.
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any], ModelShape]] = {
    "nemotron-3-super-120b": (
        "nemotron_h",
        numbers(
            "mamba_num_heads mamba_head_dim ssm_state_size n_groups conv_kernel hybrid_override_pattern",
            128, 64, 128, 8, 4, PATTERN,
        ),
        {"num_hidden_layers": 120}, PRESETS["nemotron-3-super-120b"],
    ),
    "qwen3-next-80b": ("qwen3_next", numbers(QWEN, 32, 128, 128, 16, 4, 48, 4), {}, PRESETS["qwen3-next-80b"]),
    "qwen3.5-397b": (
        "qwen3_5_moe", numbers(QWEN, 64, 128, 128, 16, 4, 60, 4), {"layer_types": LAYERS}, PRESETS["qwen3.5-397b"],
    ),
    "mamba2-2.7b": (
        "mamba2",
        numbers("num_hidden_layers num_heads head_dim state_size n_groups conv_kernel", 64, 80, 64, 128, 1, 4),
        {"hidden_size": 2560, "expand": 2}, PRESETS["mamba2-2.7b"],
    ),

    "bamba": (
        "bamba",
        numbers(f"{BAMBA} mamba_d_head mamba_expand hidden_size num_hidden_layers", 4, 32, 1, 4, "auto", 2, 32, 8),
        {"attn_layer_indices": [3, 7]}, ModelShape("mamba2", layers=6, heads=4, rows=16, cols=32, groups=1),
    ),
    "granitemoehybrid": (
        "granitemoehybrid", numbers(f"{BAMBA} mamba_d_head", 8, 64, 2, 4, 16),
        {"layer_types": ["mamba", "mamba", "attention", "mamba"], "num_hidden_layers": 4},
        ModelShape("mamba2", layers=3, heads=8, rows=16, cols=64, groups=2),
    ),
    "falcon_h1": (
        "falcon_h1", numbers(f"{BAMBA} num_hidden_layers mamba_d_head", 6, 16, 1, 4, 5, "auto"),
        {"mamba_d_ssm": 48, "mamba_expand": 2, "hidden_size": 32, "attn_layer_indices": None},
        ModelShape("mamba2", layers=5, heads=6, rows=8, cols=16, groups=1),
    ),
    "zamba2": (
        "zamba2",
        numbers("n_mamba_heads mamba_expand hidden_size mamba_d_state mamba_ngroups mamba_d_conv", 8, 2, 64, 64, 2, 4),
        {"layers_block_type": ["mamba", "mamba", "hybrid"], "num_hidden_layers": 3},
        ModelShape("mamba2", layers=3, heads=8, rows=16, cols=64, groups=2),
    ),
    "qwen3_5": (
        "qwen3_5", numbers(QWEN, 4, 8, 16, 2, 4, 6, 4), {},
        ModelShape("gated_delta", layers=5, heads=4, rows=8, cols=16, groups=2),
    ),
    "kimi_linear": (
        "kimi_linear", {**numbers("num_heads head_dim short_conv_kernel_size", 4, 32, 4), "kda_layers": [1, 2, 3]}, {},
        ModelShape("gated_delta", layers=3, heads=4, rows=32, cols=32, groups=4, per_channel=True),
    ),
}  # fmt: skip


def document(name: str, without: str = "", **changes: Any) -> dict[str, Any]:
    """A config.json, maybe without a field that its family needs."""
    family, needs, may_have, _ = CONFIGS[name]
    fields = {**needs, **may_have, **changes}
    fields.pop(without, None)
    if family.startswith("qwen3_5"):  # models that also see
        return {"model_type": family, "text_config": {"model_type": f"{family}_text", **fields}}
    return {"model_type": family, **({"linear_attn_config": fields} if family == "kimi_linear" else fields)}


def write_config(folder: Path, fields: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path


def pool_of(shape: ModelShape, format: Format) -> StatePool[State]:
    """A pool of one request, stochastic where the format can be."""
    rounding = "stochastic" if "stochastic" in format.roundings else "nearest"
    activations = getattr(torch, shape.activations)
    common: dict[str, Any] = {"slots": 1, "layers": shape.layers, "heads": shape.heads, "window": shape.window}
    common |= {"dtype": format.dtype, "rounding": rounding, "tokens": shape.tokens, "conv_dtype": activations}
    if shape.conv_width:
        common |= {"conv_channels": shape.conv_channels, "conv_width": shape.conv_width}
    if shape.window:
        common |= {"ring_dtype": activations}
    if shape.kind == "mamba2":
        groups = {"groups": shape.groups} if shape.window else {}
        return StatePool.mamba2(**common, rows=shape.rows, cols=shape.cols, **groups)
    keys = {"key_heads": shape.groups, "per_channel": shape.per_channel} if shape.window else {}
    return StatePool.gated_delta(**common, value_dim=shape.rows, key_dim=shape.cols, **keys)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_a_pool(shape: ModelShape) -> None:
    for format in FORMATS.values():
        found = request_bytes(shape, format)
        assert found["total"] == sum(found.values()) - found["total"] == pool_of(shape, format).bytes_per_slot


def test_a_config_gives_its_shape_and_every_field_it_needs_is_named_where_it_is_missing(tmp_path: Path) -> None:
    assert {family for family, *_ in CONFIGS.values()} == set(FAMILIES)
    for name, (family, needs, may_have, shape) in CONFIGS.items():
        path = write_config(tmp_path, document(name))
        assert shape_from_config(path) == shape_from_config(tmp_path) == shape
        for field in needs if "layer_types" not in may_have else ():
            write_config(tmp_path, document(name, without=field))
            with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} \({family}\): .*\b{field}\b"):
                shape_from_config(path)


WRONG_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("mamba2-2.7b", {"model_type": "llama"}, "model_type 'llama' is not supported, only mamba2, nemotron_h"),
    ("mamba2-2.7b", {"num_heads": True}, "the field num_heads must be an integer above 0, got True"),
    ("granitemoehybrid", {"layer_types": "mamba"}, "the field layer_types must be a list, got 'mamba'"),
    ("nemotron-3-super-120b", {"hybrid_override_pattern": 3}, "needs the field hybrid_override_pattern or layers"),
    ("qwen3-next-80b", {"full_attention_interval": 0}, "full_attention_interval must be an integer above 0, got 0"),
    ("kimi_linear", {"kda_layers": []}, "at least 1 of the layers must have a recurrent state"),
]


def test_a_wrong_config_is_refused(tmp_path: Path) -> None:
    for name, change, complaint in WRONG_CONFIGS:
        path = write_config(tmp_path, document(name, **change))
        with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}.*{re.escape(complaint)}"):
            shape_from_config(path)
    with pytest.raises(ValueError, match="must hold an object"):
        shape_from_config(write_config(tmp_path, [1, 2]))
    path.write_bytes(b"{\xff")
    with pytest.raises(ValueError, match="is not a JSON file"):
        shape_from_config(tmp_path)


WRONG_SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"kind": "mamba"}, "kind must be mamba2 or gated_delta, got 'mamba'"),
    ({"layers": 0}, "at least 1 of the layers must have a recurrent state, got 0"),
    ({"rows": 0}, "rows must be at least 1, got 0"),
    ({"groups": 4}, "the number of groups must divide the 6 heads, got 4"),
    ({"conv_width": 1}, "conv_width must be 0, for no convolution, or at least 2, got 1"),
    ({"window": 65}, "window must be from 0, for no ring, to 64, got 65"),
    ({"window": 16, "tokens": 17}, "tokens must be at most the window, 16, got 17"),
    ({"tokens": 2}, "tokens=2 needs a window"),
    ({"per_channel": True}, "per_channel is for gated_delta, got kind='mamba2'"),
]


def test_a_wrong_shape_is_refused() -> None:
    for change, complaint in WRONG_SHAPES:
        with pytest.raises(ValueError, match=f"^{re.escape(complaint)}"):
            replace(SHAPES[0], **change)


def test_ranks_share_heads_and_groups_and_repeat_groups_that_are_too_few() -> None:
    shape = PRESETS["nemotron-3-super-120b"]
    assert shape.split(1) == shape
    for ranks, heads, groups in ((2, 64, 4), (16, 8, 1)):
        assert shape.split(ranks) == replace(shape, heads=heads, groups=groups)
    with pytest.raises(ValueError, match="tensor parallel must divide the 128 heads, got 0"):
        shape.split(0)
    with pytest.raises(ValueError, match="tensor parallel must divide the 4 groups or be a multiple, got 6"):
        ModelShape("mamba2", 1, heads=12, rows=4, cols=4, groups=4).split(6)


def test_memory_is_a_number_and_a_unit() -> None:
    for text, size in (("40GiB", 40 * 2**30), ("40GB", 40 * 10**9), ("1.5 TiB", 3 * 2**39), ("0.1KB", 100), ("3B", 3)):
        assert parse_memory(text) == size
    for text in ("40", "GiB", "40gib", "-1GiB", "1e3GiB", "0GiB", "0.1B", "1.GiB", ".5GiB", "1  GiB", "٤GiB"):
        with pytest.raises(ValueError, match=re.escape(f"as in 40GiB, got {text!r}")):
            parse_memory(text)


def test_fields_change_a_preset_or_make_a_shape() -> None:
    preset = PRESETS["qwen3-next-80b"]
    assert choose_shape("qwen3-next-80b", None, {}) == ("qwen3-next-80b", preset)
    assert choose_shape("qwen3-next-80b", None, {"activations": "float16"})[0] == "qwen3-next-80b"
    changed = choose_shape("qwen3-next-80b", None, {"heads": 64, "conv_width": 0})
    assert changed == ("qwen3-next-80b with changes", replace(preset, heads=64, conv_width=0))
    assert choose_shape(None, None, {"window": 8})[1] == replace(PRESETS["nemotron-3-super-120b"], window=8)
    alone = {"layers": 1, "heads": 2, "rows": 3, "cols": 4, "groups": 1}
    assert choose_shape(None, None, alone) == ("this shape", ModelShape("mamba2", 1, 2, 3, 4, 1))


def test_plan_without_options_shows_a_preset_and_takes_the_beginning_of_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan"]) == 0
    out = output_of(capsys)
    assert out.startswith("nemotron-3-super-120b: mamba2, 40 layers with a state of 128 heads x 64 x 128, 8 groups")
    for text in (
        "a convolution of width 4, bfloat16 activations", "MiB per request",
        "format state scales conv total in 40GiB float32", "float32 160.00 - 2.34 162.34 252 100.0%",
        "int8 40.00 1.25 2.34 43.59 939 26.9%", "Not counted: weights, workspace, and the KV cache",
        *(f"{format.name} " for format in FORMATS.values()),
    ):  # fmt: skip
        assert text in out
    assert main(["plan", "--model", "qwen3-next"]) == 0
    assert output_of(capsys).startswith("qwen3-next-80b: gated_delta, 36 layers")


def test_plan_of_a_ring_on_two_ranks_from_a_config_counts_the_requests_that_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_config(tmp_path, document("kimi_linear"))
    argv = "--window 16 --tokens 5 --layers 2 --conv-width 0 --memory 100MB --tensor-parallel 2"
    assert main(["plan", "--config", str(tmp_path), *argv.split()]) == 0
    out = output_of(capsys)
    size = request_bytes(ModelShape("gated_delta", 2, 2, 32, 32, 2, 0, "bfloat16", 16, 5, True), FORMATS[torch.int8])
    kib = " ".join(f"{size[part] / 1024:,.2f}" for part in ("state", "scales", "ring", "total"))
    assert f"int8 {kib} {10**8 // size['total']:,} " in out
    assert "with changes: gated_delta, 2 layers with a state of 4 heads x 32 x 32, 4 key heads, a decay per" in out
    assert "On each of 2 ranks: 2 heads, 2 key heads." in out
    assert "The ring holds 16 + 5 tokens, the window and the longest call, in every layer." in out
