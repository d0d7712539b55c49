"""Kernel facts of the CUDA candidates in this folder; all share product.cuh's shape."""

from __future__ import annotations

from ktlib_generator.families.base import KernelFacts


def facts(name: str) -> KernelFacts:
    """Return what the launcher must know of `name`.cu."""
    return KernelFacts(
        name=f"sm90_tma/source={name}/sm90a",
        symbol="candidate",
        family="sm90_tma",
        abi="sm90_tma_v1",
        arch="sm90a",
        dtype="fp16",
        layout="nt",
        tile_m=16,
        tile_n=16,
        tile_k=64,
        threads=256,
        min_align_bytes=16,
        a_box_inner=64,
        a_box_outer=16,
        b_box_inner=64,
        b_box_outer=16,
        c_box_inner=16,
        c_box_outer=16,
    )
