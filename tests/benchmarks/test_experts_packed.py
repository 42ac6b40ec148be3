"""The experts benchmark's packed schemes without a GPU: rounding, layouts, bytes and targets."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import experts_contenders, experts_peers
from benchmarks.experts_cells import SHAPES, TABLES, Cell, LayerShape, Target, work_of
from benchmarks.experts_contenders import OwnExperts, Unavailable, contender_class
from benchmarks.experts_data import dequantise, error_of, make_rows, make_weights, reference
from benchmarks.experts_humming import checkpoint_config, checkpoint_tensors, entry_for
from benchmarks.experts_kernel_times import times_table
from benchmarks.experts_quantise import PACKED_SCHEMES, quantise
from benchmarks.experts_record import add_ratios, summarise_cells
from benchmarks.experts_vllm_packed import gptq_words
from ep_runtime.kernel_times import TimedLayer, TimedPoint, read_kernel_times
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.format import Projection
from ep_runtime.kernels.quant.gptq import read_gptq
from ep_runtime.kernels.quant.pack_quantized import read_pack_quantized
from ep_runtime.kernels.quant.scheme import QuantizedTensor, WeightScheme
from ep_runtime.kernels.quant.storage import tensors_of

CPU = torch.device("cpu")
SMALL = LayerShape("small", 6, 2, 256, 128, 2)
SCHEMES = sorted(PACKED_SCHEMES)


@pytest.mark.parametrize(
    ("scheme", "most"),
    [("int4_g128", 0.13), ("int8_g128", 0.009), ("mxfp4", 0.13), ("nvfp4", 0.11)],
)
def test_packed_weights_are_the_same_weights_rounded(scheme: str, most: float) -> None:
    weights = make_weights(SMALL, scheme, seed=3, device=CPU)
    generator = torch.Generator().manual_seed(3)
    w13 = torch.stack([torch.randn(256, 256, generator=generator) / 16 for _ in range(3)])
    w2 = torch.stack([torch.randn(256, 128, generator=generator) / 128**0.5 for _ in range(3)])
    for expert in range(3):
        for found, source in zip(
            dequantise(weights, scheme, expert), (w13[expert], w2[expert]), strict=True
        ):
            assert most / 2 < float((found - source).norm() / source.norm()) < most


def test_codes_are_rounded_to_the_nearest() -> None:
    row = torch.zeros(1, 128)
    row[0, :6] = torch.tensor([7.5, -7.5, 1.4, 1.6, -0.4, -3.6])
    made = quantise(row, WeightScheme.INT4, 1)
    assert float(made["scales"][0, 0]) == 1.0
    assert made["values"][0, :3].tolist() == [0x0F, 0xA9, 0x48]  # 15 and 0; 9 and 10; 8 and 4
    row = torch.zeros(1, 32)
    row[0, :8] = torch.tensor([7.9, -6.0, 0.2, 0.3, 1.2, 1.3, -2.6, 5.1])
    made = quantise(row, WeightScheme.MXFP4, 1)
    assert made["scales"].tolist() == [[127]]
    assert made["values"][0, :4].tolist() == [0xF7, 0x10, 0x32, 0x7D]
    made = quantise(row[:, :16] * 0.5, WeightScheme.NVFP4, 2)
    assert float(made["scales"][0, 0]) == 448.0
    assert made["global_scales"].tolist() == pytest.approx([3.95 / 6 / 448] * 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_of_an_expert_are_those_of_its_tensors(scheme: str) -> None:
    shape = replace(SMALL, hidden_size=512, intermediate_size=384)
    weights = make_weights(shape, scheme, seed=0, device=CPU, is_filled=False)
    assert weights.w13_quant is not None
    assert weights.w2_quant is not None
    tensors = [weights.w13, weights.w2, weights.w13_quant.scales, weights.w2_quant.scales]
    stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert stored == shape.num_local_experts * shape.expert_bytes(scheme)


def test_a_roofline_counts_packed_bytes_and_bf16_products() -> None:
    qwen3 = SHAPES["qwen3_235b_ep2"]
    assert qwen3.expert_bytes("int4_g128") == 9_732_096
    assert qwen3.expert_bytes("mxfp4") == 10_027_008
    assert qwen3.expert_bytes("nvfp4") == 10_616_832
    assert qwen3.expert_bytes("int8_g128") == 19_169_280
    cell = Cell(TABLES["int4_g128"], qwen3, 4096)
    small = work_of(cell, rows=8, pairs=64, active_experts=64)
    assert (small.bound, round(small.roofline_us, 1)) == ("memory", 145.9)
    large = work_of(cell, rows=4096, pairs=32768, active_experts=64)
    assert (large.bound, round(large.roofline_us)) == ("compute", 1556)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_own_experts_on_packed_weights_are_right(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_contenders, "OWN_EXPERTS", "reference")
    cell = Cell(TABLES[scheme], SMALL, 5)
    weights = [make_weights(SMALL, scheme, seed=seed, device=CPU) for seed in range(2)]
    rows = make_rows(cell, 0, CPU)
    built = OwnExperts(SMALL, cell.table, weights)
    output = built.bind(rows, 1)()
    assert error_of(output, reference(rows, weights[1], scheme)).is_within(scheme)
    assert error_of(output, reference(rows, weights[0], scheme)).total > 0.5


@pytest.mark.parametrize(("scheme", "bits"), [("int4_g128", 4), ("int8_g128", 8)])
def test_marlin_gets_the_words_that_gptq_stores(scheme: str, bits: int) -> None:
    weights = make_weights(SMALL, scheme, seed=0, device=CPU)
    assert weights.w2_quant is not None
    rows, columns = 256, 128
    words = gptq_words(weights.w2, bits)
    assert (words.dtype, words.shape) == (torch.int32, (3, columns * bits // 32, rows))
    gptq = read_gptq({"bits": bits, "group_size": 128, "sym": True, "desc_act": False})
    fields = 32 // bits
    stored = {
        "qweight": words[1],
        "qzeros": torch.zeros(1, rows // fields, dtype=torch.int32),
        "scales": weights.w2_quant.scales[1].T.contiguous(),
        "g_idx": torch.zeros(columns, dtype=torch.int32),
    }
    found = gptq.dequantize(stored, Projection(rows, columns, torch.bfloat16))
    torch.testing.assert_close(found, dequantise(weights, scheme, 1)[1])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_humming_gets_the_tensors_that_a_checkpoint_of_its_configuration_has(scheme: str) -> None:
    weights = make_weights(SMALL, scheme, seed=0, device=CPU)
    assert weights.w2_quant is not None
    tensors = checkpoint_tensors(scheme, weights.w2, weights.w2_quant)
    config = checkpoint_config(scheme)
    if scheme in ("mxfp4", "nvfp4"):
        stored = tensors_of(QuantizedTensor(weights.w2, weights.w2_quant, PACKED_SCHEMES[scheme]))
        assert len(tensors) == len(stored)
        return
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    keys = ("num_bits", "type", "strategy", "symmetric", "group_size")
    written = read_pack_quantized({"weights": {key: config[key] for key in keys}})
    one = {name: tensor[2] for name, tensor in tensors.items()}
    found = written.dequantize(one, Projection(256, 128, torch.bfloat16))
    torch.testing.assert_close(found, dequantise(weights, scheme, 2)[1])


def test_humming_is_given_the_tiles_of_its_own_number_of_pairs() -> None:
    tiles = [[0, 8, "a"], [8, 64, "b"], [64, 1 << 30, "c"]]
    assert [entry_for(tiles, pairs) for pairs in (1, 8, 9, 64, 65)] == ["a", "a", "b", "b", "c"]
    with pytest.raises(Unavailable, match="no tiles for 9 pairs"):
        entry_for(tiles[:1], 9)


def test_this_projects_marlin_without_a_package_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(experts_contenders, "find_spec", lambda name: None)
    weights = [make_weights(SMALL, "int4_g128", seed=0, device=CPU)]
    with pytest.raises(Unavailable, match="experts marlin needs a package: vllm or "):
        contender_class("ep_runtime_marlin")(SMALL, TABLES["int4_g128"], weights)


def test_every_column_of_the_packed_tables_has_a_class_without_its_package() -> None:
    for scheme in SCHEMES:
        own, *others = TABLES[scheme].implementations
        assert own == "ep_runtime"
        is_peer = {name: contender_class(name).is_peer for name in others}
        assert is_peer == {name: not name.startswith("ep_runtime") for name in others}


def cell_of(table: str, shape: str, num_tokens: int, **medians: float) -> dict[str, Any]:
    """A cell of a packed table; a negative time is a wrong result's."""
    implementations = {
        name: {
            "times_us": {"median": abs(us)},
            "is_right": us > 0,
            "fraction_of_roofline": 0.5,
            "skip_reason": None,
        }
        for name, us in medians.items()
    }
    return add_ratios(
        {
            "table": table,
            "shape": shape,
            "tokens_per_rank": num_tokens,
            "bound": "memory" if num_tokens < 4096 else "compute",
            "weight_bytes": 2000 if table == "int8_g128" else 1000,
            "implementations": implementations,
        }
    )


