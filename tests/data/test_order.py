from __future__ import annotations

import numpy as np
import pytest

from lit_stable.data.order import Permutation


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 100, 255, 256, 257, 1000, 4097, 65_536, 100_003])
def test_every_index_appears_exactly_once(size):
    assert np.array_equal(np.sort(Permutation(size, key=3)(np.arange(size))), np.arange(size))


def test_order_is_uncorrelated_with_the_index():
    images = Permutation(100_000, key=1)(np.arange(100_000))
    # The standard deviation of the correlation of a random order is 1/sqrt(n) = 0.003.
    assert abs(np.corrcoef(np.arange(100_000), images)[0, 1]) < 0.015
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.015


def test_first_image_is_uniform_over_keys():
    first = [int(Permutation(10, key)(np.arange(1))[0]) for key in range(2000)]
    counts = np.bincount(first, minlength=10)
    # Chi-square with 9 degrees of freedom exceeds 27.9 once in a thousand.
    assert ((counts - 200) ** 2 / 200).sum() < 27.9


def test_another_key_gives_an_unrelated_order():
    first, second = (Permutation(10_000, key)(np.arange(10_000)) for key in (1, 2))
    assert (first == second).sum() < 10  # 1 is expected by chance
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_a_hundred_billion_items_are_reached_at_any_index():
    size = 10**11
    indices = np.array([0, 1, 2, 12_345_678_901, size - 2, size - 1])
    images = Permutation(size, key=5)(indices)
    assert len(set(images.tolist())) == len(indices)
    assert images.min() >= 0
    assert images.max() < size


def test_images_do_not_depend_on_what_else_is_asked():
    permutation = Permutation(1000, key=9)
    assert permutation(np.array([17, 999]))[1] == permutation(np.array([999]))[0]


@pytest.mark.parametrize("size", [0, -1, (1 << 62) + 1])
def test_size_out_of_range_is_refused(size):
    with pytest.raises(ValueError, match=rf"size={size}\): must be between 1 and 2\^62"):
        Permutation(size, key=0)


def test_order_is_pinned():
    """An upgrade that changes these values changes the data order of every run that resumes."""
    assert Permutation(1000, key=1)(np.arange(6)).tolist() == [32, 782, 785, 955, 228, 690]
    assert Permutation(10**11, key=1)(np.array([10**11 - 1])).tolist() == [88_649_194_746]
