"""`ep-runtime explain`: the plan of a run, for this machine or one that is not here."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ep_runtime.config import MoEConfig, ParallelConfig, SharedExpertsConfig
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.launch.preflight import (
    checkpoint_moe,
    device_type_of,
    moe_of,
    refuse_table_without_effect,
    set_interpreter_variable,
    use_tile_table,
)
from ep_runtime.launch.run_config import (
    KernelSection,
    load_run_config,
    parse_overrides,
)
from ep_runtime.machine import PRESETS, Machine
from ep_runtime.plan import Plan, resolve_plan
from ep_runtime.strict_model import StrictModel


class _PlanSections(StrictModel):
    """What a plan reads of a run's configuration."""

    parallel: ParallelConfig = ParallelConfig()
    kernel: KernelSection = KernelSection()
    shared_experts: SharedExpertsConfig = SharedExpertsConfig()


def explain_plan(
    source: str,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    machine: str | None = None,
) -> Plan:
    """The plan for a run's YAML file, a checkpoint folder or its config.json.

    world_size: replaces dp_size by world_size / tp_size and ep_size by world_size, each unless
    an override sets it. machine: a preset's name or a doctor's JSON file; None: this machine.
    """
    moe, sections = read_source(source, overrides)
    values = sections.model_dump()
    if world_size is not None:
        tp_size = sections.parallel.tp_size
        if world_size < 1 or world_size % tp_size:
            raise ConfigError(
                f"--world-size ({world_size}) must be a multiple of parallel.tp_size ({tp_size})"
            )
        kept = parse_overrides(overrides).get("parallel", {})
        for key, size in (("dp_size", world_size // tp_size), ("ep_size", world_size)):
            if key not in kept:
                values["parallel"][key] = size
        sections = _PlanSections(**values)
        if sections.parallel.world_size != world_size:
            raise ConfigError(
                f"--world-size ({world_size}) contradicts --set parallel.dp_size="
                f"{sections.parallel.dp_size} with tp_size {tp_size}; drop one"
            )
    planned_for = find_machine(machine, sections.parallel)
    if machine is None:
        set_interpreter_variable(sections.parallel, sections.kernel.experts, os.environ)
    use_tile_table(sections.kernel.tile_table)
    plan = resolve_plan(
        moe,
        sections.parallel,
        planned_for,
        experts=sections.kernel.experts,
        shared_experts=sections.shared_experts,
    )
    refuse_table_without_effect(plan, sections.kernel.tile_table)
    return plan


def find_machine(name: str | None, parallel: ParallelConfig) -> Machine:
    """A preset, the machine of a doctor's JSON file, or (None) this one."""
    if name is None:
        return Machine.detect(device_type_of(parallel.device))
    machine = _named_machine(name)
    if parallel.device not in ("auto", machine.device_type):
        raise ConfigError(
            f"--machine {name} is a {machine.device_type} machine, and parallel.device is "
            f"{parallel.device}; change either"
        )
    return machine


def _named_machine(name: str) -> Machine:
    if name in PRESETS or not Path(name).is_file():
        return Machine.preset(name)
    try:
        values = json.loads(Path(name).read_text(encoding="utf-8"))
        return Machine.from_dict(values["machine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--machine {name}: is not a doctor's JSON: {error}") from None


def read_source(source: str, overrides: Sequence[str]) -> tuple[MoEConfig, _PlanSections]:
    path = Path(source).expanduser()
    if path.is_dir() or path.name == "config.json":
        moe = checkpoint_moe(path if path.is_dir() else path.parent)
        return moe, _PlanSections(**parse_overrides(overrides))
    config = load_run_config(source, overrides)
    sections = _PlanSections(
        parallel=config.parallel, kernel=config.kernel, shared_experts=config.shared_experts
    )
    return moe_of(config), sections
