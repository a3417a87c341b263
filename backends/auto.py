"""The backend ``auto``: the first of the others that can run here."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from treeattn.arguments.spec import Args, Spec
from treeattn.backends.base import Attend, Backend, Prepared

__all__ = ["AutoBackend"]

ORDER = ("nvidia", "amd", "cpu")


def _of_chosen(name: str) -> Any:
    """Give an attribute that is the chosen backend's."""
    return property(lambda self: getattr(self.chosen, name), doc="The chosen backend's.")


class AutoBackend(Backend):
    """Delegates everything, so that callers never branch; states are the chosen backend's."""

    name = "auto"

    @cached_property
    def chosen(self) -> Backend:
        """The backend that it stands for."""
        from treeattn.backends.registry import load  # here: the registry's table names this module

        return next(load(name) for name in ORDER if not load(name).reasons())

    ops = _of_chosen("ops")
    memory = _of_chosen("memory")
    capabilities = _of_chosen("capabilities")
    queues = _of_chosen("queues")
    runtime = _of_chosen("runtime")  # without a card there is none, and there are no graphs, which alone ask for it

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
