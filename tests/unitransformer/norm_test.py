# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model of our layers cannot be is refused in a line."""

import numpy as np
import pytest

from palm_mtf.errors import UserError
from palm_mtf.unitransformer import sublayer_norm
from tests import oracle
from tests.mtf_testing import SINGLE, MeshLayout, small_config
from tests.unitransformer.runs_of_layers import (
  FLOAT32,
  Run,
  configured,
  imported,
)

# Behind the first line gin says in whose call.


def test_a_norm_that_there_is_not_is_refused_with_the_nearest():
  with pytest.raises(UserError) as error:
    sublayer_norm(None, None, None, norm="layernorm")
  assert str(error.value).splitlines()[0] == (
    "sublayer_norm.norm = 'layernorm' (did you mean \"layer_norm\"?): choose "
    "one of 'layer_norm', 'rms_norm'."
  )


def logits(layout, *lines):
  config = small_config()
  tokens = {"inputs": np.zeros([4, config.sequence_length], np.int32)}

  def build(mesh):
    with configured(config, *lines) as model:
      logits, _ = model.call_simple(
        imported(mesh, tokens)["inputs"],
        None,
        compute_loss=False,
        variable_dtype=FLOAT32,
      )
    return {"logits": logits}

  Run(build, oracle.random_parameters(config, seed=1), layout)


def test_an_ensemble_is_refused():
  with pytest.raises(UserError) as error:
    logits(SINGLE, "transformer.Unitransformer.ensemble = 2")
  assert str(error.value).splitlines()[0] == (
    "Unitransformer.ensemble = 2: the layers of palm_mtf.unitransformer have "
    "the weights of one model; leave ensemble out."
  )


def test_a_layout_that_splits_d_model_is_refused():
  layout = MeshLayout(mesh_shape="model:2", layout="heads:model")
  object.__setattr__(layout, "layout", "d_model:model")  # no layout of ours
  with pytest.raises(UserError) as error:
    logits(layout)
  assert str(error.value) == (
    "transformer/block_000/layer_000/norm reads d_model whole, which the "
    "layout splits: take d_model out of the layout rules."
  )
