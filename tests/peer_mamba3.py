"""The mamba3_step_fn of mamba_ssm: calls in every mode and form that its contract has."""

import models_of_peers as models
import torch
from models_of_peers import Arguments
from peer_calls import DIM, DSTATE, HEADS, SLOTS, Calls, Door, Random, crossed

from flashstate.compat import mamba_ssm

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


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
    """What mamba3_step_fn has, but for outputs and slots.

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


READS: Calls = {
    "in order": {},
    "indexed": {"state_batch_indices": [12, 0, 9]},
    "a row of padding": {"state_batch_indices": [12, -1, 9]},
    "rows of padding": {"state_batch_indices": [-7, 3, -1]},
    "padding alone": {"state_batch_indices": [-1, -2, -1]},
    "a slot past the pool": {"state_batch_indices": [12, SLOTS, 0], "fault": f"read slot {SLOTS}"},
}
PLACES: Calls = {"here": {}, "elsewhere": {"elsewhere": True}}
UPDATES: Calls = {"": {}, "k and v too": {"update_kv_state": True}}
RANKS: Calls = {f"rank {rank}": {"rank": rank} for rank in (1, 4)}
SUMS: Calls = {"summed": {}, "per rank": {"outproj": None}}
OF_MAMBA3: Calls = {
    **crossed(READS, {"int32": {}, "int64": {"indices": torch.int64}}, PLACES, UPDATES, {"rank 2": {"rank": 2}}),
    **crossed(READS, RANKS, UPDATES),
    **crossed(
        {
            "all": {},
            "no zproj": {"zproj": None},
            "no gate": {"z": None, "zproj": None},
            "no outproj": {"outproj": None},
            "no outproj, no zproj": {"outproj": None, "zproj": None},
            "no outproj, no gate": {"outproj": None, "z": None, "zproj": None},
            "no xproj, no D": {"xproj": None, "D": None},
            "no projections": {"xproj": None, "zproj": None, "outproj": None},
        },
        {"in order": {}, "padded": {**READS["a row of padding"], "update_kv_state": True}},
        RANKS,
    ),
    **crossed(
        {f"{groups} groups": {"groups": groups, **READS["indexed"]} for groups in (1, 2, 4)},
        RANKS,
        {"": {"update_kv_state": True}},
    ),
    **crossed({"2 groups, padded": {"groups": 2, **READS["a row of padding"]}}, RANKS, SUMS, PLACES, UPDATES),
    **crossed(
        {
            "a bfloat16 model": {"x_dtype": BRAIN, "kv_dtype": BRAIN},
            "bfloat16 weights too": {"x_dtype": BRAIN, "kv_dtype": BRAIN, "weights_dtype": BRAIN},
            "a bfloat16 state": {"state_dtype": BRAIN, "x_dtype": BRAIN, "kv_dtype": BRAIN},
            "a float16 state": {"state_dtype": HALF, "x_dtype": BRAIN, "weights_dtype": HALF},
            "k and v wider than tokens": {"x_dtype": HALF},
            "k and v narrower than tokens": {"kv_dtype": BRAIN},
        },
        SUMS,
        PLACES,
        {"": {**READS["a row of padding"], "rank": 2, "update_kv_state": True}},
    ),
    **crossed({"out given": {**READS["a row of padding"], "given": True}}, SUMS, RANKS),
    **crossed({"no rows": {"batch": 0}}, {"": {}, "indexed": {"state_batch_indices": []}}, PLACES, UPDATES),
}

MAMBA3 = Door(
    mamba_ssm.mamba3_step_fn,
    "state, Bstate, Xstate, A, B, C, D, x, dt, trap, xproj, outproj=None, state_out=None, out=None, z=None, "
    "zproj=None, tile_D=64, num_warps=2, state_batch_indices=None, update_kv_state=False",
    model=models.mamba3, calls=OF_MAMBA3, make=mamba3_arguments,
    pools=dict.fromkeys(("state", "Bstate", "Xstate", "state_out"), ""),
    tokens=("x", "A", "B", "C", "dt", "trap", "z"), indices=("state_batch_indices",),
    right={
        place: (
            {**READS["indexed"], **PLACES[place], "given": True, "update_kv_state": True},
            {"D": "missing", "xproj": "missing"},
        )
        for place in PLACES
    },
)  # fmt: skip
