"""warmup of pools with rings: what it compiles is what later steps by replay need."""

from collections.abc import Sequence

import pytest
import torch
from compiling import collected
from torch import Tensor
from warming import compiled, keys_of

import flashstate
from flashstate import StatePool
from flashstate.launch.start import Launch
from flashstate.launch.variants import variant_key
from flashstate.proof import dtype

__all__ = ["compiled"]  # a fixture
HEADS, GROUPS, ROWS, COLS = 16, 2, 64, 128
BATCHES, TOKENS = (1, 3, 33, 300), (1, 4)  # 300 x 16 heads have a kernel for rows that fold and one for others


def make_pool(name: str, rounding: str) -> StatePool:
    sizes = {"slots": 301, "layers": 2, "heads": HEADS, "rows": ROWS, "cols": COLS}
    ring = {"window": 16, "tokens": max(TOKENS), "groups": GROUPS}
    return StatePool.mamba2(**sizes, **ring, dtype=dtype(name), rounding=rounding, seed=0)


def serve(pool: StatePool, batch: int, tokens: int, leave_out: Sequence[str] = ()) -> None:
    """What a server does in one model step, when requests end, and with states that a prefill left."""
    leading = (batch,) if tokens == 1 else (batch, tokens)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*leading, *sizes).bfloat16()

    per_head = torch.randn(HEADS)
    options = {"D": per_head, "z": normal(HEADS, ROWS), "dt_bias": per_head.clone()}
    options = {name: tensor for name, tensor in options.items() if name not in leave_out}
    slots = torch.randperm(pool.slots)[:batch]
    plan = pool.plan(slots, tokens)
    for i in range(pool.layers):
        x, dt, B, C = normal(HEADS, ROWS), normal(HEADS), normal(GROUPS, COLS), normal(GROUPS, COLS)
        flashstate.mamba2_replay(pool.layer(i), pool.ring(i), x, dt, -per_head.abs(), B, C, plan=plan, **options)
    pool.commit(plan, torch.zeros(batch, dtype=torch.int64))
    pool.commit(plan)
    pool.advance(slots)
    for i in range(pool.layers):
        flashstate.mamba2_fold(pool.layer(i), pool.ring(i), -per_head.abs(), slots=slots)
    pool.folded(slots)


@pytest.mark.compiled
@pytest.mark.parametrize("leave_out", [(), ("z",), ("D", "dt_bias")], ids=str)
@pytest.mark.parametrize(("name", "rounding"), [("float32", "nearest"), ("int8", "stochastic")])
def test_every_variant_of_later_steps_by_replay_was_compiled(
    name: str, rounding: str, leave_out: Sequence[str], compiled: list[Launch]
) -> None:
    pool = make_pool(name, rounding)
    told = {option: option not in leave_out for option in ("D", "z", "dt_bias")}
    counts = flashstate.warmup(pool, BATCHES, tokens=TOKENS, groups=GROUPS, progress=False, **told)
    assert sum(counts.values()) == len(compiled) == len(keys_of(compiled))
    assert "mamba2_step" not in counts
    with collected(90) as later:
        for batch in BATCHES:
            for tokens in TOKENS:
                serve(pool, batch, tokens, leave_out)
    missing = keys_of(later) - keys_of(compiled)
    assert not missing
    in_vain = {launch.kernel.__name__ for launch in compiled if variant_key(launch) not in keys_of(later)}
    assert in_vain <= {"write_states_kernel", "read_states_kernel"}  # which serve() does not start
