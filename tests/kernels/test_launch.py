"""Launches prepared once: the kernel and the arguments are those of `kernel[grid](...)`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels import launch as launch_module
from ep_runtime.kernels.launch import PreparedLaunch, look_at


@triton.jit(do_not_specialize=["num_rows"])
def _scale_kernel(
    x_ptr,
    bias_ptr,
    out_ptr,
    stride_x,
    num_rows,
    factors_ptr,
    offset,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    x = tl.load(x_ptr + rows * stride_x, mask=mask)
    total = x * tl.load(factors_ptr) + offset
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows, mask=mask)
    tl.store(out_ptr + rows, total, mask=mask)


def prepare(device: torch.device, factor: float = 3.0) -> PreparedLaunch:
    factors = torch.full((1,), factor, device=device)
    return PreparedLaunch(
        _scale_kernel, device, options={"num_warps": 1}, factors_ptr=factors, offset=5, BLOCK=16
    )


def wanted(x: Tensor, bias: Tensor | None) -> Tensor:
    return 3 * x + 5 + (0 if bias is None else bias)


@pytest.mark.parametrize("num_rows", [1, 16, 33])
def test_every_kind_of_argument_gives_what_it_should(num_rows: int, device: torch.device) -> None:
    launch = prepare(device)
    grid = (triton.cdiv(num_rows, 16),)
    wide = torch.randn(num_rows * 2 + 1, device=device)
    bias = torch.randn(num_rows + 1, device=device)
    for _ in range(2):
        for x in (wide[:num_rows], wide[1 : num_rows + 1], wide[: 2 * num_rows : 2]):
            for added in (None, bias[:num_rows], bias[1:]):
                out = torch.full((num_rows,), float("nan"), device=device)
                launch(grid, x, added, out, x.stride(0), num_rows)
                torch.testing.assert_close(out, wanted(x, added))


def test_bound_tensors_are_read_when_the_kernel_runs(device: torch.device) -> None:
    factors = torch.zeros(1, device=device)
    launch = PreparedLaunch(
        _scale_kernel, device, options={"num_warps": 1}, BLOCK=16, offset=0, factors_ptr=factors
    )
    x, out = torch.ones(4, device=device), torch.zeros(4, device=device)
    for factor in (2.0, 7.0):
        factors.fill_(factor)
        launch((1,), x, None, out, 1, 4)
        assert out.tolist() == [factor] * 4


@pytest.mark.parametrize("bound", [{"factors_ptr": None, "BLOCK": 16}, {"block": 16}])
def test_what_is_bound_must_be_the_last_parameters(
    bound: dict[str, Any], device: torch.device
) -> None:
    prepare(device)
    with pytest.raises(TypeError, match="_scale_kernel has the parameters"):
        PreparedLaunch(_scale_kernel, device, options={"num_warps": 1}, **bound)


def kind_of(*varying: Tensor | int | None, by_value: bool = True) -> tuple[object, ...]:
    return look_at(varying, [by_value] * len(varying))[0]


def test_arguments_that_triton_compiles_one_kernel_for_are_of_one_kind() -> None:
    x = torch.zeros(64)
    assert x.data_ptr() % 16 == 0
    assert kind_of(x) == kind_of(x[4:]) == kind_of(torch.ones(3))
    assert kind_of(16) == kind_of(0) == kind_of(4096)
    assert kind_of(2) == kind_of(17) == kind_of(2**31 - 1)
    assert kind_of(1, by_value=False) == kind_of(16, by_value=False) == kind_of(7, by_value=False)


def test_arguments_that_triton_compiles_different_kernels_for_are_of_different_kinds() -> None:
    x = torch.zeros(64)
    varying = [x, x[1:], x.bfloat16(), x.long(), None, 1, 16, 17, 2**31, 2**31 + 1]
    kinds = [kind_of(value) for value in varying]
    assert len(set(kinds)) == len(kinds)
    assert kind_of(1, by_value=False) != kind_of(2**31, by_value=False)
    assert kind_of(None, x) != kind_of(x, None)


class StubKernel:
    """Stands for a compiling `triton.jit` function: says what it compiled, and how it was run."""

    __name__ = "stub"
    arg_names = ("x_ptr", "size", "y_ptr", "SIZE")

    def __init__(self) -> None:
        self.params = [SimpleNamespace(do_not_specialize=name == "size") for name in self.arg_names]
        self.compiled: list[tuple[Any, ...]] = []
        self.runs: list[tuple[Any, ...]] = []

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Any:
        number = len(self.compiled)
        self.compiled.append((arguments, grid, options))
        return SimpleNamespace(
            run=lambda *a: self.runs.append((number, *a)), function="f", packed_metadata="m"
        )


def test_a_kernel_is_compiled_once_a_kind_and_run_with_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_module, "is_interpreting", lambda: False)
    monkeypatch.setattr(launch_module, "prepare_launch", lambda device: None)
    kernel, y = StubKernel(), torch.zeros(8)
    launch = PreparedLaunch(
        kernel, torch.device("cpu"), options={"num_warps": 2, "launch_pdl": True}, y_ptr=y, SIZE=7
    )
    x = torch.zeros(64)
    launch((3,), x, 10, stream=99)
    launch((4, 5), x[4:], 11, stream=98)
    launch((6,), x[1:], 12, stream=97)
    options = {"num_warps": 2, "launch_pdl": True}
    assert [(made[1:], made[0][1::2]) for made in kernel.compiled] == [
        (((3,), options), (10, 7)),
        (((6,), options), (12, 7)),
    ]
    assert all(made[0][2] is y for made in kernel.compiled)
    assert [(run[0], *run[1:5]) for run in kernel.runs] == [
        (0, 3, 1, 1, 99),
        (0, 4, 5, 1, 98),
        (1, 6, 1, 1, 97),
    ]
    addresses = [(run[-4], run[-3], run[-2], run[-1]) for run in kernel.runs]
    assert addresses == [
        (x.data_ptr(), 10, y.data_ptr(), 7),
        (x.data_ptr() + 16, 11, y.data_ptr(), 7),
        (x.data_ptr() + 4, 12, y.data_ptr(), 7),
    ]
    assert [run[5:10] for run in kernel.runs] == [("f", "m", None, None, None)] * 3


@pytest.mark.gpu
def test_a_launch_follows_its_stream_and_can_be_captured() -> None:
    device = torch.device("cuda")
    launch = prepare(device)
    x, out = torch.ones(16, device=device), torch.zeros(16, device=device)
    launch((1,), x, None, out, 1, 16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(2.0)
    launch((1,), x, None, out, 1, 16, stream=stream.cuda_stream)
    stream.synchronize()
    assert out.tolist() == [11.0] * 16
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch((1,), x, None, out, 1, 16)
    x.fill_(4.0)
    graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == [17.0] * 16