def test_targets_are_held_against_the_peers_that_they_name() -> None:
    cells = [
        cell_of("int4_g128", "a", 8, ep_runtime=90, humming=100, marlin=200, moe_wna16=400),
        cell_of("int4_g128", "a", 4096, ep_runtime=95, humming=-50, marlin=100, moe_wna16=300),
    ]
    fastest, prefill, wna16 = summarise_cells(cells)["int4_g128"]["targets"]
    # humming's result is wrong at 4096 tokens: Marlin's time counts there.
    assert fastest["found"]["largest"] == pytest.approx(0.95)
    assert fastest["found"]["geometric_mean"] == pytest.approx((0.9 * 0.95) ** 0.5)
    assert fastest["is_met"] is False  # 0.925 is above 0.90
    assert (prefill["found"]["cells"], prefill["found"]["largest"]) == (1, pytest.approx(0.95))
    assert prefill["is_met"] is False
    assert prefill["over"] == "the fastest of humming, marlin at 4096 tokens"
    assert wna16["is_met"] is True


def test_time_per_byte_is_held_against_int4_where_memory_bounds_both() -> None:
    cells = [
        cell_of("int4_g128", "a", 8, ep_runtime=100),
        cell_of("int4_g128", "a", 4096, ep_runtime=100),
        cell_of("int8_g128", "a", 8, ep_runtime=220),
        cell_of("int8_g128", "a", 4096, ep_runtime=1000),
        cell_of("nvfp4", "b", 8, ep_runtime=100),
    ]
    summary = summarise_cells(cells)
    (of_int8,) = summary["int8_g128"]["targets"]
    assert (of_int8["found"]["cells"], of_int8["found"]["largest"]) == (1, pytest.approx(1.1))
    assert of_int8["is_met"] is True
    (of_nvfp4,) = summary["nvfp4"]["targets"]
    assert of_nvfp4["is_met"] is None  # int4 was not measured on that shape


