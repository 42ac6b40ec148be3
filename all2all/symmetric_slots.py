"""The pair of slots in which the backends of a group take turns, and who is in which.

The first backend of a group opens them, in the size that it needs; one that fits shares them, and
one that does not opens larger ones, which later backends share. So a group whose largest backend
is built first has one pair. All ranks build the same backends in the same order and decide alike.
"""

from collections.abc import Callable

import torch

from ep_runtime.all2all.base import EPGroup
from ep_runtime.all2all.comm_stream import CommStream
from ep_runtime.all2all.symmetric_buffer import SymmetricBuffer
from ep_runtime.kernels.symm_channel import (
    Channel,
    ExpertHomes,
    FailedWait,
    SlotLayout,
    SlotSpace,
    slot_bytes,
)

NUM_SLOTS = 2
_KEY = "symmetric slots"  # in EPGroup.shared

OpenBuffer = Callable[[EPGroup, int], SymmetricBuffer]


class SymmetricSlots:
    """Two slots of every rank's memory, their epochs, and this rank's words about waits.

    Making them is a collective of the group. comm_stream: None on a CPU.
    """

    def __init__(self, group: EPGroup, space: SlotSpace, open_buffer: OpenBuffer) -> None:
        device, on_cuda = group.device, group.device.type == "cuda"
        self.space = space
        self.comm_stream = CommStream(device, NUM_SLOTS) if on_cuda else None
        self._group = group
        self._buffer: SymmetricBuffer | None = open_buffer(
            group, NUM_SLOTS * slot_bytes(group.size, space)
        )
        self._epochs = tuple(
            torch.zeros(1, dtype=torch.int64, device=device) for _ in range(NUM_SLOTS)
        )
        self._failed = torch.zeros(1, dtype=torch.int64, device=device)
        self._record = torch.zeros(1, dtype=torch.int64, pin_memory=on_cuda)
        self._record_word = self._record.numpy()  # reading a tensor takes ten times as long
        abort = group.abort
        if abort is None:  # nobody watches
            abort = torch.zeros(1, dtype=torch.int64, pin_memory=on_cuda)
        self._abort = abort
        self._free = list(range(NUM_SLOTS))
        self._num_users = 0

    def can_hold(self, space: SlotSpace) -> bool:
        """Whether a backend that needs so much may use them; no longer once the last has left."""
        return self._buffer is not None and self.space.holds(space)

    def enter(
        self, layout: SlotLayout, homes: ExpertHomes, wait_limit_ns: int
    ) -> tuple[Channel, ...]:
        """One more backend: its ends of the slots. layout: in this space."""
        if self._buffer is None:
            raise RuntimeError("these slots have been closed")
        self._num_users += 1
        channels = []
        for slot in range(NUM_SLOTS):
            start = slot * layout.num_bytes
            peers = [address + start for address in self._buffer.addresses]
            channels.append(
                Channel(
                    layout=layout,
                    rank=self._group.rank,
                    memory=self._buffer.memory[start : start + layout.num_bytes],
                    peers=torch.tensor(peers, dtype=torch.int64, device=self._group.device),
                    homes=homes,
                    epoch=self._epochs[slot],
                    failed=self._failed,
                    record=self._record,
                    abort=self._abort,
                    wait_limit_ns=wait_limit_ns,
                )
            )
        return tuple(channels)

    def leave(self) -> None:
        """One backend less; the last one's leaving releases the memory."""
        self._num_users -= 1
        if self._num_users == 0:
            self._buffer = None

    def take(self) -> int:
        """The first free slot, for one call. Raises RuntimeError where there is none."""
        if not self._free:
            raise RuntimeError(
                f"symm_mem has {NUM_SLOTS} calls in flight, which is its limit for all layers "
                f"together; wait for the combine of one before dispatching the next (a call that "
                f"an exception has ended keeps its place: close the context)"
            )
        return self._free.pop(0)

    def give_back(self, slot: int) -> None:
        """The call in that slot is over."""
        self._free = sorted([*self._free, slot])

    def failed_wait(self) -> FailedWait | None:
        """The wait of this rank that ended too soon, if there was one; does not wait."""
        return FailedWait.from_record(int(self._record_word[0]))

    def forget_failed_wait(self) -> None:
        """Go on after a wait that was only cut in slices. On a CPU."""
        self._failed.zero_()
        self._record.zero_()


def shared_slots(group: EPGroup, needs: SlotSpace, open_buffer: OpenBuffer) -> SymmetricSlots:
    """The group's slots if they hold `needs`, else new ones that hold that too: a collective."""
    slots: SymmetricSlots | None = group.shared.get(_KEY)
    if slots is None or not slots.can_hold(needs):
        space = needs if slots is None else slots.space.widened(needs)
        slots = SymmetricSlots(group, space, open_buffer)
        group.shared[_KEY] = slots
    return slots
