# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts are read in parts, between the steps of other texts."""

import threading
import time

import pytest

from tests.generation.serving import batcher_test

run, wait_for = batcher_test.run, batcher_test.wait_for


@pytest.mark.parametrize("client", ["client", "other"])
def test_a_long_prompt_is_read_in_parts_between_the_steps_of_others(
  run, client
):
  """A part takes no more time than a call of several steps."""
  decoder = run.decoder
  decoder.part_tokens, decoder.num_slots = 128, 3
  decoder.most, decoder.secs, decoder.token_secs = 10**6, 0.001, 0.0005
  decoder.may_step = threading.Semaphore(0)
  first = run.row(*[5000] * 200, max_tokens=900)
  run.batcher.submit([first])
  run.thread.start()
  while not decoder.events:
    time.sleep(0.001)
  long = run.row(*[5000] * 1000, max_tokens=2, client=client)
  short = run.row(*[5000] * 30, max_tokens=2, client=client)
  run.batcher.submit([long])
  run.batcher.submit([short])
  decoder.may_step.release(10**6)
  run.end()
  assert [len(x.chosen) for x in (first, long, short)] == [900, 2, 2]
  # No text waits for the only prompt, so its parts are larger.
  assert decoder.events[:2] == [128, 72]
  parts = "".join(x if x == "s" else "p" for x in decoder.events[2:])
  read = [x for x in decoder.events[2:] if x != "s"]
  assert sum(read) == 1000 + 30 and max(read) == 40  # 0.02 s
  between = parts.strip("s").split("p")[1:-1]
  # The texts of another client have as much time as the prompts.
  fewest = 1 if client == "client" else 20
  assert all(fewest <= len(x) <= fewest + 1 for x in between[:-1])
  # The short prompt, which comes later, does not wait for the long one.
  slots = [[*step] for step in decoder.read]
  assert next(i for i, x in enumerate(slots) if 2 in x) <= 3 * (fewest + 1)
  assert sum(1 in x for x in slots) == 2


def test_all_prompts_are_read_however_many_short_ones_come(run):
  run.decoder.part_tokens, run.decoder.num_slots = 32, 3
  run.batcher.most_rows = 100
  long = run.row(*[5000] * 300, max_tokens=1)
  others = [run.row(*[5000] * 32, max_tokens=1) for _ in range(40)]
  run.serve(long, *others)
  assert [x.ended for x in (long, *others)] == ["length"] * 41
  # Every second part is of the oldest prompt.
  first = next(i for i, step in enumerate(run.decoder.read) if 0 in step)
  assert first <= 2 * 10


@pytest.mark.parametrize("scores", [False, True])
def test_a_prompt_does_not_wait_for_all_prompts_of_another_client(run, scores):
  """Also if these have slots, and are scored, before it comes."""
  decoder, limit = run.decoder, 0 if scores else 2
  decoder.part_tokens, decoder.num_slots = 128, 9
  run.batcher.most_rows = 9
  many = [
    run.row(*[5000] * 200, max_tokens=limit, scores=scores) for _ in range(8)
  ]
  one = run.row(*[5000] * 200, max_tokens=2, client="other")
  name = "score" if scores else "read_prompts"
  read, begun = getattr(decoder, name), threading.Event()

  def read_first(*args):
    setattr(decoder, name, read)
    run.batcher.submit([one])
    begun.set()
    return read(*args)

  setattr(decoder, name, read_first)
  unread = []
  one.changed = lambda: unread.append(sum(not x.ended for x in many))
  run.batcher.submit(many)
  run.thread.start()
  begun.wait()
  run.end()
  assert len(one.chosen) == 2 and unread[-1] >= 4


def before_first_step(decoder):
  """Returns the tokens of each part of prompts before the first step."""
  return decoder.events[: decoder.events.index("s")]


@pytest.mark.parametrize("clients", [1, 16])
def test_16_short_prompts_are_read_in_4_parts_before_the_first_step(
  run, clients
):
  """So that no text that has begun waits for the others' prompts."""
  decoder = run.decoder
  decoder.part_tokens, decoder.num_slots = 128, 16
  run.batcher.most_rows = 16
  for i in range(16):
    name = f"{i % clients}"
    run.batcher.submit([run.row(*[5000] * 31, max_tokens=2, client=name)])
  run.thread.start()
  run.end()
  assert decoder.events == [128, 128, 128, 16 * 31 - 3 * 128, "s", "s"]
  assert [len(step) for step in decoder.read] == [16, 16]


