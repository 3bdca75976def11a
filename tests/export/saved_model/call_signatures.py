# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls a SavedModel as TensorFlow Serving does, with nothing of palm_mtf.

  python call_signatures.py FOLDER '[["score", {"texts": ["one"]}]]'

prints the result, or the error, of each call.
"""

import json
import sys

import tensorflow.compat.v1 as tf
import tensorflow_text

assert tensorflow_text  # registers the operations of the tokenizer


def call(folder: str, calls: list) -> list:
  """Returns the outputs or the error of each (name of a signature, inputs).

  Arguments that are not fed have the signature's defaults.
  """
  results = []
  with tf.Session(graph=tf.Graph()) as session:
    signatures = tf.saved_model.load(session, ["serve"], folder).signature_def
    for name, given in calls:
      signature = signatures[name]
      feed = {x: tf.make_ndarray(v) for x, v in signature.defaults.items()}
      feed.update(given)
      try:
        found = session.run(
          {x: info.name for x, info in signature.outputs.items()},
          {signature.inputs[x].name: value for x, value in feed.items()},
        )
        results.append({x: _plain(value) for x, value in found.items()})
      except tf.errors.InvalidArgumentError as error:
        results.append(str(error))
  return results


def _plain(x):
  if x.dtype == object:
    return [each.decode() for each in x]
  return x.tolist()


if __name__ == "__main__":
  print(json.dumps(call(sys.argv[1], json.loads(sys.argv[2]))))
  assert not any(x.startswith("palm_mtf") for x in sys.modules)
