# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Predicts published numbers of papers, only from published rates of chips.

python -m tools.papers_plan            the table
python -m tools.papers_plan --write    into docs/predictions.md
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from palm_mtf.accounting.communication import dcn_bytes, sent_bytes
from palm_mtf.accounting.flops import train_flops_per_token
from palm_mtf.accounting.memory import cache_bytes_per_token
from palm_mtf.accounting.plan import fits, plan_of, rates_of
from palm_mtf.accounting.step_time import predict_step
from palm_mtf.accounting.table3 import table3
from palm_mtf.architecture.parameters import count_parameters
from palm_mtf.cli import gin_files
from palm_mtf.cli.gin_files import hardware_of
from palm_mtf.config import PlanConfig
from palm_mtf.config.tpu_slice import tpu_slice

PAGE = Path(__file__).resolve().parent.parent / "docs" / "predictions.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


@dataclasses.dataclass(frozen=True)
class Row:
  """A published number, and the predicted one."""

  what: str
  published: float | None
  predicted: float | None
  unit: str = ""
  note: str = ""

  def __str__(self):
    ratio = "-"
    if self.published and self.predicted:
      ratio = f"{self.predicted / self.published - 1:+.1%}"
    numbers = (
      "-" if x is None else f"{x:,.4g} {self.unit}".strip()
      for x in (self.published, self.predicted)
    )
    return "| " + " | ".join([self.what, *numbers, ratio, self.note]) + " |"


def recipe(name: str, **macros: object) -> PlanConfig:
  """Returns the settings of a recipe, overridden by macros."""
  given = [f"{macro}={value!r}" for macro, value in macros.items()]
  return gin_files.load("plan", [f"recipes/{name}.gin"], given).build()[1]


def rows() -> list[Row]:
  """Returns every row of the table."""
  return [*_sizes(), *_palm_540b(), *_table3(), *_pathways()]


def _sizes() -> Iterator[Row]:
  """PaLM Tables 1 and 22, and the cache of multi-query attention."""
  # Billions of parameters, TFLOP per token, FLOPs of the run, KiB.
  published = {
    "8b": (8.63, 0.0550, 4.29e22, 32),
    "62b": (62.50, 0.388, 3.08e23, 64),
    "540b": (540.35, 3.28, 2.56e24, 118),
  }
  for size, (billions, tera_flops, flops, kib) in published.items():
    config = recipe(f"palm_{size}")
    model, run, name = config.model, config.run, f"PaLM {size.upper()}"
    parameters = count_parameters(model) / 1e9
    yield Row(f"{name}: parameters", billions, parameters, "B")
    of_token = train_flops_per_token(model)
    yield Row(f"{name}: FLOPs per token", tera_flops, of_token / 1e12, "T")
    tokens = run.batch_sizes.rows_before(run.train_steps) * 2048
    yield Row(f"{name}: FLOPs of the run", flops, tokens * of_token)
    cache = cache_bytes_per_token(model) / 1024
    note = "published code's shapes"
    yield Row(f"{name}: cache per token", kib, cache, "KiB", note)
  for size in ("8B", "62B"):
    yield Row(f"PaLM {size}: step time", None, None, note="not published")


def _palm_540b() -> Iterator[Row]:
  """PaLM 4: two pods of 3,072 TPU v4."""
  config = recipe("palm_540b_two_pods")
  step = predict_step(config, 2048)
  rates, name = (
    rates_of(config, 2048, step.total),
    "PaLM 540B, 2 x 3,072 TPU v4",
  )
  yield Row(
    f"{name}: fits", 1, float(fits(config, 2048)), note="1 is yes: it trained"
  )
  published_secs = 2048 * 2048 / 238_300
  yield Row(f"{name}: step", published_secs, step.total, "s")
  yield Row(f"{name}: MFU", 46.2, 100 * rates["mfu"], "%")
  yield Row(
    f"{name}: HFU", 57.8, 100 * rates["hfu"], "%", "ours repeats 65%, not 75%"
  )
  hosts = tpu_slice(config.mesh_layout.tpu).num_hosts
  sent = sum(sent_bytes(config.model, config.mesh_layout, config.pods).values())
  gib = sent / hosts / 2**30
  yield Row(f"{name}: sent by a host", 1.3, gib, "GiB", 'printed as "GB"')
  one = predict_step(recipe("palm_540b_two_pods", NUM_PODS=1), 1024).total
  note = "97% of perfect weak scaling; nothing hides the exchange"
  yield Row(f"{name}: work of one pod", 1.95, 2 * one / step.total, "x", note)
  hours = (6144 * 1200 + 3072 * 336) / 1e6
  planned = plan_of(config)["run"]["chip_hours"] / 1e6
  yield Row(
    f"{name}: chip hours of the run",
    hours,
    planned,
    "M",
    "a miss: restarts, evaluations and all else of the run are not planned",
  )


