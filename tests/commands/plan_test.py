# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The command: its table, JSON, picture, and errors in one line."""

import importlib.util
import json
import resource
import subprocess
import sys

import pytest

from palm_mtf.accounting.plan import plan_of
from palm_mtf.machine import cache_folder
from palm_mtf.machine.cache_folder import measured_hardware
from palm_mtf.rates import calibration
from palm_mtf.report.plans import format_compiled
from tests import runs
from tests.planning import palm_540b

PALM = "--gin_file=recipes/palm_540b_two_pods.gin"


def test_a_recipe_is_planned_without_model_dir_or_data(palm_mtf):
  code, out, err = palm_mtf("plan", PALM)
  assert (code, err) == (0, "")
  for text in (
    "540,356,474,880",  # parameters, with norm scales
    "3,277,760,495,616",  # FLOPs per token
    "all_gather over data",
    "between pods",
    "fits: ",
  ):
    assert text in out
  assert "775,946,240,000" in out


def test_json_has_the_same_numbers_in_one_line(palm_mtf):
  code, out, _ = palm_mtf("plan", PALM, "--json")
  (line,) = out.splitlines()
  plan = json.loads(line)
  assert code == 0 and plan["fits"] is True
  assert plan["step_secs"] == pytest.approx(sum(plan["parts"].values()))
  assert f"{plan['mfu']:.1%}" in palm_mtf("plan", PALM)[1]


def test_a_plan_needs_no_tensorflow_and_less_than_a_second():
  """Measures processor time, because a busy machine takes longer."""
  program = (
    "import sys; sys.modules.update(dict.fromkeys(['tensorflow', 'seqio']));"
    "from palm_mtf.cli.main import main; sys.exit(main(sys.argv[1:]))"
  )
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  command = [sys.executable, "-c", program, "plan", PALM]
  assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  assert after.ru_utime - before.ru_utime < 1.0


def test_what_does_not_fit_says_what_would(palm_mtf):
  code, out, _ = palm_mtf("plan", PALM, "--gin.REMAT='none'")
  assert code == 0
  last = out.splitlines()[-1]
  assert last.startswith("does not fit: ") and " this would: REMAT = " in last


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--gin.CHIP='tpu_v44'"], "CHIP = 'tpu_v44' (did you mean \"tpu_v4\"?)"),
    (
      ["--gin.MESH_SHAPE='data:192,model:16'"],
      "batch=256 is not divisible by mesh axis data=192",
    ),
    (
      ["--gin.GLOBAL_BATCH_SIZE=3"],
      "a batch of 3 is not divisible by NUM_PODS",
    ),
    (["--gin.CHIP_WATTS='hot'"], "CHIP_WATTS = 'hot': give a number"),
    (["--devices=4"], "--devices and --output are of a search; add --search."),
    (["--search", "--devices=4"], "--search: none of "),
    (["--steps", "--search"], "--search and --steps: each prints something"),
    (
      [
        *("--steps", "--gin.STAGES=2", "--gin.NUM_MICROBATCHES=16384"),
        "--gin.GLOBAL_BATCH_SIZE=8388608",
      ],
      "--steps: NUM_PODS = 2, STAGES = 2 and NUM_MICROBATCHES = 16384 make "
      "163,840 calls, and at most 100,000 are printed; set lower numbers.",
    ),
    (
      ["--steps", "--calibrate"],
      "--calibrate and --steps: --calibrate plans nothing; give one of them.",
    ),
    (["--search", "--devices=0"], "--devices = 0: give a whole number"),
    (["--serach"], 'unknown flag --serach (did you mean "--search"?)'),
  ],
)
def test_wrong_input_is_one_line(fails, flags, message):
  if "MESH" in flags[0]:
    flags = [*flags, "--gin.TPU=''"]
  assert message in fails("plan", PALM, *flags)


@pytest.mark.parametrize(
  ("flag", "rule"),
  [
    ("NUM_LAYERS=1000000000", "at most 10,000"),
    *(
      (f"{name}=1000000000", "at most 16,777,216")
      for name in (
        *("D_MODEL", "NUM_HEADS", "D_KV", "D_FF", "VOCAB_SIZE"),
        *("SEQUENCE_LENGTH", "GLOBAL_BATCH_SIZE", "NUM_MICROBATCHES"),
      )
    ),
    ("GLOBAL_BATCH_SIZE=[[0, 1000000000000]]", "at most 16,777,216"),
    (
      "GLOBAL_BATCH_SIZE=[[0, 8], [1000000000000, 16]]",
      "at most 1,000,000,000",
    ),
    ("TRAIN_STEPS=1000000000000", "at most 1,000,000,000"),
    ("EVAL_BATCHES=1000000000000", "at most 1,000,000"),
    ("SAMPLE_TOKENS=1000000000000", "at most 16,777,216"),
    ("CHECKPOINT_STEPS=99999999999999999999", "at most 9,223,372,036,854,775"),
    ("SEED=99999999999999999999", "at most 9,223,372,036,854,775"),
    ("MESH_SHAPE='data:999999999,model:9'", "8,999,999,991 devices; give a"),
    ("CHIP_MEMORY_BYTES=1e300", "a number from 0 to 1e+30"),
    ("CHIP_LINK_DIMS=1000000000", "a number from 0 to 6"),
  ],
)
def test_an_absurd_size_is_refused_by_its_macro_and_its_limit(
  flag, rule, fails
):
  line = fails("plan", PALM, f"--gin.{flag}")
  assert line.startswith(flag.partition("=")[0])
  assert rule in line


