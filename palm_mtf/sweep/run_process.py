# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The process of a run: `palm_mtf train` on some cores, killed with the sweep.

python -m palm_mtf.sweep.run_process SWEEP_PID CORES GIN_FILE
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
  """Executes `palm_mtf train --gin_file=GIN_FILE` on CORES, such as "0,1"."""
  sweep, cores, gin_file = sys.argv[1:]
  # Set the cores before TensorFlow is imported, because TensorFlow counts them.
  os.sched_setaffinity(0, map(int, cores.split(",")))
  # If the sweep's process dies, the kernel kills this process, and the same
  # sweep command resumes the run. prctl's setting and the cores survive exec.
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != int(sweep):  # the sweep's process is dead already
    os._exit(1)
  command = [sys.executable, "-m", "palm_mtf", "train"]
  os.execv(sys.executable, [*command, f"--gin_file={gin_file}"])


if __name__ == "__main__":
  main()
