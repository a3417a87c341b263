"""The backend ``auto``: the first of the others that can run here."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from treeattn.backends.base import Attend, Backend, Capabilities, Prepared
from treeattn.backends.memory import KVMemory
from treeattn.inputs import Args, Spec
from treeattn.state import StateOps

__all__ = ["AutoBackend"]

ORDER = ("nvidia", "amd", "cpu")


class AutoBackend(Backend):
    """Delegates everything, so that callers never branch; states are the chosen backend's."""

    name = "auto"

    @cached_property
    def chosen(self) -> Backend:
        """The backend that it stands for."""
        from treeattn.backends.registry import load  # here: the registry's table names this module

        return next(load(name) for name in ORDER if not load(name).reasons())

    @property
    def ops(self) -> StateOps:  # type: ignore[override]
        """The chosen backend's."""
        return self.chosen.ops

    @property
    def memory(self) -> KVMemory:  # type: ignore[override]
        """The chosen backend's."""
        return self.chosen.memory

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """The chosen backend's."""
        return self.chosen.capabilities

    @property
    def queues(self) -> bool:  # type: ignore[override]
        """The chosen backend's."""
        return self.chosen.queues

    @property
    def runtime(self) -> Any:
        """The card of the chosen backend; without one there are no graphs, which alone ask for it."""
        chosen: Any = self.chosen
        return chosen.runtime

    def reasons(self, spec: Spec | None = None) -> list[str]:
        """Give the chosen backend's."""
        return self.chosen.reasons(spec)

    def prepare(self, spec: Spec) -> Prepared:
        """Give the chosen backend's kernel."""
        return self.chosen.prepare(spec)

    def prepare_attention(self, spec: Spec) -> Attend:
        """Give the chosen backend's."""
        return self.chosen.prepare_attention(spec)

    def energy(self, spec: Spec, args: Args, zeta: Any) -> Any:
        """Give the chosen backend's."""
        return self.chosen.energy(spec, args, zeta)
