# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Searches and mixtures equal float64 oracles of Khandelwal et al. 2020."""

import dataclasses
import types

import numpy as np
import pytest

from palm_mtf.config import DecodeConfig
from palm_mtf.model_dir.foreign_files import seal_folder
from palm_mtf.retrieval.keys import (
  KEYS,
  TOKENS,
  KeyIndex,
  check_approximate,
  describe_index,
  write_approximate,
)
from tests.refusals import message_of

VOCAB, SIZE = 30, 16
CHECKPOINT = "c"
MODEL = types.SimpleNamespace(d_model=SIZE, vocab_size=VOCAB)


@pytest.fixture
def folder(tmp_path):
  return write(tmp_path / "index", 300)


def write(folder, entries, search="exact"):
  rng = np.random.default_rng(entries)
  folder.mkdir()
  # Keys in clusters, as those of a model.
  centers = rng.normal(0, 1, [entries // 100, SIZE])
  keys = np.repeat(centers, 100, 0) + rng.normal(0, 0.3, [entries, SIZE])
  keys[7] = keys[8]  # a text that repeats itself has equal keys
  np.save(folder / KEYS, keys.astype(np.float16))
  np.save(folder / TOKENS, rng.integers(0, VOCAB, entries).astype(np.int32))
  if search == "approximate":
    write_approximate(str(folder), np.load(folder / KEYS))
  seal_folder(
    str(folder), {"checkpoint": CHECKPOINT, "search": search, "texts": []}
  )
  return folder


def settings(folder, **changes):
  given = {"knn_neighbours": 20, "knn_weight": 0.3, "knn_temperature": 2.5}
  return DecodeConfig(knn_index=str(folder), **given | changes)


def queries(count):
  return np.random.default_rng(9).normal(0, 1, [count, SIZE]).astype(np.float32)


def oracle_neighbours(folder, query, count):
  """Returns squared distances and tokens of the nearest entries."""
  keys = np.load(folder / KEYS).astype(np.float64)
  squares = ((keys - query.astype(np.float64)) ** 2).sum(1)
  order = np.argsort(squares, kind="stable")[:count]
  return squares[order], np.load(folder / TOKENS)[order]


def oracle_p(folder, query, logits, decode):
  """Returns p of each token, by the paper's equations 2 and 3, in float64."""
  squares, tokens = oracle_neighbours(folder, query, decode.knn_neighbours)
  p_knn = np.zeros(VOCAB)
  for square, token in zip(squares, tokens, strict=True):
    p_knn[token] += np.exp(-square / decode.knn_temperature)
  p_model = np.exp(logits.astype(np.float64))
  weight = decode.knn_weight
  return weight * p_knn / p_knn.sum() + (1 - weight) * p_model / p_model.sum()


def test_the_nearest_keys_are_the_oracles_whatever_is_asked_with_them(folder):
  index, asked = KeyIndex(settings(folder), CHECKPOINT, MODEL), queries(40)
  together = [*index.nearest(asked)]
  for i, (squares, tokens) in enumerate(together):
    expected, expected_tokens = oracle_neighbours(folder, asked[i], 20)
    np.testing.assert_allclose(squares, expected, rtol=1e-5)
    assert tokens.tolist() == expected_tokens.tolist()
    ((alone, tokens_alone),) = index.nearest(asked[i : i + 1])
    assert alone.tobytes() == squares.tobytes()
    assert tokens_alone.tobytes() == tokens.tobytes()


@pytest.mark.parametrize(
  "changes",
  [{}, {"knn_weight": 1.0}, {"knn_neighbours": 1}, {"knn_neighbours": 300}],
)
def test_mixtures_are_the_papers(folder, changes):
  decode = settings(folder, **changes)
  index, keys = KeyIndex(decode, CHECKPOINT, MODEL), queries(5)
  logits = np.random.default_rng(3).normal(0, 2, [5, VOCAB]).astype(np.float32)
  log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
  mixed = index.mix(logits, keys)
  for i, key in enumerate(keys):
    expected = oracle_p(folder, key, logits[i], decode)
    total = np.exp(logits[i].astype(np.float64)).sum()
    p = np.exp(mixed[i].astype(np.float64)) / total
    np.testing.assert_allclose(p, expected, 1e-5, atol=1e-30)
    found = index.log_p(log_p[i], np.tile(key, [VOCAB, 1]), range(VOCAB))
    np.testing.assert_allclose(np.exp(found), expected, 1e-5)
  # Tokens that cannot be have a number that sampling can multiply.
  assert np.isfinite(mixed).all()


def test_an_index_without_say_changes_no_logit(folder):
  # So a repetition penalty, which depends on signs, does the same with it.
  logits = np.random.default_rng(3).normal(2, 3, [5, VOCAB]).astype(np.float32)
  index = KeyIndex(settings(folder, knn_weight=1e-9), CHECKPOINT, MODEL)
  mixed = index.mix(logits, queries(5))
  np.testing.assert_allclose(mixed, logits, rtol=1e-5, atol=1e-4)


def test_blocks_of_keys_do_not_change_the_neighbours(folder, monkeypatch):
  asked, index = queries(3), KeyIndex(settings(folder), CHECKPOINT, MODEL)
  whole = [x.tolist() for pair in index.nearest(asked) for x in pair]
  monkeypatch.setattr("palm_mtf.retrieval.keys._BLOCK", 50)
  assert [x.tolist() for pair in index.nearest(asked) for x in pair] == whole


def test_of_equal_keys_the_first_entries_count(tmp_path):
  # The first tokens of all texts have the same key.
  folder, query = tmp_path / "index", queries(9)
  folder.mkdir()
  keys = np.random.default_rng(1).normal(0, 3, [3000, SIZE]).astype(np.float16)
  keys[1::3] = keys[4]
  np.save(folder / KEYS, keys)
  np.save(folder / TOKENS, np.arange(3000, dtype=np.int32) % VOCAB)
  seal_folder(
    str(folder), {"checkpoint": CHECKPOINT, "search": "exact", "texts": []}
  )
  query[4] = keys[4] + query[4] / 50
  index = KeyIndex(settings(folder, knn_neighbours=100), CHECKPOINT, MODEL)
  _, expected = oracle_neighbours(folder, query[4], 100)
  for asked in (query, query[4:5], query[4:], query[[1, 2, 3, 0, 4, 4]]):
    found = [tokens.tolist() for _, tokens in index.nearest(asked)]
    places = np.flatnonzero((asked == query[4]).all(1))
    assert all(found[i] == expected.tolist() for i in places)


def test_small_probabilities_do_not_underflow(folder):
  # exp(-800) is 0 in float64; log p is the model's, less the index's share.
  for weight, temperature in ((0.25, 2.5), (0.25, 1e-6), (0.25, 1e12)):
    decode = settings(folder, knn_weight=weight, knn_temperature=temperature)
    index, query = KeyIndex(decode, CHECKPOINT, MODEL), queries(1)
    (squares, tokens), *_ = index.nearest(query)
    ids = [VOCAB + 5, *tokens[:3].tolist()]
    found = index.log_p(np.full([4], -800.0), np.tile(query, [4, 1]), ids)
    assert found[0] == pytest.approx(-800 + np.log(1 - weight))
    oracle, near = oracle_neighbours(folder, query[0], 20)
    np.testing.assert_allclose(squares, oracle, rtol=1e-12)
    shares = np.exp((oracle[0] - oracle) / temperature)
    for log_p, token in zip(found[1:], ids[1:], strict=True):
      p_knn = shares[near == token].sum() / shares.sum()
      with np.errstate(divide="ignore"):
        expected = np.logaddexp(np.log(weight * p_knn), np.log(0.75) - 800)
      assert log_p == pytest.approx(expected, rel=1e-9)


def test_faiss_agrees_and_an_approximate_search_has_exact_distances(tmp_path):
  faiss = pytest.importorskip("faiss")
  folder, count = write(tmp_path / "index", 12_000, "approximate"), 20
  keys, asked = np.load(folder / KEYS).astype(np.float32), queries(50)
  flat = faiss.IndexFlatL2(SIZE)
  flat.add(keys)
  squares, entries = flat.search(asked, count)
  tokens = np.load(folder / TOKENS)
  exact = write(tmp_path / "exact", 12_000)
  for i, found in enumerate(
    KeyIndex(settings(exact), CHECKPOINT, MODEL).nearest(asked)
  ):
    np.testing.assert_allclose(found[0], squares[i], rtol=1e-4)
    assert found[1].tolist() == tokens[entries[i]].tolist()
  index, recall = KeyIndex(settings(folder), CHECKPOINT, MODEL), []
  for i, (found, near) in enumerate(index.nearest(asked)):
    all_squares = ((keys - asked[i]) ** 2).sum(1)
    places = [np.abs(all_squares - x).argmin() for x in found]
    np.testing.assert_allclose(all_squares[places], found, rtol=1e-5)
    assert near.tolist() == tokens[places].tolist()
    recall.append(len({*places} & {*entries[i]}) / count)
    ((alone, _),) = index.nearest(asked[i : i + 1])
    assert alone.tobytes() == found.tobytes()
  assert np.mean(recall) > 0.8


def test_answers_of_tasks_depend_on_the_content_of_the_index(folder, tmp_path):
  # So that answers with an earlier index at the same path are not read again.
  decode = settings(folder)
  before = describe_index(decode)
  assert list(before) == ["index"] and describe_index(decode) == before
  assert describe_index(DecodeConfig()) == {}
  assert describe_index(settings(tmp_path / "no")) == {}
  (folder / "manifest.json").unlink()
  tokens = np.load(folder / TOKENS)
  tokens[3] ^= 1
  np.save(folder / TOKENS, tokens)
  seal_folder(
    str(folder), {"checkpoint": CHECKPOINT, "search": "exact", "texts": []}
  )
  assert describe_index(decode) not in (before, {})


def test_a_wrong_index_is_one_line(folder, tmp_path, monkeypatch):
  decode = settings(folder)
  said = message_of(KeyIndex, decode, "other", MODEL)
  assert said.startswith(f"KNN_INDEX = {str(folder)!r}: is of the checkpoint")
  wider = types.SimpleNamespace(d_model=2 * SIZE, vocab_size=VOCAB)
  assert message_of(KeyIndex, decode, "other", wider) == said
  said = message_of(
    KeyIndex, settings(folder, knn_neighbours=301), CHECKPOINT, MODEL
  )
  assert said == (
    "KNN_NEIGHBOURS = 301: the index has 300 entries; give at most as many."
  )
  missing = message_of(KeyIndex, settings(tmp_path / "no"), CHECKPOINT, MODEL)
  assert missing.endswith(
    "has no whole index; make one with palm_mtf index build."
  )
  manifest = folder / "manifest.json"
  content = manifest.read_bytes()
  manifest.write_bytes(content.replace(b'"c"', b'"d"'))
  assert "has no whole index" in message_of(KeyIndex, decode, CHECKPOINT, MODEL)
  manifest.write_bytes(content)
  tokens = (folder / TOKENS).read_bytes()
  for damaged in (tokens[:-1], tokens[:-4] + b"\7\0\0\0", b""):
    (folder / TOKENS).write_bytes(damaged)
    said = message_of(KeyIndex, decode, CHECKPOINT, MODEL)
    assert "has no whole index" in said
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  assert message_of(check_approximate, 10**6) == (
    "--search = 'approximate': needs faiss, which is not installed: pip "
    "install 'palm_mtf[retrieval]'."
  )
  monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
  assert "needs texts of at least 10,000 tokens" in message_of(
    check_approximate, 9_999
  )


def test_an_index_that_no_build_writes_is_refused(folder):
  keys, tokens = np.load(folder / KEYS), np.load(folder / TOKENS)
  for wrong_keys, wrong_tokens in (
    (keys, tokens - VOCAB),
    (keys, tokens + VOCAB),
    (keys, tokens[1:]),
    (keys, tokens.astype(np.int64)),
    (keys.astype(np.float32), tokens),
    (keys[:, :1], tokens),
    (keys.reshape(-1), tokens),
    (keys[:0], tokens[:0]),
    (keys, np.array([None])),
  ):
    (folder / "manifest.json").unlink()
    np.save(folder / KEYS, wrong_keys)
    np.save(folder / TOKENS, wrong_tokens)
    seal_folder(str(folder), {"checkpoint": CHECKPOINT, "search": "exact"})
    said = message_of(KeyIndex, settings(folder), CHECKPOINT, MODEL)
    assert "has no whole index" in said


@pytest.mark.parametrize(
  ("name", "value"),
  [
    *(("knn_weight", x) for x in (-0.1, 1.1, float("nan"), "half")),
    *(("knn_temperature", x) for x in (0, -1.0, float("inf"))),
    *(("knn_neighbours", x) for x in (0, 1.5, True)),
    ("knn_index", ""),
  ],
)
def test_a_wrong_setting_is_one_line(name, value):
  said = message_of(dataclasses.replace, DecodeConfig(), **{name: value})
  assert said.startswith(f"{name.upper()} = {value!r}: give ")
