# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Plain TensorFlow gives the results of score and generate."""

import json
import shutil

import pytest
import tensorflow as tf

from palm_mtf.cli.main import main
from tests import processes, runs

TEXTS = ["one two three", "four \u2581 five \u00e9", "x", "seven eight " * 40]
PAIRS = [["one two ", "three"], ["1: four five six seven", " eight nine"]]
PROMPTS = ["one two", "5: three", "7"]
OVER = {"max_tokens": 8, "temperature": 0.0}

# Calls signatures as TensorFlow Serving does: with feeds, and with the
# signature's defaults for arguments that are not fed.
PROGRAM = """
import json, sys

# TensorFlow would import these without need, which takes almost two seconds.
sys.modules.update({"jax": None, "scipy": None})
import tensorflow.compat.v1 as tf
import tensorflow_text  # registers the operations of the tokenizer

def plain(x):
  if x.dtype == object:
    return [each.decode() for each in x]
  return x.tolist()

folder, calls = sys.argv[1], json.loads(sys.argv[2])
with tf.Session(graph=tf.Graph()) as session:
  signatures = tf.saved_model.load(session, ["serve"], folder).signature_def
  results = []
  for name, given in calls:
    signature = signatures[name]
    feed = {x: tf.make_ndarray(v) for x, v in signature.defaults.items()}
    feed.update(given)
    try:
      found = session.run(
        {x: info.name for x, info in signature.outputs.items()},
        {signature.inputs[x].name: value for x, value in feed.items()},
      )
      results.append({x: plain(value) for x, value in found.items()})
    except tf.errors.InvalidArgumentError as error:
      results.append(str(error))
assert not any(x.startswith("palm_mtf") for x in sys.modules)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def folder(finished, tmp_path_factory):
  """The run of `finished`, exported."""
  path = tmp_path_factory.mktemp("exported") / "served"
  flags = ["--model_dir", str(finished), "--format=saved_model"]
  assert main(["export", *flags, "--output", str(path)]) == 0
  return path


@pytest.fixture(scope="module")
def results(folder):
  """The result or error of each of these calls."""
  inputs, targets = zip(*PAIRS, strict=True)
  calls = {
    "score": {"texts": TEXTS},
    "score_targets": {"inputs": inputs, "targets": targets},
    "generate": {"prompts": PROMPTS, **OVER},
    "generate defaults": {"prompts": PROMPTS},
    "generate too much": {"prompts": PROMPTS, **OVER, "max_tokens": 31},
    "generate from none": {"prompts": PROMPTS, "top_k": 0},
  }
  given = [[name.split()[0], feed] for name, feed in calls.items()]
  done = processes.python(
    "-c", PROGRAM, folder / "12", json.dumps(given), cwd=folder
  )
  assert done.returncode == 0, done.stderr
  return dict(zip(calls, json.loads(done.stdout), strict=True))


def _printed(command, finished, capsys, *flags) -> list[dict]:
  capsys.readouterr()
  given = ["--model_dir", str(finished), "--json", *flags]
  assert main([command, *given]) == 0
  return [json.loads(x) for x in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_the_folders_are_as_tensorflow_serving_wants(folder):
  assert [path.name for path in folder.iterdir()] == ["12"]  # the step
  assert (folder / "12" / "saved_model.pb").is_file()
  assert (folder / "12" / "variables").is_dir()


def test_likelihoods_of_texts_of_any_length_equal_score(
  results, finished, capsys
):
  flags = [flag for text in TEXTS for flag in ("--text", text)]
  lines = _printed("score", finished, capsys, *flags)[: len(TEXTS)]
  expected = [line["log_likelihood"] for line in lines]
  assert results["score"]["log_likelihood"] == pytest.approx(expected, rel=1e-5)
  assert results["score"]["tokens"] == [line["tokens"] for line in lines]


def test_likelihoods_of_targets_equal_score(
  results, finished, tmp_path, capsys
):
  file = tmp_path / "pairs.tsv"
  file.write_text("".join("\t".join(pair) + "\n" for pair in PAIRS))
  lines = _printed("score", finished, capsys, "--input", str(file))
  expected = [line["log_likelihood"] for line in lines[: len(PAIRS)]]
  found = results["score_targets"]["log_likelihood"]
  assert found == pytest.approx(expected, rel=1e-5)


def test_greedy_text_equals_generate(results, finished, capsys):
  flags = [flag for prompt in PROMPTS for flag in ("--prompt", prompt)]
  greedy = ["--gin.TEMPERATURE=0.0", "--gin.SAMPLE_TOKENS=8"]
  lines = _printed("generate", finished, capsys, *flags, *greedy)
  assert results["generate"] == {
    "continuation": [line["continuation"] for line in lines],
    "num_tokens": [line["num_tokens"] for line in lines],
  }


def test_missing_arguments_have_the_settings_of_the_run(results):
  sample_tokens = runs.SETTINGS["SAMPLE_TOKENS"]
  found = results["generate defaults"]["num_tokens"]
  assert all(0 < each <= sample_tokens for each in found)


def test_a_prompt_without_room_is_an_error(results):
  assert "max_tokens are more than 32 tokens" in results["generate too much"]


def test_a_number_that_leaves_no_token_is_an_error(results):
  assert "top_k is not above 0" in results["generate from none"]


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
