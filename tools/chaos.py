# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains under random faults, and compares the end with an undisturbed run.

  python -m tools.chaos --minutes 60

Round after round a small run trains to its end while it is killed, stopped,
paused and read, while its disk is full, slow or unreadable, its clock jumps
and links between pods are cut. Checkpoints, metrics and samples must then have
the bits of a run that was left in peace. Prints how often each fault was made;
the exit code is 1 if a bit differs, or if a process ended otherwise than it
should. Every second round has two pods in servers, the second behind a link.
"""

# Only processes that this one has started are killed. Where no small disk can
# be mounted, a limit to the size of files stands for a full one.

import argparse
import collections
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from palm_mtf.errors import UserError
from tests import processes, runs
from tests.checkpoint_files import steps_of
from tools.bench.command import one_line_errors
from tools.chaos_faults import (
  deny_children,
  full_disk,
  small_disk,
  unreadable,
)
from tools.chaos_servers import QUIET, Servers
from tools.disturbed import CLOCK_JUMP, SLOW_DISK

SETTINGS = {
  "TRAIN_STEPS": 300,
  "LOG_STEPS": 1,
  "EVAL_STEPS": 100,
  "CHECKPOINT_STEPS": 10,
  "KEEP_CHECKPOINTS": 3,
  "SAMPLE_STEPS": 50,
}
POD_TIMEOUT_SECS = 4.0
ANSWER_SECS = 300  # in which every process has to end
KILL, STOP, PAUSE, FULL = "kill", "stop", "pause", "full disk"
UNREADABLE, READER = "unreadable file", "reader"
SERVER, LINK = "killed server", "cut link"
FAULTS = [KILL, STOP, PAUSE, FULL]
POD_FAULTS = [SERVER, LINK]
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
READERS = [
  ["checkpoints", "list", "{}"],
  ["checkpoints", "verify", "{}"],
  ["report", "{}"],
  ["evaluate", "--model_dir", "{}"],
  ["generate", "--model_dir", "{}", "--prompt", "one two"],
]


class WrongEndError(Exception):
  """A process ended otherwise than it should, or a bit differs."""


class Round:
  """One MODEL_DIR, trained to its end under faults."""

  def __init__(self, corpus: Path, disk: Path, logs: Path, rng: random.Random):
    self.model_dir, self.counts = disk / "run", collections.Counter()
    self._corpus, self._disk, self._logs, self._rng = corpus, disk, logs, rng

  def train(self, servers: Servers | None, until: float) -> None:
    """Starts the trainer until it has trained to its end.

    Args:
      servers: those of two pods; None for one pod in the trainer's process.
      until: time, by time.monotonic, after which there are no more faults.

    Raises:
      WrongEndError: a process ended otherwise than it should.
    """
    while not self._train_once(servers, time.monotonic() < until):
      pass

  def _train_once(self, servers: Servers | None, disturbed: bool) -> bool:
    """Starts the trainer once; returns whether it trained to its end."""
    rng, made = self._rng, []
    kinds = [x for x in (SLOW_DISK, CLOCK_JUMP) if disturbed and chance(rng, 4)]
    made += kinds
    with contextlib.ExitStack() as stack:
      if disturbed and chance(rng, 6):
        hidden = unreadable(self.model_dir, rng)
        made += [UNREADABLE] * stack.enter_context(hidden)
      trainer = self._start(kinds, servers)
      stack.callback(trainer.kill)
      if disturbed and chance(rng, 3):
        made.append(READER)
        stack.enter_context(self._reader())
      while disturbed and self._moment(trainer):
        fault = rng.choice(FAULTS + (POD_FAULTS if servers else []))
        made.append(fault)
        self._make(fault, trainer, servers)
        if fault != PAUSE:
          break
      self.counts.update(["start", *made])
      code = self._end_of(trainer, "trainer.txt", made)
    return code == 0

  def _start(self, kinds: list[str], servers: Servers | None):
    macros = dict(SETTINGS)
    if servers:
      macros |= {"NUM_PODS": 2, "PODS": "cluster"}
      macros |= {"ISLANDS": servers.islands()}
      macros |= {"POD_TIMEOUT_SECS": POD_TIMEOUT_SECS}
    flags = runs.arguments("train", self._corpus, self.model_dir, **macros)
    disturbed = [",".join(kinds), str(self._rng.randrange(2**31))]
    return self._process("trainer.txt", "tools.disturbed", *disturbed, *flags)

  def _process(self, log: str, *arguments: str) -> subprocess.Popen:
    with open(self._logs / log, "w") as file:
      return processes.start(
        *("-m", *arguments),
        variables=QUIET,
        stdout=file,
        stderr=file,
        cwd=processes.ROOT,
      )

  @contextlib.contextmanager
  def _reader(self):
    """Another command reads the run meanwhile."""
    command = self._rng.choice(READERS)
    arguments = [each.format(self.model_dir) for each in command]
    reader = self._process("reader.txt", "palm_mtf", *arguments)
    try:
      yield
      self._end_of(reader, "reader.txt", [READER])
    finally:
      reader.kill()

  def _moment(self, trainer: subprocess.Popen) -> bool:
    """Waits for a random moment; returns whether the trainer still runs."""
    log = self._logs / "trainer.txt"
    if chance(self._rng, 4):  # while it starts, perhaps
      wait = self._rng.uniform(0, 8)
    else:
      while trainer.poll() is None and b": step " not in log.read_bytes():
        time.sleep(0.01)
      wait = self._rng.uniform(0, 1.5)
    with contextlib.suppress(subprocess.TimeoutExpired):
      trainer.wait(wait)
    return trainer.poll() is None

  def _make(self, fault: str, trainer, servers: Servers | None) -> None:
    rng = self._rng
    if fault == KILL:
      trainer.kill()
    elif fault == STOP:
      trainer.send_signal(rng.choice(SIGNALS))
    elif fault == PAUSE:
      trainer.send_signal(signal.SIGSTOP)
      time.sleep(rng.uniform(0, 6))
      trainer.send_signal(signal.SIGCONT)
    elif fault == FULL:
      with full_disk(self._disk, trainer, rng):
        with contextlib.suppress(subprocess.TimeoutExpired):
          trainer.wait(20)
    elif fault == SERVER:
      servers.kill(rng.randrange(2))
    else:
      servers.cut(rng)

  def _end_of(self, process: subprocess.Popen, log: str, made: list[str]):
    """Returns a process's exit code, which the faults that were made allow."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(ANSWER_SECS)
    code, text = process.poll(), (self._logs / log).read_text(errors="replace")
    allowed = {0}
    if {FULL, UNREADABLE, SERVER, LINK, READER} & {*made}:
      allowed.add(2)
    if KILL in made:
      allowed.add(-signal.SIGKILL)
    if STOP in made:  # by its own handler, or before there is one
      allowed |= {128 + each for each in SIGNALS} | {-each for each in SIGNALS}
    wrong = [x for x in ("Traceback", "DAMAGED", "damaged") if x in text]
    if code not in allowed or wrong:
      raise WrongEndError(f"{log}: exit code {code} after {made}:\n{text}")
    return code


