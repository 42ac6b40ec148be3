"""Command lines of the benchmarks: types of options, and errors as one line."""

import argparse
import sys
from collections.abc import Callable, Sequence
from math import inf

from ep_runtime.kernels.errors import EPRuntimeError


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of names with commas; an unknown one is an error that lists the valid ones."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown) or repr(text)}: choose from {', '.join(known)}"
            )
        return names

    return parse


def token_counts(text: str) -> list[int]:
    """Example: 1,8,32."""
    try:
        counts = [int(count) for count in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: positive numbers with commas, as 1,8,32")
    return counts


def whole_number(text: str) -> int:
    """Above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number above 0")
    return int(text)


def positive_number(text: str) -> float:
    """Above 0 and finite."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a number above 0")
    return number


def status_of(run: Callable[[], int]) -> int:
    """The exit status of a command: its own, or 2, and a line, where it raises an error of ours."""
    try:
        return run()
    except EPRuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
