"""The command line. Exit status: 0 done and checked; 1 a check or a rank failed; 2 the
configuration is wrong; 128 + n when signal n ended the run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ep_runtime.kernels.errors import CheckpointError, ConfigError, EPRuntimeError, PlanError
from ep_runtime.launch.json_file import prepare_json_file, write_json

app = typer.Typer(
    name="ep-runtime",
    help="Expert-parallel runtime for Mixture-of-Experts inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_audit = typer.Typer(no_args_is_help=True)
app.add_typer(_audit, name="audit", help="Check what no output shows.")
_WRONG_CONFIGURATION = (ConfigError, PlanError, CheckpointError)

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Wins over the file; may be repeated."),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")
]


@app.command()
def run(
    config: Annotated[str, typer.Argument(help="YAML file, or a shipped one by its bare name.")],
    overrides: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Run a model or a layer on all ranks and check it; start the ranks unless this is one."""
    from ep_runtime.launch.run_command import run_command

    with _exit_status():
        raise typer.Exit(run_command(config, overrides or [], json_file))


@app.command()
def explain(
    source: Annotated[
        str, typer.Argument(help="YAML file, shipped one, checkpoint folder or config.json.")
    ],
    overrides: SetOption = None,
    world_size: Annotated[
        int | None, typer.Option(help="Plan for this many ranks instead of the file's.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="cpu, h200x8 or a doctor's JSON; default: this machine.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Print the plan: what is chosen, what is not and why; needs no ranks and no GPU."""
    from ep_runtime.launch.explain import explain_plan

    with _exit_status():
        prepare_json_file(json_file)
        plan = explain_plan(source, overrides or [], world_size=world_size, machine=machine)
        print(plan.explain())
        write_json(json_file, plan.to_dict())


@app.command()
def bench(
    context: typer.Context,
    config: Annotated[
        str | None, typer.Argument(help="YAML file; its keys are the options' names.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks to start; default 2, or the launcher's.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    backends: Annotated[
        str | None, typer.Option(help="Names with commas, side by side; default: all.")
    ] = None,
    experts: Annotated[str | None, typer.Option(help="Experts kernel; default: auto.")] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="eager or graph (CUDA graphs, where a backend can be captured)."),
    ] = None,
    dispatch_dtype: Annotated[
        str | None, typer.Option(help="List of auto, model, fp8: how rows travel to the experts.")
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(help="dispatch, combine, dispatch_combine, experts, shared, layer."),
    ] = None,
    tokens_per_rank: Annotated[str | None, typer.Option(help="List, as 1,8,32.")] = None,
    hidden_size: Annotated[str | None, typer.Option(help="List.")] = None,
    num_experts: Annotated[str | None, typer.Option(help="List.")] = None,
    top_k: Annotated[str | None, typer.Option(help="List.")] = None,
    moe_intermediate_size: Annotated[str | None, typer.Option(help="List.")] = None,
    num_shared_experts: Annotated[int | None, typer.Option(help="0: none.")] = None,
    dtype: Annotated[str | None, typer.Option(help="List of float32, bfloat16, float16.")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="List of schemes of the routed experts; default: none.")
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Of int4 and int8.")] = None,
    routing: Annotated[
        str | None, typer.Option(help="List of balanced, random, zipf, hotspot, model.")
    ] = None,
    max_tokens_per_rank: Annotated[
        int | None, typer.Option(help="What buffers are built for; default: the most tokens.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="In each, every backend is measured once.")
    ] = None,
    iterations: Annotated[int | None, typer.Option(help="Timed calls a round.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Calls before the first round.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of rows, routing and weights.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Of the process group.")] = None,
    output_dir: Annotated[
        str | None, typer.Option(help="Logs of the ranks and the record.")
    ] = None,
    json_file: JsonOption = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the latencies as PNG.")
    ] = None,
) -> None:
    """Measure backends and kernels side by side; start the ranks unless this is one."""
    from ep_runtime.launch.bench_command import bench_command

    options = {
        name: value
        for name, value in context.params.items()
        if name not in ("config", "json_file", "plot_file")
    }
    with _exit_status():
        raise typer.Exit(bench_command(config, options, json_file, plot_file))


@app.command()
def tune(
    output: Annotated[Path, typer.Option(metavar="FILE", help="The table, JSON.")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="YAML files (runs, or lists of layers), checkpoint folders, config.jsons."
        ),
    ] = None,
    hidden_size: Annotated[int | None, typer.Option()] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Of one expert.")] = None,
    num_experts: Annotated[int | None, typer.Option(help="Of the layer, on all ranks.")] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="none (default), fp8_block, fp8_channel, mxfp4 or nvfp4; int4 and int8, which "
            "need a group size, in a file."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 (default), float16 or float32.")
    ] = None,
    activation: Annotated[str | None, typer.Option(help="Default: silu.")] = None,
    local_experts: Annotated[
        int | None,
        typer.Option(
            help="Of one rank; default: by a run file's ep_size, else all. Refused beside a list "
            "whose layer gives its own."
        ),
    ] = None,
    rows_per_expert: Annotated[
        str, typer.Option(help="What to tune for: expected rows of an expert, with commas.")
    ] = "0.25,1,4,16,32,64,128,512",
    processes: Annotated[
        int | None, typer.Option(min=1, help="That compile; default: one a core, up to 16.")
    ] = None,
) -> None:
    """Search the fastest tiles of the triton experts on this GPU; `kernel.tile_table` uses them."""
    from ep_runtime.launch.tune_command import tune_command
    from ep_runtime.launch.tune_layers import TuneSizes

    with _exit_status():
        tune_command(
            sources or [],
            TuneSizes(
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                num_experts=num_experts,
                top_k=top_k,
                scheme=scheme,
                dtype=dtype,
                activation=activation,
            ),
            local_experts=local_experts,
            rows_per_expert=rows_per_expert,
            output=output,
            processes=processes,
            say=print,
        )


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="Checkpoint folder, not quantised.")],
    output: Annotated[Path, typer.Argument(help="Folder to write, new or empty.")],
    statistics: Annotated[
        Path, typer.Option(metavar="FILE", help="Report of a run: how often experts were used.")
    ],
    hot: Annotated[
        int | None, typer.Option(help="Experts of a layer in nvfp4, the most used; others: nf3.")
    ] = None,
    hot_share: Annotated[
        float | None, typer.Option(help="Instead of --hot: their share of a layer's, 0 to 1.")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Most bytes of a file, as 5GB.")] = "5GB",
    json_file: JsonOption = None,
) -> None:
    """Store a checkpoint's routed experts in nvfp4 and nf3, by how often they are used."""
    from ep_runtime.launch.quantize_command import HotExperts, quantize_command

    with _exit_status():
        quantize_command(
            source,
            output,
            statistics=statistics,
            hot=HotExperts(hot, hot_share),
            shard_size=shard_size,
            json_file=json_file,
            console=Console(),
        )


