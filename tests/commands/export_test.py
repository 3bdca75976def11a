# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run that is exported and imported again generates the same text."""

import ast
import json
import os
import shutil
import socket

import numpy as np
import pytest

from palm_mtf.cli.main import main
from palm_mtf.config.macros import values_of
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.export.huggingface.config_json import read_config
from palm_mtf.export.huggingface.families import COHERE
from palm_mtf.export.huggingface.tensor_files import SafetensorsFile
from palm_mtf.machine import host_memory
from tests import oracle, runs, tokenizer_files
from tests.export.read_gguf import read_gguf
from tests.mtf_testing import small_config
from tests.transformers_folder import (
  EMBEDDING,
  FREQUENCIES,
  GATE,
  INDEX,
  MODEL,
  NORM,
  SHARD,
  UP,
  change_json,
  parameters,
  read_parts,
  set_tensors,
  split,
  tensors,
  write_parts,
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


def _overlap(folder) -> None:
  path = folder / "model.safetensors"
  header, content = read_parts(path)
  header[UP]["data_offsets"] = header[GATE]["data_offsets"]
  write_parts(path, header, content)


def _nan(folder) -> None:
  set_tensors(folder, **{NORM: np.full(24, np.nan, np.float32)})


def _other_head(folder) -> None:
  set_tensors(folder, **{"lm_head.weight": 2 * tensors(MODEL)[EMBEDDING]})


def _old_shard(folder) -> None:
  split(folder)
  set_tensors(folder)


def _many_layers(folder) -> None:
  change_json(folder / "config.json", num_hidden_layers=10**9)


def _bogus_packing(folder) -> None:
  change_json(folder / "config.json", palm_mtf={"PACKING": "bogus"})


def _path_out_of_the_folder(folder) -> None:
  weight_map = split(folder)
  weight_map[UP] = f"../model/{SHARD}"
  change_json(folder / INDEX, weight_map=weight_map)


@pytest.mark.parametrize(
  "change, named",
  [
    (_overlap, "invalid offset for tensor"),
    (_nan, NORM),
    (_other_head, "lm_head.weight"),
    (_old_shard, SHARD),
    (_many_layers, "num_hidden_layers = 1000000000"),
    (_bogus_packing, "PACKING"),
    (_path_out_of_the_folder, "../model"),
  ],
)
def test_a_damaged_or_crafted_model_is_refused_before_anything_is_written(
  change, named, model_folder, refused
):
  change(model_folder)
  assert named in refused()


def test_a_file_of_more_numbers_than_the_machine_has_memory_is_refused(
  model_folder, refused
):
  path = model_folder / "model.safetensors"
  size = 2**42
  entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
  write_parts(path, {"a": entry}, b"")
  try:
    os.truncate(path, path.stat().st_size + size)
  except OSError:
    pytest.skip("the file system has no file of 4 TB with holes")
  assert "of memory" in refused()


def test_weights_that_a_container_s_limit_cannot_hold_are_refused(
  monkeypatch, refused
):
  limits = {"/sys/fs/cgroup/memory.max": "4096\n"}
  read = host_memory.read_or_empty
  monkeypatch.setattr(
    host_memory,
    "read_or_empty",
    lambda path: limits.get(path) or read(path),
  )
  assert "this machine has 4,096 of memory" in refused()


# Each makes something else at the path of weights, config.json or vocabulary.
def _fifo(path) -> None:
  os.mkfifo(path)


def _socket(path) -> None:
  # The path of a socket can have at most 107 bytes.
  with socket.socket(socket.AF_UNIX) as bound:
    folder = os.open(path.parent, os.O_RDONLY)
    bound.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def _device(path) -> None:
  path.symlink_to("/dev/zero")


def _folder(path) -> None:
  path.mkdir()


def _dangling(path) -> None:
  path.symlink_to("nowhere")


ODD_FILES = [_fifo, _socket, _device, _folder, _dangling]


@pytest.mark.parametrize("make", ODD_FILES)
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


def test_a_vocabulary_given_as_a_fifo_is_refused(
  model_folder, tmp_path, refused
):
  os.mkfifo(model_folder / "pipe")
  line = refused("--vocabulary", str(model_folder / "pipe"))
  assert "is a FIFO, not a regular file" in line


def _assert_imported(found) -> None:
  runs.assert_same(parameters(MODEL), found)


def test_shards_are_imported_bit_for_bit(model_folder, weights):
  split(model_folder)
  _assert_imported(weights())


def test_where_old_shards_have_gone_the_whole_file_is_imported(
  model_folder, weights
):
  split(model_folder)
  (model_folder / SHARD).rename(model_folder / "model.safetensors")
  _assert_imported(weights())


def test_the_state_of_a_trainer_is_no_weights(model_folder, weights):
  for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth"):
    (model_folder / name).write_bytes(b"\0")
  _assert_imported(weights())


def test_an_lm_head_of_the_embeddings_bits_is_imported(model_folder, weights):
  head = tensors(MODEL)[EMBEDDING]
  set_tensors(model_folder, **{"lm_head.weight": head})
  _assert_imported(weights())


def test_our_frequencies_of_the_rotary_embedding_are_left_out(
  model_folder, weights
):
  # PyTorch computes the frequencies in float32.
  power = np.arange(0, 10, 2, np.float32) / np.float32(10)
  ours = np.float32(1) / np.float32(10_000) ** power
  names = [FREQUENCIES, "model.rotary_emb.inv_freq"]
  set_tensors(model_folder, **dict.fromkeys(names, ours))
  _assert_imported(weights())


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


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_half_precision_is_imported_exactly(dtype, model_folder, weights):
  path = model_folder / "model.safetensors"
  header, content = read_parts(path)
  numbers = np.frombuffer(content, "<f4")
  halves = numbers.astype("<f2")
  expected = halves.astype("<f4")
  if dtype == "BF16":
    halves = (numbers.view("<u4") >> 16).astype("<u2")
    expected = (halves.astype("<u4") << 16).view("<f4")
  for entry in header.values():
    if "dtype" in entry:
      entry["dtype"] = dtype
      entry["data_offsets"] = [x // 2 for x in entry["data_offsets"]]
  write_parts(path, header, halves.tobytes())
  found = weights()
  begin, end = (x // 2 for x in header[EMBEDDING]["data_offsets"])
  assert found["embedding"].tobytes() == expected[begin:end].tobytes()
  norm = COHERE.names["norm/scale"].format(1)
  begin, end = (x // 2 for x in header[norm]["data_offsets"])
  assert (
    found["layer_001/norm/scale"].tobytes() == expected[begin:end].tobytes()
  )
