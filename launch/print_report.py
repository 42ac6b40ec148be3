"""A run's report as tables, for the terminal."""

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ep_runtime.phases import PHASES
from ep_runtime.plan import Plan


def print_report(report: dict[str, Any], plan: Plan, console: Console) -> None:
    """The plan, what each rank did, the experts' load, and the checks."""
    console.print(plan.explain(), markup=False, highlight=False, soft_wrap=True)
    console.print(_ranks_table(report["ranks"]))
    console.print(_times_table(report["ranks"]))
    console.print(_load_line(report["ranks"]), highlight=False)
    if not report["checks"]:
        console.print("check: off", highlight=False)
        return
    table = Table("check", "value", "limit", "passed", title="Checks")
    for check in report["checks"]:
        passed = "yes" if check["passed"] else "[bold red]no[/]"
        table.add_row(check["name"], f"{check['value']:.3g}", f"{check['limit']:.3g}", passed)
    console.print(table)
    console.print("passed" if report["passed"] else "failed", highlight=False)


def _ranks_table(ranks: list[dict[str, Any]]) -> Table:
    columns = ("rank", "device", "prompts", "tokens", "slots here", "shared expert calls")
    table = Table(*columns, title="Ranks")
    for rank in ranks:
        table.add_row(
            str(rank["rank"]),
            rank["device"],
            str(rank["num_prompts"]),
            str(rank["num_tokens"]),
            str(sum(rank["tokens_per_expert"])),
            f"{rank['shared_expert_calls']} in {rank['layer_calls']} layer calls",
        )
    return table


def _times_table(ranks: list[dict[str, Any]]) -> Table:
    """The phases are parts of forward and decode; overlapped ones count in full."""
    seconds = list(ranks[0]["seconds"])
    table = Table("rank", *seconds, *PHASES, title="Milliseconds", box=SIMPLE, padding=0)
    for rank in ranks:
        times = [rank["seconds"][name] for name in seconds]
        times += [rank["phase_seconds"].get(name, 0.0) for name in PHASES]
        table.add_row(str(rank["rank"]), *[f"{1e3 * value:.1f}" for value in times])
    return table


def _load_line(ranks: list[dict[str, Any]]) -> str:
    """The load of the experts over all ranks: the mean, and the most and least loaded."""
    load = [sum(counts) for counts in zip(*(r["tokens_per_expert"] for r in ranks), strict=True)]
    most, least = max(load), min(load)
    return (
        f"expert load: mean {sum(load) / len(load):.1f} slots, most {most} (expert "
        f"{load.index(most)}), least {least} (expert {load.index(least)})"
    )
