"""The shared expert's numbers, its token, and the evidence that it may run beside other work."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.config import MoEConfig
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.scheme import QuantizedTensor
from ep_runtime.ownership import Owner, SharedExpertToken
from ep_runtime.shared_compute import SharedCompute
from ep_runtime.shared_expert import SharedExpert
from tests.kernels.fp8_cases import quantize_fp8

# Largest relative Frobenius error against float32, by dtype; and of rows in fp8.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
FP8_TOLERANCE = 6e-2
COMPUTES = tuple(SharedCompute)


def _moe(**changes: Any) -> MoEConfig:
    values: dict[str, Any] = {
        "hidden_size": 96,
        "moe_intermediate_size": 40,
        "num_experts": 4,
        "top_k": 1,
        "num_shared_experts": 3,
        "dtype": "float32",
    }
    return MoEConfig(**(values | changes))


def _filled(
    moe: MoEConfig,
    device: torch.device,
    seed: int = 0,
    compute: SharedCompute = SharedCompute.LIBRARY,
) -> SharedExpert:
    shared = SharedExpert(moe, device, compute)
    shared.fill(_weights(moe, seed))
    return shared


def _weights(moe: MoEConfig, seed: int = 0) -> dict[str, Tensor | QuantizedTensor | None]:
    """As `load_experts` takes them, quantised where the layer says so."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width = moe.hidden_size, moe.shared_intermediate_size
    num_parts = 2 if moe.experts_activation().is_gated else 1

    def weight(num_rows: int, num_columns: int, parts: int) -> Tensor | QuantizedTensor:
        values = torch.randn(num_rows, num_columns, generator=generator) / num_columns**0.5
        scheme = moe.shared_quantization
        return quantize_fp8(values[None], scheme, parts) if scheme.is_quantised else values

    w13, w2 = weight(num_parts * width, hidden, num_parts), weight(hidden, width, 1)
    gate = torch.randn(1, hidden, generator=generator) / hidden**0.5
    return {"w13": w13, "w2": w2, "gate": gate if moe.shared_expert_gate else None}


def _rows(num_rows: int, moe: MoEConfig, device: torch.device, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, moe.hidden_size, generator=generator)
    return rows.to(device, moe.torch_dtype)


def _run(shared: SharedExpert, rows: Tensor, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = torch.full_like(rows, float("nan"))
    token = SharedExpertToken(Owner.RUNNER)
    result = shared.run(rows, token=token, by=Owner.RUNNER, out=out)
    token.finish()
    return result


def _in_float64(shared: SharedExpert, rows: Tensor, activation: str) -> Tensor:
    """The formula, written out."""
    x = rows.double().cpu()
    w13, w2 = _plain(shared, "w13"), _plain(shared, "w2")
    projected = x @ w13.T
    if activation == "relu2":
        hidden = projected.clamp(min=0) ** 2
    else:
        gate, up = projected.chunk(2, dim=1)
        gated = gate / (1 + torch.exp(-gate))
        if activation == "gelu":
            gated = gate * 0.5 * (1 + torch.erf(gate / 2**0.5))
        hidden = gated * up
    output = hidden @ w2.T
    if shared.gate is not None:
        output = output / (1 + torch.exp(-(x @ shared.gate.double().cpu().T)))
    return output


def _plain(shared: SharedExpert, name: str) -> Tensor:
    """w13 or w2 in float64."""
    stored = shared.stored(name)
    if stored is None:
        weight: Tensor = getattr(shared, name)
        return weight.double().cpu()
    is_gated = name == "w13" and shared.activation.is_gated
    return dequantize(stored, 2 if is_gated else 1)[0].double().cpu()


def _sized_for_kernels(compute: SharedCompute, **changes: Any) -> MoEConfig:
    """Sizes that our kernels read, and no tile or block divides."""
    is_fp8 = compute is SharedCompute.FP8
    sizes = {"hidden_size": 208, "moe_intermediate_size": 48, "dtype": "bfloat16"}
    return _moe(**sizes, shared_quantization="fp8_block" if is_fp8 else "none", **changes)


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 17, 70])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_however_it_is_computed_the_output_is_that_mlp(
    compute: SharedCompute, activation: str, has_gate: bool, num_rows: int, device: str
) -> None:
    """70 rows in 16 bits are the library's, whose weights are the same."""
    if device == "cpu" and not is_interpreting():
        pytest.skip("Triton compiles for CUDA in this process")
    moe = _sized_for_kernels(compute, activation=activation, shared_expert_gate=has_gate)
    shared = _filled(moe, torch.device(device), compute=compute)
    rows = _rows(num_rows, moe, torch.device(device))
    before, out = rows.clone(), torch.full_like(rows, float("nan"))
    result = _run(shared, rows, out)
    assert result.data_ptr() == out.data_ptr()
    assert torch.equal(rows, before)
    wanted = _in_float64(shared, rows, activation)
    limit = FP8_TOLERANCE if compute is SharedCompute.FP8 else TOLERANCES["bfloat16"]
    assert (result.double().cpu() - wanted).norm() <= limit * wanted.norm()
    assert shared.calls == 1


