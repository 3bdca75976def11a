# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Copies an index of `palm_mtf index chunks`, but with other chunks' texts.

The search finds the same entries, and each entry has the text of another one,
drawn at random: for a model that learns nothing from neighbours.

  python -m tools.shuffle_neighbours INDEX COPY
"""

import argparse
import os
import shutil

import numpy as np

from palm_mtf.model_dir.foreign_files import MANIFEST, open_folder, seal_folder


def shuffle(index: str, copy: str) -> None:
  """Writes the index `copy`."""
  shutil.copytree(index, copy)
  content, _ = open_folder(copy)
  del content["hashes"]
  os.remove(f"{copy}/{MANIFEST}")
  path = f"{copy}/chunks.npy"
  np.save(path, np.random.default_rng(0).permutation(np.load(path)))
  seal_folder(copy, content)


def main() -> None:
  """Reads the arguments."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("index", help="the folder to read")
  parser.add_argument("copy", help="the folder to make")
  shuffle(**vars(parser.parse_args()))


if __name__ == "__main__":
  main()
