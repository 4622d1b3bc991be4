"""flash-linear-attention's recurrent rules: calls in every mode and form that they have, and what they give."""

from functools import partial

import torch
from models_of_peers import Arguments
from models_of_rules import one_token, tokens_of_rows, values_of
from peer_calls import DIM, DSTATE, HEADS, Calls, Door, Random, crossed, some
from torch import Tensor

from flashstate.compat import fla

BRAIN = torch.bfloat16


def fla_arguments(
    kda: bool,
    device: torch.device,
    shape: tuple[int, int] = (3, 1),
    heads: int = 2,
    raw: bool = False,
    state: int | None = 3,
    v_first: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Arguments:
    """What fla's rules have, for tokens (B, T). raw: gates in the kernel. state: how many initial ones, or None."""
    random, channels = Random(device, shape[1]), (DSTATE,) if kda else ()
    inner = (HEADS, DIM, DSTATE) if v_first else (HEADS, DSTATE, DIM)
    arguments: Arguments = {
        "q": random.normal(*shape, heads, DSTATE, dtype=dtype),
        "k": random.normal(*shape, heads, DSTATE, dtype=dtype),
        "v": random.normal(*shape, HEADS, DIM, dtype=dtype),
        "g": -random.uniform(*shape, HEADS, *channels),
        "beta": random.uniform(*shape, HEADS, dtype=dtype),
        "initial_state": None if state is None else random.normal(state, *inner),
        "use_qk_l2norm_in_kernel": True,
        "output_final_state": True,
    }
    if raw:
        arguments |= {"A_log": random.normal(HEADS), "dt_bias": random.normal(HEADS, *channels)}
        arguments |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    return {**arguments, "state_v_first": True} if v_first else arguments


def given_by(arguments: Arguments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs (B, T, HV, V) and states (N, HV, V, K) after the last tokens."""
    v, state = arguments["v"], arguments.get("initial_state")
    gates = {"g": arguments["gk"]} if arguments.get("gk") is not None else {}
    tokens = tokens_of_rows(len(v), v.shape[1], arguments.get("cu_seqlens"))
    if state is None:
        state = torch.zeros(len(tokens), HEADS, DIM, DSTATE)
    elif not (arguments.get("state_v_first") or arguments.get("transpose_state_layout")):
        state = state.mT
    values, states = values_of({**arguments, **gates}, state.shape, dtype), list(state.to(dtype))
    y = torch.zeros_like(values["v"])
    for b, row in enumerate(tokens):
        for token in row:
            y[token], states[b] = one_token(states[b], {name: value[token] for name, value in values.items()})
    return y.reshape(v.shape), torch.stack(states)


MODES: Calls = {
    "one token": {},
    "several tokens": {"shape": (3, 4)},
    "packed": {"shape": (1, 7), "cu_seqlens": [0, 4, 4, 7], "indices": torch.int64},
}
FORMS: Calls = {
    "": {},
    "states transposed": {"v_first": True, "heads": 4},
    "no states given": {"state": None},
    "no states asked for": {"output_final_state": False},
    "raw gates": {"raw": True, "v_first": True},
    "a raw decay": {"raw": True, "use_beta_sigmoid_in_kernel": False},
    "a raw beta": {"use_beta_sigmoid_in_kernel": True},
    "a bfloat16 model": {"dtype": BRAIN, "scale": 0.5, "use_qk_l2norm_in_kernel": False},
}
OTHERS: Calls = {  # of the rule with a decay per head
    "no gates": {"g": None, "beta": None},
    "as Transformers calls": {"cu_seqlens": None, "cu_seq_lens_k": None, "use_cache": True, "dtype": BRAIN},
    "a layout by its old name": {"v_first": True, "state_v_first": False, "transpose_state_layout": True},
}
GATES_MAY = {"A_log": "one more axis", "dt_bias": "one more axis"}

FLA_RULE = Door(
    fla.fused_recurrent_gated_delta_rule,
    "q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False, "
    "use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None, "
    "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, **kwargs",
    make=partial(fla_arguments, False), model=given_by, pools={}, tokens=("v", "q", "k", "g", "beta"), indices=(),
    calls=crossed(MODES, FORMS) | OTHERS,
    right={
        "raw gates": ({**MODES["packed"], "raw": True}, GATES_MAY),
        "per channel": ({"g": None, "gk": torch.ones(3, 1, HEADS, DSTATE)}, {}),
    },
)  # fmt: skip
FLA_KDA = Door(
    fla.fused_recurrent_kda,
    "q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False, "
    "use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
    "allow_neg_eigval=False, lower_bound=None, state_v_first=False, cu_seqlens=None, **kwargs",
    make=partial(fla_arguments, True), model=given_by, pools={}, tokens=("v", "q", "k", "g", "beta"), indices=(),
    calls=crossed(MODES, some(FORMS, "", "raw gates", "a raw decay")),
    right={"raw gates": ({**MODES["packed"], "raw": True}, GATES_MAY)},
)  # fmt: skip
