# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The CPU, its cores, accelerators, and what chooses TensorFlow's kernels.

The same program gives the same bits only with the same kernels, which depend on
versions, hardware and environment variables. Checkpoints record all of these.
"""

import ctypes
import ctypes.util
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from palm_mtf import __version__

CPUINFO = Path("/proc/cpuinfo")

# Flags of CPUs that multiply bfloat16 and sum in float32; "bf16" is Arm's. With
# one of these flags, ACTIVATION_DTYPE = "auto" is bfloat16.
BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
# Flags of CPUs that multiply int8, for int8 weights, and sum in 32 bits.
INT8_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "i8mm"})

# Flags of CPUs with AMX, whose registers are matrices, called tiles.
AMX_FLAGS = frozenset({"amx_tile", "amx_bf16", "amx_int8"})

# Flags of CPUs with 256-bit registers, which our operations in C++ use.
AVX2_FLAGS = frozenset({"avx2"})

_VECTORS = re.compile("avx|amx|fma|f16c|asimd|sve|sme|bf16|i8mm")

# This environment variable limits oneDNN, whose kernels multiply matrices, to
# the instructions of an older CPU. _LIMITS says which of the flags above each
# limit leaves; limits that are not listed leave all flags.
_LIMIT = "ONEDNN_MAX_CPU_ISA"
_LIMITS = {
  "SSE41": frozenset(),
  "AVX": frozenset(),
  "AVX2": AVX2_FLAGS,
  "AVX2_VNNI": AVX2_FLAGS | {"avx_vnni"},
  "AVX2_VNNI_2": AVX2_FLAGS | {"avx_vnni"},
  "AVX512_CORE": AVX2_FLAGS,
  "AVX512_CORE_VNNI": AVX2_FLAGS | {"avx512_vnni"},
  "AVX512_CORE_BF16": AVX2_FLAGS | {"avx512_vnni", "avx512_bf16"},
  "AVX512_CORE_FP16": AVX2_FLAGS | {"avx512_vnni", "avx512_bf16"},
}
_LIMITED = BFLOAT16_FLAGS | INT8_FLAGS | AVX2_FLAGS | AMX_FLAGS

# Linux's number of the system call arch_prctl on x86-64; the request for a part
# of a CPU's state; and the number of the part that has the tiles.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def cpu_flags() -> frozenset[str]:
  """Returns the CPU's flags that this process may use.

  The flags that ONEDNN_MAX_CPU_ISA excludes are left out, and those of AMX if
  Linux gives this process no tiles.
  """
  flags = frozenset(_entry("flags|Features").split())
  limit = os.environ.get(_LIMIT, "").upper()
  if limit in _LIMITS:
    flags -= _LIMITED - _LIMITS[limit]
  if flags & AMX_FLAGS and not may_use_tiles():
    flags -= AMX_FLAGS
  return flags


@functools.cache
def may_use_tiles() -> bool:
  """Asks Linux for tiles, for all threads; returns whether it gives them.

  Without the request, the first instruction of AMX would end the process. Linux
  before 5.16 and some sandboxes refuse. Forked child processes keep the tiles.
  """
  call = ctypes.CDLL(None).syscall
  return call(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def describe_amx() -> str:
  """Returns whether this process uses AMX, or why not; "" without AMX."""
  if not AMX_FLAGS <= frozenset(_entry("flags").split()):
    return ""
  if AMX_FLAGS <= cpu_flags():
    return "used by products in bfloat16 and int8"
  limit = os.environ.get(_LIMIT, "")
  if limit.upper() in _LIMITS:
    return f"not used, because of {_LIMIT}={limit}"
  return "not used: Linux gives no tiles (before 5.16, or in a sandbox)"


def kernel_flags() -> list[str]:
  """Returns the CPU flags that decide which compiled code runs, sorted.

  The flags are vector instructions of x86-64 and Arm, and ONEDNN_MAX_CPU_ISA.
  Code for different flags may round results differently.
  """
  limit = os.environ.get(_LIMIT)
  limits = [f"{_LIMIT}={limit.upper()}"] if limit else []
  return limits + sorted(filter(_VECTORS.match, cpu_flags()))


def cpu_name() -> str:
  """Returns the CPU's model name; "this CPU" if the name is unknown."""
  return _entry("model name") or "this CPU"


