# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from palm_mtf.data.batches.shuffle import shuffle
from tests.data.small_sources import repeatable


def whole(size, key):
  return shuffle(np.arange(size), size, key)


# Sizes around powers of two, and any others.
_sizes = st.one_of(
  st.sampled_from([1, 2, 3, 15, 16, 17, 255, 256, 257, 65537]),
  st.integers(1, 2000),
)


@hypothesis.given(_sizes, st.text(max_size=8))
@repeatable(60)
def test_a_shuffle_has_every_element_once(size, key):
  assert np.array_equal(np.sort(whole(size, key)), np.arange(size))


def test_any_part_of_a_shuffle_is_the_same_as_in_the_whole():
  every = whole(1000, "key")
  part = np.array([[999, 0], [500, 7]])
  assert np.array_equal(shuffle(part, 1000, "key"), every[part])


def chi_square(counts) -> float:
  """Returns the distance from uniform draws in standard deviations."""
  expected = counts.sum() / counts.size
  degrees = counts.size - 1
  statistic = np.sum((counts - expected) ** 2) / expected
  return (statistic - degrees) / (2 * degrees) ** 0.5


@pytest.mark.parametrize("size", [31, 100])
def test_elements_and_pairs_go_everywhere_equally_often(size):
  images = np.array(
    [shuffle(np.array([0, 1]), size, f"{key}") for key in range(2000)]
  )
  for places in images.T:
    assert abs(chi_square(np.bincount(places, minlength=size))) < 5
  # The distance of an element from its old neighbor: 1 .. size - 1.
  distance = (images[:, 1] - images[:, 0]) % size
  assert abs(chi_square(np.bincount(distance, minlength=size)[1:])) < 5


def test_a_shuffle_too_large_for_any_memory_costs_no_more():
  size = 10**15
  image = shuffle(np.arange(size - 16, size), size, "key")
  assert len(set(image.tolist())) == 16
  assert (0 <= image).all()
  assert (image < size).all()
