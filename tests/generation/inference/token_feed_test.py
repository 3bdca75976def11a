# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps in C++ send the tokens that their call returns."""

import contextlib

import pytest

from palm_mtf.generation.inference.token_feed import TokenFeed
from palm_mtf.native.operations import operations
from tests.generation.inference import slot_decoder_test
from tests.generation.inference.slot_decoder_test import (
  DRAWN,
  GREEDY,
  PROMPTS,
  text_of,
)

checkpoint, decoder = slot_decoder_test.checkpoint, slot_decoder_test.decoder
SETTINGS = [DRAWN, GREEDY, DRAWN, DRAWN, GREEDY]
pytestmark = pytest.mark.skipif(
  operations() is None, reason="there is no C++ compiler"
)


def insert(decoder):
  for i, prompt in enumerate(PROMPTS):
    decoder.insert(i, [0, *prompt])


def steps(decoder, feed, chosen, limit=8):
  """Returns the next tokens of all prompts after those `chosen`."""
  texts = {
    i: text_of(i, x, SETTINGS[i], limit - len(x))
    for i, x in enumerate(chosen)
    if len(x) < limit
  }
  return decoder.steps(texts, limit, wants_log_probs=False, feed=feed)


def received(feed):
  """Returns {slot: [(number of a token in its text, token), ...]}."""
  found = {}
  while records := [*feed.read()]:
    for slot, place, token in records:
      found.setdefault(slot, []).append((place, token))
  return found


def numbered(found):
  return {
    slot: [(i, x.token) for i, x in enumerate(chosen)]
    for slot, chosen in found.items()
  }


def test_a_call_sends_the_tokens_that_it_returns(decoder):
  insert(decoder)
  plain = steps(decoder, None, [[]] * len(PROMPTS))
  insert(decoder)
  feed = TokenFeed()
  found = steps(decoder, feed, [[]] * len(PROMPTS))
  assert found == plain
  assert received(feed) == numbered(found)


def test_a_call_that_is_told_to_end_ends_after_a_step(decoder):
  insert(decoder)
  expected = steps(decoder, None, [[]] * len(PROMPTS))
  insert(decoder)
  feed, calls = TokenFeed(), 0
  found = {i: [] for i in range(len(PROMPTS))}
  while any(len(x) < 8 for x in found.values()):
    feed.end_call()
    new = steps(decoder, feed, [*found.values()])
    assert all(new.values())
    calls += 1
    for slot, chosen in new.items():
      found[slot] += chosen
  assert found == expected
  assert received(feed) == numbered(expected)
  assert calls > 1
  # A request to end a call that has ended changes no later call.
  feed.end_call()
  feed.begin_call()
  insert(decoder)
  assert steps(decoder, feed, [[]] * len(PROMPTS)) == expected


def test_a_call_does_not_wait_for_room_in_the_socket(decoder):
  feed = TokenFeed()
  with contextlib.suppress(BlockingIOError):
    while feed._theirs.send(bytes(12)):
      pass
  insert(decoder)
  found = steps(decoder, feed, [[]] * len(PROMPTS))
  assert all(len(x) == 8 for x in found.values())
  feed.drop_tokens()
  insert(decoder)
  assert steps(decoder, feed, [[]] * len(PROMPTS)) == found
  assert received(feed) == numbered(found)