@pytest.mark.parametrize(
  "flag",
  [
    "NUM_LAYERS=10000",
    "GLOBAL_BATCH_SIZE=16777216",
    "SEQUENCE_LENGTH=16777216",
  ],
)
def test_the_largest_sizes_are_planned(flag, palm_mtf):
  code, out, _ = palm_mtf("plan", PALM, f"--gin.{flag}", "--json")
  assert code == 0 and out


def test_a_search_among_too_many_layouts_is_refused_before_it_begins(fails):
  flags = ["--gin.GLOBAL_BATCH_SIZE=14414400", "--search", "--devices=720720"]
  any_chip = ["--gin.CHIP='h200'", "--gin.TPU=''", "--gin.MESH_SHAPE=''"]
  line = fails("plan", PALM, *flags, *any_chip, "--gin.LAYOUT=''")
  assert line.startswith("--search: up to ")
  assert "at most 100,000 are planned" in line


def test_this_machine_is_measured_once_for_all_plans(
  palm_mtf, fails, tmp_path, monkeypatch
):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  quickstart = "--gin_file=recipes/quickstart.gin"
  assert "palm_mtf plan --calibrate" in fails("plan", quickstart)
  passes = {"blocks": 5e9, "attention": 4e9, "loss": 3e9, "weights": 2e9}
  measured = {
    "CHIP_FLOAT32_FLOPS": 1e11,
    "CHIP_BFLOAT16_FLOPS": 5e10,
    "CHIP_EFFICIENCY": 1.0,
    "CHIP_MEMORY_BYTES": 2**34,
    "CHIP_MEMORY_BANDWIDTH": 2e10,
    "CHIP_PASS_BANDWIDTHS": {"float32": passes, "bfloat16": passes},
    "CHIP_PROCESS_BYTES": 700_000_000,
    "CHIP_FUSED_ATTENTION": True,
    "CHIP_LINK_BANDWIDTH": 1e10,
    "CHIP_DCN_BANDWIDTH": 1e10,
  }
  monkeypatch.setattr(calibration, "calibration", lambda: measured)
  code, out, _ = palm_mtf("plan", "--calibrate")
  assert code == 0 and out.startswith(f"{measured_hardware()}\n")
  code, out, _ = palm_mtf(
    "plan", quickstart, "--json", "--gin.ACTIVATION_DTYPE='float32'"
  )
  plan = json.loads(out)
  # 6 N and attention are 9.6 MFLOP per token, in 16 sequences of 128 tokens.
  # q k^T is computed once more, because attention stores no weights.
  tokens = plan["batch_size"] * 128
  flops = plan["flops_per_token"]
  scores = flops["forward"]["attention/scores"] / 2
  assert plan["parts"]["products"] == pytest.approx(
    tokens * (flops["model"] + scores) / 1e11
  )
  assert plan["mfu"] < 1
  assert plan["device_bytes"]["process"] == 350_000_000  # a process of two pods
  # Rates that an earlier version measured are not read.
  version = cache_folder.CALIBRATION + 1
  monkeypatch.setattr(cache_folder, "CALIBRATION", version)
  assert "another version's; run `palm_mtf plan" in fails("plan", quickstart)


@pytest.mark.slow
def test_the_layout_that_is_found_trains(palm_mtf, corpus, tmp_path):
  """Trains on virtual devices, with the gin file that the search wrote."""
  best, model_dir = tmp_path / "best.gin", tmp_path / "run"
  macros = {"TRAIN_STEPS": 2, "CHECKPOINT_STEPS": 2, "PROMPTS": []}
  _, *flags = runs.arguments("train", corpus, model_dir, **macros)
  # Flags would override the settings of the file, so leave them out.
  flags = [x for x in flags if not x.startswith("--gin.NUM_PODS")]
  small = ["--gin.CHIP_MEMORY_BYTES=1e6", "--gin.CHIP_LINK_BANDWIDTH=1e15"]
  search = ["--search", "--devices=2", f"--output={best}"]
  code, out, err = palm_mtf("plan", *flags, *small, *search)
  assert (code, err) == (0, "")
  assert "d_model_stored" in out.splitlines()[2]  # does not fit otherwise
  code, _, said = palm_mtf("train", *flags, f"--gin_file={best}")
  assert code == 0, said
  assert " palm_mtf: predicted: " in said
  settings = best.read_text().splitlines()[3:]
  kept = (model_dir / "config.gin").read_text().replace('"', "'")
  assert all(f"\n{line}  # " in kept for line in settings)
  assert (model_dir / "checkpoints" / "step_00000002").is_dir()


