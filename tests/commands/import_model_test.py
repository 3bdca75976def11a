# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A damaged or crafted model is refused in one line, before anything is made.

Each case changes one file of a small model. export_test.py imports models that
a run exported.
"""

import os
import socket

import numpy as np
import pytest

from palm_mtf.cli.main import main
from palm_mtf.export.huggingface.weights import find_tensor_names
from palm_mtf.machine import host_memory
from tests import runs
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
  norm = find_tensor_names(MODEL)["layer_001/norm/scale"]
  begin, end = (x // 2 for x in header[norm]["data_offsets"])
  assert (
    found["layer_001/norm/scale"].tobytes() == expected[begin:end].tobytes()
  )
