"""How much is written to a client at a time, so that one who is slow can be told from one who takes nothing.

A transport takes any amount at once, and says only whether all of it has gone: whoever hands it a long answer sees no
difference between a client that has taken half of it and one that has gone to sleep.
"""

import asyncio
from collections.abc import Callable
from typing import Final

WRITE_BUFFER_BYTES: Final = 64 * 1024
"""Written and not yet taken by the kernel. Over it the application waits. And what is written at a time."""


async def in_pieces(
    data: bytes,
    put: Callable[[bytes], None],
    has_room: asyncio.Event,
    patience_s: float,
    give_up: Callable[[], None],
) -> None:
    """Have all of it put, and wait for room after each piece behind which there is none, for `patience_s` at most.

    give_up: called where that takes longer, and where the writer is cancelled before all has been put: what came
    afterwards would not be understood.
    """
    num_put = 0
    try:
        while num_put < len(data):
            put(data[num_put : num_put + WRITE_BUFFER_BYTES])
            num_put += WRITE_BUFFER_BYTES
            if not has_room.is_set():
                async with asyncio.timeout(patience_s):
                    await has_room.wait()
    except TimeoutError:
        give_up()
    except BaseException:
        if num_put < len(data):
            give_up()
        raise
