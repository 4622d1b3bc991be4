"""What tests of races share: a GPU that has something else to do meanwhile, and launches that must all be alike."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from flashstate.proof import Inputs, slotted
from flashstate.proof.laws.require import restore
from flashstate.state.formats import bits_of

LAUNCHES = 200
Around = Callable[[], AbstractContextManager[None]]


@contextmanager
def busy() -> Iterator[None]:
    """The GPU multiplies matrices meanwhile, on a stream of its own."""
    stream, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2 * LAUNCHES):
            matrix = (matrix @ matrix).clamp(-1, 1)
    yield
    torch.cuda.synchronize()


def require_equal_launches(inputs: Inputs, launch: Callable[[Inputs], list[Tensor]], around: Around) -> None:
    """What a launch gives, and what it leaves in the pool, has the same bytes every time."""
    run = inputs.fresh()

    def results() -> list[Tensor]:
        restore(run.state, inputs.state)
        return [*launch(run), *slotted(run.state).values()]

    want = [tensor.clone() for tensor in results()]
    differs = torch.zeros((), dtype=torch.int64, device=inputs.slots.device)
    with around():
        for _ in range(LAUNCHES):
            differs += sum((bits_of(got) != bits_of(wanted)).sum() for got, wanted in zip(results(), want, strict=True))
    assert int(differs) == 0
