"""Where compiled code is kept, by processes that start together and in places that can't be written."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pwd
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import treeattn
from treeattn.kernels import code_folder, compilation
from treeattn.kernels.code_folder import cache_folder, clear_cache
from treeattn.kernels.compilation import Compilation, account

RANKS = 8

SHAPE = ["--q-heads", "4", "--kv-heads", "2", "--head-dim", "24", "--causal"]

PROGRAM = """
import json, os, sys, tempfile, zlib, numpy as np, treeattn
from treeattn.kernels.code_folder import cache_folder
from treeattn.kernels.compilation import compilations
tempfile.tempdir = os.environ["TMPDIR"]  # even if it can't be written
normal = np.random.default_rng(0).standard_normal

def drawn(width, q, k):
    return [normal((1, heads, n, width), np.float32) for heads, n in (q, k, k)]

def warmup(*shape):
    from treeattn.cli import main
    try:
        main(["warmup", *shape])
    except SystemExit as ended:
        assert not ended.code
    return []

def decode():
    yield treeattn.decode(*drawn(24, (4, 1), (2, 300)), comm=None, causal=True, q_pos=np.array([299]), kv_pos=0)

def partials():
    for width, options in ((128, {}), (33, {"causal": True, "softcap": 3.0, "mask": np.arange(700) != 5})):
        state = treeattn.partial_attention(*drawn(width, (8, 2), (2, 700)), **options)
        yield state.packed
        yield state.merge(state).finish()

def merge(dtype="float32"):
    values, lse = normal((2, 1, 2, 1, 8), dtype), normal((2, 1, 2, 1), dtype)
    yield treeattn.merge([treeattn.PartialState.from_lse(*each, base="e") for each in zip(values, lse)]).packed

bits, numbers = [], []
for work, *arguments in json.loads(sys.argv[1]):
    bits += [zlib.crc32(array) for array in globals()[work](*arguments)]
    numbers.append(len(compilations()))
found = {"bits": bits, "numbers": numbers, "folder": str(cache_folder()), "done": compilations()}
print(json.dumps({**found, "could_compile": "numba.cpython.charseq" in sys.modules}))
"""

WITHOUT_ROOTS_RIGHTS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner"]


def start(*places, work, before=()):
    """Start a process that does some of what its program can, with its three places for code in ``places``."""
    names = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR")
    environment = {**os.environ, "PYTHONPATH": str(Path(treeattn.__file__).parent.parent), "TREEATTN_THREADS": "1"}
    environment |= {"COLUMNS": "200"} | {name: str(place) for name, place in zip(names, places, strict=True)}
    command = [*before, sys.executable, "-W", "error", "-c", PROGRAM, json.dumps(work)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)


def ended(process):
    """Give what a process found, and the lines that it printed before it said so."""
    out = process.communicate(timeout=200)[0]
    assert process.returncode == 0
    *printed, last = out.splitlines()
    found = json.loads(last)
    return found | {"printed": printed, "done": [Compilation(*each) for each in found["done"]]}


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """Ranks that have warmed up and decoded on a cache that was empty: what each says, and the place."""
    place = tmp_path_factory.mktemp("empty")
    work = [("warmup", *SHAPE), ("decode",), ("partials",)]
    ranks = [start(place, place, place, work=work) for _ in range(RANKS)]
    return [ended(rank) for rank in ranks], place


def test_ranks_that_start_on_an_empty_cache_compile_each_function_once(warm):
    ranks, place = warm
    assert {Path(rank["folder"]).parent for rank in ranks} == {place}
    assert {tuple(rank["bits"]) for rank in ranks} == {tuple(ranks[0]["bits"])}
    names = [sorted(each.name for each in rank["done"]) for rank in ranks]
    assert names == [names[0]] * RANKS
    assert sorted(each.name for rank in ranks for each in rank["done"] if not each.loaded) == names[0]


def test_what_was_warmed_up_is_there_when_a_step_needs_it(warm):
    for rank in warm[0]:
        warmed_up, decoded, more = rank["numbers"]
        assert 0 < warmed_up == decoded < more
        told = [f"{name}: {'loaded' if loaded else 'compiled'} in" for name, _, loaded in rank["done"][:warmed_up]]
        assert [line.rpartition(" in ")[0] + " in" for line in rank["printed"][:-1]] == told
        assert rank["printed"][-1] == f"code is kept in {rank['folder']}"


def test_the_place_is_the_same_while_another_thread_compiles():
    """Threads that begin together may look for it then, and would compile everything again in a place inside it."""
    with compilation._compiling():
        assert cache_folder.__wrapped__() == cache_folder()


@pytest.fixture
def read_only(warm, tmp_path):
    """Copy of the warm cache that can't be written, and the words before a command that hold for root too."""
    before = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root can write everything, and there is no setpriv to drop its rights")
        before = WITHOUT_ROOTS_RIGHTS
    place = tmp_path / "read-only"
    shutil.copytree(warm[1], place)
    (tmp_path / "file").touch()
    set_mode(place, 0o555)
    yield place, before
    set_mode(place, 0o755)


