"""The contract of a backend: read this to write one.

A backend says which kernels run for a call, and how the states they make are merged, finished and moved. To add one:

1. Subclass `Backend`. Set ``name``, the word that ``backend=`` takes, and ``capabilities``.
2. Write `reasons`: every reason why it can't run here, or can't run this call, each one sentence with the remedy
   where it is known. An empty list means that it can. Never a bare boolean: the reasons are what a user reads. Refuse
   a ``spec.on_device`` that is not yours: its arrays are in memory that the CPU must not touch.
3. Write `prepare`: choose kernels for a `treeattn.arguments.spec.Spec` (shapes, dtypes, strides, options; hashable,
   so results may be cached by it) and return a function of the call's `treeattn.arguments.spec.Args`, whose
   docstrings say what is set when. It is called once per decode step with arrays that match the spec; only the number
   of keys may differ from step to step. It may assume that everything was validated: axes are (batch, heads, tokens,
   width) whatever the layout, arrays may be read-only, have any strides and no keys at all. It must not use a key or
   value that is hidden, whatever it holds. What the options mean and in which order they apply, `treeattn.attention`
   says; ``kernels/reference.py`` does it in a hundred plain lines.
4. Set ``ops`` to an object with the methods of `treeattn.backends.StateOps`, which says how a packed state is laid out;
   `treeattn.backends.HostOps` has them for states that are NumPy arrays. They merge and finish packed states, and
   take them to the wire and back (``prepare_pack``, ``prepare_unpack``): there a state is relative to a whole power of
   two, and between the two it is the host that merges. The tree never looks inside a state in any other way. All of it
   must give the bits of `HostOps`, since ranks with different backends may meet. `treeattn.backends.StagedOps`
   does it for states elsewhere, by copies to the host and back: then ``name``, ``empty``, ``fill_identity``,
   ``to_host`` and ``from_host`` are left to write, and what is worth doing on the device. A row with l = 0 saw no key,
   and its o may be anything.
5. States that are no NumPy arrays need ``shape`` (a tuple), ``dtype`` (NumPy's) and ``nbytes``, and no more. What
   ``finish`` gives is for the caller: NumPy arrays, or ones with CuPy's ``astype``, ``swapaxes`` and ``get``.
6. Keep to stream order, where the device has streams: everything runs on the stream that is the caller's current one
   when a function is called, and a result is ready for whoever uses it on that stream; say ``queues = True`` then.
   Nothing waits for a device but ``to_host`` and ``from_host``, one of which the communicator calls before MPI sees any
   memory: they wait for that one stream, by event. ``ops.direct`` is "", or names device memory that a GPU-aware MPI
   may be given as it is, with the methods of `treeattn.execution.direct.DirectOps`; those of `treeattn.gpu.cards.Card`
   let cards be joined by NCCL, and those of `treeattn.gpu.peer_memory.PeerCard` let them read each other's memory.
7. Override `prepare_attention` where one call is faster at both computing and finishing, with the same bits, and
   `energy` where arrays live on a device; host arrays are served by the default.
8. Set ``memory`` to an object with the methods of `treeattn.backends.KVMemory` where your kernels read keys and
   values elsewhere than in host memory: `treeattn.ShardedKVCache` then keeps its share there. It allocates rows and
   writes tokens to them, and no more: who holds which token, when rows must grow and what to do when there is no room
   for them is the cache's business, the same for all backends. Writing is an operation of its own because it converts
   types, from arrays that may be anywhere, and because a copy over the host would cost more than the decode step that
   follows it.
9. Name it in the table of ``backends/registry.py``, or, from another package, in the entry-point group
   ``treeattn.backends``, the class under the backend's name; in ``pyproject.toml``::

       [project.entry-points."treeattn.backends"]
       mine = "my_package:MyBackend"

   It is made without arguments. A plug-in that can't be loaded is left out, with a warning. ``backend="mine"`` takes
   it; ``backend="auto"``, and calls that name none, know the built-in ones alone.
10. Subclass ``treeattn.testing.BackendConformance`` in your tests and inherit every check.

``mpi_examples/custom_backend.py`` is a whole one for arrays of the host, `treeattn.testing.FakeBackend` one whose
states NumPy can't see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from treeattn.backends.memory import HostMemory, KVMemory
from treeattn.state_ops import StateOps

if TYPE_CHECKING:
    from treeattn.arguments.spec import Args, Spec

__all__ = ["Attend", "Backend", "Capabilities", "Prepared", "StateOps"]

Prepared: TypeAlias = "Callable[[Args, Any], Any]"
"""``prepared(args, out)``: fills the packed buffer ``out`` (B, Hq, Tq, Dv + 2) with the state of this call's keys."""

Attend: TypeAlias = "Callable[[Args, Any, bool], tuple[Any, Any]]"
"""``attend(args, sink, return_lse)``: gives out and lse of a call whose keys are all there are.

``sink`` is as `StateOps.finish` takes it. ``out`` (B, Hq, Tq, Dv) is of the state's dtype or q's; ``lse`` (B, Hq, Tq)
is of the state's, and may be None where it is not wanted.
"""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do at all; what it can't do with one call, `Backend.reasons` says.

    Parameters
    ----------
    dtypes : tuple of str
        Types of q, k and v that it computes with, and that a cache may hold; the conformance suite tests each.
    graphs : bool
        Whether its kernels can be captured, as `treeattn.graphs.capture` does; it asks for ``backend.runtime.capture``,
        as `treeattn.backends.runtime.Runtime` has it.
    """

    dtypes: tuple[str, ...] = ("float32", "float64", "float16", "bfloat16")
    graphs: bool = False


class Backend(ABC):
    """One family of hardware, or one way to use it."""

    name: str
    ops: StateOps
    memory: KVMemory = HostMemory()
    capabilities: Capabilities = Capabilities()
    note: str = ""
    """What a user should know of it even where it can run; ``treeattn doctor`` prints it."""
    queues = False
    """Whether a prepared call may return before the state is there, as a GPU's does, with the CPU free for messages."""

    @abstractmethod
    def reasons(self, spec: Spec | None = None) -> list[str]:
        """Say why this backend can't run at all, or can't run ``spec``; an empty list means it can."""

    @abstractmethod
    def prepare(self, spec: Spec) -> Prepared:
        """Give a function that computes partial states for calls described by ``spec``."""

    def prepare_attention(self, spec: Spec) -> Attend:
        """Give a function that computes and finishes calls described by ``spec``, whose keys are all there are."""
        prepared, ops = self.prepare(spec), self.ops

        def attend(args: Args, sink: Any, return_lse: bool) -> tuple[Any, Any]:
            packed = ops.empty(spec.packed_shape, spec.state_dtype)
            prepared(args, packed)
            return ops.finish(packed, sink)

        return attend

    def energy(self, spec: Spec, args: Args, zeta: Any) -> Any:
        """Compute ``log sum exp(logit + zeta.v)``, (B, Hq, Tq) of the state's dtype; zeta is (B, Hq, Tq, Dv)."""
        from treeattn.kernels.energy import energy  # here, so that naming a backend loads no kernel

        return energy(spec, args, zeta)
