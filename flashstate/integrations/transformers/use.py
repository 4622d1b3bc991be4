"""Guards of a StateCache and of an enabled model: one call at a time, none after a failed one, and no pickling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from pickle import PicklingError
from threading import RLock
from types import MethodType
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

T = TypeVar("T")
CACHES: WeakKeyDictionary[nn.Module, WeakSet[Any]] = WeakKeyDictionary()  # StateCaches of enabled models


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


def like(module: Any) -> Any:
    """Return an empty module of the same class, for a copy. The copy of a model has its CACHES: a copy that is disabled
    may still be given one of them."""
    new = object.__new__(type(module))
    if module in CACHES:
        CACHES[new] = CACHES[module]
    return new


class Shallow:
    """Reduction of a module with a forward of flashstate: copy.copy calls it and has a shallow copy; pickle dumps it
    and is refused, since the module could be dumped but not loaded."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self) -> Any:
        """Return a module with the same attributes, whose own methods are bound to it."""
        new = like(self.module)
        for name, value in self.module.__getstate__().items():
            own = isinstance(value, MethodType) and value.__self__ is self.module
            vars(new)[name] = MethodType(value.__func__, new) if own else value
        return new

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        name = type(self.module).__name__
        raise PicklingError(f"this {name} decodes on flashstate: disable(model) before it is pickled")


def reduced(module: Any, protocol: Any) -> tuple[Shallow, tuple[()]]:
    """Stand in for `__reduce_ex__` of a module with a forward of flashstate."""
    return Shallow(module), ()


def copied(module: Any, memo: dict[int, Any]) -> Any:
    """Copy a module and its attributes, as copy.deepcopy does without `__reduce_ex__`: not what it was compiled to."""
    memo[id(module)] = new = like(module)
    vars(new).update(deepcopy(module.__getstate__(), memo))
    return new
