# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run that is exported and imported again generates the same text."""

import ast
import json
import os
import shutil

import numpy as np
import pytest

from palm_mtf.cli.main import main
from palm_mtf.config.macros import values_of
from palm_mtf.data.vocabulary.byte_pair import PLAIN_TOKEN
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.export.huggingface.config_json import read_config
from palm_mtf.machine import host_memory
from tests import oracle, runs, tokenizer_files
from tests.export.read_gguf import read_gguf
from tests.mtf_testing import small_config
from tests.transformers_folder import (
  EMBEDDING,
  FREQUENCIES,
  MODEL,
  NORM,
  SHARD,
  change_json,
  parameters,
  set_tensors,
  split,
  tensors,
)


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


def test_of_two_vocabularies_the_one_with_rows_for_all_ids_is_imported(
  folder, tmp_path
):
  """As in a Gemma 3 for texts, whose tokenizer.json has a token for images."""
  copied = shutil.copytree(folder, tmp_path / "model")
  (copied / "vocabulary.model").rename(copied / "tokenizer.model")
  tokenizer = json.loads((copied / "tokenizer.json").read_text())
  size = read_config(str(copied)).model.vocab_size
  image = {"id": size, "content": "<image>", "special": True}
  tokenizer["added_tokens"].append(PLAIN_TOKEN | image)
  (copied / "tokenizer.json").write_text(json.dumps(tokenizer))
  output = tmp_path / "run"
  assert main(["import", str(copied), "--output", str(output)]) == 0
  expected = (folder / "vocabulary.model").read_bytes()
  assert (output / "vocabulary.model").read_bytes() == expected
  (copied / "tokenizer.model").unlink()
  output = tmp_path / "other"
  assert main(["import", str(copied), "--output", str(output)]) == 2


def _generate(model_dir) -> str:
  (record,) = runs.printed(
    *("generate", "--model_dir", model_dir, "--prompt", "one two", "--json"),
    *("--gin.TEMPERATURE=0.0", "--gin.SAMPLE_TOKENS=8"),
    # The dtype of the run; an imported model has none.
    "--gin.ACTIVATION_DTYPE='float32'",
  )
  return record["continuation"]


@pytest.fixture(scope="module")
def generated(finished) -> str:
  """The text that the exported run generates."""
  return _generate(finished)


