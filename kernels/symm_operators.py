"""`symm_mem`'s launches as torch operators, where somebody looks at operators.

Declared is this rank's own memory alone: of a put the receive buffer, which it writes for its own
rows, and the counters; of a wait what has arrived by it. What a put writes into a peer's memory is
ordered by the counters, on the device, and no tensor of this process stands for it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ep_runtime.kernels.observed import handle_of, is_observed, owner_of
from ep_runtime.kernels.symm_channel import Channel
from ep_runtime.kernels.symm_put_results import put_results as launch_put_results
from ep_runtime.kernels.symm_put_tokens import put_tokens as launch_put_tokens
from ep_runtime.kernels.symm_wait import sum_results as launch_sum_results
from ep_runtime.kernels.symm_wait import wait_for_dispatch as launch_wait_for_dispatch
from ep_runtime.kernels.symm_wait import wait_for_results as launch_wait_for_results


def put_tokens(
    channel: Channel,
    tokens: tuple[Tensor, Tensor, Tensor],
    *,
    first_row: int,
    max_programs: int,
    stream: int | None = None,
) -> None:
    """`kernels/symm_put_tokens.py`'s, through its operator where somebody looks."""
    if not is_observed(tokens[0]):
        launch_put_tokens(
            channel, tokens, first_row=first_row, max_programs=max_programs, stream=stream
        )
        return
    with _current(stream, channel):
        torch.ops.ep_runtime.symm_put_tokens(
            *tokens,
            _received(channel),
            channel.dispatch_arrivals,
            first_row,
            max_programs,
            handle_of(channel),
        )


def put_results(
    channel: Channel,
    expert_output: Tensor,
    *,
    num_own_rows: int,
    first_own_row: int,
    max_programs: int,
    stream: int | None = None,
) -> None:
    """`kernels/symm_put_results.py`'s, through its operator where somebody looks."""
    if not is_observed(expert_output):
        launch_put_results(
            channel,
            expert_output,
            num_own_rows=num_own_rows,
            first_own_row=first_own_row,
            max_programs=max_programs,
            stream=stream,
        )
        return
    with _current(stream, channel):
        torch.ops.ep_runtime.symm_put_results(
            expert_output,
            channel.topk_ids,
            channel.origins,
            channel.combine_arrivals,
            num_own_rows,
            first_own_row,
            max_programs,
            handle_of(channel),
        )


def wait_for_dispatch(channel: Channel, *, limit_ns: int) -> None:
    """`kernels/symm_wait.py`'s, through its operator where somebody looks."""
    if not is_observed(channel.memory):
        launch_wait_for_dispatch(channel, limit_ns=limit_ns)
        return
    arrived = [*_received(channel), channel.dispatch_arrivals, channel.epoch]
    torch.ops.ep_runtime.symm_wait_for_dispatch(arrived, limit_ns, handle_of(channel))


def wait_for_results(channel: Channel, *, limit_ns: int) -> None:
    """`kernels/symm_wait.py`'s, through its operator where somebody looks."""
    if not is_observed(channel.memory):
        launch_wait_for_results(channel, limit_ns=limit_ns)
        return
    arrived = [channel.results, channel.combine_arrivals]
    torch.ops.ep_runtime.symm_wait_for_results(arrived, limit_ns, handle_of(channel))


def sum_results(
    channel: Channel,
    own_results: Tensor,
    topk_ids: Tensor,
    *,
    first_own_row: int,
    bias: Tensor | None,
    is_joined: bool,
) -> Tensor:
    """`kernels/symm_wait.py`'s, through its operator where somebody looks."""
    if not is_observed(own_results):
        return launch_sum_results(
            channel,
            own_results,
            topk_ids,
            first_own_row=first_own_row,
            bias=bias,
            is_joined=is_joined,
        )
    output: Tensor = torch.ops.ep_runtime.symm_sum_results(
        own_results,
        topk_ids,
        bias,
        [channel.results, channel.combine_arrivals],
        first_own_row,
        is_joined,
        handle_of(channel),
    )
    return output


def _received(channel: Channel) -> list[Tensor]:
    """What dispatch writes of a slot. The views begin where those begin that experts are given."""
    received = [channel.rows, channel.topk_ids, channel.topk_weights, channel.origins]
    return received if channel.scales is None else [*received, channel.scales]


def _current(stream: int | None, channel: Channel) -> AbstractContextManager[object]:
    """The stream of that address as the current one: an operator is seen to run on that."""
    device = channel.memory.device
    if stream is None or device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device))


@torch.library.custom_op(
    "ep_runtime::symm_put_tokens",
    mutates_args=(
        "received",
        "arrivals",
    ),
)
def _put_tokens(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    received: Sequence[Tensor],
    arrivals: Tensor,
    first_row: int,
    max_programs: int,
    channel: int,
) -> None:
    tokens = (hidden_states, topk_ids, topk_weights)
    launch_put_tokens(owner_of(channel), tokens, first_row=first_row, max_programs=max_programs)


@torch.library.custom_op("ep_runtime::symm_put_results", mutates_args=("arrivals",))
def _put_results(
    expert_output: Tensor,
    topk_ids: Tensor,
    origins: Tensor,
    arrivals: Tensor,
    num_own_rows: int,
    first_own_row: int,
    max_programs: int,
    channel: int,
) -> None:
    launch_put_results(
        owner_of(channel),
        expert_output,
        num_own_rows=num_own_rows,
        first_own_row=first_own_row,
        max_programs=max_programs,
    )


@torch.library.custom_op("ep_runtime::symm_wait_for_dispatch", mutates_args=("arrived",))
def _wait_for_dispatch(arrived: Sequence[Tensor], limit_ns: int, channel: int) -> None:
    launch_wait_for_dispatch(owner_of(channel), limit_ns=limit_ns)


@torch.library.custom_op("ep_runtime::symm_wait_for_results", mutates_args=("arrived",))
def _wait_for_results(arrived: Sequence[Tensor], limit_ns: int, channel: int) -> None:
    launch_wait_for_results(owner_of(channel), limit_ns=limit_ns)


@torch.library.custom_op("ep_runtime::symm_sum_results", mutates_args=("arrived",))
def _sum_results(
    own_results: Tensor,
    topk_ids: Tensor,
    bias: Tensor | None,
    arrived: Sequence[Tensor],
    first_own_row: int,
    is_joined: bool,
    channel: int,
) -> Tensor:
    return launch_sum_results(
        owner_of(channel),
        own_results,
        topk_ids,
        first_own_row=first_own_row,
        bias=bias,
        is_joined=is_joined,
    )


@_sum_results.register_fake
def _(
    own_results: Tensor,
    topk_ids: Tensor,
    bias: Tensor | None,
    arrived: Sequence[Tensor],
    first_own_row: int,
    is_joined: bool,
    channel: int,
) -> Tensor:
    return own_results.new_empty((topk_ids.shape[0], own_results.shape[1]))
