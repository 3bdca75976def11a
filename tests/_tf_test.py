# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""TensorFlow is imported for what we use of it, and others lose nothing."""

import json
import subprocess
import sys

_SAYS = """
import json, sys
import palm_mtf._tf
loaded = [name for name in ("keras", "jax") if name in sys.modules]
from tensorflow.keras.layers import Dense
import tensorflow
print(json.dumps([loaded, tensorflow.keras.layers.Dense is Dense]))
"""


def test_keras_and_jax_are_loaded_when_somebody_asks_for_them():
  shown = subprocess.run(
    [sys.executable, "-c", _SAYS], capture_output=True, text=True, check=True
  )
  loaded, is_there = json.loads(shown.stdout)
  assert loaded == []
  assert is_there
