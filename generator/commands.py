"""What each subcommand of `ktlib-build` does, with its arguments parsed; returns the exit code.

Must not parse the command line or print errors; it raises, and cli.py says it in a line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

if TYPE_CHECKING:
    from ktlib_generator.families.base import Device, Family
    from ktlib_generator.plan import Plan
    from ktlib_generator.problems import Suite
    from ktlib_generator.values import Environment, Record, Variant

RUNS_FOLDER = Path("tuning_runs")
DATABASES_FOLDER = Path("tuning_db")
# A half-precision product from here on is meant for a GPU (half a GFLOP, as in benchmarks/suites).
GPU_SIZED_FLOP = 5e8


class CommandError(ValueError):
    """What was asked for makes no sense as it stands; the message says what to change."""


def tune(arguments: argparse.Namespace) -> int:
    """Tune problems on this machine's device and merge the outcome into a database."""
    from ktlib_generator.measure.device import detect
    from ktlib_generator.plan import device_line
    from ktlib_generator.problems import parse_problems
    from ktlib_generator.progress import make_progress
    from ktlib_generator.tune import TuneOptions
    from ktlib_generator.tune import tune as run_tune

    require_modules("h5py")
    suite = parse_problems(arguments.problems, arguments.layout, arguments.dtype)
    device = detect(arguments.profile)
    run_dir = arguments.run_dir or RUNS_FOLDER / device.profile
    database = arguments.database or DATABASES_FOLDER / f"{device.profile}.h5"
    if arguments.resume and not run_dir.exists():
        print(
            f"ktlib-build: warning: {run_dir} does not exist; the run starts anew",
            file=sys.stderr,
        )
    if arguments.dry_run:
        print(_plan(arguments, suite, device, run_dir, database))
        return 0
    options = TuneOptions(
        strategy=arguments.strategy,
        budget=arguments.budget,
        seed=arguments.seed,
        protocol=arguments.protocol or "",
        jobs=arguments.jobs or 0,
        build_timeout_s=arguments.build_timeout,
    )
    summary = run_tune(
        suite,
        device,
        options,
        run_dir=run_dir,
        database=database,
        resume=arguments.resume,
        progress=make_progress(
            quiet=arguments.quiet, heading=device_line(device, _why_cpu(arguments, suite, device))
        ),
    )
    print(summary)
    return summary.exit_code


def _why_cpu(arguments: argparse.Namespace, suite: Suite, device: Device) -> str:
    """Say why a CPU tunes what looks meant for a GPU; empty when nobody would wonder."""
    from ktlib_generator.measure.device import cuda_problem

    large = any(
        p.dtype != "fp32" and 2.0 * p.m * p.n * p.k * p.batch >= GPU_SIZED_FLOP for p in suite.problems
    )
    if arguments.profile or device.kind != "cpu" or not large:
        return ""
    return f"no GPU: {cuda_problem()}"


def _plan(arguments: argparse.Namespace, suite: Suite, device: Device, run_dir: Path, database: Path) -> Plan:
    from ktlib_generator.build.builder import default_jobs
    from ktlib_generator.build.cache import BinaryCache
    from ktlib_generator.families.registry import families_for
    from ktlib_generator.plan import make_plan
    from ktlib_generator.run_dir import records_of

    return make_plan(
        suite,
        device,
        families_for(device),
        records_of(run_dir) if arguments.resume else [],
        budget=arguments.budget,
        strategy=arguments.strategy,
        protocol=arguments.protocol or "",
        jobs=arguments.jobs or default_jobs(),
        cache=BinaryCache.default(),
        run_dir=run_dir,
        database=database,
    )


