# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations of one body share a stack of calls; others have their own."""

import threading

from palm_mtf._tf import tf
from palm_mtf.mesh.call_stacks import one_call_stack


def functions_of(x):
  """Returns the functions of this file that TensorFlow names of a tensor."""
  return [x.name for x in x.op.traceback if x.filename == __file__]


def doubled(x):
  return x + x


def test_operations_of_one_body_have_the_stack_of_its_caller():
  with tf.Graph().as_default():
    x = doubled(tf.zeros([2]))
    with one_call_stack():
      y = doubled(x)
    z = doubled(y)
  here = "test_operations_of_one_body_have_the_stack_of_its_caller"
  assert functions_of(x) == functions_of(z) == [here, "doubled"]
  assert functions_of(y) == [here]


def test_another_thread_keeps_its_own():
  with tf.Graph().as_default() as graph, one_call_stack():
    found = []

    def build():
      with graph.as_default():
        found.append(doubled(tf.zeros([2])))

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
  assert functions_of(found[0]) == ["build", "doubled"]
