"""Marlin's launches beside other work on one GPU: bits compared with serial runs, hangs found.

    python -m benchmarks.marlin_streams --json benchmarks/results/marlin_streams.json

Needs a package that the `marlin` kernel takes. A scenario issues two jobs on two streams, thousands
of times, in a random order and with random delays, some beside an occupant that holds
multiprocessors, some on streams of unequal priority. Every result is compared bit by bit on the
device. A batch that has not ended in 3 s is a hang: its locks are then overwritten by a copy, which
needs no multiprocessor, until every waiting program has seen its number and the device is free. A
scenario runs in a child process, which is given up where that fails.

`ep-runtime audit streams --device cuda --experts marlin --unjoined` runs the kernel in a layer;
this adds what a layer of ours never does: two Marlin launches at once. Exit status 0 where every
scenario has been run, whatever came of it; 1 where one is lost.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import positive_number, status_of
from benchmarks.marlin_jobs import SCHEMES, Job, column_job, dense_job, experts_job
from ep_runtime.kernels.occupant import occupy
from ep_runtime.launch.environment import describe_devices, describe_versions
from ep_runtime.launch.json_file import prepare_json_file, write_json

SCHEMA_VERSION = 1
HANG_S = 3.0
BATCH = 20
_CHILD_S = 40.0  # for a child's start and its first kernels
_HELD = (0, 1, 33, 66, 90, 100, 110, 120, 126, 130, 131, 132)
# Numbers that a program can wait for: of programs that share one block of sums.
_LOCK_VALUES = 160


@dataclass(frozen=True)
class Scenario:
    """Two jobs side by side. jobs: made on the device. note: why it is asked."""

    name: str
    jobs: Callable[[], list[Job]]
    note: str
    priorities: tuple[int, int] = (0, 0)
    occupant: bool = False


@dataclass(frozen=True)
class Finding:
    """num_wrong: results of each job that differ from serial ones. serial_differs: of serial runs.
    hang: what had not ended, or None. fault: an error in words, or None."""

    scenario: str
    jobs: tuple[str, ...] = ()
    note: str = ""
    priorities: tuple[int, int] = (0, 0)
    occupant: bool = False
    num_iterations: int = 0
    num_wrong: tuple[int, ...] | None = None
    serial_differs: int = 0
    hang: dict[str, Any] | None = None
    fault: str | None = None


def _two_experts(num_rows: int, *, share_locks: bool = False) -> list[Job]:
    first = experts_job("first", 1, num_rows)
    locks = first.locks if share_locks else None
    return [first, experts_job("second", 2, num_rows, locks=locks)]


def _beside_shared(num_rows: int, scheme: str = "gptq") -> list[Job]:
    routed = experts_job("routed", 1, num_rows, scheme=SCHEMES[scheme])
    shared = experts_job(
        "shared expert", 2, num_rows, num_experts=1, top_k=1, scheme=SCHEMES[scheme]
    )
    return [routed, shared]


def _columns() -> list[Job]:
    return [column_job(1), column_job(2)]


_OF_A_LAYER = "a shared expert on the aux stream, stored as the experts are"
SCENARIOS = (
    *(
        Scenario(
            f"shared_expert_{scheme}_{rows}", partial(_beside_shared, rows, scheme), _OF_A_LAYER
        )
        for scheme, rows in (("gptq", 1), ("gptq", 64), ("awq", 16), ("int8", 16), ("mxfp4", 16))
    ),
    Scenario(
        "shared_expert_unequal_priorities",
        partial(_beside_shared, 1),
        "the shared expert's stream goes first, and an occupant leaves little room",
        priorities=(0, -3),
        occupant=True,
    ),
    Scenario("experts_1", partial(_two_experts, 1), "two layers at once, locks of their own"),
    Scenario("experts_32", partial(_two_experts, 32), "two layers at once, locks of their own"),
    Scenario(
        "dense",
        lambda: [experts_job("routed", 1, 16), dense_job(2, 16)],
        "a dense layer of vLLM's beside the experts",
    ),
    Scenario("columns", _columns, "two chains of waiting programs, and an occupant", occupant=True),
    Scenario(
        "columns_unequal_priorities",
        _columns,
        "one chain's programs are put before the other's",
        priorities=(0, -3),
        occupant=True,
    ),
    Scenario(
        "shared_locks",
        partial(_two_experts, 1, share_locks=True),
        "what one kernel object on two streams would do",
    ),
)


class LockBreaker:
    """Frees a device on which programs wait for each other; made while the device is idle, since
    pinning memory waits for it."""

    def __init__(self, num_locks: int) -> None:
        self._stream = torch.cuda.Stream(priority=-5)
        self._values = [
            torch.full((num_locks,), value, dtype=torch.int32).pin_memory()
            for value in range(_LOCK_VALUES)
        ]

    def free(self, events: Sequence[Any], locks: Sequence[Tensor]) -> bool:
        """Overwrite the locks with each number until all is done; False after 10 s."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            for value in self._values:
                with torch.cuda.stream(self._stream):
                    for lock in locks:
                        lock.copy_(value, non_blocking=True)
                time.sleep(0.0005)
                if all(event.query() for event in events):
                    for lock in locks:
                        lock.zero_()
                    torch.cuda.synchronize()
                    return True
        return False


