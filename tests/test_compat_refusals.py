"""Wrong calls of the adapters in flashstate/compat are refused by name and change nothing."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models_of_peers import BUFFER, Arguments
from peer_calls import DIM, DSTATE, HEADS, SLOTS, Adapter, Call, copied, equal_bytes
from peer_conv1d import SGLANG_CONV, VLLM_CONV, WINDOWS
from peer_replay import BUFFERED, CHECKPOINTING, TRACKED
from peer_rules import (
    DECODING,
    FLA_RULE,
    RAW_GATES,
    SEVERAL,
    SGLANG_RULE,
    SGLANG_UPDATE,
    V_FIRST,
    VLLM_DECODE,
    VLLM_KDA,
    VLLM_RULE,
)
from peer_selective import FLASHINFER, MAMBA3, SGLANG_STATE, SSM, VLLM
from test_compat_contracts import EACH_ADAPTER
from torch import Tensor

WORDS = {  # that messages have for an argument besides its name
    "state": "data|scale", "state_scale": "scale", "initial_state": "state", "conv_state": "window|state",
    "Bstate": "k", "Xstate": "v", "xproj": "Wx", "zproj": "Wz", "outproj": "Wo", "output": "out",
    BUFFER: "data|scale|snapshots", "intermediate_state_scales": "scale", "intermediate_state_indices": "snapshot_rows",
    "state_batch_indices": "read|slots", "initial_state_indices": "read|slots", "conv_state_indices": "read|slots",
    "dst_state_batch_indices": "write", "output_state_indices": "write", "ssm_state_indices": "write",
    "num_accepted_tokens": "accepted", "query_start_loc": "cu_seqlens", "cache_seqlens": "positions",
    "initial_state_source": "state|data", "mixed_qkv": "q|k|v|slots", "num_accept_tokens": "accepted",
    WINDOWS: "snapshots", "raw_g": "a", "raw_beta": "b",
}  # fmt: skip


def refuses(adapter: Adapter, arguments: Arguments, message: str) -> None:
    """The call raises this, no tensor of it changes, and the shapes that it got are those that it was given."""
    before = copied(arguments)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message) as raised:
        adapter.function(**arguments)
    got = re.findall(r"got (?:shape )?(\(\d[\d, ]*\))", str(raised.value))
    given = {str(tuple(t.shape)) for t in arguments.values() if isinstance(t, Tensor)}
    assert given.issuperset(got) or "strides" in str(raised.value), raised.value
    for name, tensor in arguments.items():
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            assert equal_bytes(tensor, before[name]), name


def wrong_forms(adapter: Adapter, name: str, tensor: Tensor) -> Iterator[tuple[str, Any, bool]]:
    """Wrong values for a tensor argument, and whether the message must name it: a wrong size may be that of others."""
    if "None" not in str(inspect.signature(adapter.function).parameters[name].annotation):
        yield "missing", None, True
    yield "a list", tensor.tolist(), True
    state = name in (*adapter.pools, *adapter.pools.values())
    floats = tensor.is_floating_point() or (state and tensor.dim() > 1)
    for dtype in (torch.float64, torch.int32) if floats else (torch.float32, torch.int16):
        yield str(dtype), tensor.to(dtype), True
    yield "elsewhere", tensor.to("meta"), True
    if not floats:
        return
    conv = adapter.tokens == ("x",)  # takes more rows, tokens and entries of windows, which may lie anywhere
    free = 2 if state and tensor.dim() > 3 else int(state or conv)  # axes that may be longer: of slots and steps
    for axis in range(free, min(tensor.dim(), 2) if conv and name in ("x", "conv_state") else tensor.dim()):
        yield f"longer {axis}", torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis), False
        if tensor.shape[axis] > 1 and not conv:
            yield f"shorter {axis}", tensor.narrow(axis, 1, tensor.shape[axis] - 1), False
    if len(tensor) > 1 and (name == adapter.out or (state and tensor.dim() > 2)):
        yield "overlapping", tensor[:1].expand(tensor.shape), True
        if not conv:
            yield "gaps", torch.stack([tensor, tensor], -1)[..., 0], True


def other_shapes(tensor: Tensor) -> Iterator[tuple[str, Tensor, None]]:
    """Tensors with an axis of one entry, without one, and with one more, which calls may take."""
    for axis in range(tensor.dim()):
        yield f"one of {axis}", tensor.narrow(axis, 0, 1), None
        yield f"without {axis}", tensor.select(axis, 0), None
        yield f"another before {axis}", tensor.unsqueeze(axis), None


NOT_READ = ("bc_pre", "prev_query_len", "cb_scaled", "cumAdt_vec", "cb_old", "scratch")


@EACH_ADAPTER
def test_what_is_no_such_tensor_is_refused(adapter: Adapter) -> None:
    """Of every argument that takes a tensor, in the first call that gives it one."""
    parameters = inspect.signature(adapter.function).parameters
    every, tried = "|".join([*parameters, *WORDS.values()]), set()
    for call in [*adapter.calls, *adapter.edges]:
        for name, tensor in adapter.arguments(call).items():
            if not isinstance(tensor, Tensor) or name in (*tried, *NOT_READ):
                continue
            tried.add(name)
            for what, value, by_name in (*wrong_forms(adapter, name, tensor), *other_shapes(tensor)):
                named = f"{name}|{WORDS.get(name, name)}" if by_name else every
                message = rf"^(?=.*\b({named})\b)\w+( or \w+)? (must|is|are|has) "
                try:
                    refuses(adapter, {**adapter.arguments(call), name: value}, message)
                except (Exception, pytest.fail.Exception) as failure:
                    if by_name is not None or not isinstance(failure, pytest.fail.Exception):
                        raise AssertionError(f"{call}: {name} {what}: {failure}") from failure
    takes = {name for name, parameter in parameters.items() if "Tensor" in str(parameter.annotation)}
    assert takes - {*tried, *NOT_READ} == set()


UNCHECKED = ("is_blackwell", "validate_data", "fuse_gate", "output_final_state", "philox_rounds")  # without a seed
NO_SUCH = {"bool": [2], "int": ["4", 1 << 70], "float": ["1"], "str": ["word"]}  # of parameters with such annotations


@EACH_ADAPTER
def test_what_is_no_such_flag_number_or_word_is_refused(adapter: Adapter) -> None:
    call = next(iter(adapter.calls))
    for name, parameter in inspect.signature(adapter.function).parameters.items():
        kind = str(parameter.annotation).partition(" ")[0]
        if kind in NO_SUCH and name not in UNCHECKED:
            word = name.removeprefix("use_").removesuffix("_in_kernel")
            for value in NO_SUCH[kind]:
                refuses(adapter, {**adapter.arguments(call), name: value}, rf"^({name}|{word}) (must|is for) ")


STATES, PAGES = torch.ones(3 * SLOTS, HEADS, DIM, DSTATE), torch.ones(SLOTS, 2, HEADS, DIM, DSTATE)
SEED, HALF = torch.tensor([1]), {"state_dtype": torch.float16}
NO_SLOTS = {"state_batch_indices": None, "dst_state_batch_indices": None, "num_accepted_tokens": None}
NO_TREE = dict.fromkeys((WINDOWS, "retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token"))
ON_STATE = {"initial_state": None, "state": STATES[:3]}
WRONG: dict[Adapter, tuple[str, list[tuple[str, Call]]]] = {  # a call, and what makes it raise an error that begins so
    SSM: ("indexed, per channel", [
        ("x must have 2 axes or more, got shape (8,)", {"x": torch.ones(8)}),
        ("dt must have shape (batch=3, heads=4, dim=8), got (3, 2)", {"dt": torch.ones(3, 2)}),
        ("state_batch_indices must have shape (batch", {"state_batch_indices": [[5], [0], [9]]}),
    ]),
    VLLM: ("accepted tokens elsewhere, nothing optional", [
        ("dst_state_batch_indices needs state_batch_indices, got None", {"state_batch_indices": None}),
        ("dst_state_batch_indices must have 3 rows and 3 columns or more, got shape (3,)",
         {"dst_state_batch_indices": [10, 3, 8]}),
        ("num_accepted_tokens must have 3 entries or more", {"num_accepted_tokens": [1, 2]}),
        ("cu_seqlens must have shape (batch + 1), got (0,)", {"cu_seqlens": []}),
        ("state_batch_indices must be given for a batch of 15 on 14 slots", {"cu_seqlens": [0] * 16, **NO_SLOTS}),
        ("exact=False needs max_query_len for 17 packed tokens: a row may have more than 16, which exact=True takes",
         {**NO_SLOTS, "lengths": [17], "exact": False}),
        ("exact=False is for up to 16 tokens per row, got 17",
         {**NO_SLOTS, "lengths": [17], "exact": False, "max_query_len": 17, "x_dtype": torch.bfloat16}),
        ("exact=False has no states between tokens", {"lengths": [17], "exact": False, "x_dtype": torch.bfloat16}),
    ]),
    FLASHINFER: ("padding, a buffer", [
        ("intermediate_states_buffer and dst_state_batch_indices must not both be given",
         {"dst_state_batch_indices": [10, 3, 8]}),
        ("intermediate_state_scales needs intermediate_states_buffer, got None", {BUFFER: None}),
        ("rand_seed and state_scale must not both be given", {"rand_seed": SEED}),
        ("rand_seed is for a state of float16, got float32", {"rand_seed": SEED, "state_dtype": torch.float32}),
        ("rand_seed must be one int64 number", {"rand_seed": torch.ones(2), **HALF}),
        ("dt_bias must be float32, as dt is, got float16", {"dt_bias": torch.ones(HEADS, DIM).half()}),
        ("intermediate_state_indices must be int32, as state_batch_indices is, got",
         {"intermediate_state_indices": torch.tensor([4, 0, 2])}),
        ("state_scale must be given where state is int16, got None", {"state_scale": None}),
        ("intermediate_state_scales must be given where intermediate_states_buffer is int16, got None",
         {"intermediate_state_scales": None}),
        ("state_batch_indices must have shape (batch, n), got (3,)", {"num_accepted_tokens": [1, 1, 1]}),
    ]),
    SGLANG_STATE: ("a tree", [
        ("retrieve_parent_token needs disable_state_update=True", {"disable_state_update": False}),
        ("enable_stochastic_rounding is for a state of float16", {"enable_stochastic_rounding": True}),
    ]),
    DECODING: ("elsewhere, a bfloat16 model", [
        ("intermediate_states_buffer is for several tokens per row, got (3, 1, 4, 8)", {"buffer": (3, 0)}),
        ("disable_state_update is for several tokens per row, got (3, 1, 4, 8)", {"disable_state_update": True}),
        ("state and initial_state must not both be given", {"state": STATES[:3]}),
        ("initial_state_indices must be a tensor, got NoneType", {"initial_state_indices": None}),
        ("state or initial_state must be given, got None for both",
         dict.fromkeys(("initial_state", "initial_state_indices", "output_state_indices"))),
        ("initial_state_indices needs initial_state, got None", ON_STATE),
        ("output_state_indices needs initial_state, got None", {**ON_STATE, "initial_state_indices": None}),
        ("state must have 3 slots, as the batch has rows, got shape (2",
         {"state": STATES[:2], **dict.fromkeys(("initial_state", "initial_state_indices", "output_state_indices"))}),
    ]),
    SEVERAL: ("a buffer, elsewhere, output given", [
        ("intermediate_states_buffer and ssm_state_indices must not both be given",
         {"ssm_state_indices": [[1, 2, 3, 4]] * 3}),
        ("output_state_indices must have shape (B=3), got (2,)", {"output_state_indices": [12, 7]}),
    ]),
    MAMBA3: ("padded, elsewhere, rank 1, a bfloat16 model", [
        ("zproj needs z, got None", {"z": None}),
        ("out must have shape (batch=3, R=1, H=4, D=8)", {"out": torch.ones(3, HEADS, DIM), "outproj": None}),
        ("state_out must not share memory with Bstate",
         {"state_out": PAGES[:, 1], "Bstate": PAGES[:, 1, :1].flatten(2)[..., : HEADS * DSTATE].unflatten(2, (4, 16))}),
        ("state_out must not share memory with state",  # one slot further
         {"state": STATES[:SLOTS], "state_out": STATES[1 : SLOTS + 1]}),
    ]),
    VLLM_CONV: ("accepted counts, packed, channels first", [
        ("conv_state_indices must be given with query_start_loc", {"conv_state_indices": None}),
        ("query_start_loc must have 4 entries or more", {"query_start_loc": [0, 3]}),
    ]),
    SGLANG_CONV: ("a tree, channels last", [
        ("retrieve_next_sibling must be a tensor, got NoneType", {"retrieve_next_sibling": None}),
        ("conv_state must have shape (slots, dim, 3), got (9, 6, 4); SGLang's", {**NO_TREE, "length": 4}),
    ]),
    FLA_RULE: ("several tokens", [
        ("head_first must be False, got True", {"head_first": True}),
        ("state_v_first and transpose_state_layout must not both", {**V_FIRST, "transpose_state_layout": True}),
        ("v must have a batch axis of 1 with cu_seqlens, got shape (3,", {"cu_seqlens": [0, 2, 3]}),
        ("gv must be left out: gated_delta_step has no such gate", {"gv": torch.ones(3)}),
        ("g and gk must not both be given", {"gk": torch.ones(3)}),
        ("gk must be left out: gates in the kernel are of g", {"gk": torch.ones(3), "g": None, **RAW_GATES}),
    ]),
    VLLM_RULE: ("packed, not normalised", [
        ("beta must be 1.0, got 2.0", {"beta": 2.0}),
        ("threshold must be 20.0, got 10", {"threshold": 10}),
        ("inplace_final_state=False is for rows of equal length", {"inplace_final_state": False}),
        ("exact=False needs max_query_len for 17 packed tokens", {"shape": (1, 17), "exact": False}),
        ("exact=False has no states between tokens",
         {"shape": (1, 17), "exact": False, "ssm_state_indices": [[5, 1, 2]] * 3, "x_dtype": torch.bfloat16}),
        ("ssm_state_indices must be a tensor, got NoneType", {"ssm_state_indices": None}),
    ]),
    VLLM_KDA: ("blocks", [
        ("beta must be a tensor, got NoneType", {"beta": None}),
        ("num_accepted_tokens must be left out", {"num_accepted_tokens": [1, 1, 1]}),
    ]),
    SGLANG_RULE: ("a tree", [
        ("softplus_beta must be 1.0, got 0.5", {"softplus_beta": 0.5}),
        ("dt_bias must have shape (HV=4, K=16), got (4,)",  # past whose end SGLang's own kernel reads
         {"per_channel": True, "is_kda": True, "dt_bias": torch.zeros(HEADS)}),
    ]),
    SGLANG_UPDATE: ("a tree", [("retrieve_parent_token needs disable_state_update", {"disable_state_update": False})]),
    VLLM_DECODE: ("bfloat16", [("mixed_qkv must have 2 * H * 16 + 4 * 8 columns", {"mixed_qkv": torch.ones(3, 95)})]),
    CHECKPOINTING: ("3 tokens, bfloat16", [
        ("dt must have one value per head", {"dt": torch.rand(3, 3, 4, 8)}),
        ("A must have one value per head", {"A": torch.rand(4, 8, 16)}),
        ("max_seqlen is for packed tokens", {"max_seqlen": 3}),
        ("max_seqlen must be given with cu_seqlens", {"cu_seqlens": torch.tensor([0, 1])}),
        ("x_cache must have 8 to 68 rows, for a window beside 4 tokens", {"tokens": (3, 4)}),
        ("algorithm 'two-kernel' needs cb_scaled, cumAdt_vec, cb_old, got None", {"algorithm": "two-kernel"}),
        ("cb_scaled, cumAdt_vec, cb_old must be given together, got cb_old alone", {"cb_old": torch.ones(1)}),
        ("cb_old must be a tensor, got int", {"cb_scaled": SEED, "cumAdt_vec": SEED, "cb_old": 1}),
    ]),
    TRACKED: ("one token, bfloat16", [
        ("logical_window must be 6, the 7 rows of x_cache without 1 of new tokens, got 5", {"logical_window": 5}),
        ("update_trackers is for one token per row, got 3", {"tokens": (3, 3)}),
    ]),
    BUFFERED: ("in place", [
        ("x_cache must have shape (slots, heads, max_cache_len=9, dim)", {"max_cache_len": 9}),
        ("write_pos must have 3 entries or more", {"write_pos": [6, 2]}),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("adapter", WRONG, ids=lambda adapter: adapter.name)
def test_what_does_not_fit_is_refused(adapter: Adapter) -> None:
    call, table = WRONG[adapter]
    for message, change in table:
        try:
            refuses(adapter, adapter.arguments({**adapter.calls[call], **change}), "^" + re.escape(message))
        except (Exception, pytest.fail.Exception) as failure:
            raise AssertionError(f"{message}: {failure}") from failure
