# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Our import of TensorFlow is small and changes nothing for other code."""

import gc
import json
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf2

from palm_mtf._tf import tf
from palm_mtf.ops.xla import function, fused
from tests import processes
from tests.source_files import ROOT

_SAYS = """
import json, sys
from palm_mtf.machine.process import own_process
own_process()
import palm_mtf._tf
withheld = ("keras", "jax", "scipy", "h5py")
loaded = [name for name in withheld if name in sys.modules]
import h5py.version, scipy.sparse
from tensorflow.keras.layers import Dense
import tensorflow
print(json.dumps([loaded, tensorflow.keras.layers.Dense is Dense]))
"""


# Settings of a process that an import must not change.
_STATE = """
import gc, logging, os, signal, sys, warnings

def state():
  handlers = [signal.getsignal(x) for x in signal.valid_signals()]
  return (
    dict(os.environ), gc.get_threshold(), gc.isenabled(), gc.get_freeze_count(),
    logging.root.level, logging.root.handlers[:], warnings.filters[:], handlers,
  )
"""


@pytest.mark.slow
def test_parts_that_tensorflow_does_not_need_are_loaded_on_demand():
  shown = processes.python("-c", _SAYS)
  loaded, is_there = json.loads(shown.stdout)
  assert loaded == []
  assert is_there


@pytest.mark.slow
def test_importing_palm_mtf_only_makes_mesh_tensorflow_importable():
  program = """
sys.modules["keras"] = None  # TensorFlow works without it, and starts sooner
before, path = state(), sys.meta_path[:]
import palm_mtf
assert state() == before and "tensorflow" not in sys.modules
(finder,) = [x for x in sys.meta_path if x not in path]
import tensorflow
before = state()
import mesh_tensorflow as mtf
assert state() == before and finder not in sys.meta_path
assert not [x for x in sys.modules if x.startswith("palm_mtf.") and x not in
            ("palm_mtf._old_names",)]
import tensorflow.compat.v1 as tf
with tf.Graph().as_default():
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "mesh")
  shape = mtf.Shape([mtf.Dimension("a", 4)])
  x = mtf.import_tf_tensor(mesh, tf.ones([4]), shape)
  shape, layout = mtf.convert_to_shape("all:1"), mtf.convert_to_layout_rules("")
  where = mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, [""])
  total = mtf.reduce_sum(x + x)
  lowering = mtf.Lowering(graph, {mesh: where})
  with tf.Session() as session:
    print(session.run(lowering.export_to_tf_tensor(total)))
"""
  shown = processes.python("-c", _STATE + program)
  assert shown.stdout == "8.0\n", shown.stderr


@pytest.mark.slow
def test_layers_and_pods_keep_the_settings_of_a_program_that_imports_them():
  """Two functions, which docs/projects.md names, are the exception."""
  program = """
import json, tempfile
import palm_mtf
import mesh_tensorflow.transformer.transformer
import tensorflow.compat.v1 as tf

def more_state():
  return (
    state(), tf.logging.get_verbosity(), sys.meta_path[:], tempfile.tempdir,
    "keras" in sys.modules, os.sched_getaffinity(0),
  )

def functions():
  return {
    (name, key): value
    for name, module in list(sys.modules.items())
    if name.startswith(("tensorflow.python.", "mesh_tensorflow"))
    for key, value in vars(module).items()
    if callable(value)
  }

before, known = more_state(), functions()
import palm_mtf.unitransformer, palm_mtf.foreign_models
assert more_state() == before
found = functions()
changed = [name for name in known if found.get(name) is not known[name]]
print(json.dumps(sorted(map(".".join, changed))))
"""
  shown = processes.python("-c", _STATE + program)
  assert shown.returncode == 0, shown.stderr
  page = (ROOT / "docs" / "projects.md").read_text(encoding="utf-8")
  changed = json.loads(shown.stdout)
  assert len(changed) == 2
  for name in changed:
    assert f"`{name}`" in page


