"""Fill the compilers' caches before anything is timed: many processes, one job each."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.experts_cells import SHAPES, TABLES

PROGRAM = (sys.executable, "-m", "benchmarks.experts_peers", "compile")


@dataclass(frozen=True)
class Job:
    """What one process compiles."""

    table: str
    shape: str
    implementation: str
    tokens_per_rank: tuple[int, ...]

    def command(self) -> list[str]:
        return [
            *PROGRAM,
            *("--tables", self.table, "--shapes", self.shape),
            *("--implementations", self.implementation),
            *("--tokens-per-rank", ",".join(map(str, self.tokens_per_rank))),
        ]


def jobs_of(
    tables: Sequence[str],
    shapes: Sequence[str],
    implementations: Sequence[str] | None,
    tokens_per_rank: Sequence[int],
) -> list[Job]:
    """One for each table, shape, implementation and half of the token counts, larger ones first."""
    middle = (len(tokens_per_rank) + 1) // 2
    halves = [tuple(tokens_per_rank[middle:]), tuple(tokens_per_rank[:middle])]
    return [
        Job(table, shape, name, half)
        for half in halves
        for table in tables
        for shape in shapes
        for name in TABLES[table].implementations
        if half and TABLES[table].has(SHAPES[shape]) and _is_asked(name, implementations)
    ]


def _is_asked(name: str, implementations: Sequence[str] | None) -> bool:
    return implementations is None or name in implementations


def run_jobs(jobs: Sequence[Job], num_processes: int) -> Iterator[tuple[Job, int, float]]:
    """Each job as it ends: its exit status, and seconds since the first began."""
    waiting, running = list(jobs), dict[Job, subprocess.Popen[bytes]]()
    start = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < num_processes:
            job = waiting.pop(0)
            running[job] = subprocess.Popen(job.command())
        for job in [job for job, process in running.items() if process.poll() is not None]:
            yield job, running.pop(job).returncode, time.perf_counter() - start
        time.sleep(0.1)
