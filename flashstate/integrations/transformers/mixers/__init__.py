"""Kinds of mixers: each runs the mixers of one recurrence, whatever model they are in."""

from flashstate.integrations.transformers.mixers.delta import GATED_DELTA, KDA
from flashstate.integrations.transformers.mixers.kind import Kind
from flashstate.integrations.transformers.mixers.mamba1 import MAMBA1
from flashstate.integrations.transformers.mixers.mamba2 import MAMBA2
from flashstate.integrations.transformers.mixers.short_conv import SHORT_CONV

KINDS: dict[str, Kind] = {
    "mamba1": MAMBA1,
    "mamba2": MAMBA2,
    "delta": GATED_DELTA,
    "kda": KDA,
    "short_conv": SHORT_CONV,
}
