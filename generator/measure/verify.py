"""Verification: is a candidate right, and does it touch only what it may? Before timing, and again after.

Must not time anything or know how a candidate was built. A candidate is a function `run(a, b, c, stream)`
over operands; the same rules run over NumPy and torch arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ktlib.problem import Problem
from ktlib_generator.measure import inputs, rules
from ktlib_generator.measure.arrays import Arrays
from ktlib_generator.measure.inputs import Case
from ktlib_generator.measure.operands import Arena, Operand
from ktlib_generator.measure.traces import Traces
from ktlib_generator.values import Status, Verification

Run = Callable[[Operand, Operand, Operand, int], None]

# Bytes an output is filled with before a run: NaN in every dtype, zero, and two finite numbers.
POISONS = (0xFF, 0x00, 0x5A, 0xA5)
# Bytes around the inputs: NaN, and a finite number (-46 in fp16) for kernels that only survive NaN.
SURROUNDS = (0xFF, 0xD1)
SPOT_ROWS = 16
# How long the caller's stream is held while the order check looks: 5 ms at 2 GHz; once more, longer, when
# the host was too slow to look in time.
HOLD_CYCLES = (10_000_000, 200_000_000)


@dataclass(frozen=True)
class Failure:
    """Why a candidate is not accepted, and the status that goes into its record."""

    reason: str
    status: Status = Status.WRONG_RESULT


def verify(
    run: Run, problem: Problem, arrays: Arrays, *, seed: int = 0, splits: int = 1
) -> Verification | Failure:
    """Run every rule once; see `Verifier`."""
    return Verifier(problem, arrays, seed).verify(run, splits=splits)


class Verifier:
    """The cases of one problem and the memory they run in, kept for all its candidates.

    Two arenas: one with padded rows, one with the rows as the problem has them. Each case is loaded into
    both, so new contents meet the same addresses and the same contents new ones.
    """

    def __init__(self, problem: Problem, arrays: Arrays, seed: int) -> None:
        self.problem, self.arrays, self.seed = problem, arrays, seed
        self.cases = inputs.cases(problem, arrays, seed)
        self.arenas = tuple(Arena.make(problem, arrays, padded=padded) for padded in (True, False))

    def verify(self, run: Run, *, splits: int = 1, foreign: bool = True) -> Verification | Failure:
        """Apply every rule; the first that fails ends it. What is not `foreign` may keep threads."""
        traces = Traces.now()
        checks: list[str] = []
        ratio = 1.0
        for i, case in enumerate(self.cases):
            for j, arena in enumerate(self.arenas):
                poison = POISONS[(i + 2 * j) % len(POISONS)]
                surround = SURROUNDS[(i + j) % len(SURROUNDS)]
                wrong, found = self._run_case(run, case, arena, poison, surround, splits)
                if wrong is not None:
                    return Failure(wrong)
                ratio = max(ratio, found)
            checks.append(case.name)
        wrong = self._repeat(run)
        if wrong is not None:
            return Failure(wrong)
        on_gpu = self.arrays.kind == "cuda"
        wrong = self._stream_order(run) if on_gpu else traces.left_since() if foreign else None
        if wrong is not None:
            return Failure(wrong, Status.REFUSED)
        checks += ["poison", "guards", "inputs_unchanged", "repeat", "stream" if on_gpu else "threads"]
        return Verification(ratio, tuple(checks))

    def verify_again(self, run: Run, seed: int, *, splits: int = 1) -> str | None:
        """After timing: fresh values at addresses the candidate has seen."""
        for make in (inputs.normal, inputs.zero_one):
            case = make(self.problem, self.arrays, seed)
            wrong, _ = self._run_case(run, case, self.arenas[1], POISONS[0], SURROUNDS[0], splits)
            if wrong is not None:
                return f"after timing: {wrong}"
        return None

    def _run_case(
        self, run: Run, case: Case, arena: Arena, poison: int, surround: int, splits: int
    ) -> tuple[str | None, float]:
        """Run one case in one arena; return what is wrong or None, and the RMS ratio (1 where not judged)."""
        c = self._launch(run, case, arena, poison, surround)
        return self._outside(case, arena, poison, surround) or self._judge(case, c, splits), self._ratio(
            case, c
        )

    def _launch(self, run: Run, case: Case, arena: Arena, poison: int, surround: int) -> Any:
        """Load the case, poison C, run, wait; return a copy of C."""
        arena.a.load(case.a, surround)
        arena.b.load(case.b, surround)
        arena.c.fill(poison)
        run(arena.a.operand, arena.b.operand, arena.c.operand, self.arrays.stream())
        self.arrays.synchronize()
        return self.arrays.copy(arena.c.operand.logical)

    def _outside(self, case: Case, arena: Arena, poison: int, surround: int) -> str | None:
        """Inputs are bit for bit as loaded, and no byte around A, B or C has changed."""
        for name, guarded, values in (("A", arena.a, case.a), ("B", arena.b, case.b)):
            if not guarded.holds(values):
                return f"{case.name}: input {name} was changed"
            if not guarded.outside_intact(surround):
                return f"{case.name}: wrote out of bounds, beside input {name}"
        if not arena.c.outside_intact(poison):
            return f"{case.name}: wrote out of bounds, beside C"
        return None

    def _judge(self, case: Case, c: Any, splits: int) -> str | None:
        """Apply the numeric rules to C."""
        found = rules.finite_elsewhere(case, c, self.problem, self.arrays)
        found = found or rules.projected(case, c, self.problem, self.arrays)
        for sample in case.samples:
            got = sample.of(c)
            if case.exact:
                found = found or rules.exact(case, sample, got, self.problem, self.arrays)
                continue
            found = found or rules.bound(case, sample, got, self.problem, self.arrays, splits)
            ratio = rules.rms_ratio(sample, got, self.problem, self.arrays)
            found = found or rules.rms(ratio, self.problem)
        return found

    def _ratio(self, case: Case, c: Any) -> float:
        """Worst RMS ratio of a case that is judged by it."""
        if case.exact:
            return 1.0
        ratios = [rules.rms_ratio(s, s.of(c), self.problem, self.arrays) for s in case.samples]
        return max((r for r in ratios if r is not None), default=1.0)

    def _repeat(self, run: Run) -> str | None:
        """The same call over two other poisons gives the same bits."""
        case = self.cases[1]
        arena = self.arenas[1]
        first, second = (self._launch(run, case, arena, poison, SURROUNDS[0]) for poison in POISONS[2:])
        if bool((self.arrays.bits(first) == self.arrays.bits(second)).all()):
            return None
        return f"repeat: two runs of {case.name} differ in {int((first != second).sum())} entries"

    def _stream_order(self, run: Run) -> str | None:
        """CUDA: nothing is written while the caller's stream is held, nor after that stream is done."""
        case, arena = self.cases[0], self.arenas[1]
        arena.a.load(case.a, SURROUNDS[0])
        arena.b.load(case.b, SURROUNDS[0])
        found: str | None = None
        for cycles in HOLD_CYCLES:
            arena.c.fill(POISONS[0])
            looked_in_time, found = stream_order(run, arena, self.arrays, cycles)
            if looked_in_time:
                return found or self._judge(case, self.arrays.copy(arena.c.operand.logical), 1)
        return "stream: the launch waited for the device (a launch must only enqueue)"


