"""The search for the fastest right tiles of one layer at one number of rows an expert.

Each projection is searched for itself: everything that launches is timed roughly, the fastest of
each height are checked against float32 and timed well. One height serves both projections, so of
each height the best of both make one way to run a call, and so do the best of the Hopper GEMMs.
These few are checked and timed as whole calls beside the rule's, and replace it only where they
gain more than MIN_GAIN.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from triton.errors import TritonError

from ep_runtime.kernels.errors import EPRuntimeError
from ep_runtime.kernels.hopper_tiles import HopperSchedule
from ep_runtime.kernels.packed_schedule import PackedExpertsTiles, PackedTiles
from ep_runtime.kernels.tile_tables import TunedPoint
from ep_runtime.kernels.tiles import (
    HOPPER_BLOCK_M,
    ExpertsTiles,
    GemmTiles,
    rule_tiles,
)
from ep_runtime.launch.tune_candidates import (
    PROJECTIONS,
    Candidate,
    Projection,
    Tiles,
    rule_of,
)
from ep_runtime.launch.tune_problem import TuneProblem
from ep_runtime.launch.tune_timing import Ceilings, Timer

MIN_GAIN = 0.02
NUM_FINALISTS = 4
ROUGH_ROUNDS, FINE_ROUNDS, WHOLE_ROUNDS = 1, 8, 16


@dataclass
class SearchNotes:
    """What was left out. wrong: a line for each. failed: reason -> how many did not run for it."""

    wrong: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)


def search_point(
    problem: TuneProblem,
    candidates: Sequence[Candidate],
    timer: Timer,
    ceilings: Ceilings,
    notes: SearchNotes,
) -> TunedPoint:
    """The fastest right tiles of a problem, or none where the rule's are not beaten.

    Raises EPRuntimeError where the rule's own tiles do not run or give a wrong result.
    """
    rule = rule_of(problem.rows_per_expert, problem.shape, problem.device)
    best = {
        (projection, key): _best_of(problem, some, timer, notes)
        for projection in PROJECTIONS
        for key, some in _by_height(candidates, projection).items()
    }
    ways = [tiles for tiles in _combine(best, problem) if tiles != rule]
    finalists = [rule, *(tiles for tiles in ways if _is_right_whole(problem, tiles, notes))]
    _check_rule(problem, rule)
    us = timer.time(
        {tiles: problem.whole_calls(tiles) for tiles in finalists}, num_rounds=WHOLE_ROUNDS
    )
    winner = min(finalists, key=lambda tiles: us[tiles])
    if us[winner] >= us[rule] * (1 - MIN_GAIN):
        winner = rule
    least_us = ceilings.least_us(problem.expected_bytes, problem.expected_flops)
    return TunedPoint(
        rows_per_expert=problem.rows_per_expert,
        tiles=None if winner == rule else winner,
        us=us[winner],
        rule_us=us[rule],
        roofline_fraction=least_us / us[winner],
    )


def _by_height(
    candidates: Sequence[Candidate], projection: Projection
) -> dict[tuple[int, bool], list[Candidate]]:
    """(block_m, is_hopper) -> the candidates of one projection."""
    found: dict[tuple[int, bool], list[Candidate]] = {}
    for candidate in candidates:
        if candidate.projection == projection:
            found.setdefault((candidate.block_m, candidate.is_hopper), []).append(candidate)
    return found


def _best_of(
    problem: TuneProblem, candidates: Sequence[Candidate], timer: Timer, notes: SearchNotes
) -> Candidate | None:
    """The fastest right one; None where none is."""
    launched = [c for c in candidates if _launches(problem.calls(c)[0], problem, notes)]
    rough = timer.time({c: problem.calls(c) for c in launched}, num_rounds=ROUGH_ROUNDS)
    right: list[Candidate] = []
    for candidate in sorted(launched, key=lambda c: rough[c]):
        if len(right) == NUM_FINALISTS:
            break
        if _is_right(problem, candidate, notes):
            right.append(candidate)
    if not right:
        return None
    fine = timer.time({c: problem.calls(c) for c in right}, num_rounds=FINE_ROUNDS)
    return min(right, key=lambda c: fine[c])


def _launches(call: Callable[[], object], problem: TuneProblem, notes: SearchNotes) -> bool:
    try:
        call()
        _synchronize(problem.device)
    except (TritonError, RuntimeError, ValueError, AssertionError) as error:
        notes.failed[f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"] += 1
        try:
            _synchronize(problem.device)
        except RuntimeError:
            raise EPRuntimeError(
                f"a candidate left the device unusable: {error}; start again with the points that "
                f"are missing"
            ) from error
        return False
    return True


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _is_right(problem: TuneProblem, candidate: Candidate, notes: SearchNotes) -> bool:
    error, limit = problem.error_of(candidate), problem.limit_of(candidate)
    if error <= limit:
        return True
    notes.wrong.append(_wrong_text(problem, str(candidate), error, limit))
    return False


def _is_right_whole(problem: TuneProblem, tiles: Tiles, notes: SearchNotes) -> bool:
    error = problem.whole_error(tiles)
    if error <= problem.whole_limit:
        return True
    notes.wrong.append(_wrong_text(problem, str(tiles), error, problem.whole_limit))
    return False


def _wrong_text(problem: TuneProblem, what: str, error: float, limit: float) -> str:
    return (
        f"{problem.rows_per_expert:g} rows an expert, {what}: relative error {error:.1e} is above "
        f"{limit:.0e}"
    )


def _check_rule(problem: TuneProblem, rule: Tiles) -> None:
    error = problem.whole_error(rule)
    if not error <= problem.whole_limit:
        raise EPRuntimeError(
            f"the default tiles give a wrong result at {problem.rows_per_expert:g} rows an expert: "
            f"relative error {error:.1e}, limit {problem.whole_limit:.0e}; {rule}"
        )


def _combine(
    best: dict[tuple[Projection, tuple[int, bool]], Candidate | None],
    problem: TuneProblem,
) -> list[Tiles]:
    """A way to run a call for each height, and for Hopper, that both projections have a best of."""
    ways: list[Tiles] = []
    for key in dict.fromkeys(key for _, key in best):
        first, second = best.get(("gate_up", key)), best.get(("down", key))
        if first is None or second is None:
            continue
        if isinstance(first.how, GemmTiles) and isinstance(second.how, GemmTiles):
            ways.append(ExpertsTiles(key[0], first.how, second.how))
        elif isinstance(first.how, PackedTiles) and isinstance(second.how, PackedTiles):
            ways.append(PackedExpertsTiles(key[0], first.how, second.how))
        elif isinstance(first.how, HopperSchedule) and isinstance(second.how, HopperSchedule):
            tiles = rule_tiles(HOPPER_BLOCK_M, problem.shape, problem.device)
            ways.append(
                ExpertsTiles(
                    HOPPER_BLOCK_M,
                    tiles.gate_up,
                    tiles.down,
                    is_hopper=True,
                    gate_up_schedule=first.how,
                    down_schedule=second.how,
                )
            )
    return ways
