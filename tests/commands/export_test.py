# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run that is exported and imported again generates the same text."""

import json
import shutil

import numpy as np
import pytest

from palm_mtf.cli.main import main
from palm_mtf.export.huggingface.tensor_files import SafetensorsFile
from tests import oracle, runs
from tests.mtf_testing import small_config


@pytest.fixture(scope="module")
def folder(finished, tmp_path_factory):
  """The folder to which the run `finished` is exported."""
  path = tmp_path_factory.mktemp("exported") / "model"
  flags = ["--model_dir", str(finished), "--format=hf"]
  assert main(["export", *flags, "--output", str(path)]) == 0
  return path


@pytest.fixture(scope="module")
def imported(folder, tmp_path_factory):
  path = tmp_path_factory.mktemp("imported") / "run"
  assert main(["import", str(folder), "--output", str(path)]) == 0
  return path


def _generate(model_dir, capsys) -> str:
  capsys.readouterr()
  flags = ["--model_dir", str(model_dir), "--prompt", "one two", "--json"]
  greedy = ["--gin.TEMPERATURE=0.0", "--gin.SAMPLE_TOKENS=8"]
  # The dtype of the run; an imported model has none.
  greedy.append("--gin.ACTIVATION_DTYPE='float32'")
  assert main(["generate", *flags, *greedy]) == 0
  return capsys.readouterr().out


def test_the_folder_holds_what_transformers_reads_and_the_vocabulary(folder):
  assert {path.name for path in folder.iterdir()} == {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocabulary.model",
  }
  config = json.loads((folder / "config.json").read_text())
  assert config["architectures"] == ["CohereForCausalLM"]
  # With PACKING = "joined" a document begins after [eod].
  assert config["bos_token_id"] == config["eos_token_id"] == 1


def test_the_tensors_are_those_of_the_newest_checkpoint(folder, finished):
  file = SafetensorsFile(str(folder / "model.safetensors"))
  ours = runs.read_tensors(finished, 12)
  np.testing.assert_array_equal(
    file.read("model.embed_tokens.weight"), ours["embedding"]
  )
  np.testing.assert_array_equal(
    file.read("model.layers.0.mlp.up_proj.weight"), ours["layer_000/mlp/wi"].T
  )


def test_an_imported_checkpoint_has_the_bits_of_the_exported_one(
  imported, finished
):
  tensors = runs.read_tensors(finished, 12)
  weights = {
    name: x
    for name, x in tensors.items()
    if not name.endswith(("/second_moment", "/momentum"))
  }
  runs.assert_same(weights, runs.read_tensors(imported, 0))


def test_an_imported_run_generates_the_same_text(imported, finished, capsys):
  assert _generate(imported, capsys) == _generate(finished, capsys)


def test_a_run_starts_from_an_imported_one(imported, corpus, tmp_path):
  start = {
    "INIT_CHECKPOINT": str(imported),
    "VOCABULARY": str(imported / "vocabulary.model"),
    "TRAIN_STEPS": 1,
    "PROMPTS": [],
  }
  assert runs.run("train", corpus, tmp_path / "next", **start) == 0


def test_an_imported_checkpoint_without_moments_is_not_resumed(
  imported, corpus, tmp_path, capsys
):
  shutil.copytree(imported, tmp_path / "copy")
  assert runs.run("train", corpus, tmp_path / "copy") == 2
  assert "without the moments of an optimizer" in capsys.readouterr().err


def test_what_cannot_be_exported_is_refused_before_anything_is_written(
  finished, tmp_path, capsys
):
  output = tmp_path / "model"
  flags = ["--model_dir", str(finished), "--output", str(output)]
  assert main(["export", *flags, "--gin.NORM='rms_norm'"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert 'NORM = "layer_norm" with BLOCK = "parallel"' in line
  assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["export", "import"])
def test_a_folder_that_is_there_is_not_written_over(
  command, folder, finished, tmp_path, capsys
):
  given = {"export": ["--model_dir", str(finished)], "import": [str(folder)]}
  flags = [*given[command], "--output", str(tmp_path)]
  assert main([command, *flags]) == 2
  assert "exists; give another path" in capsys.readouterr().err
  assert not any(tmp_path.iterdir())


def test_another_checkpoints_folder_needs_its_vocabulary(
  folder, finished, tmp_path, capsys
):
  foreign = tmp_path / "foreign"
  shutil.copytree(folder, foreign)
  vocabulary = (foreign / "vocabulary.model").rename(tmp_path / "its.model")
  flags = ["import", str(foreign), "--output", str(tmp_path / "run")]
  assert main(flags) == 2
  assert "give --vocabulary PATH" in capsys.readouterr().err
  assert main([*flags, "--vocabulary", str(vocabulary)]) == 0


def test_a_folder_without_a_model_is_refused(tmp_path, capsys):
  flags = ["--output", str(tmp_path / "run")]
  assert main(["import", str(tmp_path), *flags]) == 2
  assert "give the folder of a model of trans" in capsys.readouterr().err


@pytest.mark.peers
@pytest.mark.parametrize(
  "block, norm", [("parallel", "layer_norm"), ("serial", "rms_norm")]
)
def test_transformers_computes_our_logits_and_our_greedy_text(
  block, norm, finished, corpus, tmp_path, capsys
):
  import torch
  import transformers

  run, output = tmp_path / "run", str(tmp_path / "model")
  assert runs.run("train", corpus, run, BLOCK=block, NORM=norm) == 0
  assert main(["export", "--model_dir", str(run), "--output", output]) == 0
  tokenizer = transformers.AutoTokenizer.from_pretrained(output)
  model = transformers.AutoModelForCausalLM.from_pretrained(output)
  inputs = tokenizer("one two", return_tensors="pt")
  with torch.no_grad():
    logits = model(**inputs).logits.numpy()
  names = ["num_layers", "d_model", "num_heads", "d_kv", "d_ff", "vocab_size"]
  sizes = {name: runs.SETTINGS[name.upper()] for name in names}
  config = small_config(**sizes, block=block, norm=norm)
  expected = oracle.forward(
    config, runs.read_tensors(run, 12), inputs["input_ids"].numpy()
  )
  assert np.abs(logits - expected).max() < 1e-4 * np.ptp(expected)
  text = json.loads(_generate(run, capsys))["continuation"]
  tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
  new = tokens[inputs["input_ids"].shape[1] :]
  assert tokenizer.decode(new, skip_special_tokens=True) == text
