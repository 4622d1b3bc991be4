"""Mutants: edits of the library with one mistake each, and the tests that find them; `python -m tools.mutants`."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mistake as an edit of a file, and the test that fails with it.

    `killed_by` is what pytest is given below tests/ ("test_pool.py -k words", or the id of a test), after "compiled: "
    where the test needs TRITON_INTERPRET unset; or laws, on the reference or on the interpreted kernels, in meetings
    that the suite has at seed 0, of a law, of an op, or of both: "reference: first words of the law | mamba2_step",
    "kernels: first words", "kernels: | conv1d_step". On a GPU, where kernels are compiled, also a law and a case:
    "kernels: first words | Case(batch=3, format='float16')".
    """

    what: str  # is wrong
    where: str  # path below flashstate/
    old: str  # text that is there once
    new: str
    killed_by: str
    gpu: bool = False  # found by a GPU only
