# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Volunteers in separate processes, one of which lies."""

import contextlib
import json

import pytest

from palm_mtf.learners.members import add_member
from tests import processes, runs
from tests.learners.attacker import make_key
from tests.runtime.intrusion import free_ports

SETTINGS = {
  "EXCHANGE": "diloco",
  "OUTER_STEPS": 2,
  "NUM_PODS": 2,
  "NUM_LAYERS": 2,
  "GLOBAL_BATCH_SIZE": 8,
  "TRAIN_STEPS": 12,
  "CHECKPOINT_STEPS": 4,
  "AUDIT_SHARE": 0.4,
}
# With this secret, neither share of rounds 1 and 2 is audited, and both shares
# of round 3 are. Round 0 is audited in any case.
SECRET = b"audits 0000000000000000000000040"


class Run:
  """A run of `palm_mtf train`, and processes of `palm_mtf pods join`."""

  def __init__(self, corpus, folder, **macros):
    self.folder = folder / "run"
    (port,) = free_ports(1)
    self._address, self._prefix = f"127.0.0.1:{port}", make_key(folder)
    self._tokens, self._stack = folder / "tokens", contextlib.ExitStack()
    add_member(str(self._tokens), "nobody")
    (self.folder / "audits").mkdir(parents=True)
    (self.folder / "audits/secret").write_bytes(SECRET)
    given = SETTINGS | macros
    given |= {
      "LEARNERS": self._address,
      "LEARNERS_TLS": self._prefix,
      "LEARNER_TOKENS": str(self._tokens),
    }
    self._given = corpus, self.folder, given
    self.client = self.start("train")

  def start(self, command):
    """Starts a command with the settings of the run."""
    corpus, folder, given = self._given
    process = runs.start(command, corpus, folder, **given)
    self._stack.callback(process.kill)
    return process

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self._stack.close()

  def join(self, name, *module, flags=()):
    """Starts a learner; `module` is what Python runs in place of palm_mtf."""
    token = self._tokens.with_name(name.replace("/", "_"))
    token.write_text(add_member(str(self._tokens), name))
    joining = processes.start(
      "-m",
      *(module or ["palm_mtf"]),
      *("pods", "join", self._address),
      *("--certificate", f"{self._prefix}.pem", "--token_file", token),
      *flags,
    )
    self._stack.callback(joining.kill)
    return joining

  def find(self, kind):
    """Returns the events of one kind."""
    path = self.folder / "merges.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [x for x in map(json.loads, lines) if x["event"] == kind]


@pytest.fixture(scope="module")
def honest(corpus, tmp_path_factory):
  """The folder of a run with one honest volunteer and no audits."""
  folder = tmp_path_factory.mktemp("honest")
  with Run(corpus, folder, AUDIT_SHARE=0.0) as run:
    alice = run.join("alice")
    runs.finish(run.client)
    runs.finish(alice)
    assert not run.find("liar")
  return run.folder


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kind", "caught", "undone"), [("drift", 0, 0), ("late", 3, 2)]
)
def test_a_run_with_a_liar_ends_with_the_bits_of_the_run_without_it(
  kind, caught, undone, honest, corpus, tmp_path
):
  """A late liar has been merged in rounds 1 and 2, and in a checkpoint."""
  with Run(corpus, tmp_path) as run:
    liar = run.join("mallory", "tests.learners.liar", kind)
    processes.wait_until(lambda: run.find("liar"), run.client)
    others = [run.join("alice"), run.join("bob")]
    runs.finish(run.client)
    for each in others:
      runs.finish(each)
    _, refusal = liar.communicate(timeout=100)
    assert liar.returncode == 2
    assert "mallory: is banned: its result for round" in refusal
    (event,) = run.find("liar")
    assert event["member"] == "mallory"
    assert (event["round"], event["undone"]) == (caught, undone)
    assert {x["member"] for x in run.find("audit")} >= {"alice"}
    runs.assert_same_tensors(honest, run.folder, 12)


@pytest.mark.slow
def test_a_volunteer_with_another_cpu_is_refused_in_one_line(corpus, tmp_path):
  with Run(corpus, tmp_path) as run:
    other = run.join("eve", "tests.learners.liar", "other_kernels")
    _, error = other.communicate(timeout=300)
    assert other.returncode == 2
    assert "eve: its kernels round differently (CPU: another, before " in error
