"""What libraries that write quantised checkpoints store for one weight, and what they mean by it.

compressed-tensors and transformers run here as they are. GPTQModel, AutoGPTQ, AutoAWQ and modelopt
are packed after their own code, named at each function: they need a GPU, or bring dependencies that
do not go with ours.
"""

from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


@dataclass(frozen=True)
class Written:
    """tensors: suffix after the layer's path (`.qweight`) -> what is stored.

    weight: [N, K] float32, what the writer reads back from them.
    config: the quantization_config, or of compressed-tensors one of its config_groups.
    """

    tensors: dict[str, Tensor]
    weight: Tensor
    config: dict[str, Any]

    def by_role(self, stored: Any) -> dict[str, Tensor]:
        """The tensors that `WeightFormat.stored` names and that are used, by role."""
        return {
            role: self.tensors[suffix]
            for role, tensor in stored.items()
            for suffix in tensor.suffixes
            if suffix in self.tensors and tensor.is_used
        }


@dataclass(frozen=True)
class IntCodes:
    """codes: [N, K], zeros and scales: [N, G], all as numbers; groups: [K]."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor

    @property
    def weight(self) -> Tensor:
        scales = self.scales.float()[:, self.groups]
        return (self.codes - self.zeros[:, self.groups]).float() * scales


def quantize_int(
    weight: Tensor,
    *,
    bits: int,
    group_size: int,
    is_symmetric: bool,
    order: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float16,
) -> IntCodes:
    """To the nearest code between each group's smallest and largest weight.

    group_size: -1 for a whole row. order: [K], the columns in the order in which they are put in
    groups (act-order). After GPTQModel 7.7.0, quantization/quantizer.py (`find_params`).
    """
    num_columns = weight.shape[1]
    size = num_columns if group_size == -1 else group_size
    order = torch.arange(num_columns) if order is None else order
    groups = torch.empty(num_columns, dtype=torch.long)
    groups[order] = torch.arange(num_columns) // size
    top = 2**bits - 1
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        columns = weight.float()[:, groups == group]
        low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
        if is_symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / top).clamp(min=1e-4).to(scale_dtype)
        symmetric = torch.full_like(low, (top + 1) // 2)
        zero = symmetric if is_symmetric else (-low / scale.float()).round().clamp(0, top)
        scales.append(scale)
        zeros.append(zero.int())
    scales_of, zeros_of = torch.stack(scales, 1), torch.stack(zeros, 1)
    codes = (weight.float() / scales_of.float()[:, groups]).round() + zeros_of[:, groups]
    return IntCodes(codes.clamp(0, top).int(), zeros_of, scales_of, groups)


def pack_words(fields: Tensor, bits: int, dim: int, order: tuple[int, ...] = ()) -> Tensor:
    """Fields below 2^bits into int32 words along `dim`, lowest bits first, the rest of the last 0.

    order: which of a word's fields goes where, if not one after the other.
    """
    fields = fields.long().movedim(dim, -1)
    per_word = 32 // bits
    padded = torch.nn.functional.pad(fields, (0, -fields.shape[-1] % per_word))
    words = torch.zeros(*fields.shape[:-1], padded.shape[-1] // per_word, dtype=torch.long)
    for place, field in enumerate(order or range(per_word)):
        words |= padded[..., field::per_word] << (bits * place)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def write_gptq(
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 128,
    is_symmetric: bool = True,
    order: Tensor | None = None,
    layout: str = "gptq_v2",
    writer: str = "gptqmodel:7.7.0",
) -> Written:
    """After GPTQModel 7.7.0, nn_modules/qlinear/__init__.py (`pack_original`).

    order: desc_act. layout: gptq_v2, or gptq: by GPTQModel after utils/model.py
    (`convert_gptq_v2_to_v1_format_module`), by another writer each zero point less 1 modulo
    2^bits, as AutoGPTQ's nn_modules/qlinear/qlinear_cuda_old.py reads them.
    """
    quantized = quantize_int(
        weight, bits=bits, group_size=group_size, is_symmetric=is_symmetric, order=order
    )
    return pack_gptq(
        quantized,
        bits=bits,
        group_size=group_size,
        is_symmetric=is_symmetric,
        has_act_order=order is not None,
        layout=layout,
        writer=writer,
    )


def pack_gptq(
    quantized: IntCodes,
    *,
    bits: int,
    group_size: int,
    is_symmetric: bool,
    has_act_order: bool,
    layout: str,
    writer: str,
) -> Written:
    """The codes as `write_gptq` stores them."""
    zeros = quantized.zeros.T
    is_gptqmodel = writer.startswith("gptqmodel")
    if layout == "gptq" and not is_gptqmodel:
        zeros = (zeros - 1) % 2**bits
    qzeros = pack_words(zeros, bits, dim=1)
    if layout == "gptq" and is_gptqmodel:
        qzeros -= {4: 0x11111111, 8: 0x01010101}[bits]
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": is_symmetric,
        "desc_act": has_act_order,
        "checkpoint_format": layout,
    }
    if is_gptqmodel:
        config["meta"] = {"quantizer": [writer]}
    tensors = {
        ".qweight": pack_words(quantized.codes.T, bits, dim=0),
        ".qzeros": qzeros,
        ".scales": quantized.scales.T.contiguous(),
        ".g_idx": quantized.groups.int(),
    }
    return Written(tensors, quantized.weight, config)


def write_awq(weight: Tensor, *, group_size: int = 128) -> Written:
    """After AutoAWQ 0.2.9, awq/modules/linear/gemm.py (`from_linear`)."""
    quantized = quantize_int(weight, bits=4, group_size=group_size, is_symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        ".qweight": pack_words(quantized.codes.T, 4, 1, order),
        ".qzeros": pack_words(quantized.zeros.T, 4, 1, order),
        ".scales": quantized.scales.T.contiguous(),
    }
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
    }
    return Written(tensors, quantized.weight, config)


def write_pack_quantized(
    weight: Tensor,
    *,
    bits: int = 4,
    group_size: int = 128,
    is_symmetric: bool = True,
    order: Tensor | None = None,
) -> Written:
    """By compressed-tensors. group_size: -1 for strategy channel. order: actorder group, whose
    groups are made of the columns [K] in that order."""
    num_rows, num_columns = weight.shape
    args = QuantizationArgs(
        num_bits=bits,
        type="int",
        symmetric=is_symmetric,
        strategy="channel" if group_size == -1 else "group",
        group_size=None if group_size == -1 else group_size,
        actorder=None if order is None else "group",
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    size = num_columns if group_size == -1 else group_size
    ordered = weight if order is None else weight[:, order]
    grouped = ordered.unflatten(1, (-1, size))
    scales, zeros = calculate_qparams(grouped.amin(2), grouped.amax(2), args)
    state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    if order is not None:
        groups = torch.empty(num_columns, dtype=torch.int32)
        groups[order] = torch.arange(num_columns, dtype=torch.int32) // size
        state["weight_g_idx"] = groups
    stored = PackedQuantizationCompressor.compress(state, scheme)
    in_float32 = {**stored, "weight_scale": stored["weight_scale"].float()}
    read_back = PackedQuantizationCompressor.decompress(in_float32, scheme)["weight"]
    assert read_back.shape == (num_rows, num_columns)
    return Written(_suffixed(stored), read_back, _group(scheme, "pack-quantized"))


def write_mxfp4_experts(weight: Tensor) -> Written:
    """All experts' weights [E, N, K] as gpt-oss has them, `_blocks` and `_scales`.

    Rows are stored as they are given (gpt-oss alternates between gate and up). After OpenAI's
    gpt-oss and triton_kernels' `downcast_to_mxfp_torch`: codes to the nearest e2m1, scales the
    power of two that brings a group's largest to at most 6. Read back by transformers.
    """
    grouped = weight.float().unflatten(-1, (-1, 32))
    exponents = (grouped.abs().amax(-1).clamp(min=2.0**-100) / 6).log2().ceil()
    scales = (exponents + 127).to(torch.uint8)
    values = (grouped / exponents.exp2().unsqueeze(-1)).flatten(0, -2)
    blocks = pack_fp4_to_uint8(nearest_e2m1(values)).reshape(*grouped.shape[:-1], 16)
    tensors = {"_blocks": blocks, "_scales": scales}
    read_back = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    return Written(tensors, read_back, {"quant_method": "mxfp4"})


def write_compressed_mxfp4(weight: Tensor) -> Written:
    """By compressed-tensors, `mxfp4-pack-quantized`."""
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    grouped = weight.unflatten(1, (-1, 32))
    scales, _ = calculate_qparams(grouped.amin(2), grouped.amax(2), scheme.weights)
    stored = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scales}, scheme)
    scale = MXFP4PackedCompressor._decompress_scale(stored["weight_scale"], torch.float32)
    return Written(
        _suffixed(stored),
        _read_fp4(stored["weight_packed"], scale, scheme.weights),
        _group(scheme, "mxfp4-pack-quantized"),
    )


def write_compressed_nvfp4(weight: Tensor) -> Written:
    """By compressed-tensors, `nvfp4-pack-quantized`."""
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    divisor = generate_gparam(weight.amin(), weight.amax())
    grouped = weight.unflatten(1, (-1, 16))
    scales, _ = calculate_qparams(
        grouped.amin(2), grouped.amax(2), scheme.weights, global_scale=divisor
    )
    stored = NVFP4PackedCompressor.compress(
        {"weight": weight, "weight_scale": scales, "weight_global_scale": divisor}, scheme
    )
    read_back = _read_fp4(
        stored["weight_packed"], stored["weight_scale"].float(), scheme.weights, divisor
    )
    return Written(_suffixed(stored), read_back, _group(scheme, "nvfp4-pack-quantized"))


def write_modelopt_nvfp4(weight: Tensor) -> Written:
    """After NVIDIA modelopt 0.47.0, torch/quantization/qtensor/nvfp4_tensor.py."""
    multiplier = weight.float().abs().amax() / (6 * 448)
    grouped = weight.float().unflatten(1, (-1, 16))
    scales = (grouped.abs().amax(2) / (6 * multiplier)).clamp(2**-9, 448)
    scales = torch.where(grouped.abs().amax(2) == 0, 1.0, scales).to(torch.float8_e4m3fn)
    per_group = (scales.float() * multiplier).unsqueeze(2)
    codes = nearest_e2m1((grouped / per_group).flatten(1))
    tensors = {
        ".weight": pack_fp4_to_uint8(codes),
        ".weight_scale": scales,
        ".weight_scale_2": multiplier,
        ".input_scale": torch.tensor(0.5),
    }
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return Written(tensors, (codes.unflatten(1, (-1, 16)) * per_group).flatten(1), config)


def nearest_e2m1(values: Tensor) -> Tensor:
    """The nearest of the eight magnitudes, ties to the even code, sign kept; 6 at most."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    bounds = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = values.abs()
    codes = torch.bucketize(size, bounds) + (size.unsqueeze(-1) == bounds[1::2]).any(-1)
    return torch.copysign(magnitudes[codes], values)


def _read_fp4(
    packed: Tensor, scale: Tensor, args: QuantizationArgs, global_scale: Tensor | None = None
) -> Tensor:
    num_rows, num_bytes = packed.shape
    codes = unpack_fp4_from_uint8(packed, num_rows, 2 * num_bytes, dtype=torch.float32)
    read: Tensor = dequantize(
        codes, scale, args=args, global_scale=global_scale, dtype=torch.float32
    )
    return read


def _suffixed(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f".{name}": tensor for name, tensor in stored.items()}


def _group(scheme: QuantizationScheme, layout: str) -> dict[str, Any]:
    group: dict[str, Any] = scheme.model_dump(mode="json")
    return {**group, "format": layout}
