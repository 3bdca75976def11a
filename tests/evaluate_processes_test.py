# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf evaluate` while a run trains, and after it was killed."""

import json
import signal

import pytest

from tests import runs
from tests.processes import wait_until

NUM_EXAMPLES = 400
MODULE = f"""
import numpy as np
import seqio
import tensorflow as tf

TEXTS = [f"{{i}} one two" for i in range({NUM_EXAMPLES})]


def _read(split, shuffle_files=False, seed=None):
  return tf.data.Dataset.from_tensor_slices(
    {{"inputs": TEXTS, "targets": [" three"] * len(TEXTS)}}
  )


def says_three(targets, predictions):
  return {{"says_three": np.mean([x[:6] == " three" for x in predictions])}}


seqio.TaskRegistry.add(
  "counting_on",
  source=seqio.FunctionDataSource(_read, splits=["validation"]),
  preprocessors=[seqio.preprocessors.tokenize],
  output_features={{
    name: seqio.Feature(seqio.SentencePieceVocabulary("/none.model"))
    for name in ("inputs", "targets")
  }},
  metric_fns=[says_three],
)
"""
TRAIN = {
  "TRAIN_STEPS": 20,
  "CHECKPOINT_STEPS": 4,
  "EVAL_STEPS": 1000,
  "PROMPTS": [],
}
CHECKPOINTS = [4, 8, 12, 16, 20]


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """The folder of a module with a task, and the run."""
  (tmp_path / "my_counting.py").write_text(MODULE)
  (tmp_path / "mine.gin").write_text("import my_counting\n")
  monkeypatch.syspath_prepend(tmp_path)
  return tmp_path


def start_evaluate(corpus, folder, **macros):
  """Starts `palm_mtf evaluate` on the task, in a separate process."""
  settings = {"EVAL_TASKS": ["counting_on"], **TRAIN, **macros}
  command = f"evaluate --json --gin_file={folder / 'mine.gin'}"
  return runs.start(command, corpus, folder / "run", **settings)


def answers_of(folder, step):
  """Returns the lines so far of the answers for the checkpoint of a step."""
  name = "counting_on-validation.answers.jsonl"
  path = folder / "run" / "eval" / f"step_{step:08d}" / name
  return path.read_text() if path.exists() else ""


@pytest.mark.slow
def test_every_new_checkpoint_is_evaluated_while_another_process_trains(
  corpus, folder
):
  trains = runs.start("train", corpus, folder / "run", **TRAIN)
  try:
    first = folder / "run" / "checkpoints" / "step_00000004"
    wait_until(first.exists, trains)
    trains.send_signal(signal.SIGSTOP)  # so that it does not finish too early
    evaluates = start_evaluate(
      corpus,
      folder,
      EVAL_CHECKPOINTS="every",
      EVAL_EXAMPLES=3,
      EVAL_WAIT_SECS=300.0,
    )
    lines = [evaluates.stdout.readline()]
    assert lines[0], evaluates.communicate()[1]
    assert trains.poll() is None
    trains.send_signal(signal.SIGCONT)
    out, err = evaluates.communicate()
    assert evaluates.returncode == 0, err
    assert trains.wait() == 0
  finally:
    trains.kill()
    trains.communicate()
  lines += out.splitlines()
  assert [json.loads(line)["step"] for line in lines] == CHECKPOINTS


@pytest.mark.slow
def test_a_killed_evaluation_resumes_where_it_was(corpus, folder):
  assert runs.run("train", corpus, folder / "run", **TRAIN) == 0
  killed = start_evaluate(corpus, folder)
  wait_until(lambda: answers_of(folder, 20).count("\n") > 20, killed)
  killed.kill()
  killed.communicate()
  kept = answers_of(folder, 20)
  num_kept = kept.count("\n")
  assert 20 < num_kept < NUM_EXAMPLES
  again = start_evaluate(corpus, folder)
  out, err = again.communicate()
  assert again.returncode == 0, err
  answers = answers_of(folder, 20)
  # The file has a header and each example once, so no answer was recomputed.
  assert answers.count("\n") == 1 + NUM_EXAMPLES
  whole_lines = kept[: kept.rindex("\n") + 1]
  assert answers.startswith(whole_lines)
  (folder / "run" / "eval").rename(folder / "killed")
  peaceful = start_evaluate(corpus, folder)
  assert (peaceful.communicate()[0], peaceful.returncode) == (out, 0)
  expected = answers_of(folder, 20).splitlines()
  assert sorted(answers.splitlines()) == sorted(expected)
