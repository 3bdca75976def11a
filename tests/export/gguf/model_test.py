# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A GGUF file holds the newest checkpoint; llama.cpp computes our logits."""

import json
import random

import numpy as np
import pytest
import sentencepiece

from palm_mtf.cli.main import main
from palm_mtf.data.vocabulary.gguf_tokenizer import make_gguf_tokenizer
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.errors import UserError
from palm_mtf.export.gguf.files import write_gguf
from palm_mtf.export.gguf.metadata import (
  find_gguf_architecture,
  make_model_metadata,
)
from palm_mtf.export.gguf.model import check_vocabulary, make_reader
from palm_mtf.export.huggingface.weights import find_tensor_shapes
from tests import blocks, llama_cpp_peer, oracle, runs, tokenizer_files
from tests.export import llama_cpp_oracle
from tests.export.read_gguf import read_gguf
from tests.mtf_testing import random_tokens, small_config
from tests.prefixed_vocabulary import train_prefixed

WIDTH = {"d_model": 24, "num_heads": 3, "d_kv": 8}
SERIAL = {"block": "serial", "norm": "rms_norm"}
MODELS = [
  WIDTH,
  {**WIDTH, "attention": "multi_head"},
  {**WIDTH, "final_norm_scale": "none"},
  SERIAL,
  {**SERIAL, "attention": "multi_head", "num_heads": 5},
  {**blocks.SETTINGS["Gemma 3"], "score_scale": None},
  {**blocks.SETTINGS["Cohere 2"], "num_heads": 4, "d_kv": 6},
]


@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_tensors_give_our_logits_in_the_architecture_named(changes):
  model = small_config(**changes)
  params = oracle.random_parameters(model, seed=1)
  tokens = random_tokens(model, batch_size=1, seed=0)["inputs"]
  own = find_gguf_architecture(model)
  read = make_reader(model, own, params.__getitem__)
  tensors = {name: read(name) for name in find_tensor_shapes(model, own.layout)}
  actual = llama_cpp_oracle.forward(
    make_model_metadata(model, own), tensors, tokens[0]
  )
  expected = oracle.forward(model, params, tokens)[0]
  assert np.abs(actual - expected).max() < 1e-9 * np.ptp(expected)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"norm": "rms_norm"}, "no architecture of transformers"),
    (
      {"attention_window": 4, "block": "parallel_two_norms"},
      "no architecture of transformers",
    ),
    ({**WIDTH, "num_heads": 2}, r"^NUM_HEADS \* D_KV = 16 and D_MODEL = 24"),
    ({**WIDTH, "num_layers": 64}, "^NUM_LAYERS = 64: .*norms of q and k"),
  ],
)
def test_a_model_that_llama_cpp_would_compute_differently_is_refused(
  changes, message
):
  with pytest.raises(UserError, match=message):
    find_gguf_architecture(small_config(**changes))


def test_a_serial_model_of_any_width_and_depth_is_a_granite():
  model = small_config(**SERIAL, num_layers=64)
  assert model.num_heads * model.d_kv != model.d_model
  assert find_gguf_architecture(model).name == "granite"


NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6


def test_pieces_scores_and_types_are_sentencepieces(vocabulary):
  found = make_gguf_tokenizer(
    vocabulary, start_id=1, vocab_size=vocabulary.size
  )
  processor = sentencepiece.SentencePieceProcessor(model_file=vocabulary.path)
  ids = range(vocabulary.size)
  assert found["tokenizer.ggml.tokens"] == processor.IdToPiece(list(ids))
  scores = found["tokenizer.ggml.scores"]
  assert scores == [processor.GetScore(i) for i in ids]
  types = found["tokenizer.ggml.token_type"]
  assert types[:4] == [CONTROL, CONTROL, UNKNOWN, BYTE]  # <pad> [eod] <unk> 00
  assert [i for i in ids if types[i] == BYTE] == list(range(3, 259))
  assert set(types[259:]) == {NORMAL}


def test_rows_without_a_piece_have_separate_names_and_are_unused(vocabulary):
  size = vocabulary.size + 3
  found = make_gguf_tokenizer(vocabulary, start_id=1, vocab_size=size)
  tokens = found["tokenizer.ggml.tokens"]
  assert len(tokens) == len(set(tokens)) == size
  assert found["tokenizer.ggml.token_type"][-3:] == [UNUSED] * 3
  assert len(found["tokenizer.ggml.scores"]) == size


