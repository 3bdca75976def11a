# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf score` on a trained run: the oracle's numbers, and the table."""

import functools
import json
import math

import pytest

from palm_mtf.config import PalmConfig
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from tests import oracle, runs


@pytest.fixture(scope="module")
def expected(finished):
  """Returns the oracle's log p of targets given inputs, and their tokens."""
  fields = ("num_layers", "d_model", "num_heads", "d_kv", "d_ff")
  config = PalmConfig(
    **{name: runs.SETTINGS[name.upper()] for name in fields},
    vocab_size=320,
    sequence_length=32,
  )
  vocabulary = Vocabulary(str(finished / "vocabulary.model"))
  params = runs.read_tensors(finished, 12)

  def compute(targets, inputs=""):
    given, ids = vocabulary.encode_batch([inputs, targets])
    start = vocabulary.eod_id  # PACKING = "joined"
    return oracle.log_likelihood(config, params, given, ids, start), len(ids)

  return compute


@pytest.fixture
def score(finished, palm_mtf):
  settings = ["--model_dir", finished]
  return functools.partial(palm_mtf, "score", *settings)


def test_numbers_of_all_forms_are_the_oracles(score, expected, tmp_path):
  lines = [
    {"text": "one two three"},
    {"inputs": "one two", "targets": " three"},
    {"inputs": "one two", "options": [" three", " nine nine", " x"]},
    {"inputs": "two", "targets": " \u00e9"},
  ]
  file = tmp_path / "a.jsonl"
  file.write_text("".join(json.dumps(line) + "\n" for line in lines))
  code, out, err = score("--text=7", "--input", file, "--json")
  assert code == 0, err
  found = [json.loads(line) for line in out.splitlines()]
  numbered, text, pair, options, other, texts, pairs = found
  for record, (log_p, tokens), num_bytes in (
    (numbered, expected("7"), 1),
    (text, expected("one two three"), 13),
    (pair, expected(" three", "one two"), 6),
    (other, expected(" \u00e9", "two"), 3),
    (options["options"][1], expected(" nine nine", "one two"), 10),
    (options["options"][2], expected(" x", "one two"), 2),
  ):
    assert record["log_likelihood"] == pytest.approx(log_p, rel=1e-5)
    assert (record["tokens"], record["bytes"]) == (tokens, num_bytes)
    assert record["per_token"] == record["log_likelihood"] / tokens
  log_p, tokens = expected("one two three")
  assert text["perplexity"] == pytest.approx(
    math.exp(-log_p / tokens), rel=1e-4
  )
  bits = -log_p / math.log(2) / 13
  assert text["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
  likelihoods = [expected(x, "one two") for x in lines[2]["options"]]
  best = max(range(3), key=lambda i: likelihoods[i][0])
  assert options["best"] == best
  best = max(range(3), key=lambda i: likelihoods[i][0] / likelihoods[i][1])
  assert options["best_per_token"] == best
  assert texts["origin"] == "all 2 documents"
  assert texts["bytes"] == 14
  assert pairs["log_likelihood"] == math.fsum(
    [pair["log_likelihood"], other["log_likelihood"]]
  )


def test_a_document_beyond_the_context_has_the_numbers_of_its_rows(
  score, finished, tmp_path
):
  text = " ".join(runs.WORDS * 8)
  file = tmp_path / "a.txt"
  file.write_text(text)
  vocabulary = Vocabulary(str(finished / "vocabulary.model"))
  assert len(vocabulary.encode(text)) > 64
  found = []
  for flags in ([], ["--gin.STRIDE=16"], ["--gin.STRIDE=32"]):
    code, out, err = score("--input", file, "--json", *flags)
    assert code == 0, err
    found.append(json.loads(out)["log_likelihood"])
  assert found[0] == found[1]
  assert found[0] != found[2]


def test_the_table_shows_texts_options_and_the_best(score, tmp_path):
  file = tmp_path / "a.tsv"
  file.write_text("one two\t three\t nine\n")
  code, out, _ = score("--input", file, "--text=" + "one " * 20)
  assert code == 0
  head, document, *options = out.splitlines()
  assert head.split() == (
    "log likelihood tokens bytes per token perplexity bits/byte text".split()
  )
  assert document.endswith(
    "--text 1: 'one one one one one one one one one one '..."
  )
  assert len(options) == 2
  assert sum(line.endswith("  <- best") for line in options) == 1
  assert f"{file}:1: 'one two' -> ' three'" in options[0]


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ([], "nothing to score: give at least one --text TEXT, or --input FILE."),
    (["--text="], "--text = '': is empty; there has to be a text to score."),
    (["--input=none.txt"], "--input = 'none.txt': No such file or directory"),
    (["--text=a", "--gin.STRIDE=0"], "STRIDE = 0: give a whole number"),
    (["--text=a", "--gin.STRIDE=33"], "give at most SEQUENCE_LENGTH = 32."),
    (["--txt=a"], 'unknown flag --txt (did you mean "--text"?)'),
  ],
)
def test_bad_input_is_one_line(finished, fails, flags, message):
  assert message in fails("score", "--model_dir", finished, *flags)


def test_inputs_beyond_the_context_are_one_line(finished, fails, tmp_path):
  file = tmp_path / "a.tsv"
  file.write_text("one\t two\n" + "one two " * 40 + "\t three\n")
  line = fails("score", "--model_dir", finished, "--input", file)
  assert line.startswith(f"{file}:2: inputs and targets are ")
  assert line.endswith("more than SEQUENCE_LENGTH = 32: shorten the inputs.")
