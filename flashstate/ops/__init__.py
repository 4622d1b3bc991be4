"""The doors: one file per op, with its signature, its docstring, its checks and its launch."""