def set_mode(place, mode):
    for folder in (place, *(path for path in place.rglob("*") if path.is_dir())):
        folder.chmod(mode)


def test_ranks_that_start_on_a_read_only_cache_load_what_it_has(warm, read_only, tmp_path):
    """Loaded code has the bits of code that was just compiled."""
    place, before = read_only
    work = [("decode",), ("partials",)]
    ranks = [ended(rank) for rank in [start(place, place, tmp_path, work=work, before=before) for _ in range(RANKS)]]
    assert [rank["bits"] for rank in ranks] == [warm[0][0]["bits"]] * RANKS
    assert len(ranks[0]["bits"]) == 5
    assert {Path(rank["folder"]).parent.parent for rank in ranks} == {tmp_path}
    assert all(each.loaded for rank in ranks for each in rank["done"])
    assert not any(rank["could_compile"] for rank in ranks), "what compiling takes was read, which takes long"


def test_who_has_loaded_code_can_compile(warm, tmp_path):
    place = tmp_path / "copied"
    shutil.copytree(warm[1], place)
    rank = ended(start(place, place, place, work=[("decode",), ("merge", "float64")]))
    assert [each.loaded for each in rank["done"]] == [True] * rank["numbers"][0] + [False]
    assert rank["could_compile"]


def test_no_place_for_the_cache_is_no_error(tmp_path):
    """Code then lives in memory. Even root can't make a folder below a file."""
    (tmp_path / "file").touch()
    somewhere, nowhere = (
        ended(start(*[place] * 3, work=[("merge",)])) for place in (tmp_path, tmp_path / "file" / "below")
    )
    assert (somewhere["folder"] == "None", nowhere["folder"]) == (False, "None")
    assert somewhere["bits"] == nowhere["bits"]
    assert [each.loaded for each in nowhere["done"]] == [False] * len(somewhere["done"])


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Empty places for this process's own code, which it then looks for anew."""
    monkeypatch.setattr(code_folder, "_roots", lambda: iter([tmp_path / "first", tmp_path / "second"]))
    cache_folder.cache_clear()
    yield tmp_path
    cache_folder.cache_clear()


def aged(folder, days):
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "some.nbi").write_text("code")
    os.utime(folder, (time.time() - days * 24 * 3600,) * 2)
    return folder


def test_code_of_other_versions_goes_when_it_is_long_unused(places):
    old, recent = aged(places / "first" / "treeattn-1", 15), aged(places / "first" / "treeattn-2", 13)
    foreign, elsewhere = aged(places / "first" / "another", 99), aged(places / "second" / "treeattn-1", 99)
    assert cache_folder().parent == places / "first"
    assert [folder.exists() for folder in (old, recent, foreign, elsewhere)] == [False, True, True, True]


def test_a_full_disk_is_no_place(places):
    with files_of_at_most(64):
        assert cache_folder() is None
    cache_folder.cache_clear()
    assert cache_folder().parent == places / "first"


