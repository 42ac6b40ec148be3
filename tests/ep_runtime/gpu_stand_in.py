"""What the audit on a GPU asks of the device, on a CPU: streams are recorded, nothing is late."""

from typing import Any

import torch
from torch import Tensor

from ep_runtime.audit_gpu import Gpu
from ep_runtime.stream_recorder import MAIN, RecordedCuda, RecordedStream, StreamRecorder


class RecordedGpuCuda(RecordedCuda):
    """RecordedCuda, with what only the audit on a GPU asks of `torch.cuda`."""

    def __init__(self, recorder: StreamRecorder) -> None:
        super().__init__(recorder, "stream")
        self._main = RecordedStream(recorder, MAIN, 0)

    def default_stream(self, device: torch.device | None = None) -> RecordedStream:
        return self._main

    def synchronize(self, device: torch.device | None = None) -> None:
        return None


class CpuGpu(Gpu):
    """calls: what was asked of the device, in order; blocks: free bytes of the allocator."""

    def __init__(self) -> None:
        self.recorder = StreamRecorder()
        self.device = torch.device("cpu")
        self.cuda: Any = RecordedGpuCuda(self.recorder)
        self.name, self.num_multiprocessors = "a GPU that is not there", 132
        self.calls: list[tuple[Any, ...]] = []
        self.blocks = [512, 4096]

    def spin(self, duration_us: float) -> None:
        self.calls.append(("spin", self.recorder.current_stream, duration_us))

    def occupy(self, num_multiprocessors: int, duration_us: int) -> Tensor:
        stream = self.recorder.current_stream
        self.calls.append(("occupy", stream, num_multiprocessors, duration_us))
        return torch.ones(num_multiprocessors, dtype=torch.int32)

    def free_blocks(self) -> list[int]:
        self.calls.append(("free_blocks", self.recorder.current_stream))
        return self.blocks
