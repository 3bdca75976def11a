# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import ast
import json
import re
import shutil
import sys

import gin
import pytest
import seqio

from palm_mtf.cli.main import main
from palm_mtf.lm_eval import __main__ as command
from palm_mtf.tasks import corpus, fewshot, memorisation
from tests import processes
from tests.doc_pages import Page
from tests.seqio_testing import (
  add_examples,
  exact,
  mean_score,
  registries_restored,
)
from tests.source_files import ROOT
from tests.tasks.averages_test import PUBLISHED, PUBLISHED_AVERAGES

# What the page's gin files import is registered before a test restores it.
assert corpus and fewshot and memorisation

PAGE = Page("docs/evaluation.md")
BLOCK = PAGE.shows("pip install 'palm_mtf[lm_eval]'")


@BLOCK
def test_where_the_harness_is_absent_the_command_says_how_to_install_it(
  block, monkeypatch, capsys
):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  assert command.main() == 2
  install, *_ = block.text.splitlines()
  assert capsys.readouterr().err.rstrip().endswith(install)


@pytest.mark.peers
@BLOCK
def test_the_command_measures_a_task(block, quickstart):
  """A local task stands for those that the harness downloads."""
  pytest.importorskip("lm_eval", reason="lm-evaluation-harness is absent")
  folder = quickstart.parents[1]
  (folder / "data.jsonl").write_text('{"text": "one two three"}\n')
  task = {
    "task": "counting",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}],
  }
  (folder / "counting.yaml").write_text(json.dumps(task))
  _, (python, *words) = block.commands
  assert (python, words[-2]) == ("python", "--tasks")
  done = processes.python(
    *(*words[:-1], "counting", "--include_path", str(folder)),
    variables={"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"},
    cwd=folder,
  )
  assert done.returncode == 0, done.stderr
  assert "bits_per_byte" in done.stdout


EXAMPLES = {"inputs": ["one two", "three four"], "targets": [" three", " five"]}


@pytest.fixture
def evaluated(quickstart, capsys):
  """Runs a command with my_task registered; returns its output."""

  def run(words, *flags):
    capsys.readouterr()
    assert main([*words[1:], *flags]) == 0, words
    return capsys.readouterr().out

  with registries_restored():
    add_examples(
      "my_task",
      {"validation": EXAMPLES, "test": EXAMPLES},
      [seqio.preprocessors.tokenize],
      features=("inputs", "targets"),
      metric_fns=[mean_score, exact],
    )
    yield run
  gin.clear_config()


@PAGE.shows("palm_mtf score --model_dir runs/quickstart --text")
def test_texts_are_scored_and_a_run_is_evaluated(block, evaluated, quickstart):
  text, file, loss, task, every = block.commands
  shutil.rmtree(quickstart / "checkpoints" / "step_00000004")
  assert "perplexity" in evaluated(text)
  lines = [
    {"text": "one two three"},
    {"inputs": "one two", "targets": " three"},
    {"inputs": "one two", "options": [" three", " four"]},
  ]
  (quickstart.parents[1] / "questions.jsonl").write_text(
    "".join(json.dumps(line) + "\n" for line in lines)
  )
  assert len(evaluated(file).splitlines()) == 3
  assert "bits_per_byte" in evaluated(loss)
  assert re.search(r"my_task +validation", evaluated(task))
  records = [json.loads(x) for x in evaluated(every).splitlines()]
  assert [x["step"] for x in records] == [8, 12]
  assert {x["split"] for x in records} == {"test"}
  kept = sorted(
    x.name for x in (quickstart / "eval" / "step_00000012").iterdir()
  )
  assert {x.partition(".")[2] for x in kept} == {
    "json",
    "jsonl",
    "answers.jsonl",
  }


@PAGE.shows("palm_mtf evaluate --model_dir runs/quickstart --gin.EVAL_TASKS=")
def test_clean_examples_have_numbers_of_their_own(block, evaluated):
  (command,) = block.commands
  (record,) = map(json.loads, evaluated(command, "--json").splitlines())
  assert {"exact", "exact_clean"} <= {*record["metrics"]}


