"""Two network devices (taps) that pass each frame on after a while: `python delay.py NEAR FAR MILLISECONDS`.

Prints a line when both exist; they vanish with the process. A tap has no offloads: frames come in one by one.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h


def tap(name: str) -> int:
    """Return the file of a new tap: reading takes what was sent into the device, writing comes out of it."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return file


def relay(one: int, other: int, seconds: float) -> None:
    """Pass frames both ways, each ``seconds`` late, for ever."""
    waiting: deque[tuple[float, int, bytes]] = deque()  # all wait equally long: first in, first out
    to = {one: other, other: one}
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for file in select.select([one, other], [], [], pause)[0]:
            waiting.append((time.monotonic() + seconds, to[file], os.read(file, 65536)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, file, frame = waiting.popleft()
            with suppress(OSError):  # the device is down: a frame is lost, as on any network
                os.write(file, frame)


if __name__ == "__main__":
    taps = tap(sys.argv[1]), tap(sys.argv[2])
    print("ready", flush=True)
    relay(*taps, float(sys.argv[3]) / 1000)
