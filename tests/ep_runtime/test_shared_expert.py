"""The shared expert's numbers, its token, and the evidence that it may run beside other work."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.config import MoEConfig
from ep_runtime.ownership import Owner, SharedExpertToken
from ep_runtime.shared_expert import SharedExpert

# Largest relative Frobenius error against float32, by dtype.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


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


def _filled(moe: MoEConfig, device: torch.device, seed: int = 0) -> SharedExpert:
    shared = SharedExpert(moe, device)
    generator = torch.Generator().manual_seed(seed)
    for parameter in shared.parameters():
        values = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
        parameter.data.copy_(values)
    return shared


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
    projected = x @ shared.w13.double().cpu().T
    if activation == "relu2":
        hidden = projected.clamp(min=0) ** 2
    else:
        gate, up = projected.chunk(2, dim=1)
        gated = gate / (1 + torch.exp(-gate))
        if activation == "gelu":
            gated = gate * 0.5 * (1 + torch.erf(gate / 2**0.5))
        hidden = gated * up
    output = hidden @ shared.w2.double().cpu().T
    if shared.gate is not None:
        output = output / (1 + torch.exp(-(x @ shared.gate.double().cpu().T)))
    return output


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
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("num_rows", [1, 64, 256, 1000])
def test_two_streams_do_not_disturb_each_other(dtype: str, activation: str, num_rows: int) -> None:
    """Two calls at once, on two streams, many times over: bit-equal to one after the other."""
    device = torch.device("cuda", torch.cuda.current_device())
    moe = _moe(
        hidden_size=2048,
        moe_intermediate_size=1408,
        num_shared_experts=2,
        dtype=dtype,
        activation=activation,
        shared_expert_gate=True,
    )
    layers = [_filled(moe, device, seed) for seed in (0, 1)]
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
