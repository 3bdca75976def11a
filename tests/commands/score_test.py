# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf score` on a trained run: the oracle's numbers, and the table."""

import functools
import json
import math
import types

import numpy as np
import pytest

from palm_mtf.commands.score import open_other, read_items
from palm_mtf.config import ModelConfig
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.generation.inference.scorer import _compare
from tests import oracle, runs
from tests.refusals import message_of


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.txt", b"", ": is empty; there has to be a text to score."),
    ("a.tsv", b"\n", ": is empty; there has to be a text to score."),
    ("a.tsv", b"a\tb\nc\n", ", line 2 has no tab; write inputs, a tab"),
    ("a.tsv", b"\tb\n", ", line 1: inputs are empty; give some"),
    ("a.tsv", b"a\t\n", ", line 1: targets are empty; there has to be"),
    ("a.jsonl", b" \n", ": is empty; there has to be a text to score."),
    ("a.jsonl", b'{"text": ""}\n', ", line 1: 'text' is empty; give {"),
    ("a.jsonl", b'{"prompt": "a"}', ", line 1 has the fields ['prompt']; give"),
    ("a.jsonl", b'{"text": "a", "inputs": "b"}', ", line 1 has the fields"),
    *(
      ("a.jsonl", b'{"inputs": %s}' % line, f", line 1: {message}")
      for line, message in (
        (b'"a", "targets": 3', "'targets' is 3, not a text; give {"),
        (b'"a", "options": "bc"', "'options' is not a list of texts; give {"),
        (b'"a", "options": ["b", null]', "'options' is null, not a text; give"),
        (b'"a", "options": []', "targets are empty"),
        (b'"", "targets": "b"', "inputs are empty"),
      )
    ),
  ],
)
def test_an_item_that_cannot_be_scored_is_one_error_line(
  tmp_path, name, content, message
):
  path = tmp_path / name
  path.write_bytes(content)
  said = message_of(read_items, str(path))
  assert said.startswith(f"--input = {str(path)!r}{message}")


@pytest.fixture(scope="module")
def config():
  fields = ("num_layers", "d_model", "num_heads", "d_kv", "d_ff")
  return ModelConfig(
    **{name: runs.SETTINGS[name.upper()] for name in fields},
    vocab_size=320,
    sequence_length=32,
  )


@pytest.fixture(scope="module")
def expected(finished, config):
  """Returns the oracle's log p of targets given inputs, and their tokens."""
  vocabulary = open_vocabulary(str(finished / "vocabulary.model"))
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


def test_the_divergence_from_another_checkpoint_is_the_oracles(
  score, finished, config
):
  vocabulary = open_vocabulary(str(finished / "vocabulary.model"))
  texts = "one two three four", "seven eight"
  other = finished / "checkpoints" / "step_00000004"
  more = [f"--text={x}" for x in texts]
  code, out, err = score(*more, "--against", other, "--json")
  assert code == 0, err
  numbers = json.loads(out.splitlines()[-1])
  kl, agrees, losses = [], [], [[], []]
  for text in texts:
    ids = vocabulary.encode(text)
    rows = np.array([[vocabulary.eod_id, *ids[:-1]]])
    log_q, log_p = (
      logits - np.log(np.exp(logits).sum(-1, keepdims=True))
      for step in (12, 4)
      for params in [runs.read_tensors(finished, step)]
      for logits in oracle.forward(config, params, rows)
    )
    kl += [*(np.exp(log_p) * (log_p - log_q)).sum(-1)]
    agrees += [*(log_p.argmax(-1) == log_q.argmax(-1))]
    for found, x in zip(losses, (log_q, log_p), strict=True):
      found += [*-x[np.arange(len(ids)), ids]]
  assert numbers["tokens"] == len(kl)
  wanted = {
    "perplexity": np.exp(np.mean(losses[0])),
    "perplexity_of_other": np.exp(np.mean(losses[1])),
    "kl_divergence": np.mean(kl),
    # As llama-perplexity: linear between the two nearest tokens.
    "kl_divergence_99th": np.percentile(kl, 99),
    "top_1_agreement": np.mean(agrees),
  }
  assert {x: numbers[x] for x in wanted} == pytest.approx(wanted, rel=1e-4)


def test_another_vocabulary_is_no_model_to_compare_with(finished, config):
  own = open_vocabulary(str(finished / "vocabulary.model"))

  def piece(i):
    return own.piece(i).replace("three", "drei")

  other = types.SimpleNamespace(
    sha256="", size=own.size, eod_id=own.eod_id, piece=piece
  )
  settings = types.SimpleNamespace(model=config)
  said = message_of(open_other, str(finished), settings, other)
  assert said.startswith(f"--against = {str(finished)!r}: ")
  assert "has another vocabulary than MODEL_DIR; compare" in said


def test_a_small_divergence_is_not_lost_in_rounding():
  """Logs that float32 rounds: without noise, a sum can be below 0."""
  logits = np.random.default_rng(0).standard_normal([2, 50, 5000])
  logits[1] = logits[0] + 1e-4 * logits[1]
  exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  log_q, log_p = exact.astype(np.float32)
  wanted = (np.exp(exact[1]) * (exact[1] - exact[0])).sum(-1)
  shifted = log_q + np.float32(5e-7)  # as a float32 sum of many numbers errs
  found = _compare(shifted, log_p, np.zeros(50, int)).kl
  np.testing.assert_allclose(found, wanted, rtol=0.1)


def test_quantized_weights_score_too(score):
  """Close to the float weights, and not equal to them."""
  found = {}
  for dtype in ("activation", "int8", "int4", "q4_k"):
    flag = f"--gin.WEIGHT_DTYPE={dtype!r}"
    _, out, _ = score("--text", "seven eight nine", "--json", flag)
    found[dtype] = json.loads(out)["log_likelihood"]
  exact = found.pop("activation")
  for dtype, value in found.items():
    assert value != exact, dtype
    assert value == pytest.approx(exact, rel=0.1), dtype


def test_a_document_beyond_the_context_has_the_numbers_of_its_rows(
  score, finished, tmp_path
):
  text = " ".join(runs.WORDS * 8)
  file = tmp_path / "a.txt"
  file.write_text(text)
  vocabulary = open_vocabulary(str(finished / "vocabulary.model"))
  assert len(vocabulary.encode(text)) > 64
  found = []
  for flags in ([], ["--gin.STRIDE=32"]):
    code, out, err = score("--input", file, "--json", *flags)
    assert code == 0, err
    found.append(json.loads(out)["log_likelihood"])
  assert found[0] != found[1]


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
