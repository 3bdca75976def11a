# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests run on virtual CPU devices, however many GPUs a machine has.

What XLA compiles is kept until the tests end: most of the time of a small run
is the compiler's, and other tests and their processes compile the same.
"""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
# Read when TensorFlow is imported. Workers and processes that tests start take
# the folder over with the environment.
if "TF_XLA_FLAGS" not in os.environ:
  compiled = tempfile.mkdtemp(prefix="palm_mtf_tests_xla_")
  atexit.register(shutil.rmtree, compiled, ignore_errors=True)
  os.environ["TF_XLA_FLAGS"] = f"--tf_xla_persistent_cache_directory={compiled}"
