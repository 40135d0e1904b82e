"""A slow link between two network namespaces, in user space: `python -m weightcast.benchmarks.lab.delay`.

Two TUN devices, one a namespace; what one sends, the other receives later, and no faster than the rate. Both are set by
lines on stdin, `RATE DELAY` in bytes a second and seconds one way, also while packets are under way. Prints one JSON
line when it is ready: the two namespaces as file descriptors of this process. They vanish with it and with who uses
them. Needs root and Linux; no kernel module (many kernels have no `netem`).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import struct
import subprocess
import time
from collections import deque
from typing import Final

ADDRESSES: Final = ("198.18.0.1", "198.18.0.2")
"""Of the two ends: a network that RFC 2544 sets aside for benchmarks. Nothing leads from there to another one."""

_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_PI, _VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOADS: Final = (
    1 | 2 | 4
)  # checksums and segments of TCP: packets of 64 KiB cross user space, not of 1.5 KiB
_LINE: Final = 200  # bytes of a line on stdin at most; each comes by itself
_PACKET: Final = 70_000  # bytes read at most
_HEADER: Final = 10  # bytes of a virtio header before each packet
_QUEUE_S: Final = 0.1  # of sending time that a router's queue holds; more is dropped
_NICE: Final = -20  # a wire does not wait for a processor that others use
_AT_ONCE: Final = 32  # packets read before it is looked whether others are due


class Lane:
    """One direction: packets leave at the rate, one after the other, and arrive after the delay. Pure.

    Attributes:
        rate: bytes a second.
        delay_s: from leaving to arriving.
    """

    def __init__(self, rate: float, delay_s: float) -> None:
        self.rate, self.delay_s = rate, delay_s
        self._free_at = 0.0  # when the last packet in the queue has left
        self._under_way: deque[tuple[float, bytes]] = deque()

    def send(self, now: float, packet: bytes) -> bool:
        """Take a packet; False if the queue is full and it is dropped."""
        if self._free_at - now > _QUEUE_S:
            return False
        self._free_at = max(now, self._free_at) + max(0, len(packet) - _HEADER) / self.rate
        self._under_way.append((self._free_at + self.delay_s, packet))
        return True

    def due_at(self) -> float:
        """When the next packet arrives; infinity if there is none."""
        return self._under_way[0][0] if self._under_way else float("inf")

    def receive(self, now: float) -> bytes | None:
        """The next packet that has arrived."""
        return self._under_way.popleft()[1] if self.due_at() <= now else None


def _namespace(address: str) -> tuple[int, int]:
    """A new network namespace with a TUN device of this address: descriptors of the namespace and the device.

    This process is in it afterwards.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"slow0", _TUN | _NO_PI | _VNET_HDR))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOADS)
    for command in (
        "link set lo up",
        f"addr add {address}/24 dev slow0",
        "link set slow0 up txqueuelen 10000",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return os.open("/proc/self/ns/net", os.O_RDONLY), device


def _move(devices: tuple[int, int]) -> None:
    """Carry packets until stdin ends."""
    lanes = dict(zip(devices, (Lane(1e9, 0.0), Lane(1e9, 0.0)), strict=True))
    other = {devices[0]: devices[1], devices[1]: devices[0]}
    while True:
        wait = min(lane.due_at() for lane in lanes.values()) - time.monotonic()
        ready, _, _ = select.select([*devices, 0], [], [], max(0.0, min(wait, 1.0)))
        if 0 in ready:
            line = os.read(0, _LINE)
            if not line:
                return
            for lane in lanes.values():
                lane.rate, lane.delay_s = map(float, line.split())
        for device in devices:
            if device in ready:
                _take(device, lanes[device])
        for device, lane in lanes.items():
            _give(other[device], lane)


def _take(device: int, lane: Lane) -> None:
    for _ in range(_AT_ONCE):
        try:
            packet = os.read(device, _PACKET)
        except BlockingIOError:
            return
        lane.send(time.monotonic(), packet)


def _give(device: int, lane: Lane) -> None:
    while (packet := lane.receive(time.monotonic())) is not None:
        try:
            os.write(device, packet)
        except OSError:  # the device is full: the packet is lost, as on any network
            continue


def main() -> None:
    """Set up, say so, and carry packets."""
    os.nice(_NICE)
    spaces, devices = zip(*(_namespace(address) for address in ADDRESSES), strict=True)
    print(json.dumps(spaces), flush=True)
    _move(devices)


if __name__ == "__main__":
    main()
