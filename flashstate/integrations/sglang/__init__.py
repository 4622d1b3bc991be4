"""flashstate inside SGLang: a plugin that its servers load, and that does nothing until a flag chooses it."""

from flashstate.integrations.sglang.plugin import register

__all__ = ["register"]
