# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Traced steps of real runs: bytes, times, and not one bit changed."""

import collections
import itertools
import json
import random

import pytest

from palm_mtf.training.step_trace import (
  Operation,
  Trace,
  Transfer,
  chrome_trace,
  step_figures,
  union_secs,
)
from tests import runs
from tests.cases import slow
from tests.log_lines import without_stamps


def transfer(source, target, ready, arrived, num_bytes=1):
  return Transfer("x", source, target, num_bytes, ready, ready, arrived)


def computing(pod, start, end):
  return Operation(pod, 0, "x", "forward", start, end)


def trace(operations, transfers, num_pods=2):
  return Trace(num_pods, operations, transfers, 20.0)


def test_the_example_of_the_docstring_where_only_the_receiver_hides():
  """One column of the drawing is a second; the sender computes throughout."""
  figures = step_figures(
    trace(
      [computing(1, 0, 9), computing(1, 15, 25), computing(0, 0, 25)],
      [transfer(0, 1, 6, 12), transfer(0, 1, 18, 22)],
    )
  )
  assert figures["traced_hidden_secs"] == (3 + 4) / 2  # mean over the pods
  assert figures["traced_exposed_secs"] == 3 / 2


def test_transfers_at_once_and_devices_at_once_count_once():
  operations = [computing(1, 0, 3), computing(1, 2, 4)]
  transfers = [transfer(0, 1, 1, 6, 10), transfer(2, 1, 2, 7, 20)]
  figures = step_figures(trace(operations, transfers, 3))
  assert (
    figures["traced_hidden_secs"] == figures["traced_exposed_secs"] == 3 / 3
  )
  assert figures["traced_dcn_bytes"] == 30


def test_figures_are_means_over_pods_and_the_rate_is_that_of_a_pod():
  figures = step_figures(
    trace(
      [computing(1, 0, 4)],
      [transfer(0, 1, 0, 4, 10**9), transfer(1, 0, 4, 8, 10**9)],
    )
  )
  assert figures == {
    "traced_step_secs": 20.0,
    "traced_dcn_bytes": 2 * 10**9,
    "traced_hidden_secs": 2.0,
    "traced_exposed_secs": 2.0,
    "traced_gbits_per_sec": pytest.approx(2.0),
  }

  figures = step_figures(trace([], [transfer(0, 1, 3, 3, 8)]))
  assert figures["traced_dcn_bytes"] == 8
  assert figures["traced_hidden_secs"] == figures["traced_exposed_secs"] == 0
  assert "traced_gbits_per_sec" not in figures, "it took no time"


def cells(intervals):
  return {i for start, end in intervals for i in range(start, end)}


def test_a_union_is_as_long_as_that_of_sets():
  rng = random.Random(0)
  for _ in range(50):
    some = [(a, a + rng.randrange(8)) for a in rng.choices(range(60), k=12)]
    assert union_secs(some) == len(cells(some))


# Weights make the weight of a step a tensor: TensorFlow folds a constant one.
# All runs have two rows in a microbatch: code for these is compiled once.
PODS = {
  "NUM_PODS": 2,
  "PACKING": "packed",
  "DCN_DTYPE": "bfloat16",
  "TRAIN_STEPS": 4,
  "LOG_STEPS": 4,
  "EVAL_STEPS": 4,
  "PROMPTS": [],
}
TRACED = {**PODS, "TRACE_STEPS": [2, 4]}
ONE_POD = {**PODS, "NUM_PODS": 1, "TRAIN_STEPS": 2, "TRACE_STEPS": [2]}
ONE_POD["GLOBAL_BATCH_SIZE"] = 2


@pytest.fixture(scope="module")
def in_process(corpus, tmp_path_factory):
  model_dir = tmp_path_factory.mktemp("in_process")
  assert runs.run("train", corpus, model_dir, **TRACED) == 0
  return model_dir


def train_in_servers(corpus, model_dir, **macros):
  """Returns the folder of a run with two microbatches a step."""
  settings = {**TRACED, "NUM_MICROBATCHES": 2, "GLOBAL_BATCH_SIZE": 8}
  settings |= macros
  process = runs.start(
    "train", corpus, model_dir, PODS="local_servers", **settings
  )
  (model_dir / "stderr").write_text(runs.finish(process))
  return model_dir


