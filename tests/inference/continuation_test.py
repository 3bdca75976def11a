# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The end of a text that may become a stop string is found in linear time."""

import itertools

from palm_mtf.inference.continuation import begun_stop


class Compared(str):
  """Text that counts how often one of its characters is read."""

  count = 0

  def __getitem__(self, key):
    found = super().__getitem__(key)
    Compared.count += len(found)
    return found


def test_the_longest_end_that_begins_a_stop_string_is_found():
  texts = [
    "".join(x) for n in range(1, 7) for x in itertools.product("ab", repeat=n)
  ]
  for text, stop in itertools.product(texts, texts):
    if stop not in text:
      lengths = range(len(stop))
      expected = max(n for n in lengths if text.endswith(stop[:n]))
      assert begun_stop(text, stop) == expected, (text, stop)


def test_a_long_stop_string_costs_no_more_than_the_text_is_long():
  text = "a" * 2000
  for stop in ("a" * 10**6, "a" * 1999 + "b" + "a" * 10**6):
    Compared.count = 0
    begun_stop(text, Compared(stop))
    assert Compared.count < 10 * len(text)
