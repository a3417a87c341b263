"""Which plan a payload takes on one communicator: as the user says, by a model, or by a model measured on first use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treeattn.calibration.timing import Calibration, calibrate
from treeattn.costs.choosing import choose_radices
from treeattn.execution.window import Window
from treeattn.planning.plan import Plan
from treeattn.planning.planner import plan_allreduce, plan_reduce
from treeattn.planning.radices import Radices
from treeattn.ranks.settings import Settings
from treeattn.steps.channel import Channel
from treeattn.wire_form import WireForm

__all__ = ["Policy"]

ROW = 130
"""Numbers of a head row of the states that are measured, whose bytes are those of the payload to within a row."""


class Policy:
    """By what the plans of one communicator are chosen.

    Parameters
    ----------
    channel : Channel
    settings : Settings
    near : sequence of int
        Ranks near their host's network card.
    notes : dict
        What was measured before on the same ranks, by their hosts; what is measured here is added.
    """

    def __init__(self, channel: Channel, settings: Settings, near: Sequence[int], notes: dict[Any, Any]) -> None:
        self._channel, self._near, self._notes = channel, tuple(near), notes
        self._given, self._model, self.deterministic = settings.radices, settings.model, settings.deterministic
        self._measures = settings.measures

    @property
    def calibration(self) -> Calibration | None:
        """What was measured, once it was."""
        return self._notes.get(self._channel.hosts) if self._measures else None

    def __str__(self) -> str:
        return "auto" if self._measures else "default" if self._given is None else str(self._given)

    def radices(self, payload_bytes: int, shared: bool) -> Radices:
        """Give the radices for states of so many bytes; ``shared`` says if ranks of a host share memory for them."""
        model = self._model if self.calibration is None else self.calibration.model
        radices = self._given or choose_radices(self._channel.hosts, payload_bytes, shared=shared, model=model)
        return radices if shared or radices.inside != "shared" else replace(radices, inside=None)

    def plan(self, payload_bytes: int, root: int | None, shared: bool) -> Plan:
        """Give the plan for states of so many bytes, to all ranks or to ``root``."""
        radices, hosts = self.radices(payload_bytes, shared), self._channel.hosts
        if root is None:
            return plan_allreduce(hosts, radices, deterministic=self.deterministic, near=self._near)
        return plan_reduce(hosts, root, radices, deterministic=self.deterministic, near=self._near)

    @property
    def has_to_measure(self) -> bool:
        """Whether a model is to be measured first."""
        return self._measures and self._channel.hosts not in self._notes

    def measure(self, payload_bytes: int, window: Window | None) -> None:
        """Measure a model in the window of this rank's host; collective."""
        form = WireForm((1, max(1, payload_bytes // (4 * ROW)), 1, ROW), "float32")
        self._notes[self._channel.hosts] = calibrate(self._channel, window, form)
