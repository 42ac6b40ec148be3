"""What ids outside the experts look up, in every type ids come in."""

import pytest
import torch

from ep_runtime.all2all.expert_ids import IdTable


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
def test_ids_that_are_no_experts_give_minus_one(
    dtype: torch.dtype, table_dtype: torch.dtype
) -> None:
    table = IdTable(torch.tensor([7, -1, 5], dtype=table_dtype))
    limits = torch.iinfo(dtype)
    ids = torch.tensor([[0, 2, 1], [-1, 3, -2], [4, limits.max, limits.min]], dtype=dtype)
    found = table.look_up(ids)
    assert found.dtype is table_dtype
    assert found.tolist() == [[7, 5, -1], [-1, -1, -1], [-1, -1, -1]]


def test_of_no_experts_every_id_gives_minus_one() -> None:
    table = IdTable(torch.empty(0, dtype=torch.int32))
    ids = torch.tensor([[0, -1], [1, 5]], dtype=torch.int32)
    assert table.look_up(ids).tolist() == [[-1, -1], [-1, -1]]
    assert table.look_up(ids[:0]).shape == (0, 2)
