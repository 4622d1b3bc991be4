"""Mutants: edits of the library with one mistake each, and the tests that find them; `python -m tools.mutants`."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mistake as an edit of a file, and the test that fails with it.

    `killed_by` is what pytest is given below tests/ ("test_pool.py -k words", or the id of a test), after "compiled: "
    where the test needs TRITON_INTERPRET unset; or a law and a case, on the reference or on the interpreted kernels:
    "reference: first words of the law | Case(batch=3, format=float16)", "kernels: first words | Case()".
    """

    what: str  # is wrong
    where: str  # path below flashstate/
    old: str  # text that is there once
    new: str
    killed_by: str
    gpu: bool = False  # found by a GPU only
