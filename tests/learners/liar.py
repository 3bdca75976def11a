# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf`, but a learner of this process lies: python -m ... KIND ARGUMENTS.

drift: one bit of one number is wrong; late: all signs, after step 2;
other_kernels: says that its CPU is another.
"""

import sys

import numpy as np

from palm_mtf.cli.main import main
from palm_mtf.learners import decoupled, volunteer
from palm_mtf.learners.protocol import Message


def lie(kind: str) -> None:
  """Makes the learners of this process lie."""
  do, describe = decoupled.DecoupledLearner.do, volunteer.describe_kernels

  def lying(self, work):
    header, arrays = do(self, work)
    name = sorted(arrays)[0]
    if kind == "late" and work.header["step"] >= 2:
      arrays = {x: -y for x, y in arrays.items()}
    elif kind == "drift":
      changed = arrays[name].copy()
      changed.view(np.uint32).flat[5] ^= 1
      arrays = {**arrays, name: changed}
    return Message(header, arrays)

  decoupled.DecoupledLearner.do = lying
  if kind == "other_kernels":
    volunteer.describe_kernels = lambda: {**describe(), "CPU": "another"}


if __name__ == "__main__":
  lie(sys.argv[1])
  sys.exit(main(sys.argv[2:]))
