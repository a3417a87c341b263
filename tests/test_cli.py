"""The command line: most of it in this process, some of it on real ranks."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
from click.shell_completion import BashComplete

from treeattn import PartialState, TreeComm, cli, doctor
from treeattn.cli.contender import ALGORITHMS
from treeattn.cli.options import ALGORITHM_NAMES
from treeattn.cli.output import under_way
from treeattn.cli.workload import Workload
from treeattn.costs.catalog import Link
from treeattn.costs.model import CostModel
from treeattn.planning.plan import Stats
from treeattn.planning.planner import plan_allreduce
from treeattn.testing import run_ranks

SMALL = ("--tokens", "100", "--q-heads", "4", "--kv-heads", "2", "--head-dim", "8", "--repeats", "2", "--warmup", "0")

OPEN_MPI_OF_TWO = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}


class Ended:
    """How a command line ended: exit status and what it printed."""

    def __init__(self, status, captured):
        self.status, self.out, self.err = status, captured.out, captured.err

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def treeattn(capfd, monkeypatch):
    """Run ``treeattn`` with some arguments in this process, in a wide terminal."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        return Ended(ended.value.code or 0, capfd.readouterr())

    return run


def test_help_names_every_command_and_shows_examples(treeattn):
    for arguments in ((), ("--help",), ("-h",)):
        ended = treeattn(*arguments)
        assert ended.status == 0
        assert all(f"\n  {command} " in ended.out for command in ("decode", "topology", "doctor", "warmup"))
        assert "mpirun -n 4 treeattn decode" in ended.out


@pytest.mark.parametrize("command", ["decode", "topology", "doctor", "warmup"])
def test_every_command_explains_itself(treeattn, command):
    ended = treeattn(command, "--help")
    assert ended.status == 0
    assert "Examples:" in ended.out
    assert all(option in ended.out for option in ("--ranks", "--debug", "--json"))


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "treeattn", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("treeattn, version ")


def test_decode_shows_error_time_and_messages(treeattn):
    ended = treeattn("decode", *SMALL, "--verify")
    assert (ended.status, ended.err) == (0, "")
    for row in ("error", "time per step", "cache read", "rounds", "messages", "bytes sent", "as planned", "bits"):
        assert f"│ {row} " in ended.out


def test_decode_writes_what_it_shows_as_json(treeattn, tmp_path):
    ended = treeattn("decode", *SMALL, "--json", tmp_path / "results.json")
    assert ended.status == 0
    assert "treeattn decode" in ended.out
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["kv_bytes"] == 1 * 2 * 100 * (8 + 8) * 4
    assert results["workload"]["tokens"] == 100
    assert results["ranks"] == 1
    assert results["hosts"] == [socket.gethostname()]
    assert results["counted"] == results["predicted"]
    assert results["verdict"] is None
    assert 0 < results["p10_ms"] <= results["median_ms"] <= results["p90_ms"]


