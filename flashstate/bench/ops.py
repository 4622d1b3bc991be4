"""The ops that can be benchmarked: all that have cases, and the span of two of them."""

from flashstate.bench.conv1d import CONV1D
from flashstate.bench.gated_delta import GATED_DELTA
from flashstate.bench.gated_delta_replay import GATED_DELTA_REPLAY
from flashstate.bench.jobs import BenchedOp, benched
from flashstate.bench.mamba2 import MAMBA2
from flashstate.bench.mamba2_replay import MAMBA2_REPLAY
from flashstate.bench.mamba3 import MAMBA3
from flashstate.bench.span import SPAN
from flashstate.proof import CASES

SPECIAL = (MAMBA2, MAMBA2_REPLAY, GATED_DELTA, GATED_DELTA_REPLAY, MAMBA3, CONV1D)
OPS: dict[str, BenchedOp] = {op.name: op for op in (*map(benched, CASES), *SPECIAL)} | {"span": SPAN}
