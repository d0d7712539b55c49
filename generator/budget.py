"""How long a tuning run may go on: trials for each problem, wall time, or both.

Must not look at a clock; the time comes in as an argument.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
FORMS = "a time (300s, 20m, 2h), a count (20/problem), or both joined by a comma"


@dataclass(frozen=True)
class Budget:
    """Limits of a run; None is no limit. The text form is `300s`, `20/problem` or `300s,20/problem`.

    Trials that an interrupted run already made count against `trials_per_problem`; wall time counts anew.
    """

    trials_per_problem: int | None = None
    wall_s: float | None = None

    def __post_init__(self) -> None:
        if self.trials_per_problem is not None and self.trials_per_problem < 1:
            raise ValueError(f"budget: trials per problem must be at least 1, got {self.trials_per_problem}")
        if self.wall_s is not None and not 0 < self.wall_s < 1e9:
            raise ValueError(f"budget: wall time must be above zero, got {self.wall_s} s")

    def __str__(self) -> str:
        parts = []
        if self.wall_s is not None:
            parts.append(f"{self.wall_s:g}s")
        if self.trials_per_problem is not None:
            parts.append(f"{self.trials_per_problem}/problem")
        return ",".join(parts) or "none"

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read the text form; minutes and hours are accepted too.

        Raises:
            ValueError: naming the part that is not understood and the accepted forms.
        """
        trials: int | None = None
        wall_s: float | None = None
        for part in (word.strip() for word in text.split(",")) if text != "none" else ():
            count = re.fullmatch(r"(\d+)/problem", part)
            span = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|min|h)", part)
            if count and trials is None:
                trials = int(count.group(1))
            elif span and wall_s is None:
                wall_s = float(span.group(1)) * _UNITS_S[span.group(2)]
            else:
                raise ValueError(f"budget {text!r}: {part!r} is not understood; expected {FORMS}")
        return cls(trials, wall_s)

    def trials_left(self, space: int, made: int) -> int:
        """Return how many more trials a problem with `space` variants may have after `made` of them."""
        limit = space if self.trials_per_problem is None else min(space, self.trials_per_problem)
        return max(0, limit - made)

    def share_s(self, *, elapsed_s: float, problems_left: int) -> float | None:
        """Return the wall time of the next problem: an equal share of what is left; None is no limit."""
        if self.wall_s is None:
            return None
        return max(0.0, self.wall_s - elapsed_s) / max(1, problems_left)
