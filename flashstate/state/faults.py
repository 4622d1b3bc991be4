"""The sticky fault flag: kernels cannot raise, so they leave a note that the host reads when it likes."""

import torch
from torch import Tensor

# Element i of a flag is an offending number of that kind; 0, which never offends, means none.
KINDS = ("read", "write", "accepted", "snapshot row", "tokens to fold")
_flags: dict[torch.device, Tensor] = {}


def fault_flag(device: torch.device) -> Tensor:
    """The flag of a device, int64, made at its first use."""
    flag = _flags.get(device)
    if flag is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            remedy = "run the op once before capturing, as any CUDA graph needs"
            raise RuntimeError(f"flashstate met this device for the first time inside a CUDA graph capture: {remedy}")
        with torch.inference_mode(False):  # else only inference mode could clear it
            flag = _flags[device] = torch.zeros(len(KINDS), dtype=torch.int64, device=device)
    return flag


def check_faults() -> None:
    """Raise IndexError if any op since the last check met a number out of range. Waits for every device used.

    These are slots outside their pool, accepted counts above n, rows outside the snapshots, and tokens to fold that a
    ring does not have. Such rows were treated as padding (read, accepted), not written (write, snapshot row), or took
    the nearest number in range (accepted of `commit`, tokens to fold), so no memory was harmed. The flag is cleared.
    """
    found = []
    for device, flag in _flags.items():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        words = {"read": "read slot", "write": "write slot"}
        offending = zip(KINDS, flag.tolist(), strict=True)
        found += [f"{words.get(kind, kind)} {number} on {device}" for kind, number in offending if number]
        flag.zero_()
    if found:
        raise IndexError(f"out of range: {', '.join(found)} (one example of each kind)")
