"""The sticky fault flag: kernels cannot raise, so they leave a note that the host reads when it likes."""

import torch
from torch import Tensor

KINDS = ("read", "write")  # element i of a flag is an offending slot of that kind; 0, always in range, means none
_flags: dict[torch.device, Tensor] = {}


def fault_flag(device: torch.device) -> Tensor:
    """The flag of a device, int64 (2,), made at its first use."""
    flag = _flags.get(device)
    if flag is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "flashstate met this device for the first time inside a CUDA graph capture: "
                "run the op once before capturing, as any CUDA graph needs"
            )
        with torch.inference_mode(False):  # else only inference mode could clear it
            flag = _flags[device] = torch.zeros(len(KINDS), dtype=torch.int64, device=device)
    return flag


def check_faults() -> None:
    """Raise IndexError if any op since the last check met a slot outside its pool. Waits for every device used.

    Such rows were treated as padding (read) or not written (write), so no memory was harmed. The flag is cleared.
    """
    found = []
    for device, flag in _flags.items():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found += [f"{kind} slot {slot} on {device}" for kind, slot in zip(KINDS, flag.tolist(), strict=True) if slot]
        flag.zero_()
    if found:
        raise IndexError(f"slots outside their pool: {', '.join(found)} (one example of each kind)")
