"""What the disassembler that comes with Triton says of compiled kernels."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any


def resource_usage(kernel: Any) -> str:
    """The registers, the stack and the memory that a kernel takes on NVIDIA, in the words of cuobjdump."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(kernel.asm["cubin"])
        binary.flush()
        command = [str(cuobjdump), "--dump-resource-usage", binary.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