@pytest.fixture(scope="module")
def in_servers(corpus, in_process, tmp_path_factory):
  """A run of which TensorFlow recorded whole steps; see training/step_trace.py.

  On a busy machine a server may begin to record too late: that run is repeated.
  """
  for _ in range(4):
    model_dir = train_in_servers(corpus, tmp_path_factory.mktemp("in_servers"))
    if all(
      line.get("traced_dcn_bytes", line["dcn_bytes"]) >= line["dcn_bytes"]
      for line in runs.read_metrics(model_dir)
    ):
      return model_dir
  pytest.skip("servers on this busy machine began to record too late")


def read(model_dir, step):
  path = model_dir / "traces" / f"step_{step:08d}.json"
  return json.loads(path.read_text())


def lanes(written):
  """Returns the events of each lane, by its name."""
  names = {
    x["pid"]: x["args"]["name"]
    for x in written["traceEvents"]
    if x["name"] == "process_name"
  }
  found = {name: [] for name in names.values()}
  for x in written["traceEvents"]:
    if x["ph"] == "X":
      found[names[x["pid"]]].append(x)
  return found


@pytest.mark.slow
def test_a_traced_run_ends_with_the_bits_of_one_that_is_not(
  corpus, in_process, tmp_path
):
  assert runs.run("train", corpus, tmp_path, **PODS) == 0
  runs.assert_same_tensors(in_process, tmp_path, 4)
  assert not (tmp_path / "traces").exists()


@pytest.mark.parametrize("where", ["in_process", slow("in_servers")])
def test_gradients_cross_by_name_with_the_bytes_of_the_closed_form(
  where, request
):
  model_dir = request.getfixturevalue(where)
  (line,) = (x for x in runs.read_metrics(model_dir) if x["step"] == 2)
  assert line["traced_dcn_bytes"] == line["dcn_bytes"] > 0
  of_lanes = lanes(read(model_dir, 2))
  for way in ("pod 0 -> pod 1", "pod 1 -> pod 0"):
    sent = sum(x["args"]["bytes"] for x in of_lanes[way])
    assert sent == line["dcn_bytes"] / 2
    assert {x["name"] for x in of_lanes[way]} >= {
      "embedding",
      "final_norm/scale",
      "layer_000/attention/q",
      "layer_000/mlp/wo",
    }


@pytest.mark.slow
def test_transfers_between_servers_take_time_and_come_after_their_cause(
  in_servers,
):
  figures = read(in_servers, 2)["otherData"]["figures"]
  of_lanes = lanes(read(in_servers, 2))
  crossed = [*of_lanes["pod 0 -> pod 1"], *of_lanes["pod 1 -> pod 0"]]
  assert all(x["dur"] > 0 for x in crossed)
  assert all(0 <= x["args"]["usecs until sent"] < x["dur"] for x in crossed)
  spent = figures["traced_hidden_secs"] + figures["traced_exposed_secs"]
  assert 0 < spent < figures["traced_step_secs"]
  rate = figures["traced_dcn_bytes"] * 8e-9 / (2 * spent)
  assert figures["traced_gbits_per_sec"] == pytest.approx(rate)


@pytest.mark.slow
def test_each_pod_s_phases_come_in_their_order(in_servers):
  written = read(in_servers, 4)
  for pod in ("pod 0", "pod 1"):
    starts = collections.defaultdict(list)
    for event in lanes(written)[pod]:
      starts[event["cat"]].append(event["ts"])
    assert max(starts["forward"]) < max(starts["backward"])
    assert max(starts["backward"]) < max(starts["update"])
    assert max(starts["exchange"]) < max(starts["update"])
    # No pod sends a gradient before the last of two microbatches.
    first_sent = min(starts["exchange"])
    before = [x for x in starts["forward"] if x < first_sent]
    assert len(before) > len(starts["forward"]) / 2


@pytest.mark.slow
def test_a_line_is_said_of_each_step(in_servers):
  for step in (2, 4):
    path = in_servers / "traces" / f"step_{step:08d}.json"
    said = without_stamps((in_servers / "stderr").read_text()).splitlines()
    start = f"palm_mtf: step {step} took "
    (line,) = (x for x in said if x.startswith(start))
    assert line.endswith(f": {path}") and "hidden" in line