def bfloat16_flags() -> list[str]:
  """Returns the CPU's flags for native bfloat16 products, sorted."""
  return sorted(cpu_flags() & BFLOAT16_FLAGS)


def _entry(names: str) -> str:
  """Returns the field of CPUINFO with a name in `names` ("a|b"), or ""."""
  text = _read_once(CPUINFO)
  match = re.search(rf"^(?:{names})[ \t]*:[ \t]*(.*)$", text, re.MULTILINE)
  return match[1].strip() if match else ""


@functools.cache  # each product of a graph asks for flags
def _read_once(path: Path) -> str:
  return read_or_empty(path)


# Files with the CPU quota of a container: CPU_MAX for control groups version 2,
# CPU_QUOTA and CPU_PERIOD for version 1.
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
CPU_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def visible_cores() -> list[int]:
  """Returns the indices of the cores that this process may run on."""
  return sorted(os.sched_getaffinity(0))


def core_quota() -> float | None:
  """Returns a container's CPU quota in cores; None if there is no limit."""
  texts = read_or_empty(CPU_MAX).split() or [
    read_or_empty(path).strip() for path in (CPU_QUOTA, CPU_PERIOD)
  ]
  # Without a limit, the quota is "max" (version 2 of control groups) or -1
  # (version 1), or the files are missing.
  if not all(map(str.isdigit, texts)):
    return None
  quota, period = map(int, texts)
  return quota / period  # both in microseconds


def usable_cores() -> int:
  """Returns the number of visible cores, but at most the container's quota."""
  quota, visible = core_quota(), len(visible_cores())
  return visible if quota is None else max(1, min(visible, int(quota)))


def thread_count(environment: Mapping[str, str]) -> int:
  """Returns the threads per matrix product of a process with `environment`."""
  asked = [environment.get(name, "") for name in THREAD_VARIABLES]
  return max([len(visible_cores()), *(int(x) for x in asked if x.isdigit())])


THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


def read_or_empty(path: str | Path) -> str:
  """Returns the text of a system file; "" if it cannot be read."""
  try:
    return Path(path).read_text(encoding="utf-8", errors="replace")
  except OSError:
    return ""


# Number of this device attribute in cuda.h, the header of the CUDA driver.
_COMPUTE_CAPABILITY_MAJOR = 75
# First major compute capability with bfloat16 products, that of the A100.
_BFLOAT16_CAPABILITY = 8


def gpu_capabilities() -> list[int]:
  """Returns the major compute capability of every GPU that TensorFlow uses."""
  try:
    cuda = ctypes.CDLL("libcuda.so.1")
  except OSError:
    return []  # no driver
  if not _has_cudnn():  # without cuDNN TensorFlow computes on the CPU
    return []
  count, value = ctypes.c_int(), ctypes.c_int()
  if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
    return []
  found = []
  for device in range(count.value):
    cuda.cuDeviceGetAttribute(
      ctypes.byref(value), _COMPUTE_CAPABILITY_MAJOR, device
    )
    found.append(value.value)
  return found


def gpus_multiply_bfloat16() -> bool:
  """Returns whether there are GPUs and all multiply bfloat16 natively."""
  return min(gpu_capabilities(), default=0) >= _BFLOAT16_CAPABILITY


def _has_cudnn() -> bool:
  try:
    if importlib.util.find_spec("nvidia.cudnn"):
      return True
  except ModuleNotFoundError:  # there is no package `nvidia`
    pass
  return ctypes.util.find_library("cudnn") is not None


