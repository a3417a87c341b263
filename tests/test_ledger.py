"""The ledger against a model that keeps the owner of every single position in a list."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from treeattn.caching.ledger import Ledger

sizes = st.integers(1, 8)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 40)),
        st.tuples(st.just("prefill"), st.lists(st.integers(0, 9), min_size=8, max_size=8)),
        st.tuples(st.just("truncate"), st.floats(0, 1)),
    ),
    max_size=12,
)


def owners(ledger: Ledger) -> list[int]:
    return [part.owner for part in ledger.segments for _ in range(len(part))]


def run(ledger: Ledger, step: tuple[str, object], model: list[int]) -> list[int]:
    """Take one step; what it dealt is checked to be the positions that follow, and is added to the model."""
    word, value = step
    if word == "truncate":
        length = int(value * len(model))
        ledger.truncate(length)
        return model[:length]
    pieces = word == "prefill" and value[: len(ledger.counts)]
    deal, expected = (ledger.deal_pieces(pieces), sum(pieces)) if pieces else (ledger.deal(value), value)
    dealt = deal.parts
    assert ledger.length == len(model), "it counts once it is taken"
    ledger.take(deal)
    assert [p for part in dealt for p in range(part.start, part.stop)] == list(range(len(model), len(model) + expected))
    return model + [part.owner for part in dealt for _ in range(len(part))]


@given(sizes, st.integers(1, 6), steps)
@settings(deadline=None)
def test_every_position_has_the_owner_it_was_dealt_to(size, block_size, steps):
    ledger, model = Ledger(size, block_size), []
    for step in steps:
        model = run(ledger, step, model)
        assert owners(ledger) == model
        assert ledger.length == len(model)
        assert ledger.counts == tuple(model.count(rank) for rank in range(size))


@given(sizes, st.integers(1, 6), st.lists(st.integers(1, 9), max_size=20))
@settings(deadline=None)
def test_appended_tokens_are_shared_out_to_within_one_block(size, block_size, appends):
    ledger = Ledger(size, block_size)
    for tokens in appends:
        ledger.take(ledger.deal(tokens))
        assert max(ledger.counts) - min(ledger.counts) <= block_size


@given(sizes, st.integers(1, 6), st.lists(st.integers(0, 9), max_size=20))
@settings(deadline=None)
def test_how_appends_are_cut_does_not_matter(size, block_size, appends):
    cut, whole = Ledger(size, block_size), Ledger(size, block_size)
    for tokens in appends:
        cut.take(cut.deal(tokens))
    whole.take(whole.deal(sum(appends)))
    assert owners(cut) == owners(whole)


@given(st.integers(2, 8), st.integers(1, 6), st.integers(0, 7))
@settings(deadline=None)
def test_new_tokens_go_to_the_emptiest_ranks_after_a_lopsided_prefill(size, block_size, heavy):
    ledger = Ledger(size, block_size)
    heavy %= size
    ledger.take(ledger.deal_pieces([1000 if rank == heavy else 0 for rank in range(size)]))
    ledger.take(ledger.deal(block_size * size))
    assert ledger.counts[heavy] == 1000


@given(sizes, st.integers(1, 6), st.integers(0, 30), st.integers(1, 30), st.integers(1, 30))
@settings(deadline=None)
def test_what_follows_a_truncation_does_not_depend_on_what_it_removed(size, block_size, kept, removed, new):
    ahead, behind = Ledger(size, block_size), Ledger(size, block_size)
    for ledger in (ahead, behind):
        ledger.take(ledger.deal(kept))
    ahead.take(ahead.deal(removed))
    for ledger in (ahead, behind):
        ledger.truncate(kept)
        ledger.take(ledger.deal(new))
    assert owners(ahead) == owners(behind)


@given(st.integers(1, 6))
@settings(deadline=None)
def test_a_cut_block_takes_no_more_tokens_so_speculation_spreads_too(block_size):
    ledger = Ledger(2, block_size + 1)
    ledger.take(ledger.deal(block_size + 1))
    ledger.truncate(block_size)
    ledger.take(ledger.deal(1))
    assert ledger.counts == (block_size, 1)