def test_the_start_token_is_added_before_a_text_but_no_space(vocabulary):
  found = make_gguf_tokenizer(
    vocabulary, start_id=0, vocab_size=vocabulary.size
  )
  name = "tokenizer.ggml."
  assert found[f"{name}add_bos_token"] is True
  assert found[f"{name}bos_token_id"] == 0
  assert found[f"{name}eos_token_id"] == vocabulary.eod_id
  assert found[f"{name}add_space_prefix"] is False


def test_a_vocabulary_that_llama_cpp_would_encode_differently_is_refused(
  tmp_path,
):
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(tokenizer_files.CORPUS[3].splitlines()),
    model_prefix=str(tmp_path / "foreign"),
    model_type="unigram",
    vocab_size=400,
    byte_fallback=True,
    hard_vocab_limit=False,
    minloglevel=2,
  )
  vocabulary = open_vocabulary(str(tmp_path / "foreign.model"))
  with pytest.raises(UserError, match="differently: it is not a byte-pair"):
    check_vocabulary(vocabulary)


@pytest.mark.parametrize(
  "pieces, is_known",
  [
    (["<b>", "</b>", "\n", "\n\n", "\n\n\n"], True),
    (["abc", "b", "ab"], True),  # one of them is inside the other
    (["ab", "bc"], False),
    (["a\n", "\n\n"], False),
  ],
  ids=str,
)
def test_user_defined_pieces_that_overlap_are_refused(
  pieces, is_known, tmp_path
):
  settings = {"add_dummy_prefix": False, "user_defined_symbols": pieces}
  vocabulary = train_prefixed("a red bird", tmp_path, **settings)
  if is_known:
    return check_vocabulary(vocabulary)
  with pytest.raises(UserError, match="pieces can overlap in a text"):
    check_vocabulary(vocabulary)


SHAPES = {
  "output_norm.weight": (64,),
  "token_embd.weight": (4, 64),
  "blk.0.ffn_up.weight": (2, 48),  # no whole blocks
  "blk.0.ffn_up_exps.weight": (3, 2, 64),
  "blk.0.ffn_gate_inp.weight": (3, 64),  # llama.cpp quantizes no routers
}


@pytest.mark.parametrize(
  "dtype, numbers",
  [
    ("float32", [0, 0, 0, 0, 0]),
    ("float16", [0, 1, 1, 1, 0]),
    ("q8_0", [0, 8, 1, 8, 0]),
  ],
)
def test_a_tensor_that_a_dtype_cannot_hold_has_a_larger_one(
  dtype, numbers, tmp_path
):
  rng = np.random.default_rng(0)
  values = {k: rng.normal(size=x).astype(np.float32) for k, x in SHAPES.items()}
  path = tmp_path / "model.gguf"
  metadata = {"general.architecture": "granite", "texts": ["", "b"]}
  write_gguf(str(path), metadata, SHAPES, dtype, values.__getitem__)
  found = read_gguf(path)
  assert found.metadata == metadata
  assert list(found.dtypes.values()) == numbers
  for name, value in values.items():
    # Half a step of int8, and one rounding to float16.
    limit = np.abs(value).max() * (0.5 / 127 + 2**-11)
    np.testing.assert_allclose(found.tensors[name], value, rtol=0, atol=limit)


@pytest.mark.parametrize("dtype", ["float16", "q8_0"])
def test_a_number_that_float16_cannot_hold_is_refused(dtype, tmp_path):
  shapes = {"token_embd.weight": (1, 32)}
  with pytest.raises(UserError, match=r"numbers of token_embd\.weight are"):
    write_gguf(
      str(tmp_path / "model.gguf"),
      {"general.architecture": "granite"},
      shapes,
      dtype,
      lambda name: np.full(shapes[name], 1e8, np.float32),
    )


TEXT = "one two"
# Tolerances, relative to the range of the logits.
LIMITS = {"float32": 1e-5, "float16": 1e-3, "q8_0": 2e-2}


@pytest.fixture(scope="module")
def files(finished, tmp_path_factory):
  """{dtype: the file of `finished`}"""
  folder = tmp_path_factory.mktemp("exported")
  return {
    dtype: read_gguf(_export(finished, folder, dtype)) for dtype in LIMITS
  }


def _export(run, folder, dtype):
  path = folder / f"{dtype}.gguf"
  flags = ["--model_dir", str(run), "--format=gguf", f"--dtype={dtype}"]
  assert main(["export", *flags, "--output", str(path)]) == 0
  return path


