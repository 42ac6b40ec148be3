"""What the checks of the stream audit on a GPU have in common: the device, the layer, a result.

One process, one rank, one GPU: every backend and kernel that can be planned there, with the
stand-ins of `audit_stand_ins.py` for what one rank lacks.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from ep_runtime.audit_stand_ins import collectives_on_their_own_stream
from ep_runtime.audit_streams import AuditCase, scheme_of_fewer
from ep_runtime.config import MoEConfig, ParallelConfig, SharedExpertsConfig
from ep_runtime.distributed import init_distributed
from ep_runtime.layer import MoELayer
from ep_runtime.machine import Machine
from ep_runtime.plan import Plan, resolve_plan
from ep_runtime.rendezvous import Rendezvous
from ep_runtime.streams import CudaStreams

MAX_TOKENS_PER_RANK = 64
TOKEN_THRESHOLD = 96
# Of the calls, in order: one round, two rounds, above the threshold, none, one row.
ROWS = (48, 80, 120, 0, 1)
_SMALL_BYTES = 1 << 20  # of torch's CUDA allocator, kSmallSize
_MAX_TAKEN_BYTES = 1 << 30
MAX_HIDDEN_SIZE, MAX_INTERMEDIATE_SIZE, MAX_EXPERTS = 2048, 1024, 16


@dataclass(frozen=True)
class GpuResult:
    """What a check of a case showed.

    check: sanitizer | allocator | co_run. case: in a co-run backend and overlap say how the
    kernel's calls were made. num_wrong: iterations whose bits were other than alone. faults: in
    words. joined: of a co-run, whether the kernel and its company were ordered, as the plan does
    for what is not certified. skip_reason: why it was not run; then nothing else is said.
    """

    check: str
    case: AuditCase
    concurrency: str = ""
    schedules: tuple[str, ...] = ()
    joined: bool = False
    num_iterations: int = 0
    num_wrong: int = 0
    faults: tuple[str, ...] = ()
    seconds: float = 0.0
    skip_reason: str | None = None

    @property
    def passed(self) -> bool:
        return self.num_wrong == 0 and not self.faults


class Gpu:
    """The device, and all that the checks ask of it; a test gives another on a CPU."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device, self.cuda = device, cuda
        properties = torch.cuda.get_device_properties(device)
        self.name: str = properties.name
        self.num_multiprocessors: int = properties.multi_processor_count
        # _sleep counts clock cycles; the rate is in kHz.
        self._cycles_per_us = max(1.0, getattr(properties, "clock_rate", 1_700_000) / 1e3)

    def spin(self, duration_us: float) -> None:
        """Keep the current stream busy for about so long, on one thread."""
        torch.cuda._sleep(int(duration_us * self._cycles_per_us))

    def occupy(self, num_multiprocessors: int, duration_us: int) -> Tensor:
        """See kernels/occupant.py."""
        from ep_runtime.kernels.occupant import occupy

        return occupy(self.device, num_multiprocessors=num_multiprocessors, duration_us=duration_us)

    def free_blocks(self) -> list[int]:
        """Sizes that take what the allocator has free for the main stream; see `takes_of`."""
        segments = torch.cuda.memory.memory_snapshot()
        return takes_of(
            [s for s in segments if s["device"] == self.device.index and s["stream"] == 0]
        )

    def finish(self) -> None:
        """Wait for all streams; other threads of the process go on."""
        self.cuda.synchronize(self.device)


def takes_of(segments: Iterable[Mapping[str, Any]]) -> list[int]:
    """Sizes of allocations, largest first, that fill the free blocks of an allocator's segments.

    Sizes up to 1 MiB come from small segments, others from large ones; so a small segment's block
    is taken in parts of at most that, and what is less in a large one is left: asking for it would
    open another segment. At most 1 GiB in all.
    """
    sizes: list[int] = []
    for segment in segments:
        is_small = segment["segment_type"] == "small"
        for block in segment["blocks"]:
            size = int(block["size"])
            if block["state"] != "inactive":
                continue
            if not is_small:
                sizes += [size] if size > _SMALL_BYTES else []
                continue
            whole, rest = divmod(size, _SMALL_BYTES)
            sizes += [_SMALL_BYTES] * whole + ([rest] if rest else [])
    taken: list[int] = []
    for size in sorted(sizes, reverse=True):
        if sum(taken) + size <= _MAX_TAKEN_BYTES:
            taken.append(size)
    return taken


