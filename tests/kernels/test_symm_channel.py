"""The layout of a symmetric slot, and the word that says which wait ran out."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ep_runtime.all2all.base import sent_row_bytes
from ep_runtime.kernels.quant.scheme import RowScheme
from ep_runtime.kernels.symm_channel import (
    ABORTED,
    ARRIVAL_SHARES,
    COMBINE_PHASE,
    PEER_SHIFT,
    PHASE_SHIFT,
    FailedWait,
    SlotLayout,
    SlotSpace,
    first_received_row,
)

layouts = st.builds(
    SlotLayout,
    ep_size=st.integers(1, 9),
    max_tokens_per_rank=st.integers(1, 40),
    hidden_size=st.integers(1, 300),
    top_k=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    row_scheme=st.sampled_from(RowScheme),
)


@given(layout=layouts)
def test_regions_are_aligned_and_lie_behind_each_other_inside_the_slot(layout: SlotLayout) -> None:
    end = 0
    for region in layout.regions.values():
        assert region.offset % 256 == 0
        assert region.offset >= end
        end = region.offset + region.num_bytes
    assert end <= layout.num_bytes
    assert layout.num_bytes % 256 == 0, "the next slot would not be aligned"


@given(layout=layouts)
def test_views_of_different_regions_share_no_byte(layout: SlotLayout) -> None:
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for number, name in enumerate(layout.regions, start=1):
        view = layout.view(memory, name)
        assert view.shape == layout.regions[name].shape
        assert view.dtype == layout.regions[name].dtype
        view.view(torch.uint8).fill_(number)
    for number, region in enumerate(layout.regions.values(), start=1):
        assert int((memory == number).sum()) == region.num_bytes


@given(layout=layouts, other=layouts)
def test_layouts_in_one_space_have_counters_and_the_border_of_the_buffers_in_common(
    layout: SlotLayout, other: SlotLayout
) -> None:
    other = replace(other, ep_size=layout.ep_size)
    space = layout.needs.widened(other.needs)
    assert space.holds(layout.needs)
    assert space.holds(other.needs)
    one, two = replace(layout, space=space), replace(other, space=space)
    assert one.num_bytes == two.num_bytes >= max(layout.num_bytes, other.num_bytes)
    for name in ("dispatch_arrivals", "combine_arrivals"):
        assert one.regions[name] == two.regions[name]
    assert one.offset("results") == two.offset("results")
    for placed, alone in ((one, layout), (two, other)):
        regions = list(placed.regions.values())
        assert regions[-1].offset + regions[-1].num_bytes <= placed.num_bytes
        for region, following in itertools.pairwise(regions):
            assert region.offset + region.num_bytes <= following.offset
        assert [r.shape for r in regions] == [r.shape for r in alone.regions.values()]


@given(layout=layouts)
def test_a_space_that_is_too_small_in_either_buffer_is_refused(layout: SlotLayout) -> None:
    needs = layout.needs
    for space in (
        SlotSpace(needs.receive_bytes - 256, needs.result_bytes),
        SlotSpace(needs.receive_bytes, needs.result_bytes - 256),
    ):
        with pytest.raises(ValueError, match="cannot hold"):
            replace(layout, space=space)


def test_buffers_hold_what_all_ranks_may_send() -> None:
    regions = SlotLayout(4, 16, 48, 3, torch.bfloat16).regions
    assert regions["rows"].shape == (4 * 16, 48)
    assert regions["results"].shape == (4, 16, 48)
    assert regions["topk_ids"].shape == regions["topk_weights"].shape == (4 * 16, 3)
    assert "scales" not in regions


@given(layout=layouts)
def test_rows_in_fp8_take_a_byte_a_column_and_a_scale_for_every_128(layout: SlotLayout) -> None:
    regions = layout.regions
    assert regions["results"].dtype is layout.dtype
    if layout.row_scheme is RowScheme.MODEL:
        assert regions["rows"].dtype is layout.dtype
        return
    num_rows = layout.ep_size * layout.max_tokens_per_rank
    assert regions["rows"].dtype is torch.float8_e4m3fn
    assert regions["rows"].num_bytes == num_rows * layout.hidden_size
    assert regions["scales"].shape == (num_rows, (layout.hidden_size + 127) // 128)
    assert regions["scales"].dtype is torch.float32
    both = regions["rows"].num_bytes + regions["scales"].num_bytes
    assert both == num_rows * sent_row_bytes(layout.hidden_size, layout.dtype, layout.row_scheme)


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_received_rows_of_the_sources_tile_the_buffer_in_rank_order(counts: list[int]) -> None:
    rows_per_rank = tuple(counts)
    rows = [
        first_received_row(rows_per_rank, source) + token
        for source, count in enumerate(counts)
        for token in range(count)
    ]
    assert rows == list(range(sum(counts)))


@given(
    peer=st.integers(0, 2**16 - 1),
    epoch=st.integers(1, 2**40 - 1),
    is_aborted=st.booleans(),
)
def test_a_failure_record_gives_back_peer_epoch_phase_and_whether_the_host_ended_the_wait(
    peer: int, epoch: int, is_aborted: bool
) -> None:
    phase = COMBINE_PHASE | (ABORTED if is_aborted else 0)
    record = phase << PHASE_SHIFT | peer << PEER_SHIFT | epoch
    assert FailedWait.from_record(record) == FailedWait(peer, epoch, "combine", is_aborted)
    assert FailedWait.from_record(0) is None
    assert record < 2**63


def test_a_lifetime_of_arrivals_fits_the_counter() -> None:
    calls = 1000 * 100 * 3600 * 24 * 365 * 2  # 1000 layers, 100 steps a second, two years
    assert calls * ARRIVAL_SHARES < 2**63