def run_scenario(scenario: Scenario, seconds: float) -> Finding:
    """Side by side for so long, or until it hangs. Raises SystemExit where a hang stays."""
    device = torch.device("cuda")
    jobs = scenario.jobs()
    expected, serial_differs = [], 0
    for job in jobs:
        expected.append(job.launch())
        torch.cuda.synchronize()
        serial_differs += sum(not torch.equal(job.launch(), expected[-1]) for _ in range(20))
    occupy(device, num_multiprocessors=1, duration_us=1)
    num_wrong = torch.zeros(len(jobs), dtype=torch.int64, device=device)
    for index, wanted in enumerate(expected):
        num_wrong[index] += _differs(wanted, wanted)
    breaker = LockBreaker(jobs[0].locks.numel())
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(priority=priority) for priority in scenario.priorities]
    aside = torch.cuda.Stream(priority=-5)
    chance, began, num_iterations = random.Random(7), time.monotonic(), 0
    hang: dict[str, Any] | None = None
    while hang is None and time.monotonic() - began < seconds:
        held: list[int] = []
        for _ in range(BATCH):
            num_iterations += 1
            if scenario.occupant:
                held.append(chance.choice(_HELD))
                if held[-1]:
                    with torch.cuda.stream(aside):
                        occupy(
                            device,
                            num_multiprocessors=held[-1],
                            duration_us=chance.randrange(5, 120),
                        )
            order = list(range(len(jobs)))
            chance.shuffle(order)
            for index in order:
                with torch.cuda.stream(streams[index]):
                    if chance.random() < 0.5:
                        torch.cuda._sleep(chance.randrange(1, 40_000))
                    num_wrong[index] += _differs(jobs[index].launch(), expected[index])
        events = [stream.record_event() for stream in (*streams, aside)]
        unfinished = _wait(events)
        if unfinished:
            hang = {
                "after_iterations": num_iterations,
                "unfinished_streams": unfinished,
                "occupants_of_batch": held,
            }
    found = Finding(
        scenario.name,
        tuple(job.name for job in jobs),
        scenario.note,
        scenario.priorities,
        scenario.occupant,
        num_iterations,
        serial_differs=serial_differs,
        hang=hang,
    )
    if hang is None:
        return replace(found, num_wrong=tuple(num_wrong.tolist()))
    hang["freed_by_writing_locks"] = breaker.free(events, [job.locks for job in jobs])
    if not hang["freed_by_writing_locks"]:
        _emit(found)
        os._exit(3)
    return found


def _differs(found: Tensor, wanted: Tensor) -> Tensor:
    return (found.view(torch.int16) != wanted.view(torch.int16)).any()


