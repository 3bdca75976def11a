# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Indexes of texts, and what other commands do with them."""

import functools
import json
import math

import numpy as np
import pytest

from palm_mtf.checkpoints.manifest import newest_whole
from palm_mtf.checkpoints.weights_to_load import settings_of
from palm_mtf.config import ModelConfig
from palm_mtf.config.macros import from_macros
from palm_mtf.data.batches.neighbours import NeighbourIndex
from palm_mtf.data.vocabulary.load import open_vocabulary
from tests import neighbours_oracle, runs, serve_testing

# No model predicts these words in this order.
WORDS = "nine one seven two ten four one one three eight six".split()
TEXT = " ".join(WORDS)
OTHERS = ["ten two two six four", "three one nine nine five"]


@pytest.fixture(scope="module")
def near(finished, tmp_path_factory):
  """Returns the folder of an index of TEXT and one of OTHERS."""
  folder = tmp_path_factory.mktemp("index") / "near"
  runs.printed(
    *("index", "build", "--model_dir", finished, "--output", folder, "--json"),
    *(f"--text={x}" for x in (TEXT, OTHERS[0])),
  )
  return folder


@pytest.fixture
def run(finished, palm_mtf, near):
  """Runs a command with an index, and macros; returns its JSON lines."""

  def run(command, *flags, index=near, **macros):
    given = {"KNN_NEIGHBOURS": 5, "KNN_TEMPERATURE": 3.0, **macros}
    if index:
      given["KNN_INDEX"] = str(index)
    code, out, err = palm_mtf(
      *command.split(),
      "--model_dir",
      finished,
      "--json",
      *flags,
      *(f"--gin.{name}={value!r}" for name, value in given.items()),
    )
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]

  return run


@functools.cache
def dump(finished, text):
  """Returns log p of a text's tokens, their keys, and the tokens."""
  from palm_mtf.checkpoints.weights_to_load import open_newest
  from palm_mtf.cli.gin_files import load_run
  from palm_mtf.generation.inference.scorer import Example, make_scorer
  from palm_mtf.generation.inference.sessions import LoadedDecoder

  model_dir, config = load_run("score", str(finished), {}, False)
  checkpoint, vocabulary = open_newest(model_dir, config)
  ids = vocabulary.encode(text)
  with LoadedDecoder.of_run(checkpoint, config) as loaded:
    scorer = make_scorer(loaded, config, vocabulary)
    names = "token_loss", "key"
    windows = [*scorer.read_windows([Example((), ids)], *names)]
  losses, keys = (
    np.concatenate(x) for x in zip(*(x[2] for x in windows), strict=True)
  )
  return -losses.astype(np.float64), keys, ids


def mixed_log_p(finished, near, text, weight=0.25, count=5, temperature=3.0):
  """Returns the sum of log p, by the paper's equations, in float64."""
  log_p, keys, ids = dump(finished, text)
  stored = np.load(near / "keys.npy").astype(np.float64)
  tokens, total = np.load(near / "tokens.npy"), 0.0
  for of_model, key, token in zip(log_p, keys, ids, strict=True):
    squares = ((stored - key) ** 2).sum(1)
    best = np.argsort(squares)[:count]
    shares = np.exp((squares[best[0]] - squares[best]) / temperature)
    p_knn = shares[tokens[best] == token].sum() / shares.sum()
    total += math.log(weight * p_knn + (1 - weight) * math.exp(of_model))
  return total


def test_keys_and_tokens_of_all_windows_are_in_the_index(
  finished, palm_mtf, tmp_path
):
  text = " ".join(WORDS * 4)
  code, _, err = palm_mtf(
    *("index", "build", "--model_dir", finished, "--text", text),
    *("--output", tmp_path / "long"),
  )
  assert code == 0, err
  _, keys, ids = dump(finished, text)
  assert len(ids) > 32  # of SEQUENCE_LENGTH, so there are several windows
  assert np.load(tmp_path / "long/tokens.npy").tolist() == ids
  found = np.load(tmp_path / "long/keys.npy")
  assert found.tobytes() == keys.astype(np.float16).tobytes()


