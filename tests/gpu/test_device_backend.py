"""The GPU backends' own code on a fake card, whose memory faults when anything but a kernel or a copy touches it."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_card import FakeCard, FakeCardBackend, FaultingArray

import treeattn
from treeattn.arguments.inputs import resolve
from treeattn.arguments.spec import Options
from treeattn.backends import cupy_runtime, registry
from treeattn.backends.auto import AutoBackend
from treeattn.errors import BackendError, InputError
from treeattn.testing import BackendConformance, run_ranks
from treeattn.testing.oracle import assert_attention

HERE = Path(__file__).parent


class TestFakeCard(BackendConformance):
    """Every check that a backend must pass, with arrays of the host."""

    @pytest.fixture(autouse=True)
    def _backend(self, card: FakeCard) -> None:
        self.backend = FakeCardBackend(card)


@pytest.fixture
def backend(card: FakeCard) -> FakeCardBackend:
    return FakeCardBackend(card)


def inputs(dtype: Any = np.float32, keys: int = 60) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    return tuple(  # type: ignore[return-value]
        rng.standard_normal((1, heads, n, 16), dtype=np.float32).astype(dtype)
        for heads, n in ((4, 1), (2, keys), (2, keys))
    )


def on_card(card: FakeCard, *arrays: Any) -> list[FaultingArray]:
    return [card.upload(array) for array in arrays]


def test_touching_the_fake_cards_memory_ends_the_process(emulator: Any, tmp_path: Path) -> None:
    script = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import numpy as np
from pathlib import Path
from emulation import Emulator
from fake_card import FakeCard
card = FakeCard(Emulator(Path({str(tmp_path)!r})))
print(card.upload(np.ones(4)).get().sum(), flush=True)
np.asarray(card.upload(np.ones(4))).sum()
"""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.stdout == "4.0\n"
    assert done.returncode == -11


def test_arrays_on_the_card_give_results_on_the_card(backend: Any, card: FakeCard) -> None:
    arrays = inputs()
    out, lse = treeattn.attention(*on_card(card, *arrays), backend=backend, return_lse=True)
    assert isinstance(out, FaultingArray)
    assert isinstance(lse, FaultingArray)
    assert_attention((out.get(), lse.get()), *arrays)


def test_nothing_is_copied_to_the_host_on_the_way(backend: Any, card: FakeCard) -> None:
    there = on_card(card, *inputs())
    treeattn.attention(*there, backend=backend)  # allocates its workspace
    before = card.copies
    treeattn.attention(*there, backend=backend)
    assert card.copies == before


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_a_repeated_call_is_known_and_tells_card_from_host(backend: Any, card: FakeCard, layout: str) -> None:
    q, k, v = (array if layout == "bhtd" else np.ascontiguousarray(array.swapaxes(1, 2)) for array in inputs())
    options: dict[str, Any] = {"layout": layout, "window": (30, None)}
    there = on_card(card, q, k, v)
    specs = [resolve(*each, Options(**options))[0] for each in (there, (q, k, v), there)]
    assert specs[0] is specs[2]
    assert [each.on_device for each in specs] == [True, False, True]
    for _ in range(2):
        out, lse = treeattn.attention(*there, **options, backend=backend, return_lse=True)
        assert_attention((out.get(), lse.get()), q, k, v, **options)


def test_a_repeated_call_allocates_nothing_so_that_a_graph_may_capture_it(backend: Any, card: FakeCard) -> None:
    there = on_card(card, *inputs())
    state = treeattn.partial_attention(*there, kv_len=card.upload(np.array([60])), backend=backend)
    lengths = card.upload(np.array([41]))
    used, copies = card.used, card.copies
    assert treeattn.partial_attention(*there, kv_len=lengths, backend=backend, out=state) is state
    assert (card.used, card.copies) == (used, copies)


