"""Facts that the command line needs before torch is imported: names, defaults, and how text fits a terminal."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Collection, Iterable
from decimal import Decimal
from importlib.metadata import PackageNotFoundError, version

ROUNDINGS = ("nearest", "stochastic", "stochastic_hw")
ROUNDINGS_OF = {  # by the name of a format
    "float32": ("nearest",),
    "bfloat16": ("nearest", "stochastic"),
    "float16": ROUNDINGS,
    "int16": ("nearest", "stochastic"),
    "int8": ("nearest", "stochastic"),
    "float8_e4m3fn": ROUNDINGS,
}
ACTIVATIONS = ("float32", "bfloat16", "float16")  # dtypes of what tokens bring
BENCHED = ("mamba2", "gated_delta", "mamba3", "conv1d", "mamba2_replay", "gated_delta_replay", "span")  # by `bench`
ENGINES = ("vllm",)  # whose layers `info` tells about
NO_PEERS = "none"  # the word for no peer in `bench --peers`
PEER_NAMES = ("vllm", "flashinfer", "mamba_ssm", "fla")  # libraries that `bench` compares with
WAYS = ("plain", "again", "int64", "ascending", "no-gate", "float32-dt")  # in which `bench --ways` calls ops
BENCH_SECONDS = 300  # that `bench --quick` may take
CPU_BENCH_SECONDS = 20  # in which `bench` begins measurements on a CPU, so that it ends within a minute
TUNE_SECONDS = 600  # that `tune --quick` may take
LARGEST_WINDOW = 64  # of a replay ring
LARGEST_NUMBER = 1 << 20  # of steps, tokens, sizes and seconds: options above it are typing errors
LARGEST_MEMORY = 1 << 60  # bytes
FAMILIES = (  # of the random model of `generate`
    "mamba", "falcon_mamba", "jamba", "zamba", "mamba2", "bamba", "nemotron_h", "falcon_h1", "granitemoehybrid",
    "zamba2", "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "glm5_next",
    "lfm2", "lfm2_moe", "lfm3",
)  # fmt: skip
FAMILY = "mamba2"  # the default
WINDOW = 16  # of replay in `generate`: the window that docs/choosing-a-format.md measures
BINARY_UNITS, DECIMAL_UNITS = ("B", "KiB", "MiB", "GiB", "TiB"), ("B", "KB", "MB", "GB", "TB")
UNITS = {
    name: base**power
    for names, base in ((BINARY_UNITS, 1024), (DECIMAL_UNITS, 1000))
    for power, name in enumerate(names)
}


def flashstate_version() -> str:
    """Return the version that is installed."""
    try:
        return version("flashstate")
    except PackageNotFoundError:
        return "not installed: run from its sources"


def wrapped(text: str, width: int) -> list[str]:
    """Break text into lines of at most `width` characters, the last with more than one word where possible."""
    for narrower in range(width, width // 2, -1):
        lines = textwrap.wrap(text, narrower, break_long_words=False, break_on_hyphens=False)
        if len(lines) < 2 or " " in lines[-1]:
            return lines
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def listed(items: Iterable[object]) -> str:
    """Return items as they stand in a sentence."""
    return ", ".join(map(str, items))


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return the end of an error about an unknown word: the known words that begin with it, or nearly so, or the most
    similar. Leading dashes and capitals do not count."""
    given, bare = word.lstrip("-").lower(), {name.lstrip("-"): name for name in known}
    nearly = difflib.get_close_matches(given, [name[: len(given) + 1] for name in bare], n=1, cutoff=0.7)
    meant = (
        [name for name in bare if name.startswith(given)]
        or difflib.get_close_matches(given, bare, n=1)
        or [name for name in bare if name.startswith(tuple(nearly))]
    )
    return f"; did you mean {' or '.join(bare[name] for name in meant)}?" if meant and given else ""


def name_among(text: str, names: Collection[str]) -> str:
    """Return the one of these names that `text` is, or is the only one to begin with; ValueError where none is."""
    meant = [text] if text in names else [name for name in names if name.startswith(text)]
    if len(meant) == 1:
        return meant[0]
    raise ValueError(f"must be one of {listed(names)}, got {text!r}{did_you_mean(text, names)}")


def check_format(name: str, rounding: str) -> tuple[str, str]:
    """Return the format and the rounding; ValueError where the format has no such rounding."""
    if rounding not in ROUNDINGS_OF[name]:
        hint = did_you_mean(rounding, ROUNDINGS_OF[name])
        raise ValueError(f"{name} has no rounding {rounding!r}, only {listed(ROUNDINGS_OF[name])}{hint}")
    return name, rounding


def parse_format(text: str) -> tuple[str, str]:
    """Return the format and the rounding of "float16:stochastic"; without a rounding it is to nearest."""
    name, _, rounding = text.partition(":")
    return check_format(name_among(name, ROUNDINGS_OF), rounding or "nearest")


def parse_memory(text: str) -> int:
    """Return the bytes of "40GiB", "40GB" or "1.5 TiB"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)", text)
    size = int(Decimal(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if not 1 <= size <= LARGEST_MEMORY:
        most = f"{LARGEST_MEMORY // UNITS['TiB']}TiB at most"
        raise ValueError(
            f"memory must be a number above 0 and a unit of {listed(UNITS)}, {most}, as in 40GiB, got {text!r}"
        )
    return size


def check_device_name(text: str) -> str:
    """Return the name of a device that ops run on; ValueError where it is none. The device may not exist."""
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", text):
        raise ValueError(f"must be cpu, cuda or cuda:N, got {text!r}")
    return text
