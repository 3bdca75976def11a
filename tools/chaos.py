# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains under random faults, and compares the end with an undisturbed run.

  python -m tools.chaos --minutes 60

In each round a small run trains to its end while faults happen: it is killed,
stopped, paused and read, its disk is full, slow or unreadable, its clock jumps,
links between pods are cut, servers join and leave, their manager is killed, and
so are other clients. Its checkpoints, metrics and samples must have the bits of
a run without faults. Rounds take turns: one pod in the trainer's process, two
pods in servers that the run names, and two in servers of a manager. Prints how
often each fault was made. The exit code is 1 if a bit differs, or if a process
ended in a way that its faults do not allow.
"""

# Only processes that this process has started are killed. If no small disk can
# be mounted, a limit on the size of files replaces a full disk.

import argparse
import collections
import contextlib
import ctypes
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from palm_mtf.errors import UserError
from tests import processes, runs
from tests.checkpoint_files import steps_of
from tools.bench.command import one_line_errors
from tools.chaos_pods import POD_TIMEOUT_SECS, QUIET, ListedPods, ManagedPods
from tools.disturbed import CLOCK_JUMP, SLOW_DISK

SETTINGS = {
  "TRAIN_STEPS": 300,
  "LOG_STEPS": 1,
  "EVAL_STEPS": 100,
  "CHECKPOINT_STEPS": 10,
  "KEEP_CHECKPOINTS": 3,
  "SAMPLE_STEPS": 50,
}
ANSWER_SECS = 300  # limit for the end of every process
KILL, STOP, PAUSE, FULL = "kill", "stop", "pause", "full disk"
UNREADABLE, READER = "unreadable file", "reader"
Pods = ListedPods | ManagedPods
FAULTS = [KILL, STOP, PAUSE, FULL]
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
READERS = [
  ["checkpoints", "list", "{}"],
  ["checkpoints", "verify", "{}"],
  ["report", "{}"],
  ["evaluate", "--model_dir", "{}"],
  ["generate", "--model_dir", "{}", "--prompt", "one two"],
]
# Python prints a traceback and ignores an interrupt in the callback of a weak
# reference, which may run when nothing handles the signal any more.
_IGNORED = re.compile(r"Exception ignored in(.*\n)+?KeyboardInterrupt")
_DISK = "size=64m"
_CHUNK_BYTES = 4096
# From linux/prctl.h and linux/capability.h.
_PR_CAPBSET_DROP = 24
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2


class WrongEndError(Exception):
  """A process ended in a way that is not allowed, or a bit differs."""


def deny_children() -> None:
  """Takes root's right to read every file from this process's children."""
  libc = ctypes.CDLL(None, use_errno=True)
  for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
    libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # without root: EPERM


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
  """Mounts a small disk at a folder; yields whether it could be mounted."""
  folder.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(folder)]
  mounted = os.geteuid() == 0 and not subprocess.run(mount).returncode
  try:
    yield mounted
  finally:
    if mounted:
      # Unmount lazily, because a process that is ending may still hold a file.
      subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def full_disk(
  folder: Path, process: subprocess.Popen, rng: random.Random
) -> Iterator[None]:
  """Leaves a process a few bytes to write in `folder`, in the `with` block.

  If the folder is not a small disk, the process's files may not grow beyond a
  limit, for the rest of the process's life.
  """
  left = rng.randrange(0, 50 * _CHUNK_BYTES)
  if not os.path.ismount(folder):
    with contextlib.suppress(ProcessLookupError):
      _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
      resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (left, hard))
    yield
    return
  ballast = folder / "ballast"
  try:
    with open(ballast, "wb", buffering=0) as file:
      try:
        while True:
          file.write(bytes(_CHUNK_BYTES))
      except OSError as error:
        if error.errno != errno.ENOSPC:
          raise
      file.truncate(max(0, file.tell() - left))
    yield
  finally:
    ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def unreadable(folder: Path, rng: random.Random) -> Iterator[bool]:
  """Makes a random file unreadable; yields whether there is a file."""
  files = sorted(each for each in folder.rglob("*") if each.is_file())
  if not files:
    yield False
    return
  path = rng.choice(files)
  mode = path.stat().st_mode
  path.chmod(0)
  try:
    yield True
  finally:
    # The process may have replaced or removed the file.
    with contextlib.suppress(FileNotFoundError):
      path.chmod(mode)


def chance(rng: random.Random, one_in: int) -> bool:
  """Returns True with probability 1 / one_in."""
  return rng.randrange(one_in) == 0


class Round:
  """One MODEL_DIR, trained to its end under faults."""

  def __init__(self, corpus: Path, disk: Path, logs: Path, rng: random.Random):
    self.model_dir, self.counts = disk / "run", collections.Counter()
    self._corpus, self._disk, self._logs, self._rng = corpus, disk, logs, rng

  def train(self, pods: Pods | None, until: float) -> None:
    """Starts the trainer until it has trained to its end.

    After `until`, by time.monotonic, there are no more faults. Without `pods`,
    one pod trains in the trainer's process. Raises WrongEndError if a process
    ended in a way that is not allowed.
    """
    while not self._train_once(pods, time.monotonic() < until):
      pass

  def _train_once(self, pods: Pods | None, disturbed: bool) -> bool:
    """Starts the trainer once; returns whether it trained to its end."""
    rng, made = self._rng, []
    kinds = [x for x in (SLOW_DISK, CLOCK_JUMP) if disturbed and chance(rng, 4)]
    made += kinds
    with contextlib.ExitStack() as stack:
      if disturbed and chance(rng, 6):
        hidden = unreadable(self.model_dir, rng)
        made += [UNREADABLE] * stack.enter_context(hidden)
      trainer = self._start(kinds, pods)
      stack.callback(trainer.kill)
      if disturbed and chance(rng, 3):
        made.append(READER)
        stack.enter_context(self._reading())
      while disturbed and self._wait_for_a_moment(trainer):
        of_pods = pods.faults if pods else {}
        made.append(fault := rng.choice([*FAULTS, *of_pods]))
        if fault in of_pods:
          of_pods[fault](rng)
        else:
          self._make_fault(fault, trainer)
        if fault != PAUSE and not (fault in of_pods and pods.end_no_run):
          break
      self.counts.update(["start", *made])
      # If a client is paused for long, a server counts the client as gone.
      may_fail = pods and not {PAUSE, *pods.faults}.isdisjoint(made)
      code = self._check_end(trainer, "trainer.txt", made, may_fail)
    return code == 0

  def _start(self, kinds: list[str], pods: Pods | None):
    macros = dict(SETTINGS)
    if pods:
      macros |= {"NUM_PODS": 2, "PODS": "cluster", **pods.prepare()}
      macros |= {"POD_TIMEOUT_SECS": POD_TIMEOUT_SECS}
    flags = runs.arguments("train", self._corpus, self.model_dir, **macros)
    disturbed = [",".join(kinds), str(self._rng.randrange(2**31))]
    return self._start_process(
      "trainer.txt", "tools.disturbed", *disturbed, *flags
    )

  def _start_process(self, log: str, *arguments: str) -> subprocess.Popen:
    with open(self._logs / log, "w") as file:
      return processes.start(
        *("-m", *arguments),
        variables=QUIET,
        stdout=file,
        stderr=file,
        cwd=processes.ROOT,
      )

  @contextlib.contextmanager
  def _reading(self):
    """Lets another command read the run during the `with` block."""
    command = self._rng.choice(READERS)
    arguments = [each.format(self.model_dir) for each in command]
    reader = self._start_process("reader.txt", "palm_mtf", *arguments)
    try:
      yield
      self._check_end(reader, "reader.txt", [READER])
    finally:
      reader.kill()

  def _wait_for_a_moment(self, trainer: subprocess.Popen) -> bool:
    """Waits a random time; returns whether the trainer still runs."""
    log = self._logs / "trainer.txt"
    if chance(self._rng, 4):  # possibly while the trainer starts
      wait = self._rng.uniform(0, 8)
    else:
      end = time.monotonic() + ANSWER_SECS
      while (
        trainer.poll() is None
        and b": step " not in log.read_bytes()
        and time.monotonic() < end
      ):
        time.sleep(0.01)
      wait = self._rng.uniform(0, 1.5)
    with contextlib.suppress(subprocess.TimeoutExpired):
      trainer.wait(wait)
    return trainer.poll() is None

  def _make_fault(self, fault: str, trainer: subprocess.Popen) -> None:
    rng = self._rng
    if fault == KILL:
      trainer.kill()
    elif fault == STOP:
      trainer.send_signal(rng.choice(SIGNALS))
    elif fault == PAUSE:
      trainer.send_signal(signal.SIGSTOP)
      time.sleep(rng.uniform(0, 6))
      trainer.send_signal(signal.SIGCONT)
    else:
      with full_disk(self._disk, trainer, rng):
        with contextlib.suppress(subprocess.TimeoutExpired):
          trainer.wait(20)

  def _check_end(
    self,
    process: subprocess.Popen,
    log: str,
    made: list[str],
    may_fail: bool = False,
  ) -> int:
    """Waits for a process; returns its exit code, if its faults allow it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(ANSWER_SECS)
    code, text = process.poll(), (self._logs / log).read_text(errors="replace")
    allowed = {0}
    if may_fail or {FULL, UNREADABLE, READER} & {*made}:
      allowed.add(2)
    if KILL in made:
      allowed.add(-signal.SIGKILL)
    if STOP in made:  # ended by its signal handler, or before it had one
      allowed |= {128 + each for each in SIGNALS} | {-each for each in SIGNALS}
    rest = _IGNORED.sub("", text) if STOP in made else text
    wrong = [x for x in ("Traceback", "DAMAGED", "damaged") if x in rest]
    if code not in allowed or wrong:
      raise WrongEndError(f"{log}: exit code {code} after {made}:\n{text}")
    return code


