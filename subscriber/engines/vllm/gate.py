"""One op at a time on a server, over all its API server processes."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from weightcast.schemas.errors import StorageError

WAIT_S: Final = 120.0
"""How long an op waits for another one: longer than a write takes; a drain may take any time."""

_POLL_S: Final = 0.02  # between two looks at the file's lock


class Gate:
    """Whoever holds it is alone: in this process by a lock, among processes by a locked file.

    Args:
        path: of the file, the same one for all API server processes of the server. It stays.
        wait_s: how long to wait for whoever holds it.
    """

    def __init__(self, path: Path, wait_s: float = WAIT_S) -> None:
        self._path = path
        self._wait_s = wait_s
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Be alone inside.

        Raises:
            StorageError: another op did not end in time, or the file cannot be opened.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                await self._lock.acquire()
        except TimeoutError as error:
            raise self._busy() from error
        try:
            handle = await asyncio.to_thread(self._take)
            try:
                yield
            finally:
                os.close(handle)  # and with it the lock
        finally:
            self._lock.release()

    def _take(self) -> int:
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StorageError(f"{self._path} cannot be opened: {error.strerror}") from error
        until = time.monotonic() + self._wait_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return handle
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(handle)
                    raise self._busy() from None
                time.sleep(_POLL_S)

    def _busy(self) -> StorageError:
        return StorageError(f"another op on this server did not end within {self._wait_s:g} s")