# Folders of the package whose code may change a training step's results.
_SOURCES = ("ops", "native", "mesh", "model", "optim", "programs")
_INSTRUCTIONS = "CPU instructions"
_OPERATIONS = "operations in C++"
_NONE = "none"
# Environment variables that choose the code of operations, besides
# ONEDNN_MAX_CPU_ISA, which `kernel_flags` includes.
_VARIABLES = (
  "DNNL_MAX_CPU_ISA",
  "TF_ENABLE_ONEDNN_OPTS",
  "NVIDIA_TF32_OVERRIDE",
  "XLA_FLAGS",
)


def kernels_here(operations: str) -> dict[str, str]:
  """Returns {name: value} of all that decides how this process rounds results.

  `operations` names the compiler of our C++ operations and its options; "none"
  if this process has no C++ operations.
  """
  return {
    "palm_mtf": f"{__version__} ({_fingerprint()})",
    "tensorflow": importlib.metadata.version("tensorflow"),
    "mesh-tensorflow": importlib.metadata.version("mesh-tensorflow"),
    "CPU": cpu_name(),
    _INSTRUCTIONS: " ".join(kernel_flags()),
    "GPUs": " ".join(map(str, gpu_capabilities())) or _NONE,
    _OPERATIONS: operations,
    **{x: os.environ.get(x, "") for x in _VARIABLES},
  }


@functools.cache
def _fingerprint() -> str:
  """Returns a hash of the sources on which a training step's results depend."""
  package = Path(__file__).parent.parent
  digest = hashlib.sha256()
  for folder in _SOURCES:
    for path in sorted((package / folder).rglob("*.*")):
      if path.suffix in (".py", ".h", ".cc"):
        digest.update(f"{path.relative_to(package)}\n".encode())
        digest.update(path.read_bytes())
  return digest.hexdigest()[:8]


def kernels_of(servers: Sequence[Mapping[str, str]]) -> dict[str, str]:
  """Merges the results of `kernels_here` from all servers of a run into one."""
  found = {}
  for name in servers[0]:
    values = dict.fromkeys(x.get(name, "") for x in servers)
    found[name] = " and ".join(values)
  # If one server lacks the operations in C++, no server uses them.
  if any(x.get(_OPERATIONS) == _NONE for x in servers):
    found[_OPERATIONS] = _NONE
  return found


def difference(now: Mapping[str, str], before: Mapping[str, str]) -> str:
  """Returns the differences between two results of `kernels_here`; "" if none.

  Names that only one result has are left out.
  """
  changes = []
  for name in now:
    new, old = now[name], before.get(name, now[name])
    if name == _INSTRUCTIONS and new != old:
      changes.append(f"{name}: {describe_flags(new.split(), old.split())}")
    elif new != old:
      changes.append(f"{name}: {new or 'not set'}, before {old or 'not set'}")
  return "; ".join(changes)


def describe_flags(flags: Iterable[str], others: Iterable[str]) -> str:
  """Returns how CPU flags differ from `others`: "with avx2, without bf16"."""
  added = [f"with {x}" for x in sorted({*flags} - {*others})]
  return ", ".join(
    added + [f"without {x}" for x in sorted({*others} - {*flags})]
  )


def has_tpus() -> bool:
  """Returns whether this machine has TPUs and JAX's library for them."""
  if importlib.util.find_spec("libtpu") is None:
    return False
  return bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))


def has_gpus() -> bool:
  """Returns whether this machine has NVIDIA GPUs and JAX's plugin for them."""
  has_jax = importlib.util.find_spec("jax_cuda12_plugin") is not None
  return has_jax and bool(glob.glob("/dev/nvidia[0-9]*"))


def is_rehearsal() -> bool:
  """Returns whether JAX's virtual CPU devices replace the accelerators."""
  return os.environ.get("JAX_PLATFORMS") == "cpu"
