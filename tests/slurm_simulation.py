# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Slurm's `sbatch` and `srun`, `ssh`, and `sudo tc`, on this machine.

A node or host is a loopback address, such as 127.0.0.2. The commands take only
flags that the real commands have, and do what Slurm 26.05 and OpenSSH do:

  sbatch   copies the script, runs the copy in the folder where it was called,
           with Slurm's variables, and waits, as with --wait; SIGTERM, for
           `scancel --batch --signal=TERM`, reaches only the script
  srun     runs a task on each node; SIGTERM kills all tasks, and with
           --kill-on-bad-exit a task that fails does so too
  ssh      runs a command in a shell, with SSH_CONNECTION; the end of ssh or of
           its stdin ends the command's stdin
  sudo     appends the words of a call of tc to TC_CALLS, and changes no link

Unlike Slurm, nothing ends the processes that a job leaves at its end.
"""

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

JOB_ID = "SLURM_JOB_ID"  # the environment of every process of a job has it
TC_CALLS = "TC_CALLS"  # the variable that names the file
_COMMANDS = ("sbatch", "srun", "ssh", "sudo", "palm_mtf")


def write_commands(folder: Path) -> None:
  """Writes the commands, and `palm_mtf`, into a folder for PATH."""
  folder.mkdir()
  for name in _COMMANDS:
    module = "palm_mtf" if name == "palm_mtf" else f"{__name__} {name}"
    path = folder / name
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
    path.chmod(0o755)


def processes_with(variable: str) -> list[int]:
  """Returns the processes whose environment has "NAME=VALUE"."""
  found = []
  for path in Path("/proc").glob("[0-9]*/environ"):
    try:
      entries = path.read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
      continue
    if variable.encode() in entries:
      found.append(int(path.parent.name))
  return found


def _sbatch_flags() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser("sbatch", allow_abbrev=False)
  parser.add_argument("--job-name")
  parser.add_argument("--nodes", type=int, default=1)
  parser.add_argument("--ntasks-per-node", type=int, default=1)
  parser.add_argument("--exclusive", action="store_true")
  parser.add_argument("--signal")
  parser.add_argument("--cpus-per-task", type=int)
  return parser


def sbatch(arguments: list[str]) -> int:
  """Runs a job on the first nodes of NODES; returns its exit code."""
  parser = _sbatch_flags()
  parser.add_argument("script")
  parser.add_argument("arguments", nargs=argparse.REMAINDER)
  asked = parser.parse_args(arguments)
  lines = Path(asked.script).read_text().splitlines()
  head = itertools.takewhile(lambda x: not x or x.startswith("#"), lines)
  in_script = [x.split()[1] for x in head if x.startswith("#SBATCH ")]
  asked = parser.parse_args([*in_script, *arguments])
  # Slurm ignores these lines after the first command of the script.
  assert sum(x.startswith("#SBATCH ") for x in lines) == len(in_script)
  nodes = os.environ["NODES"].split(",")[: asked.nodes]
  variables = {
    **os.environ,
    "SLURM_CPUS_ON_NODE": str(len(os.sched_getaffinity(0)) // len(nodes) or 1),
    "SLURM_JOB_NUM_NODES": str(len(nodes)),
    "SLURM_JOB_NODELIST": ",".join(nodes),
    "SLURM_NTASKS": str(len(nodes) * asked.ntasks_per_node),
    "SLURM_SUBMIT_DIR": os.getcwd(),
    "SLURMD_NODENAME": nodes[0],
  }
  if asked.cpus_per_task:
    variables["SLURM_CPUS_PER_TASK"] = str(asked.cpus_per_task)
  with tempfile.TemporaryDirectory() as spool, open("slurm.out", "a") as out:
    script = shutil.copy(asked.script, Path(spool) / "slurm_script")
    job = subprocess.Popen(
      [script, *asked.arguments],
      env=variables,
      stdin=subprocess.DEVNULL,
      stdout=out,
      stderr=out,
      start_new_session=True,
    )
    signal.signal(signal.SIGTERM, lambda *_: job.terminate())
    code = job.wait()
  return 128 - code if code < 0 else code


def srun(arguments: list[str]) -> int:
  """Runs a task on each node; returns the largest exit code."""
  parser = argparse.ArgumentParser("srun", allow_abbrev=False)
  parser.add_argument("--nodes", type=int, required=True)
  parser.add_argument("--ntasks", type=int, required=True)
  parser.add_argument("--ntasks-per-node", type=int, choices=[1], required=True)
  parser.add_argument("--cpus-per-task", type=int, required=True)
  parser.add_argument("--kill-on-bad-exit", type=int, default=0)
  parser.add_argument("command", nargs=argparse.REMAINDER)
  asked = parser.parse_args(arguments)
  nodes = os.environ["SLURM_JOB_NODELIST"].split(",")
  assert asked.nodes == asked.ntasks == len(nodes)
  cores = sorted(os.sched_getaffinity(0))
  tasks = {}
  for i, node in enumerate(nodes):
    here = {cores[(i + j) % len(cores)] for j in range(asked.cpus_per_task)}
    os.sched_setaffinity(0, here)  # the task inherits the cores
    task = subprocess.Popen(
      asked.command,
      env={**os.environ, "SLURMD_NODENAME": node, "SLURM_PROCID": str(i)},
      start_new_session=True,  # no signal of the batch script's group
    )
    tasks[task.pid] = task

  def kill_tasks(*_: object) -> None:
    for task in tasks.values():
      task.kill()

  signal.signal(signal.SIGTERM, kill_tasks)
  codes = []
  while len(codes) < len(tasks):
    pid, status = os.wait()
    tasks[pid].returncode = os.waitstatus_to_exitcode(status)
    codes.append(tasks[pid].returncode)
    if codes[-1] and asked.kill_on_bad_exit:
      kill_tasks()
  return max(128 - x if x < 0 else x for x in codes)


def ssh(arguments: list[str]) -> int:
  """Runs the command of a remote host; SIGTERM ends the connection."""
  parser = argparse.ArgumentParser("ssh", allow_abbrev=False)
  parser.add_argument("-4", action="store_true", required=True)
  parser.add_argument("-o", choices=["BatchMode=yes"], required=True)
  parser.add_argument("host")
  parser.add_argument("command", nargs=argparse.REMAINDER)
  asked = parser.parse_args(arguments)
  remote = subprocess.Popen(
    ["sh", "-c", " ".join(asked.command)],
    cwd="/",
    env={**os.environ, "SSH_CONNECTION": f"127.0.0.1 50000 {asked.host} 22"},
    stdin=subprocess.PIPE,
    start_new_session=True,  # no signal of the terminal
  )
  signal.signal(signal.SIGTERM, lambda *_: os._exit(255))

  def close_after_stdin() -> None:
    sys.stdin.read()
    remote.stdin.close()

  threading.Thread(target=close_after_stdin, daemon=True).start()
  return remote.wait()


def sudo(arguments: list[str]) -> int:
  """Notes a call of tc."""
  assert arguments[:2] == ["-n", "tc"]
  with open(os.environ[TC_CALLS], "a", encoding="utf-8") as file:
    file.write(" ".join(arguments[2:]) + "\n")
  return 0


if __name__ == "__main__":
  command = {"sbatch": sbatch, "srun": srun, "ssh": ssh, "sudo": sudo}[
    sys.argv[1]
  ]
  sys.exit(command(sys.argv[2:]))
