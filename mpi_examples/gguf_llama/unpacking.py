"""From a GGUF file to a flat file of float32 tensors, ready to be mapped, and what else a run must know."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gguf_llama.config import Config
from gguf_llama.errors import LlamaError
from gguf_llama.gguf_file import GGUFFile
from gguf_llama.vocabulary import Vocabulary

__all__ = ["TensorPlace", "Unpacked", "unpack"]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a float32 tensor lies in the flat file.

    Parameters
    ----------
    name : str
    rows, columns : int
        A norm's weights are one row.
    offset : int
        In float32 numbers, from the start of the file.
    """

    name: str
    rows: int
    columns: int
    offset: int

    @property
    def stop(self) -> int:
        """Offset behind the tensor."""
        return self.offset + self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Unpacked:
    """All of a GGUF file but the numbers in its tensors, and the path of the flat file that holds those."""

    target: str
    config: Config
    vocabulary: Vocabulary
    tensors: tuple[TensorPlace, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor of the GGUF file, and the tensor of the flat file whose next rows it is."""

    target: str
    source: str
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the GGUF file: one row is a vector there."""
        return (self.columns,) if self.rows == 1 else (self.rows, self.columns)


def unpack(model: Path, targets: Sequence[str]) -> Unpacked:
    """Dequantise ``model`` into the first of the files ``targets`` that has room.

    Tensors that meet the same input (q, k and v; gate and up) become one, so that one multiplication does.

    Raises
    ------
    LlamaError
        The file is not one that runs here, or no target has room.
    """
    file = GGUFFile(model)
    config = Config.of(file)
    pieces = []
    for piece in _pieces(config, file.names):  # before anything is made as large as the file says
        file.check(piece.source, piece.shape)
        pieces.append(piece)
    if unknown := file.names - {piece.source for piece in pieces}:
        raise LlamaError(f"{model} has tensors that are not supported here, such as {min(unknown)}")
    vocabulary = Vocabulary.of(file)
    places = tuple(_places(pieces))
    target = _with_room(targets, 4 * places[-1].stop)
    _write(file, pieces, target)
    return Unpacked(target, config, vocabulary, places)


def _pieces(config: Config, names: set[str]) -> Iterator[_Piece]:
    yield _Piece("token_embd", "token_embd.weight", config.vocab, config.width)
    if "rope_freqs.weight" in names:  # Llama 3.1's scaling: what each rotation is divided by
        yield _Piece("rope_freqs", "rope_freqs.weight", 1, config.rope_dims // 2)
    for layer in range(config.layers):
        yield from _layer(config, f"blk.{layer}.")
    yield _Piece("output_norm", "output_norm.weight", 1, config.width)
    if "output.weight" in names:  # else the embedding serves for both
        yield _Piece("output", "output.weight", config.vocab, config.width)


def _layer(config: Config, blk: str) -> Iterator[_Piece]:
    yield _Piece(f"{blk}attn_norm", f"{blk}attn_norm.weight", 1, config.width)
    yield _Piece(f"{blk}qkv", f"{blk}attn_q.weight", config.heads * config.head_dim, config.width)
    yield _Piece(f"{blk}qkv", f"{blk}attn_k.weight", config.kv_heads * config.head_dim, config.width)
    yield _Piece(f"{blk}qkv", f"{blk}attn_v.weight", config.kv_heads * config.v_head_dim, config.width)
    yield _Piece(f"{blk}attn_output", f"{blk}attn_output.weight", config.width, config.heads * config.v_head_dim)
    yield _Piece(f"{blk}ffn_norm", f"{blk}ffn_norm.weight", 1, config.width)
    yield _Piece(f"{blk}gate_up", f"{blk}ffn_gate.weight", config.hidden, config.width)
    yield _Piece(f"{blk}gate_up", f"{blk}ffn_up.weight", config.hidden, config.width)
    yield _Piece(f"{blk}ffn_down", f"{blk}ffn_down.weight", config.width, config.hidden)


def _places(pieces: list[_Piece]) -> Iterator[TensorPlace]:
    rows: dict[str, int] = {}
    for piece in pieces:
        rows[piece.target] = rows.get(piece.target, 0) + piece.rows
    columns = {piece.target: piece.columns for piece in pieces}
    offset = 0
    for name in rows:
        place = TensorPlace(name, rows[name], columns[name], offset)
        yield place
        offset = place.stop


def _with_room(targets: Sequence[str], nbytes: int) -> str:
    """Take the room now: a full tmpfs would otherwise kill the process with SIGBUS in the middle."""
    for target in targets:
        with open(target, "r+b") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return target
    raise LlamaError(f"{nbytes / 1e6:.0f} MB of weights fit neither into /dev/shm nor into TMPDIR")


def _write(file: GGUFFile, pieces: list[_Piece], target: str) -> None:
    flat = np.memmap(target, dtype=np.float32, mode="r+")
    offset = 0
    for piece in pieces:  # in the order of their places: what goes into one tensor follows one another
        numbers = flat[offset : offset + piece.rows * piece.columns]
        file.read(piece.source, numbers.reshape(piece.shape))
        offset += len(numbers)
