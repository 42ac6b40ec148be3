"""Settings of a checkpoint are of exactly the types that its format has."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import pytest

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.awq import read_awq
from ep_runtime.kernels.quant.fp8_weights import ScaleOf, read_compressed_fp8, read_fp8
from ep_runtime.kernels.quant.gptq import read_gptq
from ep_runtime.kernels.quant.hybrid import hybrid_config, read_hybrid
from ep_runtime.kernels.quant.mxfp4 import read_compressed_mxfp4
from ep_runtime.kernels.quant.nvfp4 import read_compressed_nvfp4, read_modelopt
from ep_runtime.kernels.quant.pack_quantized import read_pack_quantized
from ep_runtime.kernels.quant.settings import QuantizationSettings

Read = Callable[[Mapping[str, Any]], object]

GPTQ = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"bits": 4, "group_size": 128}
FP8_BLOCK = {"weight_block_size": [128, 128]}
PACKED = {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True}
FLOATS = {"num_bits": 4, "type": "float", "symmetric": True}
HYBRID = hybrid_config({1: (0, 2)})


class Spelling(StrEnum):
    GPTQ = "gptq"


def weights_of(read: Read) -> Read:
    """The reader of a config group, given its weights alone."""
    return lambda values: read({"weights": values})


@pytest.mark.parametrize(
    ("read", "good", "key", "value"),
    [
        *[(read_gptq, GPTQ, "bits", value) for value in (4.0, "4", True, [4], None)],
        *[(read_gptq, GPTQ, "group_size", value) for value in (128.0, "128", True)],
        *[(read_gptq, GPTQ, "sym", value) for value in (1, "true")],
        *[(read_gptq, GPTQ, "desc_act", value) for value in (0, 0.0, "false")],
        *[(read_gptq, GPTQ, "is_marlin_format", value) for value in (0, 0.0)],
        *[(read_awq, AWQ, "bits", value) for value in (4.0, "4")],
        *[
            (read_fp8, FP8_BLOCK, "weight_block_size", value)
            for value in ([128.0, 128], [128, 128.0], ["128", 128], [128], 128)
        ],
        *[(weights_of(read_pack_quantized), PACKED, "num_bits", value) for value in (4.0, 8.0)],
        *[(weights_of(read_pack_quantized), PACKED, "actorder", value) for value in (1, 0, 1.0)],
        *[(weights_of(read_pack_quantized), PACKED, "dynamic", value) for value in (0, 0.0)],
        *[
            (weights_of(read), FLOATS | {"group_size": size}, key, value)
            for read, size in ((read_compressed_mxfp4, 32), (read_compressed_nvfp4, 16))
            for key, value in (("num_bits", 4.0), ("group_size", float(size)), ("symmetric", 1))
        ],
        (
            weights_of(read_compressed_fp8),
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            "num_bits",
            8.0,
        ),
        *[(read_hybrid, HYBRID, "nvfp4_group_size", value) for value in (16.0, "16")],
        (read_hybrid, HYBRID, "nf3_group_size", 64.0),
        *[
            (read_hybrid, HYBRID, "nf3_codebook", [*HYBRID["nf3_codebook"][:-1], value])
            for value in (True, "1.0", 0.9)
        ],
        (read_hybrid, HYBRID, "nf3_codebook", HYBRID["nf3_codebook"][:-1]),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(
    read: Read, good: Mapping[str, Any], key: str, value: Any
) -> None:
    read(good)
    with pytest.raises(ConfigError, match=rf"(^|\.){key} \("):
        read({**good, key: value})


def test_a_group_size_of_modelopt_is_a_whole_number() -> None:
    def config(size: Any) -> dict[str, Any]:
        return {
            "quant_algo": "NVFP4",
            "config_groups": {"group_0": {"weights": {"group_size": size}}},
        }

    read_modelopt(config(16))
    with pytest.raises(ConfigError, match=r"group_0\.weights\.group_size \(16\.0\) must be 16"):
        read_modelopt(config(16.0))


def test_what_a_choice_gives_is_one_of_the_allowed() -> None:
    settings = QuantizationSettings({"format": Spelling.GPTQ, "scale": 1, "order": None})
    assert type(settings.choice("format", ("gptq",), cure="")) is str
    # A whole number stands for itself as a float, as JSON's writers may have it.
    assert type(settings.choice("scale", (1.0,), cure="")) is float
    codebook = [int(one) if one.is_integer() else one for one in HYBRID["nf3_codebook"]]
    assert type(codebook[0]) is int
    read_hybrid({**HYBRID, "nf3_codebook": codebook})
    assert settings.choice("order", (None, False), cure="") is None
    assert settings.choice("absent", ("a", "b"), default="b", cure="") == "b"


def test_blocks_are_read_from_a_list_and_from_a_tuple() -> None:
    for given in ([128, 128], (128, 128)):
        assert read_fp8({"weight_block_size": given}).scale_of is ScaleOf.BLOCK
