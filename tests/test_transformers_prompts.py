"""Prompts leave in a store what they leave in a cache of Transformers, whole or in pieces."""

import pytest
import torch
from stock_mixers import KNOWN, Result, Stock, stock, tokens
from torch import Tensor

from flashstate.integrations.transformers.families import Found, found_as
from flashstate.integrations.transformers.prompts import Left, stepped_prompt, stock_prompt


def expected(given: Stock, found: Found, calls: list[Tensor], mask: Tensor | None) -> list[Result]:
    """What Transformers gives for these calls, in float64 and in float32, with states as ops have them."""
    results = given.expected(calls, mask)
    return [
        result if result.recurrent is None else result._replace(recurrent=found.kind.view(result.recurrent))
        for result in results
    ]


def first_piece(found: Found, hidden: Tensor, mask: Tensor | None) -> Left:
    return stock_prompt(found, hidden, mask, found.kind.sizes(found.mixer).width, {})


@pytest.mark.parametrize(("length", "padded"), [(1, False), (11, True)])
@pytest.mark.parametrize("family", KNOWN)
@torch.no_grad()
def test_a_prompt_through_the_stock_forward_leaves_what_a_cache_has(family: str, length: int, padded: bool) -> None:
    given, calls = stock(family), tokens(length)
    found = found_as(given.mixer)
    mask = (torch.arange(length) >= torch.tensor([0, length // 2, length - 1])[:, None]).long() if padded else None
    left = first_piece(found, calls[0], mask)
    assert Result([left.outputs], left.window, left.state).holds(*expected(given, found, calls, mask))


@pytest.mark.parametrize("lengths", [(2, 3, 1)], ids=str)
@pytest.mark.parametrize("family", KNOWN)
@torch.no_grad()
def test_pieces_of_a_prompt_behind_the_first_are_as_in_the_whole_prompt(family: str, lengths: tuple[int, ...]) -> None:
    given, pieces = stock(family), tokens(*lengths)
    found = found_as(given.mixer)
    left = first_piece(found, pieces[0], None)
    outputs = [left.outputs]
    for hidden in pieces[1:]:
        left = stepped_prompt(found, hidden, None, left.window, left.state)
        outputs.append(left.outputs)
    whole = expected(given, found, [torch.cat(pieces, 1)], None)
    assert Result([torch.cat(outputs, 1)], left.window, left.state).holds(*whole)
