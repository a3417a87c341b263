"""Keeps the repository itself off the import path, where ``python -m pytest`` puts it.

`transformers` asks whether a package ``kernels`` can be imported, and would find our folder of that name.
"""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != REPOSITORY]