def test_targets_name_columns_of_their_table() -> None:
    for table in TABLES.values():
        for target in table.targets:
            assert isinstance(target, Target)
            assert set(target.over) <= set(table.implementations[1:])
            assert bool(target.over) != (target.per_byte_of is not None)


def devices_of(name: str) -> list[dict[str, str]]:
    return [{"name": "x86_64", "device": "cpu"}, {"name": name, "device": "cuda:0"}]


def record_of(*cells: dict[str, Any], device: str = "A device") -> dict[str, Any]:
    for cell in cells:
        for name, one in cell["implementations"].items():
            kernel = {"ep_runtime": "triton", "ep_runtime_marlin": "marlin"}.get(name)
            one["facts"] = {"experts": kernel} if kernel else {}
    environment = {
        "torch": "2.11.0",
        "triton": "3.6.0",
        "vllm": None,
        "devices": devices_of(device),
    }
    return {
        "schema_version": 1,
        "command": "experts_peers",
        "command_line": "the command",
        "environment": environment,
        "cells": list(cells),
    }


def test_a_record_becomes_the_table_that_auto_goes_by(tmp_path: Path) -> None:
    shape = "qwen3_235b_ep2"
    first = record_of(
        cell_of("int4_g128", shape, 32, ep_runtime=200.126, marlin=1, ep_runtime_marlin=240),
        cell_of("int4_g128", shape, 8, ep_runtime=100, ep_runtime_marlin=-90),
    )
    second = record_of(
        cell_of("int4_g128", shape, 1, ep_runtime=60, ep_runtime_marlin=50),
        cell_of("mxfp4", "mixtral_8x7b", 1, ep_runtime=5, ep_runtime_marlin=6),
    )
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path, record in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(record))
    output = tmp_path / "experts" / "A_device.json"
    arguments = ["kernel-times", *map(str, paths), "--output", str(output)]
    assert experts_peers.main(arguments) == 0
    table = read_kernel_times(output)
    assert (table.device, table.sources) == (
        "A device",
        ("the command (torch 2.11.0, triton 3.6.0)",),
    )
    int4 = TimedLayer("int4_w4a16", 128, "bfloat16", 64, 4096, 1536, 8)
    mxfp4 = TimedLayer("mxfp4", None, "bfloat16", 8, 4096, 14336, 2)
    # At 8 tokens Marlin's result is wrong, and one time alone decides nothing.
    assert dict(table.layers)[int4] == (
        TimedPoint(1, (("triton", 60.0), ("marlin", 50.0))),
        TimedPoint(32, (("triton", 200.13), ("marlin", 240.0))),
    )
    assert dict(table.layers)[mxfp4] == (TimedPoint(1, (("triton", 5.0), ("marlin", 6.0))),)
    with pytest.raises(ConfigError, match="hold int4_g128, qwen3_235b_ep2, 32 tokens twice"):
        times_table([first, first], "x")
    with pytest.raises(ConfigError, match=r"they are of \['A device', 'B'\]"):
        times_table([first, second | {"environment": {"devices": devices_of("B")}}], "x")
    with pytest.raises(ConfigError, match="no cell of the records has right times of two"):
        times_table([record_of(cell_of("int4_g128", shape, 8, ep_runtime=1, marlin=2))], "x")
