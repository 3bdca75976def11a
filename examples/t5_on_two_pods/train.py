# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a T5 encoder-decoder of Mesh TensorFlow on pods, as train.gin says.

  python train.py
  python train.py --gin.NUM_PODS=1

Both commands print the same losses.
"""

import sys
from pathlib import Path

from palm_mtf import foreign_models

if __name__ == "__main__":
  sys.exit(foreign_models.main([str(Path(__file__).with_name("train.gin"))]))
