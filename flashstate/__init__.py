"""Step the recurrent state of state-space and linear-attention language models while they generate.

Importing the package does not import torch: all public names are loaded when the first of them is asked for, so that
the command line answers `--version`, `--help` and typos at once.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from flashstate.public import *  # noqa: F403
    from flashstate.public import __all__ as __all__
else:

    def __getattr__(name: str) -> typing.Any:
        """Load all public names."""
        if not name.startswith("__") or name == "__all__":  # tools ask every module for names with underscores
            public = importlib.import_module("flashstate.public")
            globals().update({known: getattr(public, known) for known in ("__all__", *public.__all__)})
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
