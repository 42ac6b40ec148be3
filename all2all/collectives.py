"""Collectives over one EP group whose host waits end when a rank fails.

Where it waits: a gloo collective is waited for by the host, in slices between which
`group.check()` and `group.check_wait()` are asked; an NCCL collective only orders the current
stream. Groups of size 1 have no process group: their collectives are copies.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ep_runtime.all2all.base import EPGroup
from ep_runtime.kernels.errors import RankFailure, first_line

# torch 2.13 renamed these two and deprecates the older names, which 2.10 to 2.12 have alone.
_HAS_SINGLE = hasattr(dist, "all_gather_single")
_all_gather: Callable[..., Any] = getattr(
    dist, "all_gather_single" if _HAS_SINGLE else "all_gather_into_tensor"
)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single" if _HAS_SINGLE else "reduce_scatter_tensor"
)

POLL_INTERVAL = timedelta(milliseconds=100)
# Longer than a missing heartbeat takes to be noticed (ep_runtime/failure.py), so that the error
# of a broken connection can name the rank that died.
NAMING_WAIT_S = 16.0


@dataclass(frozen=True)
class Collective:
    """A collective that was issued; its tensors must live until it is joined.

    work: None where nothing is in flight. waits_on_host: joining blocks the caller (gloo), else
    it orders the current stream.
    """

    group: EPGroup
    work: Any
    waits_on_host: bool

    def join(self) -> None:
        """Order the caller or its current stream behind the collective; idempotent.

        Raises RankFailure when a rank of the world has failed.
        """
        self.group.check()
        if self.work is None:
            return
        try:
            if not self.waits_on_host:
                self.work.wait()
                return
            waited_s = 0.0  # counted in slices: while the process is stopped nothing is waited for
            while not self._wait_a_slice():
                waited_s += POLL_INTERVAL.total_seconds()
                self.group.check()
                self.group.check_wait(waited_s)
        except RankFailure:
            raise
        except RuntimeError as error:
            raise_rank_failure(self.group, error)

    def _wait_a_slice(self) -> bool:
        try:
            self.work.wait(POLL_INTERVAL)
        except RuntimeError:
            if not self.work.is_completed():
                return False  # the slice has run out, not the collective
            # It broke, or it completed just after the slice ran out: this tells which, at once.
            self.work.wait()
        return True


def raise_rank_failure(group: EPGroup, error: Exception) -> NoReturn:
    """Turn a broken collective into the RankFailure that names who broke it.

    A peer's death is felt here before it is recorded: waits up to NAMING_WAIT_S for the record.
    """
    started_at = time.monotonic()
    while (waited_s := time.monotonic() - started_at) < NAMING_WAIT_S:
        group.check()
        group.check_wait(waited_s)
        time.sleep(0.05)
    reason = first_line(error)
    if "imed out" in reason:
        raise RankFailure(
            f"rank {group.rank} of a group of {group.size} had no answer from another rank within "
            f"parallel.timeout_s; raise it if a rank may be that slow ({reason})"
        ) from error
    raise RankFailure(
        f"communication of EP rank {group.rank} of {group.size} broke and no rank reported why: "
        f"{reason}"
    ) from error


def device_backend(group: EPGroup, device_type: str) -> str | None:
    """The name of the group's backend for tensors of a device type; None where it has none."""
    if group.process_group is None:
        return None
    pairs = dist.get_backend_config(group.process_group).split(",")
    backends = dict(pair.split(":", 1) for pair in pairs if ":" in pair)
    return backends.get(device_type)


def start_all_gather(output: Tensor, rows: Tensor, group: EPGroup) -> Collective:
    """[n, ...] on each rank to [P * n, ...] on every rank, in rank order; n is equal on all."""
    if group.process_group is None:
        return _copied(output, rows, group)
    pg = group.process_group
    return _issue(group, rows, lambda: _all_gather(output, rows, group=pg, async_op=True))


def start_reduce_scatter(output: Tensor, rows: Tensor, group: EPGroup) -> Collective:
    """Sum [P * n, ...] over the ranks; each keeps its own [n, ...]."""
    if group.process_group is None:
        return _copied(output, rows, group)
    pg = group.process_group
    return _issue(group, rows, lambda: _reduce_scatter(output, rows, group=pg, async_op=True))


def start_all_to_all(
    output: Tensor,
    rows: Tensor,
    group: EPGroup,
    *,
    receive_counts: Sequence[int] | None = None,
    send_counts: Sequence[int] | None = None,
) -> Collective:
    """Send rows in destination order, receive them in source order; counts None: equal splits."""
    if group.process_group is None:
        return _copied(output, rows, group)
    return _issue(
        group,
        rows,
        lambda: dist.all_to_all_single(
            output,
            rows,
            None if receive_counts is None else list(receive_counts),
            None if send_counts is None else list(send_counts),
            group=group.process_group,
            async_op=True,
        ),
    )


def _copied(output: Tensor, rows: Tensor, group: EPGroup) -> Collective:
    output.copy_(rows)
    return Collective(group, None, waits_on_host=False)


def _issue(group: EPGroup, rows: Tensor, issue: Callable[[], Any]) -> Collective:
    group.check()
    try:
        work = issue()
    except dist.DistError as error:  # an aborted or broken communicator, not a wrong argument
        raise_rank_failure(group, error)
    return Collective(group, work, device_backend(group, rows.device.type) == "gloo")


def gather_integers(value: int, group: EPGroup) -> tuple[int, ...]:
    """Every rank's integer, in rank order, on the host; waits for all ranks."""
    return tuple(own for (own,) in gather_integer_rows((value,), group))


def gather_integer_rows(values: Sequence[int], group: EPGroup) -> tuple[tuple[int, ...], ...]:
    """Every rank's integers, equally many on all, in rank order, on the host; waits for all."""
    group.check()  # first of all: a closed context's group cannot even be asked for its device
    own = torch.tensor(list(values), dtype=torch.int64, device=host_device(group))
    gathered = own.new_empty(group.size * len(values))
    start_all_gather(gathered, own, group).join()
    return tuple(tuple(row) for row in gathered.view(group.size, -1).tolist())


def gather_texts(text: str, group: EPGroup) -> tuple[str, ...]:
    """Every rank's text, in rank order; waits for all ranks."""
    encoded = text.encode()
    num_bytes = gather_integers(len(encoded), group)
    device = host_device(group)
    own = torch.zeros(max(num_bytes), dtype=torch.uint8, device=device)
    own[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    gathered = own.new_empty(group.size * own.numel())
    start_all_gather(gathered, own, group).join()
    rows = gathered.view(group.size, -1).cpu()
    return tuple(bytes(r[:n].tolist()).decode() for r, n in zip(rows, num_bytes, strict=True))


def host_device(group: EPGroup) -> torch.device:
    """Where values live that the host reads: the CPU, where the group has a backend for it."""
    if group.process_group is None or device_backend(group, "cpu") is not None:
        return torch.device("cpu")
    return group.device
