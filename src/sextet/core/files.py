"""Atomic writes and safe readers: nothing is left half written, nothing read is executed or unbounded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sextet.core.errors import DataError

MAX_JSON_BYTES = 64 * 2**20
MAX_MEMBER_BYTES = 256 * 2**20


def fsync_directory(path: Path) -> None:
    """Makes a rename inside ``path`` durable; file systems that cannot sync a directory are left alone."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def atomic_write_bytes(path: Path | str, data: bytes) -> None:
    """Writes ``data`` so that a reader sees the old file or the new one, never a part.

    Raises:
        DataError: The disk is full or the folder cannot be written; the old file is intact.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise DataError(
            f"{path}: cannot write ({error.strerror or error}); free space or choose another folder"
        ) from error
    fsync_directory(path.parent)


def atomic_write_text(path: Path | str, text: str) -> None:
    """Writes UTF-8 text atomically; raises as :func:`atomic_write_bytes`."""
    atomic_write_bytes(path, text.encode("utf-8"))


def write_json(path: Path | str, value: Any) -> None:
    """Writes JSON atomically with sorted keys, so that equal values give equal files."""
    atomic_write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def read_text(path: Path | str, *, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Reads UTF-8 text (a byte-order mark and Windows newlines are accepted) of at most ``max_bytes``.

    Raises:
        DataError: The file is missing, larger than the limit, or not UTF-8.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise DataError(f"{path}: {size:,} bytes is over the limit of {max_bytes:,}")
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error.strerror or error})") from error


def read_json(path: Path | str, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Reads JSON; raises :class:`DataError` naming file, line and column when it is not JSON."""
    try:
        return json.loads(read_text(path, max_bytes=max_bytes))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}:{error.colno}: not JSON ({error.msg})") from error
    except RecursionError as error:
        raise DataError(f"{path}: JSON is nested too deeply") from error


def sha256_of(path: Path | str) -> str:
    """Returns the SHA-256 of a file in hex, read in pieces."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def archive_members(path: Path | str, *, max_bytes: int = MAX_MEMBER_BYTES) -> Iterator[tuple[str, bytes]]:
    """Yields ``(name, content)`` of the regular files of a tar or zip archive, without extracting to disk.

    Absolute names, ``..``, links and devices are refused, and no member may be larger than ``max_bytes``,
    judged by what is really read and not by the header (zip bombs).

    Raises:
        DataError: Not an archive, or a member that is refused.
    """
    path = Path(path)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    if not info.is_dir():
                        with archive.open(info) as stream:
                            yield (
                                _checked_name(path, info.filename),
                                _limited(path, info.filename, stream, max_bytes),
                            )
            return
        with tarfile.open(path) as archive_tar:
            for member in archive_tar:
                if member.isdir():
                    continue
                handle = archive_tar.extractfile(member) if member.isreg() else None
                if handle is None:
                    raise DataError(f"{path}: member {member.name!r} is a link or a device; refused")
                yield _checked_name(path, member.name), _limited(path, member.name, handle, max_bytes)
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise DataError(f"{path}: not a readable tar or zip archive ({error})") from error


def _checked_name(path: Path, name: str) -> str:
    if name.startswith(("/", "\\")) or ".." in Path(name).parts or (len(name) > 1 and name[1] == ":"):
        raise DataError(f"{path}: member {name!r} points outside the archive; refused")
    return name


def _limited(path: Path, name: str, stream: Any, max_bytes: int) -> bytes:
    content: bytes = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DataError(f"{path}: member {name!r} unpacks to more than {max_bytes:,} bytes; refused")
    return content
