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
        plan = explain_plan(source, overrides or [], world_size=world_size, machine=machine)
        print(plan.explain())
        write_json(json_file, plan.to_dict())


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
