"""Writes result files in the one form that reports read: `# key: value` lines, a header, rows."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ktlib_generator.values import Environment


def write_rows(
    path: Path, environment: Environment, columns: Sequence[str], rows: Iterable[Sequence[Any]], **facts: str
) -> None:
    """Write rows under the environment they were measured in; extra facts become header lines too."""
    about = {
        "device": environment.device,
        "arch": environment.arch,
        "sm_count": environment.sm_count,
        "commit": environment.commit + ("+changes" if environment.dirty else ""),
        **dict(environment.facts),
        **facts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        for key, value in about.items():
            file.write(f"# {key}: {value}\n")
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
