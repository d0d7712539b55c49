"""Fills the tuning database: builds, verifies, times and packs kernels.

Installs as `ktlib_generator`; imports ktlib, never the reverse.
"""
