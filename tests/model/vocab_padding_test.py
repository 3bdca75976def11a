# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What pads the vocabulary is never trained into, sampled or exported."""

import numpy as np
import pytest
import tensorflow as tf2

from palm_mtf._tf import tf
from palm_mtf.checkpoints.weights_copier import WeightsCopier
from palm_mtf.config.decode import DecodeConfig
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.mesh.session import session_config
from palm_mtf.programs.forward_program import build_forward_program
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.training.step import TrainStep
from tests import oracle
from tests.decode_testing import decode
from tests.mtf_testing import (
  PALM_OPTIMIZER,
  SINGLE,
  load_parameters,
  random_tokens,
  relative_error,
  small_config,
)

# 44 tokens in 48 rows, 6 on each: the last device has 2 tokens, 4 of padding.
EIGHT = MeshLayout(mesh_shape="model:8", layout="vocab:model")
# 5 tokens in 8 rows, 2 on each of 4: the last device has padding alone.
THREE = MeshLayout(mesh_shape="model:3", layout="vocab:model")
FOUR = MeshLayout(mesh_shape="model:4", layout="vocab:model")


@pytest.mark.parametrize(
  ("mesh", "vocab_size", "rows"),
  [pytest.param(EIGHT, 44, 6, marks=pytest.mark.slow), (FOUR, 5, 2)],
)
def test_padding_stays_zero_and_no_checkpoint_holds_it(
  mesh, vocab_size, rows, tmp_path
):
  config = small_config(num_layers=1, vocab_size=vocab_size)
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    program = build_train_program(
      config, mesh, PALM_OPTIMIZER, batch_size=2, seed=0
    )
    session.run(program.initialize)
    for step in range(2):
      TrainStep(session, program).run(random_tokens(config, 2, step), step)
    slices = [
      session.run(part.variable.read_value())
      for part in program.slices["embedding"]
    ]
    WeightsCopier(session, [program.slices]).copy()(str(tmp_path / "a"))
  table = np.concatenate(slices)
  assert [len(x) for x in slices] == [rows] * mesh.num_devices
  assert table[:vocab_size].all(axis=1).all()
  assert not table[vocab_size:].any()
  reader = tf2.train.load_checkpoint(str(tmp_path / "a"))
  for name, shape in reader.get_variable_to_shape_map().items():
    if name.startswith("embedding"):
      assert shape == [vocab_size, config.d_model], name
  saved = reader.get_tensor("embedding")
  np.testing.assert_array_equal(saved, table[:vocab_size])


def test_logits_and_loss_are_those_of_the_tokens_alone():
  config = small_config(num_layers=1)
  params = oracle.random_parameters(config, seed=9)
  batch = random_tokens(config, batch_size=2, seed=9)
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(THREE.num_devices)) as session,
  ):
    program = build_forward_program(config, THREE, batch_size=2)
    load_parameters(session, program.slices, params)
    logits, loss = session.run(
      [program.logits, program.loss],
      {program.features[name]: value for name, value in batch.items()},
    )
  exact = oracle.forward(config, params, batch["inputs"])
  assert logits.shape == exact.shape
  assert relative_error(logits, exact) < 1e-5
  exact, _ = oracle.loss(config, params, **batch, z_loss=0.0)
  assert loss == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(
  "settings",
  [
    # Nearly all tokens alike: 3 of 16 draws would fall on padding.
    DecodeConfig(temperature=100.0, num_samples=8, repetition_penalty=1.1),
    pytest.param(DecodeConfig(num_beams=2), marks=pytest.mark.slow),
  ],
  ids=["samples", "beams"],
)
def test_padding_is_never_chosen(settings):
  config = small_config(num_layers=1, vocab_size=13, sequence_length=16)
  params = oracle.random_parameters(config, seed=2)
  single, split = (
    decode(config, params, [[5, 9]], settings, max_tokens=12, mesh=mesh).tokens
    for mesh in (SINGLE, FOUR)
  )
  np.testing.assert_array_equal(split, single)
  assert split.max() < 13
