"""Memory of a cache: aligned, on huge pages, and not taken before it is written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treeattn
from treeattn import storage
from treeattn.arguments.arrays import FLOAT_DTYPES, narrow_dtype

SMAPS = Path("/proc/self/smaps")
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")

needs_huge_pages = pytest.mark.skipif(
    not (SMAPS.exists() and HUGE.exists() and "[never]" not in HUGE.read_text()),
    reason="this system gives no huge pages, or does not tell",
)


def mapping(address):
    """What the system says of the mapping that holds an address: a number of kB, or a line of flags, by name."""
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text(), flags=re.MULTILINE)[1:]:
        first, *lines = part.splitlines()
        start, stop = (int(end, 16) for end in first.split()[0].split("-"))
        if start <= address < stop:
            return dict(line.split(":", 1) for line in lines)
    raise AssertionError(f"no mapping holds {address:#x}")


def kilobytes(found, name):
    return int(found[name].split()[0])


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(FLOAT_DTYPES).map(narrow_dtype),
)
def test_arrays_of_every_size_begin_on_a_cache_line(shape, dtype):
    array = storage.empty(shape, dtype)
    assert (array.shape, array.dtype) == (shape, dtype)
    assert array.size == 0 or array.ctypes.data % storage.LINE == 0
    array[...] = 1
    assert (array == 1).all()


@pytest.mark.parametrize("nbytes", [storage.HUGE_PAGE - 1, storage.HUGE_PAGE, 3 * storage.HUGE_PAGE + 12345])
def test_every_byte_of_a_large_array_can_be_written(nbytes):
    array = storage.empty((nbytes,), np.dtype(np.uint8))
    array[...] = 7
    assert array.nbytes == nbytes
    assert np.count_nonzero(array == 7) == nbytes
    assert nbytes < storage.HUGE_PAGE or array.ctypes.data % storage.HUGE_PAGE == 0


@settings(deadline=None)
@given(rows=st.integers(0, 1000), row_bytes=st.integers(1, 5000))
def test_whole_lines_adds_as_few_rows_as_reach_a_line(rows, row_bytes):
    rounded = storage.whole_lines(rows, row_bytes)
    assert rounded * row_bytes % storage.LINE == 0
    assert all(fewer * row_bytes % storage.LINE for fewer in range(rows, rounded))
    assert rounded >= rows


def test_an_array_that_no_memory_holds_is_a_memory_error():
    with pytest.raises(MemoryError, match="no room for"):
        storage.empty((1 << 60,), np.dtype(np.uint8))


@needs_huge_pages
def test_a_large_array_asks_for_huge_pages():
    array = storage.empty((16 * storage.HUGE_PAGE,), np.dtype(np.uint8))
    array[...] = 1
    assert "hg" in mapping(array.ctypes.data)["VmFlags"].split()


@needs_huge_pages
def test_memory_is_taken_as_it_is_written():
    array = storage.empty((64 * storage.HUGE_PAGE,), np.dtype(np.uint8))
    before = kilobytes(mapping(array.ctypes.data), "Rss")
    array[: storage.HUGE_PAGE] = 1
    taken = kilobytes(mapping(array.ctypes.data), "Rss") - before
    assert storage.HUGE_PAGE // 1024 <= taken < 64 * storage.HUGE_PAGE // 1024


@pytest.mark.parametrize("width", [128, 80, 7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_is_head_major_and_every_head_begins_on_a_line(dtype, width):
    cache = treeattn.ShardedKVCache(None, batch=2, kv_heads=3, head_dim=width, dtype=dtype, capacity=101)
    ones = np.ones((2, 3, 100, width), np.float32)
    for piece in (ones[:, :, :9], ones[:, :, 9:]):
        cache.append(piece, piece)
    for rows in (cache._stock.shard.k, cache._stock.shard.v):
        _, head, token, element = rows.strides
        assert (element, token) == (rows.itemsize, width * rows.itemsize)
        assert head >= 101 * token
        assert {rows[b, h].ctypes.data % storage.LINE for b in range(2) for h in range(3)} == {0}
    assert np.array_equal(cache.decode(ones[:, :, :1]), ones[:, :, :1])
