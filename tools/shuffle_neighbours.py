# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Copies an index of `palm_mtf index chunks`, but with other chunks' texts.

The search finds the same entries, and each entry has the text of another one,
drawn at random: for a model that learns nothing from neighbours.

  python -m tools.shuffle_neighbours INDEX COPY
"""

import json
import shutil
import sys

import numpy as np

from palm_mtf.json_text import json_text
from palm_mtf.model_dir import foreign_files


def shuffle(index: str, copy: str) -> None:
  """Writes the index `copy`."""
  shutil.copytree(index, copy)
  path, manifest = f"{copy}/chunks.npy", f"{copy}/manifest.json"
  np.save(path, np.random.default_rng(0).permutation(np.load(path)))
  with open(manifest, encoding="utf-8") as file:
    content = json.load(file)
  del content["seal"]
  content["hashes"]["chunks"] = foreign_files.hash_file(path)
  with open(manifest, "w", encoding="utf-8") as file:
    file.write(json_text(foreign_files.seal(content)))


if __name__ == "__main__":
  shuffle(*sys.argv[1:])
