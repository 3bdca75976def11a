# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM-style language models on Mesh TensorFlow, driven by gin files."""

import os
import sys

from palm_mtf._renamed import RenamedFinder

__version__ = "0.2.0"


def gin_path() -> str:
  """Returns the folder of the gin files that come with palm_mtf.

  After `gin.add_config_file_search_path(palm_mtf.gin_path())`, gin finds the
  files that recipes include, such as "models/palm_8b.gin".
  """
  return os.path.join(os.path.dirname(os.path.abspath(__file__)), "gin")


class _MeshTensorFlowFinder:
  """Adds old names to TensorFlow just before `mesh_tensorflow` is imported."""

  @classmethod
  def find_spec(cls, name: str, *unused: object) -> None:
    """Returns None, so that Python asks the next finder for the package."""
    if name == "mesh_tensorflow":
      sys.meta_path.remove(cls)
      from palm_mtf._old_names import put_back

      put_back()


sys.meta_path[:0] = [_MeshTensorFlowFinder, RenamedFinder]