def test_a_traced_step_has_a_line_of_metrics_and_is_not_in_the_means(
  in_process,
):
  """Of four steps only the third is timed: the first compiles."""
  lines = {x["step"]: x for x in runs.read_metrics(in_process)}
  assert set(lines) == {2, 4}
  assert "tokens_per_sec" not in lines[2], "nothing was timed until then"
  assert lines[4]["tokens_per_sec"] > 0
  assert lines[4]["traced_hidden_secs"] == 0, "memory is handed over"


@pytest.mark.slow
def test_one_pod_has_a_trace_without_transfers_and_resumes_without_another(
  corpus, tmp_path, capsys
):
  assert runs.run("train", corpus, tmp_path, **ONE_POD) == 0
  assert set(lanes(read(tmp_path, 2))) == {"pod 0"}
  before = runs.read_files(tmp_path / "traces")
  capsys.readouterr()
  settings = {**ONE_POD, "TRAIN_STEPS": 3}
  assert runs.run("train", corpus, tmp_path, **settings) == 0
  assert runs.read_files(tmp_path / "traces") == before
  assert " took " not in capsys.readouterr().err


TRACE = Trace(
  num_pods=2,
  operations=[
    Operation(0, 0, "a", "forward", 0.000, 0.005),
    Operation(0, 1, "b", "backward", 0.001, 0.002),
    Operation(0, 1, "c", "update", 0.002, 0.006),
    Operation(0, 0, "too short", "forward", 0.001, 0.0010009),
    Operation(1, 0, "d", "exchange", 0.003, 0.004),
  ],
  transfers=[
    Transfer("embedding", 0, 1, 4096, 0.001, 0.002, 0.005),
    Transfer("norm", 0, 1, 64, 0.002, 0.002, 0.003),
  ],
  end=0.006,
)


@pytest.fixture(scope="module")
def written():
  return json.loads(json.dumps(chrome_trace(TRACE, 20)))


def events(written, name):
  (pid,) = (
    x["pid"]
    for x in written["traceEvents"]
    if x["name"] == "process_name" and x["args"]["name"] == name
  )
  return [
    x for x in written["traceEvents"] if x["ph"] == "X" and x["pid"] == pid
  ]


def test_what_runs_at_once_has_rows_of_its_own(written):
  rows = collections.defaultdict(list)
  for x in written["traceEvents"]:
    if x["ph"] == "X":
      rows[x["pid"], x["tid"]].append((x["ts"], x["ts"] + x["dur"]))
  for spans in rows.values():
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
  assert [x["tid"] for x in events(written, "pod 0")] == [0, 1, 1]


def test_a_transfer_lasts_from_ready_to_arrived_and_has_its_bytes(written):
  first, _ = events(written, "pod 0 -> pod 1")
  assert (first["name"], first["ts"], first["dur"]) == ("embedding", 1e3, 4e3)
  assert first["args"] == {"bytes": 4096, "usecs until sent": 1e3}


def test_the_numbers_of_the_step_stand_beside_the_events(written):
  other = written["otherData"]
  assert (other["step"], other["num_pods"]) == (20, 2)
  assert other["figures"]["traced_dcn_bytes"] == 4160
  assert other["figures"]["traced_hidden_secs"] == pytest.approx(1e-3 / 2)
  assert other["figures"]["traced_exposed_secs"] == pytest.approx(3e-3 / 2)


@pytest.mark.slow
def test_the_trace_of_stages_on_accelerators_names_passes_and_stages(
  corpus, tmp_path, monkeypatch
):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  settings = {
    **ONE_POD,
    "TPU": "v4-8",
    "MESH_SHAPE": "data:4",
    "LAYOUT": "batch:data",
    "NUM_LAYERS": 2,
    "STAGES": 2,
    "NUM_MICROBATCHES": 2,
    "GLOBAL_BATCH_SIZE": 8,
  }
  assert runs.run("train", corpus, tmp_path, **settings) == 0
  calls = collections.Counter(
    (event["cat"], event["name"].rpartition("/")[0])
    for event in read(tmp_path, 2)["traceEvents"]
    if event.get("name", "").rpartition("/")[2].startswith("PyFunc")
  )
  passes = {x: n for x, n in calls.items() if x[0] != "update"}
  assert passes == {
    ("forward", "forward/pod_0/stage_0"): 2,
    ("forward", "forward/pod_0/stage_1"): 2,
    ("head", "head/pod_0/stage_0"): 2,
    ("backward", "backward/pod_0/stage_1"): 2,
    ("backward", "backward/pod_0/stage_0"): 2,
  }