def build(arguments: argparse.Namespace) -> int:
    """Compile one variant and print what ptxas said."""
    from ktlib_generator.build.builder import build as build_variant
    from ktlib_generator.build.cache import BinaryCache
    from ktlib_generator.families.registry import family
    from ktlib_generator.values import BuildFailure, Variant

    variant = Variant.parse(arguments.variant)
    owner = family(variant.family)
    check_variant(variant, owner)
    result = build_variant(variant, owner, BinaryCache.default(), arguments.build_timeout)
    if isinstance(result, BuildFailure):
        print(result.log, file=sys.stderr)
        print(f"ktlib-build: error: {variant}: {result.reason}", file=sys.stderr)
        return 1
    facts = owner.kernel_facts(variant, result)
    print(f"variant    {variant}")
    if result.format == "builtin":
        if arguments.output:
            raise CommandError(f"{variant} is compiled into the extension; leave --output out")
        print("format     builtin (compiled into the extension, nothing to build)")
        return 0
    print(f"symbol     {result.symbol}")
    print(f"registers  {result.registers} a thread, {result.spill_bytes} bytes spilled")
    print(f"shared     {facts.smem_bytes} bytes a block, {facts.threads} threads")
    print(f"sha256     {result.sha256} ({len(result.data)} bytes)")
    if arguments.output:
        _write_bytes(arguments.output, result.data)
        print(f"written    {arguments.output}")
    return 0


def check_variant(variant: Variant, family: Family) -> None:
    """Refuse a variant whose parameters are not the family's, or that its constraints forbid.

    Raises:
        CommandError: naming the parameter and the values it may have, or the constraints it breaks.
    """
    from ktlib.problem import Problem
    from ktlib_generator.families.base import Device, refusals

    axes = {parameter.name: parameter for parameter in family.parameters()}
    config = dict(variant.config)
    for name in axes:
        if name not in config:
            raise CommandError(f"variant {variant}: {name} is missing (have: {', '.join(axes)})")
    for name, value in config.items():
        if name not in axes:
            raise CommandError(f"variant {variant}: {family.name} has no {name} (have: {', '.join(axes)})")
        if value not in axes[name].values:
            have = ", ".join(str(v) for v in axes[name].values)
            raise CommandError(f"variant {variant}: {name}={value} is not offered (have: {have})")
    # The family's own rules, for a problem large enough that only the variant can be at fault.
    problem = Problem(4096, 4096, 4096, layout=str(config.get("layout", "nn")), dtype=str(config["dtype"]))
    device = Device(family.device_kind, "any", variant.arch, sm_count=1)
    broken = refusals(family, variant, problem, device)
    if broken:
        raise CommandError(f"variant {variant} is refused: {'; '.join(broken)}")


def merge(arguments: argparse.Namespace) -> int:
    """Fold run directories, journals and databases into one database."""
    from ktlib_generator.progress import counted
    from ktlib_generator.run_dir import check_writable, merge_runs

    require_modules("h5py")
    target = arguments.output or DATABASES_FOLDER / f"{_profile_of(arguments.sources)}.h5"
    check_writable(target)
    done = merge_runs(target, arguments.sources)
    for finding in done.findings:
        print(f"ktlib-build: warning: {finding}", file=sys.stderr)
    if done.missing_binaries:
        print(
            f"ktlib-build: warning: {counted(len(done.missing_binaries), 'binary')} not found beside the "
            "journals; kernels without one cannot be packed",
            file=sys.stderr,
        )
    kept = f"{counted(done.records, 'record')} ({done.new_records} new), {counted(done.binaries, 'binary')}"
    print(f"{done.path}: {kept}")
    return 0


