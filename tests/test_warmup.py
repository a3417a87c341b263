"""``treeattn warmup``: what it compiles, lists and removes."""

from __future__ import annotations

import json

import pytest

from treeattn import cli
from treeattn.arguments.arrays import KV_DTYPES
from treeattn.kernels import code_folder
from treeattn.kernels.compilation import watching
from treeattn.kernels.specialisations import specialisations

SMALL = ("--q-heads", "4", "--kv-heads", "2", "--head-dim", "24")


@pytest.fixture
def warmup(capfd, monkeypatch):
    """Run ``treeattn warmup`` in this process and give status and what was printed."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(["warmup", *arguments])
        return ended.value.code or 0, capfd.readouterr().out

    return run


def test_every_function_is_told_as_json(warmup):
    status, printed = warmup(*SMALL, "--json", "-")
    results = json.loads(printed)
    assert status == 0
    assert results["folder"] == [str(code_folder.cache_folder())]
    assert all(each.keys() == {"name", "seconds", "loaded"} for each in results["ready"])


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_every_stored_type_can_be_warmed_up(warmup, dtype):
    assert warmup(*SMALL, "--kv-dtype", dtype)[0] == 0


def test_the_list_names_every_specialisation_once(warmup):
    status, printed = warmup("--list")
    names = [name for name, _ in specialisations()]
    assert (status, printed.splitlines()) == (0, names)
    assert len(set(names)) == len(names)


def test_all_compiles_what_is_listed(warmup, monkeypatch):
    called = []
    listed = [(name, lambda name=name: called.append(name)) for name in ("scores", "values")]
    monkeypatch.setattr("treeattn.kernels.specialisations.specialisations", lambda: iter(listed))
    assert warmup(*SMALL, "--all")[0] == 0
    assert called == ["scores", "values"]


def test_clear_names_what_it_removed(warmup, monkeypatch, tmp_path):
    folder = tmp_path / "treeattn-of-some-version"
    folder.mkdir()
    monkeypatch.setattr(code_folder, "_roots", lambda: iter([tmp_path]))
    assert warmup("--clear") == (0, f"{folder}\n")
    assert not folder.exists()


def test_a_shape_that_makes_no_sense_is_refused(warmup, capfd):
    status, _ = warmup("--q-heads", "3", "--kv-heads", "2")
    assert status == 1


def test_the_list_can_not_be_had_while_clearing(warmup, monkeypatch, capfd):
    monkeypatch.setattr("treeattn.kernels.code_folder.clear_cache", lambda: pytest.fail("it was cleared"))
    assert warmup("--clear", "--list")[0] == 1


def test_watchers_hear_of_each_function_before_and_after(tmp_path):
    from treeattn.kernels.compilation import entry

    heard = []
    with watching(lambda name: heard.append(name), lambda done: heard.append(done.name)):

        @entry("int64(int64)")
        def _next_number(x: int) -> int:
            return x + 1

        assert heard == []
        assert _next_number()(1) == 2
        _next_number()
    assert heard == ["next number", "next number"]
