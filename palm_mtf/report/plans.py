# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Shows plans and searches as text."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_GIB, _GB = 2**30, 1e9
_DAY = 86_400


def format_plan(plan: Mapping[str, Any]) -> str:
  """Returns a plan, from `plan_of` in accounting/plan.py, as a table."""
  parameters = plan["parameters"]
  parameters = parameters | {"total": sum(parameters.values())}
  if any(
    x.startswith("mlp/experts") for x in plan["flops_per_token"]["forward"]
  ):
    parameters["of a token, without norms"] = plan["active_parameters"]
  cache = f"{plan['cache_bytes_per_token'] / 1024:>18.1f} KiB"
  sections = (
    ("parameters", [(k, f"{count:>22,}") for k, count in parameters.items()]),
    ("FLOPs per token", _list_flops(plan["flops_per_token"])),
    ("memory per device", _list_memory(plan)),
    ("decoding", [("keys and values per token", cache)]),
    ("moved per device and step", _list_moved(plan)),
    (f"step of {plan['batch_size']:,} sequences", _list_step(plan)),
    ("run, without evaluations", _list_run(plan["run"])),
  )
  lines = []
  for title, rows in sections:
    lines += [title, *(f"  {name:<34}{text}".rstrip() for name, text in rows)]
  lines.append(format_verdict(plan))
  return "\n".join(lines)


def format_verdict(plan: Mapping[str, Any]) -> str:
  """Returns a line that says whether a step fits into a device's memory.

  If the step does not fit, the line also gives settings with which a step fits.
  """
  needed = sum(plan["device_bytes"].values()) / _GIB
  has = plan["memory_bytes"] / _GIB
  if plan["fits"]:
    return f"fits: {needed:.2f} of {has:.2f} GiB per device"
  line = f"does not fit: {needed:.2f} of {has:.2f} GiB per device; "
  if not plan["nearest"]:
    return line + (
      "neither REMAT, microbatches nor storing weights split would do: use "
      "more devices, or a LAYOUT that splits more"
    )
  changes = [f"{name} = {value!r}" for name, value in plan["nearest"].items()]
  return line + "this would: " + ", ".join(changes)


def format_compiled(
  compiled: Mapping[str, Any], plan: Mapping[str, Any]
) -> str:
  """Returns a table of a step's costs: as compiled, and as planned.

  `compiled` is the record from `compile_run` in compilation/run.py, and `plan`
  the plan of the same step, from `plan_of` in accounting/plan.py.
  """
  lines = [
    f"compiled for {compiled['target']} by {compiled['compiler']}",
    f"{'':<36}{'compiled':>10}{'planned':>14}",
  ]
  for each in compiled["programs"]:
    lines.append(f"  {each['program']}, compiled in {each['secs']:.0f} s")
    lines += [
      f"    {name.removesuffix('_bytes'):<32}{num_bytes / _GIB:>10.3f} GiB"
      for name, num_bytes in each.items()
      if name.endswith("_bytes") and name != "peak_bytes"
    ]
  planned = sum(plan["device_bytes"].values())
  lines.append(
    f"  {'memory, at the peak':<34}{compiled['peak_bytes'] / _GIB:>10.3f}"
    f"{planned / _GIB:>14.3f} GiB"
  )
  lines += _list_compiled_moves(compiled, plan)
  collectives, exchange = (
    plan["parts"][x] for x in ("collectives", "exchange")
  )
  in_pod = plan["step_secs"] - exchange
  secs = compiled["secs"]
  rows = [("collectives, at the links' rate", secs["collectives"], collectives)]
  if "compute" in secs:
    cycles = "compute, by the compiler's cycles"
    rows.insert(0, (cycles, secs["compute"], in_pod - collectives))
    rows.append(("both, one after the other", sum(secs.values()), in_pod))
  for name, found, expected in rows:
    lines.append(f"  {name:<34}{found:>10.4f}{expected:>14.4f} s")
  lines += _list_decoding(compiled["decoding"])
  return "\n".join(lines)


