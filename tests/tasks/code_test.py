# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import itertools
import json
import time

import pytest
import seqio

from palm_mtf.evaluation.few_shot import few_shot_task
from palm_mtf.tasks import code as code_tasks
from palm_mtf.tasks import code_execution
from tests.seqio_testing import bind, examples_of, targets_of, text_of

PROMPT = 'def twice(x):\n  """Returns x twice."""\n'
HUMANEVAL = {
  "task_id": "HumanEval/0",
  "prompt": PROMPT,
  "entry_point": "twice",
  "canonical_solution": "  return x + x\n",
  "test": "def check(candidate):\n  assert candidate(4) == 8\n",
}
MBPP = {
  "task_id": 1,
  "text": "Write a function to double a number.",
  "code": "def f(x):\r\n\r\n  return 2 * x".replace("\r", ""),
  "test_list": ["assert f(2) == 4", "assert f(0) == 0"],
  "test_setup_code": "",
  "challenge_test_list": [],
}
RIGHT, WRONG = "  return 2 * x\n", "  return x\n"


@pytest.fixture
def folder(tmp_path, vocabulary):
  for dataset, split, records in (
    ("humaneval", "validation", [HUMANEVAL]),
    ("mbpp", "validation", [MBPP]),
    ("mbpp", "train", [{**MBPP, "task_id": i} for i in range(4)]),
  ):
    (tmp_path / dataset).mkdir(exist_ok=True)
    (tmp_path / dataset / f"{split}.jsonl").write_text(
      "".join(json.dumps(record) + "\n" for record in records)
    )
  configure(vocabulary, tmp_path, allowed=True)
  return tmp_path


def configure(vocabulary, folder, allowed: bool) -> None:
  bind(
    documents__vocabulary__path=vocabulary.path,
    records__places__folder=str(folder),
    code__programs__allowed=allowed,
    code__programs__secs=20.0,
  )


def results(name, output, made=None) -> dict[str, float]:
  task = seqio.get_mixture_or_task(name)
  (example,) = made = made or examples_of(name)
  prediction = task.postprocess_fn(output, example=example, is_target=False)
  (metric,) = task.predict_metric_fns
  return metric(targets_of(name, made), [prediction])


def test_a_function_passes_when_its_tests_do(folder):
  made = examples_of("humaneval")
  for output, passes in (
    (RIGHT, 100),
    (f"{RIGHT}\ndef main():\n  loop for ever", 100),
    (f"  y = x\n\n  if y:\n    return 2 * y\n{RIGHT}", 100),
    (WRONG, 0),
    ("  raise SystemExit(0)\n", 0),
    ("no python", 0),
  ):
    assert results("humaneval", output, made) == {"pass@1": passes}, output


def test_of_several_samples_each_is_run(folder):
  assert results("humaneval", [RIGHT, WRONG, WRONG, RIGHT]) == {
    "pass@1": pytest.approx(50),
    "pass@4": 100,
  }


def test_as_many_programs_run_at_once_as_there_are_cores(folder, monkeypatch):
  running, most = [], []

  def run(program, limits):
    running.append(program)
    most.append(len(running))
    time.sleep(0.05)
    running.remove(program)
    return code_execution.Outcome(True, "")

  monkeypatch.setattr(code_tasks, "run_program", run)
  monkeypatch.setattr(code_tasks, "usable_cores", lambda: 3)
  samples = [f"{RIGHT}# {i}" for i in range(12)]
  assert results("humaneval", samples)["pass@1"] == 100
  assert max(most) == 3


def test_a_program_is_asked_for_with_its_tests(folder):
  name = few_shot_task("mbpp", 3)
  (example,) = examples_of(name)
  question = (
    "# Write a function to double a number.\n# It passes these tests:\n"
    "# assert f(2) == 4\n# assert f(0) == 0\n"
  )
  solved = f"{question}def f(x):\n  return 2 * x"
  assert text_of(example, "inputs") == "\n\n".join([solved] * 3 + [question])
  output = "def f(x):\n  return x + x\n\n# Write another one"
  assert results(name, output) == {"pass@1": 100}
  assert results(name, "def f(x):\n  return 4\n") == {"pass@1": 0}


def test_nothing_is_run_unless_asked_for(folder, vocabulary):
  configure(vocabulary, folder, allowed=False)
  message = r"set --gin\.code\.programs\.allowed=True"
  with pytest.raises(Exception, match=message):
    results("humaneval", RIGHT)
  with pytest.raises(Exception, match=message):
    code_tasks.pass_at_k([[PROMPT, ""]], [RIGHT])


def test_the_estimate_is_the_mean_over_every_choice_of_k_samples():
  for passed in range(7):
    samples = [i < passed for i in range(6)]
    for k in range(1, 7):
      choices = list(itertools.combinations(samples, k))
      expected = sum(map(any, choices)) / len(choices)
      assert code_tasks.estimate(6, passed, k) == pytest.approx(expected)
