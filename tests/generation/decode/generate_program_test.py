# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The loop in the graph gives the same as recomputing every prefix.

A beam search that is wide enough finds the best of all texts.
"""

import itertools

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.config import DecodeConfig
from palm_mtf.generation.decode.functions import LocalPrograms
from palm_mtf.generation.decode.generate_program import (
  BeamSearch,
  PromptBatch,
  build_decode_programs,
)
from palm_mtf.generation.decode.sampling import SamplingSettings, choose_tokens
from palm_mtf.generation.decode.slot_program import (
  InsertPrompts,
  MakeSlots,
  StepSlots,
)
from palm_mtf.generation.decode.weight_maker import build_decode_model
from palm_mtf.native.operations import operations
from palm_mtf.runtime.client.client import Client
from tests import oracle
from tests.blocks import block_config
from tests.cases import slow
from tests.decode_testing import EOD, Decoder, Recomputed, decode
from tests.mtf_testing import MOVED, SINGLE, mesh_layout, small_config

CONFIG = small_config(sequence_length=20)
PARAMS = oracle.random_parameters(CONFIG, seed=1)
PROMPTS = [[5, 9, 13], [7], [40, 2, 2, 8, 21, 3], [11, 30]]
MAX_TOKENS = 10
GREEDY = DecodeConfig(temperature=0.0)
DRAWN = DecodeConfig(
  temperature=1.5, top_k=30, top_p=0.95, repetition_penalty=1.2, num_samples=3
)
BEAMS = DecodeConfig(num_beams=3)


@pytest.fixture(scope="module")
def recomputed():
  return Recomputed(CONFIG, PARAMS)


@pytest.fixture(scope="module")
def expected(recomputed):
  return [recomputed.greedy(prompt, MAX_TOKENS) for prompt in PROMPTS]


def continued(settings=GREEDY, prompts=PROMPTS, **how):
  return decode(CONFIG, PARAMS, prompts, settings, max_tokens=MAX_TOKENS, **how)


@pytest.mark.parametrize(
  "layout", ["all over data and model", slow("two axes but no batch")]
)
def test_greedy_tokens_equal_full_recomputation(layout, expected):
  result = continued(mesh=mesh_layout(layout))
  assert result.tokens[:, 0].tolist() == expected
  assert any(EOD in tokens for tokens in expected), "no text ends here"
  ended = [EOD in tokens for tokens in expected]
  assert result.is_over[:, 0].tolist() == ended


@pytest.mark.parametrize(
  ("name", "layout"),
  [
    ("Gemma 3", None),
    slow("GPT-3", "all over data and model"),
    slow("Gemma 3", "all over data and model"),
    slow("Cohere 2", None),
    slow("Cohere 2", "all over data and model"),
    slow("GPT-3", None),
    slow("Mixtral", MOVED),
  ],
)
def test_greedy_tokens_of_unlike_layers_equal_full_recomputation(name, layout):
  """By the C++ step, if it was compiled, and TensorFlow's on several devices.

  The prompts and the texts are longer than the windows.
  """
  config = block_config(name, sequence_length=20)
  params = oracle.random_parameters(config, seed=1)
  mesh = layout or SINGLE
  if isinstance(layout, str):
    mesh = mesh_layout(layout)
  how = {"max_tokens": MAX_TOKENS, "mesh": mesh}
  found = decode(config, params, PROMPTS, GREEDY, **how)
  model = Recomputed(config, params)
  expected = [model.greedy(prompt, MAX_TOKENS) for prompt in PROMPTS]
  assert found.tokens[:, 0].tolist() == expected


@pytest.mark.parametrize("layout", [None, "heads over model"])
def test_any_of_several_ends_ends_a_text_in_both_executors(layout, expected):
  """The C++ step, if it was compiled, and TensorFlow's on several devices."""
  other = next(x[2] for x in expected if EOD not in x[:3])
  ends = (EOD, other, CONFIG.vocab_size - 1)
  mesh = mesh_layout(layout) if layout else SINGLE
  found = continued(end_ids=ends, mesh=mesh)
  for row, tokens in enumerate(expected):
    count = next((i for i, x in enumerate(tokens, 1) if x in ends), MAX_TOKENS)
    filled = [*tokens[:count], *[EOD] * (MAX_TOKENS - count)]
    assert found.tokens[row, 0].tolist() == filled
    assert found.is_over[row, 0] == bool({*tokens} & {*ends})