# What a process of ours has after each of some steps, as one JSON object. It
# has no folder for temporary files.
_MEASURES = """
import gc, json, sys, tempfile
def refuse(*unused):
  raise FileNotFoundError("No usable temporary directory found")
default, tempfile._get_default_tempdir = tempfile._get_default_tempdir, refuse
runs, found = [], {}
from palm_mtf.machine.process import own_process
own_process()
gc.callbacks.append(lambda phase, info: runs.append(info["generation"]))
import palm_mtf._tf
gc.callbacks.clear()
is_frozen = gc.get_freeze_count() > 100_000
found["garbage"] = runs.count(2), is_frozen, gc.isenabled()
from palm_mtf.machine.host_memory import largest_resident_bytes, resident_bytes
found["resident"] = resident_bytes(), largest_resident_bytes()
tempfile._get_default_tempdir = default
import palm_mtf.training.supervisor
from palm_mtf.runtime.host_functions import HOST_MODULES
for name in HOST_MODULES:
  __import__(name)
found["jax"] = [x for x in sys.modules if x.split(".")[0] in ("jax", "jaxlib")]
from tests._tf_test import run_and_drop
found["sizes"] = []
for _ in range(6):
  run_and_drop(num_bytes=20_000_000)
  gc.collect()
  found["sizes"].append(resident_bytes())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def measured():
  # Without the compiled code that earlier tests left in their cache.
  variables = {"TF_XLA_FLAGS": ""}
  shown = processes.python("-c", _MEASURES, variables=variables)
  # TensorFlow 2.20 logs two lines when XLA compiles, whatever its log level is.
  assert shown.returncode == 0, shown.stderr
  return json.loads(shown.stdout)


def test_the_import_looks_for_garbage_once_and_never_again_in_what_it_made(
  measured,
):
  assert measured["garbage"] == [2, True, True]


def test_tensorflow_is_imported_without_the_pages_that_loading_it_read(
  measured,
):
  now, largest = measured["resident"]
  assert now < 0.75 * largest
  assert largest < 450e6


def test_modules_of_training_and_of_servers_import_no_jax(measured):
  assert measured["jax"] == []


def test_memory_does_not_grow_with_the_graphs_that_were(measured):
  sizes = measured["sizes"]
  assert sizes[-1] - sizes[1] < 20e6


@fused
def doubled(x):
  return x + x


@fused
def squared(x):
  return x * x


def test_functions_of_others_are_called_as_tensorflow_does():
  """A program that uses our layers may have its own graphs and functions."""

  @tf2.function(jit_compile=True)
  def theirs(x):
    return x + 1.0

  @fused
  def ours(x):
    return x + 1.0

  with tf.Graph().as_default() as graph:
    theirs(tf.constant([1.0])), ours(tf.constant([1.0]))
    names = [
      x.get_attr("f").name
      for x in graph.get_operations()
      if x.type in ("PartitionedCall", "StatefulPartitionedCall")
    ]
  their_name, our_name = sorted(names, key=lambda x: "ours" in x)
  assert re.fullmatch(r"__inference_theirs_\d+", their_name)
  assert re.fullmatch(r"__inference_palm_mtf_ours_[0-9a-f]{16}", our_name)


@function
def halved(x):
  return x / 2


def run_and_drop(num_bytes):
  """Returns a weak reference to a graph that was built and run."""
  with tf.Graph().as_default() as graph, tf.Session() as session:
    x = tf.placeholder(tf.float32, [2])
    y = halved(doubled(x))
    _, z = tf.while_loop(
      lambda i, _: i < 2, lambda i, y: (i + 1, squared(y)), [0, y]
    )
    tf.constant(np.zeros([num_bytes], np.int8))
    session.run(z, {x: [1.0, 2.0]})
  return weakref.ref(graph)


def test_a_graph_that_nobody_holds_is_freed_with_what_it_compiled():
  graph = run_and_drop(num_bytes=1)
  gc.collect()
  assert graph() is None


def test_calls_of_our_functions_know_their_shapes_and_others_are_looked_into():
  def twice(x):
    return tf.tile(x, [2, 1])

  with tf.Graph().as_default():
    x = tf.zeros([2, 3])
    calls = [function(twice)(x), fused(twice)(x), tf2.function(twice)(x)]
  assert [each.shape.as_list() for each in calls] == [[4, 3]] * 3
  skipped = "_disable_call_shape_inference"
  found = [skipped in each.op.node_def.attr for each in calls]
  assert found == [True, True, False]


_IN_LITTLE_MEMORY = """
import resource, sys
from palm_mtf.cli.main import main
resource.setrlimit(resource.RLIMIT_AS, (10**9, 10**9))
sys.exit(main(sys.argv[1:]))
"""


def test_too_little_memory_for_tensorflow_is_said_in_one_line():
  run = Path(__file__).parent / "old_run" / "run"
  flags = ["generate", "--model_dir", run, "--prompt", "a"]
  shown = processes.python("-c", _IN_LITTLE_MEMORY, *flags)
  assert (shown.returncode, shown.stdout) == (2, "")
  (line,) = (x for x in shown.stderr.splitlines() if x.startswith("palm_mtf: "))
  assert "cannot be loaded into the 1,000,000,000 bytes of memory" in line
  assert "raise its limit (ulimit -v): libtensorflow" in line
  assert "Traceback" not in shown.stderr
