"""causal_conv1d's causal_conv1d_update, the convolution of mamba_ssm's layers."""

from __future__ import annotations

from torch import Tensor

from flashstate.compat import shapes
from flashstate.launch.doors import remembering
from flashstate.ops.conv1d import CONV1D_STEP, conv1d_step


@remembering(main="x")
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Convolve every row's tokens with the inputs before them; update conv_state in place, return a tensor like x.

    x is (batch, dim) or (batch, dim, seqlen), conv_state (slots, dim, state_len), newest inputs last, or with
    cache_seqlens a ring. docs/compat.md has the other arguments, and says what differs from causal_conv1d.
    """
    window = shapes.with_axes("conv_state", conv_state, 3, 3)
    tokens, room = shapes.tokens_before_channels("x", x, window.shape[1]), shapes.room_for_output(x)
    y = conv1d_step(
        window, tokens, **shapes.fitted(CONV1D_STEP, weight=weight, bias=bias, positions=cache_seqlens),
        activation=shapes.activation_of(activation), slots=conv_state_indices,
        out=None if room is None else shapes.tokens_before_channels("out", room),
    )  # fmt: skip
    return shapes.tokens_before_channels("out", y)
