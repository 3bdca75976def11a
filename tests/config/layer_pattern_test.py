# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""LAYERS lists the variant of each layer; what it cannot mean is one line."""

import pytest

from palm_mtf.config.layer_pattern import (
  read_pattern,
  repeat_pattern,
  write_pattern,
)
from tests.refusals import message_of

MOST = 100


@pytest.mark.parametrize(
  ("text", "names"),
  [
    ("a", "a"),
    ("3*a", "aaa"),
    (" 2 * a , b", "aab"),
    ("2*(a, b)", "abab"),
    ("(a, b), a", "aba"),
    ("2*(2*(a, b), c), 2*b", "ababcababcbb"),
  ],
)
def test_a_pattern_lists_its_layers_in_order(text, names):
  assert read_pattern(text, MOST) == tuple(names)


def test_a_pattern_repeats_for_all_layers_of_the_model():
  assert repeat_pattern("2*a, b", 9, MOST) == tuple("aabaabaab")


@pytest.mark.parametrize(
  ("names", "text"),
  [
    ("aaaa", "a"),
    ("aabaab", "2*a, b"),
    ("aabaabaa", "2*(2*a, b), 2*a"),
    ("aabbb", "2*a, 3*b"),
    ("abaab", "a, b, 2*a, b"),
  ],
)
def test_layers_have_a_short_pattern(names, text):
  assert write_pattern(tuple(names)) == text
  assert repeat_pattern(text, len(names), MOST) == tuple(names)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("a,", "cannot read ''"),
    ("a b", "cannot read 'a b'"),
    ("2 a", "cannot read '2 a'"),
    ("a(b)", "cannot read 'a(b)'"),
    ("2*3*(a, b)", "cannot read '2*3*(a'"),
    ("((a, b)", "cannot read '(a'"),
    ("a, b)", "cannot read 'b)'"),
    ("(a, b) c", "cannot read '(a'"),
    ("-1*a", "cannot read '-1*a'"),
    ("0*a", "an item has 0 layers"),
    ("0*(a, b), c", "an item has 0 layers"),
    ("101*a", "an item has 101 layers; give it at least 1 and at most 100"),
    ("9*(9*(9*(a)))", "an item has 729 layers"),
    ("100*(100*a)", "the list has over 100 layers"),
    ("123456789012*a", "an item has 123,456,789,012 layers; give it at least"),
    ("123456789012*(a, b)", "an item has 246,913,578,024 layers"),
    (f"{'9' * 5000}*a", "an item has too many layers; give it at least 1 and"),
    ("\u0663*a", "cannot read '\u0663*a'"),  # three in Arabic-Indic digits
    ("\u0663*(a, b)", "cannot read '\u0663*(a'"),
    ("\u00e9t\u00e9", "cannot read '\u00e9t\u00e9'; give names of VARIANTS (of "
     "the letters a to z and A to Z, the digits 0 to 9 and \"_\", with no "
     "digit first) and lists of them"),
    ("fen\u00eatre", "cannot read 'fen\u00eatre'; give names of VARIANTS (of"),
    ("2\u00a0*a", "cannot read "),  # a no-break space
  ],
)  # fmt: skip
def test_a_wrong_pattern_is_one_line(text, message):
  said = message_of(read_pattern, text, MOST)
  assert said.startswith("LAYERS = ") and message in said


@pytest.mark.parametrize(
  ("text", "num_layers", "fix"),
  [
    ("5*w, g", 26, "4*(5*w, g), 2*w"),
    ("5*w, g", 7, "5*w, g, w"),
    ("2*(w, g)", 3, "w, g, w"),
  ],
)
def test_a_pattern_that_does_not_divide_the_layers_is_one_line_with_the_fix(
  text, num_layers, fix
):
  said = message_of(repeat_pattern, text, num_layers, MOST)
  given = f"LAYERS = '{text}' and NUM_LAYERS = {num_layers}: a pattern of "
  assert said.startswith(given)
  assert f'set LAYERS = "{fix}", or another NUM_LAYERS.' in said
  assert len(repeat_pattern(fix, num_layers, MOST)) == num_layers