@contextlib.contextmanager
def files_of_at_most(nbytes):
    """Let files have no more bytes, as on a full disk, or where one's share of it is used up."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_using_a_folder_keeps_it(places):
    folder = cache_folder()
    os.utime(folder, (0, 0))
    cache_folder.cache_clear()
    assert cache_folder() == folder
    assert time.time() - folder.stat().st_mtime < 60


def test_clearing_removes_every_version_from_every_place_and_nothing_else(places):
    foreign = aged(places / "second" / "another", 99)
    mine = [aged(places / place / f"treeattn-{i}", 0) for place in ("first", "second") for i in range(2)]
    assert sorted(clear_cache()) == sorted(mine)
    assert not any(folder.exists() for folder in mine)
    assert foreign.exists()


@pytest.mark.parametrize(
    ("done", "words"),
    [
        ([], "no function was compiled or loaded"),
        ([("a", 2.0, False)], "1 function compiled in 2.00 s"),
        ([("a", 2.0, False), ("b", 1.5, False)], "2 functions compiled in 3.50 s"),
        ([("a", 0.25, True), ("b", 1.5, False), ("c", 0.5, True)], "1 function compiled in 1.50 s, 2 loaded in 0.75 s"),
    ],
)
def test_the_account_counts_what_was_compiled_and_loaded(done, words):
    assert account([Compilation(*each) for each in done]) == words


def added():
    """Give a new entry point, and a new part, that were not made ready in this process before."""
    return compilation.entry("int64(int64)")(_double), compilation.part("int64(int64)")(_negative)


def _double(number):
    return 2 * number


def _negative(number):
    return -number


def results():
    entry, part = added()
    return entry()(21), ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(part())(42)


def loaded():
    return [each.loaded for each in compilation.compilations()[-2:]]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Keep code in an empty folder."""
    monkeypatch.setattr(compilation, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_a_disk_that_becomes_full_is_no_error(kept):
    with files_of_at_most(64):
        found = results()
    assert found == (42, -42)
    assert not list(kept.rglob("*.nbc"))
    assert (results(), loaded()) == ((42, -42), [False, False])
    assert (results(), loaded()) == ((42, -42), [True, True])


def test_code_is_loaded_while_another_process_compiles(kept):
    results()
    with ThreadPoolExecutor(1) as thread, open(kept / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            assert thread.submit(results).result(timeout=60) == (42, -42)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
    assert loaded() == [True, True]


@pytest.mark.parametrize("content", [b"", b"no pickle"])
def test_damaged_files_are_no_error_and_go(kept, content):
    results()
    for file in kept.rglob("*.nb[ic]"):
        file.write_bytes(content)
    assert results() == (42, -42)
    results()
    assert (results(), loaded()) == ((42, -42), [True, True])


@pytest.mark.parametrize("kind", [compilation.inline, compilation.loops])
def test_what_compiled_code_calls_is_plain_python_for_python(kind, kept):
    function = kind(_double)
    assert function(21) == 42
    assert compilation.entry("int64(int64)")(lambda number: function(number) + 1)()(21) == 43
    assert function(21) == 42


def places_of_a_user_without(monkeypatch, what):
    def none(*_):
        raise KeyError("uid not found") if what == "home" else FileNotFoundError("no usable temporary directory")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(code_folder, "NUMBAS", "")
    monkeypatch.setattr(*((pwd, "getpwuid", none) if what == "home" else (tempfile, "gettempdir", none)))
    return list(code_folder._roots())


def test_who_has_no_home_or_no_temporary_folder_has_the_other_place(monkeypatch):
    with monkeypatch.context() as patched:
        without_home = places_of_a_user_without(patched, "home")
    with monkeypatch.context() as patched:
        without_temporary = places_of_a_user_without(patched, "temporary folder")
    assert without_home == [Path(tempfile.gettempdir()) / f"treeattn-{os.getuid()}"]
    assert [place.name for place in without_temporary] == ["treeattn"]


@pytest.mark.parametrize("how", ["open to all", "a link"])
def test_code_of_others_is_not_run(tmp_path, monkeypatch, how):
    """The place below the temporary folder is one that everybody can foresee, and make before its user does."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place, elsewhere = tmp_path / f"treeattn-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if how == "a link":
        place.symlink_to(elsewhere)
    else:
        place.mkdir()
        place.chmod(0o777)
    assert place not in code_folder._roots()
    place.unlink() if how == "a link" else place.rmdir()
    assert place in code_folder._roots()
    assert place.stat().st_mode & 0o777 == 0o700
