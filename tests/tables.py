"""The files of launch tables, and the problems that their entries are for, read without the library's keys."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from itertools import count, cycle, islice, product
from pathlib import Path
from typing import Any, TypeVar

import pytest

from flashstate.launch import Config, Problem
from flashstate.launch.config import mode_key, table_key
from flashstate.launch.table import TABLES as FOLDER
from flashstate.launch.table import read_table_file
from flashstate.ops.at_once import AtOnceProblem
from flashstate.ops.conv1d import ChannelProblem
from flashstate.ops.gated_delta import DeltaProblem, DeltaTokensProblem
from flashstate.ops.gated_delta_replay import DeltaReplayProblem
from flashstate.ops.mamba2_replay import ReplayProblem, ReplayTokenProblem
from flashstate.ops.mamba3 import HeadProblem, RankProblem
from flashstate.proof import AnyCase

S, T = TypeVar("S"), TypeVar("T")
KEY = re.compile(
    r"(?P<op>\w+(?: rank \d+(?: turned)?| either| keep| fold)?) (?P<rows>\d+)x(?P<cols>\d+) (?P<format>\w+) "
    r"vector (?P<vector>\d+)(?P<layout> transposed)?"
)
MODE = re.compile(r"(?P<rounding>\w+), (?P<tokens>one token|several tokens)(?:, (?P<stored>every|none) stored)?")
KINDS = (  # what the keys of an op and of a mode begin with
    (r"mamba2_replay \w+ \d+x\d+ float32 .*one token", ReplayTokenProblem),
    (r"mamba2_replay", ReplayProblem),
    (r"gated_delta_replay", DeltaReplayProblem),
    (r"mamba3_step rank 1\b", HeadProblem),
    (r"mamba3_step", RankProblem),
    (r"(mamba2|gated_delta)_at_once", AtOnceProblem),
    (r"gated_delta_step .*several tokens", DeltaTokensProblem),
    (r"gated_delta_step", DeltaProblem),
    (r"conv1d_step", ChannelProblem),
    (r"", Problem),
)
H200_TABLE = FOLDER / "nvidia-h200.json"
TABLES = [H200_TABLE, *sorted({*FOLDER.glob("*.json")} - {H200_TABLE})]  # tests that try kinds of entries begin there


def entries_of(path: Path) -> Iterator[tuple[Problem, Config]]:
    """Every entry of a file as its keys describe it, and its config."""
    for key, modes in read_table_file(path).configs.items():
        found = KEY.fullmatch(key)
        assert found, f"{key!r} is not a key"

        rows, cols, vector = (int(found[name]) for name in ("rows", "cols", "vector"))
        for mode, sizes in modes.items():
            how = MODE.fullmatch(mode)
            assert how, f"{mode!r} is not a mode"
            several, stored = how["tokens"] == "several tokens", how["stored"] or "last"
            kind = next(kind for name, kind in KINDS if re.match(name, f"{key}, {mode}"))
            of_mode = kind(
                found["op"], rows, cols, found["format"], how["rounding"], vector, 1, several, stored,
                transposed=found["layout"] is not None,
            )  # fmt: skip
            yield from ((replace(of_mode, batch_heads=size), config) for size, config in sizes.items())


def configs_by_mode(path: Path) -> dict[Problem, set[Config]]:
    """The configs of a file by what they are for, whatever the size, as a problem of size 1."""
    modes: dict[Problem, set[Config]] = {}
    for problem, config in entries_of(path):
        modes.setdefault(replace(problem, batch_heads=1), set()).add(config)
    return modes


def case_of(mode: Problem, bases: Mapping[str, AnyCase], angles: int) -> AnyCase:
    """A case whose calls a table has this mode for, like one of these, which have the name of their op or its
    beginning, the longest counting."""
    shape: dict[str, Any] = {"rows": mode.rows, "cols": mode.cols, "format": mode.format, "rounding": mode.rounding}
    shape["tokens"] = 0 if not mode.several_tokens else 9 if mode.op.endswith("_16") else 4
    if isinstance(mode, ChannelProblem):
        names = {"rows": "channels", "cols": "width", "format": "x", "tokens": "tokens"}
        shape = {new: shape[old] for old, new in names.items()}
    if isinstance(mode, DeltaProblem | DeltaTokensProblem | AtOnceProblem):
        shape |= {"transposed": mode.transposed} if mode.op.startswith("gated_delta") else {}
        shape |= {"exact": not isinstance(mode, AtOnceProblem)}
    if isinstance(mode, HeadProblem | RankProblem):
        rank = int(re.findall(r"rank (\d+)", mode.op)[0])
        shape |= {"rank": rank, "angles": angles if mode.op.endswith("turned") else 0}
    op = max((op for op in bases if mode.op.startswith(op)), key=len)
    return replace(bases[op], **shape)


def risky(mode: Problem, configs: Collection[Config]) -> list[Config]:
    """Configs that may spill: all with a limit of registers, and the one with most in a thread."""
    largest = max(configs, key=lambda config: (mode.per_thread(config) * config.tokens_together, astuple(config)))
    return sorted({largest, *(config for config in configs if config.registers)}, key=astuple)


def risky_by_turns(ops: Sequence[str], calls: Callable[[Problem], tuple[T, ...]], every: int) -> list[Any]:
    """Of every so many modes of these ops a config that may spill, with one of its calls, to parametrize a test.
    Formats and what is stored, roundings, and such pairs take turns: all of them take long to compile."""
    alike: dict[Problem, list[tuple[Problem, Collection[Config]]]] = {}
    for op, (mode, configs) in product(ops, configs_by_mode(H200_TABLE).items()):
        if mode.op == op and calls(mode):
            alike.setdefault(replace(mode, rounding="nearest"), []).append((mode, configs))
    formats, kinds = (list(dict.fromkeys(map(part, alike))) for part in (_format, _kind))
    chosen = [like for like in alike if (formats.index(_format(like)) + kinds.index(_kind(like))) % every == 0]
    chosen += {_kind(like): like for like in alike if _kind(like) not in map(_kind, chosen)}.values()
    turns: defaultdict[object, Iterator[int]] = defaultdict(count)  # of choices that are alike
    found = []
    for like in chosen:
        mode, configs = alike[like][next(turns[len(alike[like])]) % len(alike[like])]
        pairs = by_turns(risky(mode, configs), calls(mode))
        config, call = pairs[next(turns[calls(mode)]) % len(pairs)]
        found.append(pytest.param(mode, config, call, id=f"{table_key(mode)}, {mode_key(mode)}"))
    return found


def _format(mode: Problem) -> object:
    return mode.format, mode.rows


def _kind(mode: Problem) -> object:
    return mode.op, mode.several_tokens, mode.stored


def by_turns(configs: Collection[S], calls: Collection[T]) -> list[tuple[S, T]]:
    """Every config with one of these calls and every call with a config, in turn: all pairs take long to compile. So
    of other things."""
    pairs = zip(cycle(configs), cycle(calls), strict=False)
    return list(islice(pairs, max(len(configs), len(calls))))
