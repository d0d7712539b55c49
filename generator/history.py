"""Which earlier records still stand: those whose binary is what the sources here would build.

Must not read or write files of a run; records come in as arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ktlib_generator.build import nvcc
from ktlib_generator.families.base import BuildRequest, Family
from ktlib_generator.values import Record


def current_records(records: Iterable[Record], families: Sequence[Family]) -> list[Record]:
    """Return the records without those of a kernel whose source, flags or compiler have changed since.

    They stay in the journal and the database; they only do not count as tried, so a resumed run measures
    the kernel as it is now. Records without a compiled binary always count.

    Raises:
        ToolchainError: there are compiled records, and no compiler to say whether they are current.
    """
    owners = {family.name: family for family in families}
    keys: dict[BuildRequest, str] = {}

    def is_current(record: Record) -> bool:
        family = owners.get(record.variant.family)
        if family is None or record.binary is None or record.binary.format != "cubin":
            return True
        try:
            request = family.build_request(record.variant)
        except ValueError:
            # A variant that the family no longer has is in no space, so nobody asks for it.
            return True
        if request is None:
            return True
        if request not in keys:
            keys[request] = nvcc.source_key(request)
        return record.binary.source == keys[request]

    return [record for record in records if is_current(record)]
