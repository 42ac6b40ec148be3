"""A layer of every virtual rank of one process, over `symm_mem`: the runner, not the context."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_runtime.all2all.expert_ids import local_expert_map
from ep_runtime.all2all.symm_mem import SymmMemLimits
from ep_runtime.config import MoEConfig, ParallelConfig, SharedExpertsConfig
from ep_runtime.kernels.base import ExpertWeights, ModularExperts
from ep_runtime.kernels.registry import experts_class
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.machine import Machine, TritonMode
from ep_runtime.modular_kernel import ModularKernel
from ep_runtime.phases import PhaseTimer
from ep_runtime.plan import Plan, resolve_plan
from ep_runtime.router import Router
from ep_runtime.runner import MoERunner
from ep_runtime.shared_expert import SharedExpert
from ep_runtime.streams import make_streams
from tests.all2all.virtual_ranks import make_virtual_ranks, virtual_groups


@dataclass(frozen=True)
class VirtualRank:
    """One rank: its runner, its experts' weights, and the stream that its calls are made on."""

    runner: MoERunner
    weights: ExpertWeights
    expert_map: Tensor
    stream: Any

    def call(self, rows: Tensor, rows_per_rank: tuple[int, ...]) -> Tensor:
        """[T, H] to a fresh [T, H]."""
        with torch.no_grad():
            return self.runner.run(
                rows,
                self.weights,
                expert_map=self.expert_map,
                routing=None,
                rows_per_rank=rows_per_rank,
            )


def plan_virtual_layer(
    moe: MoEConfig,
    num_ranks: int,
    device: torch.device,
    *,
    experts: str,
    overlap: str,
    max_tokens: int,
) -> Plan:
    """As for as many GPUs as there are ranks, NVLink between them."""
    on_cuda = device.type == "cuda"
    machine = Machine(
        "virtual ranks",
        device.type,
        TritonMode.COMPILED if on_cuda else TritonMode.INTERPRETER,
        num_devices=num_ranks,
        nvlink=True,
        compute_capability=torch.cuda.get_device_capability(device) if on_cuda else None,
    )
    return resolve_plan(
        moe,
        ParallelConfig(
            dp_size=num_ranks,
            device="cuda" if on_cuda else "cpu",
            all2all_backend="symm_mem",
            max_tokens_per_rank=max_tokens,
        ),
        machine,
        experts=experts,
        shared_experts=SharedExpertsConfig.model_validate(
            {"overlap": overlap, "token_threshold": max_tokens}
        ),
    )


def make_virtual_layer(
    plan: Plan, device: torch.device, limits: SymmMemLimits
) -> list[VirtualRank]:
    """Seeded weights, the same for equal configurations; all ranks share the aux stream."""
    num_ranks = plan.placement.ep_size
    groups = virtual_groups(num_ranks, device)
    backends = make_virtual_ranks(plan.backend_shape(), device, limits, groups)
    streams = make_streams(device)
    ranks: list[VirtualRank] = []
    for rank, (group, backend) in enumerate(zip(groups, backends, strict=True)):
        router, shared = Router(plan.moe, device), SharedExpert(plan.moe, device)
        _fill(router.weight, 1)
        _fill(shared.w13, 2)
        _fill(shared.w2, 3)
        experts: Any = experts_class(plan.experts)(plan.experts_shape(rank))
        timer = PhaseTimer(streams)
        kernel = ModularKernel(
            backend,
            experts,
            max_tokens_per_rank=plan.parallel.max_tokens_per_rank,
            workspace=Workspace(
                device, experts.workspace_bytes(num_ranks * plan.parallel.max_tokens_per_rank)
            ),
            timer=timer,
        )
        runner = MoERunner(
            plan, router=router, kernel=kernel, shared=shared, streams=streams, timer=timer
        )
        ranks.append(
            VirtualRank(
                runner,
                _weights(plan, rank, experts, device),
                local_expert_map(plan.placement, group),
                torch.cuda.Stream(device) if device.type == "cuda" else None,
            )
        )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return ranks


class _Turns:
    """Ranks run in turn, each until it has issued a dispatch or a combine.

    So every rank has issued before any waits: whatever hardware queues the streams share, no wait
    is in front of what it waits for, and on a CPU none is waited for in vain.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self._turn = num_ranks, 0
        self._changed = threading.Condition()
        self.errors: list[BaseException] = []

    @contextmanager
    def between(self, backend: Any, rank: int) -> Iterator[None]:
        """Inside, whatever the backend issues ends the rank's turn."""
        issues = {name: getattr(backend, name) for name in ("dispatch", "combine")}

        def ending(issue: Callable[..., Any]) -> Callable[..., Any]:
            def issue_and_pass_on(*arguments: Any, **keywords: Any) -> Any:
                pending = issue(*arguments, **keywords)
                self.pass_on()
                self.take(rank)
                return pending

            return issue_and_pass_on

        for name, issue in issues.items():
            setattr(backend, name, ending(issue))
        try:
            yield
        finally:
            for name in issues:
                delattr(backend, name)

    def take(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank or self.errors, timeout=200)
            if self._turn != rank:
                raise RuntimeError(f"rank {rank} never had its turn") from self.errors[0]

    def pass_on(self) -> None:
        with self._changed:
            self._turn = (self._turn + 1) % self._num_ranks
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.errors.append(error)
            self._changed.notify_all()


def call_all(ranks: list[VirtualRank], rows: list[Tensor]) -> list[Tensor]:
    """One call of every rank, each in a thread and on a stream of its own."""
    counts = tuple(len(own) for own in rows)
    turns, outputs = _Turns(len(ranks)), [torch.empty(0)] * len(ranks)

    def run(number: int) -> None:
        rank = ranks[number]
        stream = nullcontext() if rank.stream is None else torch.cuda.stream(rank.stream)
        try:
            turns.take(number)
            kernel: Any = rank.runner.kernel
            with stream, turns.between(kernel.backend, number):
                outputs[number] = rank.call(rows[number], counts)
            turns.pass_on()
        except BaseException as error:
            turns.fail(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if turns.errors:
        raise turns.errors[0]
    return outputs


def _fill(weight: Tensor, seed: int) -> None:
    generator = torch.Generator(weight.device).manual_seed(seed)
    weight.data.normal_(generator=generator).div_(weight.shape[-1] ** 0.5)


def _weights(plan: Plan, rank: int, experts: ModularExperts, device: torch.device) -> ExpertWeights:
    """Each expert of the seed of its global number."""
    moe, mine = plan.moe, plan.placement.experts_of(rank)
    hidden, width = moe.hidden_size, moe.moe_intermediate_size
    w13 = torch.empty(len(mine), 2 * width, hidden, dtype=moe.torch_dtype, device=device)
    w2 = torch.empty(len(mine), hidden, width, dtype=moe.torch_dtype, device=device)
    for local, expert in enumerate(mine):
        _fill(w13[local], 100 + expert)
        _fill(w2[local], 1000 + expert)
    return experts.prepare_weights(ExpertWeights(w13, w2))
