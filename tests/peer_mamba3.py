"""The mamba3_step_fn of mamba_ssm: calls in every mode and form that its contract has."""

import models_of_peers as models
import torch
from models_of_peers import Arguments
from peer_calls import BRAIN, DIM, DSTATE, FLOAT, HALF, HEADS, SLOTS, Adapter, Random, in_turn

from flashstate.compat import mamba_ssm


def mamba3_arguments(
    device: torch.device,
    batch: int = 3,
    rank: int = 4,
    groups: int = HEADS,
    state_dtype: torch.dtype = FLOAT,
    x_dtype: torch.dtype = FLOAT,
    kv_dtype: torch.dtype = FLOAT,
    weights_dtype: torch.dtype = FLOAT,
    elsewhere: bool = False,
) -> Arguments:
    """The arguments of mamba3_step_fn, but for outputs and slots.

    x_dtype: of x, z, B and C. kv_dtype: of Bstate and Xstate. weights_dtype: of A, dt, trap, D and the projections.
    elsewhere: states go to a state_out that has something in it.
    """
    random = Random(device, batch + rank)
    arguments = {
        "state": random.normal(SLOTS, HEADS, DIM, DSTATE, dtype=state_dtype),
        "Bstate": random.normal(SLOTS, rank, HEADS, DSTATE, dtype=kv_dtype),
        "Xstate": random.normal(SLOTS, HEADS, DIM, dtype=kv_dtype),
        "A": -random.uniform(batch, HEADS, dtype=weights_dtype),
        "B": random.normal(batch, rank, groups, DSTATE, dtype=x_dtype),
        "C": random.normal(batch, rank, groups, DSTATE, dtype=x_dtype),
        "D": random.normal(HEADS, dtype=weights_dtype),
        "x": random.normal(batch, HEADS, DIM, dtype=x_dtype),
        "dt": random.uniform(batch, HEADS, dtype=weights_dtype),
        "trap": random.uniform(batch, HEADS, dtype=weights_dtype),
        "z": random.normal(batch, HEADS, DIM, dtype=x_dtype),
        **{name: random.normal(rank, HEADS, DIM, dtype=weights_dtype) for name in ("xproj", "zproj", "outproj")},
    }
    return {**arguments, "state_out": torch.full_like(arguments["state"], 7.0)} if elsewhere else arguments


PADDED = {"state_batch_indices": [12, -1, 9], "update_kv_state": True}
MAMBA3 = Adapter(
    mamba_ssm.mamba3_step_fn,
    "state, Bstate, Xstate, A, B, C, D, x, dt, trap, xproj, outproj=None, state_out=None, out=None, z=None, "
    "zproj=None, tile_D=64, num_warps=2, state_batch_indices=None, update_kv_state=False",
    model=models.mamba3, make=mamba3_arguments, pools=dict.fromkeys(("state", "Bstate", "Xstate", "state_out"), ""),
    tokens=("x", "A", "B", "C", "dt", "trap", "z"),
    calls=in_turn(
        {
            "in order": {},
            "padded, elsewhere": {**PADDED, "elsewhere": True},
            "in order, per rank": {"outproj": None},
            "padded, per rank": {**PADDED, "outproj": None, "given": True},
            "no gate": {"z": None, "zproj": None, "given": True},
            "no xproj, no D, elsewhere": {
                **PADDED, "xproj": None, "D": None, "elsewhere": True, "indices": torch.int64,
            },
        },
        {"rank 4": {}, "rank 1": {"rank": 1}, "2 groups": {"rank": 2, "groups": 2}, "1 group": {"groups": 1}},
        {
            "": {},
            "a bfloat16 model": {"x_dtype": BRAIN, "kv_dtype": BRAIN},
            "a float16 state": {"state_dtype": HALF, "x_dtype": BRAIN, "weights_dtype": HALF},
            "k and v wider than tokens": {"x_dtype": HALF},
            "k and v narrower than tokens": {"kv_dtype": BRAIN},
        },
    ),
    edges={
        "no zproj": {"zproj": None},
        "no projections": {"xproj": None, "zproj": None, "outproj": None},
        "padding alone, elsewhere": {"state_batch_indices": [-1, -2, -1], "elsewhere": True},
        "a slot past the pool": {"state_batch_indices": [12, SLOTS, 0], "fault": f"read slot {SLOTS}"},
        "no rows": {"batch": 0, "elsewhere": True, "update_kv_state": True},
        "no rows, indexed": {"batch": 0, "state_batch_indices": [], "elsewhere": True},
    },
)  # fmt: skip
