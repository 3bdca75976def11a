# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains the runs of a sweep, each in its own process.

python -m palm_mtf.sweep.runner SWEEP_PID CORES GIN_FILE    is such a process
"""

import ctypes
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from palm_mtf.config import SweepConfig
from palm_mtf.errors import StoppedError, UserError
from palm_mtf.machine.processors import usable_cores, visible_cores
from palm_mtf.machine.stop_signals import StopRequest
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.paths import SweepDir
from palm_mtf.sweep.runs import SweepRun, has_finished, mark_finished, tabulate

_logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_POLL_SECS = 0.5
_LAST_BYTES = 4096  # bytes at the end of a log that are read for its last line


@dataclasses.dataclass
class _Process:
  run: SweepRun
  cores: Sequence[int]
  process: subprocess.Popen


def cores_of_runs(num_at_once: int) -> list[list[int]]:
  """Returns core numbers for each of `num_at_once` runs.

  Raises:
    UserError: if there are fewer cores than runs.
  """
  if num_at_once > usable_cores():
    raise UserError(
      f"SWEEP_AT_ONCE = {num_at_once}: more runs than the {usable_cores()} "
      "cores that this process may use; give at most as many."
    )
  cores = visible_cores()
  share = len(cores) // num_at_once
  # Give all runs the same number of cores, so that their times compare.
  return [cores[i * share : (i + 1) * share] for i in range(num_at_once)]


def train_runs(
  runs: Sequence[SweepRun], sweep: SweepConfig, where: SweepDir
) -> dict[str, str]:
  """Trains those of `runs` that have not finished, in this order.

  Returns:
    {name of a failed run: exit code and last line of its log}.

  Raises:
    StoppedError: if a signal came; the runs have saved their last steps.
  """
  waiting = [x for x in runs if not has_finished(where, x.name)]
  free = cores_of_runs(sweep.sweep_at_once)
  if len(waiting) < len(runs):
    _logger.info(f"{len(runs) - len(waiting)} of {len(runs)} runs have ended")
  training: list[_Process] = []
  failed: dict[str, str] = {}
  with StopRequest() as stop:
    try:
      while (waiting or training) and not stop.signal_name:
        while waiting and free:
          training.append(_start(waiting.pop(0), free.pop(0), where))
        time.sleep(_POLL_SECS)
        for each in list(training):
          if each.process.poll() is not None:
            training.remove(each)
            free.append(each.cores)
            _end(each, where, failed)
      for each in training:  # a signal came: the runs save their last steps
        each.process.terminate()
      for each in training:
        each.process.wait()
    finally:
      # After a second SIGINT or an error, runs still train. It is safe to kill
      # these runs, because the same command resumes them.
      for each in training:
        each.process.kill()
        each.process.wait()
  if stop.signal_name:
    _logger.info(
      f"stopped by {stop.signal_name}; run the same command to resume"
    )
    raise StoppedError(stop.signal_name)
  return failed


def _start(run: SweepRun, cores: list[int], where: SweepDir) -> _Process:
  settings = where.settings(run.name)
  write_atomically(settings, run.gin_text.encode())
  # With this PYTHONPATH, the run finds the same modules as this process.
  path = os.pathsep.join(folder for folder in sys.path if folder)
  numbers = ",".join(map(str, cores))
  with open(where.log(run.name), "ab") as log:
    process = subprocess.Popen(
      [
        *(sys.executable, "-m", "palm_mtf.sweep.runner"),
        *(str(os.getpid()), numbers, settings),
      ],
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=log,
      env={**os.environ, "PYTHONPATH": path},
      # In a new session, a run gets no Ctrl-C from the terminal; the sweep gets
      # Ctrl-C and stops each run.
      start_new_session=True,
    )
  _logger.info(
    f"{run.name}: {run.num_parameters:,} parameters, {run.num_tokens:,} "
    f"tokens, on cores {numbers}, process {process.pid}"
  )
  return _Process(run, cores, process)


def _end(each: _Process, where: SweepDir, failed: dict[str, str]) -> None:
  code, name = each.process.returncode, each.run.name
  if code:
    failed[name] = f"exit code {code}, {_last_line(where.log(name))}"
    _logger.warning(f"{name}: failed: {failed[name]}")
    return
  mark_finished(where, name)
  (row,) = tabulate([each.run], where)
  if row["loss"] is not None:
    _logger.info(f"{name}: finished, validation loss {row['loss']:.4f}")


def _last_line(log: str) -> str:
  with open(log, "rb") as file:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - _LAST_BYTES))
    lines = file.read().decode(errors="replace").splitlines()
  return lines[-1] if lines else "nothing printed"


def check_none_failed(failed: Mapping[str, str], where: SweepDir) -> None:
  """Raises UserError if a run failed; the message says how each one failed."""
  if failed:
    each = "; ".join(f"{name}: {how}" for name, how in failed.items())
    raise UserError(
      f"{len(failed)} of the runs failed ({each}); "
      f"{where.log('NAME')} has what they printed; the same command tries "
      "them again."
    )


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
