"""The doors: an op a file, with its declaration, its launch problem and its constants."""

from flashstate.ops import rings, seeds  # which provide the actions of State and Ring

__all__ = ["rings", "seeds"]