def test_decode_says_what_the_first_step_took_when_asked(treeattn, tmp_path):
    assert "first step" not in treeattn("decode", *SMALL).out
    ended = treeattn("decode", *SMALL, "--verbose", "--json", tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert f"│ first step     │ {results['first_ms']:.0f} ms: {results['first_code']}" in ended.out
    assert re.search(r"function.* (compiled|loaded)", results["first_code"])


def test_decode_claims_no_rate_for_keys_that_a_window_leaves_out(treeattn, tmp_path):
    ended = treeattn("decode", *SMALL, "--window", "9,0", "--json", tmp_path / "results.json")
    assert ended.status == 0
    assert "a window leaves keys out" in ended.out
    assert json.loads((tmp_path / "results.json").read_text())["gb_per_s"] is None


@pytest.mark.parametrize(
    "command",
    [("plan",), ("decode", *SMALL), ("topology", "--hosts", "a,b")],
    ids=lambda command: command[0],
)
def test_a_narrow_terminal_cuts_nothing_short(treeattn, monkeypatch, command):
    wide = treeattn(*command).out
    monkeypatch.setenv("COLUMNS", "24")
    narrow = treeattn(*command).out
    assert max(map(len, narrow.splitlines()[:3])) <= 24
    assert "…" not in narrow
    numbers = [line for line in wide.splitlines() if re.match(r" +\d+ tree +\d|       \w+ +\d", line)]
    assert bool(numbers) == (command == ("plan",))
    assert [line for line in numbers if line not in narrow.splitlines()] == []


def test_decode_takes_a_model_and_tokens_by_the_thousand(treeattn, monkeypatch, tmp_path):
    file, made = tmp_path / "model.json", []
    file.write_text(CostModel(Link(1, 1e9, ""), Link(1000, 1e9, ""), merge_gb_per_s=1e9).to_json())
    monkeypatch.setattr("treeattn.comm.TreeComm", lambda **options: made.append(options) or TreeComm(**options))
    ended = treeattn("decode", *SMALL, "--tokens", "1.5k", "--model", str(file), "--json", "-")
    assert ended.json["workload"]["tokens"] == 1536
    assert [options["model"] for options in made] == [str(file)]


def test_the_list_of_commands_has_whole_sentences(treeattn):
    assert "..." not in treeattn("--help").out.partition("Commands:")[2].partition("Examples:")[0]


@pytest.mark.parametrize(
    "options",
    [
        ("--dtype", "float64"),
        ("--dtype", "bfloat16", "--batch", "2"),
        ("--dtype", "float16", "--layout", "bthd"),
        ("--causal", "--q-tokens", "3"),
        ("--window", "20,0", "--softcap", "5"),
        ("--window", "none,1", "--v-head-dim", "5", "--backend", "reference"),
        ("--tokens", "3000", "--causal", "--q-tokens", "2", "--layout", "bthd"),
        ("--root", "0", "--deterministic", "--plan", "2,all", "--seed", "5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_decode_verifies_every_option(treeattn, monkeypatch, options):
    monkeypatch.setattr("treeattn.cli.workload.PIECE_ELEMENTS", 2**15)
    ended = treeattn("decode", *SMALL, *options, "--verify", "--json", "-")
    assert (ended.status, ended.err) == (0, "")
    verdict = ended.json["verdict"]
    assert verdict["error"] <= verdict["limit"]
    assert ("in 3 pieces" in verdict["method"]) == ("3000" in options)


def test_a_wrong_result_is_an_error(treeattn, monkeypatch):
    verdict = Workload.verdict
    monkeypatch.setattr(Workload, "verdict", lambda self, out, *rest: verdict(self, out + out.dtype.type(1e-3), *rest))
    ended = treeattn("decode", *SMALL, "--verify")
    assert ended.status == 1
    assert ended.err.startswith("treeattn: the result is off by 0.001, more than ")


def test_the_cache_does_not_depend_on_the_number_of_ranks():
    options = dict.fromkeys(("causal", "window", "softcap", "v_head_dim"))
    options |= {"tokens": 2500, "batch": 1, "q_heads": 2, "kv_heads": 1, "q_tokens": 1, "head_dim": 3}
    work = Workload.of({**options, "dtype": "float32", "layout": "bthd", "seed": 1})
    whole = work.cache(0, 2500)
    for size in (1, 2, 3, 7):
        spans = [work.span(rank, size) for rank in range(size)]
        assert [spans[0][0], spans[-1][1]] == [0, 2500]
        for all_ranks, one in zip(whole, zip(*(work.cache(*span) for span in spans), strict=True), strict=True):
            assert np.array_equal(np.concatenate(one, axis=1), all_ranks)


def test_topology_draws_an_imagined_layout(treeattn):
    ended = treeattn("topology", "--hosts", "a,a,b,b", "--payload", "1000")
    assert ended.status == 0
    assert ended.out.startswith(plan_allreduce("aabb").draw().splitlines()[0].partition(",")[0])
    assert "\na\n" in ended.out
    assert "busiest rank sends" in ended.out


def test_topology_writes_a_plan_and_draws_what_it_wrote(treeattn, tmp_path):
    file = str(tmp_path / "plan.json")
    written = treeattn("topology", "--hosts", "r0/a,r0/a,r0/b,r1/c", "--plan", "all,2,all,leaders=2", "--save", file)
    read = treeattn("topology", "--plan", file)
    assert (read.status, read.out) == (0, written.out)
    assert "inside racks" in read.out
    assert "the first of 2 pieces" in read.out


def test_one_rank_draws_the_plan_of_a_file(treeattn, tmp_path, monkeypatch):
    file = tmp_path / "plan.json"
    file.write_text(plan_allreduce("ab").to_json())
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    for rank, speaks in (("0", True), ("1", False)):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        ended = treeattn("topology", "--plan", str(file))
        assert (ended.status, bool(ended.out)) == (0, speaks)


def test_topology_forecasts_by_a_model(treeattn, tmp_path):
    file = tmp_path / "model.json"
    file.write_text(CostModel(Link(1, 1e9, ""), Link(1000, 1e9, ""), merge_gb_per_s=1e9).to_json())
    found = treeattn("topology", "--hosts", "a,b,c", "--model", str(file), "--json", "-").json["cost_us"]
    assert found["total"] == pytest.approx(1000, rel=1e-3)
    assert found["latency"] == 1000


def test_topology_measures_a_model_and_plans_beside_it(treeattn, mpirun, tmp_path):
    file, results = tmp_path / "model.json", tmp_path / "found.json"
    arguments = ("--calibrate", "--hosts", "a,a,b,b", "--save", str(file), "--json", str(results))
    mpirun(("-m", "treeattn", "topology", *arguments), 4)
    found = json.loads(results.read_text())
    assert {"shared,all", "shared,all,leaders=all"} <= {each["plan"] for each in found["samples"]}
    assert all(each["predicted_us"] > 0 and each["p50_us"] > 0 for each in found["plans"])
    assert found["chosen"] in {each["plan"] for each in found["plans"]}
    assert "latency" in treeattn("topology", "--hosts", "a,a,b,b", "--model", str(file)).out
    assert "--calibrate: expected several ranks" in treeattn("topology", "--calibrate").err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_output_can_show_a_tree(encoding):
    program = "from treeattn.cli import main; main(['topology', '--hosts', 'a,a,ü\\udcff,b'])"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": encoding},
        capture_output=True, encoding=encoding, check=False, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ("└─ rank 1" if encoding == "utf-8" else "`- rank 1") in ended.stdout
    assert ("0↔2" if encoding == "utf-8" else "0<->2") in ended.stdout
    assert ("\\xfc" if encoding == "ascii" else "ü") + "\\udcff" in ended.stdout


def test_a_terminal_without_width_is_taken_for_a_usual_one(treeattn, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    assert "rank 1" in treeattn("topology", "--hosts", "a,a").out


def test_topology_predicts_what_the_plan_does(treeattn):
    ended = treeattn(
        "topology", "--hosts", "a,b,a,c", "--plan", "2,2", "--payload", "500", "--root", "2", "--json", "-"
    )
    results = ended.json
    assert results["hosts"] == ["a", "b", "a", "c"]
    assert results["payload_bytes"] == 500
    assert results["predicted"]["messages"] == 2 * (4 - 1)  # a reduce: up with states, down with acknowledgements
    assert results["predicted"]["messages_between"] == 2 * (3 - 1)
    assert results["predicted"].keys() == Stats.__dataclass_fields__.keys()


def test_doctor_finds_this_machine_healthy(treeattn):
    ended = treeattn("doctor", "--json", "-")
    assert ended.status == 0
    checks = {check["name"]: check for check in ended.json["checks"]}
    assert ended.json["healthy"]
    assert checks.keys() >= {
        "versions",
        "launcher",
        "MPI library",
        "backends",
        "first call",
        "hosts",
        "bits of a result",
    }
    assert f"numpy {np.__version__}" in checks["versions"]["finding"]
    assert socket.gethostname() in checks["hosts"]["finding"]


def test_doctor_shows_what_is_wrong_and_what_to_do(treeattn, monkeypatch):
    monkeypatch.setattr(doctor, "_mpi_library", lambda name: doctor.Check(name, "not looked at"))
    monkeypatch.setattr(doctor, "RUNTIME_PACKAGES", ("numpy", "click"))
    monkeypatch.setattr(doctor, "SHM_PER_RANK", 2**60)
    ended = treeattn("doctor")
    assert ended.status == 1
    assert "failed  numpy, click" in ended.out
    assert "pip uninstall all but one of numpy, click" in ended.out
    assert "warning  " in ended.out
    assert "docker run --shm-size" in ended.out


def test_doctor_is_well_without_shared_memory(treeattn, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_mpi_library", lambda name: doctor.Check(name, "not looked at"))
    monkeypatch.setattr(doctor, "FOLDER", tmp_path / "shm")
    ended = treeattn("doctor")
    assert ended.status == 0
    assert re.search(rf"warning  no {tmp_path}/shm: ranks of one host use messages", ended.out)


def test_doctor_survives_a_check_that_breaks(treeattn, monkeypatch):
    def surprise(name):
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setattr(doctor, "_mpi_library", surprise)
    ended = treeattn("doctor")
    assert ended.status == 1
    assert "failed  ZeroDivisionError: nobody thought of this" in ended.out


def test_doctor_tells_of_a_launcher_that_does_not_belong_to_the_library(mpirun):
    foreign = {"PMI_RANK": "0", "PMI_SIZE": "2"} if mpirun.runtime.name == "openmpi" else OPEN_MPI_OF_TWO
    foreign |= {"PYTHONWARNINGS": ""}  # mpi4py notices too
    job = mpirun(("-m", "treeattn", "doctor", "--json", "-"), 1, launcher=list, env=foreign, check=False)
    assert job.rc == 1
    checks = {check["name"]: check for check in json.loads(job.stdout)["checks"]}
    assert checks["ranks"]["state"] == "failed"
    assert "started 2 ranks, but MPI sees one process" in checks["ranks"]["finding"]


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["nope"], 2, "No such command 'nope'"),
        (["decode", "--bogus"], 2, "No such option '--bogus'"),
        (["decode", "--q-heads", "3", "--kv-heads", "2"], 1, "k: expected a number of heads that divides q's 3, got 2"),
        (["decode", "--head-dim", "0"], 2, "Invalid value for '--head-dim'"),
        (["decode", "--dtype", "int3"], 2, "Invalid value for '--dtype'"),
        (
            ["decode", "--algorithm", "ring", "--wire-dtype", "float16"],
            1,
            "wire_dtype: expected --algorithm tree, got ring",
        ),
        (["decode", "--wire-dtype", "int8"], 2, "Invalid value for '--wire-dtype'"),
        (
            ["decode", "--algorithm", "bush"],
            2,
            "Invalid value for '--algorithm': expected one of tree, ring, ring_query",
        ),
        (["decode", "--backend", "abacus"], 1, "backend: expected one of 'cpu'"),
        (["decode", "--softcap", "-1"], 1, "softcap: expected a positive number"),
        (["decode", "--softcap", "nan"], 1, "softcap: expected"),
        (["decode", "--window", "3"], 2, "Invalid value for '--window': expected LEFT,RIGHT"),
        (["decode", "--window", "3,-2"], 1, "window: expected (left, right), none negative, got (3, -2)"),
        (["decode", "--plan", "1,all"], 1, "plan: expected each radix a number of at least 2"),
        (["decode", "--plan", "²,2"], 1, "plan: expected each radix a number of at least 2"),
        (["decode", "--tokens", "9" * 30], 2, "Invalid value for '--tokens': expected a number of tokens, such as"),
        (["decode", "--tokens", "1x"], 2, "Invalid value for '--tokens': expected a number of tokens, such as 131072"),
        (["bench", "--tokens", "4k,x"], 2, "Invalid value for '--tokens': expected numbers of tokens between commas"),
        (["decode", "--batch", "two"], 2, "Invalid value for '--batch': 'two' is not a valid integer ("),
        (["decode", "--plan", "p.json"], 1, "plan: expected 'default', 'auto', 'shared',"),
        (
            ["decode", "--model", "m.json"],
            1,
            "model: expected one of default, ",
        ),
        (["topology", "--hosts", "a,b", "--model", "eth"], 1, "model: expected default or another of"),
        (["decode", "--batch", "9" * 30], 1, "sizes: expected arrays of at most"),
        (["decode", "--tokens", "9" * 12, "--warmup", "0"], 1, "not enough memory: "),
        (["topology", "--hosts", "\udcff,b", "--root", "2"], 1, "--root: expected a rank from 0 to 1, got 2"),
        (["decode", "--hosts", "\udcff,b"], 1, "hosts: expected 1 label, one per rank, got 2 (\\udcff, b)"),
        (["decode", "--root", "1"], 1, "root: expected None or a rank from 0 to 0, got 1"),
        (
            ["decode", "--hosts", "a,b"],
            1,
            "hosts: expected 1 label, one per rank, got 2 (a, b); mpirun -n 2, or --ranks 2,",
        ),
        (["decode", "--hosts", "a,,b"], 2, "Invalid value for '--hosts': expected labels between commas"),
        (["decode", "--ranks", "0"], 2, "Invalid value for '--ranks'"),
        (["decode", "--json", ""], 2, "Invalid value for '--json': expected a file, or - for standard output"),
        (["decode", "--json", "/nowhere/results.json"], 1, "/nowhere/results.json: No such file or directory"),
        (["topology", "--hosts", "a,b", "--root", "2"], 1, "--root: expected a rank from 0 to 1, got 2"),
        (["topology", "--save", "/nowhere/plan.json"], 1, "/nowhere/plan.json: No such file or directory"),
        (["topology", "--hosts", "a,b", "--save", "/dev/full"], 1, "/dev/full: No space left on device"),
        (["decode", "--json", "/dev/full"], 1, "/dev/full: No space left on device"),
        (["bench", "--csv", "/nowhere/rows.csv"], 1, "/nowhere/rows.csv: No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(treeattn, arguments, status, sentence):
    extra = SMALL if arguments[0] == "decode" and arguments[1].startswith(("--root", "--json", "--backend")) else ()
    ended = treeattn(*arguments[:1], *extra, *arguments[1:])
    assert ended.status == status
    assert ended.err.startswith(f"treeattn: {sentence}")
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--json", "rows.json"], ["--ranks", "2"]])
def test_a_current_folder_that_was_removed_is_named(treeattn, tmp_path, monkeypatch, arguments):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    ended = treeattn("decode", *SMALL, *arguments)
    assert ended.err == "treeattn: current folder: expected one that is there, got one that was removed\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["topology", "--plan", "spiral"], "plan: expected "),
        (["topology", "--model", "spiral"], "model: expected one of "),
        (["topology", "--hosts", "a"], "hosts: expected 2 labels, one per rank, got 1 (a)"),
        (["topology", "--root", "2"], "--root: expected a rank from 0 to 1, got 2"),
        (["decode", "--root", "-1"], "--root: expected a rank from 0 to 1, got -1"),
        (["decode", "--hosts", "a,b,c"], "hosts: expected 2 labels, one per rank, got 3 (a, b, c)"),
        (["decode", "--plan", "spiral"], "plan: expected "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_all_ranks_would_refuse_is_refused_before_any_is_started(treeattn, monkeypatch, arguments, sentence):
    monkeypatch.setattr("treeattn.cli.options.run", lambda *_: pytest.fail("ranks were started"))
    ended = treeattn(*arguments, "--ranks", "2")
    assert ended.status == 1
    assert ended.err.startswith(f"treeattn: {sentence}")
    assert len(ended.err.splitlines()) == 1


class Full(io.StringIO):
    """A disk on which no room is left, as Python tells when what it keeps goes there."""

    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("options", [(), ("--json", "-")], ids=str)
def test_a_full_standard_output_is_named(treeattn, monkeypatch, options):
    monkeypatch.setattr(sys, "stdout", Full())
    ended = treeattn("topology", *options)
    assert ended.status == 1
    assert ended.err == "treeattn: standard output: No space left on device\n"


CLOSED = """
import atexit, os
from treeattn import cli

def look():
    places = [os.path.realpath(f"/proc/self/fd/{each}") for each in (1, 2)]
    os._exit(places != ["/dev/null"] * 2)

atexit.register(look)
cli.main(["topology"])
"""


@pytest.mark.parametrize(
    ("arguments", "completes"),
    [
        (["--help"], ""),
        (["--version"], ""),
        (["topology", "--help"], ""),
        (["plan", "--json", "-"], ""),
        ([], "bash_source"),
        ([], "bash_complete"),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_output_is_named_whoever_writes_to_it(arguments, completes, unbuffered):
    asked = {"_TREEATTN_COMPLETE": completes, "COMP_WORDS": "treeattn d", "COMP_CWORD": "1"}
    with open("/dev/full", "w") as full:
        command, buffers = [sys.executable, "-m", "treeattn", *arguments], {"PYTHONUNBUFFERED": unbuffered}
        pipes = {"stdout": full, "stderr": subprocess.PIPE, "env": {**os.environ, **buffers, **asked}}
        ended = subprocess.run(command, text=True, check=False, **pipes)
    assert ended.returncode == 1
    assert ended.stderr == "treeattn: standard output: No space left on device\n"


def test_what_is_printed_to_closed_streams_goes_to_no_file_opened_later():
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", CLOSED]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


def test_a_surprise_is_one_sentence_and_with_debug_a_traceback(treeattn, monkeypatch):
    monkeypatch.setattr(Workload, "check", lambda self: 1 / 0)
    ended = treeattn("decode")
    assert ended.status == 1
    assert ended.err == "treeattn: unexpected ZeroDivisionError: division by zero (--debug shows where)\n"
    ended = treeattn("decode", "--debug")
    assert ended.status == 1
    assert ended.err.startswith("Traceback (most recent call last):\n")


def test_other_ranks_than_asked_for_are_refused(treeattn, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    ended = treeattn("topology", "--ranks", "2")
    assert ended.status == 1
    assert "treeattn: --ranks: expected 3, the number that a launcher has started, got 2" in ended.err


def test_topology_shows_the_plan_that_these_ranks_follow(mpirun):
    shown = json.loads(mpirun(("-m", "treeattn", "topology"), 2, "--json", "-").stdout)
    job = mpirun(("-m", "treeattn", "decode", *SMALL), 2, "--json", "-")
    assert shown["plan"] == json.loads(job.stdout)["plan"]


def compile_ahead(**settings):
    """Compile a step between hosts with threads for ranks, which sleep while they wait; those of MPI keep cores."""
    state = PartialState.identity((1, 4, 1, 8))

    def body(transport):
        with TreeComm(transport, **settings) as comm:
            for _ in range(3):
                comm.allreduce(state)

    run_ranks(3, body, hosts=["a", "b", "a"], timeout=120)


def test_decode_under_mpirun(mpirun):
    narrow = "--wire-dtype", "float16"
    compile_ahead(wire_dtype="float16")
    job = mpirun(("-m", "treeattn", "decode", *SMALL), 3, "--hosts", "a,b,a", *narrow, "--verify", "--json", "-")
    results = json.loads(job.stdout)
    assert results["wire_dtype"] == "float16"
    assert (results["ranks"], results["hosts"]) == (3, ["a", "b", "a"])
    assert results["counted"] == results["predicted"]
    assert results["counted"]["messages_between"] == 2
    assert results["same_bits"]
    assert 1e-5 < results["verdict"]["error"] <= results["verdict"]["limit"] < 5e-3 * 5
    state = 4 * (8 + 2) * 4
    assert results["paper_bytes_per_rank"] == 2 * 2 * state // 3


def test_decode_by_a_baseline_under_mpirun(mpirun):
    job = mpirun(
        ("-m", "treeattn", "decode", *SMALL, "--algorithm", "ring", "--root", "1", "--verify", "--json", "-"), 3
    )
    results = json.loads(job.stdout)
    assert (results["algorithm"], results["plan"]) == ("ring", "")
    assert results["counted"] == results["predicted"]
    assert results["counted"]["rounds"] == 2
    assert results["verdict"]["error"] <= results["verdict"]["limit"]


def test_ranks_starts_mpirun_and_passes_its_status_on(mpirun):
    # The fixture gives the environment; the one process that it starts is the parent of the ranks.
    job = mpirun(("-m", "treeattn", "doctor", "--ranks", "2", "--json", "-"), 1, launcher=lambda command: command)
    results = json.loads(job.stdout)
    assert results["ranks"] == 2
    assert results["healthy"]
    job = mpirun(("-m", "treeattn", "topology", "--ranks", "2", "--root", "9"), 1, launcher=list, check=False)
    assert job.rc == 1
    assert sum("treeattn:" in line for line in job.stderr.splitlines()) == 1


@pytest.mark.mpi
def test_ranks_import_nothing_from_the_folder_they_are_started_in(tmp_path):
    script = tmp_path / "bin" / "treeattn"
    for module in (tmp_path / "treeattn" / "__init__.py", tmp_path / "click.py"):
        module.parent.mkdir(exist_ok=True)
        module.write_text("raise SystemExit('not this one')")
    script.parent.mkdir()
    script.write_text("from treeattn.cli import main\nmain()\n")
    path = ":".join(each for each in sys.path if each)
    ended = subprocess.run(
        [sys.executable, script, "topology", "--ranks", "2"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "over 2 ranks" in ended.stdout


def test_a_failing_rank_is_named_and_ends_the_others(mpirun):
    job = mpirun("cli_with_one_bad_rank", 3, "decode", *SMALL, check=False)
    assert job.rc == 1
    (line,) = (line for line in job.stderr.splitlines() if "treeattn:" in line)
    assert line.startswith(
        f"[rank 1 of 3, {socket.gethostname()}] treeattn: unexpected RuntimeError: no memory on this"
    )
    assert "Traceback" not in job.stderr


def test_what_all_ranks_refuse_rank_zero_says_once(mpirun):
    job = mpirun(("-m", "treeattn", "topology", "--root", "9"), 2, check=False)
    assert job.rc == 1
    (line,) = (line for line in job.stderr.splitlines() if "treeattn:" in line)
    assert line.startswith("[rank 0 of 2, ")
    assert line.endswith("--root: expected a rank from 0 to 1, got 9")


def test_decode_names_every_algorithm():
    assert ALGORITHM_NAMES.split(", ") == list(ALGORITHMS)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("decode --algorithm ring", "plain,ring plain,ring_query"),
        ("decode --backend re", "plain,reference"),
        ("decode --plan one", "plain,oneshot"),
        ("bench --plan one", "plain,oneshot"),
        ("topology --model pcie", "plain,pcie-ethernet"),
        ("topology --model ./mo", "file,./mo"),  # the shell looks for files itself
        ("plan --gpu h2", "plain,h200"),
    ],
)
def test_a_shell_completes_names(words, offered):
    *before, incomplete = words.split()
    complete = BashComplete(cli.commands, {}, "treeattn", "_TREEATTN_COMPLETE")
    found = complete.get_completions(before, incomplete)
    assert " ".join(map(complete.format_completion, found)) == offered


@pytest.mark.parametrize("looked_at", [True, False])
def test_what_takes_a_while_is_said_where_somebody_looks(monkeypatch, capsys, looked_at):
    monkeypatch.setenv("FORCE_COLOR" if looked_at else "NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with under_way("asking the oracle"):
        pass
    printed = capsys.readouterr()
    assert ("asking the oracle" in printed.err) is looked_at
    assert not printed.out
