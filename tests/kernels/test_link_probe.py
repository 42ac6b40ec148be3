"""The link's probe really copies: whole words, any number of programs, nothing beyond."""

import pytest
import torch

from ep_runtime.kernels.link_probe import put_words


@pytest.mark.parametrize("num_words", [1, 4096, 70001])
@pytest.mark.parametrize("num_programs", [1, 3])
def test_words_land_at_the_address_and_nowhere_else(
    num_words: int, num_programs: int, device: torch.device
) -> None:
    source = torch.randint(-(2**31), 2**31 - 1, (num_words,), dtype=torch.int32, device=device)
    landing = torch.full((num_words + 8,), 7, dtype=torch.int32, device=device)
    start = landing[4:]
    put_words(source, start.data_ptr(), num_programs=num_programs)
    assert torch.equal(start[:num_words], source)
    assert (landing[:4] == 7).all()
    assert (start[num_words:] == 7).all()
