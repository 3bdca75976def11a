# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Published protocols to the letter, only by settings and the user's files.

The texts are our own; the forms are those of Hendrycks et al. (MMLU, 2021) and
of Wei et al. (chains of thought, 2022).
"""

import json

import pytest

from palm_mtf.config import FewShotConfig, TaskEvalConfig
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.evaluation.seqio_tasks import open_eval_tasks
from palm_mtf.tasks import fewshot
from tests.cases import needs_t5
from tests.seqio_testing import Says, bind

pytestmark = needs_t5

assert {"mmlu", "gsm8k"} <= {*fewshot.TASKS}

SUBJECTS = ("abstract_algebra", "law")
HEADER = "The following are multiple choice questions (with answers) about "
CHAINS = """\
Q: A boat has 3 seats. How many seats have 2 boats?
A: Each boat has 3 seats. 2 * 3 = 6. The answer is 6.

Q: Ann had 9 cups and broke 4. How many are left?
A: She had 9 cups. 9 - 4 = 5. The answer is 5.

"""


def mmlu_record(subject, number):
  return {
    "question": f"What is {number} + 1 in {subject}?",
    "subject": subject,
    "choices": [f"{number + i}" for i in range(4)],
    "answer": 1,
  }


DEV = [mmlu_record(s, n) for n in (4, 2, 9) for s in SUBJECTS]
TEST = [mmlu_record(s, n) for s in SUBJECTS for n in (5, 7, 8)]
GSM8K = [
  {"question": "Ann has 5 boats, and buys 6. How many?", "answer": "x #### 11"},
  {"question": "Bo has 7 boats, and sells 2. How many?", "answer": "x #### 5"},
]


def published_mmlu(record, shots):
  """Returns the prompt of Hendrycks et al., written from their paper."""

  def example(row):
    lines = [row["question"]]
    lines += [f"{'ABCD'[i]}. {row['choices'][i]}" for i in range(4)]
    return "\n".join([*lines, "Answer:"])

  # Their program puts a space before each word of the subject.
  subject = "".join(f" {word}" for word in record["subject"].split("_"))
  prompt = f"{HEADER}{subject}.\n\n"
  of_subject = [x for x in DEV if x["subject"] == record["subject"]]
  for row in of_subject[:shots]:
    prompt += f"{example(row)} {'ABCD'[row['answer']]}\n\n"
  return prompt + example(record)


@pytest.fixture
def evaluated(tmp_path, vocabulary):
  """Opens a task as `palm_mtf evaluate` does, by settings."""
  for name, train, validation in (("mmlu", DEV, TEST), ("gsm8k", GSM8K, GSM8K)):
    (tmp_path / name).mkdir()
    for split, rows in (("train", train), ("validation", validation)):
      lines = "".join(json.dumps(row) + "\n" for row in rows)
      (tmp_path / name / f"{split}.jsonl").write_text(lines)
  (tmp_path / "cot.txt").write_text(CHAINS)
  bind(
    documents__vocabulary__path=vocabulary.path,
    records__places__folder=str(tmp_path),
  )

  def run(name, few_shot, **settings):
    config = TaskEvalConfig(
      eval_tasks=[name], few_shot=FewShotConfig(**few_shot), **settings
    )
    (task,) = open_eval_tasks(config, open_vocabulary(vocabulary.path), 2048)
    return task

  return run


def prompts(task, vocabulary):
  return [vocabulary.decode(ids) for ids in task.inputs]


MMLU = {
  "num_shots": 2,
  "exemplars": "first",
  "prompt_headers": {"mmlu": HEADER + " {group}."},
}


def test_mmlu_in_the_form_of_its_authors(evaluated, vocabulary):
  task = evaluated("mmlu", MMLU)
  found = prompts(task, open_vocabulary(vocabulary.path))
  expected = [published_mmlu(row, 2) for row in TEST for _ in "ABCD"]
  assert found == expected
  assert task.name == "mmlu_2_shot_custom"
  assert found[0].startswith(
    "The following are multiple choice questions (with answers) about  "
    "abstract algebra.\n\nWhat is 4 + 1 in abstract_algebra?\nA. 4\nB. 5\n"
    "C. 6\nD. 7\nAnswer: B\n\nWhat is 2 + 1"
  )


def test_chains_of_thought_of_the_users_file(evaluated, vocabulary, tmp_path):
  files = {"gsm8k": str(tmp_path / "cot.txt")}
  task = evaluated(
    "gsm8k",
    {"exemplar_files": files},
    answer_patterns={"gsm8k": r"The answer is (.*?)\."},
  )
  assert task.name == "gsm8k_custom"
  found = prompts(task, open_vocabulary(vocabulary.path))
  assert found == [f"{CHAINS}Q: {row['question']}\nA:" for row in GSM8K]
  # Only the pattern finds an answer, and only before the next question.
  says = Says(
    [
      [" 5 + 6 = 11. The answer is 11.\n\nQ: 1 + 1?\nA: The answer is 2."],
      [" 7 - 2 = 5\n\nQ: 5?\nA: The answer is 5."],
    ]
  )
  result = task.evaluate(1, says)
  assert [x["prediction"] for x in result.records] == ["11", ""]
  assert result.metrics == {"sequence_accuracy": 50}
