# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM-style language models on Mesh TensorFlow, driven by gin files."""

import os
import sys

from palm_mtf._old_names import MeshTensorFlowFinder

__version__ = "0.2.0"


def gin_path() -> str:
  """Returns the folder of the gin files that come with palm_mtf.

  After `gin.add_config_file_search_path(palm_mtf.gin_path())`, gin finds the
  files that recipes include, such as "models/palm_8b.gin".
  """
  return os.path.join(os.path.dirname(os.path.abspath(__file__)), "gin")


sys.meta_path.insert(0, MeshTensorFlowFinder)
