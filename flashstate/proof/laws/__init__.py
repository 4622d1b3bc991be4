"""The laws every op obeys, as functions of a case and a device. tests/ and `flashstate check` run the same ones."""

from flashstate.proof.laws import (  # each adds its laws to LAWS, or to REPLAY_LAWS
    replay,
    replay_calls,
    seeds,
    steps,
    tokens,
)
from flashstate.proof.laws.registry import LAWS, REPLAY_LAWS, SCOPES, Law, LawBroken, laws_for, pairs

__all__ = [
    "LAWS", "REPLAY_LAWS", "SCOPES", "Law", "LawBroken", "laws_for", "pairs", "replay", "replay_calls", "seeds",
    "steps", "tokens",
]  # fmt: skip