def stream_order(run: Run, arena: Arena, arrays: Arrays, cycles: int) -> tuple[bool, str | None]:
    """Hold a side stream, launch into it, and look at C from another stream before and after.

    Returns whether the first look came while the stream was still held, and what is wrong or None.
    """
    torch = arrays.xp
    c = arena.c.operand.logical
    poison = arrays.copy(c)
    early = arrays.copy(c)  # allocated now: an allocation may wait for the device
    held, other, free = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    arrays.synchronize()
    with torch.cuda.stream(held):
        torch.cuda._sleep(cycles)
        free.record()
        run(arena.a.operand, arena.b.operand, arena.c.operand, int(held.cuda_stream))
    with torch.cuda.stream(other):
        early.copy_(c)
    other.synchronize()
    looked_in_time = not free.query()
    held.synchronize()
    done = arrays.copy(c)
    arrays.synchronize()
    late = arrays.copy(c)
    if not bool((arrays.bits(early) == arrays.bits(poison)).all()):
        return looked_in_time, "stream: C was written before the caller's stream reached the launch"
    if not bool((arrays.bits(done) == arrays.bits(late)).all()):
        return looked_in_time, "stream: C was still being written after the caller's stream was done"
    return looked_in_time, None


def spot_check(a: Operand, b: Operand, c: Operand, problem: Problem, arrays: Arrays, seed: int) -> str | None:
    """Compare some rows of an output that timing left behind with fp64, by the bound."""
    rows = arrays.index(inputs.sampled_lines(problem.m, seed)[:SPOT_ROWS])
    got = arrays.copy(c.logical[rows])  # first: work that was put off must come too late
    left = arrays.decode(a.logical[rows], problem.dtype)
    right = arrays.decode(b.logical, problem.dtype)
    sample = inputs.Sample(rows, None, left @ right, arrays.xp.abs(left) @ arrays.xp.abs(right))
    case = Case("timed output", a.logical, b.logical, (sample,), exact=False)
    return rules.bound(case, sample, got, problem, arrays)