def test_compiling_needs_a_chip_that_it_knows_and_its_compiler(
  palm_mtf, monkeypatch
):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  quickstart = "--gin_file=recipes/quickstart.gin"
  for given, text in (
    ([quickstart], 'TPU = ""'),
    (
      [quickstart, "--gin.CHIP='a100'"],
      "or CHIP to a GPU whose compiler it has: h100_sxm, h200.",
    ),
    (
      [quickstart, "--gin.CHIP='h100_sxm'"],
      "pip install 'palm_mtf[compile_gpu]'",
    ),
    ([quickstart, "--gin_file=layouts/tpu_v4_8.gin"], 'set CHIP = "tpu_v4".'),
    ([PALM, "--search"], "--search and --compile: each prints something"),
    ([PALM], "pip install 'palm_mtf[compile]'"),
  ):
    code, out, err = palm_mtf("plan", "--compile", *given)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and text in err


def test_what_a_compiler_says_stands_next_to_the_plan():
  plan = plan_of(palm_540b())
  found = {
    "target": "v4-12x16x16",
    "compiler": "libtpu 0.0.52",
    "programs": [{"program": "gradients", "peak_bytes": 2**30, "secs": 7.2}],
    "peak_bytes": 2**30,
    "moved": [
      {
        "kind": "permute",
        "axes": ["data"],
        "groups": 1,
        "group_devices": 2,
        "bytes": 5e9,
      }
    ],
    "secs": {"compute": 13.5, "collectives": 3.25},
    "decoding": {
      "texts": 256,
      "programs": [{"program": "steps", "error": "does not fit: 33 of 32 GiB"}],
    },
  }
  lines = format_compiled(found, plan).splitlines()
  assert lines[0] == "compiled for v4-12x16x16 by libtpu 0.0.52"
  assert lines[1].split() == ["compiled", "planned"]
  by_name = {line[2:36].strip(): line[36:].split() for line in lines[2:]}
  assert by_name["memory, at the peak"][::2] == ["1.000", "GiB"]
  assert by_name["permute over data"][:3] == ["5.0000", "0.0000", "GB"]
  planned = next(x for x in plan["moved"] if x["axes"] == ["model"])
  name = f"{planned['kind']} over model"
  assert by_name[name] == ["0.0000", f"{planned['bytes'] / 1e9:.4f}", "GB"]
  assert by_name["both, one after the other"][0] == "16.7500"
  assert by_name["steps"] == "does not fit: 33 of 32 GiB".split()
  # The compiler of GPUs estimates no cycles.
  of_gpu = {**found, "secs": {"collectives": 3.25}}
  lines = format_compiled(of_gpu, plan).splitlines()
  assert not any("cycles" in x or "both" in x for x in lines)
  assert lines[-3].split()[-3] == "3.2500"


def test_a_step_is_shown_as_nodes_edges_and_calls(palm_mtf):
  code, out, err = palm_mtf("plan", PALM, "--steps")
  assert (code, err) == (0, "")
  lines = [" ".join(x.split()) for x in out.splitlines()]
  assert "gradients[1] pod 1 once reads rows, parameters; writes sums" in lines
  # PaLM's section 4: 2.16 TB of bfloat16 gradients, both ways.
  (edge,) = (x for x in lines if "sum in bfloat16" in x)
  assert float(edge.split()[0]) == pytest.approx(2 * 2 * 540.356, rel=1e-4)
  assert lines[-1] == "gradients[0] gradients[1] update[0] update[1]: 0"


def test_a_pipeline_s_calls_are_in_their_order(palm_mtf):
  staged = [
    *("plan", "--gin_file=recipes/quickstart.gin"),
    *("--steps", "--gin.NUM_PODS=1", "--gin.STAGES=2"),
    "--gin.NUM_MICROBATCHES=4",
  ]
  code, out, _ = palm_mtf(*staged)
  assert code == 0
  assert "forward[0, 0]: 0-2, backward[0, 0]: 0, forward[0, 0]: 3" in out
  frozen = '--gin.FROZEN=["embedding", "layers/[01]/*"]'
  code, out, _ = palm_mtf(*staged, frozen)
  assert code == 0 and "backward[0, 1]" in out and "backward[0, 0]" not in out
  assert "\n  forward[0, 0]: 0-3\n" in out
  code, out, _ = palm_mtf("plan", PALM, "--steps", "--json")
  assert code == 0
  step = json.loads(out)
  assert [x["name"] for x in step["nodes"]][:2] == step["edges"][0]["sources"]
