"""The process of one library and one case: it makes its arrays, then takes samples whenever it is told to.

One line of JSON as the argument says what to do. Every line on standard input is a number of seconds; every line
written is JSON: first what was chosen and how far off it is, then the samples taken in each of those times.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import astuple
from typing import Any

import numpy as np
from kernel_cases import Case, make_queries, make_sets, options_of, words_of
from kernel_peers import PEERS, Form, UnsupportedError, extra_bytes
from kernel_samples import Probe, Sampler

LINES = os.fdopen(os.dup(1), "w", buffering=1)
"""Standard output as it was: what libraries print goes to standard error from here on."""

TRIES = 5
"""Times that each form is tried, in turns; its shortest counts."""


def main(case: Case, peer: str, threads: int) -> None:
    os.dup2(2, 1)
    q, sets = make_queries(case), make_sets(case)
    if peer not in ("treeattn", "prepared") and not case.plain:
        return say(absent="only treeattn's own rows have this option")
    memory = {"extra_bytes": extra_bytes(case, q, *sets[0])} if peer == "treeattn" else {}
    try:
        forms = PEERS[peer](case, q, sets, threads)
        name, form, error = fastest(forms, case, q, sets)
    except (UnsupportedError, ImportError) as reason:
        return say(absent=str(reason))
    sampler = Sampler(form.call, Probe([words_of(case, *each) for each in sets], threads), len(sets))
    say(form=name, error=error, **memory)
    for line in sys.stdin:
        say(samples=[astuple(sample) for sample in sampler.take(float(line))])
    return None


def say(**found: Any) -> None:
    print(json.dumps(found), file=LINES)


def fastest(forms: dict[str, Form], case: Case, q: Any, sets: Any) -> tuple[str, Form, float]:
    """Choose the fastest form of those that work; give its largest error too."""
    answers, reasons = {}, []
    for name, form in forms.items():
        try:
            answers[name] = form.answer(0)
        except Exception as reason:
            reasons.append(f"{name}: {type(reason).__name__}: {reason}".split("\n")[0])
    if not answers:
        raise UnsupportedError("; ".join(reasons))
    tried = [(timed(forms[name], i % len(sets)), name) for i in range(TRIES) for name in answers if len(answers) > 1]
    name = min(tried)[1] if tried else next(iter(answers))
    return name, forms[name], largest_error(answers[name], case, q, *sets[0])


def timed(form: Form, i: int) -> float:
    start = time.perf_counter()
    form.call(i)
    return time.perf_counter() - start


def largest_error(out: Any, case: Case, q: Any, k: Any, v: Any) -> float:
    """Largest error over the largest output, on the first KV head, against float64."""
    from treeattn.testing.oracle import dense

    group = case.q_heads // case.kv_heads
    options = options_of(case)
    options |= {name: options[name][:, :1] for name in ("k_scale", "v_scale") if name in options}
    right = dense(q[:, :group], k[:, :1], v[:, :1], **options).out
    return float(np.max(np.abs(out[:, :group].astype(np.float64) - right)) / np.max(np.abs(right)))


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    main(Case(**task["case"]), task["peer"], task["threads"])