def test_prompts_that_come_while_the_first_is_read_begin_with_it(run):
  decoder = run.decoder
  decoder.part_tokens, decoder.num_slots = 128, 4
  run.batcher.most_rows = 4
  read = decoder.read_prompts

  def read_first(*args):
    decoder.read_prompts = read
    for _ in range(3):
      run.batcher.submit([run.row(*[5000] * 31, max_tokens=2)])
    return read(*args)

  decoder.read_prompts = read_first
  run.batcher.submit([run.row(*[5000] * 31, max_tokens=2)])
  run.thread.start()
  while not decoder.events:
    time.sleep(0.001)
  run.end()
  assert decoder.events == [31, 93, "s", "s"]


def test_prompts_after_requests_without_texts_begin_together(run):
  decoder = run.decoder
  decoder.part_tokens, decoder.num_slots = 128, 2
  asked = {"max_tokens": 0, "scores": True}
  without = [run.row(*[5000] * 9, **asked) for _ in range(2)]
  run.batcher.submit(without)
  run.thread.start()
  while not all(x.ended for x in without):
    time.sleep(0.001)
  run.batcher.submit([run.row(*[5000] * 101, max_tokens=2) for _ in range(2)])
  run.end()
  assert before_first_step(decoder) == ["p", "p", 128, 2 * 101 - 128]


def test_texts_wait_for_at_most_2048_tokens_of_others(run):
  decoder = run.decoder
  decoder.part_tokens, decoder.num_slots = 128, 30
  run.batcher.most_rows = 30
  run.serve(*[run.row(*[5000] * 200, max_tokens=2) for _ in range(30)])
  assert 2048 <= sum(before_first_step(decoder)) < 2048 + 128


@pytest.mark.parametrize("part_tokens", [0, 128])
def test_a_short_prompt_does_not_wait_for_a_long_one(run, part_tokens):
  decoder = run.decoder
  decoder.part_tokens, decoder.num_slots = part_tokens, 2
  short, long = run.row(*[5000] * 31), run.row(*[5000] * 1000)
  run.serve(short, long)
  assert [[*step] for step in decoder.read[:1]] == [[0]]


def test_parts_of_short_prompts_take_up_to_three_times_as_long(run):
  """So that short prompts seldom wait for a step of others."""
  decoder = run.decoder
  decoder.part_tokens, decoder.num_slots = 128, 5
  run.batcher.most_rows = 5
  decoder.secs, decoder.token_secs = 0.001, 0.001
  decoder.may_step = threading.Semaphore(1)
  first = run.row(*[5000] * 31, max_tokens=90)
  run.batcher.submit([first])
  run.thread.start()
  wait_for(first, 1)
  short = [run.row(*[5000] * 31, max_tokens=2) for _ in range(3)]
  run.batcher.submit([*short, run.row(*[5000] * 300, max_tokens=2)])
  decoder.may_step.release(10**6)
  run.end()
  _, *parts = [x for x in decoder.events if x != "s"]
  assert 58 <= parts[0] <= 60 and sum(parts[:2]) == 3 * 31
  assert max(parts[2:]) <= 20 and sum(parts[2:]) == 300


def test_prompts_of_many_clients_wait_less_for_the_texts_of_one(run):
  """Four clients that wait have four times as much time as the one."""
  decoder = run.decoder
  decoder.part_tokens, decoder.num_slots = 128, 9
  decoder.most, decoder.secs, decoder.token_secs = 10**6, 0.001, 0.001
  decoder.may_step = threading.Semaphore(1)
  first = run.row(*[5000] * 31, max_tokens=900)
  run.batcher.submit([first])
  run.thread.start()
  wait_for(first, 1)
  for i in range(4):
    run.batcher.submit([run.row(*[5000] * 900, max_tokens=9, client=f"{i}")])
  decoder.may_step.release(10**6)
  run.end()
  events = "".join(x if x == "s" else "p" for x in decoder.events)
  between = [len(x) for x in events.split("p")[2:10]]
  assert set(between) == {5}  # parts take 0.02 s
