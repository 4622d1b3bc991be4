"""The cases of every op, one file each: inputs, what they move, and tables of them. Each registers itself in CASES."""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