def test_greedy_tokens_depend_on_neither_pauses_nor_earlier_batches(expected):
  with tf.Graph().as_default(), Client(tf.Session()) as client:
    decoder = Decoder(client, CONFIG, PARAMS, PROMPTS, GREEDY, MAX_TOKENS)
    for _ in range(2):
      decoder.start()
      for limit in (4, 8, MAX_TOKENS):
        decoder.advance(limit)
      result = decoder.read()
      assert result.tokens[:, 0].tolist() == expected
      ended = [EOD in tokens for tokens in expected]
      assert result.is_over[:, 0].tolist() == ended
    # Of equal logits, the first is taken.
    decoder.load({x: np.zeros_like(value) for x, value in PARAMS.items()})
    decoder.start()
    decoder.advance(MAX_TOKENS)
    assert not decoder.read().tokens.any()


@pytest.mark.parametrize("layout", [None, slow("all over data and model")])
def test_greedy_tokens_are_pieces_of_the_vocabulary(
  layout, recomputed, expected
):
  num_tokens = 25  # the embedding has more rows
  assert np.max(expected) >= num_tokens, "nothing lies behind the vocabulary"
  exact = [recomputed.greedy(x, MAX_TOKENS, num_tokens) for x in PROMPTS]
  mesh = mesh_layout(layout) if layout else SINGLE
  found = continued(mesh=mesh, num_tokens=num_tokens)
  assert found.tokens[:, 0].tolist() == exact


def recomputed_samples(recomputed, settings):
  """Returns tokens drawn from recomputed logits, [prompts, MAX_TOKENS]."""
  vocab = CONFIG.vocab_size
  with tf.Graph().as_default(), tf.Session() as session:
    logits = tf.placeholder(tf.float32, [1, vocab])
    seen = tf.placeholder(tf.bool, [1, vocab])
    key, place = tf.placeholder(tf.int32, [1, 2]), tf.placeholder(tf.int32, [])
    given = SamplingSettings(
      *(settings.temperature, settings.top_k, settings.top_p),
      settings.repetition_penalty,
    )
    token = choose_tokens(logits, seen, key, place, given, vocab)
    draw = session.make_callable(token, [logits, seen, key, place])
    texts = []
    for row, prompt in enumerate(PROMPTS):
      tokens = list(prompt)
      for i in range(MAX_TOKENS):
        if EOD in tokens[len(prompt) :]:
          tokens.append(EOD)
          continue
        has = np.isin(np.arange(vocab), tokens)[np.newaxis]
        found = draw(recomputed.logits(tokens)[np.newaxis], has, [[row, 0]], i)
        tokens.append(int(found[0]))
      texts.append(tokens[len(prompt) :])
  return texts


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"temperature": 0.0, "repetition_penalty": 1.5, "num_samples": 1},
    {"top_k": 9, "top_p": 0.9, "repetition_penalty": 0.7},
  ],
  ids=str,
)
def test_samples_equal_full_recomputation(changes, recomputed):
  changes = {"temperature": 1.5, "num_samples": 2, **changes}
  settings = DecodeConfig(**changes)
  result = continued(settings)
  expected = recomputed_samples(recomputed, settings)
  assert result.tokens[:, 0].tolist() == expected
  for samples in result.tokens.tolist():
    assert len(set(map(tuple, samples))) == settings.num_samples, "they differ"


@pytest.mark.skipif(operations() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
  ("settings", "weight_dtype"),
  [(GREEDY, "int8"), (DRAWN, "activation")],
  ids=["greedy", "drawn"],
)
def test_xla_compiles_nothing_that_c_computes(settings, weight_dtype):
  sizes = PromptBatch(
    num_prompts=2, prompt_tokens=4, max_tokens=4, num_tokens=25, end_ids=(EOD,)
  )
  with tf.Graph().as_default() as graph:
    model = build_decode_model(CONFIG, SINGLE, weight_dtype)
    build = LocalPrograms(model).build
    build_decode_programs(build, settings, sizes)
    build(MakeSlots(2, 1), "slots")
    build(InsertPrompts(1, 4), "slots")
    for is_set in (False, True):
      wants = dict.fromkeys(
        ("is_greedy", "has_limits", "wants_log_probs"), is_set
      )
      build(StepSlots(num_rows=2, num_tokens=25, **wants), "slots")
    assert not graph.as_graph_def().library.function


@pytest.mark.slow
def test_samples_do_not_depend_on_batch_layout_or_pauses():
  drawn = continued(DRAWN).tokens
  alone = continued(DRAWN, PROMPTS[1:2], keys=[1])
  np.testing.assert_array_equal(alone.tokens[0], drawn[1])
  mesh = mesh_layout("all over data and model")
  split = continued(DRAWN, mesh=mesh, chunk=4)
  np.testing.assert_array_equal(split.tokens, drawn)


def log_p_of(recomputed, prompt, tokens):
  """Returns log p and the number of the tokens up to [eod]."""
  count = tokens.index(EOD) + 1 if EOD in tokens else len(tokens)
  total = 0.0
  for place in range(count):
    logits = recomputed.logits([*prompt, *tokens[:place]]).astype(np.float64)
    total += logits[tokens[place]] - np.log(np.exp(logits).sum())
  return total, count


