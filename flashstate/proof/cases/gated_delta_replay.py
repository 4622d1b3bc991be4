"""The cases of gated_delta_replay: a checkpoint and a ring, what calls must give, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashstate.launch import Problem
from flashstate.ops.gated_delta_fold import gated_delta_fold
from flashstate.ops.gated_delta_replay import GATED_DELTA_REPLAY, DeltaReplayProblem, replay_kind
from flashstate.proof.case import CASES, Cases, by_turns, in_every_format
from flashstate.proof.cases.gated_delta import GATED_DELTA, DeltaCase
from flashstate.proof.inputs import Source, dtype
from flashstate.proof.oracle import two_terms
from flashstate.proof.replaying import AnyReplayCase, ProvenReplay, ReplayInputs, ReplayPool, Token
from flashstate.reference.gated_delta import gated_delta_token, log_decay
from flashstate.reference.gated_delta_replay import as_kept, replayed
from flashstate.reference.mamba2 import softplus
from flashstate.state.formats import PORTABLE_FORMATS
from flashstate.state.ring import DeltaRing


@dataclass(frozen=True, eq=False, kw_only=True)
class DeltaReplayPool(ReplayPool):
    """The checkpoints and the rings of a layer of the delta rule, side by side."""

    k: Tensor  # of the ring, as the two after it
    u: Tensor
    decay: Tensor
    kind: ClassVar = DeltaRing


def _takes_terms(ring: DeltaRing, s: Tensor) -> bool:
    """Whether plain arithmetic has operands of two terms, as tensor cores take them for k of 16 bits."""
    return s.dtype == torch.float32 and ring.k.dtype != torch.float32


def _after(ring: DeltaRing, s: Tensor, *rows: Any, **parameters: Any) -> Tensor:
    """States after live rows of rings; what these add to them may be sums of operands of two terms."""
    after = replayed(ring, s, *rows, **parameters)
    if not _takes_terms(ring, s):
        return after
    added = replayed(ring, torch.zeros_like(s), *rows, **parameters)
    return after + (two_terms(added) - added)


def _stepped(inputs: ReplayInputs, s: Tensor, token: dict[str, Any]) -> Token:
    """One token. u is rounded as the ring keeps it before plain arithmetic uses it."""
    ring, made = inputs.state.ring, list[Tensor]()

    def kept(u: Tensor) -> Tensor:
        made.append(u if s.dtype == torch.float64 else as_kept(u, ring.u.dtype))
        return made[0]

    terms: dict[str, Any] = {"operand": two_terms} if _takes_terms(ring, s) else {}
    y, after = gated_delta_token(s, **token, **terms, kept=kept)
    decay = token["a"]
    if not ring.per_channel:
        decay = log_decay(decay.to(s.dtype)[..., None], token["A_log"], token["dt_bias"])[..., 0]
    return Token(y, after, {"k": token["k"], "u": made[0], "decay": decay})


DELTA_REPLAY = ProvenReplay.over(
    GATED_DELTA, declared=GATED_DELTA_REPLAY, fold=gated_delta_fold, parameters=("A_log", "dt_bias", "qk_l2norm"),
    after=_after, stepped=_stepped, measured=("u", "decay"), summed=("u",), from_stored=True,
)  # fmt: skip


@dataclass(frozen=True)
class DeltaReplayCase(AnyReplayCase, DeltaCase):
    """One problem for gated_delta_replay: one for gated_delta_step, with a window, and the form of the call."""

    heads: int = 2
    key_heads: int = 1
    u: str = "float16"  # dtype of u in the ring
    bias_per_head: bool = False  # dt_bias has one value for a head, whatever a has
    pool: ClassVar = DeltaReplayPool

    @property
    def kind(self) -> tuple[Callable[..., Problem], str]:
        name, kind = replay_kind(self.per_channel, self.tokens, self.window)
        made: Callable[..., Problem] = DeltaReplayProblem
        return partial(made, **kind), f"{name} either"

    @property
    def op(self) -> ProvenReplay:
        """A ring keeps a per channel as it comes."""
        return replace(DELTA_REPLAY, measured=("u",)) if self.per_channel else DELTA_REPLAY

    def same_when_packed(self, tokens: int) -> bool:
        """With a decay per channel, a call of one token sums the product of its k and q in an order of its own."""
        return super().same_when_packed(tokens) and not (self.per_channel and tokens == 1)

    def is_whole(self, name: str) -> bool:
        return super().is_whole(name) and not (name == "dt_bias" and self.bias_per_head)

    @property
    def kept_bytes(self) -> int:
        kept = self.key_heads * self.cols * dtype(self.qk).itemsize + self.heads * self.rows * dtype(self.u).itemsize
        return kept + self.heads * (self.cols * dtype(self.gates).itemsize if self.per_channel else 4)

    def slow_down(self, arguments: dict[str, Any]) -> None:
        if self.raw:
            arguments["A_log"] -= 1
        else:
            arguments["a"] *= self.slowness

    @property
    def slowness(self) -> float:
        """What logarithms of decays are multiplied with where no A_log slows them down."""
        return min(1.0, 2 / self.window)

    def kept_tokens(self, source: Source, length: int) -> Mapping[str, Tensor]:
        k = source.normal(self.slots, self.key_heads, length, self.cols, name=self.qk)
        u = source.normal(self.slots, self.heads, length, self.rows, name=self.u)
        channels = (self.cols,) if self.per_channel else ()
        a = source.normal(self.slots, self.heads, length, *channels, name=self.gates if channels else "float32")
        if not (self.raw and self.per_channel):
            a = -softplus(a.float() - 2).mul(8 * self.slowness).to(a.dtype)
        return {"k": k if self.qk_l2norm else k * self.cols**-0.5, "u": u, "decay": a}


_SHAPES = {
    "one token": (
        DeltaReplayCase(4, 2, 1, 5, 20, x="float16", qk="float16", index="int64", window=8),
        DeltaReplayCase(4, 2, 2, 17, 16, u="float32", spare=5),
        DeltaReplayCase(2, 1, 1, 1, 1, qk="float16", dt_bias=False, slots=3, window=1),
        DeltaReplayCase(3, 4, 1, 3, 40, x="float16", gates="float16", raw=False, u="float32", window=20),
    ),
    "several tokens": (
        DeltaReplayCase(4, 2, 1, 16, 16, tokens=4, qk="float16", window=8),
        DeltaReplayCase(4, 1, 1, 4, 33, tokens=5, x="float16", u="float32", b_logit=False, index="int64", window=20),
        DeltaReplayCase(3, 2, 2, 5, 8, tokens=8, qk="float16", qk_l2norm=False, scale=0.3, window=8, spare=1),
        DeltaReplayCase(2, 1, 1, 5, 16, tokens=9, x="float16", qk="float16", slots=3),
    ),
    "packed tokens": (
        DeltaReplayCase(4, 1, 1, 3, 96, tokens=2, packed=True, x="float16", qk="float16", parameters="float16"),
        DeltaReplayCase(4, 2, 1, 5, 16, tokens=3, packed=True, raw=False, b_logit=True, u="float32", window=8),
    ),
    "KDA": (
        DeltaReplayCase(4, 2, 2, 9, 7, per_channel=True, gates="float16", parameters="float16", window=8),
        DeltaReplayCase(3, 2, 1, 17, 40, per_channel=True, qk="float16", dt_bias=False, u="float32", index="int64"),
        DeltaReplayCase(3, 1, 1, 5, 20, per_channel=True, raw=False, x="float16", qk="float16", window=8, spare=2),
    ),
    "KDA, several tokens": (
        DeltaReplayCase(4, 1, 1, 16, 16, per_channel=True, bias_per_head=True, tokens=4, qk="float16", window=8),
        DeltaReplayCase(4, 2, 2, 5, 24, per_channel=True, raw=False, tokens=3, packed=True, u="float32", window=6),
        DeltaReplayCase(2, 1, 1, 3, 16, per_channel=True, tokens=9, qk="float16", slots=3),
    ),
    "a long window": (
        DeltaReplayCase(3, 1, 1, 16, 16, x="float16", qk="float16", window=64),
        DeltaReplayCase(3, 1, 1, 16, 20, tokens=6, u="float32", window=64, spare=2),
        DeltaReplayCase(4, 1, 1, 3, 16, tokens=3, packed=True, per_channel=True, qk="float16", window=33),
    ),
}

_HALF = DeltaReplayCase(4, 64, 16, 128, 128, x="bfloat16", qk="bfloat16", gates="bfloat16", slots=9)
_KDA = replace(_HALF, heads=16, key_heads=16, per_channel=True)
# Shapes of real models: one token in every format, other forms in some, by turns.
_REAL_SHAPES = (
    replace(_HALF, batch=40, tokens=4, slots=44),  # so large that two kernels share the rows of a plan
    replace(_HALF, batch=20, heads=32, tokens=8, slots=24, index="int64"),
    replace(_HALF, batch=3, heads=8, key_heads=4, tokens=64, window=64),
    replace(_HALF, batch=36, window=64, slots=40, spare=3),
    replace(_HALF, batch=5, heads=32, tokens=6, packed=True, index="int64"),
    replace(_KDA, batch=6),
    replace(_KDA, batch=20, tokens=4, slots=24),
    replace(_KDA, batch=5, heads=32, key_heads=32, tokens=16, packed=True, window=33),
)
# Shapes of none, mixed dtypes, options.
_ODD_REAL_SHAPES = (
    DeltaReplayCase(5, 12, 4, 96, 64, x="float16", qk="float16", qk_l2norm=False, scale=0.125, tokens=3, slots=9),
    DeltaReplayCase(4, 4, 2, 256, 256, x="bfloat16", qk="bfloat16", parameters="bfloat16", window=8),
    DeltaReplayCase(7, 3, 1, 33, 20, x="bfloat16", gates="float16", raw=False, tokens=2, packed=True, slots=12),
    DeltaReplayCase(
        4, 8, 8, 64, 128, qk="bfloat16", per_channel=True, dt_bias=False, tokens=8, u="bfloat16", window=20
    ),
    DeltaReplayCase(4, 2, 1, 256, 256, per_channel=True, raw=False, tokens=5, u="float32", window=8),
    DeltaReplayCase(6, 4, 1, 33, 20, x="float16", qk="bfloat16", per_channel=True, bias_per_head=True, spare=7),
    DeltaReplayCase(5, 4, 2, 64, 64, tokens=16, packed=True, u="float32", window=33),
    DeltaReplayCase(4, 6, 2, 48, 16, x="bfloat16", qk="float16", dt_bias=False, u="bfloat16", window=1),
)
_REAL = (
    *by_turns((_HALF,), PORTABLE_FORMATS, len(PORTABLE_FORMATS)),
    *by_turns(_REAL_SHAPES, PORTABLE_FORMATS, 3),
    *by_turns(_ODD_REAL_SHAPES, PORTABLE_FORMATS, 2),
)
CASES["gated_delta_replay"] = Cases(in_every_format(_SHAPES), _REAL)
