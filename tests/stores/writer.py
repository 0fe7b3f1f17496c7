"""A process that keeps responses and says which are there, until it is killed: `python writer.py FILE START`."""

import asyncio
import sys

from aserve.stores.responses import SqliteStore, StoredResponse


def record(number: int, *, is_over: bool = True) -> StoredResponse:
    """One of up to 40 kB, which tells its number throughout."""
    said = f"{number:08}|".encode() * (number * 37 % 4096 + 1)
    return StoredResponse(id=f"resp_{number}", tenant="t", response=said if is_over else b"begun", input=said)


async def main(path: str, start: int) -> None:
    """Each is put twice, as one that is made in the background is: when it begins, and when it is over."""
    store = SqliteStore(path)
    for number in range(start, start + 100_000):
        for is_over in (False, True):
            await store.put(record(number, is_over=is_over))
            print(number, int(is_over), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