def test_the_folder_holds_what_transformers_reads_and_the_vocabulary(folder):
  assert {path.name for path in folder.iterdir()} == {
    "README.md",
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


def test_an_imported_run_generates_the_same_text(imported, generated):
  assert _generate(imported) == generated


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_a_chat_template_is_exported_and_imported(kind, finished, tmp_path):
  run = tmp_path / "run"
  shutil.copytree(finished, run)
  template = "{% for x in messages %}caf\u00e9 {{ x }}\r\n{% endfor %}\n"
  (run / "chat_template.jinja").write_text(template, newline="")
  flags = ["--model_dir", str(run), f"--format={kind}"]
  path, again = str(tmp_path / "exported"), tmp_path / "again"
  assert main(["export", *flags, "--output", path]) == 0
  if kind == "hf":
    config = (tmp_path / "exported" / "tokenizer_config.json").read_text()
    assert json.loads(config)["chat_template"] == template
  else:
    found = read_gguf(tmp_path / "exported").metadata
    assert found["tokenizer.chat_template"] == template
  assert main(["import", path, "--output", str(again)]) == 0
  found = (again / "chat_template.jinja").read_bytes()
  assert found == template.encode()


def test_an_imported_config_has_no_defaults_and_says_the_same(
  folder, imported, capsys
):
  lines = (imported / "config.gin").read_text().splitlines()
  assert "NORM = 'layer_norm'" not in lines and "D_MODEL = 32" in lines
  capsys.readouterr()
  assert main(["generate", "--model_dir", str(imported), "--print_config"]) == 0
  values = dict(
    x.split(" = ", 1)
    for x in capsys.readouterr().out.splitlines()
    if " = " in x
  )
  _, model, *_ = read_config(str(folder))
  for name, value in values_of(model).items():
    assert ast.literal_eval(values[name]) == value, name


def test_a_run_starts_from_an_imported_one(imported, corpus, tmp_path):
  """Also with experts, which begin as copies of the imported MLPs."""
  start = {
    "INIT_CHECKPOINT": str(imported),
    "VOCABULARY": str(imported / "vocabulary.model"),
    "TRAIN_STEPS": 1,
    "LOG_STEPS": 1,
    "PROMPTS": [],
  }
  experts = {"MLP": "experts", "NUM_EXPERTS": 4, "EXPERTS_PER_TOKEN": 2}
  losses = []
  for name, more in {
    "next": {},
    "sparse": {**experts, "INIT_EXPERTS": "copy"},
  }.items():
    assert runs.run("train", corpus, tmp_path / name, **start, **more) == 0
    losses.append(runs.read_metrics(tmp_path / name)[0]["loss"])
  dense, sparse = losses
  assert sparse == pytest.approx(dense, rel=1e-6)


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
  assert "a GraniteForCausalLM has BLOCK = 'serial'" in line
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
  (foreign / "tokenizer.json").unlink()
  flags = ["import", str(foreign), "--output", str(tmp_path / "run")]
  assert main(flags) == 2
  assert "give --vocabulary PATH" in capsys.readouterr().err
  assert main([*flags, "--vocabulary", str(vocabulary)]) == 0


def test_a_model_with_only_a_fast_tokenizer_generates_the_same_text(
  folder, generated, tmp_path
):
  """The tokenizer.json of an export has the ids of its vocabulary.model."""
  foreign, output = tmp_path / "foreign", tmp_path / "run"
  shutil.copytree(folder, foreign)
  (foreign / "vocabulary.model").unlink()
  assert main(["import", str(foreign), "--output", str(output)]) == 0
  assert _generate(output) == generated
  one = open_vocabulary(str(output / "tokenizer.json"))
  other = open_vocabulary(str(folder / "vocabulary.model"))
  texts = tokenizer_files.fuzzed_texts(2000)
  assert one.encode_batch(texts) == other.encode_batch(texts)
  ids = range(3, other.size)  # after <pad>, [eod] and <unk>
  assert [*map(one.token_bytes, ids)] == [*map(other.token_bytes, ids)]


def test_a_folder_without_a_model_is_refused(tmp_path, capsys):
  flags = ["--output", str(tmp_path / "run")]
  assert main(["import", str(tmp_path), *flags]) == 2
  assert "give the folder of a model of trans" in capsys.readouterr().err


@pytest.mark.peers
@pytest.mark.parametrize(
  "block, norm", [("parallel", "layer_norm"), ("serial", "rms_norm")]
)
def test_transformers_computes_our_logits_and_our_greedy_text(
  block, norm, corpus, tmp_path
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
  text = _generate(run)
  tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
  new = tokens[inputs["input_ids"].shape[1] :]
  assert tokenizer.decode(new, skip_special_tokens=True) == text


@pytest.fixture
def refused(model_folder, tmp_path, capsys):
  """Imports; returns the line of the refusal."""

  def run(*flags: str) -> str:
    output = tmp_path / "run"
    assert (
      main(["import", str(model_folder), "--output", str(output), *flags]) == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert not output.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    return line

  return run


@pytest.fixture
def weights(model_folder, tmp_path):
  """Imports; returns the parameters of the checkpoint, by name."""

  def run() -> dict[str, np.ndarray]:
    output = tmp_path / "run"
    assert main(["import", str(model_folder), "--output", str(output)]) == 0
    return runs.read_tensors(output, 0)

  return run


def test_weights_that_a_container_s_limit_cannot_hold_are_refused(
  monkeypatch, refused
):
  limits = {"/sys/fs/cgroup/memory.max": "4096\n"}
  read = host_memory.read_or_empty
  monkeypatch.setattr(
    host_memory, "read_or_empty", lambda path: limits.get(path) or read(path)
  )
  assert "this machine has 4,096 of memory" in refused()


@pytest.mark.parametrize(
  "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")]
)
@pytest.mark.parametrize(
  "name",
  [
    "model.safetensors",
    "config.json",
    "vocabulary.model",
    "model.safetensors.index.json",
    SHARD,
  ],
)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(
  name, make, model_folder, refused
):
  if name == SHARD:
    split(model_folder)
  elif name.endswith("index.json"):
    (model_folder / "model.safetensors").unlink()
  (model_folder / name).unlink(missing_ok=True)
  make(model_folder / name)
  assert name in refused()


def _shard_in_place_of_the_file(folder) -> None:
  split(folder)
  (folder / SHARD).rename(folder / "model.safetensors")


def _state_of_a_trainer(folder) -> None:
  for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth"):
    (folder / name).write_bytes(b"\0")


def _head_of_the_embeddings_bits(folder) -> None:
  set_tensors(folder, **{"lm_head.weight": tensors(MODEL)[EMBEDDING]})


def _our_frequencies(folder) -> None:
  # PyTorch computes the frequencies in float32.
  power = np.arange(0, 10, 2, np.float32) / np.float32(10)
  ours = np.float32(1) / np.float32(10_000) ** power
  names = [FREQUENCIES, "model.rotary_emb.inv_freq"]
  set_tensors(folder, **dict.fromkeys(names, ours))


@pytest.mark.parametrize(
  "change",
  [
    split,
    _shard_in_place_of_the_file,
    _state_of_a_trainer,
    _head_of_the_embeddings_bits,
    _our_frequencies,
  ],
)
def test_a_folder_of_these_weights_is_imported_bit_for_bit(
  change, model_folder, weights
):
  change(model_folder)
  runs.assert_same(parameters(MODEL), weights())


def test_a_last_norm_that_the_config_leaves_out_holds_ones(
  model_folder, refused, weights
):
  """FINAL_NORM_SCALE = "none" has no variable that could hold other numbers."""
  change_json(
    model_folder / "config.json", palm_mtf={"FINAL_NORM_SCALE": "none"}
  )
  assert f"{NORM} is not 1" in refused()
  set_tensors(model_folder, **{NORM: np.ones(24, np.float32)})
  expected = parameters(MODEL)
  del expected["final_norm/scale"]
  runs.assert_same(expected, weights())
