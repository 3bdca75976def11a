# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A step that reads several tokens of a text has the bits of single steps."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.generation.decode.forward import prefill
from palm_mtf.generation.decode.step import NativeStep
from palm_mtf.generation.decode.weight_maker import build_decode_model
from palm_mtf.native.decoding import Texts, TextSettings, make_history
from palm_mtf.native.operations import operations
from tests import oracle
from tests.blocks import block_config
from tests.cases import slow
from tests.mtf_testing import SINGLE, load_decode_model, small_config

pytestmark = pytest.mark.skipif(
  operations() is None, reason="there is no C++ compiler"
)
LENGTHS = np.array([40, 34, 37, 29])  # tokens of each prompt
ROWS, MOST_TOKENS = len(LENGTHS), 64
# The first step never drafts, and the second drafts at most 8 tokens. So a text
# gets at most 1 + 9 tokens in two steps.
NUM_NEW = 10
COUNTS = np.array([31, 31] * 5)  # all 31 tokens compared so far were right


class Continued:
  """Continues drawn and greedy texts of a model, plainly or with lookup."""

  def __init__(self, session, config, weight_dtype, **settings):
    rng = np.random.default_rng(1)
    vocab = config.vocab_size
    self.prompts = rng.integers(vocab, size=[ROWS, max(LENGTHS)])
    self.model = build_decode_model(config, SINGLE, weight_dtype)
    self.feeds = [
      tf.placeholder(tf.int32, self.prompts.shape),
      tf.placeholder(tf.int32, []),
    ]
    keys = rng.integers(-(2**31), 2**31, [ROWS, 2])
    self.texts = Texts(
      tokens=tf.constant(self.prompts[range(ROWS), LENGTHS - 1], tf.int32),
      positions=tf.constant(LENGTHS - 1, tf.int32),
      places=tf.zeros([ROWS], tf.int32),
      is_over=tf.fill([ROWS], False),
      keys=tf.constant(keys, tf.int32),
      temperature=tf.constant([0.0, 30.0, 30.0, 30.0]),
      top_k=tf.constant([0, 0, 30, 0]),
      top_p=tf.constant([1.0, 1.0, 0.9, 1.0]),
      limits=tf.fill([ROWS], NUM_NEW),
    )
    self.settings = TextSettings(
      vocab, **{"end_ids": (-1,), "keeps_logits": True, **settings}
    )
    history = make_history(self.feeds[0], MOST_TOKENS)
    history += np.pad(COUNTS, [0, MOST_TOKENS]).astype(np.int32)
    self.plain, self.looked_up = self.build([]), self.build([history])
    load_decode_model(session, self.model, oracle.random_parameters(config, 1))
    self.session = session

  def build(self, history):
    pack = self.model.placement.LaidOutTensor
    lengths = pack([tf.constant(LENGTHS, tf.int32)])
    prompts = tf.constant(self.prompts, tf.int32)
    seen = tf.zeros([ROWS, self.settings.num_tokens], tf.bool)
    after = NativeStep(self.model).advance(
      self.feeds[1],
      Texts(
        *(pack([x]) for x in self.texts[:9]),
        seen=[pack([seen])] * (self.settings.repetition_penalty != 1),
        history=[pack([x]) for x in history],
      ),
      prefill(self.model, prompts, lengths, MOST_TOKENS),
      self.settings,
    )
    found = after.chosen, after.logits, *after.cache
    return [x.tensor_list[0] for x in found]

  def run(self, fetches, earlier, count=NUM_NEW):
    """Returns the tokens, the logits of each last token, and the cache."""
    feed = dict(zip(self.feeds, (earlier, count), strict=True))
    return self.session.run(fetches, feed)

  def plant(self, chosen, right):
    """Returns earlier tokens in which `right` tokens of each draft are right.

    Each text's last token stands there too, and its continuation follows.
    """
    earlier = np.empty_like(self.prompts)
    for row, new in enumerate(chosen):
      copied = [self.prompts[row, LENGTHS[row] - 1], *new]
      others = sorted({*range(self.settings.num_tokens)} - {*copied})
      earlier[row] = others[0]
      copied[1 + right[row] :] = [others[1]] * (NUM_NEW - right[row])
      earlier[row, : len(copied)] = copied
    return earlier


@pytest.mark.parametrize(
  ("name", "dtype", "weight_dtype"),
  [
    ("PaLM", "float32", "activation"),
    ("Mistral", "bfloat16", "int4"),
    ("Mixtral", "bfloat16", "activation"),
    ("Gemma 3", "float32", "int8"),
    ("LLaMA 3", "bfloat16", "q5_k"),
    *(
      slow(name, dtype, weight_dtype)
      for name in ("PaLM", "LLaMA 3", "Gemma 3", "OLMoE", "DeepSeek-V3")
      for dtype in ("float32", "bfloat16")
      for weight_dtype in ("activation", "int8", "int4", "q4_k", "q6_k")
    ),
  ],
)
def test_tokens_logits_and_cache_are_those_of_single_steps(
  name, dtype, weight_dtype
):
  more = {"sequence_length": MOST_TOKENS, "activation_dtype": dtype}
  palm = name == "PaLM"
  config = small_config(**more) if palm else block_config(name, **more)
  with tf.Graph().as_default(), tf.Session() as session:
    continued = Continued(session, config, weight_dtype)
    none = np.zeros_like(continued.prompts)
    plain = continued.run(continued.plain, none)
    earlier = continued.plant(plain[0], right=[10, 10, 5, 0])
    # The first call drafts whatever the computer's speed: further rows seem to
    # cost little, because no step with a draft has been measured.
    in_two_steps, *_ = continued.run(continued.looked_up, earlier, count=2)
    looked_up = continued.run(continued.looked_up, earlier)
  counts = (in_two_steps >= 0).sum(1)
  # The second step reads the draft of the second new token and those after it.
  # Not so if a text repeats one token, as greedy ones of such models do.
  np.testing.assert_array_equal(counts[1:3], [10, 6])
  for row, count in enumerate(counts):
    np.testing.assert_array_equal(
      in_two_steps[row, :count], plain[0][row, :count]
    )
  for ours, theirs in zip(looked_up[:2], plain[:2], strict=True):
    np.testing.assert_array_equal(ours, theirs)
  for ours, theirs in zip(looked_up[2:], plain[2:], strict=True):
    for row, length in enumerate(LENGTHS):
      # The last chosen token is not read.
      ends = length + NUM_NEW - 1
      np.testing.assert_array_equal(
        ours[row][..., :ends, :].astype(np.float32),
        theirs[row][..., :ends, :].astype(np.float32),
      )


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_text_ends_within_a_draft_as_it_ends_plainly(penalty):
  """Also with a penalty, which depends on the drafted tokens before."""
  config = block_config("LLaMA 3", sequence_length=MOST_TOKENS)
  ends, whole = (-1,), None
  for _ in range(2):
    with tf.Graph().as_default(), tf.Session() as session:
      continued = Continued(
        *(session, config, "activation"),
        end_ids=ends,
        repetition_penalty=penalty,
      )
      none = np.zeros_like(continued.prompts)
      chosen, *_ = continued.run(continued.plain, none)
      whole = chosen if whole is None else whole
      earlier = continued.plant(whole, right=[10] * ROWS)
      found, *_ = continued.run(continued.looked_up, earlier, count=2)
    np.testing.assert_array_equal(found, chosen)
    ends = (int(whole[1, 4]),)  # the draft of the second step has this token
  last = whole[1].tolist().index(ends[0])
  assert (found[1, last:] == ends[0]).all()
  np.testing.assert_array_equal(found[1, :last], whole[1, :last])
