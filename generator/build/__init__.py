"""Compilers: a variant becomes a binary, or a failure with its log."""
