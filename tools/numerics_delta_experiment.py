"""How wrong states and outputs of the delta rule become over many tokens, however a state is kept, against float64.

A way to keep it is a format of the state, stepped in place or by replay, and by replay a format of u in the ring. All
ways decode the same tokens side by side, with keys, decays and beta that are kind and unkind to rounding;
docs/numerics.md has what it shows. It is the library's recurrence with the library's formats and random bits, and gives
the bytes of `gated_delta_step` and `gated_delta_replay`, as a test finds: these would take hours on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from typing import Any

import torch
from torch import Tensor

from flashstate.demo import one_thread
from flashstate.proof.inputs import Source
from flashstate.reference.gated_delta import gated_delta_token
from flashstate.reference.gated_delta_replay import as_kept
from flashstate.reference.mamba2 import silu
from flashstate.reference.rings import BEFORE_THE_FIRST_TOKEN
from flashstate.state.formats import PORTABLE_FORMATS, decode, encode
from flashstate.state.rounding import SEED_STEP, random_bits

TOKENS, WINDOW = 16384, 16
REQUESTS, ROWS, COLS = 2, 2, 128
KEYS = ("random", "correlated", "repeated", "uneven")
DECAYS = {"near 1": (1e-5, 1e-3), "mixed": (1e-5, 2.0), "small": (0.5, 2.0)}  # what -log(alpha) is drawn from
PER_CHANNEL = "mixed"  # every column has a decay of its own, as in KDA
BETAS = {"usual": 0.0, "near 1": 5.0}  # mean of the logit, whose standard deviation is 1
GROUPS = tuple(product(KEYS, DECAYS, BETAS))  # a head each, of every request
HEADS = REQUESTS * len(GROUPS)
CORRELATION = 0.95  # of successive keys
REPEATED, NOISE = 8, 0.03  # that many keys come again and again, with this much noise
LARGE, MANY = 8.0, 4  # uneven keys are so many times larger in so many of their columns
A_SPREAD = 0.5  # standard deviation of what a token adds to dt_bias
STATE_EVERY = 5  # tokens; prime to the window, so that states are seen soon after a fold and late alike
SHARE = 4  # errors are those of the last quarter before an end
ROUNDS = 10  # of Philox, as State has them
RING = ("bfloat16", "float16", "float32")  # dtypes of u
BLOCK = 32  # columns with a scale of their own, in a trial


@dataclass(frozen=True)
class Way:
    """One way to keep a state."""

    format: str  # of PORTABLE_FORMATS, or of TRIALS
    rounding: str
    u: str = ""  # by replay: its dtype in the ring

    @property
    def folds(self) -> bool:
        """Whether it is replay, which rounds the state once per window."""
        return bool(self.u)


@dataclass(frozen=True)
class DeltaErrorRow:
    """What is wrong in the last quarter before an end, of the heads of one group; its fields are columns of the CSV."""

    format: str
    rounding: str
    u: str  # the dtype of u in the ring, by replay; empty in place
    keys: str
    decay: str
    beta: str
    tokens: int  # from the start to the end
    state_error: float  # root mean square of the error, relative to that of the exact values
    output_error: float


def with_residual(bits: int, values: Tensor) -> Tensor:
    """values with an int8, a residual of so many bits and a scale per row: together a whole number of 8 + bits."""
    largest = (128 << bits) - 1
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest
    return (values / scale).round() * scale


def in_blocks(values: Tensor) -> Tensor:
    """values as int8 with a scale for each BLOCK columns of a row."""
    return decode(*encode(values.unflatten(-1, (-1, BLOCK)), torch.int8)).flatten(-2)


TRIALS: dict[str, Callable[[Tensor], Tensor]] = {  # what the library has not
    "int8, scale per 32": in_blocks,
    "int8, residual of 2 bits": partial(with_residual, 2),
    "int8, residual of 4 bits": partial(with_residual, 4),
}
FORMATS = (*PORTABLE_FORMATS, *((name, "nearest") for name in TRIALS))
WAYS = tuple(Way(*fmt, u) for fmt in FORMATS for u in ("", *RING))


def stored(values: Tensor, way: Way, random: Mapping[int, Tensor]) -> Tensor:
    """float32 values as a way gives them back after it stored them. `random`: bits for stochastic rounding, by the
    bytes of an element."""
    if way.format in TRIALS:
        return TRIALS[way.format](values)
    dtype = getattr(torch, way.format)
    return decode(*encode(values, dtype, random[dtype.itemsize] if way.rounding == "stochastic" else None))


class Tokens:
    """Heads of all groups, and tokens for them: the same for every way, on every device."""

    def __init__(self, device: torch.device) -> None:
        self.source = Source(device, seed=0)
        rate = torch.cat([self._rates(decay) for _ in range(REQUESTS) for _, decay, _ in GROUPS])  # (heads, cols)
        self.parameters = {"A_log": torch.zeros(HEADS, device=device), "dt_bias": rate.expm1().log()}
        self.channels = self._where(1, PER_CHANNEL)
        self.correlated, self.repeating = self._where(0, "correlated"), self._where(0, "repeated")
        self.b_mean = torch.tensor([BETAS[beta] for _, _, beta in GROUPS], device=device).repeat(REQUESTS)
        self.last = self.source.normal(HEADS, COLS)
        self.few = self.source.normal(REPEATED, HEADS, COLS)
        chosen = self.source.uniform(HEADS, COLS).argsort(1) < MANY
        self.size = torch.where(self._where(0, "uneven") & chosen, LARGE, 1.0)

    def _rates(self, decay: str) -> Tensor:
        """-log(alpha) of a head, (1, cols): drawn with an even logarithm, once, or for every column."""
        low, high = map(math.log, DECAYS[decay])
        drawn = self.source.uniform(1, COLS if decay == PER_CHANNEL else 1)
        return (low + (high - low) * drawn).exp().expand(1, COLS)

    def _where(self, part: int, name: str) -> Tensor:
        """Which heads are of groups with such a part: (heads, 1) bool."""
        found = torch.tensor([group[part] == name for group in GROUPS], device=self.source.device)
        return found.repeat(REQUESTS)[:, None]

    def token(self) -> dict[str, Any]:
        """The arguments of one step of one row. Activations are bfloat16 values, but float32, so that outputs are not
        rounded; the heads of all requests lie side by side."""
        normal = self.source.normal
        fresh, a = normal(HEADS, COLS), normal(HEADS, COLS)
        self.last = torch.where(self.correlated, CORRELATION * self.last + math.sqrt(1 - CORRELATION**2) * fresh, fresh)
        which = int(self.source.uniform(1) * REPEATED)
        k = torch.where(self.repeating, self.few[which] + NOISE * fresh, self.last)
        given = {
            "q": silu(normal(HEADS, COLS)),
            "k": self.size * silu(k),
            "v": silu(normal(HEADS, ROWS)),
            "a": A_SPREAD * torch.where(self.channels, a, a[:, :1]),
            "b": self.b_mean + normal(HEADS),
        }
        return {**{name: value.bfloat16().float()[None] for name, value in given.items()}, **self.parameters}


OPTIONS: dict[str, Any] = {"b_logit": None, "scale": None, "qk_l2norm": True}  # of every token


class Simulation:
    """The states of many ways, as one batch that steps side by side: (ways, heads, rows, cols) float32."""

    def __init__(
        self, ways: Sequence[Way], device: torch.device, size: tuple[int, int, int] = (HEADS, ROWS, COLS)
    ) -> None:
        self.ways = sorted(ways, key=self._dtype_of_u)
        self.dtypes = [(getattr(torch, name), len(list(same))) for name, same in groupby(self.ways, self._dtype_of_u)]
        self.states = torch.zeros(len(ways), *size, device=device)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.count = 0

    @staticmethod
    def _dtype_of_u(way: Way) -> str:
        return way.u or "float32"  # in place nothing keeps u, so nothing rounds it

    def step(self, token: Mapping[str, Any]) -> Tensor:
        """Outputs of a token: (ways, heads, rows)."""
        if self.count and self.count % WINDOW == 0:
            self._round(True, BEFORE_THE_FIRST_TOKEN)
        o, self.states = gated_delta_token(self.states, **token, **OPTIONS, kept=self._kept)
        self._round(False, 0)
        self.seed += SEED_STEP
        self.count += 1
        return o

    def _kept(self, u: Tensor) -> Tensor:
        """u of every way (ways, heads, rows) as its ring keeps it."""
        parts = u.split([many for _, many in self.dtypes])
        return torch.cat([as_kept(part, dtype) for part, (dtype, _) in zip(parts, self.dtypes, strict=True)])

    def _round(self, folds: bool, token: int) -> None:
        """Round the states of ways that fold, or of those that do not, with the random bits of this token."""
        heads, rows, cols = self.states.shape[1:]
        widths = (torch.int8, torch.float16)  # a format draws what others of its width do
        random = {
            dtype.itemsize: random_bits(self.seed, (heads, rows, cols), token, 0, ROUNDS, dtype)[0] for dtype in widths
        }
        for index, way in enumerate(self.ways):
            if way.folds == folds and way.format != "float32":
                self.states[index] = stored(self.states[index], way, random)


class SquareSums:
    """Squares of errors and of exact values: sums per way and group, and per group."""

    def __init__(self, ways: int, device: torch.device) -> None:
        self.wrong = torch.zeros(ways, len(GROUPS), dtype=torch.float64, device=device)
        self.exact = torch.zeros(1, len(GROUPS), dtype=torch.float64, device=device)

    def add(self, got: Tensor, exact: Tensor) -> None:
        """Add values got (ways, heads, ...) and exact ones (1, heads, ...) float64."""
        self.wrong += by_group((got - exact).square())
        self.exact += by_group(exact.square())

    def errors(self) -> list[list[float]]:
        """Relative errors of every way, by group."""
        found: list[list[float]] = (self.wrong / self.exact).sqrt().tolist()
        return found


def by_group(values: Tensor) -> Tensor:
    """Sums of (ways, heads, ...) over the heads of each group: (ways, groups)."""
    return values.flatten(2).sum(2).unflatten(1, (REQUESTS, -1)).sum(1)


def measure_delta(
    device: torch.device,
    tokens: int = TOKENS,
    ways: Sequence[Way] = WAYS,
    tracked: Callable[[range], Iterable[int]] = iter,
) -> list[DeltaErrorRow]:
    """Decode tokens one by one, in all ways side by side; errors early, after a 16th of them, and at their end."""
    ends = (tokens // 16, tokens)
    drawn, simulation = Tokens(device), Simulation(ways, device)
    exact = torch.zeros(1, HEADS, ROWS, COLS, dtype=torch.float64, device=device)
    sums = {end: [SquareSums(len(ways), device) for _ in range(2)] for end in ends}  # of states, outputs
    with one_thread():
        for count in tracked(range(1, tokens + 1)):
            token = drawn.token()
            y, exact = gated_delta_token(exact, **token, **OPTIONS)
            got = simulation.step(token)
            for end, (states, outputs) in sums.items():
                if end - end // SHARE < count <= end:
                    outputs.add(got, y)
                    if count % STATE_EVERY == 0:
                        states.add(simulation.states, exact)
    errors = {end: [dict(zip(simulation.ways, total.errors(), strict=True)) for total in sums[end]] for end in ends}
    return [
        DeltaErrorRow(way.format, way.rounding, way.u, *group, end, *(of_ways[way][index] for of_ways in errors[end]))
        for way in ways
        for end in ends
        for index, group in enumerate(GROUPS)
    ]