@pytest.mark.slow
def test_beams_have_the_scores_of_full_recomputation_and_beat_greedy(
  recomputed, expected
):
  result = continued(BEAMS)

  def score(prompt, tokens):
    total, count = log_p_of(recomputed, prompt, tokens)
    return total / ((5 + count) / 6) ** BEAMS.length_penalty

  for row, prompt in enumerate(PROMPTS):
    found = [score(prompt, each) for each in result.tokens[row].tolist()]
    np.testing.assert_allclose(found, result.scores[row], rtol=1e-4)
    assert found == sorted(found, reverse=True)
    assert found[0] >= score(prompt, expected[row]) - 1e-6
  split = continued(BEAMS, mesh=mesh_layout("all over data and model"))
  np.testing.assert_array_equal(split.tokens, result.tokens)


# The model of the next tests is a table: log p of a token after each token.
TOKENS, END, LENGTH = 4, 1, 4
TABLES = 3


def tables(seed):
  """Returns per prompt: logits [previous token, token], first logits."""
  rng = np.random.default_rng(seed)
  scaled = 2 * rng.normal(size=[TABLES, TOKENS + 1, TOKENS])
  return scaled.astype(np.float32)


def log_softmax(x):
  x = x.astype(np.float64)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def run_search(tables, num_beams, length_penalty, ends=(END,)):
  """Returns tokens [prompts, beams, max_tokens] and scores [prompts, beams]."""
  decode = DecodeConfig(num_beams=num_beams, length_penalty=length_penalty)
  search = BeamSearch(decode, PromptBatch(TABLES, 1, LENGTH, TOKENS, ends))
  with tf.Graph().as_default(), tf.Session() as session:
    state = search.first_state(TABLES)
    last = tf.fill([TABLES * num_beams], TOKENS)
    prompt = tf.repeat(tf.range(TABLES), num_beams)
    for place in range(LENGTH):
      logits = tf.gather_nd(tables, tf.stack([prompt, last], -1))
      state, last, _ = search.advance(state, logits, tf.constant(place))
    *_, scores, tokens = session.run(state)
  return tokens, scores


def score(table, text, length_penalty):
  log_p = log_softmax(table)
  total = sum(log_p[a, b] for a, b in itertools.pairwise([TOKENS, *text]))
  return total / ((5 + len(text)) / 6) ** length_penalty


def all_texts():
  """Yields every text that ends with [eod] or has LENGTH."""
  for length in range(1, LENGTH + 1):
    for text in itertools.product(range(TOKENS), repeat=length):
      if END not in text[:-1] and (text[-1] == END or length == LENGTH):
        yield text


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
def test_a_wide_search_finds_the_best_of_all_texts_in_order(length_penalty):
  models = tables(seed=0)
  width = 3 ** (LENGTH - 1)  # the number of prefixes
  tokens, scores = run_search(models, width, length_penalty)
  for prompt, table in enumerate(models):
    ranked = sorted(
      all_texts(), key=lambda t: score(table, t, length_penalty), reverse=True
    )
    for row in range(5):
      expected = [*ranked[row], *[END] * (LENGTH - len(ranked[row]))]
      assert tokens[prompt, row].tolist() == expected
      exact = score(table, ranked[row], length_penalty)
      assert scores[prompt, row] == pytest.approx(exact, rel=1e-5)


def beam_search(table, num_beams, length_penalty, ends):
  """Runs a beam search in plain Python; returns its best texts."""
  living, ended = [()], []
  for length in range(1, LENGTH + 1):
    longer = [(*text, token) for text in living for token in range(TOKENS)]
    longer.sort(key=lambda text: score(table, text, 0.0), reverse=True)
    longer = longer[: (1 + len(ends)) * num_beams]
    is_end = [t[-1] in ends or length == LENGTH for t in longer]
    ended += [t for t, end in zip(longer, is_end, strict=True) if end]
    living = [t for t, end in zip(longer, is_end, strict=True) if not end]
    living = living[:num_beams]
  ended.sort(key=lambda text: score(table, text, length_penalty), reverse=True)
  return ended[:num_beams]


@pytest.mark.parametrize("ends", [(END,), (END, 3)])
@pytest.mark.parametrize("num_beams", [1, 2, 3])
def test_a_narrow_search_keeps_the_beams_that_it_should(num_beams, ends):
  models = tables(seed=2)
  tokens, _ = run_search(models, num_beams, 0.6, ends)
  for prompt, table in enumerate(models):
    for row, text in enumerate(beam_search(table, num_beams, 0.6, ends)):
      expected = [*text, *[END] * (LENGTH - len(text))]
      assert tokens[prompt, row].tolist() == expected