SUBJECTS = ["international_law", "jurisprudence", "professional_law"]
MMLU = {
  "question": "What is 4 + 1?",
  "choices": ["4", "5", "6", "7"],
  "answer": 1,
}
GSM8K = {
  "question": "Ann has 5 boats, and buys 6. How many?",
  "answer": "x #### 11",
}
EXEMPLAR = "Q: 2 boats of 3 seats?\nA: 2 * 3 = 6. The answer is 6.\n\n"


@pytest.fixture
def sets(quickstart):
  """The current folder, with the page's mine.gin, records and prompts."""

  def own(i):
    return {"question": f"{i}?", "subject": SUBJECTS[i % len(SUBJECTS)]}

  pytest.importorskip("t5", reason="t5 is not installed")
  folder = quickstart.parents[1]
  (mine,) = (x.text for x in PAGE.blocks if x.text.startswith("# mine.gin"))
  (folder / "mine.gin").write_text(mine)
  for name, record in (("mmlu", MMLU), ("gsm8k", GSM8K)):
    (folder / "sets" / name).mkdir(parents=True)
    for split, count in (("train", 18), ("validation", 3)):
      path = folder / "sets" / name / f"{split}.jsonl"
      lines = [json.dumps({**record, **own(i)}) for i in range(count)]
      path.write_text("\n".join(lines))
  (folder / "prompts").mkdir()
  (folder / "prompts" / "chain_of_thought.txt").write_text(EXEMPLAR)
  return folder


@PAGE.shows("# mine.gin: PaLM's few-shot evaluation on JSON lines")
def test_few_shot_tasks_read_json_lines_of_the_folder_that_is_named(
  block, sets, evaluated
):
  flags = ["--gin_file=mine.gin", "--json"]
  words = "palm_mtf evaluate --model_dir runs/quickstart".split()
  assert evaluated(words, *flags, "--print_config")
  only = "--gin.EVAL_TASKS=['gsm8k_8_shot']"
  (record,) = map(json.loads, evaluated(words, *flags, only).splitlines())
  assert record["task"] == "gsm8k_8_shot"


@pytest.mark.slow
@PAGE.shows("# protocol.gin: MMLU and GSM8K to the letter")
def test_a_published_protocol_is_set_by_gin_alone(block, sets, evaluated):
  (sets / "protocol.gin").write_text(block.text)
  words = "palm_mtf evaluate --model_dir runs/quickstart".split()
  flags = ["--gin_file=protocol.gin", "--json"]
  records = [json.loads(x) for x in evaluated(words, *flags).splitlines()]
  assert {x["task"] for x in records} == {"mmlu_5_shot_custom", "gsm8k_custom"}
  (mmlu,) = (x for x in records if x["task"].startswith("mmlu"))
  assert {"accuracy/law", "macro_accuracy/law"} <= {*mmlu["metrics"]}


@pytest.mark.slow
@PAGE.shows(
  "palm_mtf evaluate --model_dir runs/quickstart --gin_file=eval/corpus"
)
def test_tasks_of_a_runs_own_text_are_evaluated(block, evaluated):
  own_text, recited = block.commands
  text = f"--gin.TEXT_FILES={str(ROOT / 'palm_mtf' / 'data' / '**' / '*.py')!r}"
  few = "--gin.corpus.questions.num_questions=6"
  table = evaluated(own_text, text, few)
  for name in ("continuation", "recall", "brackets"):
    assert f"corpus_{name}" in table
  few = "--gin.memorisation.spans.num_spans=2"
  assert "memorised" in evaluated(recited, few)


@PAGE.shows("import json\nfrom pathlib import Path")
def test_the_papers_averages_are_printed_of_kept_results(
  block, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  folder = tmp_path / "runs" / "mine" / "eval" / "step_00001000"
  folder.mkdir(parents=True)
  for task, metrics in PUBLISHED.items():
    content = {"task": f"{task}_1_shot", "metrics": metrics}
    (folder / f"{task}.json").write_text(json.dumps(content))
  exec(block.text, {})
  printed = ast.literal_eval(capsys.readouterr().out)
  assert printed == pytest.approx(PUBLISHED_AVERAGES, abs=0.05)


@pytest.mark.slow
@PAGE.shows("palm_mtf score --model_dir runs/quickstart --gin.WEIGHT_DTYPE")
def test_two_models_are_compared(block, quickstart, capsys):
  (command,) = block.commands
  assert main(command[1:]) == 0
  assert "kl divergence" in capsys.readouterr().out


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested()
