"""One copy of the weights per host: its first rank dequantises them into a file without a name, all ranks map it."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from gguf_llama.config import Config
from gguf_llama.errors import LlamaError
from gguf_llama.processes import Processes
from gguf_llama.unpacking import TensorPlace, Unpacked, unpack
from gguf_llama.vocabulary import Vocabulary

__all__ = ["Weights", "load", "map_tensors"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's numbers, shared by all ranks of a host.

    Parameters
    ----------
    config : Config
    tensors : dict
        Read-only float32 arrays (rows, columns) by name.
    vocabulary : Vocabulary or None
        Only on the first rank of each host, which rank 0 always is.
    """

    config: Config
    tensors: dict[str, Array]
    vocabulary: Vocabulary | None

    @property
    def nbytes(self) -> int:
        """Bytes that all ranks of a host have mapped together."""
        return sum(array.nbytes for array in self.tensors.values())


def load(model: Path, processes: Processes) -> Weights:
    """Read a GGUF file once per host; collective.

    The file that is mapped has no name from its first moment on, so that nothing is left behind however the run
    ends: ranks reach it through ``/proc`` while the host's first rank has it open.

    Raises
    ------
    LlamaError
        On every rank, if any host can't use the file.
    """
    host = processes.on_this_host()
    with contextlib.ExitStack() as stack:
        unpacked = processes.attempt(lambda: stack.enter_context(_unpacked(model)) if host.rank == 0 else None)
        header = host.bcast(_header(unpacked) if unpacked else b"")
        return processes.attempt(lambda: _map(header, unpacked.vocabulary if unpacked else None))


@contextlib.contextmanager
def _unpacked(model: Path) -> Iterator[Unpacked]:
    """Give the unpacked model, whose file lasts as long as the context."""
    with contextlib.ExitStack() as stack:
        files = []
        for folder in ("/dev/shm", tempfile.gettempdir()):
            with contextlib.suppress(OSError):
                files.append(stack.enter_context(tempfile.TemporaryFile(dir=folder)))
        yield _unpack_in_child(model, [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in files])


def _unpack_in_child(model: Path, targets: Sequence[str]) -> Unpacked:
    """Read the file in a process of its own, so that what reading takes does not stay in this rank's memory.

    A pool of processes would need semaphores, for which there is no room where /dev/shm is full.
    """
    spawning = get_context("spawn")
    receiver, sender = spawning.Pipe(duplex=False)
    child = spawning.Process(target=_tell_unpacked, args=(sender, model, targets))
    child.start()
    sender.close()  # the child's is the last then, and its end is heard
    try:
        told = receiver.recv()
    except EOFError:
        raise LlamaError(f"{model} could not be unpacked: the process that did it was killed") from None
    finally:
        child.join()
    if isinstance(told, Exception):
        raise told
    return cast("Unpacked", told)


def _tell_unpacked(sender: Connection, model: Path, targets: Sequence[str]) -> None:
    try:
        sender.send(unpack(model, targets))
    except Exception as error:  # whatever it is, the parent raises it
        sender.send(error)


def _header(unpacked: Unpacked) -> bytes:
    """Say what the other ranks of a host must know to map the file."""
    tensors = [asdict(place) for place in unpacked.tensors]
    return json.dumps({"target": unpacked.target, "config": asdict(unpacked.config), "tensors": tensors}).encode()


def _map(header: bytes, vocabulary: Vocabulary | None) -> Weights:
    said: dict[str, Any] = json.loads(header)
    places = [TensorPlace(**place) for place in said["tensors"]]
    try:
        tensors = map_tensors(said["target"], places)
    except OSError as error:
        raise LlamaError(f"the weights that another rank of this host has unpacked can't be mapped: {error}") from None
    return Weights(Config(**said["config"]), tensors, vocabulary)


def map_tensors(file: str, places: Sequence[TensorPlace]) -> dict[str, Array]:
    """Map what `unpack` has written, read-only; the arrays outlive the file's name."""
    flat = np.asarray(np.memmap(file, dtype=np.float32, mode="r"))
    return {place.name: flat[place.offset : place.stop].reshape(place.rows, place.columns) for place in places}
