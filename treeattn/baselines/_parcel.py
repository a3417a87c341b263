"""Keys and values in transit: a rank's shard with all that is said about it, as arrays that can be sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.arrays import dtype_name, narrow_dtype
from treeattn.arguments.spec import Args, KVView, Spec
from treeattn.steps.wire import Wire

__all__ = ["Manifest", "Parcel", "Part", "Slot"]

Array: TypeAlias = npt.NDArray[Any]

OF_KV_HEADS = ("k", "v", "k_scale", "v_scale")
"""Parts whose second axis is KV heads; the mask's is query heads, or 1."""


@dataclass(frozen=True, slots=True)
class Part:
    """Shape and dtype of one array of a parcel."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * narrow_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a parcel holds, by name, and how many tokens one block scale covers; known to all ranks."""

    parts: Mapping[str, Part]
    k_block: int = 1
    v_block: int = 1

    def to_json(self) -> list[Any]:
        """Give it as lists, numbers and strings."""
        return [[[n, list(p.shape), p.dtype] for n, p in self.parts.items()], self.k_block, self.v_block]

    @classmethod
    def from_json(cls, told: list[Any]) -> Manifest:
        """Read what `to_json` gave."""
        parts, k_block, v_block = told
        return cls({name: Part(tuple(shape), dtype) for name, shape, dtype in parts}, k_block, v_block)

    @property
    def tokens(self) -> int:
        """Keys in the parcel."""
        return self.parts["k"].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def sizes(self) -> list[int]:
        """Bytes of each part."""
        return [part.nbytes for part in self.parts.values()]

    def heads(self, q: slice, kv: slice) -> Manifest:
        """Give what is left of it for some query heads and their KV heads."""
        kept = {name: Part(_kept_shape(name, part.shape, q, kv), part.dtype) for name, part in self.parts.items()}
        return replace(self, parts=kept)

    def copied(self, q: slice, kv: slice) -> int:
        """Bytes of `heads` that are not contiguous where the whole is: some heads of several batch rows."""
        kept = self.heads(q, kv).parts
        changed = [name for name, part in self.parts.items() if part.shape != kept[name].shape and part.shape[0] > 1]
        return sum(kept[name].nbytes for name in changed)


def _head_slice(name: str, shape: tuple[int, ...], q: slice, kv: slice) -> slice | None:
    """Give the slice of the second axis that some heads need; None for all of it."""
    if name in OF_KV_HEADS:
        return kv
    return q if name == "mask" and shape[1] > 1 else None


def _kept_shape(name: str, shape: tuple[int, ...], q: slice, kv: slice) -> tuple[int, ...]:
    kept = _head_slice(name, shape, q, kv)
    return shape if kept is None else (shape[0], kept.stop - kept.start, *shape[2:])


@dataclass(frozen=True, slots=True)
class Parcel:
    """The arrays that a `Manifest` speaks of; ``mask`` and ``kv_pos`` have length 1 where they are all alike."""

    parts: dict[str, Array]
    k_block: int = 1
    v_block: int = 1

    @classmethod
    def of(cls, args: Args) -> Parcel:
        """View the keys' side of a call, without a copy."""
        found = {
            "k": args.k,
            "v": args.v,
            "kv_pos": None if (kv_pos := args.kv_positions) is None else _once(kv_pos, (0,)),
            "kv_len": args.kv_len,
            "mask": None if args.mask is None else _once(args.mask, (0, 1, 2)),
            "k_scale": args.k_scale,
            "v_scale": args.v_scale,
        }
        return cls({n: array for n, array in found.items() if array is not None}, args.k_block, args.v_block)

    @property
    def manifest(self) -> Manifest:
        """Say what is in it."""
        parts = {name: Part(array.shape, dtype_name(array)) for name, array in self.parts.items()}
        return Manifest(parts, self.k_block, self.v_block)

    def sendable(self, wire: Wire) -> Parcel:
        """Give it with every part contiguous."""
        return replace(self, parts={name: wire.contiguous(array) for name, array in self.parts.items()})

    def heads(self, q: slice, kv: slice) -> Parcel:
        """View what is left of it for some query heads and their KV heads."""
        slices = {name: _head_slice(name, array.shape, q, kv) for name, array in self.parts.items()}
        kept = {n: array if (at := slices[n]) is None else array[:, at] for n, array in self.parts.items()}
        return replace(self, parts=kept)

    def to(self, rank: int) -> Iterator[tuple[int, Array]]:
        """Pair every part with a rank, as `Wire.start` takes it."""
        return ((rank, array) for array in self.parts.values())

    def call(self, spec: Spec, q: Array, q_pos: Array | None, rows: slice) -> tuple[Spec, Args]:
        """Describe the attention of ``q``, which is the rows ``rows`` of the whole query, over these keys."""
        k, v, mask = self.parts["k"], self.parts["v"], self.parts.get("mask")
        shape = (*q.shape[:3], k.shape[2])
        if mask is not None:
            mask = np.broadcast_to(mask if mask.shape[2] == 1 else mask[:, :, rows], shape)
        kv_pos = self.parts.get("kv_pos")
        args = Args(
            q,
            k,
            v,
            q_pos,
            None if kv_pos is None else np.broadcast_to(kv_pos, (k.shape[0], k.shape[2])),
            self.parts.get("kv_len"),
            mask,
            self.parts.get("k_scale"),
            self.parts.get("v_scale"),
            self.k_block,
            self.v_block,
        )
        return _spec_of(args, spec), args


def _spec_of(args: Args, like: Spec) -> Spec:
    k, v, mask = args.k, args.v, args.mask
    scaled = args.k_scale is not None, args.v_scale is not None
    return replace(
        like,
        q_heads=args.q.shape[1],
        q_tokens=args.q.shape[2],
        kv_heads=k.shape[1],
        kv=KVView(dtype_name(k), dtype_name(v), k.strides, v.strides, *scaled),
        mask=None if mask is None else "bool" if mask.dtype == bool else "float",
        ragged=args.kv_len is not None,
    )


def _once(array: Array, axes: Sequence[int]) -> Array:
    """View a broadcast array with length 1 along those of ``axes`` along which it repeats itself."""
    at = [slice(None)] * array.ndim
    for axis in axes:
        if array.strides[axis] == 0 and array.shape[axis]:
            at[axis] = slice(0, 1)
    return array[tuple(at)]


class Slot:
    """Room for any rank's parcel, one at a time.

    Parameters
    ----------
    wire : Wire
        Counts the room.
    manifests : sequence of Manifest
        What may come.
    """

    def __init__(self, wire: Wire, manifests: Sequence[Manifest]) -> None:
        room: dict[str, int] = {}
        for manifest in manifests:
            for name, part in manifest.parts.items():
                room[name] = max(room.get(name, 0), part.nbytes)
        self._buffers = {name: wire.empty(nbytes) for name, nbytes in room.items()}

    def cut(self, manifest: Manifest) -> Parcel:
        """Give arrays for the parcel that is expected now; those given before are overwritten."""
        parts = {
            name: self._buffers[name][: part.nbytes].view(narrow_dtype(part.dtype)).reshape(part.shape)
            for name, part in manifest.parts.items()
        }
        return Parcel(parts, manifest.k_block, manifest.v_block)

    @staticmethod
    def nbytes(manifests: Sequence[Manifest]) -> int:
        """Bytes of a slot for these."""
        names = {name for manifest in manifests for name in manifest.parts}
        return sum(max(m.parts[name].nbytes for m in manifests if name in m.parts) for name in names)
