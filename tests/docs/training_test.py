# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import gzip
import json
import re
import shutil

import pytest

from palm_mtf.cli.main import main
from tests import runs
from tests.doc_pages import Page
from tests.docs.sweep_test import runs_of_command

PAGE = Page("docs/training.md")


@pytest.fixture
def trained(finished, tmp_path, monkeypatch):
  """The current folder, with the runs that the page names."""
  monkeypatch.chdir(tmp_path)
  for name in ("quickstart", "first", "mine"):
    shutil.copytree(finished, tmp_path / "runs" / name)
  return tmp_path


@PAGE.shows("$ palm_mtf train --gin_file=recipes/quickstart.gin")
def test_the_error_shown_is_the_error_given(block, capsys):
  ((command, output),) = block.runs
  assert main(command[1:]) == 2
  assert capsys.readouterr() == ("", output)


@PAGE.shows("palm_mtf checkpoints list runs/quickstart")
def test_checkpoints_are_listed_compared_and_pruned(block, trained, capsys):
  for command in block.commands:
    assert main(command[1:]) == 0, command
  folder = trained / "runs" / "quickstart" / "checkpoints"
  assert len([*folder.glob("step_????????")]) == 1  # --keep 1


@pytest.mark.slow
@PAGE.shows(
  *(
    "palm_mtf train --gin_file=recipes/finetune.gin \\\n"
    f"  --gin.MODEL_DIR='\"runs/{x}\"'"
    for x in ("tuned", "attention")
  )
)
def test_another_run_begins_from_the_weights_of_the_first(block, trained):
  (trained / "texts").mkdir(exist_ok=True)
  lines = [json.dumps({"text": f"{i} red birds"}) for i in range(200)]
  file = trained / "texts" / "birds.jsonl.gz"
  file.write_bytes(gzip.compress("\n".join(lines).encode()))
  (command,) = block.commands
  sizes = [
    f"--gin.{name}={value!r}"
    for name, value in {**runs.SETTINGS, "TRAIN_STEPS": 1}.items()
  ]
  assert main([*command[1:], *sizes]) == 0
  before = runs.read_tensors(trained / "runs" / "quickstart", 12)
  if "FROZEN" not in block.text:
    after = runs.read_tensors(trained / "runs" / "tuned", 1)
    assert before.keys() == after.keys()
    return
  after = runs.read_tensors(trained / "runs" / "attention", 1)
  slots = [x for x in after if x.endswith(("/momentum", "/second_moment"))]
  assert slots and all("/attention/" in x for x in slots)
  for name in before.keys() & after.keys():
    is_same = (before[name] == after[name]).all()
    assert is_same == ("/attention/" not in name), name


@pytest.mark.slow
@PAGE.shows(
  "palm_mtf train --gin_file=recipes/quickstart.gin "
  "--gin.MODEL_DIR='\"runs/student\"'"
)
def test_a_smaller_model_learns_from_the_quickstart(block, trained):
  (command,) = block.commands
  texts = runs.write_corpus(trained / "texts")
  given = runs.SETTINGS | {"D_MODEL": 16, "TEXT_FILES": f"{texts}/*.txt"}
  more = {"TRAIN_STEPS": 1, "TEACHER_TOKENS": 20, "PROMPTS": []}
  sizes = [f"--gin.{name}={value!r}" for name, value in (given | more).items()]
  assert main([*command[1:], *sizes]) == 0
  (line,) = runs.read_metrics(trained / "runs" / "student")
  assert line["teacher_loss"] > 0


@pytest.mark.slow
@PAGE.shows(
  "palm_mtf train --gin_file=runs/quickstart/config.gin --gin_file=pr"
)
def test_the_quickstart_is_pruned_to_the_half(block, trained):
  (command,) = block.commands
  assert main([*command[1:], "--gin.TRAIN_STEPS=1"]) == 0
  found = runs.read_tensors(trained / "runs" / "pruned", 1)
  for name in ("attention/q", "mlp/wo"):
    assert (found[f"layer_000/{name}"] == 0).mean() == 0.5


@PAGE.shows("palm_mtf sweep --gin_file=sweeps/pruning.gin")
def test_the_table_of_pruned_models_has_the_runs_of_its_sweep(block):
  (command,) = block.commands
  _, found = runs_of_command(command[2:])
  table = re.search(r"\| pruned \|.*?\n\n", PAGE.text, re.DOTALL)[0]
  table = re.findall(r"(?m)^\| `(\S+)`", table)
  names = [f"{when}-{name}" for when in ("before", "after") for name in table]
  assert [x.name for x in found] == names


@pytest.mark.slow
@PAGE.shows("palm_mtf report runs/quickstart")
def test_reports_are_written_where_the_page_says(block, trained):
  for command in block.commands:
    assert main(command[1:]) == 0
  assert (trained / "runs" / "quickstart" / "report.html").is_file()
  assert (trained / "both.html").is_file()


@pytest.fixture
def adapted(trained):
  """The runs of the page's lineage: `chat` adapts `tuned`."""
  corpus = runs.write_corpus(trained / "texts")
  vocabulary = str(trained / "runs" / "quickstart" / "vocabulary.model")
  begun = {"TRAIN_STEPS": 1, "PROMPTS": [], "VOCABULARY": vocabulary}
  rate = {"LEARNING_RATE": 0.002}
  adapter = {"ADAPTER": "lora", "ADAPTER_RANK": 8, "ADAPTER_ALPHA": 16.0}
  for name, source, settings in (
    ("tuned", "runs/quickstart", rate),
    ("chat", "runs/tuned", rate | adapter),
  ):
    given = {**begun, **settings, "INIT_CHECKPOINT": source}
    assert runs.run("train", corpus, trained / "runs" / name, **given) == 0
  return trained


@pytest.mark.slow
@PAGE.shows("$ palm_mtf lineage runs/chat")
def test_a_lineage_is_drawn_as_shown(block, adapted, capsys):
  shutil.rmtree("runs/quickstart")
  capsys.readouterr()
  ((command, output),) = block.runs
  assert main(command[1:]) == 1
  shown, printed = output.splitlines(), capsys.readouterr().out.splitlines()
  for ours, line in zip(printed, shown, strict=False):
    for word in ("from,", "trained on", "found", "missing", "SEED = 0"):
      assert (word in ours) == (word in line), (ours, line)
    assert len(ours) - len(ours.lstrip()) == len(line) - len(line.lstrip())


@pytest.mark.slow
@PAGE.shows("palm_mtf lineage runs/chat --score")
def test_a_text_is_scored_along_a_lineage(block, adapted, capsys):
  (command,) = block.commands
  capsys.readouterr()
  assert main(command[1:]) == 0
  printed = capsys.readouterr().out
  assert all(f"runs/{x}" in printed for x in ("chat", "tuned", "quickstart"))


@PAGE.shows("palm_mtf lineage runs/chat --format")
def test_a_run_is_printed_for_other_software(block, trained, capsys):
  shutil.copytree("runs/mine", "runs/chat")
  capsys.readouterr()
  for command in block.commands:
    assert main(command[1:-1]) == 0  # without the file of the output
  events, _, metadata = capsys.readouterr().out.rpartition("\n{\n")
  assert [json.loads(x)["eventType"] for x in events.splitlines()] == [
    "START",
    "COMPLETE",
  ]
  assert json.loads(f"{{{metadata}")["@type"] == "sc:Dataset"


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested("gin/recipes/quickstart.gin")