def _wait(events: Sequence[Any]) -> list[int]:
    """Which of them have not been met in HANG_S."""
    until = time.monotonic() + HANG_S
    while not all(event.query() for event in events):
        if time.monotonic() > until:
            return [index for index, event in enumerate(events) if not event.query()]
        time.sleep(0.0002)
    return []


def _emit(found: Finding) -> None:
    print(json.dumps(asdict(found)), flush=True)


def run_child(names: Sequence[str], seconds: float) -> None:
    """Print a line when each scenario begins and one of what it found."""
    for scenario in SCENARIOS:
        if scenario.name not in names:
            continue
        print(json.dumps({"begins": scenario.name}), flush=True)
        try:
            found = run_scenario(scenario, seconds)
        except Exception as error:
            fault = f"{type(error).__name__}: {str(error).strip()}"[:600]
            found = Finding(scenario.name, note=scenario.note, fault=fault)
        _emit(found)


def run_all(
    names: Sequence[str],
    seconds: float,
    child: Sequence[str],
    found: Callable[[dict[str, Any]], None],
) -> None:
    """Every scenario's finding, as it comes, to `found`.

    child: the command that runs those named by its last argument; one that ends early takes the
    scenario with it that it was in, and the rest go to another.
    """
    left = list(names)
    while left:
        limit_s = _CHILD_S + (seconds + HANG_S + 15) * len(left)
        begun: str | None = None
        num_before = len(left)
        with _ended_after([*child, ",".join(left)], limit_s) as process:
            for line in _json_lines(process):
                begun = line.get("begins", begun)
                if "scenario" in line:
                    found(line)
                    left.remove(line["scenario"])
        if begun in left or len(left) == num_before:
            lost = begun if begun in left else left[0]
            fault = f"the process was lost with it, its status {process.returncode}"
            found(asdict(Finding(str(lost), fault=fault)))
            left.remove(lost)


@contextmanager
def _ended_after(command: Sequence[str], limit_s: float) -> Iterator[subprocess.Popen[str]]:
    """A process of which the output is read, killed once its time is up."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()


def _json_lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    for line in process.stdout or ():
        if line.startswith("{"):
            yield json.loads(line)


def summary_line(found: dict[str, Any]) -> str:
    """One scenario in a line."""
    if found["fault"] is not None:
        return f"{found['scenario']}: {found['fault']}"
    if found["hang"] is not None:
        return f"{found['scenario']}: HANGS after {found['hang']['after_iterations']} iterations"
    return (
        f"{found['scenario']}: {found['num_iterations']} iterations, wrong {found['num_wrong']}, "
        f"serial runs that differ {found['serial_differs']}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.marlin_streams", description=(__doc__ or "").splitlines()[0]
    )
    known = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--seconds", type=positive_number, default=4.0, help="of each scenario")
    parser.add_argument("--scenarios", default=",".join(known), help="with commas")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given_arguments = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(given_arguments)
    names = (given.child or given.scenarios).split(",")
    for name in names:
        if name not in known:
            parser.error(f"--scenarios {name}: is unknown; choose among {', '.join(known)}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device, and Marlin's GEMM runs on one alone")
    if given.child:
        run_child(names, given.seconds)
        return 0
    return status_of(lambda: audit(names, given, given_arguments))


def audit(names: Sequence[str], given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the scenarios and write the record; the exit status."""
    prepare_json_file(given.json)
    module = [sys.executable, "-m", "benchmarks.marlin_streams"]
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "command_line": shlex.join(["python", "-m", "benchmarks.marlin_streams", *arguments]),
        "environment": describe_versions(),
        "devices": describe_devices(),
        "seconds": given.seconds,
        "is_complete": False,
        "scenarios": [],
    }
    found: list[dict[str, Any]] = record["scenarios"]

    def add(one: dict[str, Any]) -> None:
        """Also what came before the run is ended from outside is in the record."""
        print(summary_line(one), flush=True)
        found.append(one)
        record["is_complete"] = len(found) == len(names)
        write_json(given.json, record)

    run_all(names, given.seconds, [*module, "--seconds", str(given.seconds), "--child"], add)
    return 1 if any(one["fault"] is not None for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