def inspect(arguments: argparse.Namespace) -> int:
    """Print what a database holds."""
    from ktlib_generator.store.summary import inspect as inspect_database

    require_modules("h5py")
    summary = inspect_database(arguments.database)
    print(json.dumps(summary.to_dict(), indent=2) if arguments.json else summary)
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Check every entry of databases against its checksum; 1 when something is wrong."""
    from ktlib_generator.store.hdf5 import verify as verify_database

    require_modules("h5py")
    bad = 0
    for path in arguments.databases:
        findings = verify_database(path)
        bad += bool(findings)
        print("\n".join(findings) if findings else f"{path}: sound")
    return 1 if bad else 0


def export(arguments: argparse.Namespace) -> int:
    """Write a database as JSON lines."""
    from ktlib_generator.store.exchange import export_json

    require_modules("h5py")
    if arguments.output and arguments.output.exists() and arguments.output.samefile(arguments.database):
        raise CommandError(f"{arguments.output} is the database itself; give another --output")
    with _output(arguments.output) as stream:
        export_json(arguments.database, stream)
    if arguments.output:
        print(f"{arguments.output}: written", file=sys.stderr)
    return 0


def import_(arguments: argparse.Namespace) -> int:
    """Write a database from JSON lines."""
    from ktlib_generator.run_dir import check_writable
    from ktlib_generator.store.exchange import import_json

    require_modules("h5py")
    if arguments.output.exists() and not arguments.force:
        raise CommandError(f"{arguments.output} exists; give --force to replace it, or another --output")
    check_writable(arguments.output)
    if str(arguments.source) == "-":
        import_json(sys.stdin.buffer, arguments.output, name="standard input")
    else:
        with _open_to_read(arguments.source) as stream:
            import_json(stream, arguments.output, name=str(arguments.source))
    print(f"{arguments.output}: written")
    return 0


def pack(arguments: argparse.Namespace) -> int:
    """Pick each problem's winner and write the file the runtime reads."""
    from ktlib_generator.pack import Policy, write_pack
    from ktlib_generator.progress import counted
    from ktlib_generator.store.hdf5 import read_database

    require_modules("h5py")
    database = read_database(arguments.database)
    target = arguments.output or arguments.database.with_suffix(".ktpack")
    given = {"noise_factor": arguments.noise_factor, "min_gain": arguments.min_gain}
    policy = Policy(**{name: value for name, value in given.items() if value is not None})
    try:
        done = write_pack(target, database.records, database.binaries, device_of(database.records), policy)
    except OSError as error:
        # Its text says what to do already.
        raise CommandError(f"{error.filename or target}: {error.strerror or error}") from error
    print(
        f"{done.path}: {counted(done.entries, 'problem')}, {done.wins} won by "
        f"{counted(done.kernels, 'kernel')}, "
        f"{done.file_bytes} bytes"
    )
    if done.unmeasured:
        print(f"not packed: {counted(len(done.unmeasured), 'problem')} without a usable time")
    print(f"to use it: KTLIB_DB_PATH={done.path.resolve()} (ktlib info lists it)")
    return 0


def device_of(records: tuple[Record, ...]) -> Device:
    """Return the device that a database's records were measured on.

    Raises:
        CommandError: there are no records.
    """
    from ktlib_generator.families.base import Device

    if not records:
        raise CommandError("the database holds no records: nothing to pack; tune first")
    environment: Environment = records[0].environment
    kind = "cpu" if environment.arch.startswith("cpu-") else "cuda"
    return Device(kind, environment.device, environment.arch, environment.sm_count)


def require_modules(*names: str) -> None:
    """Find out before work is done that a module of the extra [build] is missing.

    Raises:
        ModuleNotFoundError: naming it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _profile_of(sources: list[Path]) -> str:
    from ktlib_generator.store.hdf5 import read_database
    from ktlib_generator.store.journal import journals_of, read_journal

    for source in sources:
        if source.suffix == ".h5":
            return read_database(source).profile
        for journal in journals_of(source) if source.is_dir() else [source]:
            profile = read_journal(journal).profile
            if profile:
                return profile
    raise CommandError(f"no record in {' '.join(map(str, sources))}: tune first, or check the paths")


def _open_to_read(path: Path) -> BinaryIO:
    from ktlib_generator.store.files import READ, StoreError, explain_os_error

    try:
        return open(path, "rb")
    except OSError as error:
        raise StoreError(explain_os_error(READ, path, error)) from error


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with open(path, "w", encoding="utf-8") as stream:
        yield stream


def _write_bytes(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
