"""The implementations of an op that a test may ask for, as values of the fixture `device`."""

import pytest

KERNELS = (
    pytest.param("interpreter", marks=pytest.mark.interpreted),
    pytest.param("gpu", marks=pytest.mark.gpu),
)
ALL = ("reference", *KERNELS)
NO_INTERPRETER = ("reference", KERNELS[1])