def _logits(run, ids) -> np.ndarray:
  """Returns the oracle's logits for a run's newest checkpoint, [L, V]."""
  names = ["num_layers", "d_model", "num_heads", "d_kv", "d_ff", "vocab_size"]
  sizes = {name: runs.SETTINGS[name.upper()] for name in names}
  tensors = runs.read_tensors(run, 12)
  is_serial = "layer_000/mlp_norm/scale" in tensors
  kind = {"block": "serial", "norm": "rms_norm"} if is_serial else {}
  return oracle.forward(small_config(**sizes, **kind), tensors, ids)[0]


@pytest.mark.parametrize("dtype, number", [("float32", 0), ("float16", 1)])
def test_tensors_are_the_rounded_ones_of_the_newest_checkpoint(
  dtype, number, finished, files
):
  file = files[dtype]
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
  dtype, finished, files
):
  file = files[dtype]
  ids = np.array([[1, 300, 12, 290, 305]])
  found = llama_cpp_oracle.forward(file.metadata, file.tensors, ids[0])
  expected = _logits(finished, ids)
  difference = np.abs(found - expected).max()
  assert difference < LIMITS[dtype] * np.ptp(expected)


def test_q8_0_holds_all_matrices_in_int8(files):
  file = files["q8_0"]
  for name, value in file.tensors.items():
    assert file.dtypes[name] == (8 if value.ndim == 2 else 0)
  assert file.metadata["general.file_type"] == 7
  # After [eod], where PACKING = "joined" begins a document.
  assert file.metadata["tokenizer.ggml.bos_token_id"] == 1


def test_other_formats_have_no_other_dtype(finished, tmp_path, capsys):
  flags = ["--model_dir", str(finished), "--output", str(tmp_path / "model")]
  assert main(["export", *flags, "--format=npz", "--dtype=float16"]) == 2
  assert "--format=npz is written in float32" in capsys.readouterr().err
  assert main(["export", *flags, "--format=gguf", "--imatrix=a.gguf"]) == 2
  assert "give --format=gguf and --dtype=q4_k_m" in capsys.readouterr().err
  assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module", params=["parallel", "serial"])
def a_run(request, corpus, tmp_path_factory):
  """A short run of a model that has an architecture in llama.cpp."""
  if request.param == "parallel":
    return request.getfixturevalue("finished")
  path = tmp_path_factory.mktemp("run")
  settings = {"BLOCK": "serial", "NORM": "rms_norm"}
  assert runs.run("train", corpus, path, **settings) == 0
  return path


@pytest.mark.peers
@pytest.mark.parametrize("dtype", LIMITS)
def test_llama_cpp_computes_our_logits_and_our_greedy_text(
  dtype, a_run, tmp_path, capsys
):
  path = _export(a_run, tmp_path, dtype)
  (ids,) = llama_cpp_peer.call(llama_cpp_peer.tokenize, path, [TEXT], True)
  assert ids == [
    1,
    *open_vocabulary(str(a_run / "vocabulary.model")).encode(TEXT),
  ]
  found = llama_cpp_peer.call(llama_cpp_peer.compute_logits, path, ids)
  expected = _logits(a_run, np.array([ids]))
  difference = np.abs(found - expected).max()
  assert difference < LIMITS[dtype] * np.ptp(expected)
  if dtype == "q8_0":  # its rounding may change a close choice
    return
  capsys.readouterr()
  greedy = ["--gin.TEMPERATURE=0.0", "--gin.SAMPLE_TOKENS=8", "--json"]
  flags = ["--model_dir", str(a_run), "--prompt", TEXT]
  assert main(["generate", *flags, *greedy]) == 0
  ours = json.loads(capsys.readouterr().out)["continuation"]
  assert llama_cpp_peer.call(llama_cpp_peer.generate, path, [ids], 8) == [ours]


@pytest.mark.peers
def test_llama_cpp_has_the_ids_of_the_vocabulary(finished, tmp_path):
  path = _export(finished, tmp_path, "float16")
  vocabulary = open_vocabulary(str(finished / "vocabulary.model"))
  rng = random.Random(0)
  pieces = [vocabulary.piece(i) for i in range(vocabulary.size)]
  pieces += ["\u00e9", "\0", "\n", "\U0001f600"]
  texts = [
    "".join(rng.choices(pieces, k=rng.randrange(12))).replace("\u2581", " ")
    for _ in range(3000)
  ]
  found = llama_cpp_peer.call(llama_cpp_peer.tokenize, path, texts)
  for text, ids in zip(texts, found, strict=True):
    assert ids == vocabulary.encode(text), repr(text)
