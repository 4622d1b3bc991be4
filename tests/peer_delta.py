"""FlashInfer's gated delta rules, for one token and for several: calls in every mode and form that they have."""

from functools import partial
from typing import Any

import models_of_peers as models
import torch
from models_of_peers import Arguments
from peer_calls import AT_ONCE, BUFFER, DIM, DSTATE, GIVEN, HEADS, SLOTS, Calls, Door, Random, crossed, some

from flashstate.compat import flashinfer

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


def delta_arguments(
    device: torch.device,
    tokens: int = 1,
    heads: tuple[int, int] = (2, HEADS),
    state_dtype: torch.dtype = FLOAT,
    x_dtype: torch.dtype = FLOAT,
    weights_dtype: torch.dtype = FLOAT,
    pool: bool = True,
    buffer: tuple[int, int] | None = None,
    every: list[list[int]] | None = None,
) -> Arguments:
    """What gated delta rules have, for three rows.

    heads: of q and k, and of v. x_dtype: of what tokens bring. weights_dtype: of A_log and dt_bias. pool: there is one
    of states, not a state for every row. buffer: how many rows it has, and how many steps more than there are tokens.
    every: slots for the first tokens of each row.
    """
    random, (H, HV) = Random(device, tokens + 3), heads
    arguments = {
        "q": random.normal(3, tokens, H, DSTATE, dtype=x_dtype),
        "k": random.normal(3, tokens, H, DSTATE, dtype=x_dtype),
        "v": random.normal(3, tokens, HV, DIM, dtype=x_dtype),
        "initial_state" if pool else "state": random.normal(SLOTS if pool else 3, HV, DIM, DSTATE, dtype=state_dtype),
        "A_log": random.normal(HV, dtype=weights_dtype),
        "a": random.normal(3, tokens, HV, dtype=x_dtype),
        "dt_bias": random.normal(HV, dtype=weights_dtype),
        "b": random.normal(3, tokens, HV, dtype=x_dtype),
    }
    if buffer is not None:
        sizes = (buffer[0], tokens + buffer[1], HV, DIM, DSTATE)
        arguments[BUFFER] = torch.full(sizes, 7.0, dtype=state_dtype, device=device)
    if every is not None:
        arguments["ssm_state_indices"] = [row[:tokens] for row in every]
    return arguments


