"""Every certificate names a test that exists, the state that its owner has, and the record of an
audit that was of that owner and found nothing."""

import ast
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ep_runtime.all2all import registry as backends
from ep_runtime.all2all.base import BackendCapabilities
from ep_runtime.kernels import registry as experts
from ep_runtime.kernels.base import (
    NEVER_REVIEWED,
    Concurrency,
    ConcurrencyRule,
    ExpertsCapabilities,
)
from ep_runtime.shared_expert import SharedExpert

ROOT = Path(__file__).parents[1]
PAGE = "docs/streams.md"

# Registered ones alone: other tests may have registered kernels of their own.
CERTIFICATES: dict[str, tuple[ConcurrencyRule, ...]] = {
    "the shared expert": SharedExpert.concurrency_rules,
    **{
        f"experts {name}": experts.experts_class(name).capabilities.concurrency
        for name in experts._BUILT_IN
    },
    **{
        f"backend {name}": (backends.backend_class(name).capabilities.communication,)
        for name in backends._BUILT_IN
    },
}


def fault_of(rule: ConcurrencyRule, owner: str) -> str | None:
    """Why a certificate is none; None where it stands, or claims nothing."""
    if rule.concurrency is Concurrency.CERTIFIED:
        path, separator, test = rule.evidence.partition("::")
        if not separator or test not in _tests_of(path):
            return f"{rule.evidence} is not a test"
        if not rule.owns.strip():
            return "it does not say what state is owned"
    return _fault_of_record(rule, owner) if rule.record else None


def _fault_of_record(rule: ConcurrencyRule, owner: str) -> str | None:
    """Why a record of the audit on a GPU does not show it; None where it does.

    A kernel that is certified had company in it, another was joined; of an UNSAFE one any result is
    evidence.
    """
    path = rule.record
    try:
        record = json.loads((ROOT / path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{path} is no record: {error}"
    kind, _, name = owner.rpartition(" ")
    ran = [check for check in record["checks"] if check["skip_reason"] is None]
    own = [check for check in ran if kind == "the shared" or name == check.get(kind)]
    if record["device"] != "cuda" or not own:
        return f"{path} is not of a run of {owner} on a GPU"
    if rule.concurrency is Concurrency.UNSAFE:
        return None
    if not record["passed"]:
        return f"{path} is not of a clean run of {owner}"
    wanted = rule.concurrency is not Concurrency.CERTIFIED
    joined = [check["joined"] for check in own if check["check"] == "co_run"]
    if kind == "experts" and wanted not in joined:
        return f"{path} has no co-run of {owner} {'joined with' if wanted else 'beside'} others"
    return None


@cache
def _tests_of(path: str) -> frozenset[str]:
    file = ROOT / path
    if not path.startswith("tests/") or not file.is_file():
        return frozenset()
    body = ast.parse(file.read_text(encoding="utf-8")).body
    functions = (node.name for node in body if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in functions if name.startswith("test_"))


@pytest.mark.parametrize("owner", CERTIFICATES)
def test_a_certificate_names_a_test_that_exists_and_what_is_owned(owner: str) -> None:
    assert CERTIFICATES[owner]
    assert [fault for rule in CERTIFICATES[owner] if (fault := fault_of(rule, owner))] == []


@pytest.mark.parametrize("owner", CERTIFICATES)
def test_the_page_has_each_certificate(owner: str) -> None:
    """A row of the page's table: name, class, evidence."""
    name = owner.rpartition(" ")[2] if owner != "the shared expert" else owner
    rows = [line for line in (ROOT / PAGE).read_text().splitlines() if line.startswith("|")]
    kind = owner.partition(" ")[0]
    own = [row for row in rows if row.startswith((f"| {kind} `{name}` |", f"| {name} |"))]
    assert len(own) == 1, f"{PAGE} has {len(own)} rows for {owner}"
    for rule in CERTIFICATES[owner]:
        assert rule.concurrency.upper() in own[0]
        assert rule.record in own[0]
        if rule.concurrency is Concurrency.CERTIFIED:
            assert rule.evidence in own[0]


@pytest.mark.parametrize("owner", [name for name in CERTIFICATES if name.startswith("experts ")])
def test_a_record_of_a_kernels_audit_is_cited(owner: str) -> None:
    path = f"benchmarks/results/audit_{owner.rpartition(' ')[2]}.json"
    if (ROOT / path).exists():
        assert {rule.record for rule in CERTIFICATES[owner]} == {path}


HERE = "tests/test_certificates.py::test_a_kernel_without_a_certificate_is_unsafe"


@pytest.mark.parametrize(
    ("evidence", "owns", "fault"),
    [
        (HERE, "nothing", None),
        (HERE, " ", "owned"),
        ("tests/test_certificates.py::test_that_nobody_wrote", "nothing", "not a test"),
        ("tests/test_certificates.py::fault_of", "nothing", "not a test"),
        ("tests/no_such_file.py::test_x", "nothing", "not a test"),
        ("kernels/base.py::test_x", "nothing", "not a test"),
        ("reviewed by hand", "nothing", "not a test"),
    ],
)
def test_a_certificate_without_substance_is_refused(
    evidence: str, owns: str, fault: str | None
) -> None:
    found = fault_of(ConcurrencyRule(None, Concurrency.CERTIFIED, evidence, owns), "experts x")
    assert (found is None) if fault is None else fault in str(found)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"device": "cpu"}, "of a run of experts x on a GPU"),
        ({"passed": False}, "clean run"),
        ({"experts": "reference"}, "of a run of experts x on a GPU"),
        ({"skip_reason": "it needs a package"}, "of a run of experts x on a GPU"),
        ({"joined": True}, "no co-run of experts x beside others"),
        ({"check": "sanitizer"}, "no co-run"),
        ({"class": Concurrency.EXCLUSIVE}, "no co-run of experts x joined with others"),
        ({"class": Concurrency.EXCLUSIVE, "joined": True}, None),
        ({"class": Concurrency.EXCLUSIVE, "joined": True, "passed": False}, "clean run"),
        ({"class": Concurrency.UNSAFE, "passed": False}, None),
        ({"class": Concurrency.UNSAFE, "experts": "y"}, "of a run of experts x on a GPU"),
    ],
)
def test_a_record_is_of_a_run_of_that_kernel_as_its_class_says(
    changes: dict[str, Any], fault: str | None, tmp_path: Path
) -> None:
    check = {"check": "co_run", "experts": "x", "joined": False, "skip_reason": None}
    check |= {key: value for key, value in changes.items() if key in check}
    record = {"device": "cuda", "passed": True, "checks": [check]}
    record |= {key: value for key, value in changes.items() if key in record}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    concurrency = changes.get("class", Concurrency.CERTIFIED)
    rule = ConcurrencyRule(None, concurrency, HERE, "nothing", record=str(path))
    found = fault_of(rule, "experts x")
    assert (found is None) if fault is None else fault in str(found)
    missing = replace(rule, record="benchmarks/results/no_such_record.json")
    assert "is no record" in str(fault_of(missing, "experts x"))


def test_a_kernel_without_a_certificate_is_unsafe() -> None:
    assert [rule.concurrency for rule in NEVER_REVIEWED] == [Concurrency.UNSAFE]
    assert ExpertsCapabilities.concurrency == NEVER_REVIEWED
    assert (BackendCapabilities.communication,) == NEVER_REVIEWED