def _read(model_dir: Path, step: int, files: bool) -> dict[str, bytes | dict]:
  """Returns the contents of a checkpoint's files, or of its tensors."""
  if not files:
    tensors = runs.read_tensors(model_dir, step)
    return {name: value.tobytes() for name, value in tensors.items()}
  files = runs.read_files(model_dir / "checkpoints" / f"step_{step:08d}")
  manifest = json.loads(files["manifest.json"])
  # A run that was stopped saves its last step, which becomes the parent of the
  # next checkpoint. The manifest's hash covers the parent.
  del manifest["parent"], manifest["blake2b"]
  return {**files, "manifest.json": manifest}


def check_same(calm: Path, found: Path, *, files: bool) -> None:
  """Raises WrongEndError if the files of two runs differ.

  Args:
    calm: MODEL_DIR of the undisturbed run.
    found: MODEL_DIR of the other run.
    files: whether to compare the files of checkpoints instead of their tensors.
      Files of pods differ, because manifests name the pods' addresses and each
      server writes a file.
  """
  names = []
  # A stopped run may have a checkpoint that the other run does not have.
  last = steps_of(calm)[-1]
  for step in sorted({*steps_of(calm)} & {*steps_of(found)} | {last}):
    one, other = (_read(x, step, files) for x in (calm, found))
    names += [
      f"checkpoints/step_{step:08d}/{name}"
      for name in sorted(one.keys() | other.keys())
      if one.get(name) != other.get(name)
    ]
  if (calm / "samples.jsonl").read_bytes() != (
    found / "samples.jsonl"
  ).read_bytes():
    names.append("samples.jsonl")
  lines = (map(runs.without_times, runs.read_metrics(x)) for x in (calm, found))
  one, other = map(list, lines)
  names += ["metrics.jsonl"] * (one != other)
  if names:
    raise WrongEndError(f"not the same bits: {', '.join(names)}")


