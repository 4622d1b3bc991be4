"""Cases of every op that is registered: what they count, and how they are told."""

import pytest
import torch
from torch import Tensor

from flashstate.proof import CASES, AnyCase, Inputs, ReplayInputs, make_inputs, slotted

CPU = torch.device("cpu")
EVERY_OP = pytest.mark.parametrize("op", CASES)


def moved(case: AnyCase, inputs: Inputs) -> tuple[int, int]:
    """Bytes of the pool that a call reads, and that it stores once: of a ring live and new rows, and the cursors."""
    slots, pool = inputs.slots.long(), inputs.state
    states = {name: tensor[slots].nbytes for name, tensor in slotted(pool).items()}
    if not isinstance(inputs, ReplayInputs):
        return sum(states.values()), sum(size for name, size in states.items() if name not in inputs.op.left_alone)
    rows = int(pool.count[slots][inputs.tokens > 0].sum()) + sum(case.lengths)
    of_row = sum(tensor[0].transpose(0, 1)[0].nbytes for tensor in pool.kept.values())
    state = states["data"] + states.get("scale", 0)
    read = state + rows * of_row + states["start"] + states["count"]
    return read, state // case.batch * int(inputs.folds.sum())


@EVERY_OP
def test_counted_bytes_are_those_of_all_tensors_of_a_call(op: str) -> None:
    for case in list(dict.fromkeys(CASES[op].odd))[::5]:
        inputs, tokens = make_inputs(case, CPU), sum(case.lengths)
        read, stored = moved(case, inputs)
        assert case.slot_bytes == inputs.state.data[0].nbytes
        y = inputs.step()
        used = {name: t[:tokens] if case.packed else t for name, t in {**inputs.activations, "y": y}.items()}
        given = {**inputs.arguments, **used, "slots": inputs.slots}
        others = sum(t.nbytes for t in given.values() if isinstance(t, Tensor))
        others += 8 * case.batch if case.rounding == "stochastic" else 0  # seeds
        for stores in (0, 1, 3):
            assert case.counted_bytes(stores) == read + stores * stored + others, case
