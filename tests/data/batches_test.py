# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import hashlib

import numpy as np
import pytest

from palm_mtf.data.batches import Batches, validation_batches
from palm_mtf.errors import UserError

LENGTH = 8


def tokens(num_sequences, remainder=3):
  return np.arange(num_sequences * LENGTH + remainder, dtype=np.uint16) + 1


def batches(num_sequences=100, batch_size=16, seed=0, **settings):
  return Batches(
    tokens(num_sequences, **settings), LENGTH, batch_size=batch_size, seed=seed
  )


def digest(batch) -> str:
  content = batch["inputs"].tobytes() + batch["targets"].tobytes()
  return hashlib.sha256(content).hexdigest()


def test_inputs_are_targets_moved_right_with_zero_first():
  batch = batches().batch(3)
  assert batch["inputs"].shape == batch["targets"].shape == (16, LENGTH)
  assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
  assert not batch["inputs"][:, 0].any()
  assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


def test_an_epoch_has_every_token_once_but_the_remainder():
  data = batches(num_sequences=48, batch_size=16)
  epoch = np.concatenate([data.batch(i)["targets"] for i in range(3)])
  assert np.array_equal(np.sort(epoch.ravel()), tokens(48, remainder=0))
  assert np.array_equal(np.sort(epoch[:, 0]), tokens(48)[:-3:LENGTH])


def test_epochs_wrap_inside_a_batch():
  data = batches(num_sequences=5, batch_size=2)
  firsts = np.concatenate([data.sequence_indices(i) for i in range(5)])
  for epoch in (firsts[:5], firsts[5:]):
    assert sorted(epoch) == [0, 1, 2, 3, 4]


def test_a_batch_may_hold_several_epochs():
  indices = batches(num_sequences=3, batch_size=10).sequence_indices(0)
  assert [sorted(indices[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3


def test_every_epoch_and_every_seed_has_its_own_order():
  orders = {
    batches(num_sequences=64, batch_size=64, seed=seed)
    .sequence_indices(epoch)
    .tobytes()
    for seed in range(10)
    for epoch in range(10)
  }
  assert len(orders) == 100


def test_a_step_is_the_same_in_any_order_and_from_a_fresh_start():
  data = batches()
  forward = [digest(data.batch(step)) for step in range(20)]
  backward = [digest(data.batch(step)) for step in reversed(range(20))]
  fresh = [digest(batches().batch(step)) for step in range(20)]
  assert forward == backward[::-1] == fresh
  assert len(set(forward)) == 20


def test_sequence_numbers_mean_the_same_under_any_batch_size():
  def numbers(batch_size):
    data = batches(num_sequences=50, batch_size=batch_size)
    steps = 120 // batch_size
    return np.concatenate([data.sequence_indices(i) for i in range(steps)])

  for batch_size in (1, 4, 60, 120):
    assert np.array_equal(numbers(batch_size), numbers(24))


def test_a_step_far_away_is_reached_without_the_steps_before():
  data = batches()
  far = data.batch(10**9)
  assert digest(far) == digest(batches().batch(10**9))
  assert digest(far) != digest(data.batch(10**9 + 1))


def test_batches_never_change():
  # A resumed run depends on these very numbers.
  assert batches(10, 4, seed=1).sequence_indices(7).tolist() == [7, 8, 9, 0]


def test_less_than_one_sequence_is_an_error():
  with pytest.raises(UserError, match=r"7 tokens: less than one sequence"):
    Batches(tokens(0, remainder=7), LENGTH, batch_size=1, seed=0)


def held_out(num_sequences, batch_size, eval_batches):
  return list(
    validation_batches(
      tokens(num_sequences),
      LENGTH,
      batch_size=batch_size,
      eval_batches=eval_batches,
    )
  )


def test_validation_batches_are_the_first_sequences_in_order():
  found = held_out(20, batch_size=3, eval_batches=4)
  targets = np.concatenate([batch["targets"] for batch in found])
  assert np.array_equal(targets.ravel(), tokens(20)[: 12 * LENGTH])
  assert np.array_equal(found[0]["inputs"][:, 1:], found[0]["targets"][:, :-1])
  assert not found[0]["inputs"][:, 0].any()


def test_validation_stops_at_the_last_full_batch():
  assert len(held_out(20, batch_size=3, eval_batches=100)) == 6


def test_less_than_one_validation_batch_is_an_error_before_the_first():
  with pytest.raises(UserError) as info:
    validation_batches(tokens(3), LENGTH, batch_size=4, eval_batches=1)
  assert str(info.value) == (
    "validation text = 3 sequences of SEQUENCE_LENGTH = 8 tokens: less than "
    "one batch of 4; raise VALIDATION_SHARE, give more text, or lower "
    "GLOBAL_BATCH_SIZE."
  )