def _list_decoding(decoding: Mapping[str, Any]) -> Iterator[str]:
  yield f"decoding {decoding['texts']:,} texts of SEQUENCE_LENGTH tokens"
  for each in decoding["programs"]:
    found = each.get("error") or (
      f"{each['peak_bytes'] / _GIB:.3f} GiB, compiled in {each['secs']:.0f} s"
    )
    yield f"  {each['program']:<34}{found:>10}"


def _list_compiled_moves(
  compiled: Mapping[str, Any], plan: Mapping[str, Any]
) -> Iterator[str]:
  """Yields GB compiled and planned per kind and axes of collectives, sorted."""
  found, planned = (
    {(x["kind"], *x["axes"]): x for x in moved if x.get("link") != "dcn"}
    for moved in (compiled["moved"], plan["moved"])
  )
  rows = []
  for key in {**planned, **found}:
    sizes = [x[key]["bytes"] if key in x else 0 for x in (found, planned)]
    kind, *axes = key
    name = f"{kind} over {'+'.join(axes) or 'other devices'}"
    line = f"  {name:<34}{sizes[0] / _GB:>10.4f}{sizes[1] / _GB:>14.4f} GB"
    if key in found:
      line += f"  in groups of {found[key]['group_devices']:,}"
    rows.append((max(sizes), line))
  for _, line in sorted(rows, key=lambda x: -x[0]):
    yield line


def format_step(step: Mapping[str, Any]) -> str:
  """Returns a step, from `describe_step` in accounting/plan.py, as a table."""
  lines = ["nodes"]
  for x in step["nodes"]:
    where = f"pod {x['pod']}"
    if x["stage"] is not None:
      where += f", stage {x['stage']}"
    uses = (
      f"{use} {', '.join(x[use])}" for use in ("reads", "writes") if x[use]
    )
    times = f"{x['repeats']:,} times" if x["repeats"] > 1 else "once"
    if x["every"] > 1:
      times = f"1 in {x['every']:,}"
    lines.append(f"  {x['name']:<16}{where:<17}{times:<11}{'; '.join(uses)}")
  if step["edges"]:
    lines.append("edges, GB in a step")
  for x in step["edges"]:
    if x["kind"] == "AllSum":
      of, to = ", ".join(x["sources"]), ", ".join(x["targets"])
      name = f"sum in {x['dtype']} of {of}, to {to}"
      if x["every"] > 1:
        name += f", in 1 of {x['every']:,} steps: a fragment"
    else:
      name = f"send {x['source']} to {x['target']}"
    lines.append(f"  {x['bytes'] / _GB:<12.6g}{name}")
  streams = [f"  {_list_calls(x)}" for x in step["streams"] if x]
  if streams:
    lines += ["calls of each stage, which run at the same time", *streams]
  return "\n".join([*lines, "last call", f"  {_list_calls([step['last']])}"])


def _list_calls(calls: Sequence[Mapping[str, Any]]) -> str:
  """Returns calls in order, such as "forward[0, 0]: 0-3, backward[0, 0]: 0"."""
  runs: list[tuple[str, list[int]]] = []
  for call in calls:
    name = " ".join(call["nodes"])
    if not runs or runs[-1][0] != name:
      runs.append((name, []))
    runs[-1][1].append(call["microbatch"])
  return ", ".join(
    f"{name}: {'-'.join(map(str, dict.fromkeys((of[0], of[-1]))))}"
    for name, of in runs
  )


def format_prediction(plan: Mapping[str, Any]) -> str:
  """Returns the predicted time, speed and memory of a step in one line."""
  needed = sum(plan["device_bytes"].values()) / _GIB
  return (
    f"predicted: {plan['step_secs']:.3g} s per step, "
    f"{plan['tokens_per_sec']:,.0f} tokens/s, MFU {plan['mfu']:.1%}, "
    f"{format_duration(plan['run']['secs'])} in all, "
    f"{needed:.2f} GiB per device"
  )


def format_duration(secs: float) -> str:
  """Returns a time in the largest unit in which it is at least 2."""
  for unit, size in (("days", _DAY), ("hours", 3600), ("minutes", 60)):
    if secs >= 2 * size:
      return f"{secs / size:.1f} {unit}"
  return f"{secs:.1f} seconds"


