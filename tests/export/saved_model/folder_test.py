# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Plain TensorFlow gives the results of score and generate."""

import json
import shutil

import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from palm_mtf.cli.main import main
from palm_mtf.data.vocabulary.load import open_vocabulary
from tests import processes, runs
from tests.export.saved_model import call_signatures

TEXTS = ["one two three", "four \u2581 five \u00e9", "x", "seven eight " * 40]
PAIRS = [["one two ", "three"], ["1: four five six seven", " eight nine"]]
PROMPTS = ["one two", "5: three", "7"]
OVER = {"max_tokens": 8, "temperature": 0.0}

# {name of a call: (signature, inputs)}
CALLS = {
  "score": ("score", {"texts": TEXTS}),
  "score_targets": (
    "score_targets",
    dict(zip(("inputs", "targets"), zip(*PAIRS, strict=True), strict=True)),
  ),
  "generate": ("generate", {"prompts": PROMPTS, **OVER}),
  "defaults": ("generate", {"prompts": PROMPTS}),
  "too much": ("generate", {"prompts": PROMPTS, **OVER, "max_tokens": 31}),
  "from none": ("generate", {"prompts": PROMPTS, "top_k": 0}),
}


@pytest.fixture(scope="module")
def folder(finished, tmp_path_factory):
  """The run of `finished`, exported."""
  path = tmp_path_factory.mktemp("exported") / "served"
  flags = ["--model_dir", str(finished), "--format=saved_model"]
  assert main(["export", *flags, "--output", str(path)]) == 0
  return path


@pytest.fixture(scope="module")
def results(folder):
  """The result or error of each of CALLS."""
  found = call_signatures.call(str(folder / "12"), list(CALLS.values()))
  return dict(zip(CALLS, found, strict=True))


@pytest.mark.slow
def test_another_process_without_palm_mtf_has_the_same_results(results, folder):
  program, calls = call_signatures.__file__, [*CALLS.values()]
  done = processes.python(program, folder / "12", json.dumps(calls), cwd=folder)
  assert done.returncode == 0, done.stderr
  for found, name in zip(json.loads(done.stdout), CALLS, strict=True):
    if isinstance(found, str):
      assert found == results[name]
      continue
    for key, value in found.items():
      expected = results[name][key]
      if key == "log_likelihood":
        expected = pytest.approx(expected, rel=1e-6)
      assert value == expected


def test_every_operation_is_tensorflows(folder):
  """Otherwise only a process that imports palm_mtf could load the folder."""
  saved = saved_model_pb2.SavedModel.FromString(
    (folder / "12" / "saved_model.pb").read_bytes()
  )
  (graph,) = (x.graph_def for x in saved.meta_graphs)
  nodes = [
    *graph.node,
    *(x for f in graph.library.function for x in f.node_def),
  ]
  ours = [x.op for x in nodes if x.op.startswith("Palm")]
  assert len(nodes) > 100 and not ours
  # A function in Python would run only in the process that made it.
  assert not any("PyFunc" in x.op for x in nodes)


def _printed(command, finished, *flags) -> list[dict]:
  return runs.printed(command, "--model_dir", finished, "--json", *flags)


def test_likelihoods_of_texts_of_any_length_equal_score(results, finished):
  flags = [flag for text in TEXTS for flag in ("--text", text)]
  lines = _printed("score", finished, *flags)[: len(TEXTS)]
  expected = [line["log_likelihood"] for line in lines]
  assert results["score"]["log_likelihood"] == pytest.approx(expected, rel=1e-5)
  assert results["score"]["tokens"] == [line["tokens"] for line in lines]


def test_likelihoods_of_targets_equal_score(results, finished, tmp_path):
  file = tmp_path / "pairs.tsv"
  file.write_text("".join("\t".join(pair) + "\n" for pair in PAIRS))
  lines = _printed("score", finished, "--input", str(file))
  expected = [line["log_likelihood"] for line in lines[: len(PAIRS)]]
  found = results["score_targets"]["log_likelihood"]
  assert found == pytest.approx(expected, rel=1e-5)


def test_greedy_text_equals_generate(results, finished):
  flags = [flag for prompt in PROMPTS for flag in ("--prompt", prompt)]
  greedy = ["--gin.TEMPERATURE=0.0", "--gin.SAMPLE_TOKENS=8"]
  lines = _printed("generate", finished, *flags, *greedy)
  assert results["generate"] == {
    "continuation": [line["continuation"] for line in lines],
    "num_tokens": [line["num_tokens"] for line in lines],
  }


def test_ends_and_starts_are_those_of_an_imported_model(
  finished, results, tmp_path
):
  """Several tokens end its texts, and no start token stands before prompts."""
  run, served = tmp_path / "run", tmp_path / "served"
  shutil.copytree(finished, run)
  vocabulary = open_vocabulary(str(finished / "vocabulary.model"))
  text = results["generate"]["continuation"][0]
  ends = [vocabulary.eod_id, vocabulary.encode(text)[3]]
  (run / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
  with open(run / "config.gin", "a") as file:
    file.write("ADD_START = False\n")
  flags = ["--model_dir", str(run), "--format=saved_model"]
  assert main(["export", *flags, "--output", str(served)]) == 0
  kinds = ("score", "score_targets", "generate")
  found = call_signatures.call(str(served / "12"), [CALLS[x] for x in kinds])
  for kind, each in zip(kinds, found, strict=True):
    assert each != results[kind]
  test_likelihoods_of_texts_of_any_length_equal_score({"score": found[0]}, run)
  test_likelihoods_of_targets_equal_score(
    {"score_targets": found[1]}, run, tmp_path
  )
  test_greedy_text_equals_generate({"generate": found[2]}, run)


def test_missing_arguments_have_the_settings_of_the_run(results):
  sample_tokens = runs.SETTINGS["SAMPLE_TOKENS"]
  found = results["defaults"]["num_tokens"]
  assert all(0 < each <= sample_tokens for each in found)


def test_arguments_that_cannot_work_are_errors(results):
  assert "max_tokens are more than 32 tokens" in results["too much"]
  assert "top_k is not above 0" in results["from none"]


def test_a_full_disk_is_one_line_and_leaves_no_version(
  finished, tmp_path, monkeypatch, capsys
):
  def save(*unused):
    raise tf.errors.ResourceExhaustedError(
      None, None, "No space left on device"
    )

  monkeypatch.setattr(tf.saved_model, "save", save)
  flags = ["--model_dir", str(finished), "--format=saved_model"]
  served = tmp_path / "served"
  assert main(["export", *flags, "--output", str(served)]) == 2
  error = capsys.readouterr().err.splitlines()[-1]
  assert error.startswith(f"palm_mtf: no disk space left for {served}/12")
  assert not served.exists()


@pytest.mark.slow
def test_another_step_becomes_another_version_and_the_same_one_is_refused(
  folder, finished, tmp_path, capsys
):
  served = tmp_path / "served"
  (served / "6").mkdir(parents=True)
  shutil.copy(folder / "12" / "saved_model.pb", served / "6")
  flags = ["--model_dir", str(finished), "--format=saved_model"]
  assert main(["export", *flags, "--output", str(served)]) == 0
  assert sorted(path.name for path in served.iterdir()) == ["12", "6"]
  assert main(["export", *flags, "--output", str(served)]) == 2
  assert "/12': exists; give another path" in capsys.readouterr().err
