"""vLLM on flashstate: a plugin that `mamba_backend="flashstate"` selects. docs/vllm.md says what it serves.

vLLM is imported when vLLM calls `register`, never before.
"""

from __future__ import annotations


def register() -> None:
    """Let vLLM choose flashstate. vLLM calls this itself, in each of its processes, and may call it again.

    Nothing changes for a model whose `mamba_backend` is another one.
    """
    from flashstate.integrations.vllm import upstream

    upstream.install()