class Tensor:
    """As much of a torch tensor on a card as is asked of it."""

    __module__ = "torch"

    def __init__(self, array: FaultingArray) -> None:
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> FaultingArray:
        return self.array


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for CuPy and torch, which hand arrays to each other by DLPack."""
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(from_dlpack=lambda array: array.__dlpack__()))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(from_dlpack=Tensor, Tensor=Tensor))


@pytest.mark.usefixtures("libraries")
def test_tensors_on_the_card_give_tensors_on_the_card(backend: Any, card: FakeCard) -> None:
    q, k, v = inputs()
    sink = np.arange(4, dtype=np.float32)
    there, on_there = [Tensor(array) for array in on_card(card, q, k, v)], Tensor(card.upload(sink))
    state = treeattn.partial_attention(*there, backend=backend)
    for found in (
        treeattn.attention(*there, sink=on_there, backend=backend, return_lse=True),
        treeattn.decode(*there, comm=None, sink=sink, backend=backend, return_lse=True),
        state.finish(sink=on_there, return_lse=True),
        treeattn.merge([treeattn.PartialState.identity(state.shape, backend=backend), state]).finish(
            sink=sink, return_lse=True
        ),
    ):
        assert [type(each) for each in found] == [Tensor, Tensor]
        assert_attention(tuple(each.array.get() for each in found), q, k, v, sink=sink)


@pytest.mark.usefixtures("libraries")
def test_what_would_mix_card_and_host_is_refused_by_name(card: FakeCard) -> None:
    q, k, v = inputs()
    there, zeta = Tensor(card.upload(np.zeros(4, np.float32))), Tensor(card.upload(q))
    for refused in (
        lambda: treeattn.attention(q, k, v, sink=there),
        lambda: treeattn.decode(q, k, v, comm=None, sink=there),
        lambda: treeattn.partial_attention(q, k, v).finish(sink=there),
    ):
        with pytest.raises(InputError, match=r"^sink: expected an array in host memory, as q is, got one on a GPU"):
            refused()
    with pytest.raises(InputError, match=r"^zeta: expected an array in host memory, as q is"):
        treeattn.energy(q, k, v, zeta)
    with pytest.raises(InputError, match=r"^out: expected a NumPy array or a torch tensor, in host memory, got Tensor"):
        treeattn.attention(q, k, v, out=zeta)


@pytest.mark.usefixtures("libraries")
def test_q_on_the_card_is_compared_over_ranks_where_that_is_asked(
    backend: Any, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREEATTN_CHECK", "1")
    q, k, v = inputs()

    def body(transport: Any) -> str:
        with treeattn.TreeComm(transport) as comm:
            mine = q + transport.rank
            with pytest.raises(InputError) as caught:
                treeattn.decode(*map(Tensor, on_card(card, mine, k, v)), comm=comm, backend=backend)
            return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert first.startswith("q: ")


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_raw_storage_on_the_card_is_read_as_kv_dtype(backend: Any, card: FakeCard, name: str) -> None:
    q, k, v = inputs()
    k, v = (array.astype(getattr(ml_dtypes, name)) for array in (k, v))
    there = on_card(card, q, k.view(np.uint8), v.view(np.uint8))
    out, lse = treeattn.attention(*there, kv_dtype=name, backend=backend, return_lse=True)
    assert_attention((out.get(), lse.get()), q, k, v)


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_options_may_be_on_the_host_or_on_the_card(backend: Any, card: FakeCard, layout: str) -> None:
    q, k, v = (array if layout == "bhtd" else np.ascontiguousarray(array.swapaxes(1, 2)) for array in inputs())
    mask = np.random.default_rng(1).random((1, 4, 1, 60)) < 0.6
    options: dict[str, Any] = {"causal": True, "q_pos": np.array([40]), "kv_pos": 3, "layout": layout}
    lengths = np.array([50])
    there = on_card(card, q, k, v)
    for given in ({"mask": mask, "kv_len": lengths}, {"mask": card.upload(mask), "kv_len": card.upload(lengths)}):
        out, lse = treeattn.attention(*there, **given, **options, backend=backend, return_lse=True)
        right = {"mask": mask, "kv_len": lengths, **options}
        assert_attention((out.get(), lse.get()), q, k, v, **right)


POSITIONS: dict[str, dict[str, Any]] = {
    "arrays": {"q_pos": np.array([40]), "kv_pos": np.arange(60)[::-1] - 7},
    "a row each": {"q_pos": np.array([[40]]), "kv_pos": np.arange(60)[None] * 2},
    "where the keys begin": {"q_pos": np.array([40]), "kv_pos": 3},
    "none of the keys": {"q_pos": np.array([40])},
    "none": {},
    "none of the queries": {"kv_pos": -100},
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_may_be_on_the_card_or_need_no_array(backend: Any, card: FakeCard, name: str) -> None:
    arrays, options = inputs(), {"causal": True, "window": (30, None)}
    there = on_card(card, *arrays)
    given = {key: card.upload(each) if isinstance(each, np.ndarray) else each for key, each in POSITIONS[name].items()}
    for _ in range(2):
        copies = card.copies
        out, lse = treeattn.attention(*there, **given, **options, backend=backend, return_lse=True)
        copies = card.copies - copies
    assert_attention((out.get(), lse.get()), *arrays, **POSITIONS[name], **options)
    assert copies == ("q_pos" not in given), "where the last query stands, and no array of keys"


def test_positions_on_the_card_are_never_read_by_the_host(backend: Any, card: FakeCard) -> None:
    arrays = inputs()
    there = on_card(card, *arrays)
    for wild in (-(2**63), 2**63 - 1):
        where = {"q_pos": card.upload(np.array([wild])), "kv_pos": card.upload(np.arange(60))}
        out = treeattn.attention(*there, window=(None, 5), causal=True, backend=backend, **where)
        right = treeattn.attention(*there, backend=backend).get() if wild > 0 else np.zeros_like(arrays[0])
        np.testing.assert_array_equal(out.get(), right)
    for name in ("q_pos", "kv_pos"):
        where = {"q_pos": np.array([1]), name: card.upload(np.zeros(60 if name == "kv_pos" else 1, np.int32))}
        with pytest.raises(InputError, match=f"^{name}: expected int64, where it is on a GPU, got int32"):
            treeattn.attention(*there, causal=True, backend=backend, **where)
    with pytest.raises(InputError, match=r"^kv_pos: expected shape \(60,\) or \(1, 60\), got shape \(59,\)"):
        treeattn.attention(*there, causal=True, q_pos=[0], kv_pos=card.upload(np.arange(59)), backend=backend)
    with pytest.raises(InputError, match=r"^q_pos: expected positions, where kv_pos is on a GPU, got None"):
        treeattn.attention(*there, causal=True, kv_pos=card.upload(np.arange(60)), backend=backend)
    small = {"q_pos": np.array([3]), "kv_pos": np.arange(60), "kv_len": np.array([60]), "mask": np.ones(60, bool)}
    for name, array in small.items():
        treeattn.attention(*arrays, causal=True, **{"q_pos": [3], name: array})  # a call like one that was seen
        with pytest.raises(InputError, match=f"^{name}: expected an array in host memory, as q is, got one on a GPU"):
            treeattn.attention(*arrays, causal=True, **{"q_pos": [3], name: card.upload(array)})


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_groups_of_heads_have_the_bits_of_the_whole_call(backend: Any, card: FakeCard, layout: str) -> None:
    q, k, v = (array if layout == "bhtd" else np.ascontiguousarray(array.swapaxes(1, 2)) for array in inputs())
    mask = np.random.default_rng(1).random((60,)) < 0.6
    there, on_there = on_card(card, q, k, v), card.upload(mask)
    found = [
        treeattn.decode(*there, comm=None, mask=on_there, layout=layout, pipeline=groups, backend=backend).get()
        for groups in (1, 2)
    ]
    assert found[0].tobytes() == found[1].tobytes()


def test_arrays_in_different_places_are_refused(backend: Any, card: FakeCard) -> None:
    q, k, v = inputs()
    with pytest.raises(InputError, match=r"^k: expected an array on a GPU"):
        treeattn.attention(card.upload(q), k, v, backend=backend)
    with pytest.raises(InputError, match=r"^v: expected an array in host memory"):
        treeattn.attention(q, k, card.upload(v), backend=backend)
    with pytest.raises(InputError, match=r"^mask: expected an array in host memory"):
        treeattn.attention(q, k, v, mask=card.upload(np.ones((1, 1, 1, 60), bool)))
    with pytest.raises(InputError, match=r"^q_pos: expected positions, where kv_len is on a GPU"):
        treeattn.attention(*on_card(card, q, k, v), causal=True, kv_len=card.upload(np.array([3])), backend=backend)


def test_arrays_of_another_card_are_refused_before_a_kernel_follows_them(
    backend: Any, card: FakeCard, emulator: Any
) -> None:
    q, k, v = inputs()
    other, launches = FakeCard(emulator, number=3), card.launches
    with pytest.raises(InputError, match=r"^k: expected an array on card 0, which this process .*, got one on card 3"):
        treeattn.attention(card.upload(q), other.upload(k), card.upload(v), backend=backend)
    with pytest.raises(InputError, match=r"^q: expected an array on card 0"):
        treeattn.attention(*on_card(other, q, k, v), backend=backend)
    lengths = other.upload(np.array([60]))
    with pytest.raises(InputError, match=r"^kv_len: expected an array on card 0"):
        treeattn.attention(*on_card(card, q, k, v), kv_len=lengths, backend=backend)
    assert card.launches <= launches + 1, "no more than the trial of the first use"


def test_the_cpu_refuses_arrays_of_a_card(card: FakeCard) -> None:
    with pytest.raises(BackendError, match="q, k and v are on a GPU"):
        treeattn.attention(*on_card(card, *inputs()), backend="cpu")


def test_float64_is_refused_with_a_remedy(backend: Any) -> None:
    with pytest.raises(BackendError, match="use backend='cpu'"):
        treeattn.attention(*inputs(np.float64), backend=backend)
    spec, _ = resolve(*inputs(np.float64), Options())
    assert backend.reasons(spec) == [
        "float64 runs on the CPU only: use backend='cpu', or float32 with backend='fake card'"
    ]


def test_states_of_card_and_host_have_equal_bits_after_merging(backend: Any, card: FakeCard) -> None:
    q, k, v = inputs()
    halves = slice(0, 25), slice(25, 60)
    there = [treeattn.partial_attention(q, k[:, :, at], v[:, :, at], backend=backend) for at in halves]
    here = []
    for state in there:
        host = treeattn.PartialState.identity(state.shape)
        host._packed[...] = state.packed.get()
        here.append(host)
    np.testing.assert_array_equal(treeattn.merge(there).packed.get(), treeattn.merge(here).packed)


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_device_pointer_reaches_mpi(mpirun: Any, emulator: Any, ranks: int) -> None:
    job = mpirun(HERE / "decode_on_fake_card.py", ranks, emulator.folder)
    assert len({report["bits"] for report in job.reports}) == 1
    assert len(job.reports) == ranks


def test_what_is_missing_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name, extra in (("nvidia", "treeattn[cuda12]"), ("amd", "treeattn[rocm]"), ("pcie", "treeattn[cuda12]")):
        [reason] = registry.load(name).reasons()
        assert f"pip install '{extra}'" in reason
        with pytest.raises(BackendError, match="CuPy can't be imported"):
            treeattn.attention(*inputs(), backend=name)


def test_a_card_whose_compiler_fails_is_refused(backend: Any, card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(*_: Any, **__: Any) -> Any:
        raise OSError("stddef.h not found\nand much more")

    monkeypatch.setattr(card, "compile", compile)
    assert backend.reasons() == ["a first kernel doesn't compile or run (OSError: stddef.h not found)"]


class FakeCupy:
    """As much of CuPy as is asked before a card is used."""

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, *, hip: bool, count: int | None) -> None:
        self.cuda = self.runtime = self
        self.is_hip, self._count = hip, count

    def getDeviceCount(self) -> int:  # noqa: N802 - CuPy's name
        if self._count is None:
            raise self.CUDARuntimeError("cudaErrorInsufficientDriver")
        return self._count


@pytest.mark.parametrize(
    ("cupy", "words"),
    [
        (FakeCupy(hip=True, count=1), "the CuPy that is installed is for ROCm"),
        (FakeCupy(hip=False, count=None), "the driver finds no card (cudaErrorInsufficientDriver)"),
        (FakeCupy(hip=False, count=0), "there is no card"),
    ],
)
def test_each_thing_that_can_be_missing_has_its_sentence(
    monkeypatch: pytest.MonkeyPatch, cupy: FakeCupy, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    [reason] = cupy_runtime.why_not("cuda")
    assert reason.startswith(words)
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(hip=False, count=2))
    assert cupy_runtime.why_not("cuda") == []


@pytest.mark.parametrize(
    ("environ", "started", "card"),
    [
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, None, 1),
        ({"PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "6"}, False, 2),  # more ranks than cards share them
        ({"PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "6"}, True, None),  # who started MPI has chosen
        ({"PMI_RANK": "6", "PMI_SIZE": "8"}, False, None),
        ({}, None, None),
    ],
)
def test_a_rank_takes_the_card_of_its_number_on_its_host_before_mpi_starts(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], started: bool | None, card: int | None
) -> None:
    for name in [each for each in os.environ if each.startswith(("OMPI_", "PMI", "MPI_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    mpi = None if started is None else types.SimpleNamespace(Is_initialized=lambda: started)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    used: list[int] = []
    cupy = FakeCupy(hip=False, count=4)
    monkeypatch.setattr(
        cupy, "Device", lambda number: types.SimpleNamespace(use=lambda: used.append(number)), raising=False
    )
    cupy_runtime._choose_card(cupy)
    assert used == ([] if card is None else [card])


def test_auto_is_the_cpu_where_no_card_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    auto = AutoBackend()
    assert auto.ops.name == "cpu"
    assert (auto.queues, auto.memory.on_device, auto.capabilities.graphs) == (False, False, False)
    arrays = inputs()
    np.testing.assert_array_equal(treeattn.attention(*arrays, backend=auto), treeattn.attention(*arrays))


def test_backends_that_no_card_has_run_say_so() -> None:
    notes = registry.notes()
    assert {name for name, note in notes.items() if note == "not yet run on a card"} == {"nvidia", "amd", "pcie"}
