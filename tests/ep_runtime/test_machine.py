"""What a plan knows of a machine: detected, by name, and from a doctor's file."""

import json

import pytest

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.machine import PRESETS, Machine, TritonMode


def test_a_cpu_machine_says_whether_triton_is_interpreted() -> None:
    machine = Machine.detect("cpu")
    assert machine.device_type == "cpu"
    wanted = TritonMode.INTERPRETER if is_interpreting() else TritonMode.UNUSABLE
    assert machine.triton is wanted
    assert machine.device_memory_bytes is None


def test_without_triton_the_mode_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    machine = Machine.detect("cpu")
    assert machine.triton is TritonMode.UNUSABLE
    assert machine.packages == ()


def test_without_the_interpreter_a_cpu_cannot_run_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ep_runtime.kernels.interpreter.is_interpreting", lambda: False)
    assert Machine.detect("cpu").triton is TritonMode.UNUSABLE


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_survives_json(name: str) -> None:
    machine = Machine.preset(name)
    assert Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine


def test_packages_survive_json_as_a_tuple() -> None:
    machine = Machine("x", "cuda", TritonMode.COMPILED, 1, packages=("deep_ep", "deep_gemm"))
    again = Machine.from_dict(json.loads(json.dumps(machine.to_dict())))
    assert again == machine
    assert hash(again) == hash(machine)


def test_the_presets_are_a_cpu_and_an_h200() -> None:
    assert Machine.preset("cpu").device_type == "cpu"
    h200 = Machine.preset("h200x8")
    assert h200.device_type == "cuda"
    assert h200.triton is TritonMode.COMPILED
    assert h200.device_memory_bytes is not None
    assert 139 * 2**30 < h200.device_memory_bytes < 144 * 2**30


def test_an_unknown_preset_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'h300'.*cpu, h200x8"):
        Machine.preset("h300")


def test_a_file_with_an_unknown_key_is_refused_by_name() -> None:
    values = Machine.preset("cpu").to_dict() | {"memory": 3}
    with pytest.raises(ConfigError, match="memory"):
        Machine.from_dict(values)


def test_a_file_without_a_needed_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="triton"):
        Machine.from_dict({"name": "x", "device_type": "cpu"})


def test_a_file_with_an_unknown_triton_mode_lists_the_known_ones() -> None:
    values = Machine.preset("cpu").to_dict() | {"triton": "fast"}
    with pytest.raises(ConfigError, match=r"'fast'.*compiled, interpreter, unusable"):
        Machine.from_dict(values)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("compute_capability", [9], "two whole numbers"),
        ("compute_capability", [9, 0, 0], "two whole numbers"),
        ("compute_capability", ["9", "0"], "two whole numbers"),
        ("compute_capability", [9, -1], "two whole numbers"),
        ("compute_capability", 9.0, "two whole numbers"),
        ("compute_capability", "90", "two whole numbers"),
        ("compute_capability", {"major": 9, "minor": 0}, "two whole numbers"),
        ("name", None, "a text"),
        ("name", 7, "a text"),
        ("name", "", "a text"),
        ("device_type", "tpu", "cpu or cuda"),
        ("device_type", ["cuda"], "cpu or cuda"),
        ("triton", ["compiled"], "compiled, interpreter, unusable"),
        ("triton", None, "compiled, interpreter, unusable"),
        ("device_memory_bytes", "80 GiB", "a whole number of 1 or more"),
        ("device_memory_bytes", 0, "a whole number of 1 or more"),
        ("packages", "deep_ep", "a list of texts"),
        ("packages", 3, "a list of texts"),
        ("packages", [["deep_ep"]], "a list of texts"),
        ("packages", None, "a list of texts"),
        ("num_devices", -1, "a whole number of 0 or more"),
        ("num_devices", True, "a whole number of 0 or more"),
        ("num_devices", 8.0, "a whole number of 0 or more"),
        ("num_devices", None, "a whole number of 0 or more"),
        ("nvlink", "yes", "true, false or null"),
        ("nvlink", 1, "true, false or null"),
    ],
)
def test_a_file_with_a_value_of_another_form_is_refused_by_its_key(
    key: str, value: object, wanted: str
) -> None:
    values = Machine.preset("h200x8").to_dict() | {key: value}
    with pytest.raises(ConfigError) as caught:
        Machine.from_dict(values)
    assert f"machine.{key} is {value!r}" in str(caught.value)
    assert wanted in str(caught.value)


@pytest.mark.parametrize("values", [None, 3, "cpu", ["name", "device_type", "triton"]])
def test_what_is_no_mapping_is_no_machine(values: object) -> None:
    with pytest.raises(ConfigError, match=r"machine is .*; it must be a mapping"):
        Machine.from_dict(values)  # type: ignore[arg-type]


def test_what_is_unknown_of_a_machine_may_be_null_or_left_out() -> None:
    short = {"name": "x", "device_type": "cuda", "triton": "compiled"}
    unknown = {"device_memory_bytes": None, "nvlink": None, "compute_capability": None}
    machine = Machine.from_dict(short)
    assert machine == Machine.from_dict(short | unknown)
    assert machine == Machine("x", "cuda", TritonMode.COMPILED)
