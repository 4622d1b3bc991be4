"""flashstate plan: bytes against tensors of the documented shapes, presets and configs, refusals, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from printed import output_of

from flashstate.basics import parse_memory
from flashstate.cli import main
from flashstate.models import FAMILIES, PRESETS, ModelShape, choose_shape, shape_from_config
from flashstate.plan import request_bytes
from flashstate.state.formats import FORMATS
from flashstate.state.state import State

SCALED = (torch.int16, torch.int8, torch.float8_e4m3fn)
SHAPES = {
    "mamba2": ModelShape("mamba2", layers=3, heads=6, rows=5, cols=7, groups=2),
    "ring": ModelShape("mamba2", layers=3, heads=6, rows=5, cols=7, groups=3, conv_width=2, window=16, tokens=4),
    "float32 ring": ModelShape("mamba2", 2, 4, 8, 16, 1, activations="float32", window=64, tokens=64),
    "ring of the delta rule": ModelShape("gated_delta", 3, heads=6, rows=5, cols=7, groups=3, window=16, tokens=4),
    "float32 ring of the delta rule": ModelShape(
        "gated_delta", 2, 4, 8, 16, 1, activations="float32", window=64, tokens=64
    ),
    "ring per channel": ModelShape("gated_delta", 3, 6, 5, 7, 6, window=8, per_channel=True),
    "gated_delta": ModelShape("gated_delta", layers=2, heads=8, rows=12, cols=10, groups=4, conv_width=6),
    "no convolution": ModelShape("gated_delta", layers=1, heads=1, rows=1, cols=1, groups=1, conv_width=0),
    **PRESETS,
}
PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"


@dataclass(frozen=True)
class Example:
    """A config.json: the fields its family needs, fields it may have, and its shape; `inside`: the object with both."""

    model_type: str
    needs: dict[str, Any]
    may_have: dict[str, Any]
    shape: ModelShape
    inside: str | None = None

    def document(self, without: str = "", **changes: Any) -> dict[str, Any]:
        document = {"model_type": self.model_type, **self.needs, **self.may_have, **changes}
        document.pop(without, None)
        return document if self.inside is None else {"model_type": self.model_type, self.inside: document}


def numbers(names: str, *values: int) -> dict[str, Any]:
    return dict(zip(names.split(), values, strict=True))


def nemotron_h(*values: int) -> dict[str, Any]:
    return numbers("mamba_num_heads mamba_head_dim ssm_state_size n_groups conv_kernel", *values)


def bamba(*values: int) -> dict[str, Any]:
    return numbers("mamba_n_heads mamba_d_state mamba_n_groups mamba_d_conv", *values)


def qwen(*values: int) -> dict[str, Any]:
    names = "linear_num_value_heads linear_value_head_dim linear_key_head_dim linear_num_key_heads"
    return numbers(f"{names} linear_conv_kernel_dim", *values)


# The presets, as the config.json of these models has them, and small models of every family.
CONFIGS = {
    "nemotron-3-super-120b": Example(
        "nemotron_h",
        {**nemotron_h(128, 64, 128, 8, 4), "hybrid_override_pattern": PATTERN},
        {"num_hidden_layers": 88},
        PRESETS["nemotron-3-super-120b"],
    ),
    "qwen3-next-80b": Example(
        "qwen3_next",
        {**qwen(32, 128, 128, 16, 4), "num_hidden_layers": 48, "full_attention_interval": 4},
        {"hidden_size": 2048},
        PRESETS["qwen3-next-80b"],
    ),
    "qwen3.5-397b": Example(
        "qwen3_5_moe",
        qwen(64, 128, 128, 16, 4),
        {"model_type": "qwen3_5_moe_text", "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15},
        PRESETS["qwen3.5-397b"],
        inside="text_config",
    ),
    "mamba2-2.7b": Example(
        "mamba2",
        numbers("num_hidden_layers num_heads head_dim state_size n_groups conv_kernel", 64, 80, 64, 128, 1, 4),
        {"hidden_size": 2560, "expand": 2},
        PRESETS["mamba2-2.7b"],
    ),
    "nemotron_h": Example(
        "nemotron_h",
        nemotron_h(4, 8, 16, 2, 3),
        {"layers_block_type": ["mamba", "moe", "linear_attention", "attention", "mlp"]},
        ModelShape("mamba2", layers=2, heads=4, rows=8, cols=16, groups=2, conv_width=3),
    ),
    "bamba": Example(
        "bamba",
        {**bamba(4, 32, 1, 4), "mamba_d_head": "auto", "mamba_expand": 2, "hidden_size": 32, "num_hidden_layers": 8},
        {"attn_layer_indices": [3, 7]},
        ModelShape("mamba2", layers=6, heads=4, rows=16, cols=32, groups=1),
    ),
    "granitemoehybrid": Example(
        "granitemoehybrid",
        {**bamba(8, 64, 2, 4), "mamba_d_head": 16},
        {"layer_types": ["mamba", "mamba", "attention", "mamba"], "num_hidden_layers": 4},
        ModelShape("mamba2", layers=3, heads=8, rows=16, cols=64, groups=2),
    ),
    "granitemoehybrid without layer types": Example(
        "granitemoehybrid",
        {**bamba(8, 64, 2, 4), "mamba_d_head": 16, "num_hidden_layers": 4},
        {"layer_types": None},
        ModelShape("mamba2", layers=4, heads=8, rows=16, cols=64, groups=2),
    ),
    "falcon_h1": Example(
        "falcon_h1",
        {**bamba(6, 16, 1, 4), "mamba_d_head": "auto", "num_hidden_layers": 5},
        {"mamba_d_ssm": 48, "mamba_expand": 2, "hidden_size": 32, "attn_layer_indices": None},
        ModelShape("mamba2", layers=5, heads=6, rows=8, cols=16, groups=1),
    ),
    "zamba2": Example(
        "zamba2",
        numbers("n_mamba_heads mamba_expand hidden_size mamba_d_state mamba_ngroups mamba_d_conv", 8, 2, 64, 64, 2, 4),
        {"layers_block_type": ["mamba", "mamba", "hybrid"], "num_hidden_layers": 3},
        ModelShape("mamba2", layers=3, heads=8, rows=16, cols=64, groups=2),
    ),
    "qwen3_5": Example(
        "qwen3_5",
        {**qwen(4, 8, 16, 2, 4), "num_hidden_layers": 6, "full_attention_interval": 4},
        {},
        ModelShape("gated_delta", layers=5, heads=4, rows=8, cols=16, groups=2),
        inside="text_config",
    ),
    "kimi_linear": Example(
        "kimi_linear",
        {**numbers("num_heads head_dim short_conv_kernel_size", 4, 32, 4), "kda_layers": [1, 2, 3]},
        {"full_attn_layers": [4]},
        ModelShape("gated_delta", layers=3, heads=4, rows=32, cols=32, groups=4, per_channel=True),
        inside="linear_attn_config",
    ),
}


def allocated(*tensors: tuple[tuple[int, ...], torch.dtype]) -> int:
    """Bytes of tensors of these shapes and dtypes; meta tensors take none themselves."""
    return sum(torch.empty(shape, dtype=dtype, device="meta").nbytes for shape, dtype in tensors)


def counted(shape: ModelShape, dtype: torch.dtype) -> dict[str, int]:
    """What one slot of the documented tensors takes."""
    layers, heads, rows, cols, groups = shape.layers, shape.heads, shape.rows, shape.cols, shape.groups
    length, activations = shape.window + shape.tokens, getattr(torch, shape.activations)
    channels = sum(torch.empty(size, device="meta").numel() for size in ((heads, rows), (groups, cols), (groups, cols)))
    of_rows = activations if shape.kind == "mamba2" else torch.float16
    decay = (
        ((layers, heads, length, cols), activations) if shape.per_channel else ((layers, heads, length), torch.float32)
    )
    ring = (
        ((layers, heads, length, rows), of_rows),
        ((layers, groups, length, cols), activations),
        decay,
        ((2,), torch.int32),
    )
    return {
        "state": allocated(((layers, heads, rows, cols), dtype)),
        "scales": allocated(((layers, heads, rows), torch.float32)) if dtype in SCALED else 0,
        "seed": 0 if dtype == torch.float32 else allocated(((), torch.int64)),
        "conv": allocated(((layers, channels, shape.conv_width - 1), activations)) if shape.conv_width else 0,
        "ring": allocated(*ring) if shape.window else 0,
    }


def write_config(folder: Path, fields: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_bytes_are_those_of_the_documented_tensors(name: str, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    got, want = request_bytes(shape, FORMATS[dtype]), counted(shape, dtype)
    assert got == {**want, "total": sum(want.values())}


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_bytes_are_those_of_a_state(dtype: torch.dtype) -> None:
    shape = ModelShape("mamba2", layers=1, heads=3, rows=4, cols=16, groups=1, conv_width=0)
    scale = torch.ones(2, 3, 4) if FORMATS[dtype].scaled else None
    rounding = "stochastic" if "stochastic" in FORMATS[dtype].roundings else "nearest"
    seed = torch.zeros(2, dtype=torch.int64) if rounding == "stochastic" else None
    state = State(torch.zeros(2, 3, 4, 16, dtype=dtype), scale, rounding=rounding, seed=seed)
    assert request_bytes(shape, FORMATS[dtype])["total"] == state.bytes_per_slot


def test_known_bytes_of_the_presets() -> None:
    float32 = {name: request_bytes(shape, FORMATS[torch.float32]) for name, shape in PRESETS.items()}
    assert {name: (size["state"] >> 20, size["conv"]) for name, size in float32.items()} == {
        "nemotron-3-super-120b": (160, 40 * (8192 + 2048) * 3 * 2),
        "qwen3-next-80b": (72, 36 * (4096 + 4096) * 3 * 2),
        "qwen3.5-397b": (180, 45 * (8192 + 4096) * 3 * 2),
        "mamba2-2.7b": (160, 64 * (5120 + 256) * 3 * 2),
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_its_shape(name: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, CONFIGS[name].document())
    assert shape_from_config(path) == CONFIGS[name].shape
    assert shape_from_config(tmp_path) == CONFIGS[name].shape


def test_every_preset_and_every_family_has_a_config_here() -> None:
    assert {config.model_type for config in CONFIGS.values()} == set(FAMILIES)
    assert set(PRESETS) <= set(CONFIGS)


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in CONFIGS for field in CONFIGS[name].needs])
def test_a_config_without_a_field_it_needs_is_refused(name: str, field: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, CONFIGS[name].document(without=field))
    place = rf"{re.escape(str(path))} \({CONFIGS[name].model_type}\): "
    with pytest.raises(ValueError, match=rf"^{place}.*\b{field}\b"):
        shape_from_config(path)


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("mamba2-2.7b", {"model_type": "llama"}, "model_type 'llama' is not supported, only mamba2, nemotron_h"),
        ("mamba2-2.7b", {"model_type": None}, "model_type 'None' is not supported"),
        ("mamba2-2.7b", {"num_heads": "80"}, "the field num_heads must be an integer above 0, got '80'"),
        ("mamba2-2.7b", {"num_heads": True}, "the field num_heads must be an integer above 0, got True"),
        ("mamba2-2.7b", {"num_heads": 0}, "the field num_heads must be an integer above 0, got 0"),
        ("mamba2-2.7b", {"n_groups": 3}, "the number of groups must divide the 80 heads, got 3"),
        ("mamba2-2.7b", {"conv_kernel": 1}, "conv_width must be 0, for no convolution, or at least 2, got 1"),
        ("granitemoehybrid", {"layer_types": ["attention"]}, "at least 1 of the layers must have a recurrent state"),
        ("granitemoehybrid", {"layer_types": "mamba"}, "the field layer_types must be a list, got 'mamba'"),
        ("bamba", {"mamba_expand": None}, "the field mamba_expand must be an integer above 0, but it is missing"),
        ("nemotron-3-super-120b", {"hybrid_override_pattern": 3}, "needs the field hybrid_override_pattern or layers"),
        ("qwen3-next-80b", {"full_attention_interval": 0}, "full_attention_interval must be an integer above 0, got 0"),
        ("kimi_linear", {"kda_layers": 3}, "the field linear_attn_config.kda_layers must be a list, got 3"),
    ],
)
def test_a_wrong_config_is_refused(name: str, change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, CONFIGS[name].document(**change))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}.*{re.escape(complaint)}"):
        shape_from_config(path)


def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must hold an object"):
        shape_from_config(write_config(tmp_path, [1, 2]))
    (tmp_path / "config.json").write_bytes(b"{\xff")
    with pytest.raises(ValueError, match="is not a JSON file"):
        shape_from_config(tmp_path)
    with pytest.raises(FileNotFoundError):
        shape_from_config(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "mamba"}, "kind must be mamba2 or gated_delta, got 'mamba'"),
        ({"layers": 0}, "at least 1 of the layers must have a recurrent state, got 0"),
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"groups": 4}, "the number of groups must divide the 6 heads, got 4"),
        ({"conv_width": 1}, "conv_width must be 0, for no convolution, or at least 2, got 1"),
        ({"conv_width": -1}, "conv_width must be 0, for no convolution, or at least 2, got -1"),
        ({"window": -1}, "window must be from 0, for no ring, to 64, got -1"),
        ({"window": 65}, "window must be from 0, for no ring, to 64, got 65"),
        ({"window": 16, "tokens": 17}, "tokens must be at most the window, 16, got 17"),
        ({"tokens": 2}, "tokens=2 needs a window"),
        ({"per_channel": True}, "per_channel is for gated_delta, got kind='mamba2'"),
    ],
)
def test_a_wrong_shape_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(complaint)}"):
        replace(SHAPES["mamba2"], **change)


def test_ranks_share_heads_and_groups_and_repeat_groups_that_are_too_few() -> None:
    shape = PRESETS["nemotron-3-super-120b"]
    assert shape.split(1) == shape
    for ranks, heads, groups in ((2, 64, 4), (8, 16, 1), (16, 8, 1), (128, 1, 1)):
        assert shape.split(ranks) == replace(shape, heads=heads, groups=groups)
    with pytest.raises(ValueError, match="tensor parallel must divide the 128 heads, got 3"):
        shape.split(3)
    with pytest.raises(ValueError, match="tensor parallel must divide the 128 heads, got 0"):
        shape.split(0)
    with pytest.raises(ValueError, match="tensor parallel must divide the 4 groups or be a multiple, got 6"):
        ModelShape("mamba2", 1, heads=12, rows=4, cols=4, groups=4).split(6)


SIZES = {"40GiB": 40 * 2**30, "40GB": 40 * 10**9, "512MiB": 2**29, "1.5 TiB": 3 * 2**39, "0.1KB": 100, "3B": 3}
NO_SIZES = ("", "40", "GiB", "40G", "40gib", "-1GiB", "1e3GiB", "0GiB", "0.1B", "1.GiB", ".5GiB", "1  GiB", "٤GiB")


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_memory_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", NO_SIZES)
def test_other_memory_is_refused(text: str) -> None:
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


def test_plan_without_options_shows_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    out = output_of(capsys)
    assert out.startswith("nemotron-3-super-120b: mamba2, 40 layers with a state of 128 heads x 64 x 128, 8 groups")
    assert "a convolution of width 4, bfloat16 activations" in out
    assert "MiB per request" in out
    assert "format state scales conv total in 40GiB float32" in out
    assert "float32 160.00 - 2.34 162.34 252 100.0%" in out
    assert "int8 40.00 1.25 2.34 43.59 939 26.9%" in out
    assert all(f"{format.name} " in out for format in FORMATS.values())
    assert "Not counted: weights, workspace, and the KV cache of attention layers." in out


@pytest.mark.parametrize("model", PRESETS)
def test_plan_counts_the_requests_that_fit(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model, "--memory", "80GB", "--tensor-parallel", "2", "--dtype", "float32"]) == 0
    out = output_of(capsys)
    part = replace(PRESETS[model].split(2), activations="float32")
    assert f"On each of 2 ranks: {part.heads} heads, {part.groups} " in out
    for dtype, format in FORMATS.items():
        total = sum(counted(part, dtype).values())
        assert re.search(rf"{format.name} .*{total / 2**20:,.2f} {80 * 10**9 // total:,} ", out)


@pytest.mark.parametrize("name", ["zamba2", "qwen3-next-80b", "kimi_linear"])
def test_plan_of_a_ring_from_a_config(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_config(tmp_path, CONFIGS[name].document())
    argv = ["plan", "--config", str(tmp_path), "--window", "16", "--tokens", "5", "--layers", "2", "--conv-width", "0"]
    assert main([*argv, "--memory", "100MB"]) == 0
    out = output_of(capsys)
    shape = replace(CONFIGS[name].shape, window=16, tokens=5, layers=2, conv_width=0)
    size = counted(shape, torch.int8)
    total = sum(size.values())
    cells = " ".join(f"{part / 1024:,.2f}" for part in (size["state"], size["scales"], size["ring"], total))
    assert f"int8 {cells} {10**8 // total:,} " in out
    assert f"with changes: {shape.kind}, 2 layers" in out
    assert ("a decay per channel" in out) == (name == "kimi_linear")
    assert "no convolution" in out
    assert "The ring holds 16 + 5 tokens, the window and the longest call, in every layer." in out


def test_plan_of_a_small_shape_is_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "plan --kind gated_delta --layers 1 --heads 2 --rows 4 --cols 8 --groups 1 --conv-width 0 --memory 1KiB"
    assert main(argv.split()) == 0
    out = output_of(capsys)
    assert "this shape: gated_delta, 1 layer with a state of 2 heads x 4 x 8, 1 key head, no convolution" in out
    assert "float32 256 - 256 4 100.0%" in out
    assert "int16 128 32 168 6 65.6%" in out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--tensor-parallel", "3"], "tensor parallel must divide the 128 heads, got 3"),
        (["--heads", "3", "--cols", "8"], "without a preset or a config.json a shape also needs layers, rows, groups"),
        (["--kind", "gated_delta"], "without a preset or a config.json a shape also needs layers, heads, rows, cols"),
        (["--model", "mamba2-2.7b", "--per-channel"], "per_channel is for gated_delta, got kind='mamba2'"),
        (["--tokens", "4"], "tokens=4 needs a window"),
        (["--model", "mamba2-2.7b", "--config", "."], "from a preset or from a config.json, got both"),
        (["--config", "no/such/folder"], "No such file"),
        (["--config", __file__], "is not a JSON file"),
    ],
)
def test_a_bad_option_is_one_line_and_exits_with_2(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *argv]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("argv", ["--model gpt2", "--memory 40", "--heads 0", "--kind rwkv", "--dtype int8"])
def test_what_cannot_be_parsed_exits_with_2(argv: str) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["plan", *argv.split()])
    assert exit.value.code == 2
