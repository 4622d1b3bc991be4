"""The benchmark of gated_delta_step: its jobs, and its peers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from flashstate.bench.jobs import SPARE_SLOTS, BenchedOp, Grid, Job, Shape, Variant
from flashstate.bench.peers import (
    IN_PLACE,
    Launch,
    MeasurementError,
    Peer,
    Step,
    Storing,
    require_in_place,
    require_plain_states,
    step_of,
)
from flashstate.ops.gated_delta import MOST_AT_ONCE, gated_delta_step
from flashstate.proof import DeltaCase, Inputs, Pool
from flashstate.state.formats import PORTABLE_FORMATS, bits_of
from flashstate.state.slots import Slots

COMMON = DeltaCase(x="bfloat16", qk="bfloat16", gates="bfloat16")  # with float32 parameters, q and k normalised
HOST_CASE = replace(COMMON, batch=4, heads=16, key_heads=8, rows=128, cols=128, format="bfloat16", slots=16)
LARGE, SMALL = Shape(64, 16, 128, 128), Shape(32, 16, 128, 128)  # value heads, key heads, V, K
FLOAT32, BFLOAT16 = ("float32", "nearest"), ("bfloat16", "nearest")
FORMATS = (FLOAT32, BFLOAT16, ("int8", "nearest"), ("float8_e4m3fn", "nearest"))
BATCHES = (1, 4, 16, 64, 256)
GRIDS = (
    Grid((LARGE,), FORMATS, batches=BATCHES),
    Grid((SMALL,), (BFLOAT16,), batches=BATCHES),
    Grid((LARGE,), (FLOAT32, BFLOAT16), (4,), ("last", "nothing"), BATCHES),
    Grid((LARGE,), (BFLOAT16,), (4,), ("snapshots",), BATCHES),
    Grid((LARGE,), (BFLOAT16,), (8,), ("last", "nothing"), BATCHES),
)
LAYERS = 20  # that share every page of a split pool: at large batches offsets go past 2^31 elements
TUNED = Grid((LARGE,), PORTABLE_FORMATS, (1, 4), ("last", "snapshots", "nothing"), BATCHES)


def case_of(shape: Shape, name: str, rounding: str, tokens: int, batch: int) -> DeltaCase:
    """The case of a job; ValueError where there is none of this shape."""
    heads, key_heads, rows, cols = shape
    if heads % key_heads:
        raise ValueError(f"the number of groups, which are key heads, must divide the {heads} heads, got {key_heads}")
    common = replace(COMMON, heads=heads, key_heads=key_heads, rows=rows, cols=cols, format=name, rounding=rounding)
    return replace(common, tokens=tokens, batch=batch, slots=batch + SPARE_SLOTS)


def bind_flashstate(inputs: Inputs, storing: Storing = IN_PLACE, *, bare: bool = False, exact: bool = True) -> Step:
    arguments = {**inputs.arguments, **inputs.options, "state": inputs.state.data if bare else inputs.state}
    arguments.update(out=torch.empty_like(inputs.main), snapshots=storing.snapshots, update=storing.update)
    arguments["exact"] = exact and inputs.options["exact"]
    return step_of(gated_delta_step, arguments, bare)


def at_once(job: Job) -> Job:
    """The job with all tokens of a row at once; MeasurementError where there is no such call."""
    assert isinstance(job.case, DeltaCase)
    if not 1 < job.case.tokens <= MOST_AT_ONCE:
        raise MeasurementError(f"only for calls of 2 to {MOST_AT_ONCE} tokens")
    if job.stored == "snapshots":
        raise MeasurementError("only where no state between tokens is stored")
    return replace(job, case=replace(job.case, exact=False))


def one_token(job: Job) -> Job:
    """The job itself; MeasurementError where it has several tokens."""
    if job.problem.several_tokens:
        raise MeasurementError("only compared with one token per call")
    return job


def in_split_pool(inputs: Inputs) -> Inputs:
    """The same states as the last layer of several that share a memory, each with a part of every page."""
    data = inputs.state.data
    pages = torch.empty(len(data), LAYERS, *data.shape[1:], dtype=data.dtype, device=data.device)
    bits_of(pages[:, -1]).copy_(bits_of(data))
    return replace(inputs, state=replace(inputs.state, data=pages[:, -1]))


def bind_vllm(decode: Callable[..., Any], verify: Callable[..., Any], inputs: Inputs, storing: Storing) -> Step:
    """`decode` takes one token, with q, k and v side by side, and `verify` several, each with a slot that its state is
    stored in. Slot 0 is none, so all tokens but the last have that; a row reads the slot of its last accepted token."""
    require_plain_states(inputs)
    require_in_place(storing)
    common = {
        "a": inputs.arguments["a"], "b": inputs.arguments["b"],
        "A_log": inputs.options["A_log"], "dt_bias": inputs.options["dt_bias"],
        "initial_state": inputs.state.data, "use_qk_l2norm_in_kernel": inputs.options["qk_l2norm"],
    }  # fmt: skip
    q, k, v = (inputs.arguments[name] for name in ("q", "k", "v"))
    if not inputs.has_token_axis:
        mixed, out = torch.cat([t.flatten(1) for t in (q, k, v)], 1), torch.empty_like(v)[:, None]
        common.update(mixed_qkv=mixed, scale=q.shape[-1] ** -0.5, out=out)
        return lambda slots: lambda: decode(**common, ssm_state_indices=slots.read)[0]
    batch, count = v.shape[:2]
    accepted = torch.full((batch,), count, dtype=torch.int32, device=v.device)

    def step(slots: Slots) -> Launch:
        table = slots.read.new_zeros(batch, count)
        table[:, -1] = slots.read
        return lambda: verify(**common, q=q, k=k, v=v, ssm_state_indices=table, num_accepted_tokens=accepted)[0]

    return step


def bind_flashinfer(decode: Callable[..., Any], verify: Callable[..., Any], inputs: Inputs, storing: Storing) -> Step:
    """`verify` takes several tokens and float32 states, `decode` everything else. Given an output, older releases copy
    that of bfloat16 states into it, so they make it themselves."""
    state, several = inputs.state, inputs.has_token_axis
    if state.data.dtype not in (torch.float32, torch.bfloat16) or state.rounding != "nearest":
        raise MeasurementError(f"it has no {state.format.name} states rounded {state.rounding}")
    wide = state.data.dtype == torch.float32
    arguments: dict[str, Any] = {name: t if several else t[:, None] for name, t in inputs.arguments.items()}
    arguments |= {"A_log": inputs.options["A_log"], "dt_bias": inputs.options["dt_bias"], "initial_state": state.data}
    arguments["use_qk_l2norm"] = inputs.options["qk_l2norm"]
    if wide:
        arguments["output"] = torch.empty_like(arguments["v"])
    call = verify if several and wide else partial(decode, state=None)
    if several and "disable_state_update" in inspect.signature(call).parameters:
        arguments["disable_state_update"] = not storing.update
    elif storing != IN_PLACE:
        raise MeasurementError("this release only updates such states in place")

    def step(slots: Slots) -> Launch:
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
    """It has no pool, so its step does what its users do: torch gathers states before the call, and scatters them
    behind it."""
    require_plain_states(inputs)
    if storing.snapshots is not None:
        raise MeasurementError("only compared without snapshots")
    pool, options = inputs.state.data, inputs.options
    q, k, v, g, beta = (t if inputs.has_token_axis else t[:, None] for t in inputs.arguments.values())
    flags = {
        "use_qk_l2norm_in_kernel": options["qk_l2norm"], "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "state_v_first": True, "output_final_state": storing.update,
    }  # fmt: skip
    missing = flags.keys() - inspect.signature(attend).parameters.keys()
    if missing:
        raise MeasurementError(f"this release has no {min(missing)}")
    attend = partial(attend, q, k, v, g, beta=beta, A_log=options["A_log"], dt_bias=options["dt_bias"], **flags)

    def launch(rows: Tensor) -> Tensor:
        o, after = attend(initial_state=pool[rows])
        if storing.update:
            pool.index_copy_(0, rows, after.to(pool.dtype))
        return cast(Tensor, o)

    return lambda slots: partial(launch, slots.read.long())


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
GATED_DELTA = BenchedOp(
    "gated_delta", bind_flashstate, case_of, GRIDS, PEERS, HOST_CASE,
    {
        "at once": Variant(partial(bind_flashstate, exact=False), at_once),
        "split pool": Variant(bind_flashstate, one_token, in_split_pool),
    }, (TUNED,),
)  # fmt: skip
