"""What warmup would have compiled, for tests of it."""

from collections.abc import Hashable, Iterator, Sequence

import pytest
from compiling import collected

from flashstate.launch.start import Launch
from flashstate.launch.variants import variant_key


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """The variants that warmup would have compiled: here there is nothing to compile them for."""
    variants: list[Launch] = []
    monkeypatch.setattr("flashstate.warmup.compile_variants", lambda found, progress: variants.extend(found))
    with collected(90) as launched:
        yield variants
        assert not launched, "warmup launched something"


def keys_of(launches: Sequence[Launch]) -> set[Hashable]:
    return set(map(variant_key, launches))