class GpuSite:
    """Where layers and stand-ins get their streams from; see `audit_stand_ins.Site`.

    cuda: `torch.cuda`, or a `DelayingCuda` while an allocator stress runs.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.faults: list[str] = []
        self.cuda: Any = gpu.cuda

    def make_cuda(self, name: str) -> Any:
        return self.cuda

    def labelled(self, label: str) -> AbstractContextManager[None]:
        return nullcontext()

    def look_at_collective(self) -> None:
        current = self.gpu.cuda.current_stream(self.gpu.device)
        if current != self.gpu.cuda.default_stream(self.gpu.device):
            self.faults.append("a collective was issued beside the main stream")


def gpu_config(moe: MoEConfig) -> MoEConfig:
    """The same structure, cut to sizes of which thousands of calls take seconds."""
    per_group = max(2, -(-2 * moe.top_k // moe.topk_group), MAX_EXPERTS // moe.n_group)
    num_experts = min(moe.num_experts, moe.n_group * per_group)
    return MoEConfig.model_validate(
        moe.model_dump()
        | {
            "hidden_size": min(moe.hidden_size, MAX_HIDDEN_SIZE),
            "moe_intermediate_size": min(moe.moe_intermediate_size, MAX_INTERMEDIATE_SIZE),
            "shared_intermediate_size": min(moe.shared_intermediate_size, MAX_INTERMEDIATE_SIZE),
            "num_experts": num_experts,
            "quantization": scheme_of_fewer(moe, num_experts),
        }
    )


def gpu_machine() -> Machine:
    """This one; DeepEP's backends copy on one rank and need no package."""
    machine = Machine.detect("cuda")
    return replace(machine, packages=tuple({*machine.packages, "deep_ep"}))


def plan_gpu_case(
    moe: MoEConfig,
    case: AuditCase,
    machine: Machine,
    max_tokens_per_rank: int = MAX_TOKENS_PER_RANK,
    device: Literal["cpu", "cuda"] = "cuda",
) -> Plan:
    """The plan of a case; raises as `resolve_plan`. device: that the layer is on."""
    return resolve_plan(
        moe,
        ParallelConfig(
            device=device,
            all2all_backend=case.backend,
            max_tokens_per_rank=max_tokens_per_rank,
        ),
        machine,
        experts=case.experts,
        shared_experts=SharedExpertsConfig.model_validate(
            {"overlap": case.overlap, "token_threshold": TOKEN_THRESHOLD}
        ),
    )


@contextmanager
def gpu_layer(plan: Plan, fill: Callable[[MoELayer], None], site: GpuSite) -> Iterator[MoELayer]:
    """A layer of one rank, with a site's streams; waits for the device as it ends."""
    with ExitStack() as stack:
        rendezvous = Rendezvous(HashStore(), 0, 1)
        ctx = stack.enter_context(init_distributed(plan.parallel, rendezvous=rendezvous))
        ctx.streams = CudaStreams(ctx.device, site.make_cuda("aux"))
        layer = MoELayer(plan.moe, ctx, plan=plan)
        fill(layer)
        stack.enter_context(collectives_on_their_own_stream(site, ctx.device))
        stack.callback(site.gpu.finish)
        yield layer


def schedules_of(plan: Plan) -> tuple[str, ...]:
    """The shared expert's schedules that calls of `ROWS` rows meet."""
    return tuple(dict.fromkeys(str(plan.regime(rows).schedule) for rows in ROWS))


def random_rows(moe: MoEConfig, device: torch.device, num_rows: int, seed: int) -> Tensor:
    """[num_rows, H] rows of a seed."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((num_rows, moe.hidden_size), generator=generator)
    return rows.to(device=device, dtype=moe.torch_dtype)


class DelayingCuda:
    """`torch.cuda`, whose streams begin what they are given late, by chance.

    Work on a stream that was entered through it starts behind a spinning kernel: a consumer that
    nobody waits for then reads what has been freed and written anew in the meantime.
    """

    def __init__(self, gpu: Gpu, chance: random.Random, max_delay_us: int) -> None:
        self._gpu, self._chance, self._max_delay_us = gpu, chance, max_delay_us

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu.cuda, name)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """As `torch.cuda.stream`, behind a delay."""
        with self._gpu.cuda.stream(stream):
            self.delay()
            yield

    def delay(self) -> None:
        """Spin on the current stream, three times in four."""
        if self._chance.random() < 0.75:
            self._gpu.spin(self._chance.uniform(1, self._max_delay_us))
