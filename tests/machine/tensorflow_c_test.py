# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Graphs run by TensorFlow's C library give what NumPy computes."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from palm_mtf.machine.tensorflow_c import Session, TensorFlowError
from tests import processes


@pytest.fixture(scope="module")
def graph():
  """A variable [2, 3] of ones, x + variable, and the length of a string."""
  with tf.Graph().as_default() as graph:
    x = tf.placeholder(tf.int32, [2, 3], "x")
    text = tf.placeholder(tf.string, [], "text")
    held = tf.Variable(tf.ones([2, 3]), use_resource=True, name="held")
    total = tf.add(tf.cast(x, tf.float32), held.read_value(), "total")
    held.assign(total, name="assign", read_value=False)
    tf2.strings.length(text, name="length")
    tf.greater(total, 3.0, "greater")
  return graph.as_graph_def().SerializeToString()


@pytest.fixture
def session(graph):
  session = Session(b"")
  session.add_graph(graph, "a")
  session.run(targets=["a/held/Assign"])
  yield session
  session.close()


X = np.arange(6, dtype=np.int32).reshape(2, 3)


def test_tensors_of_each_kind_go_in_and_out(session):
  feeds = {"a/x:0": X.T.copy().T, "a/text:0": b"abc" * 100}
  names = ["a/total:0", "a/greater:0", "a/length:0"]
  total, greater, length = session.run(feeds, names)
  np.testing.assert_array_equal(total, X + np.float32(1))
  np.testing.assert_array_equal(greater, X + 1 > 3)
  assert (total.dtype, greater.dtype, length) == (np.float32, bool, 300)


def test_a_second_graph_shares_variables_of_the_same_name(session, graph):
  session.add_graph(graph, "b")
  session.run({"b/x:0": X}, targets=["b/assign"])
  (total,) = session.run({"a/x:0": X}, ["a/total:0"])
  np.testing.assert_array_equal(total, 2 * X + np.float32(1))


@pytest.mark.parametrize(
  "feeds, fetches, targets, message",
  [
    ({}, ["a/total:0"], [], "You must feed a value for placeholder tensor"),
    ({}, [], ["a/nothing"], "a/nothing: no such operation"),
    ({"a/x:0": X[:, :2]}, ["a/total:0"], [], "Incompatible shapes"),
  ],
)
def test_errors_are_tensorflows_own(session, feeds, fetches, targets, message):
  with pytest.raises(TensorFlowError, match=message):
    session.run(feeds, fetches, targets)


@pytest.mark.parametrize("content", [b"", b"\xff" * 10])
def test_what_is_no_graph_is_refused_or_empty(content):
  session = Session(b"")
  try:
    if content:
      with pytest.raises(TensorFlowError):
        session.add_graph(content, "a")
    else:
      session.add_graph(content, "a")
  finally:
    session.close()


_PRELOADED = """
import sys, threading
from palm_mtf.machine import tensorflow_c
tensorflow_c.preload()
print("said meanwhile", file=sys.stderr)
for thread in threading.enumerate():
  if thread is not threading.main_thread():
    thread.join()
tensorflow_c.Session(b"").close()
print("said after", file=sys.stderr)
"""


def test_the_library_prints_nothing_while_other_threads_do():
  done = processes.python("-c", _PRELOADED)
  assert done.returncode == 0
  said = [x for x in done.stderr.splitlines() if x.startswith("said")]
  assert said == ["said meanwhile", "said after"]
  assert "oneDNN" not in done.stderr


_ENDS = """
import atexit, signal, sys, threading
from palm_mtf.machine import tensorflow_c
atexit.register(lambda: print(threading.active_count()))  # the last to run
tensorflow_c.preload()
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
sys.exit(2)
"""


def test_a_process_ends_once_the_library_is_loaded_or_is_interrupted():
  # Otherwise one process of ten never ended.
  done = processes.python("-c", _ENDS, "0")
  assert (done.returncode, done.stdout) == (2, "1\n"), done.stderr
  done = processes.python("-c", _ENDS, "0.05")
  assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
