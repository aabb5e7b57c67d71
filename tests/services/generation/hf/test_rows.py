"""Which row a prompt gets, and what it finds there."""

from array import array

import pytest

from offbeat.services.generation.hf.rows import CHUNK, CacheRow, RowStore

FIRST = list(range(3 * CHUNK))


def take(store: RowStore, prompt: list[int]) -> tuple[CacheRow, int]:
    tokens = array("i", prompt)
    return store.take(tokens, store.find(tokens))


def finish(store: RowStore, row: CacheRow, tokens: list[int]) -> None:
    """All tokens but the last are computed: that one was only sampled."""
    row.computed = len(tokens) - 1
    store.keep(row, tokens)


def test_the_next_turn_of_a_session_continues_in_its_row() -> None:
    store = RowStore(4, shares_prefixes=True)
    row, copied = take(store, FIRST)
    assert (row.computed, copied) == (0, 0)
    finish(store, row, [*FIRST, 7, 8, 9])
    following, copied = take(store, [*FIRST, 7, 8, 9, 1, 2])
    assert (following, copied) == (row, 0)
    assert following.computed == len(FIRST) + 2


def test_siblings_copy_what_they_share() -> None:
    store = RowStore(4, shares_prefixes=True)
    row, _ = take(store, [*FIRST, 1])
    row.computed = len(FIRST) + 1
    sibling, copied = take(store, [*FIRST, 2, 3])
    assert sibling.number != row.number
    assert copied == sibling.computed == len(FIRST)


def test_a_prompt_that_was_seen_whole_computes_its_last_token() -> None:
    store = RowStore(4, shares_prefixes=True)
    row, _ = take(store, FIRST)
    finish(store, row, [*FIRST, 5])
    again, copied = take(store, FIRST)
    assert again.number != row.number
    assert copied == again.computed == len(FIRST) - 1


def test_what_is_not_computed_yet_is_no_prefix() -> None:
    store = RowStore(4, shares_prefixes=True)
    row, _ = take(store, FIRST)
    match = store.find(array("i", [*FIRST, 4]))
    assert match is not None
    assert (match.row, match.length, match.usable) == (row, len(FIRST), 0)


def test_the_least_recently_used_session_loses_its_row() -> None:
    store = RowStore(2, shares_prefixes=True)
    sessions = [[each, *FIRST] for each in range(3)]
    rows: list[int] = []
    for tokens in (sessions[0], sessions[1], sessions[0], sessions[2]):
        row, _ = take(store, tokens)
        rows.append(row.number)
        finish(store, row, [*tokens, 9])
        tokens.append(9)
    assert rows == [0, 1, 0, 1]
    assert store.find(array("i", [*sessions[1], 4])) is None
    assert store.find(array("i", [*sessions[0], 4])) is not None
    assert store.num_free == 2


def test_the_longest_prefix_wins() -> None:
    store = RowStore(8, shares_prefixes=True)
    for more in ([1], [1, 2, 3], [1, 2]):
        row, _ = take(store, [*FIRST, *more])
        finish(store, row, [*FIRST, *more, 9])
    match = store.find(array("i", [*FIRST, 1, 2, 3, 4]))
    assert match is not None
    assert match.usable == len(FIRST) + 3


@pytest.mark.parametrize("how", ["hide", "drop"])
def test_rows_of_older_weights_are_not_found(how: str) -> None:
    store = RowStore(2, shares_prefixes=True)
    row, _ = take(store, FIRST)
    row.computed = len(FIRST)
    if how == "hide":
        store.hide([row])
        store.free(row)
    else:
        finish(store, row, FIRST)
        store.drop_idle()
    assert store.find(array("i", [*FIRST, 1])) is None
    assert store.num_free == 2


def test_without_sharing_nothing_is_kept() -> None:
    store = RowStore(2, shares_prefixes=False)
    row, _ = take(store, FIRST)
    finish(store, row, FIRST)
    assert store.find(array("i", [*FIRST, 1])) is None
    assert store.num_free == 2
