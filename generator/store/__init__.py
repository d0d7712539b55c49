"""Journals and the HDF5 database: what tuning found, kept whole."""

from ktlib_generator.store.exchange import export_json, import_json
from ktlib_generator.store.files import StoreError
from ktlib_generator.store.hdf5 import write_database
from ktlib_generator.store.hdf5_read import read_database, verify
from ktlib_generator.store.journal import Journal, JournalError, JournalWarning, journals_of, read_journal
from ktlib_generator.store.merge import MergeSummary, merge
from ktlib_generator.store.schema import Database, DatabaseError
from ktlib_generator.store.summary import Summary, inspect

__all__ = [
    "Database",
    "DatabaseError",
    "Journal",
    "JournalError",
    "JournalWarning",
    "MergeSummary",
    "StoreError",
    "Summary",
    "export_json",
    "import_json",
    "inspect",
    "journals_of",
    "merge",
    "read_database",
    "read_journal",
    "verify",
    "write_database",
]
