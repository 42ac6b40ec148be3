"""The rates that bound any exchange between the ranks, measured in the benchmark's own run.

Every rank writes to the next one, so that each link carries data in both directions at once.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ep_runtime.all2all.base import EPGroup
from ep_runtime.all2all.collectives import gather_texts
from ep_runtime.all2all.symmetric_buffer import open_symmetric_buffer
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.launch.bench_gather import gather_values, start_together
from ep_runtime.launch.bench_probe import EagerProbe, make_clock
from ep_runtime.launch.bench_statistics import max_over_ranks, summarise

PROBE_BYTES = 256 << 20
_ITERATIONS = 20
FORMULA = (
    "bytes that each rank writes to the next rank, all at once / median over iterations of the "
    "slowest rank's time; one direction"
)


@dataclass(frozen=True)
class LinkLimits:
    """GB/s in one direction while both carry data; None, with the reason, where there is no link.

    copy_engine_gbps: a peer copy. triton_put_gbps: a Triton kernel's stores, one program a
    multiprocessor.
    """

    copy_engine_gbps: float | None
    triton_put_gbps: float | None
    reason: str | None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bytes": PROBE_BYTES, "formula": FORMULA}


def no_link(reason: str) -> LinkLimits:
    return LinkLimits(None, None, reason)


def measure_link(group: EPGroup) -> LinkLimits:
    """A collective of the EP group; equal on all ranks."""
    if group.size == 1:
        return no_link("one rank: nothing is sent")
    if group.device.type != "cuda":
        return no_link("the ranks are on a CPU")
    properties = torch.cuda.get_device_properties(group.device)
    devices = gather_texts(str(properties.uuid), group)
    if len(set(devices)) < group.size:
        return no_link(f"{group.size} ranks share {len(set(devices))} device(s)")
    # Not before the command has decided whether Triton interprets, which is as it is imported.
    from ep_runtime.kernels.link_probe import put_words

    try:
        buffer = open_symmetric_buffer(group, PROBE_BYTES)
    except ConfigError as error:
        return no_link(str(error))
    handle: Any = buffer.mappings[0]
    peer = (group.rank + 1) % group.size
    address = buffer.addresses[peer]
    offset = address - int(handle.buffer_ptrs[peer])
    landing = handle.get_buffer(peer, (PROBE_BYTES,), torch.uint8, offset)
    source = torch.randint(256, (PROBE_BYTES,), dtype=torch.uint8, device=group.device)
    words = source.view(torch.int32)
    num_programs = int(properties.multi_processor_count)
    copied = _rate(lambda: landing.copy_(source), group)
    put = _rate(lambda: put_words(words, address, num_programs=num_programs), group)
    return LinkLimits(copied, put, None)


def _rate(write: Callable[[], object], group: EPGroup) -> float:
    def call(index: int, mark: Any) -> None:
        mark()
        write()
        mark()

    probe = EagerProbe(call, {"write": (0, 1)}, make_clock(group.device))
    probe.run(3)
    start_together(group)
    seconds = max_over_ranks(gather_values(probe.run(_ITERATIONS)["write"], group))
    return PROBE_BYTES / summarise(seconds).median / 1e3