@_audit.command()
def streams(
    config: Annotated[
        str | None,
        typer.Argument(
            help="YAML file, shipped one, checkpoint folder or config.json; default: "
            "cpu_single.yaml, on a GPU gpu_dp2_ep2.yaml."
        ),
    ] = None,
    overrides: SetOption = None,
    device: Annotated[
        str,
        typer.Option(
            help="cpu: the real code against recorded streams; cuda: sanitizer and stress."
        ),
    ] = "cpu",
    backends: Annotated[str | None, typer.Option(help="Names with commas; default: all.")] = None,
    experts: Annotated[str | None, typer.Option(help="Names with commas; default: all.")] = None,
    checks: Annotated[
        str | None, typer.Option(help="On cuda: sanitizer, allocator, co_run; default: all.")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="On cuda: of each co-run; default: 2000.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="On cuda: of all stresses together; default: 60.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="On cuda: of the stresses; default: 0.")] = None,
    unjoined: Annotated[
        bool,
        typer.Option("--unjoined", help="On cuda: run uncertified kernels beside others too."),
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Show that every read, write and free of a layer's buffers is ordered across its streams."""
    given = {"checks": checks, "iterations": iterations, "seconds": seconds, "seed": seed}
    given |= {"unjoined": True} if unjoined else {}
    options = {name: value for name, value in given.items() if value is not None}
    if device == "cuda":
        from ep_runtime.launch.audit_gpu_command import audit_gpu_command

        with _exit_status():
            raise typer.Exit(
                audit_gpu_command(
                    config or "gpu_dp2_ep2.yaml",
                    overrides or [],
                    backends=backends,
                    experts=experts,
                    options=options,
                    json_file=json_file,
                    console=Console(),
                )
            )
    from ep_runtime.launch.audit_command import audit_streams_command

    with _exit_status():
        if options:
            raise ConfigError(f"--{next(iter(options))} is for --device cuda alone; leave it out")
        raise typer.Exit(
            audit_streams_command(
                config or "cpu_single.yaml",
                overrides or [],
                device=device,
                backends=backends,
                experts=experts,
                json_file=json_file,
                console=Console(),
            )
        )


@app.command()
def doctor(json_file: JsonOption = None) -> None:
    """Show what this machine has, and which backends and kernels it can use."""
    from ep_runtime.launch.doctor import diagnose, print_diagnosis

    with _exit_status():
        prepare_json_file(json_file)
        diagnosis = diagnose()
        print_diagnosis(diagnosis, Console())
        write_json(json_file, diagnosis)


@contextmanager
def _exit_status() -> Iterator[None]:
    """One line on stderr for an error the user can cure, and its exit status."""
    try:
        yield
    except _WRONG_CONFIGURATION as error:
        _say(str(error))
        raise typer.Exit(2) from None
    except EPRuntimeError as error:
        _say(str(error))
        raise typer.Exit(1) from None


def _say(message: str) -> None:
    Console(stderr=True).print(
        f"ep-runtime: {message}", markup=False, highlight=False, soft_wrap=True
    )


def main() -> None:
    """The console script."""
    app()
