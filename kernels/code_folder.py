"""Where compiled code is kept: a folder for each set of sources and each kind of processor.

The first of three places that can be written, and has room, is taken. A place that can only be read, as in a
container's image, still serves: what is in it is copied to the place that is taken. Folders of other versions go when
nobody has used them for a while.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import config as _config

from treeattn.kernels.target import target
from treeattn.kernels.vectors import LANES

config: Any = _config  # its settings appear at run time, out of a type checker's sight

__all__ = ["cache_folder", "clear_cache"]

NUMBAS: str = config.CACHE_DIR
"""The folder that somebody has given numba. While a thread compiles, numba's own setting is another one."""

ROOM = 2**20
"""Bytes that must be free where code is to be kept: the largest function's code has a quarter of that."""

UNUSED_DAYS = 14
"""Days after which the folder of another version is removed."""


@cache
def cache_folder() -> Path | None:
    """Folder of compiled code for these sources on this processor, or None where no place can be written."""
    name, readable = f"treeattn-{_fingerprint()}", None
    for root in _roots():
        folder = root / name
        with contextlib.suppress(OSError):
            new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as tried:
                os.posix_fallocate(tried.fileno(), 0, ROOM)  # on a full disk, empty files can be made too
                if new:
                    _remove_unused(root, keep=name)
                if readable is not None:
                    _copy(readable, folder)
                os.utime(folder)  # in use
                return folder
        readable = readable or (folder if folder.is_dir() else None)
    return None


def clear_cache() -> list[Path]:
    """Remove the compiled code of every version from every place, and give the folders that are gone."""
    return [folder for root in _roots() for folder in _folders(root) if _remove(folder)]


def _roots() -> Iterator[Path]:
    if NUMBAS:
        yield Path(NUMBAS)
    with contextlib.suppress(RuntimeError):  # a user of whom the system knows no home, as in a container
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treeattn"
    with contextlib.suppress(OSError):  # there may be no folder for what is temporary
        root = Path(tempfile.gettempdir()) / f"treeattn-{os.getuid()}"
        if _is_private(root):
            yield root


def _is_private(folder: Path) -> bool:
    """Whether nobody else can put code into a folder that everyone can foresee; it is made where it is missing."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & stat.S_IWOTH


def _folders(root: Path) -> list[Path]:
    return [folder for folder in root.glob("treeattn-*") if folder.is_dir()]


def _remove_unused(root: Path, keep: str) -> None:
    """Remove other versions' folders; a process that still runs one has its code in memory."""
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for folder in _folders(root):
        with contextlib.suppress(OSError):  # another process was faster
            if folder.name != keep and folder.stat().st_mtime < oldest:
                _remove(folder)


def _remove(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def _copy(source: Path, folder: Path) -> None:
    """Copy code that another place has. Every file appears whole, so that ranks may copy at the same time."""
    for file in (path for path in source.rglob("*.nb[ic]") if not (folder / path.relative_to(source)).exists()):
        target = folder / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as copied:
            copied.write(file.read_bytes())
        os.replace(copied.name, target)


def _fingerprint() -> str:
    """Digest of all that decides the machine code: the sources, numba, the processor, and the vectors used of it."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    digest.update(f"{numba.__version__} {target()} {LANES}".encode())
    return digest.hexdigest()[:16]
