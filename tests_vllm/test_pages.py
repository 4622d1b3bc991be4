"""Pages of layers on flashstate under vLLM's own copies: at the boundaries of a prefix cache a state goes to another
block, which model runner V2 does by kernels over addresses."""

from __future__ import annotations

from tests_vllm import driving  # it prepares vLLM

# isort: split
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

from flashstate.integrations.vllm import upstream
from tests_vllm.driving import DEVICE, MAMBA2, PREFIX, QWEN, VERSION, Batch, Driven, Family, ints

BLOCK = 16  # tokens of a block
OLD = pytest.mark.skipif(
    int(VERSION.split(".")[1]) < 29, reason="model runner V2 makes its tables otherwise before 0.29"
)


@pytest.fixture(autouse=True)
def on_gpus() -> Iterator[None]:
    with mock.patch.object(upstream, "on_cuda", return_value=True):
        yield


def state_of(driven: Driven, tables: torch.Tensor) -> tuple[Any, Any]:
    """What model runner V2 keeps for a model of one layer, whose requests have these blocks, and its configuration."""
    layer, shapes = driven.layer, tuple(tensor.shape[1:] for tensor in driven.tensors)
    spec = MambaSpec(
        block_size=BLOCK, shapes=shapes, dtypes=layer.get_state_dtype(), mamba_type=layer.mamba_type,
        mamba_cache_mode="align",
    )  # fmt: skip
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[PREFIX], kv_cache_spec=spec)])
    functions = {layer.mamba_type: MambaStateCopyFuncCalculator.mamba2_state_copy_func()}
    context = MambaSpecDecodeGPUContext.create(
        max_num_reqs=len(tables), kv_cache_config=groups, copy_funcs=functions, device=DEVICE,
        make_buffer=lambda n, dtype: SimpleNamespace(gpu=torch.zeros(n, dtype=dtype, device=DEVICE)),
    )  # fmt: skip
    context.initialize_from_forward_context(groups, {PREFIX: layer}, functions, [tables])
    state = object.__new__(MambaHybridModelState)
    state.__dict__.update(
        _align_mode=True, _mamba_ctx=context, _mamba_spec=None, _mamba_group_ids=[], _mamba_state_copy_funcs=functions,
        num_accepted_tokens_gpu=ints(1, 1, 1), _mamba_state_idx_gpu=ints(0, 0, -1), _mamba_src_col_gpu=ints(0, 0, 0),
        _mamba_src_off_gpu=ints(0, 0, 0),
    )  # fmt: skip
    return state, groups


@OLD
@pytest.mark.release
@pytest.mark.parametrize("state", ["float32", "float16", "int8"])
@pytest.mark.parametrize("family", [MAMBA2, QWEN], ids=lambda family: family.name)
def test_a_state_goes_on_in_the_block_to_which_model_runner_v2_copies_it(family: Family, state: str) -> None:
    """The first request fills its block and goes on in the next, with its scales; the second stays; a third begins."""
    tables = torch.stack([ints(3, 9), ints(5, 10), ints(7, 11)])
    outputs, pages = [], []
    for blocks in ([3, 5], [9, 5]):
        driven = driving.drive(family, Batch(decodes=blocks), {"state": state})
        before = driven.pages.clone()
        if blocks[0] == 9:
            runner, groups = state_of(driven, tables)
            step = SimpleNamespace(num_reqs=3, idx_mapping=ints(0, 1, 2), query_start_loc=ints(0, 1, 2, 3))
            runner.preprocess_state(step, (tables,), groups, ints(BLOCK, BLOCK - 1, 0))
            size = sum(tensor[0].numel() * tensor.itemsize for tensor in driven.tensors)
            assert torch.equal(driven.pages[9, :size], before[3, :size])
            others = [block for block in range(len(before)) if block != 9]
            assert torch.equal(driven.pages[others], before[others])
            assert torch.equal(driven.pages[9, size:], before[9, size:])
            assert runner._mamba_state_idx_gpu.tolist() == [1, 0, 0]
        batch = Batch(decodes=blocks)
        outputs.append(driven.run(batch, driving.tokens_of(batch)))
        pages.append(driven.pages[blocks])
    assert torch.equal(*outputs)
    assert torch.equal(*pages)
