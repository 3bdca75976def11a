# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A continuation ends at the same token, however many tokens come at once."""

import itertools

import pytest

from palm_mtf.generation.inference.continuation import (
  ContinuationReader,
  measure_begun_stop,
)
from tests.prefixed_vocabulary import train_prefixed


class Compared(str):
  """Text that counts the reads of its characters."""

  count = 0

  def __getitem__(self, key):
    found = super().__getitem__(key)
    Compared.count += len(found)
    return found


def test_the_longest_suffix_that_begins_a_stop_string_is_found():
  letters = (itertools.product("ab", repeat=n) for n in range(1, 7))
  texts = ["".join(x) for y in letters for x in y]
  for text, stop in itertools.product(texts, texts):
    if stop not in text:
      lengths = range(len(stop))
      expected = max(n for n in lengths if text.endswith(stop[:n]))
      assert measure_begun_stop(text, stop) == expected, (text, stop)


def test_a_long_stop_string_costs_no_more_than_the_text_is_long():
  text = "a" * 2000
  for stop in ("a" * 10**6, "a" * 1999 + "b" + "a" * 10**6):
    Compared.count = 0
    measure_begun_stop(text, Compared(stop))
    assert Compared.count < 10 * len(text)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
  folder = tmp_path_factory.mktemp("vocabulary")
  return train_prefixed("one two three four", folder)


@pytest.mark.parametrize(
  ("stops", "text", "ended"),
  [
    ([], " two three \u00e9 four", "eod"),
    ([" three"], " two", "stop"),
    (["re", "hree \u00e9"], " two th", "stop"),
    (["\u00e9"], " two three ", "stop"),
    ([" two"], "", "stop"),
    (["five", "one"], " two three \u00e9 four", "eod"),
  ],
)
def test_a_text_and_its_end_do_not_depend_on_how_many_tokens_come_at_once(
  vocabulary, stops, text, ended
):
  prompt = vocabulary.encode("one")
  ids = vocabulary.encode("one two three \u00e9 four")[len(prompt) :]
  ids = [*ids, vocabulary.eod_id, *ids]
  found = set()
  for count in range(1, len(ids) + 1):
    reader, shown = ContinuationReader(vocabulary, stops, prompt), ""
    for first in range(0, len(ids), count):
      reader.add(ids[first : first + count])
      assert reader.sure_text().startswith(shown)
      shown = reader.sure_text()
    assert reader.continuation(is_over=False).text == shown
    found.add((reader.continuation(is_over=True), len(reader.ids)))
  ((continuation, num_read),) = found
  assert (continuation.text, continuation.ended) == (text, ended)
  within = [x for x in reader.places if x < len(text)]
  assert continuation.num_tokens == len(within)
  if ended == "eod":
    assert num_read == ids.index(vocabulary.eod_id) + 1


def test_targets_are_decoded_separately_from_their_inputs(vocabulary):
  ids = vocabulary.encode("two three")
  apart = ContinuationReader(vocabulary, [])
  apart.add(ids)
  assert apart.continuation(is_over=True).text == "two three"
  inside = ContinuationReader(vocabulary, [], vocabulary.encode("one"))
  inside.add(ids)
  assert inside.continuation(is_over=True).text == " two three"
  assert inside.continuation(is_over=False).ended == ""