def _list_flops(flops: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  for term, of_training in flops["training"].items():
    again = flops["recomputed"].get(term, 0)
    repeated = f"  recomputed {again:.4g}" if again else ""
    yield term, f"{of_training:>22,}{repeated}"
  repeated = sum(flops["recomputed"].values())
  yield "model", f"{flops['model']:>22,}"
  yield "hardware", f"{flops['model'] + repeated:>22,}"


def _list_memory(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  for name, num_bytes in plan["device_bytes"].items():
    yield name, f"{num_bytes / _GIB:>18.3f} GiB"
  if len(plan["stage_bytes"]) > 1:  # the bytes above are the largest stage's
    for stage, num_bytes in enumerate(plan["stage_bytes"]):
      yield f"stage {stage}, in all", f"{num_bytes / _GIB:>18.3f} GiB"


def _list_moved(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  if not plan["moved"]:
    yield "nothing", ""
  for each in sorted(plan["moved"], key=lambda x: -x["bytes"]):
    name = f"{each['kind']} over {'+'.join(each['axes'])}"
    where = "in the pod" if each["link"] == "pod" else "between pods"
    moved = f"{each['bytes'] / _GB:>19.4f} GB"
    yield name, f"{moved}  {each['secs']:>9.4f} s  {where}"


def _list_step(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  notes = {"exchange": f"and {plan['hidden_exchange_secs']:.4f} s hidden"}
  has_pods = any(x["link"] == "dcn" for x in plan["moved"])
  for name, secs in plan["parts"].items():
    if name != "exchange" or has_pods:
      yield name, f"{secs:>20.4f} s  {notes.get(name, '')}"
  yield "total", f"{plan['step_secs']:>20.4f} s"
  yield "tokens/s", f"{plan['tokens_per_sec']:>20,.0f}"
  yield "MFU", f"{plan['mfu']:>21.1%}"
  yield "HFU", f"{plan['hfu']:>21.1%}"


def _list_run(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  yield "steps", f"{run['steps']:>22,}"
  yield "tokens", f"{run['tokens']:>22,}"
  yield "time", f"{format_duration(run['secs']):>22}"
  yield "chip hours", f"{run['chip_hours']:>22,.1f}"
  if run["kwh"] is not None:
    yield "energy", f"{run['kwh']:>18,.1f} kWh"
  if run["cost"] is not None:
    yield "cost", f"{run['cost']:>22,.2f}"
  if "goodput" in run:
    yield "goodput, if chips fail", f"{run['goodput']:>22.1%}"
    if run["goodput"] != run["goodput_of_learners"]:
      yield "  if pods were learners", f"{run['goodput_of_learners']:>22.1%}"


def format_search(
  records: Sequence[Mapping[str, Any]], num_devices: int, summary: str
) -> str:
  """Returns a table of layouts, followed by the line `summary`.

  `records` has predictions and settings of each layout, the fastest first.
  `num_devices` counts the devices of all pods.
  """
  lines = [
    f"layouts of {num_devices:,} devices, fastest first",
    f"{'s/step':>9}{'tokens/s':>12}{'MFU':>7}{'GiB':>7}  pods  microbatches  "
    f"{'REMAT':<9}  MESH_SHAPE and LAYOUT",
  ]
  for each in records:
    settings = each["settings"]
    lines += [
      f"{each['step_secs']:>9.4g}{each['tokens_per_sec']:>12,.0f}"
      f"{each['mfu']:>7.1%}{each['device_bytes'] / 2**30:>7.2f}  "
      f"{settings['NUM_PODS']:>4}  {settings['NUM_MICROBATCHES']:>12}  "
      f"{settings['REMAT']:<9}  {settings['MESH_SHAPE'] or '(one device)'}  "
      f"{_shorten_layout(settings['LAYOUT'])}",
      f"{'':>9}{each['reason']}",
    ]
  return "\n".join([*lines, summary])


def _shorten_layout(layout: str) -> str:
  """Shortens LAYOUT for a table, as in "data(batch) model(heads d_ff)"."""
  by_axis: dict[str, list[str]] = {}
  for rule in filter(None, layout.split(",")):
    dim, axis = rule.split(":")
    by_axis.setdefault(axis, []).append(dim)
  return " ".join(f"{axis}({' '.join(x)})" for axis, x in by_axis.items())
