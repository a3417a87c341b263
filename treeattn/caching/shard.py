"""What one rank holds of a cache: keys, values and their positions, in memory that grows with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from treeattn.arguments.devices import DeviceView

if TYPE_CHECKING:
    from treeattn.backends.memory import KVMemory

__all__ = ["Shard"]

Array: TypeAlias = npt.NDArray[Any]


class Shard:
    """Rows of K and V, head after head, so that a kernel reads each head's in the order of their addresses.

    How many of them are tokens, whoever uses it knows, and says in each call.

    Parameters
    ----------
    memory : KVMemory
        Where they are.
    batch, heads : int
    widths : (int, int)
        D and Dv.
    dtype : dtype
    share : int
        Tokens that it holds at most, if tokens are dealt evenly.
    """

    def __init__(
        self, memory: KVMemory, *, batch: int, heads: int, widths: tuple[int, int], dtype: np.dtype[Any], share: int
    ) -> None:
        self.memory, self._share = memory, share
        self._outer, self._dtype = (batch, heads), dtype
        room = share if memory.lazy else 0
        self.k, self.v = (self._rows(room, width) for width in widths)
        self.positions: Array = np.empty(room, np.int64)
        self._placed: Any = None
        self._placed_to = 0

    def reserve(self, wanted: int, held: int, capacity: int) -> None:
        """Make room for ``wanted`` tokens, of which there are ``held``; it stays as it was where there is none.

        Room doubles, up to the share, so that tokens are seldom copied and a full cache wastes none. Keys move before
        values do: memory for both, old and new, is never needed at once.
        """
        room = len(self.positions)
        if wanted <= room:
            return
        room = min(max(wanted, 2 * room), self._share if wanted <= self._share else capacity)
        self.k = self._moved(self.k, held, room)
        self.v = self._moved(self.v, held, room)
        positions = np.empty(room, np.int64)
        positions[:held] = self.positions[:held]
        self.positions = positions

    def write(self, at: int, start: int, k: Any, v: Any) -> int:
        """Write tokens from index ``at`` on, at positions from ``start`` on; give the index behind them."""
        end = at + int(k.shape[2])
        self.memory.write((self.k, self.v), at, (k, v))
        self.positions[at:end] = np.arange(start, start + end - at)
        self._placed_to = min(self._placed_to, at)
        return end

    def kv_pos(self, held: int) -> Any:
        """Give the positions of ``held`` tokens as a kernel of this memory's backend takes them.

        On a device, consecutive ones are only their first; others are kept there, and new ones brought when they are
        asked for: a plain decode step needs none.
        """
        positions = self.positions[:held]
        if not self.memory.on_device:
            return positions
        if held == 0 or positions[-1] - positions[0] == held - 1:  # they ascend
            return int(positions[0]) if held else 0
        if self._placed is None or self._placed.shape[2] < held:
            self._placed = self.memory.empty((1, 1, len(self.positions), 1), self.positions.dtype)
            self._placed_to = 0
        self.memory.write((self._placed,), self._placed_to, (positions[None, None, self._placed_to :, None],))
        self._placed_to = held
        return DeviceView(self._placed, shape=(held,), strides=self._placed.strides[2:3])

    def _rows(self, tokens: int, width: int) -> Any:
        return self.memory.empty((*self._outer, tokens, width), self._dtype)

    def _moved(self, rows: Any, held: int, room: int) -> Any:
        """Give rows with more room."""
        moved = self._rows(room, rows.shape[3])
        self.memory.write((moved,), 0, (rows[:, :, :held],))
        return moved