def chance(rng: random.Random, one_in: int) -> bool:
  """Returns True once in so many times."""
  return rng.randrange(one_in) == 0


def _tensors(model_dir: Path, step: int) -> dict[str, bytes]:
  """Returns the bytes of every tensor of a checkpoint."""
  tensors = runs.read_tensors(model_dir, step)
  return {name: value.tobytes() for name, value in tensors.items()}


def _files(model_dir: Path, step: int) -> dict[str, bytes | dict]:
  """Returns the content of every file of a checkpoint."""
  files = runs.read_files(model_dir / "checkpoints" / f"step_{step:08d}")
  manifest = json.loads(files["manifest.json"])
  # A run that was stopped saves its last step, which the next checkpoint then
  # comes from; the seal is of this too.
  del manifest["parent"], manifest["blake2b"]
  return {**files, "manifest.json": manifest}


def check_same(calm: Path, found: Path, *, files: bool) -> None:
  """Compares what two runs have left.

  Args:
    calm: MODEL_DIR of the undisturbed run.
    found: MODEL_DIR of the other.
    files: whether the files of checkpoints are compared, not their tensors:
      manifests name the pods' addresses, and each server writes a file.

  Raises:
    WrongEndError: a bit differs, or the last checkpoint is not there.
  """
  names = []
  # Of the last three a stopped run may have one that the other has not.
  last = steps_of(calm)[-1]
  for step in sorted({*steps_of(calm)} & {*steps_of(found)} | {last}):
    read = _files if files else _tensors
    one, other = (read(x, step) for x in (calm, found))
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
  """Trains round after round; counts how often each fault was made.

  Raises:
    WrongEndError: a bit differs, or a process ended otherwise than it should.
  """
  until = time.monotonic() + 60 * minutes
  rng = random.Random(seed)
  corpus = runs.write_corpus(folder / "corpus")
  for number in range(2):
    calm = Round(corpus, folder / f"calm{number}", folder, rng)
    flags = {**SETTINGS, "NUM_PODS": number + 1}
    process = runs.start("train", corpus, calm.model_dir, **flags)
    runs.finish(process)
  while counts["round"] < 1 or time.monotonic() < until:
    pods = counts["round"] % 2
    disk = folder / f"round{counts['round']}"
    with contextlib.ExitStack() as stack:
      counts["small disk"] += stack.enter_context(small_disk(disk))
      current = Round(corpus, disk, folder, rng)
      servers = Servers(folder, stack) if pods else None
      try:
        current.train(servers, until)
        calm = folder / f"calm{pods}" / "run"
        check_same(calm, current.model_dir, files=not pods)
      except WrongEndError as error:
        kept = tempfile.mkdtemp(prefix="palm_mtf_chaos_failed_")
        shutil.copytree(current.model_dir, f"{kept}/run")
        shutil.copytree(folder / f"calm{pods}" / "run", f"{kept}/calm")
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
