"""A relay that delays the data of TCP connections, and adds a delay for each segment that TCP would resend.

``python slow_link.py HERE THERE PORT DELAY_MS LOSS`` relays connections from HERE:PORT and HERE:(PORT + 1)
to the same ports of THERE, until it is killed. It prints a line once it listens.
"""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import suppress

SEGMENT_BYTES = 1448
AGAIN_S = 0.2
"""Minimum time in seconds after which TCP resends a segment that was not acknowledged."""


async def carry(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    delay_s: float,
    loss: float,
    rng: random.Random,
) -> None:
    """Relay one direction. Segments arrive in order, ``delay_s`` late or, after a loss, even later."""
    loop, queue, last_s = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]](), 0.0

    async def deliver() -> None:
        while True:
            due_s, data = await queue.get()
            await asyncio.sleep(due_s - loop.time())
            if not data:
                return
            writer.write(data)
            await writer.drain()

    delivery = asyncio.create_task(deliver())
    with suppress(ConnectionError):
        while data := await reader.read(SEGMENT_BYTES):
            last_s = max(last_s, loop.time() + delay_s + (rng.random() < loss) * (AGAIN_S + 2 * delay_s))
            queue.put_nowait((last_s, data))
    queue.put_nowait((last_s, b""))
    with suppress(ConnectionError):
        await delivery
    writer.close()


async def main(here: str, there: str, port: int, delay_s: float, loss: float) -> None:
    rng = random.Random(0)

    async def connect(to: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(there, to)
        except OSError:
            writer.close()
            return
        ways = ((reader, far_writer), (far_reader, writer))
        await asyncio.gather(*(carry(*way, delay_s, loss, rng) for way in ways))

    for at in (port, port + 1):
        await asyncio.start_server(lambda r, w, at=at: connect(at, r, w), here, at)  # type: ignore[misc]
    print("carries", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    where, far, first, delay_ms, lost = sys.argv[1:]
    asyncio.run(main(where, far, int(first), float(delay_ms) / 1000, float(lost)))
