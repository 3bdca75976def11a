# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Descriptions of NVIDIA GPUs, from which XLA compiles without a GPU.

A description is the text of a `GpuTargetConfigProto` of XLA, which JAX's plugin
for CUDA reads instead of asking a GPU of this machine.
"""

import math

from palm_mtf.config import HardwareConfig

# {CHIP: (NVIDIA's name, number of multiprocessors, bytes of L2 cache, GHz)},
# from NVIDIA's data sheets. All have compute capability 9.0.
_GPUS = {
  "h100_sxm": ("NVIDIA H100 80GB HBM3", 132, 50 * 2**20, 1.98),
  "h200": ("NVIDIA H200", 132, 50 * 2**20, 1.98),
}
GPU_CHIPS = tuple(_GPUS)


def describe_gpu(chip: str, rates: HardwareConfig) -> str:
  """Returns XLA's description of a GPU, whose memory `rates` describes."""
  name, cores, cache, clock = _GPUS[chip]
  # Limits of compute capability 9.0, from the table "Technical Specifications
  # per Compute Capability" of the CUDA C++ Programming Guide. XLA calls the "a"
  # of sm_90a, Hopper's own instructions, ACCELERATED_FEATURES.
  return f"""
platform_name: "CUDA" device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 10 }}
gpu_device_info {{
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  core_count: {cores} clock_rate_ghz: {clock} fpus_per_core: 128
  device_memory_size: {rates.chip_memory_bytes:.0f}
  memory_bandwidth: {rates.chip_memory_bandwidth:.0f} l2_cache_size: {cache}
  threads_per_warp: 32 threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
"""


def describe_hosts(num_devices: int, rates: HardwareConfig) -> str:
  """Returns the topology of a pod for XLA: "1 x hosts x GPUs per host".

  All GPUs of a pod are in one host if one switch can join them. Otherwise a
  host has the largest number of GPUs that divides both the number of devices
  and the number of GPUs on a switch.
  """
  joined = rates.chip_link_chips or num_devices
  of_host = num_devices
  if num_devices > joined:
    of_host = math.gcd(num_devices, joined)
  return f"1x{num_devices // of_host}x{of_host}"
