# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Volunteers in separate processes, one of which lies."""

import contextlib
import json

import pytest

from palm_mtf.cli.main import main
from palm_mtf.learners.members import Members, add_member
from palm_mtf.learners.protocol import program_of
from palm_mtf.learners.volunteer import take_part
from tests import processes, runs
from tests.learners.attacker import make_key
from tests.learners.protocol_test import MODEL
from tests.refusals import message_of
from tests.runtime.intrusion import free_ports
from tests.settings import step_config

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
    if not token.exists():
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
  ("kind", "caught", "undone", "is_killed"),
  [("drift", 0, 0, False), ("late", 3, 2, False), ("late", 3, 2, True)],
)
def test_a_run_with_a_liar_ends_with_the_bits_of_the_run_without_it(
  kind, caught, undone, is_killed, honest, corpus, tmp_path
):
  """A late liar has been merged in rounds 1 and 2, and in a checkpoint."""
  with Run(corpus, tmp_path) as run:
    liar = run.join("mallory", "tests.learners.liar", kind)
    processes.wait_until(lambda: run.find("liar"), run.client)
    if is_killed:
      run.client.kill()
      run.client.wait()
      run.client = run.start("train")
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
def test_of_two_processes_with_one_token_the_older_ends_and_says_why(
  corpus, tmp_path
):
  # One learner of a quorum of two waits, so the run does not end before.
  with Run(corpus, tmp_path, AUDIT_SHARE=None, QUORUM=2) as run:
    older = run.join("alice")
    processes.wait_until(lambda: run.find("contribution"), run.client)
    newer = run.join("alice")
    _, error = older.communicate(timeout=300)
    assert older.returncode == 2
    assert error.splitlines()[-1].endswith(
      "alice: another process has joined with this token, so this one ends; "
      "give each process a token, which `palm_mtf pods token` makes."
    )
    assert newer.poll() is None


@pytest.mark.slow
def test_a_volunteer_with_another_cpu_is_refused_in_one_line(corpus, tmp_path):
  with Run(corpus, tmp_path) as run:
    other = run.join("eve", "tests.learners.liar", "other_kernels")
    _, error = other.communicate(timeout=300)
    assert other.returncode == 2
    assert "eve: its kernels round differently (CPU: another, before " in error


ANSWER = {
  "learner": 0,
  "program": program_of(step_config(MODEL)),
  "seed": 1,
  "num_rows": 4,
  "frozen": [],
  "features": ["inputs", "targets"],
  "fragments": 1,
  "outer_dtype": "float32",
}


class Answers:
  """A run that answers a volunteer's `join`."""

  def __init__(self, **changes):
    self.header = ANSWER | changes

  def join(self, header):
    """Returns the answer."""
    del header
    return self.header


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_rows": 2**40}, "NUM_ROWS = 1,099,511,627,776: give a whole number"),
    ({"num_rows": "4"}, "NUM_ROWS = '4': give a whole number of at least 1."),
    ({"seed": -1}, "SEED = -1: give a whole number of at least 0."),
    ({"features": ["/etc"]}, "feature = '/etc': choose one of 'inputs', "),
    ({"features": 3}, "feature = 3: choose one of 'inputs', "),
    ({"more": 3}, "the run's answer is not one of palm_mtf."),
    ({"frozen": [3]}, "FROZEN = [3]: give a list of patterns, or [] for none."),
    ({"frozen": ["*"]}, "FROZEN = ['*']: freezes all parameters, so nothing"),
    ({"fragments": 0}, "FRAGMENTS = 0: give a whole number of at least 1."),
    ({"fragments": 10**18}, "FRAGMENTS = 1,000,000,000,000,000,000: give a wh"),
    ({"outer_dtype": "x"}, "OUTER_DTYPE = 'x': choose one of 'float32', "),
    ({"program": 3}, "the run's answer is not one of palm_mtf."),
  ],
)
def test_what_a_run_answers_is_checked(changes, message):
  found = message_of(take_part, Answers(**changes), {}, {})
  assert found.startswith(message)


@pytest.mark.parametrize(
  ("changes", "gigabytes"),
  [
    ({"D_MODEL": 2**20, "D_FF": 2**20}, "182,524.6"),
    ({"SEQUENCE_LENGTH": 2**22}, "140,876.7"),  # activations
  ],
  ids=str,
)
def test_a_model_that_is_too_large_is_refused(changes, gigabytes):
  large = program_of(step_config(MODEL)) | changes
  assert message_of(take_part, Answers(program=large), {}, {}, 10**9) == (
    f"the run's step needs about {gigabytes} GB, and --most_gb allows 1.0; "
    "give more, or join another run."
  )


def test_commands_of_volunteers_are_checked_in_one_line(capsys, tmp_path):
  tokens, certificate = tmp_path / "tokens", tmp_path / "run.pem"
  assert main(["pods", "token", "alice", "--tokens", str(tokens)]) == 0
  token = capsys.readouterr().out.strip()
  assert Members(str(tokens)).find(token) == "alice"
  given = tmp_path / "alice.token"
  given.write_text(f"{token}\n")
  flags = ["--certificate", str(certificate), "--token_file", str(given)]
  for given, message in (
    (["pods", "token", "a b", "--tokens", str(tokens)], "NAME = 'a b': write"),
    (
      ["pods", "join", "here", *flags],
      'HOST:PORT = "here": write ADDRESS:PORT',
    ),
    (["pods", "join", "127.0.0.1:1", *flags], "--certificate = "),
    (
      ["pods", "join", "127.0.0.1:1", *flags[:2], "--token_file", "none"],
      "--token_file = 'none': No such file or directory; give a file with",
    ),
    (
      # The file of the hashes in place of that of a token.
      ["pods", "join", "127.0.0.1:1", *flags[:-1], str(tokens)],
      "has no token; give a file with the token that `palm_mtf pods token` ",
    ),
  ):
    assert main(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
