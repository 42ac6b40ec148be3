"""A stand-in for the package deep_ep (API generation V1) on a CPU, over a gloo group.

It keeps V1's signatures, dtypes and layouts, refuses what the real one refuses, and is as
inconvenient: data that has not been received is NaN, the low-latency results of the call before
the last are overwritten with NaN. Only what happens within one host, without the host waiting, is
here. `install` makes it importable as deep_ep in this process.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
topk_idx_t = torch.int64


def install() -> None:
    """Make `import deep_ep` give this module."""
    sys.modules["deep_ep"] = sys.modules[__name__]


def module_with(*names: str) -> ModuleType:
    """A deep_ep that has these names and nothing else: another generation of it."""
    module = ModuleType("deep_ep")
    for name in names:
        setattr(module, name, object())
    return module


@dataclass(frozen=True)
class Config:
    """Tuning of the normal mode."""

    num_sms: int
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        channels = self.num_sms // 2
        return channels * num_ranks * self.num_max_nvl_chunked_recv_tokens * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class EventOverlap:
    """An event; waiting for it runs what was to be received."""

    def __init__(self, receive: Callable[[], None] | None = None) -> None:
        self._receive = receive

    def current_stream_wait(self) -> None:
        assert self._receive is not None, "event is valid only with async_finish"
        self._receive()


class Buffer:
    """V1's buffer. calls: names of the methods called, in order."""

    num_sms = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        if group is None:
            raise ValueError("Either 'group' or 'comm' must be provided.")
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        assert self.group_size in (2, 4, 8), "Unsupported ranks"
        assert num_nvl_bytes % 128 == 0
        assert num_rdma_bytes % 128 == 0
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.num_qps_per_rank = num_qps_per_rank
        if low_latency_mode:
            self.nvshmem_qp_depth = 1024
        self._is_destroyed = False
        self._results: list[list[Tensor]] = []
        dist.barrier(group)

    def destroy(self) -> None:
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        assert not self._is_destroyed
        self._is_destroyed = True
        dist.barrier(self.group)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        message = 16 + 2 * hidden
        return 2 * num_experts * num_max_dispatch_tokens_per_rank * message // 128 * 128 + 128

    # --- normal mode ---

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dim() == 2
        assert topk_idx.is_contiguous()
        assert topk_idx.dtype == topk_idx_t
        assert num_experts > 0
        experts = torch.where(topk_idx < 0, num_experts, topk_idx)
        per_expert = experts.flatten().bincount(minlength=num_experts + 1)[:num_experts].int()
        num_local = num_experts // self.group_size
        ranks = torch.where(topk_idx < 0, self.group_size, topk_idx // num_local)
        is_in_rank = torch.zeros(len(topk_idx), self.group_size + 1, dtype=torch.bool)
        is_in_rank = is_in_rank.scatter(1, ranks, True)[:, :-1].contiguous()
        return is_in_rank.sum(0).int(), None, per_expert, is_in_rank, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, list[int], tuple[Any, ...], EventOverlap]:
        assert not self._is_destroyed
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        assert is_token_in_rank.dtype == torch.bool
        assert is_token_in_rank.is_contiguous()
        assert is_token_in_rank.shape == (len(x), self.group_size)
        self._check_rows(x)
        assert x.data_ptr() != 0, "zero tokens have no address"
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_idx.is_contiguous()
        assert topk_weights.is_contiguous()
        assert topk_idx.dtype == topk_idx_t
        assert topk_weights.dtype == torch.float32
        assert topk_idx.shape == topk_weights.shape
        assert len(topk_idx) == len(x)
        assert topk_idx.shape[1] <= 32
        assert num_worst_tokens > 0, "without it the host waits, holding Python's lock"
        num_local = len(num_tokens_per_expert) // self.group_size
        counts = self._start(num_tokens_per_rank)
        rank_of_copy, row_of_copy = is_token_in_rank.t().nonzero(as_tuple=True)
        local = topk_idx[row_of_copy] - rank_of_copy[:, None] * num_local
        is_local = (local >= 0) & (local < num_local) & (topk_idx[row_of_copy] >= 0)
        parts = (
            x[row_of_copy],
            torch.where(is_local, local, -1),
            torch.where(is_local, topk_weights[row_of_copy], 0.0),
        )
        landed = [_unwritten(p.new_empty(num_worst_tokens, p.shape[1])) for p in parts]
        splits: list[list[int]] = []

        def receive() -> None:
            _wait(counts)
            splits.extend([num_tokens_per_rank.tolist(), counts[0].tolist()])
            num_received = sum(splits[1])
            assert num_received <= num_worst_tokens
            transfers = [self._start(part, *splits) for part in parts]
            for transfer, target in zip(transfers, landed, strict=True):
                _wait(transfer)
                target[:num_received] = transfer[0]
            landed[1][num_received:] = -1

        handle = (splits, num_worst_tokens, None, row_of_copy, is_token_in_rank, len(x))
        if not async_finish:
            receive()
        return landed[0], landed[1], landed[2], [], handle, EventOverlap(receive)

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, EventOverlap]:
        assert not self._is_destroyed
        (sent, received), num_rows, _, row_of_copy, _, num_tokens = handle
        self._check_rows(x)
        assert len(x) == num_rows, "src_idx.size(0) == num_tokens"
        biases = [] if bias is None else [bias] if isinstance(bias, Tensor) else list(bias)
        for part in biases:
            assert part.is_contiguous()
            assert part.dtype == x.dtype
            assert part.shape == (num_tokens, x.shape[1])
        transfer = self._start(x[: sum(received)], received, sent)
        combined = _unwritten(x.new_empty(num_tokens, x.shape[1]))

        def receive() -> None:
            _wait(transfer)
            total = torch.zeros(combined.shape, dtype=torch.float32)
            for part in biases:
                total += part.float()
            # Without weights: normal mode leaves them to the caller.
            total.index_add_(0, row_of_copy, transfer[0].float())
            combined.copy_(total)

        event = EventOverlap(receive)
        if not async_finish:
            receive()
        return combined, None, event

    def _check_rows(self, x: Tensor) -> None:
        assert x.dim() == 2
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16, "Unsupported type"
        assert x.shape[1] * x.element_size() % 512 == 0, "hidden_int4 % 32 == 0"

    # --- low-latency mode ---

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[
        Tensor | tuple[Tensor, Tensor],
        Tensor,
        tuple[Any, ...],
        EventOverlap,
        Callable[[], None] | None,
    ]:
        limit, hidden, num_ranks = num_max_dispatch_tokens_per_rank, x.shape[1], self.group_size
        assert self.low_latency_mode
        assert not self._is_destroyed
        assert self.nvshmem_qp_depth >= (limit + 1) * 2
        assert x.dim() == 2
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        assert hidden in HIDDEN_SIZES, "Unsupported hidden"
        assert x.data_ptr() != 0, "zero tokens have no address"
        assert topk_idx.is_contiguous()
        assert topk_idx.dtype == topk_idx_t
        assert len(x) == len(topk_idx)
        assert len(x) <= limit
        assert topk_idx.shape[1] <= 11, "num_topk <= kNumMaxTopK"
        assert num_experts % num_ranks == 0
        assert num_ranks * limit % 4 == 0, "TMA requires the number of tokens to be multiple of 4"
        assert not (async_finish and return_recv_hook)
        assert not round_scale, "the stand-in has float32 scales as they come"
        assert not use_ue8m0, "the stand-in has float32 scales as they come"
        hint = self.get_low_latency_rdma_size_hint(limit, hidden, num_ranks, num_experts)
        assert hint <= self.num_rdma_bytes, "layout.total_bytes <= num_rdma_bytes"
        num_local, capacity = num_experts // num_ranks, num_ranks * limit
        values, scales_of = _cast_to_fp8(x) if use_fp8 else (x, x.new_empty(len(x), 0).float())
        rows = _unwritten(values.new_empty(num_experts, limit, hidden))
        scales = _unwritten(scales_of.new_empty(num_experts, limit, scales_of.shape[1]))
        source = torch.full((num_experts, limit), -1, dtype=torch.int32)
        counts = torch.zeros(num_experts, dtype=torch.int32)
        for token, experts in enumerate(topk_idx.tolist()):
            for expert in experts:
                if expert >= 0:
                    place = int(counts[expert])
                    assert place < limit, "an expert's places for this rank overflow"
                    rows[expert, place], source[expert, place] = values[token], token
                    scales[expert, place] = scales_of[token]
                    counts[expert] += 1
        transfers = [self._start(part) for part in (rows, source, counts, scales)]
        packed = _unwritten(rows.new_empty(num_local, capacity, hidden))
        # Column-major, as TMA wants them.
        packed_scales = scales.new_empty(num_local, scales.shape[2], capacity).transpose(1, 2)
        _unwritten(packed_scales)
        packed_count = torch.full((num_local,), -1, dtype=torch.int32)
        src_info = torch.full((num_local, capacity), -1, dtype=torch.int32)
        layout_range = torch.zeros(num_local, num_ranks, 2, dtype=torch.int64)
        self._next_results([packed, packed_scales, packed_count])

        def receive() -> None:
            for transfer in transfers:
                _wait(transfer)
            from_rank = [t.view(num_ranks, num_local, *t.shape[1:]) for t, _, _ in transfers]
            packed_count.zero_()
            for expert in range(num_local):
                for rank in range(num_ranks):
                    start, count = int(packed_count[expert]), int(from_rank[2][rank, expert])
                    packed[expert, start : start + count] = from_rank[0][rank, expert, :count]
                    packed_scales[expert, start : start + count] = from_rank[3][
                        rank, expert, :count
                    ]
                    src_info[expert, start : start + count] = from_rank[1][rank, expert, :count]
                    layout_range[expert, rank] = torch.tensor([start, count])
                    packed_count[expert] += count

        handle = (src_info, layout_range, limit, hidden, num_experts)
        if not return_recv_hook:
            receive()
        return (
            (packed.view(torch.float8_e4m3fn), packed_scales) if use_fp8 else packed,
            packed_count,
            handle,
            EventOverlap(),
            receive if return_recv_hook else None,
        )

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        src_info, layout_range, limit, hidden, num_experts = handle
        num_ranks, num_local = self.group_size, num_experts // self.group_size
        assert self.low_latency_mode
        assert not self._is_destroyed
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        assert x.shape == (num_local, num_ranks * limit, hidden)
        assert topk_idx.is_contiguous()
        assert topk_idx.dtype == topk_idx_t
        assert topk_weights.is_contiguous()
        assert topk_weights.dtype == torch.float32
        assert topk_idx.shape == topk_weights.shape
        assert len(topk_idx) <= limit
        assert not (async_finish and return_recv_hook)
        assert not zero_copy, "the stand-in always copies"
        assert not use_logfmt, "the stand-in has one format"
        num_tokens = len(topk_idx)
        back = x.new_full((num_ranks, num_local, limit, hidden), torch.nan)
        for expert in range(num_local):
            for rank in range(num_ranks):
                start, count = layout_range[expert, rank].tolist()
                tokens = src_info[expert, start : start + count].long()
                back[rank, expert, tokens] = x[expert, start : start + count]
        transfer = self._start(back)
        if out is None:
            combined = x.new_full((num_tokens, hidden), torch.nan)
            self._next_results([combined])
        else:
            assert out.is_contiguous()
            assert out.dtype == x.dtype
            assert out.shape == (num_tokens, hidden)
            combined = out
            self._next_results([])

        def receive() -> None:
            _wait(transfer)
            returned = transfer[0].view(num_experts, limit, hidden)
            total = torch.zeros(num_tokens, hidden)
            for token, experts in enumerate(topk_idx.tolist()):
                for k, expert in enumerate(experts):
                    if expert >= 0:
                        total[token] += topk_weights[token, k] * returned[expert, token].float()
            combined.copy_(total)

        if not return_recv_hook:
            receive()
        return combined, EventOverlap(), receive if return_recv_hook else None

    def _next_results(self, results: list[Tensor]) -> None:
        """This call's results take the memory of those of the call before the last."""
        self._results.append(results)
        if len(self._results) > 2:
            for overwritten in self._results.pop(0):
                _unwritten(overwritten)

    def _start(
        self, rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> tuple[Tensor, Any, Tensor]:
        """An exchange in flight: where it lands, its work, and what must live until then."""
        rows = rows.contiguous()
        num_rows = len(rows) if received is None else sum(received)
        target = rows.new_empty((num_rows, *rows.shape[1:]))
        work = dist.all_to_all_single(target, rows, received, sent, group=self.group, async_op=True)
        return target, work, rows


def _cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, H] e4m3 as bytes, which gloo carries, and [T, H / 128] scales, in V1's arithmetic."""
    assert x.shape[1] % 512 == 0
    groups = x.float().view(len(x), -1, 128)
    amax = groups.abs().amax(2).clamp_min(1e-4)
    values = (groups * (448.0 / amax)[..., None]).to(torch.float8_e4m3fn)
    return values.view(x.shape).view(torch.uint8), amax * (1 / 448.0)


def _unwritten(tensor: Tensor) -> Tensor:
    """Fill with what no result may show; bytes are e4m3, and 0x7f is NaN there."""
    if tensor.dtype is torch.uint8:
        return tensor.fill_(0x7F)
    return tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**31))


def _wait(transfer: tuple[Tensor, Any, Tensor]) -> None:
    transfer[1].wait()