def _table3() -> Iterator[Row]:
  for row in table3(hardware_of):
    mfu = row["mfu"] and 100 * row["mfu"]
    name = f"Table 3, {row['model']}: MFU"
    note = row["note"] if mfu is None else "from the published speed"
    yield Row(name, 100 * row["published_mfu"], mfu, "%", note)


def _pathways() -> Iterator[Row]:
  """Pathways (Barham et al. 2022), Tables 1 and 2 and 5.3, on TPU v3."""
  core = hardware_of("tpu_v3")
  flops = core.chip_bfloat16_flops / core.chip_devices * core.chip_efficiency
  note = "a miss: only products, of an encoder and decoder that is not ours"
  for name, parameters, cores, thousands in (
    ("T5-Base", 270e6, 32, 618),
    ("T5-Large", 770e6, 32, 90.4),
    ("T5-3B", 3e9, 512, 282.8),
    ("T5-11B", 11e9, 512, 84.8),
  ):
    bound = cores * flops / (6 * parameters) / 1e3
    yield Row(f"{name}, {cores} cores", thousands, bound, "K tokens/s", note)
  # GPipe's schedule of S stages and M microbatches computes M of M + S - 1.
  speeds = {(4, 16): 133.7, (8, 32): 132.7, (16, 64): 131.4}
  first = speeds[4, 16] / (16 / (16 + 4 - 1))
  for (stages, parts), speed in speeds.items():
    share = parts / (parts + stages - 1)
    what = f"3B pipeline, S = {stages}, M = {parts}"
    note = "the first row sets the speed" if stages == 4 else "only the bubble"
    yield Row(what, speed, first * share, "K tokens/s", note)
  yield from _islands()


# Pathways, section 5.3, does not print all of its settings. We assume PaLM's
# block, with the width of PaLM 62B and with a width between 62B and 540B, and
# the number of layers that gives the published parameters; the layout of the
# recipe of 62B; recomputed blocks, because activations do not fit otherwise;
# the two batch sizes of PaLM 62B; and PaLM's network, 81 Tbit/s for 1,536
# hosts. In the paper's 128 pairs of hosts for 64B, each host has two chips.
ISLANDS = (
  ("64B", 512, 457, 97.2, {"NUM_LAYERS": 66}),
  (
    *("136B", 1024, 1030, 97),
    {"NUM_LAYERS": 63, "D_MODEL": 12288, "NUM_HEADS": 48, "D_FF": 49152},
  ),
)
_CHIP_NETWORK = 81e12 / 8 / 1536 / 2  # bytes/s


def island(
  cores: int, num_pods: int, batch_size: int, **shape: int
) -> PlanConfig:
  """Returns the settings of a model of ISLANDS on islands of TPU v3 cores."""
  return recipe(
    "palm_62b_two_pods",
    CHIP="tpu_v3",
    CHIP_DCN_BANDWIDTH=_CHIP_NETWORK,
    TPU=f"v3-{cores}",
    MESH_SHAPE=f"data:{cores // 8},model:8",
    NUM_MICROBATCHES=1,
    REMAT="layer",
    NUM_PODS=num_pods,
    DCN_DTYPE="float32",
    GLOBAL_BATCH_SIZE=batch_size,
    **shape,
  )


def _islands() -> Iterator[Row]:
  """Pathways 5.3: two islands of TPU v3 against one of twice the size."""
  for name, cores, gigabytes, percent, shape in ISLANDS:
    what = f"{name}, two islands of {cores:,} cores"
    two = island(cores, 2, 512, **shape)
    sent = dcn_bytes(two.model, two.mesh_layout, two.pods)
    note = f'float32, both ways: {sent / 2**30:,.1f} GiB, PaLM\'s "GB"'
    if not 0.9 < sent / 1e9 / gigabytes < 1.1:
      note = f"a miss: {note}"
    yield Row(f"{what}: sent per step", gigabytes, sent / 1e9, "GB", note)
    for batch_size in (512, 1024):
      two = predict_step(island(cores, 2, batch_size, **shape), batch_size)
      one = predict_step(island(2 * cores, 1, batch_size, **shape), batch_size)
      of_twice = f"{what}: speed of one of {2 * cores:,}"
      note = f"assumed: a batch of {batch_size:,}, and more (below)"
      ratio = 100 * one.total / two.total
      yield Row(of_twice, percent, ratio, "%", note)


def table() -> str:
  """Returns the table in Markdown."""
  head = "| what | published | predicted | off by | |\n|---|---|---|---|---|\n"
  return head + "\n".join(map(str, rows()))


def main() -> int:
  """Prints the table, or writes it into docs/predictions.md."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--write", action="store_true")
  options = parser.parse_args()
  if not options.write:
    print(table())
    return 0
  text = PAGE.read_text(encoding="utf-8")
  before, _, rest = text.partition(BEGIN)
  after = rest.partition(END)[2]
  PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