def test_scores_and_tuning_are_those_of_the_paper(run, finished, near):
  (score,) = run("score", "--text", OTHERS[1])
  expected = mixed_log_p(finished, near, OTHERS[1])
  assert score["log_likelihood"] == pytest.approx(expected, rel=1e-6)

  def perplexity(weight, temperature):
    log_p = mixed_log_p(finished, near, OTHERS[1], weight, 5, temperature)
    return math.exp(-log_p / score["tokens"])

  (tuned,) = run("index tune", "--text", OTHERS[1])
  best = tuned["knn_weight"], tuned["knn_temperature"]
  assert tuned["perplexity"] == pytest.approx(perplexity(*best))
  assert tuned["without_index"] == pytest.approx(perplexity(0.0, 1.0))
  assert tuned["perplexity"] == min(tuned["perplexities"].values())
  for name, found in tuned["perplexities"].items():
    temperature, weight = map(float, name.split())
    assert found == pytest.approx(perplexity(weight, temperature))
    # No better weight is missed.
    for other in (0.05, 0.5, 0.95):
      assert found <= perplexity(other, temperature) * (1 + 1e-9)


@pytest.mark.slow
def test_an_index_of_no_weight_changes_no_bit_of_a_score(run, near):
  without = run("score", "--text", TEXT, index=None)
  assert run("score", "--text", TEXT, KNN_WEIGHT=0.0) == without
  assert run("score", "--text", TEXT) != without


@pytest.mark.slow
def test_the_validation_loss_is_given_with_and_without_the_index(run):
  (plain,) = run("evaluate", index=None)
  (little,) = run("evaluate", KNN_WEIGHT=1e-9)
  assert plain == {x: little[x] for x in plain}
  # Rows are read as training reads them, so only rounding differs.
  assert little["knn_loss"] == pytest.approx(plain["validation_loss"], rel=1e-5)
  (mixed,) = run("evaluate", KNN_WEIGHT=0.5)
  assert mixed["knn_perplexity"] == math.exp(mixed["knn_loss"])
  assert mixed["knn_loss"] != little["knn_loss"]


def texts_of(records):
  return [x["continuation"] for x in records]


def test_the_nearest_neighbour_alone_copies_the_text(run):
  flags = [f"--prompt={' '.join(WORDS[:n])}" for n in (2, 3)]
  macros = {"TEMPERATURE": 0.0, "SAMPLE_TOKENS": 12}
  only = {"KNN_WEIGHT": 1.0, "KNN_NEIGHBOURS": 1, **macros}
  found = texts_of(run("generate", *flags, **only))
  for n, text in zip((2, 3), found, strict=True):
    rest = " " + " ".join(WORDS[n:])
    assert text and (text.startswith(rest) or rest.startswith(text)), text
  assert found != texts_of(run("generate", *flags, index=None, **macros))


@pytest.mark.slow
def test_texts_do_not_depend_on_the_batch_and_no_weight_changes_no_bit(run):
  flags = [f"--prompt={' '.join(WORDS[i : i + 2])}" for i in range(3)]
  macros = {"TEMPERATURE": 0.9, "TOP_P": 0.9, "KNN_WEIGHT": 0.5}
  together = run("generate", *flags, **macros)
  assert run("generate", flags[1], **macros) == together[1:2]
  macros["KNN_WEIGHT"] = 0.0
  without = run("generate", *flags, index=None, **macros)
  assert run("generate", *flags, **macros) == without != together
  # The way of an index, of which almost nothing counts, chooses these tokens.
  assert run("generate", *flags, **macros | {"KNN_WEIGHT": 1e-12}) == without


