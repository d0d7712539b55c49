"""Journals and the HDF5 database."""