def run_rounds(
  folder: Path, minutes: float, seed: int, counts: collections.Counter
) -> None:
  """Trains round after round; counts how often each fault was made."""
  until = time.monotonic() + 60 * minutes
  rng = random.Random(seed)
  corpus = runs.write_corpus(folder / "corpus")
  for number in range(2):
    calm = Round(corpus, folder / f"calm{number}", folder, rng)
    flags = {**SETTINGS, "NUM_PODS": number + 1}
    process = runs.start("train", corpus, calm.model_dir, **flags)
    runs.finish(process)
  while counts["round"] < 1 or time.monotonic() < until:
    where = (None, ListedPods, ManagedPods)[counts["round"] % 3]
    calm = folder / f"calm{int(bool(where))}" / "run"
    disk = folder / f"round{counts['round']}"
    with contextlib.ExitStack() as stack:
      counts["small disk"] += stack.enter_context(small_disk(disk))
      current = Round(corpus, disk, folder, rng)
      pods = where(stack, folder, corpus) if where else None
      try:
        current.train(pods, until)
        check_same(calm, current.model_dir, files=not pods)
      except WrongEndError as error:
        kept = tempfile.mkdtemp(prefix="palm_mtf_chaos_failed_")
        if current.model_dir.exists():
          shutil.copytree(current.model_dir, f"{kept}/run")
        shutil.copytree(calm, f"{kept}/calm")
        raise WrongEndError(f"{error}\nthe runs: {kept}") from None
      finally:
        counts.update(current.counts)
    counts["round"] += 1
    print(
      f"round {counts['round']}: the same bits", file=sys.stderr, flush=True
    )


@one_line_errors
def main() -> int:
  """Prints the table of faults; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--minutes", type=float, default=60.0)
  parser.add_argument("--seed", type=int, default=0)
  chosen = parser.parse_args()
  if not 0 < chosen.minutes < 1e6:
    raise UserError(
      f"--minutes = {chosen.minutes}: give a number of minutes above 0."
    )
  deny_children()
  with tempfile.TemporaryDirectory(prefix="palm_mtf_chaos_") as folder:
    counts, code = collections.Counter(), 0
    try:
      run_rounds(Path(folder), chosen.minutes, chosen.seed, counts)
    except WrongEndError as error:
      print(f"chaos: {error}", file=sys.stderr)
      code = 1
  for name, count in counts.most_common():
    print(f"{count:6} {name}")
  return code


if __name__ == "__main__":
  sys.exit(main())