@pytest.mark.parametrize(
  "macros",
  [
    {"WEIGHT_DTYPE": "int8"},
    {"MESH_SHAPE": "data:2", "LAYOUT": "batch:data"},  # TensorFlow's operations
    {"MESH_SHAPE": "model:2", "LAYOUT": "vocab:model,d_ff:model"},
    {"NUM_BEAMS": 2},
    {"REPETITION_PENALTY": 1.01},
  ],
  ids=str,
)
@pytest.mark.slow
def test_every_way_to_decode_finds_the_text(run, finished, near, macros):
  only = {"KNN_WEIGHT": 1.0, "KNN_NEIGHBOURS": 1, "TEMPERATURE": 0.0}
  prompt = "--prompt=" + " ".join(WORDS[:3])
  (text,) = texts_of(run("generate", prompt, **only, **macros))
  assert text.startswith(" two ten"), text
  if "LAYOUT" in macros:
    (score,) = run("score", "--text", OTHERS[1], **macros)
    expected = mixed_log_p(finished, near, OTHERS[1])
    assert score["log_likelihood"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_text_in_a_form_has_the_likeliest_allowed_token(run):
  pytest.importorskip("llguidance")
  only = {"KNN_WEIGHT": 1.0, "KNN_NEIGHBOURS": 1, "TEMPERATURE": 0.0}
  prompt = "--prompt=" + " ".join(WORDS[:3])
  (text,) = texts_of(run("generate", prompt, "--regex", " t[a-z]+", **only))
  assert text == " two"


def test_tuning_refuses_texts_of_the_index(run, finished, near, fails):
  for text, index, message in (
    (TEXT, f"--gin.KNN_INDEX={str(near)!r}", "KNN_INDEX = "),
    (OTHERS[1], "--gin.KNN_INDEX=None", "KNN_INDEX = None: give the index"),
  ):
    said = fails(
      *("index", "tune", "--model_dir", finished, "--text", text, index),
      "--gin.KNN_NEIGHBOURS=2",
    )
    assert message in said


def test_a_build_that_fails_leaves_nothing(
  finished, tmp_path, fails, palm_mtf, monkeypatch
):
  build = "index", "build", "--model_dir", finished, "--text", TEXT, "--output"
  (tmp_path / "other").mkdir()
  assert fails(*build, tmp_path / "other").endswith(
    "exists; give another path."
  )
  said = fails(*build, tmp_path / "new/near", "--search=approximate")
  assert said.startswith("--search = 'approximate': needs ")

  def stop(*unused):
    raise KeyboardInterrupt

  monkeypatch.setattr("palm_mtf.commands.index.seal_folder", stop)
  assert palm_mtf(*build, tmp_path / "new/near")[0] == 130
  assert [x.name for x in tmp_path.iterdir()] == ["other"]


@pytest.mark.slow
def test_a_server_has_the_texts_of_generate(finished, near, run):
  flags = [f"--gin.KNN_INDEX={str(near)!r}", "--gin.KNN_NEIGHBOURS=5"]
  process = serve_testing.start(finished, *flags, "--gin.KNN_TEMPERATURE=3.0")
  prompt = " ".join(WORDS[:2])
  try:
    server = serve_testing.make_url(process)
    asked = {"prompt": prompt, "max_tokens": 6}
    macros = {"TEMPERATURE": 0.0, "SAMPLE_TOKENS": 6}
    (expected,) = texts_of(run("generate", f"--prompt={prompt}", **macros))
    for more in ({}, {"logprobs": 2}):
      answer = serve_testing.complete(server, **asked, **more)
      (choice,) = answer["choices"]
      assert choice["text"] == expected
    likeliest = choice["logprobs"]["top_logprobs"][0]
    assert choice["logprobs"]["token_logprobs"][0] == max(likeliest.values())
    said = serve_testing.refused(server, 400, **asked, echo=True, logprobs=1)
    assert said.startswith("echo: this server has an index")
  finally:
    process.terminate()
    process.communicate()


def test_what_an_index_cannot_do_is_one_line(
  finished, near, fails, palm_mtf, monkeypatch
):
  flags = "--model_dir", finished, f"--gin.KNN_INDEX={str(near)!r}"
  assert fails("serve", *flags, "--follow").startswith(
    "--follow: an adapter or"
  )
  monkeypatch.setattr(
    "palm_mtf.generation.inference.sessions.decodes_on_accelerators",
    lambda *unused: True,
  )
  given = *flags, "--prompt=one", "--gin.KNN_NEIGHBOURS=5"
  code, _, err = palm_mtf("generate", *given)
  assert code == 2
  *_, line = err.splitlines()
  assert line.startswith("palm_mtf: KNN_INDEX: accelerators score texts with")


NEIGHBOURS = {
  "NUM_LAYERS": 2,
  "LAYERS": "plain, reading",
  "VARIANTS": {"plain": {}, "reading": {"NEIGHBOURS": 2}},
  "CHUNK_LENGTH": 8,
  "PROMPTS": [],
  "TRAIN_STEPS": 6,
  "CHECKPOINT_STEPS": 3,
}


def test_neighbours_of_no_document_and_what_finds_none_are_refused(
  tmp_path, palm_mtf
):
  def refusal(command, **more):
    macros = NEIGHBOURS | {"NEIGHBOUR_INDEX": str(tmp_path / "chunks")} | more
    given = runs.arguments(command, tmp_path, tmp_path / "run", **macros)
    code, _, err = palm_mtf(*given)
    assert code == 2
    return err.splitlines()[-1]

  pruned = {"PRUNE": "wanda", "SPARSITY": 0.5, "KEEP_ZEROS": True}
  error = refusal("train", INIT_CHECKPOINT="other", **pruned)
  assert "PRUNE = 'wanda' finds no neighbours" in error
  words = "one two three four five six seven " * 40
  (tmp_path / "0.txt").write_text(f"0 {words}")
  first = NEIGHBOURS | {"NEIGHBOUR_INDEX": str(tmp_path / "first")}
  given = "index chunks", tmp_path, tmp_path / "run"
  assert runs.run(*given, **first | {"VALIDATION_SHARE": 0.5}) == 0
  # Now the only document is held out.
  (tmp_path / "0.txt").write_text(f"1 {words}")
  error = refusal("index chunks", VALIDATION_SHARE=0.5)
  assert "leaves no document for training" in error
  messages = [{"role": x, "content": "one two"} for x in ("user", "assistant")]
  line = json.dumps({"messages": messages}) + "\n"
  (tmp_path / "0.jsonl").write_text(line)
  error = refusal("index chunks", TEXT_FILES=str(tmp_path / "*.jsonl"))
  assert "set 'packed' or 'single'" in error
  assert not (tmp_path / "chunks").exists()


@pytest.mark.slow
def test_a_run_with_neighbours_resumes_with_the_same_bits_and_scores_texts(
  tmp_path, palm_mtf
):
  corpus = runs.write_corpus(tmp_path / "corpus")
  macros = NEIGHBOURS | {
    "NEIGHBOUR_INDEX": str(tmp_path / "chunks"),
    "CACHE_DIR": str(tmp_path / "tokens"),
  }
  one, other = tmp_path / "one", tmp_path / "other"
  assert runs.run("index chunks", corpus, one, **macros) == 0
  macros["VOCABULARY"] = str(one / "vocabulary.model")
  assert runs.run("train", corpus, one, **macros) == 0
  assert runs.run("train", corpus, other, **macros | {"TRAIN_STEPS": 3}) == 0
  assert runs.run("train", corpus, other, **macros) == 0
  runs.assert_same_tensors(one, other, 6)

  given = "--model_dir", one, "--json"
  (evaluated,) = runs.printed("evaluate", *given)
  assert 0 < evaluated["validation_loss"] < 7
  text = " ".join(runs.WORDS[:6])
  (scored,) = runs.printed("score", *given, "--text", text)
  checkpoint = newest_whole(str(one))
  config = from_macros(ModelConfig, settings_of(checkpoint.manifest))
  vocabulary = open_vocabulary(str(one / "vocabulary.model"))
  (ids,) = vocabulary.encode_batch([text])
  row = np.zeros([1, config.sequence_length], np.int32)
  row[0, : len(ids)] = vocabulary.eod_id, *ids[:-1]
  index = NeighbourIndex(str(tmp_path / "chunks"), 2, 8, vocabulary.sha256)
  params = {x: np.float64(y) for x, y in runs.read_tensors(one, 6).items()}
  found = index.find(row[0], [])[np.newaxis]
  (logits,) = neighbours_oracle.forward(config, params, row, found)
  logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
  expected = logits[range(len(ids)), ids].sum()
  np.testing.assert_allclose(scored["log_likelihood"], expected, rtol=1e-5)

  for command in (
    ["generate", "--prompt", "one"],
    ["serve"],
    ["export", "--output", str(tmp_path / "e")],
    ["export", "--format", "gguf", "--output", str(tmp_path / "e")],
  ):
    code, _, err = palm_mtf(*command, "--model_dir", one)
    assert code == 2
    assert "finds no neighbours of a text" in err.splitlines()[-1]

  bare = {"LAYERS": "", "VARIANTS": None, "NEIGHBOUR_INDEX": None}
  taught = macros | bare | {"TEACHER": str(one)}
  given = runs.arguments("train", corpus, tmp_path / "taught", **taught)
  code, _, err = palm_mtf(*given)
  assert code == 2
  assert f"TEACHER = '{one}' finds no neighbours" in err.splitlines()[-1]

  plain = tmp_path / "plain"
  steps = {"TRAIN_STEPS": 3}
  assert runs.run("train", corpus, plain, **macros | bare | steps) == 0
  given = "--model_dir", plain, "--text", "one", "--against", one
  code, _, err = palm_mtf("score", *given)
  assert code == 2
  assert f"--against = '{one}' finds no neighbours" in err.splitlines()[-1]

  # Another index than the run began with.
  again = macros | {"NEIGHBOUR_INDEX": str(tmp_path / "others")}
  few = again | {"TEXT_FILES": f"{corpus}/1*.txt"}
  assert runs.run("index chunks", corpus, tmp_path / "third", **few) == 0
  code, _, err = palm_mtf(
    *runs.arguments("train", corpus, one, **again | {"TRAIN_STEPS": 8})
  )
  assert code == 2
  assert "the run began with" in err
  manifest = json.loads((tmp_path / "others" / "manifest.json").read_text())
  assert manifest["chunk_length"] == 8
