from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.pairwise import pairwise


@pytest.mark.parametrize("sizes", [(3, 2, 2), (3, 3, 2), (2, 2, 2), (4, 3, 3), (3, 5, 3)])
def test_every_pair_of_values_is_there(sizes: tuple[int, int, int]) -> None:
    values = [[f"{name}{number}" for number in range(size)] for name, size in zip("abc", sizes, strict=True)]
    found = pairwise(*values)
    assert len(found) == len(set(found)) == sizes[0] * sizes[1]
    for one, other in combinations(range(3), 2):
        assert {(case[one], case[other]) for case in found} == set(product(values[one], values[other]))


def test_a_third_parameter_with_more_values_is_refused() -> None:
    with pytest.raises(ValueError, match="the fewest values"):
        pairwise("abc", "ab", "abc")
