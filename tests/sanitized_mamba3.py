"""Calls of mamba3_step on a GPU, for compute-sanitizer to watch: ranks 1, 2 and 4, one token and several, dense and
packed, plain and turned, one tile and two, a padding row."""

import torch

from flashstate.proof import Mamba3Case, make_inputs

CASES = (
    Mamba3Case(3, 2, 1, 64, 128, rank=4, angles=32, x="bfloat16", bc="bfloat16", kv="bfloat16"),
    Mamba3Case(3, 2, 1, 64, 128, rank=4, angles=0, x="bfloat16", bc="bfloat16", kv="bfloat16", format="bfloat16"),
    Mamba3Case(3, 2, 2, 40, 48, rank=1, angles=24, tokens=2),
    Mamba3Case(3, 2, 1, 80, 64, rank=2, angles=20, tokens=3, packed=True, format="int8", rounding="stochastic"),
)


def main() -> None:
    for case in CASES:
        inputs = make_inputs(case, torch.device("cuda"))
        inputs.slots[0] = -1
        inputs.step()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
