"""Arrays from one rank to all."""

import numpy as np
import pytest

from treeattn import TreeComm
from treeattn.arguments.arrays import narrow_dtype
from treeattn.errors import InputError
from treeattn.execution.broadcasting import broadcast
from treeattn.testing import run_ranks

ARRAYS = {
    "float32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scalar": np.float64(2.5),
    "list": [[1, 2], [3, 4]],
    "empty": np.empty((0, 3), np.int16),
    "strided": np.arange(24).reshape(4, 6)[::2, ::-3],
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big-endian": np.arange(4, dtype=">f4"),
    "bool": np.array([True, False]),
    "complex": np.array([1j, 2]),
    "bfloat16": np.arange(5).astype(narrow_dtype("bfloat16")),
    "float8": np.arange(5).astype(narrow_dtype("float8_e4m3fn")),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_bcast_gives_every_rank_the_roots_array(name, size):
    array, root = ARRAYS[name], size // 2

    def body(transport):
        with TreeComm(transport) as comm:
            return comm.bcast(array if comm.rank == root else None, root=root)

    for found in run_ranks(size, body, hosts=list("abaab")[:size]):
        assert found.shape == np.shape(array)
        assert found.dtype == np.asarray(array).dtype.newbyteorder("=")
        assert np.array_equal(found, np.asarray(array))


def test_bcast_of_a_long_array_goes_in_pieces(monkeypatch):
    monkeypatch.setattr("treeattn.planning.messages.LARGEST_MESSAGE", 100)
    monkeypatch.setattr("treeattn.planning.messages.AT_ONCE", 3)
    array = np.random.default_rng(0).integers(0, 256, 1234, np.uint8)

    def body(transport):
        with TreeComm(transport, hosts=list("aabc")) as comm:
            found = comm.bcast(array if comm.rank == 3 else None, root=3)
            return found.tobytes(), comm.total_stats()

    for found, total in run_ranks(4, body):
        assert found == array.tobytes()
        assert (total.messages, total.messages_between) == (13 + 2 * (12 + 12), 2 * (12 + 12))
        assert total.bytes == 3 * array.nbytes
    assert broadcast.__module__ == "treeattn.execution.broadcasting"


def test_bcast_wants_other_ranks_arrays_to_be_like_the_roots_and_leaves_them_alone():
    def body(transport):
        with TreeComm(transport) as comm:
            mine = np.full(3, comm.rank)
            found = comm.bcast(mine)
            assert mine.tolist() == [comm.rank] * 3
            assert found.tolist() == [0, 0, 0]
            with pytest.raises(InputError) as caught:
                comm.bcast(np.zeros(4 if comm.rank == 1 else 3))
            return str(caught.value)

    expected = "array: expected the root's float64 of shape (3,), or None, got float64 of shape (4,) on rank 1"
    assert run_ranks(3, body) == [expected] * 3


def test_bcast_needs_an_array_at_the_root():
    with pytest.raises(InputError, match="array: expected an array, got None"):
        TreeComm().bcast(None)


def test_bcast_refuses_a_masked_array():
    with pytest.raises(InputError, match="array: expected an array, got a masked array"):
        TreeComm().bcast(np.ma.array([1, 2], mask=[0, 1]))
