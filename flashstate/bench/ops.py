"""The ops that can be benchmarked."""

from flashstate.bench.conv1d import CONV1D
from flashstate.bench.gated_delta import GATED_DELTA
from flashstate.bench.jobs import BenchedOp
from flashstate.bench.mamba2 import MAMBA2
from flashstate.bench.mamba2_replay import MAMBA2_REPLAY
from flashstate.bench.mamba3 import MAMBA3
from flashstate.bench.span import SPAN

OPS: dict[str, BenchedOp] = {
    "mamba2": MAMBA2,
    "mamba2_replay": MAMBA2_REPLAY,
    "gated_delta": GATED_DELTA,
    "mamba3": MAMBA3,
    "conv1d": CONV1D,
    "span": SPAN,
}
