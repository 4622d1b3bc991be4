"""Transformers; a test file that imports this is skipped where it is missing or too old, as on machines with a GPU."""

import re
from importlib import import_module

import pytest
from conftest import lacks_transformers

if reason := lacks_transformers():
    pytest.skip(reason, allow_module_level=True)
transformers = import_module("transformers")
VERSION = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2]))
