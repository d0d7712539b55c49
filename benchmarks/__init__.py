"""Benchmarks and checks that run the installed library; not part of the wheel."""
