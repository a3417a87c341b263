"""Kernels: arrays in, partial attention states out. They know nothing of ranks."""

if __name__ != "treeattn.kernels":
    raise ImportError(f"import treeattn.kernels, not {__name__}: the folder installs inside the package")

import os

from treeattn.kernels.numba_settings import check_settings

check_settings(os.environ)
