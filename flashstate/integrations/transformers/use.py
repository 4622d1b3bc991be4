"""Guards of a StateCache and of an enabled model: one call at a time, none after a failed one, and no pickling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pickle import PicklingError
from threading import RLock
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class Use:
    """Guard of a StateCache: one thread at a time, and no call after one that failed half way. As a context, it guards
    a call of the model, and the calls of models inside it."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.depth = 0  # calls under way, of models inside each other
        self.begun = False  # whether a layer has had the tokens of the latest call
        self.torn = False  # whether some layers have had tokens that others have not

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads out; RuntimeError if one is in."""
        self.enter()
        try:
            yield
        finally:
            self.lock.release()

    def enter(self) -> None:
        """Take the lock; RuntimeError if another thread has it."""
        if not self.lock.acquire(blocking=False):
            raise RuntimeError("this StateCache is in use by another call")

    def __enter__(self) -> bool:
        """Take the lock; return whether the call is inside no other."""
        self.enter()
        if self.depth == 0:
            try:
                self.check()
            except RuntimeError:
                self.lock.release()
                raise
            self.begun = False
        self.depth += 1
        return self.depth == 1

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.depth -= 1
        self.torn |= kind is not None and self.begun
        self.lock.release()

    def check(self) -> None:
        """Raise if a call failed half way."""
        if self.torn:
            words = "some layers have had tokens that others have not"
            raise RuntimeError(f"a call with this StateCache failed half way, so {words}: reset() it")


def alone(method: Callable[..., T]) -> Callable[..., T]:
    """Keep other threads out of a StateCache while one of its methods runs."""

    @wraps(method)
    def guarded(cache: Any, *args: Any, **kwargs: Any) -> T:
        with cache.use.alone():
            return method(cache, *args, **kwargs)

    return guarded


def refuse_pickle(model: Any, protocol: Any) -> NoReturn:
    """Stand in for `__reduce_ex__` of a module with a forward of flashstate, which could be dumped but not loaded."""
    raise PicklingError(f"this {type(model).__name__} decodes on flashstate: disable(model) before it is pickled")
