"""A request's body on its way in, of which never more than a bounded part is in memory."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from pathlib import Path
from typing import IO

from backends.filepart import FilePart
from mindrouter.gateway.errors import GatewayError

#: A body up to this size stays in memory; a larger one goes to a file as it comes.
MEMORY_BYTES = 1 << 20
#: So much is gathered for each write to the file.
WRITE_BYTES = 256 * 1024
#: Room that uploads leave on the disk, where records and the database may lie, too.
LEAST_FREE_BYTES = 256 << 20


class Upload:
    """Bytes are added as they come, and can then be sent any number of times, to one backend
    after another. The file has no name: it is gone with the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        self.size = 0
        self._folder = folder
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._file: IO[bytes] | None = None

    @property
    def bytes_in_memory(self) -> int:
        return self._held_bytes

    async def add(self, data: bytes) -> None:
        """Raises: GatewayError where there is no room for it."""
        self.size += len(data)
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > (MEMORY_BYTES if self._file is None else WRITE_BYTES):
            await self._write()

    async def end(self) -> None:
        """All has come. Raises: GatewayError."""
        if self._file is not None and self._held:
            await self._write()

    def parts(self, start: int, end: int) -> list[bytes | FilePart]:
        """The bytes from ``start`` to ``end``, once all has come."""
        if self._file is None:
            return [b"".join(self._held)[start:end]]
        return [FilePart(self._file, start, end - start)]

    def close(self) -> None:
        """Forget all of it."""
        self._held.clear()
        self._held_bytes = 0
        if self._file is not None:
            self._file.close()

    async def _write(self) -> None:
        data = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  see close
            await asyncio.to_thread(_write_out, self._file, data)  # a disk may be slow
        except OSError as error:
            message = f"The router cannot keep the upload: {error.strerror}."
            raise GatewayError("internal_error", message) from error


def _write_out(file: IO[bytes], data: bytes) -> None:
    disk = os.fstatvfs(file.fileno())
    if disk.f_bavail * disk.f_frsize < LEAST_FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file.write(data)
    file.flush()
