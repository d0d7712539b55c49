"""Kernel families: parametrised sources with their spaces."""
