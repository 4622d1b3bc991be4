"""The benchmark of gated_delta_step: its jobs, and its peers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from flashstate.bench.at_once import AT_ONCE
from flashstate.bench.binding import IN_PLACE, Step, Storing, TimedCall, bind_op
from flashstate.bench.jobs import BFLOAT16, FLOAT32, Grid, Job, Way, benched
from flashstate.bench.peers import MeasurementError, Peer, require_plain
from flashstate.proof import Inputs, Pool
from flashstate.state.formats import PORTABLE_FORMATS, bits_of
from flashstate.state.slots import Slots

FORMATS = (FLOAT32, BFLOAT16, ("int8", "nearest"), ("float8_e4m3fn", "nearest"))
BATCHES = (1, 4, 16, 64, 256)
GRIDS = (
    Grid(FORMATS, batches=BATCHES),
    Grid((BFLOAT16,), batches=BATCHES, sizes={"heads": (32,)}),
    Grid((FLOAT32, BFLOAT16), (4,), ("last", "none"), BATCHES),
    Grid((BFLOAT16,), (4,), ("every",), BATCHES),
    Grid((BFLOAT16,), (8,), ("last", "none"), BATCHES),
)
TUNED = Grid(PORTABLE_FORMATS, (1, 4), ("last", "every", "none"), BATCHES)
LAYERS = 20  # that share every page of a split pool: at large batches offsets go past 2^31 elements


def one_token(job: Job) -> Job:
    """The job itself; MeasurementError where it has several tokens."""
    if job.problem.several_tokens:
        raise MeasurementError("only compared with one token per call")
    return job


def in_split_pool(inputs: Inputs) -> Inputs:
    """Inputs whose states are the last layer of several that share a memory, each with a part of every page."""
    data = inputs.state.data
    pages = torch.empty(len(data), LAYERS, *data.shape[1:], dtype=data.dtype, device=data.device)
    bits_of(pages[:, -1]).copy_(bits_of(data))
    return replace(inputs, state=replace(inputs.state, data=pages[:, -1]))


def bind_vllm(decode: Callable[..., Any], verify: Callable[..., Any], inputs: Inputs, storing: Storing) -> Step:
    """vLLM has `decode` of one token, with q, k and v side by side, and `verify` of several, each with a slot. Slot 0
    is none, so all tokens but the last have that; a row reads the slot of its last accepted token."""
    require_plain(inputs, storing)
    common = {
        **{name: inputs.arguments[name] for name in ("a", "b")},
        **{name: inputs.arguments[name] for name in ("A_log", "dt_bias")},
        "initial_state": inputs.state.data, "use_qk_l2norm_in_kernel": inputs.arguments["qk_l2norm"],
    }  # fmt: skip
    q, k, v = (inputs.arguments[name] for name in ("q", "k", "v"))
    if not inputs.has_token_axis:
        mixed, out = torch.cat([t.flatten(1) for t in (q, k, v)], 1), torch.empty_like(v)[:, None]
        common.update(mixed_qkv=mixed, scale=q.shape[-1] ** -0.5, out=out)
        return lambda slots: lambda: decode(**common, ssm_state_indices=slots.read)[0]
    batch, count = v.shape[:2]
    accepted = torch.full((batch,), count, dtype=torch.int32, device=v.device)

    def step(slots: Slots) -> TimedCall:
        table = slots.read.new_zeros(batch, count)
        table[:, -1] = slots.read
        return lambda: verify(**common, q=q, k=k, v=v, ssm_state_indices=table, num_accepted_tokens=accepted)[0]

    return step


def bind_flashinfer(decode: Callable[..., Any], verify: Callable[..., Any], inputs: Inputs, storing: Storing) -> Step:
    """FlashInfer has `verify` of several tokens and float32 states, and `decode` of everything else. Given an output,
    older releases copy that of bfloat16 states into it, so they make it themselves."""
    state, several = inputs.state, inputs.has_token_axis
    if state.data.dtype not in (torch.float32, torch.bfloat16) or state.rounding != "nearest":
        raise MeasurementError(f"it has no {state.format.name} states rounded {state.rounding}")
    wide = state.data.dtype == torch.float32
    arguments: dict[str, Any] = {name: t if several else t[:, None] for name, t in inputs.activations.items()}
    arguments |= {name: inputs.arguments[name] for name in ("A_log", "dt_bias")}
    arguments |= {"initial_state": state.data, "use_qk_l2norm": inputs.arguments["qk_l2norm"]}
    if wide:
        arguments["output"] = torch.empty_like(arguments["v"])
    call = verify if several and wide else partial(decode, state=None)
    if several and "disable_state_update" in inspect.signature(call).parameters:
        arguments["disable_state_update"] = not storing.update
    elif storing != IN_PLACE:
        raise MeasurementError("this release only updates such states in place")

    def step(slots: Slots) -> TimedCall:
        kept = {} if storing.snapshots is None else {"intermediate_states_buffer": rows_of(storing.snapshots, slots)}
        return lambda: call(**arguments, **kept, initial_state_indices=slots.read)[0]

    return step


def rows_of(snapshots: Pool, slots: Slots) -> Tensor:
    """Snapshots for a library that has those of row b of the batch in row b: rows from that of the first on."""
    assert slots.snapshot_rows is not None
    batch = len(slots.snapshot_rows)
    first = min(int(slots.snapshot_rows[0]), len(snapshots.data) - batch)
    return snapshots.data[first : first + batch]


def bind_fla(attend: Callable[..., Any], inputs: Inputs, storing: Storing) -> Step:
    """fla has no pool: as its users do, torch gathers states before the call, and scatters them behind it."""
    require_plain(inputs)
    if storing.snapshots is not None:
        raise MeasurementError("only compared without snapshots")
    pool, options = inputs.state.data, inputs.arguments
    tokens = inputs.changed(lambda t: t if inputs.has_token_axis else t[:, None]).activations
    q, k, v, g, beta = (tokens[name] for name in ("q", "k", "v", "a", "b"))
    flags = {
        "use_qk_l2norm_in_kernel": options["qk_l2norm"], "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "state_v_first": True, "output_final_state": storing.update,
    }  # fmt: skip
    missing = flags.keys() - inspect.signature(attend).parameters.keys()
    if missing:
        raise MeasurementError(f"this release has no {min(missing)}")
    attend = partial(attend, q, k, v, g, beta=beta, A_log=options["A_log"], dt_bias=options["dt_bias"], **flags)

    def call(rows: Tensor) -> Tensor:
        o, after = attend(initial_state=pool[rows])
        if storing.update:
            pool.index_copy_(0, rows, after.to(pool.dtype))
        return cast(Tensor, o)

    return lambda slots: partial(call, slots.read.long())


PEERS = {
    "vllm": Peer(
        "vllm.third_party.flash_linear_attention.ops",
        ("fused_recurrent_gated_delta_rule_packed_decode", "fused_sigmoid_gating_delta_rule_update"),
        bind_vllm,
    ),
    "flashinfer": Peer(
        "flashinfer.gdn_decode", ("gated_delta_rule_decode_pretranspose", "gated_delta_rule_mtp"), bind_flashinfer
    ),
    "fla": Peer("fla.ops.gated_delta_rule", ("fused_recurrent_gated_delta_rule",), bind_fla),
}
VARIANTS = {
    "at once": AT_ONCE,
    "split pool": Way(bind_op, one_token, in_split_pool),
}
GATED_DELTA = benched("gated_delta_step", grids=GRIDS, peers=PEERS, variants=VARIANTS, tuned=(TUNED,))
