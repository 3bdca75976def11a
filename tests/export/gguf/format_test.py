# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""An exported file is the newest checkpoint, and llama.cpp runs it as we do."""

import json
import random

import numpy as np
import pytest

from palm_mtf.cli.main import main
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from tests import oracle, runs
from tests.export.gguf import llama_cpp_oracle
from tests.export.gguf.read_gguf import read_gguf
from tests.mtf_testing import small_config

TEXT = "one two"
# Of the range of the logits.
LIMITS = {"float32": 1e-5, "float16": 1e-3, "q8_0": 2e-2}


def _export(run, folder, dtype):
  path = folder / f"{dtype}.gguf"
  flags = ["--model_dir", str(run), "--format=gguf", f"--dtype={dtype}"]
  assert main(["export", *flags, "--output", str(path)]) == 0
  return path


def _logits(run, ids) -> np.ndarray:
  """Returns the oracle's logits by a run's newest checkpoint, [L, V]."""
  names = ["num_layers", "d_model", "num_heads", "d_kv", "d_ff", "vocab_size"]
  sizes = {name: runs.SETTINGS[name.upper()] for name in names}
  tensors = runs.read_tensors(run, 12)
  is_serial = "layer_000/mlp_norm/scale" in tensors
  kind = {"block": "serial", "norm": "rms_norm"} if is_serial else {}
  return oracle.forward(small_config(**sizes, **kind), tensors, ids)[0]


@pytest.mark.parametrize("dtype, number", [("float32", 0), ("float16", 1)])
def test_tensors_are_the_rounded_ones_of_the_newest_checkpoint(
  dtype, number, finished, tmp_path
):
  file = read_gguf(_export(finished, tmp_path, dtype))
  ours = runs.read_tensors(finished, 12)
  for name, expected in (
    ("token_embd.weight", ours["embedding"]),
    ("blk.0.ffn_up.weight", ours["layer_000/mlp/wi"].T),
  ):
    assert file.dtypes[name] == number
    np.testing.assert_array_equal(
      file.tensors[name], expected.astype(["<f4", "<f2"][number])
    )
  norm = file.tensors["output_norm.weight"]
  np.testing.assert_array_equal(norm, ours["final_norm/scale"])


@pytest.mark.parametrize("dtype", LIMITS)
def test_the_file_run_as_llama_cpp_runs_it_gives_our_logits(
  dtype, finished, tmp_path
):
  file = read_gguf(_export(finished, tmp_path, dtype))
  ids = np.array([[1, 300, 12, 290, 305]])
  found = llama_cpp_oracle.forward(file.metadata, file.tensors, ids[0])
  expected = _logits(finished, ids)
  difference = np.abs(found - expected).max()
  assert difference < LIMITS[dtype] * np.ptp(expected)


def test_q8_0_holds_all_matrices_in_int8(finished, tmp_path):
  file = read_gguf(_export(finished, tmp_path, "q8_0"))
  for name, value in file.tensors.items():
    assert file.dtypes[name] == (8 if value.ndim == 2 else 0)
  assert file.metadata["general.file_type"] == 7
  # Behind [eod], where PACKING = "joined" begins a document.
  assert file.metadata["tokenizer.ggml.bos_token_id"] == 1


def test_other_formats_have_no_other_dtype(finished, tmp_path, capsys):
  flags = ["--model_dir", str(finished), "--output", str(tmp_path / "model")]
  assert main(["export", *flags, "--format=npz", "--dtype=float16"]) == 2
  assert "--format=npz is written in float32" in capsys.readouterr().err
  assert not any(tmp_path.iterdir())


def test_a_file_that_is_there_is_not_written_over(finished, tmp_path, capsys):
  path = tmp_path / "model.gguf"
  path.write_text("mine")
  flags = ["--model_dir", str(finished), "--format=gguf"]
  assert main(["export", *flags, "--output", str(path)]) == 2
  assert "exists; give another path" in capsys.readouterr().err
  assert path.read_text() == "mine"


@pytest.fixture(scope="module", params=["parallel", "serial"])
def run(request, corpus, tmp_path_factory):
  """A short run of a model that has an architecture in llama.cpp."""
  if request.param == "parallel":
    return request.getfixturevalue("finished")
  path = tmp_path_factory.mktemp("run")
  settings = {"BLOCK": "serial", "NORM": "rms_norm"}
  assert runs.run("train", corpus, path, **settings) == 0
  return path


@pytest.fixture(scope="module")
def llama_cpp():
  import llama_cpp

  return llama_cpp


@pytest.mark.peers
@pytest.mark.parametrize("dtype", LIMITS)
def test_llama_cpp_computes_our_logits_and_our_greedy_text(
  dtype, llama_cpp, run, tmp_path, capsys
):
  model = llama_cpp.Llama(
    str(_export(run, tmp_path, dtype)),
    **{"logits_all": True, "verbose": False, "n_threads": 1},
    # float32 keys and values: float16 ones cost a ten-thousandth of the range.
    **{"type_k": 0, "type_v": 0},
  )
  ids = model.tokenize(TEXT.encode())
  assert ids == [1, *Vocabulary(str(run / "vocabulary.model")).encode(TEXT)]
  model.eval(ids)
  expected = _logits(run, np.array([ids]))
  difference = np.abs(model.scores[: len(ids)] - expected).max()
  assert difference < LIMITS[dtype] * np.ptp(expected)
  if dtype == "q8_0":  # whose rounding may change a close choice
    return
  capsys.readouterr()
  greedy = ["--gin.TEMPERATURE=0.0", "--gin.SAMPLE_TOKENS=8", "--json"]
  flags = ["--model_dir", str(run), "--prompt", TEXT]
  assert main(["generate", *flags, *greedy]) == 0
  ours = json.loads(capsys.readouterr().out)["continuation"]
  found = model.create_completion(TEXT, max_tokens=8, temperature=0.0)
  assert found["choices"][0]["text"] == ours


@pytest.mark.peers
def test_llama_cpp_has_the_ids_of_the_vocabulary(llama_cpp, finished, tmp_path):
  path = _export(finished, tmp_path, "float16")
  model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
  vocabulary = Vocabulary(str(finished / "vocabulary.model"))
  rng = random.Random(0)
  pieces = [vocabulary.piece(i) for i in range(vocabulary.size)]
  pieces += ["\u00e9", "\0", "\n", "\U0001f600"]
  for _ in range(3000):
    text = "".join(rng.choices(pieces, k=rng.randrange(12)))
    text = text.replace("\u2581", " ")
    ids = model.tokenize(text.encode(), add_bos=False, special=False)
    assert ids == vocabulary.encode(text), repr(text)
