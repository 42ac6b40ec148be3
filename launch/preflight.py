"""Everything about a run that can be known before a rank starts."""

import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import torch

from ep_runtime.all2all.registry import backend_class
from ep_runtime.checkpoint import read_config
from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.kernels.base import ExpertsKind
from ep_runtime.kernels.errors import ConfigError, PlanError
from ep_runtime.kernels.registry import experts_class
from ep_runtime.launch.run_config import RunConfig
from ep_runtime.launch.workload import prompts_of, read_prompts, vocab_size_of
from ep_runtime.launcher_environment import LauncherEnvironment
from ep_runtime.machine import Machine
from ep_runtime.plan import Plan, resolve_plan
from ep_runtime.tiny import tiny_config

INTERPRET_VARIABLE = "TRITON_INTERPRET"


def device_type_of(device: str, *, key: str = "parallel.device") -> str:
    """What `device: auto` means on this machine; a ConfigError for cuda where there is none.

    key: the user's name of it.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError(
            f"{key} is cuda, and torch sees no CUDA device here; use device: cpu or auto"
        )
    return "cuda" if available and device != "cpu" else "cpu"


def set_interpreter_variable(
    parallel: ParallelConfig, experts: str, environ: MutableMapping[str, str]
) -> None:
    """Set TRITON_INTERPRET=1 if ranks on a CPU will launch Triton kernels, and only then."""
    backend = parallel.all2all_backend
    interpret_if_needed(
        environ,
        device_type=device_type_of(parallel.device),
        experts=experts,
        backends=() if backend == "auto" else (backend,),
    )


def interpret_if_needed(
    environ: MutableMapping[str, str], *, device_type: str, experts: str, backends: Sequence[str]
) -> None:
    """Set TRITON_INTERPRET=1 for a CPU if what is named needs Triton. experts: may be auto.

    Triton reads the variable while it is imported, and a kernel's class says only after that
    whether it needs Triton; so it is set for the look and kept where the answer is yes.
    """
    if device_type != "cpu" or INTERPRET_VARIABLE in environ:
        return
    environ[INTERPRET_VARIABLE] = "1"
    try:
        needed = [experts_class(experts).capabilities.needs_triton] if experts != "auto" else []
        needed += [backend_class(name).capabilities.needs_triton for name in backends]
    except BaseException:
        del environ[INTERPRET_VARIABLE]
        raise
    if not any(needed):
        del environ[INTERPRET_VARIABLE]


def check_world_size(parallel: ParallelConfig, launcher: LauncherEnvironment) -> None:
    """The ranks a launcher started, if one did, must be those the configuration asks for."""
    started, wanted = launcher.world_size, parallel.world_size
    if launcher.launcher != "none" and started not in (None, wanted):
        raise ConfigError(
            f"parallel.dp_size * parallel.tp_size ({parallel.dp_size} * {parallel.tp_size} = "
            f"{wanted}) must equal the {started} ranks that {launcher.launcher} started; change "
            f"either"
        )


def checkpoint_moe(path: Path) -> MoEConfig:
    """The MoE layers of a checkpoint folder; an unknown family lists the known ones."""
    values = read_config(path)
    try:
        return MoEConfig.from_hf(values)
    except ConfigError as error:
        raise ConfigError(f"model.checkpoint {path}: {error}") from None


def moe_of(config: RunConfig) -> MoEConfig:
    """The layer that is planned for; logits are checked in float32, whatever the weights are."""
    model = config.model
    if model.layer is not None:
        return model.layer
    if model.tiny is not None:
        tiny = tiny_config(model.tiny.family)
        return MoEConfig.from_hf(tiny).model_copy(update={"dtype": "float32"})
    moe = checkpoint_moe(Path(model.checkpoint or ""))
    return moe.model_copy(update={"dtype": "float32"}) if config.check == "logits" else moe


def plan_of(config: RunConfig) -> Plan:
    """The plan that the ranks will build, resolved here, on the machine they run on."""
    return resolve_plan(
        moe_of(config),
        config.parallel,
        Machine.detect(device_type_of(config.parallel.device)),
        experts=config.kernel.experts,
        shared_experts=config.shared_experts,
    )


def use_tile_table(path: str | None) -> None:
    """Have a user's table looked up by the layers of this process; ConfigError if it is wrong.

    Imports Triton: after `set_interpreter_variable`.
    """
    if path is not None:
        from ep_runtime.kernels.tile_tables import register_tile_table

        try:
            register_tile_table(path)
        except ConfigError as error:
            raise ConfigError(f"kernel.tile_table: {error}") from None


def refuse_table_without_effect(plan: Plan, path: str | None) -> None:
    """PlanError for a user's table where no table can have an effect on the planned layer.

    On a CPU, which has no tiles, a file's table waits for a GPU.
    """
    if path is None or plan.machine.device_type != "cuda":
        return
    from ep_runtime.kernels.tuning_text import tile_table_fault

    shape, capability = plan.experts_shape(0), plan.machine.compute_capability
    if experts_class(plan.experts)(shape).tuning_text(plan.machine.name, capability) is None:
        fault: str | None = f"experts {plan.experts}, which has none, is taken"
    else:
        fault = tile_table_fault(shape, capability)
    if fault:
        raise PlanError(
            f"kernel.tile_table ({path}) has no effect on {plan.machine.name}: {fault}; drop it"
        )


def check_before_start(config: RunConfig) -> None:
    """Raise what would make every rank fail: ConfigError, PlanError or CheckpointError."""
    set_interpreter_variable(config.parallel, config.kernel.experts, os.environ)
    if config.workload.prompts is not None:
        read_prompts(Path(config.workload.prompts))
    plan = plan_of(config)
    use_tile_table(config.kernel.tile_table)
    refuse_table_without_effect(plan, config.kernel.tile_table)
    _refuse_routing(plan, config.workload.routing)
    if config.model.checkpoint is not None:
        from ep_runtime.opened_checkpoint import OpenedCheckpoint  # imports transformers' models

        # Reads the files' headers alone.
        dtype = "float32" if config.check == "logits" else None
        OpenedCheckpoint(config.model.checkpoint, dtype).reader.close()
        checkpoint = Path(config.model.checkpoint)
        prompts_of(
            config.workload,
            checkpoint,
            dp_size=config.parallel.dp_size,
            vocab_size=vocab_size_of(checkpoint),
        )


def _refuse_routing(plan: Plan, kind: str) -> None:
    kernel = experts_class(plan.experts).capabilities
    if kind != "model" and kernel.kind is ExpertsKind.MONOLITHIC:
        raise PlanError(
            f"workload.routing ({kind}) has no effect with experts {plan.experts}, which is "
            f"monolithic: it routes itself; use routing: model or a modular kernel"
        )
