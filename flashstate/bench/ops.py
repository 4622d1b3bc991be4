"""The ops that can be benchmarked."""

from flashstate.bench.jobs import BenchedOp
from flashstate.bench.mamba2 import MAMBA2

OPS: dict[str, BenchedOp] = {"mamba2": MAMBA2}
