# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A copy of the variables stays as it is while steps change them."""

import pytest
import tensorflow as tf2

from palm_mtf._tf import tf
from palm_mtf.pods.program import build_train_program
from palm_mtf.variable_files import WeightsCopier
from tests.mtf_testing import (
  PALM_OPTIMIZER,
  SINGLE,
  random_tokens,
  small_config,
)


def read(prefix):
  reader = tf2.train.load_checkpoint(prefix)
  return {
    name: reader.get_tensor(name).tobytes()
    for name in reader.get_variable_to_shape_map()
  }


def test_a_copy_that_is_written_after_more_steps_is_that_of_its_own_step(
  tmp_path,
):
  config = small_config()
  early, late, after = (str(tmp_path / x) for x in ("early", "late", "after"))
  with tf.Graph().as_default(), tf.Session() as session:
    program = build_train_program(
      config, SINGLE, PALM_OPTIMIZER, batch_size=4, seed=8
    )
    copier = WeightsCopier(session, program.slices)
    session.run(program.initialize)

    def step(number):
      batch = random_tokens(config, 4, seed=number)
      feed = {program.pods[0].features[name]: batch[name] for name in batch}
      session.run(program.update, {**feed, program.step: number})

    step(0)
    write = copier.copy()
    write(early)
    for number in (1, 2, 3):
      step(number)
    write(late)
    copier.copy()(after)
  assert read(late) == read(early)
  assert all(read(after)[name] != value for name, value in read(early).items())


@pytest.mark.parametrize("prefix", ["/dev/null/weights", "/proc/weights"])
def test_what_the_disk_refuses_is_an_os_error(prefix):
  with tf.Graph().as_default(), tf.Session() as session:
    program = build_train_program(
      small_config(), SINGLE, PALM_OPTIMIZER, batch_size=4, seed=8
    )
    session.run(program.initialize)
    write = WeightsCopier(session, program.slices).copy()
    with pytest.raises(OSError, match="weights"):
      write(prefix)
