"""Numba's settings with which there are no kernels: with some it can't be imported, with others LLVM ends the process.

They are looked at before numba is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from treeattn.errors import InputError

__all__ = ["check_settings"]

POSSIBLE = {
    "NUMBA_DISABLE_JIT": ("0 or nothing, since kernels are machine code", r"\s*0*\s*"),
    "NUMBA_NUM_THREADS": ("a positive number", r"\s*0*[1-9]\d*\s*"),
    "NUMBA_CPU_FEATURES": (
        "features like +avx2,-avx512f, and neither -sse nor -sse2",
        r"((?!-sse2?(,|$))[+-][^\s,+-][^\s,]*(,|$))*",
    ),
}
"""What is possible, in words and as a pattern."""


def check_settings(environ: Mapping[str, str]) -> None:
    """Refuse impossible settings.

    Raises
    ------
    InputError
        There is one.
    """
    for name, (expected, pattern) in POSSIBLE.items():
        if name in environ and not re.fullmatch(pattern, environ[name]):
            raise InputError.of(name, expected=expected, got=repr(environ[name]))
