"""The picture of symm_mem's launches: its lines are the record's, and it needs no GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.symm_mem_plot import FLOOR, HOST, WHOLE_CALL, lines_of, write_plot

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def record() -> Any:
    return json.loads((RESULTS / "symm_mem_launches.json").read_text())


def test_the_lines_are_the_records_numbers(record: Any) -> None:
    lines = lines_of(record)
    assert len(lines) == len(record["cases"][0]["launches"]) + 3
    for case in record["cases"]:
        tokens = case["tokens_per_rank"]
        drawn = {name: dict(points)[tokens] for name, points in lines.items()}
        assert drawn["put_tokens"] == case["launches"][0]["us"]
        assert (drawn[WHOLE_CALL], drawn[HOST]) == (case["call_us"], case["host_us"]["call"])
        floors = [launch["floor_us"] for launch in case["launches"]]
        assert drawn[FLOOR] == pytest.approx(sum(us for us in floors if us is not None))


def test_what_a_cpu_does_not_measure_has_no_line(record: Any) -> None:
    cases = [
        {
            **case,
            "call_us": None,
            "launches": [{**launch, "floor_us": None} for launch in case["launches"]],
        }
        for case in record["cases"]
    ]
    assert not {WHOLE_CALL, FLOOR} & set(lines_of({**record, "cases": cases}))


def test_the_committed_record_is_drawn(record: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_plot(record, tmp_path / "launches.png")
    assert (tmp_path / "launches.png").read_bytes().startswith(b"\x89PNG")


def test_every_committed_record_of_times_has_its_picture() -> None:
    """Audits and traces are read as they are; docs/streams.md says what they show."""
    records = {path.stem for path in RESULTS.glob("*.json") if not path.match("audit_*")}
    records -= {"marlin_streams", "overlap_trace"}
    assert records == {path.stem for path in RESULTS.glob("*.png")}