DELTA: dict[str, Any] = {
    "make": delta_arguments,
    "pools": {"state": "", "initial_state": "", BUFFER: ""},
    "tokens": ("v", "q", "k", "a", "b"),
    "indices": ("initial_state_indices", "output_state_indices", "ssm_state_indices"),
    "out": "output",
}
EVERY = [[10, 0, 1, 2, 3], [7, 4, 5, 11, 6], [13, 8, -1, -1, -1]]
HERE, THERE = [12, 7, 9], [8, 13, 9]  # in the upper half of the pool
SKIPPED = [12, -1, 9]
DECODE: Calls = {
    "in order": {"pool": False},
    "in place": {"initial_state_indices": HERE},
    "elsewhere": {"initial_state_indices": HERE, "output_state_indices": THERE},
    "a row skipped": {"initial_state_indices": SKIPPED},
    "a row skipped, elsewhere": {"initial_state_indices": SKIPPED, "output_state_indices": THERE},
    "a row not written": {"initial_state_indices": HERE, "output_state_indices": [8, 13, -5]},
    "rows skipped and not written": {"initial_state_indices": SKIPPED, "output_state_indices": [-1, 13, 9]},
}
DECODE = {name: call if "pool" in call else {**call, "state": None} for name, call in DECODE.items()}
SEVERAL_DECODED: Calls = crossed(some(DECODE, "in order", "rows skipped and not written"), {
    "3 tokens": {"tokens": 3},
    "a buffer, 2 tokens": {"tokens": 2, "buffer": (3, 1)},
    "update disabled, 2 tokens": {"tokens": 2, "disable_state_update": 1},
})  # fmt: skip
UPDATE = {"disable_state_update": False}
MTP: Calls = {
    "output alone": {"initial_state_indices": HERE},
    "update disabled": {"initial_state_indices": HERE, "disable_state_update": True, "output_state_indices": THERE},
    "in place": {"initial_state_indices": HERE, **UPDATE},
    "elsewhere": {"initial_state_indices": HERE, "output_state_indices": THERE, **UPDATE},
    "a row skipped": {"initial_state_indices": SKIPPED, "output_state_indices": THERE, **UPDATE},
    "a row not written": {"initial_state_indices": HERE, "output_state_indices": [8, -1, 9], **UPDATE},
    "a buffer": {"initial_state_indices": SKIPPED, "buffer": (3, 0)},
    "a large buffer": {"initial_state_indices": HERE, "buffer": (5, 2), "disable_state_update": True},
    "a buffer, in place": {"initial_state_indices": SKIPPED, "buffer": (4, 0), **UPDATE},
    "a buffer, elsewhere": {
        "initial_state_indices": HERE, "output_state_indices": [8, -1, 9], "buffer": (3, 1), **UPDATE,
    },
    "every token": {"initial_state_indices": HERE, "every": EVERY, **UPDATE},
    "every token, a row skipped": {"initial_state_indices": SKIPPED, "every": EVERY, **UPDATE},
    "every token, unless disabled by default": {"initial_state_indices": HERE, "every": EVERY},
    "every token, unless disabled": {"initial_state_indices": HERE, "every": EVERY, "disable_state_update": True},
    "every token, the last also elsewhere": {
        "initial_state_indices": SKIPPED, "every": EVERY, "output_state_indices": [-1, 12, 9], **UPDATE,
    },
}  # fmt: skip
TOKENS: Calls = {
    f"{n} tokens": {"tokens": n, "indices": torch.int64 if n % 2 else torch.int32} for n in (1, 2, 3, 4, 5)
}
DELTA_FORMS: Calls = {
    **{f"heads {heads}": {"heads": heads} for heads in ((1, 1), (4, 4), (3, 9), (1, 4), (2, 10), (1, 8))},
    "not normalised": {"use_qk_l2norm": False, "scale": 0.02},
    "a scale": {"scale": 1.5},
    "no scale": {"scale": None, "use_qk_l2norm": True},
    "bfloat16 tokens": {"x_dtype": BRAIN},
    "float16 tokens": {"x_dtype": HALF},
    "a bfloat16 state": {"state_dtype": BRAIN, "x_dtype": BRAIN},
    "a float16 state": {"state_dtype": HALF, "x_dtype": BRAIN},
    "bfloat16 weights": {"x_dtype": BRAIN, "weights_dtype": BRAIN},
}
SMALL: Calls = {  # for the interpreter
    "small": {"heads": (1, 2)},
    "small, float16": {"heads": (1, 2), "state_dtype": HALF, "x_dtype": HALF},
}
OF_DECODE: Calls = crossed(
    DECODE, {"int32": {}, "int64": {"indices": torch.int64}}, GIVEN
) | crossed(some(DECODE, "in order", "rows skipped and not written"), DELTA_FORMS | SMALL, GIVEN)  # fmt: skip
OTHER_OUTPUTS: Calls = {
    "bfloat16 in, float32 out": {"x_dtype": BRAIN, "given": FLOAT},
    "float32 in, float16 out": {"given": HALF},
}
OF_DECODE |= crossed(SEVERAL_DECODED, GIVEN) | crossed(some(DECODE, "a row skipped"), OTHER_OUTPUTS)
OF_MTP: Calls = crossed(MTP, TOKENS, GIVEN) | crossed(
    crossed(some(MTP, "a row skipped"), some(TOKENS, "3 tokens"))
    | crossed(some(MTP, "a buffer, elsewhere"), some(TOKENS, "4 tokens"))
    | crossed(some(MTP, "every token, a row skipped"), some(TOKENS, "5 tokens")),
    DELTA_FORMS | SMALL,
    GIVEN,
) | crossed(some(MTP, "a row skipped"), some(TOKENS, "3 tokens"), OTHER_OUTPUTS) | crossed(
    some(MTP, "output alone", "a large buffer", "every token, the last also elsewhere"),
    some(TOKENS, "2 tokens"), some(DELTA_FORMS, "not normalised"),
)  # fmt: skip

DECODING = Door(
    flashinfer.gated_delta_rule_decode_pretranspose,
    "q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True, initial_state=None, "
    "initial_state_indices=None, output_state_indices=None, intermediate_states_buffer=None, "
    "disable_state_update=False, backend='auto'" + AT_ONCE,
    model=partial(models.gated_delta, models.flashinfer_decode), calls=OF_DECODE, **DELTA,
    right={
        "a pool": ({**DECODE["elsewhere"], "given": True}, {"initial_state": "longer 0, shorter 0"}),
        "in order": (DECODE["in order"], {}),
        "several tokens": (
            {**DECODE["elsewhere"], "tokens": 3, "buffer": (3, 0)},
            {"initial_state": "longer 0, shorter 0", BUFFER: "longer 0, longer 1"},
        ),
    },
)  # fmt: skip
SEVERAL = Door(
    flashinfer.gated_delta_rule_mtp,
    "q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale=None, output=None, "
    "intermediate_states_buffer=None, ssm_state_indices=None, disable_state_update=None, use_qk_l2norm=True, "
    "output_state_indices=None, cache_replayssm=False, replayssm_rawv=None, replayssm_rawk=None, replayssm_g=None, "
    "replayssm_beta=None" + AT_ONCE,
    model=partial(models.gated_delta, models.flashinfer_mtp), calls=OF_MTP, **DELTA,
    right={
        "a buffer": (
            {**MTP["elsewhere"], "buffer": (3, 0), "tokens": 3, "given": True},
            {"initial_state": "longer 0, shorter 0", BUFFER: "longer 0, longer 1"},
        ),
        "every token": ({**MTP["every token"], "tokens": 3}, {"initial_state": "longer 0, shorter 0"}),
    },
)  # fmt: skip
