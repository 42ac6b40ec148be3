"""What ranks of a benchmark tell each other between measurements."""

import json
from typing import Any

import torch

from ep_runtime.all2all.base import EPGroup
from ep_runtime.all2all.collectives import gather_integers, gather_texts


def gather_values(value: Any, group: EPGroup) -> list[Any]:
    """Every rank's JSON value, in rank order; a collective of the group."""
    return [json.loads(text) for text in gather_texts(json.dumps(value), group)]


def start_together(group: EPGroup) -> None:
    """Wait until every rank has finished what it issued; a collective of the group."""
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    gather_integers(0, group)