def test_quantised_weights_are_kept_bit_by_bit_or_dequantised() -> None:
    moe = _sized_for_kernels(SharedCompute.FP8)
    given = _weights(moe)
    kept = _filled(moe, torch.device("cpu"), compute=SharedCompute.FP8)
    plain = _filled(moe, torch.device("cpu"))
    for name, num_parts in (("w13", 2), ("w2", 1)):
        weight, stored = given[name], kept.stored(name)
        assert isinstance(weight, QuantizedTensor)
        assert stored is not None
        assert torch.equal(stored.values.view(torch.uint8), weight.values.view(torch.uint8))
        assert torch.equal(stored.parameters.scales, weight.parameters.scales)
        assert plain.stored(name) is None
        assert torch.equal(getattr(plain, name), dequantize(weight, num_parts)[0].bfloat16())


def test_each_part_of_a_checkpoint_has_its_own_place() -> None:
    """144 rows of gate and as many of up: values follow one another, blocks of scales too."""
    moe = _sized_for_kernels(SharedCompute.FP8, shared_expert_gate=True)
    kept = SharedExpert(moe, torch.device("cpu"), SharedCompute.FP8)
    assert kept.w13_scales is not None
    parts = [kept.places(part) for part in ("shared_gate_proj", "shared_up", "shared_down")]
    for number, places in enumerate(parts):
        assert isinstance(places, dict)
        places["values"].view(torch.uint8).fill_(number)
        places["scales"].fill_(number)
    assert kept.w13.view(torch.uint8)[[0, 143, 144, 287], 0].tolist() == [0, 0, 1, 1]
    assert kept.w13_scales[:, 0].tolist() == [0, 0, 1, 1]
    assert kept.w2.view(torch.uint8).eq(2).all()
    gate = kept.places("shared_gate")
    assert isinstance(gate, Tensor)
    assert kept.gate is not None
    assert gate.data_ptr() == kept.gate.data_ptr()
    plain = SharedExpert(moe, torch.device("cpu"))
    up = plain.places("shared_up")
    assert isinstance(up, Tensor)
    assert up.data_ptr() == plain.w13[144].data_ptr()


@pytest.mark.parametrize("dtype", sorted(TOLERANCES))
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2"])
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 17])
def test_the_output_is_the_gated_mlp_of_all_shared_experts(
    dtype: str, activation: str, has_gate: bool, num_rows: int
) -> None:
    moe = _moe(dtype=dtype, activation=activation, shared_expert_gate=has_gate)
    shared = _filled(moe, torch.device("cpu"))
    rows = _rows(num_rows, moe, torch.device("cpu"))
    before, out = rows.clone(), torch.full_like(rows, float("nan"))
    result = _run(shared, rows, out)
    assert result.data_ptr() == out.data_ptr()
    assert result.dtype == moe.torch_dtype
    assert torch.equal(rows, before)
    wanted = _in_float64(shared, rows, activation)
    assert (result.double() - wanted).norm() <= TOLERANCES[dtype] * wanted.norm()


