"""Plans of all kinds, for hypothesis to draw from."""

from __future__ import annotations

from hypothesis import strategies as st

from treeattn.planning.plan import Radices


def radices_of(radix, leaders):
    """Radices of any size that ``radix`` draws on each level, by every scheme, with so many leaders of a host."""
    return st.builds(
        Radices,
        radix | st.just("shared"),
        radix,
        st.booleans(),
        radix | st.just("skip"),
        st.sampled_from(["exchange", "reduce"]),
        st.sampled_from([*leaders, "all"]),
    )
