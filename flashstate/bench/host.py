"""What starting a step costs the host: the time of eager calls that nobody waits for. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from flashstate.bench.binding import IN_PLACE, Binding
from flashstate.bench.jobs import BenchedOp
from flashstate.bench.measure import Report, check, inputs_of
from flashstate.bench.timing import Timing, seconds_of
from flashstate.state.slots import Slots

UNIT = "torch.add_"  # what others are compared with: about the least that a call of torch with one kernel costs
CHUNK = 200  # calls between two waits: few enough that the queue of launches never fills and makes the host wait
CHUNKS = 25
Costs = dict[str, Timing]


def host_costs(op: BenchedOp, peers: Mapping[str, Binding], device: torch.device, report: Report) -> Costs:
    """Microseconds of the host per call: of torch.add_, of flashstate, and of every peer. flashstate is given a State
    and Slots that were made before, and plain tensors. MeasurementError where it is wrong."""
    with torch.cuda.device(device):
        inputs = inputs_of(op.host_case, device)

        def checked_cost(bind: Binding) -> Timing:
            (op.check or check)(bind, inputs, IN_PLACE)
            return cost_of(bind(inputs.fresh(), IN_PLACE)(Slots(inputs.slots)))

        small, other = torch.zeros(2, 64, device=device)
        costs = {
            UNIT: cost_of(partial(small.add_, other)),
            "flashstate": checked_cost(op.bind),
            "flashstate, plain tensors": checked_cost(partial(op.bind, bare=True)),
        }
        for name, bind in peers.items():
            with report.skipping(name):
                costs[name] = checked_cost(bind)
    return costs


def cost_of(call: Callable[[], object]) -> Timing:
    """Microseconds per call, over chunks that begin with an empty queue, after one that is not counted."""
    times = []
    for _ in range(1 + CHUNKS):
        torch.cuda.synchronize()
        times.append(seconds_of(call, CHUNK) / CHUNK * 1e6)
    torch.cuda.synchronize()
    return Timing.of(times[1:])


def host_line(costs: Mapping[str, Timing]) -> str:
    """All costs in one line, with their ratios to torch.add_."""
    unit, *others = ((name, cost.median) for name, cost in costs.items())
    compared = [f"{name} {median:.1f} µs ({median / unit[1]:.2f}x)" for name, median in others]
    return "; ".join([f"{unit[0]} {unit[1]:.1f} µs", *compared])


def host_table(costs: Mapping[str, Timing], op: BenchedOp) -> Table:
    """A line per implementation."""
    case = op.host_case
    shape = f"batch {case.batch}, {' x '.join(map(str, case.state_axes))}"
    numbers = (Column(name, justify="right") for name in ("µs per call", "spread", f"of {UNIT}"))
    table = Table("call", *numbers, title=f"host cost, {shape}", title_justify="left", box=SIMPLE_HEAD)
    for name, cost in costs.items():
        ratio = cost.median / costs[UNIT].median
        table.add_row(name, f"{cost.median:.2f}", f"{cost.spread:.1%}", f"{ratio:.2f}x")
    return table
