# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Old names of modules and of a class work until 0.3."""

import importlib
import sys
import warnings

import pytest

from palm_mtf import config
from tests import processes

RENAMED = {
  "palm_mtf.layers": "palm_mtf.unitransformer",
  "palm_mtf.pods": "palm_mtf.foreign_models",
}

OLD_GIN = """
import gin
import palm_mtf
gin.parse_config('''
include "palm_mtf/gin/models/palm_8b.gin"
include "palm_mtf/gin/mesh_tensorflow/palm.gin"
import palm_mtf.layers
from palm_mtf import layers
transformer.make_layer_stack.layers = [
  @palm_mtf.layers.MultiQueryAttention,
  @layers.SwiGlu,
]
palm_mtf.layers.SwiGlu.d_ff = 48
layers.MultiQueryAttention.num_heads = 3
MultiQueryAttention.d_kv = 10
''')
from mesh_tensorflow.transformer.transformer import Unitransformer
attention, mlp = Unitransformer().layer_stack.layers[:2]
assert mlp.config.d_ff == 48
assert (attention.config.num_heads, attention.config.d_kv) == (3, 10)
text = gin.config_str()
assert "palm_mtf.layers.SwiGlu" not in text
"""


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_the_same_module_and_warns_with_one_line(old, new):
  for name in [x for x in sys.modules if f"{x}.".startswith(f"{old}.")]:
    del sys.modules[name]
  module = importlib.import_module(new)
  with pytest.warns(DeprecationWarning) as caught:
    assert importlib.import_module(old) is module
  assert [str(x.message) for x in caught] == [
    f"{old} is now {new}; import it by this name, because the old name goes in "
    "0.3"
  ]
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    importlib.import_module(old)


@pytest.mark.slow
def test_python_shows_the_warning_to_a_program_that_uses_an_old_name():
  done = processes.python("-c", "from palm_mtf.layers import SwiGlu")
  assert done.returncode == 0
  assert "DeprecationWarning: palm_mtf.layers is now palm_mtf." in done.stderr


@pytest.mark.slow
def test_gin_files_may_use_old_names():
  done = processes.python("-c", OLD_GIN)
  assert done.returncode == 0, done.stderr


def test_the_old_name_of_a_class_is_the_class_and_warns():
  with pytest.warns(DeprecationWarning, match="PalmConfig is now ModelConfig;"):
    assert config.PalmConfig is config.ModelConfig
  with pytest.raises(AttributeError, match="PalmConfg"):
    _ = config.PalmConfg
