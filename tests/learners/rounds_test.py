# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Liars are named, banned and undone; runs end with the bits without them.

Volunteers are simulated, and their results are functions of the outer
parameters and the task, as those of real volunteers are (volunteer_test.py).
"""

import json

import numpy as np
import pytest

from palm_mtf.config import ExchangeConfig, LearnersConfig
from palm_mtf.learners.audit import Audits, merge_robustly
from palm_mtf.learners.rounds import AUDITOR, Rounds
from palm_mtf.learners.syncer import DONE, WAIT, OuterParameters
from tests.refusals import message_of

KERNELS = {"CPU": "a", "threads": "2"}
NAME = "layer_0/q/kernel"
NUM_ROUNDS, NUM_SHARES = 12, 3


def compute(outer, task):
  """The honest result of a task."""
  noise = np.random.default_rng(task).standard_normal(outer[NAME].shape)
  return {NAME: (noise / 8 - outer[NAME] / 4).astype(np.float32)}


class Simulation:
  """A run and its volunteers, each with a function that makes its result."""

  def __init__(self, folder, share, **more):
    self.events = []
    (folder / "audits").mkdir(parents=True)
    (folder / "audits/secret").write_bytes(b"the same audits in every test...")
    self.folder, self.share, self.more = folder, share, more
    self.open()

  def open(self, outer=None, state=None):
    self.outer = outer or OuterParameters(
      {NAME: np.ones((4, 8), np.float32)}, [[NAME]], ExchangeConfig()
    )
    self.rounds = Rounds(
      self.outer,
      Audits(str(self.folder / "audits"), self.share),
      LearnersConfig(task_secs=10.0, **self.more),
      num_tasks=NUM_ROUNDS * NUM_SHARES,
      num_shares=NUM_SHARES,
      kernels=KERNELS,
      state=state,
      note=self.events.append,
    )
    if self.rounds.has_auditor:
      self.join(AUDITOR)

  def join(self, *members):
    for member in members:
      self.rounds.join(member, 0.0, KERNELS)

  def turn(self, member, change=lambda x, task: x, now=0.0):
    """Lets a volunteer do a work, if there is one; returns its task."""
    work = self.rounds.next(member, now)
    if work in (WAIT, DONE):
      return None
    moved = change(compute(self.outer.parameters, work.task), work.task)
    self.rounds.contribute(member, work.number, moved, 8, now)
    return work.task

  def run(self, volunteers, num_rounds=NUM_ROUNDS, last=None):
    """Does rounds; `volunteers` is {member: its change of a result}."""
    for _ in range(1000):
      if self.rounds.num_done >= num_rounds * NUM_SHARES:
        return self.outer.parameters[NAME]
      for member, change in volunteers.items():
        if member not in self.rounds.audits.banned:
          self.turn(member, change)
          if last != "volunteers":
            self.turn(AUDITOR)
      self.rounds.tick(0.0)
    raise AssertionError("the run does not end")

  def find(self, kind):
    return [x for x in self.events if x["event"] == kind]


def honest(moved, task):
  del task
  return moved


def flip(moved, task):
  del task
  return {x: -y for x, y in moved.items()}


def drift(moved, task):
  """One bit of one number."""
  del task
  changed = moved[NAME].copy()
  changed.view(np.uint32)[1, 3] ^= 1
  return {NAME: changed}


def after(first, lie):
  """A lie in all tasks from `first` on."""
  return lambda moved, task: lie(moved, task) if task >= first else moved


@pytest.fixture(scope="module")
def without_liars(tmp_path_factory):
  simulation = Simulation(tmp_path_factory.mktemp("honest"), 0.3)
  simulation.join("alice")
  return simulation.run({"alice": honest}).copy()


def test_bits_do_not_depend_on_who_computes(without_liars, tmp_path):
  """Also compares with a loop that is written from the paper."""
  simulation = Simulation(tmp_path, 0.0)
  simulation.join("alice", "bob", "carol")
  changes = dict.fromkeys(("carol", "alice", "bob"), honest)
  assert simulation.run(changes).tobytes() == without_liars.tobytes()
  p, b = np.ones((4, 8)), np.zeros((4, 8))
  for v in range(NUM_ROUNDS):
    outer = {NAME: p.astype(np.float32)}
    results = [compute(outer, v * 3 + m)[NAME] for m in range(3)]
    delta = -np.mean(np.float64(results), axis=0)
    b = 0.9 * b + delta
    p = p - 0.7 * (delta + 0.9 * b)
  np.testing.assert_allclose(without_liars, p, atol=1e-5)  # float32 between


@pytest.mark.parametrize("lie", [flip, drift, after(11, flip)])
def test_a_liar_is_named_and_training_ends_with_the_bits_without_it(
  lie, without_liars, tmp_path
):
  simulation = Simulation(tmp_path, 0.3)
  simulation.join("alice", "mallory", "bob")
  changes = {"mallory": lie, "alice": honest, "bob": honest}
  found = simulation.run(changes)
  (event,) = simulation.find("liar")
  assert event["member"] == "mallory"
  assert {*simulation.rounds.audits.banned} == {"mallory"}
  assert message_of(simulation.join, "mallory").startswith(
    "mallory: is banned: its result for round "
  )
  if lie in (flip, drift):  # it never passed an audit, so no lie remains
    assert found.tobytes() == without_liars.tobytes()


def test_a_liar_is_named_before_the_sync_of_the_audited_round(tmp_path):
  simulation = Simulation(tmp_path, 1.0)
  simulation.join("mallory", "alice")
  simulation.turn("mallory", drift)
  simulation.turn("alice")
  assert not simulation.rounds.tick(0.0)  # audits are not done
  simulation.turn(AUDITOR)
  (event,) = simulation.find("liar")
  assert (event["member"], event["round"], event["undone"]) == ("mallory", 0, 0)
  assert not simulation.find("merge")


def test_rounds_since_the_last_audit_are_undone(tmp_path, monkeypatch):
  """Audited are round 2, which is honest, and round 5, which is a lie."""
  monkeypatch.setattr(
    Audits, "draws", lambda self, v, m: m == 0 and v in (2, 5)
  )
  simulation = Simulation(tmp_path, 0.5)
  simulation.join("mallory", "alice", "bob")
  changes = {"mallory": after(3 * 3, flip), "alice": honest, "bob": honest}
  simulation.run(changes, 3)
  before = simulation.outer.parameters[NAME].copy()
  simulation.run(changes, 5)
  assert [*simulation.folder.glob("audits/*.npz")]
  for member, change in changes.items():
    simulation.turn(member, change)
  simulation.turn(AUDITOR)
  (event,) = simulation.find("liar")
  assert (event["round"], event["undone"]) == (5, 2)  # rounds 3 and 4
  assert simulation.rounds.num_done == 3 * NUM_SHARES
  assert simulation.outer.parameters[NAME].tobytes() == before.tobytes()


def test_what_is_large_or_in_the_first_round_is_audited_in_any_case(tmp_path):
  """So a lie that no audit finds moves the parameters little."""
  simulation = Simulation(tmp_path, 0.0)
  simulation.join("alice", "mallory")
  simulation.run({"alice": honest}, 1)
  assert len(simulation.find("audit")) == NUM_SHARES
  simulation.run({"alice": honest}, 2)
  assert len(simulation.find("audit")) == NUM_SHARES
  simulation.turn("mallory", lambda x, task: {NAME: 100 * x[NAME]})
  simulation.turn(AUDITOR)
  assert [x["member"] for x in simulation.find("liar")] == ["mallory"]


def test_only_the_states_that_an_undo_may_need_are_kept(tmp_path):
  simulation = Simulation(tmp_path, 0.0)
  names = [f"v{i}" for i in range(3)]
  simulation.join(*names)
  simulation.run(dict.fromkeys(names, honest), 8)
  files = [x.name for x in simulation.folder.glob("audits/*.npz")]
  assert files == ["1.npz"]  # round 0 was audited
  for name in names:
    simulation.rounds.audits.pass_(name)
  simulation.run(dict.fromkeys(names[:1], honest), 9)
  files = [x.name for x in simulation.folder.glob("audits/*.npz")]
  assert files == ["8.npz"]


def test_a_run_that_is_killed_goes_on_with_the_same_audits_and_bits(
  without_liars, tmp_path
):
  simulation = Simulation(tmp_path, 0.3)
  changes = {"mallory": after(3, drift), "alice": honest, "bob": honest}
  simulation.join(*changes)
  simulation.run(changes, 2)
  saved = simulation.rounds.state
  p, b = dict(simulation.outer.parameters), dict(simulation.outer.momentum)
  drawn = [simulation.rounds.audits.draws(v, 0) for v in range(200)]
  assert not simulation.rounds.audits.banned
  for change in changes.items():  # lost, as the process is killed
    simulation.turn(*change)
  outer = OuterParameters(p, [[NAME]], ExchangeConfig(), b, saved["merges"])
  simulation.open(outer, saved)
  again = [simulation.rounds.audits.draws(v, 0) for v in range(200)]
  assert drawn == again
  simulation.join(*changes)
  assert simulation.run(changes).tobytes() == without_liars.tobytes()
  assert {*simulation.rounds.audits.banned} == {"mallory"}


def test_a_kill_between_an_undo_and_the_next_checkpoint_keeps_no_lie(
  without_liars, tmp_path, monkeypatch
):
  monkeypatch.setattr(Audits, "draws", lambda self, v, m: v >= 4)
  simulation = Simulation(tmp_path, 0.5)
  changes = {"mallory": after(3, flip), "alice": honest}
  simulation.join(*changes)
  simulation.run(changes, 4)  # round 0 is audited in any case
  saved, lied = simulation.rounds.state, dict(simulation.outer.parameters)
  moment = dict(simulation.outer.momentum)
  simulation.turn("mallory", flip)
  simulation.turn(AUDITOR)
  assert simulation.rounds.audits.undone == 1
  # The checkpoint of round 4 is still there when the run starts again.
  outer = OuterParameters(lied, [[NAME]], ExchangeConfig(), moment, 4)
  simulation.open(outer, saved)
  simulation.join("alice")
  found = simulation.run({"alice": honest})
  assert found.tobytes() == without_liars.tobytes()


def test_an_undo_keeps_what_another_liar_would_need(tmp_path, monkeypatch):
  """Bob's unaudited work is older than Mallory's, and than no checkpoint."""
  monkeypatch.setattr(Audits, "draws", lambda self, v, m: v == 4)
  simulation = Simulation(tmp_path, 0.5)
  simulation.join("bob", "mallory")
  simulation.run({"bob": honest}, 2)
  simulation.run({"mallory": flip}, 4)
  simulation.turn("mallory", flip)
  simulation.turn(AUDITOR)
  assert simulation.rounds.audits.undone == 2
  simulation.open()  # from no checkpoint
  assert simulation.rounds.num_done == 2 * NUM_SHARES
  ledger = json.loads((tmp_path / "audits/ledger.json").read_text())
  assert ledger["first"] == {"bob": 1}
  simulation.join("bob")
  simulation.turn("bob", flip)  # round 2 is audited once more or not
  while not simulation.find("liar")[1:]:
    simulation.turn("bob", flip)
    simulation.turn(AUDITOR)
    simulation.rounds.tick(0.0)
  assert simulation.find("liar")[1]["member"] == "bob"
  assert simulation.rounds.num_done == 1 * NUM_SHARES


def test_draws_have_the_share_and_need_the_secret(tmp_path):
  ours, theirs = (Audits(str(tmp_path / x), 0.2) for x in "ab")
  drawn = [[x.draws(v, 0) for v in range(5000)] for x in (ours, theirs)]
  # Four standard deviations of a binomial distribution.
  assert abs(np.mean(drawn[0]) - 0.2) < 4 * np.sqrt(0.2 * 0.8 / 5000)
  both = np.mean(np.logical_and(*drawn))
  assert abs(both - 0.04) < 4 * np.sqrt(0.04 * 0.96 / 5000)
  assert (tmp_path / "a/secret").stat().st_mode & 0o77 == 0


def test_draws_change_after_an_undo(tmp_path):
  audits = Audits(str(tmp_path), 0.5)
  before = [audits.draws(0, m) for m in range(64)]
  audits.take("mallory", 0)
  state = {NAME: np.ones(3, np.float32)}
  audits.keep(0, state, state)
  assert audits.ban("mallory", "why", 3) == 0
  assert before != [audits.draws(0, m) for m in range(64)]


def test_copies_of_others_and_replays_of_old_results_are_audited(tmp_path):
  """A copy could pass where nothing is drawn; here equal hashes are noticed."""
  simulation = Simulation(tmp_path, 0.0)
  simulation.join("alice", "mallory", "bob")
  first = compute(simulation.outer.parameters, 0)
  simulation.turn("alice")
  simulation.turn("mallory", lambda x, task: first)
  simulation.turn("bob")
  assert [x["member"] for x in simulation.find("copy")] == ["mallory"]
  assert not simulation.rounds.tick(0.0)
  while simulation.turn(AUDITOR) is not None:
    pass
  assert [x["member"] for x in simulation.find("liar")] == ["mallory"]
  # An old result of the same volunteer.
  simulation = Simulation(tmp_path / "b", 0.0)
  simulation.join("alice", "mallory", "bob")
  old = compute(simulation.outer.parameters, 0)
  simulation.run({"mallory": honest, "alice": honest, "bob": honest}, 1)
  simulation.turn("mallory", lambda x, task: old)
  simulation.turn(AUDITOR)
  assert [x["member"] for x in simulation.find("liar")] == ["mallory"]


def test_a_message_that_is_replayed_is_stale(tmp_path):
  simulation = Simulation(tmp_path, 0.0)
  simulation.join("alice")
  work = simulation.rounds.next("alice", 0.0)
  moved = compute(simulation.outer.parameters, 0)
  simulation.rounds.contribute("alice", work.number, moved, 8, 0.0)
  for number in (work.number, -1, True, "0", None, 1e300, [0]):
    message = message_of(
      simulation.rounds.contribute, "alice", number, moved, 8, 0.0
    )
    assert message == f"alice: the result of work {number!r:.50} is stale."


def test_a_volunteer_that_delays_loses_its_task_and_lets_others_go_first(
  without_liars, tmp_path
):
  simulation = Simulation(tmp_path, 0.0)
  simulation.join("mallory", "alice")
  rounds = simulation.rounds
  work = rounds.next("mallory", 0.0)
  rounds.tick(11.0)
  assert message_of(rounds.find_work, "mallory", work.number) == (
    "mallory: does not take part, or was too slow; join."
  )
  simulation.join("mallory")
  assert rounds.next("mallory", 11.0) == WAIT
  assert rounds.next("alice", 11.0).task == work.task
  found = simulation.run({"alice": honest})
  assert found.tobytes() == without_liars.tobytes()
  assert not rounds.audits.banned  # slow is not a lie


def test_a_volunteer_that_joins_again_or_sends_nan_does_not_keep_its_task(
  tmp_path,
):
  simulation = Simulation(tmp_path, 0.0)
  simulation.join("mallory", "alice")
  first = simulation.rounds.next("mallory", 0.0)
  simulation.join("mallory")
  assert simulation.rounds.next("mallory", 0.0) == WAIT
  assert simulation.rounds.next("alice", 0.0).task == first.task
  simulation = Simulation(tmp_path / "nan", 0.0)
  simulation.join("mallory", "alice")
  nan = {NAME: np.full((4, 8), np.nan, np.float32)}
  with pytest.raises(ValueError):
    simulation.turn("mallory", lambda x, task: nan)
  simulation.join("mallory")
  assert simulation.rounds.next("mallory", 0.0) == WAIT
  assert simulation.rounds.next("alice", 0.0).task == first.task


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_not_finite_or_huge_is_refused_and_named(value, tmp_path):
  simulation = Simulation(tmp_path, 0.0)
  simulation.join("mallory")
  moved = np.zeros((4, 8), np.float32)
  moved[3, 7] = value
  assert message_of(
    simulation.turn, "mallory", lambda x, task: {NAME: moved}
  ) == (f"mallory: {NAME} is not finite, or moved too far.")


def test_another_kernel_class_is_refused_unless_merging_is_robust(tmp_path):
  simulation = Simulation(tmp_path, 0.0)
  other = KERNELS | {"CPU": "b"}
  assert message_of(simulation.rounds.join, "eve", 0.0, other) == (
    "eve: its kernels round differently (CPU: b, before a), so that its bits "
    'could not be compared; only MERGE = "median" or "clipped" takes it.'
  )
  for wrong in (
    None,
    {},
    {"CPU": "a"},
    {"CPU": 1, "threads": "2"},
    [1],
    KERNELS | {"CPU": "\n"},
  ):
    assert message_of(simulation.rounds.join, "eve", 0.0, wrong) == (
      "eve: does not describe its kernels, or has a mesh."
    )
  simulation = Simulation(tmp_path / "b", 1.0, merge="median")
  simulation.rounds.join("eve", 0.0, other)
  simulation.rounds.join("mallory", 0.0, KERNELS)
  simulation.turn("eve", flip)
  simulation.turn("mallory", flip)
  simulation.turn(AUDITOR)
  assert [x["member"] for x in simulation.find("liar")] == ["mallory"]


def test_audits_by_volunteers_go_to_other_owners_and_name_the_liar(
  without_liars, tmp_path
):
  simulation = Simulation(tmp_path, 1.0, audit_by="volunteers")
  changes = dict.fromkeys(["mallory/1", "mallory/2", "alice", "bob"], honest)
  changes["mallory/1"] = changes["mallory/2"] = (
    flip  # they agree with each other
  )
  simulation.join(*changes)
  found = simulation.run(changes, last="volunteers")
  assert {x["member"] for x in simulation.find("liar")} == {
    "mallory/1",
    "mallory/2",
  }
  assert found.tobytes() == without_liars.tobytes()


def test_owners_who_lie_together_fool_volunteers_but_not_the_client(
  without_liars, tmp_path
):
  """docs/slow_links.md says what sybils can do."""
  for audit_by, is_fooled in (("volunteers", True), ("client", False)):
    simulation = Simulation(tmp_path / audit_by, 1.0, audit_by=audit_by)
    changes = {"eve": flip, "mallory": flip, "alice": honest}
    simulation.join(*changes)
    found = simulation.run(changes, last=audit_by)
    assert (found.tobytes() != without_liars.tobytes()) == is_fooled
    assert ("alice" in simulation.rounds.audits.banned) == is_fooled


def oracle_of_clipped(parts):
  flat = np.array([x[NAME].ravel() for x, _ in parts], np.float64)
  norms = np.linalg.norm(flat, axis=1)
  limit = np.sort(norms)[len(norms) // 2]  # an odd number of parts
  clipped = flat * np.minimum(1, limit / norms)[:, None]
  return np.average(clipped, axis=0, weights=[x for _, x in parts])


def test_robust_merges_are_those_of_float64():
  generator = np.random.default_rng(1)
  parts = [
    ({NAME: generator.standard_normal((4, 8)).astype(np.float32)}, tokens)
    for tokens in (8, 8, 5, 3, 8)
  ]
  flat = np.sort([x[NAME].astype(np.float64) for x, _ in parts], axis=0)
  found = merge_robustly("median", parts)[NAME]
  assert found.tobytes() == flat[2].astype(np.float32).tobytes()
  found = merge_robustly("clipped", parts)[NAME].ravel()
  np.testing.assert_allclose(found, oracle_of_clipped(parts), rtol=1e-6)


@pytest.mark.parametrize("size", [-1.0, 30.0, 1e4])
def test_two_liars_of_five_move_a_robust_merge_little(size):
  """The median stays among honest values; clipping bounds what a liar adds."""
  generator = np.random.default_rng(2)
  honest_parts = [
    {NAME: (1 + generator.standard_normal((4, 8)) / 10).astype(np.float32)}
    for _ in range(3)
  ]
  lies = [{NAME: np.full((4, 8), -size, np.float32)}] * 2
  parts = [(x, 8) for x in honest_parts + lies]
  values = np.array([x[NAME] for x in honest_parts])
  median = merge_robustly("median", parts)[NAME]
  assert (values.min(0) <= median).all() and (median <= values.max(0)).all()
  clipped = merge_robustly("clipped", parts)[NAME]
  largest = max(np.linalg.norm(x[NAME]) for x in honest_parts)
  # The mean of clipped parts: two liars add at most 2/5 of an honest norm.
  honest_sum = sum(x[NAME] for x in honest_parts) / 5
  assert np.linalg.norm(clipped - honest_sum) <= 0.4 * largest * 1.3


def test_the_ledger_is_json_that_a_person_can_read(tmp_path):
  audits = Audits(str(tmp_path), 0.5)
  audits.take("alice", 3)
  audits.ban("mallory", "why", 4)
  assert json.loads((tmp_path / "ledger.json").read_text()) == {
    "generation": 0,
    "first": {"alice": 3},
    "banned": {"mallory": "why"},
    "undone": None,
  }


def test_late_volunteers_do_not_wait_for_those_that_are_gone(tmp_path):
  simulation = Simulation(tmp_path, 0.0)
  simulation.join("bob", "alice")  # Bob's process is killed, and never asks
  rounds = simulation.rounds
  rounds.next("alice", 0.0)
  rounds.tick(11.0)
  simulation.join("alice")
  assert rounds.next("alice", 12.0) == WAIT  # Bob goes first
  assert rounds.next("alice", 22.0).task == 0
  rounds.tick(33.0)
  rounds.join("bob", 33.0, KERNELS)
  assert rounds.next("bob", 33.0).task == 0
  rounds.join("alice", 33.0, KERNELS)
  assert rounds.next("alice", 40.0) == WAIT


def test_a_copy_that_nobody_can_audit_does_not_stop_the_round(tmp_path):
  more = {"audit_by": "volunteers", "merge": "median"}
  simulation = Simulation(tmp_path, 0.0, **more)
  for member in ("eve", "mallory"):
    simulation.rounds.join(member, 0.0, KERNELS | {"CPU": "b"})
  simulation.run({"eve": honest}, 1, last="volunteers")
  same = {NAME: np.ones((4, 8), np.float32)}
  for _ in range(2):
    simulation.turn("mallory", lambda x, task: same)
  simulation.turn("eve")
  assert simulation.rounds.tick(0.0)


def test_a_run_says_whose_volunteers_its_audits_wait_for(tmp_path):
  """Volunteers of one owner, or two owners whose results differ."""
  simulation = Simulation(tmp_path, 1.0, audit_by="volunteers")
  assert simulation.rounds.lack == "no volunteer takes part"
  simulation.join("alice/1", "alice/2")
  assert not simulation.rounds.lack
  while simulation.turn("alice/1") is not None:
    pass
  assert simulation.turn("alice/2") is None
  fix = (
    "needs a volunteer of another owner: `palm_mtf pods token OWNER/NAME` "
    "makes its token"
  )
  assert simulation.rounds.lack == f"an audit of alice {fix}"
  simulation.join("mallory")
  assert not simulation.rounds.lack
  simulation.turn("mallory", flip)
  while simulation.turn("mallory") is not None:
    pass
  assert simulation.rounds.lack == f"an audit of alice and mallory {fix}"
  simulation.join("bob")
  assert not simulation.rounds.lack
  simulation.turn("bob")
  assert [x["member"] for x in simulation.find("liar")] == ["mallory"]


@pytest.mark.parametrize(
  ("name", "content"),
  [
    ("secret", b""),  # whoever knows that could foresee the draws
    ("ledger.json", b"{"),
    ("ledger.json", b"[]"),
    ("ledger.json", b'{"first": {"a": "x"}}'),
    ("ledger.json", b'{"banned": ["mallory"]}'),
    ("3.npz", None),
    ("3.npz", b"PK\3\4"),
  ],
)
def test_damaged_files_of_audits_are_named_in_one_line(name, content, tmp_path):
  if content is not None:
    (tmp_path / name).write_bytes(content)
  message = message_of(lambda: Audits(str(tmp_path), 0.5).read(3))
  assert message.startswith(f"{tmp_path / name}: ")
  assert message.endswith(
    "and is damaged or missing; restore it, or begin the run again in another "
    "MODEL_DIR."
  )


def test_files_of_others_in_the_folder_of_audits_stay(tmp_path):
  (tmp_path / "mine.npz").write_bytes(b"")
  Audits(str(tmp_path), 0.5).keep(0, {}, {})
  assert (tmp_path / "mine.npz").exists()
