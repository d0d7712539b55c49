"""Reading result files, setting times against each other, and writing reports."""

from ktlib_generator.report.comparison import Change, Comparison, compare
from ktlib_generator.report.document import Options, write_report
from ktlib_generator.report.rows import COLUMNS, ResultError, ResultFile, Row, read_result, sections

__all__ = [
    "COLUMNS",
    "Change",
    "Comparison",
    "Options",
    "ResultError",
    "ResultFile",
    "Row",
    "compare",
    "read_result",
    "sections",
    "write_report",
]
