"""What tests of races share: how often they launch, and a GPU that has something else to do meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

LAUNCHES = 200


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
