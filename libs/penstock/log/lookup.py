"""Point lookup: the record at an offset of each partition.

A position that is stored elsewhere (in a snapshot, a table, another topic) may be of another log: topics are
deleted and created again, and backups are restored. So the record that was read there is compared with the
record there now.
"""

from collections.abc import Mapping

from penstock.errors import OffsetOutOfRange
from penstock.log.port import Log, Partition, Record


async def records_at(log: Log, offsets: Mapping[Partition, int]) -> dict[Partition, Record | None]:
    """Per partition the record at this offset; None: it is deleted or not written yet. Raises `LogError`."""
    found: dict[Partition, Record | None] = dict.fromkeys(offsets)
    first, ends = await log.begin_offsets(offsets), await log.end_offsets(offsets)
    wanted = {place: at for place, at in offsets.items() if first[place] <= at < ends[place]}
    if not wanted:
        return found
    reader = log.reader(wanted)
    try:
        while wanted:
            for record in await reader.read():
                if wanted.pop(record.partition, None) == record.offset:
                    found[record.partition] = record
    except OffsetOutOfRange:
        pass  # deleted since its offset was looked up
    finally:
        await reader.close()
    return found