def test_widths_are_those_of_all_shared_experts_together() -> None:
    shared = SharedExpert(_moe(shared_expert_gate=True), torch.device("cpu"))
    assert shared.w13.shape == (2 * 120, 96)
    assert shared.w2.shape == (96, 120)
    assert shared.gate is not None
    assert shared.gate.shape == (1, 96)
    ungated = SharedExpert(_moe(activation="relu2"), torch.device("cpu"))
    assert ungated.w13.shape == (120, 96)
    assert ungated.gate is None
    assert not any(p.requires_grad for p in shared.parameters())


def test_the_gate_is_first_and_up_second() -> None:
    moe = _moe(hidden_size=1, moe_intermediate_size=1, num_shared_experts=1)
    shared = SharedExpert(moe, torch.device("cpu"))
    shared.w13.data.copy_(torch.tensor([[2.0], [3.0]]))
    shared.w2.data.fill_(1.0)
    wanted = torch.nn.functional.silu(torch.tensor(2.0)) * 3
    assert _run(shared, torch.ones(1, 1)).item() == pytest.approx(wanted.item(), rel=1e-6)


def test_each_run_is_counted_and_uses_up_a_token() -> None:
    moe = _moe()
    shared = _filled(moe, torch.device("cpu"))
    rows = _rows(0, moe, torch.device("cpu"))
    _run(shared, rows)
    _run(shared, rows)
    assert shared.calls == 2
    token = SharedExpertToken(Owner.MODULAR_KERNEL)
    with pytest.raises(RuntimeError, match="owned by modular_kernel, and runner runs it"):
        shared.run(rows, token=token, by=Owner.RUNNER, out=torch.empty_like(rows))
    assert shared.calls == 2, "a run that was refused is not counted"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "compute"),
    [("float32", SharedCompute.LIBRARY), *(("bfloat16", compute) for compute in COMPUTES)],
)
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("num_rows", [1, 64, 256, 1000])
def test_two_streams_do_not_disturb_each_other(
    dtype: str, compute: SharedCompute, activation: str, num_rows: int
) -> None:
    """Two calls at once, on two streams, many times over: bit-equal to one after the other.

    Of the kernels both the few rows' and, of 1000, the Hopper GEMMs, which read the same tables.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    moe = _moe(
        hidden_size=2048,
        moe_intermediate_size=1408,
        num_shared_experts=2,
        dtype=dtype,
        activation=activation,
        shared_expert_gate=True,
        shared_quantization="fp8_block" if compute is SharedCompute.FP8 else "none",
    )
    layers = [_filled(moe, device, seed, compute) for seed in (0, 1)]
    inputs = [_rows(num_rows, moe, device, seed) for seed in (2, 3)]
    with torch.no_grad():
        serial = [_run(s, x).clone() for s, x in zip(layers, inputs, strict=True)]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(device) for _ in layers]
        # A long wait in front of both, so that their work is queued up and starts together.
        gate = torch.cuda.Stream(device)
        for _ in range(20):
            outputs: list[list[Tensor]] = [[], []]
            with torch.cuda.stream(gate):
                torch.cuda._sleep(2_000_000)
            for stream in streams:
                stream.wait_stream(gate)
            for _ in range(10):
                for i, stream in enumerate(streams):
                    with torch.cuda.stream(stream):
                        outputs[i].append(_run(layers[i], inputs[i]))
            torch.cuda.synchronize()
            for i, wanted in enumerate(serial):
                for output in outputs[i]:
                    assert torch.equal(output, wanted)
