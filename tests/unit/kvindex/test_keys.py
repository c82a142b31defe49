"""The table of keys against a dict, with keys that crowd single parts and single places of it."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.kvindex.keys import NONE, Keys

# 256 parts by the last byte; homes by the bits above it, the last of which lie at a part's end for any of its sizes.
KEYS = st.builds(lambda part, home: part | home << 8, st.integers(0, 1), st.integers(-40, 4))
STEPS = st.lists(st.tuples(st.booleans(), st.lists(KEYS, min_size=1, max_size=12, unique=True)), max_size=40)


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_every_key_keeps_its_number_and_is_found_until_it_is_removed(steps):
    keys, known = Keys(), {}
    for removes, some in steps:
        if removes:
            for key in set(some) & known.keys():
                keys.remove(known.pop(key))
        else:
            numbers = keys.numbers(some)
            assert [known.setdefault(key, number) for key, number in zip(some, numbers, strict=True)] == numbers
        assert len(set(known.values())) == len(known) == len(keys)
        assert {key: keys.find(key) for key in known} == known
    for home, part in itertools.product(range(-40, 5), (0, 1)):
        assert keys.find(part | home << 8) == known.get(part | home << 8, NONE)


def test_a_key_that_comes_twice_in_a_batch_has_one_number():
    keys = Keys()
    first, second, again = keys.numbers([7, 8, 7])
    assert first == again != second
    assert len(keys) == 2


def test_finds_many_keys_in_any_parts():
    keys = Keys()
    wanted = [hash(number.to_bytes(8, "little")) for number in range(100_000)]
    numbers = keys.numbers(wanted)
    assert [keys.find(key) for key in wanted] == numbers == list(range(2, 100_002))
    assert not any(keys.find(key ^ 1 << 40) for key in wanted)
