"""How the starter words the failures that torchrun's API reports."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ep_runtime.kernels.errors import RankFailure
from ep_runtime.launch.starter import describe_failures, record_failure

SIGKILL, SIGALRM, SIGTERM = -9, -14, -15


@pytest.fixture
def failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the failure of a rank that ended by `error`, or by an exit code alone."""

    def make(rank: int, exit_code: int, error: Exception | None = None) -> ProcessFailure:
        path = tmp_path / f"error{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        if error is not None:
            record_failure(error)
        return ProcessFailure(rank, 1000 + rank, exit_code, str(path))

    return make


def test_a_killed_rank_is_the_cause_even_if_others_raised_before_it_was_seen(failure: Any) -> None:
    failures = {0: failure(0, 1, RuntimeError("connection lost")), 1: failure(1, SIGKILL)}
    assert describe_failures(failures) == "rank 1 was killed by SIGKILL"


def test_a_rank_that_raised_for_itself_comes_before_one_that_tells_of_another(failure: Any) -> None:
    unnamed = RankFailure("communication of EP rank 0 of 2 broke and no rank reported why")
    failures = {0: failure(0, 1, unnamed), 1: failure(1, 1, ValueError("boom"))}
    assert describe_failures(failures) == "rank 1 failed: ValueError: boom"
    told = RankFailure("rank 1 failed: ValueError: boom")
    assert describe_failures({0: failure(0, 1, told)}) == "rank 1 failed: ValueError: boom"


def test_the_first_of_two_that_raised_is_the_cause(failure: Any) -> None:
    later_rank_first = {1: failure(1, 1, ValueError("first")), 0: failure(0, 1, KeyError("second"))}
    assert describe_failures(later_rank_first) == "rank 1 failed: ValueError: first"


def test_a_rank_ended_by_the_launcher_is_not_the_cause(failure: Any) -> None:
    failures = {0: failure(0, SIGTERM), 1: failure(1, 1, ValueError("boom"))}
    assert describe_failures(failures) == "rank 1 failed: ValueError: boom"


def test_a_rank_that_has_said_why_is_not_told_of_by_the_signal_that_ended_it(failure: Any) -> None:
    told = RankFailure("rank 1 is gone: no heartbeat for 12 s")
    failures = {0: failure(0, SIGALRM, told), 1: failure(1, SIGKILL)}
    failures[1].timestamp += 7  # suspended, so it does not take SIGTERM
    assert describe_failures(failures) == "rank 1 is gone: no heartbeat for 12 s"
    failures = {0: failure(0, SIGALRM, ValueError("boom")), 1: failure(1, SIGTERM)}
    assert describe_failures(failures) == "rank 0 failed: ValueError: boom"


def test_a_rank_that_left_no_word_is_told_of_by_its_exit_status(failure: Any) -> None:
    assert describe_failures({2: failure(2, 3)}) == "rank 2 failed: ended with exit status 3"


def test_nothing_is_recorded_where_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    record_failure(ValueError("boom"))


def test_the_record_is_what_torchrun_reads_too(tmp_path: Path, failure: Any) -> None:
    failed = failure(0, 1, ValueError("boom"))
    record = json.loads(Path(failed.error_file).read_text())["message"]
    assert record["message"] == "ValueError: boom"
    assert failed.timestamp == record["extraInfo"]["timestamp"]
