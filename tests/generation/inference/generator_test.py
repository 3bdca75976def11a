# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts of a model whose next token depends only on the last: a b c d [eod].

The embedding is the identity, and the layers only make the next letter the
likeliest, so every continuation is known.
"""

import contextlib
import dataclasses
import functools
import gc
import weakref

import numpy as np
import pytest

from palm_mtf.config import DecodeConfig, MeshLayout, ModelConfig
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.text_reader import decode_after
from palm_mtf.data.vocabulary.training import train_vocabulary
from palm_mtf.generation.inference.generator import Generator
from palm_mtf.generation.inference.sessions import LoadedDecoder
from tests import oracle
from tests.decode_testing import save_checkpoint
from tests.mtf_testing import SINGLE, small_config

GREEDY = DecodeConfig(temperature=0.0)
SAMPLE_TOKENS = 20
ORDER = "abcdefghij\u00e9k"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
  path = str(tmp_path_factory.mktemp("vocabulary") / "vocabulary.model")
  text = "".join(f"{letter}\n" for letter in "abcdefghijk")
  train_vocabulary([text * 20], 281, path=path)
  return open_vocabulary(path)


@pytest.fixture(scope="module")
def config(vocabulary):
  # Width for a code of each token, and for the code of the token before it.
  sizes = {"num_layers": 1, "num_heads": 1, "d_kv": 2, "sequence_length": 48}
  sizes |= {"d_model": 2 * vocabulary.size, "d_ff": vocabulary.size}
  settings = {"norm": "rms_norm", "activation_dtype": "float32", **sizes}
  return ModelConfig(vocab_size=vocabulary.size, **settings)


@pytest.fixture(scope="module")
def checkpoint(config, vocabulary, tmp_path_factory):
  """A model in which a letter of ORDER makes the next one the likeliest."""
  size = vocabulary.size
  ids = [i for letter in ORDER for i in vocabulary.encode(letter)]
  follows = np.zeros([size, size])
  for a, b in zip(ids, [*ids[1:], vocabulary.eod_id], strict=True):
    follows[a, b] = 1
  # The row of a token has its code in the first half, and the code of its
  # predecessors in the second. The MLP writes a code into the second half.
  embedding = np.concatenate([np.eye(size), 3 * follows.T], 1)
  params = {
    "embedding": embedding,
    "layer_000/norm/scale": np.ones(2 * size),
    "layer_000/attention/q": np.zeros([2 * size, 1, 2]),
    "layer_000/attention/k": np.zeros([2 * size, 2]),
    "layer_000/attention/v": np.zeros([2 * size, 2]),
    "layer_000/attention/o": np.zeros([1, 2, 2 * size]),
    "layer_000/mlp/wi_gate": np.eye(2 * size, size),
    "layer_000/mlp/wi": np.eye(2 * size, size),
    "layer_000/mlp/wo": 40 * np.eye(size, 2 * size, size),
    "final_norm/scale": 40 * np.ones(2 * size),
  }
  return save_checkpoint(config, params, tmp_path_factory.mktemp("checkpoint"))


@contextlib.contextmanager
def opened(checkpoint, config, mesh=SINGLE, weight_dtype="activation"):
  """Loads a checkpoint; yields a function that makes a Generator with it."""
  with LoadedDecoder(checkpoint, config, mesh, weight_dtype) as loaded:
    yield functools.partial(make_generator, loaded)


def make_generator(loaded, vocabulary, decode=GREEDY, seed=0, **settings):
  settings = {"sample_tokens": SAMPLE_TOKENS, "seed": seed, **settings}
  return Generator(loaded, vocabulary, decode, **settings)


@pytest.fixture(scope="module")
def make(checkpoint, config, vocabulary):
  """Makes a Generator of given settings, all with the same weights."""
  with opened(checkpoint, config) as make:
    yield functools.partial(make, vocabulary)


@pytest.fixture(scope="module")
def greedy(make):
  return make()


def texts(generator, prompts):
  found = generator.continuations(prompts)
  return [[each.text for each in results] for results in found]


def test_prompts_of_all_lengths_continue_as_the_model_says(greedy):
  prompts = ["a", "dcba" * 6, "hi", "k"]
  results = list(greedy.continuations(prompts))
  rest = ORDER[1:]
  assert [r.text for (r,) in results] == [rest, rest, "j\u00e9k", ""]
  assert {r.ended for (r,) in results} == {"eod"}
  (last,) = results[-1]
  assert last.num_tokens == 0


def test_a_stream_is_the_text_in_pieces_without_broken_characters(greedy):
  pieces = list(greedy.stream("a"))
  assert len(pieces) > 2
  assert "".join(pieces) == ORDER[1:]
  assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stop", ["ef", "f", "e"])
def test_a_text_ends_before_a_stop_string_in_batch_and_stream(make, stop):
  generator = make(dataclasses.replace(GREEDY, stop_strings=["zz", stop]))
  expected = ORDER[1 : ORDER.index(stop)]
  ((first,), (second,)) = generator.continuations(["a", "g"])
  assert (first.text, first.ended) == (expected, "stop")
  assert (second.text, second.ended) == ("hij\u00e9k", "eod")
  if stop == "ef":
    assert "".join(generator.stream("a")) == expected


def test_beams_give_the_text_of_a_certain_model_and_a_score(make, greedy):
  beams = make(dataclasses.replace(GREEDY, num_beams=2))
  ((result,),) = beams.continuations(["a"])
  assert result.text == ORDER[1:] and result.score is not None
  ((result,),) = greedy.continuations(["a"])
  assert result.score is None


def test_int8_weights_give_the_text_of_a_certain_model(
  checkpoint, config, vocabulary
):
  with opened(checkpoint, config, weight_dtype="int8") as make:
    assert texts(make(vocabulary), ["a"]) == [[ORDER[1:]]]


def test_more_prompts_than_a_batch_has_rows_come_in_order(
  checkpoint, config, vocabulary
):
  mesh = MeshLayout(mesh_shape="data:2", layout="batch:data")
  # Late letters, after which texts soon end.
  prompts = [ORDER[7 + i % 3] for i in range(71)]
  with opened(checkpoint, config, mesh) as make:
    found = texts(make(vocabulary), prompts)
  assert found == [[ORDER[ORDER.index(x) + 1 :]] for x in prompts]


def test_samples_depend_only_on_seed_and_prompt(make):
  settings = DecodeConfig(temperature=30.0, num_samples=2)
  generator = make(settings)
  together = texts(generator, ["a", "bcd", "e"])
  assert texts(generator, ["bcd"]) == together[1:2]
  assert len({text for samples in together for text in samples}) == 6
  assert texts(make(settings, seed=1), ["bcd"]) != together[1:2]


def test_a_prompt_may_take_all_the_room(greedy, config):
  prompt = "a" * (config.sequence_length - SAMPLE_TOKENS)
  assert texts(greedy, [prompt, "j"]) == [[ORDER[1:]], ["\u00e9k"]]


def test_without_a_start_token_a_prompt_begins_with_its_first_token(
  vocabulary, tmp_path
):
  """The penalty of repetition counts it; [eod] stands for an empty prompt."""
  config = small_config(sequence_length=24, vocab_size=vocabulary.size)
  params = oracle.random_parameters(config, seed=3)
  checkpoint = save_checkpoint(config, params, tmp_path)
  prompts = [[5, 9], [], [7] * 20]
  settings = DecodeConfig(temperature=0.0, repetition_penalty=3.0)
  with LoadedDecoder(checkpoint, config, SINGLE) as loaded:
    how = {"sample_tokens": 4, "start_id": None}
    generator = make_generator(loaded, vocabulary, settings, **how)
    found = [x.text for (x,) in generator.continue_tokens(prompts)]
  for text, prompt in zip(found, prompts, strict=True):
    tokens = [*prompt] or [vocabulary.eod_id]
    count = len(tokens)
    while len(tokens) < count + 4 and vocabulary.eod_id not in tokens[count:]:
      logits = oracle.forward(config, params, np.array([tokens]))[0, -1]
      for token in {*tokens}:
        logits[token] *= 1 / 3 if logits[token] > 0 else 3
      tokens.append(int(np.argmax(logits[: vocabulary.size])))
    assert text == decode_after(vocabulary, prompt, tokens[count:])


def test_a_prompt_comes_after_the_start_token_and_is_given(
  vocabulary, tmp_path
):
  """And after its use, no object of a decoder is left."""
  config = small_config(
    sequence_length=24, vocab_size=vocabulary.size, objective="prefix_lm"
  )
  params = oracle.random_parameters(config, seed=3)
  checkpoint = save_checkpoint(config, params, tmp_path)
  with LoadedDecoder(checkpoint, config, SINGLE) as loaded:
    generator = make_generator(loaded, vocabulary, sample_tokens=4, start_id=1)
    ((found,), _) = generator.continue_tokens([[5, 9], [7] * 20])
    graph = weakref.ref(loaded.client.graph)
  del generator, loaded
  gc.collect()
  assert graph() is None
  tokens = [1, 5, 9]
  for _ in range(4):
    prefix = np.array([[True] * 3 + [False] * (len(tokens) - 3)])
    logits = oracle.forward(config, params, np.array([tokens]), prefix=prefix)
    tokens.append(int(np.argmax(logits[0, -1, : vocabulary.size])))
  assert found.text == vocabulary.decode(tokens[3:])
