// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Registers the operations that pack weights, or read packed weights. A second
// compiler compiles operations.cc meanwhile.

#include "decode_kernels.h"
#include "experts_kernel.h"
#include "product_kernel.h"
#include "registration.h"

namespace palm {
namespace {

Names append(Names names, const Names& common) {
  names.insert(names.end(), common.begin(), common.end());
  return names;
}

void register_decode_operations() {
  const char *step = "PalmDecodeStep", *texts = "PalmTextSteps";
  const Names weights = {"table: T", "angles: num_angles * float",
                         "scales: num_scales * float",
                         "routers: num_routers * float",
                         "kernels: num_kernels * uint8",
                         "cache: num_cache * T"};
  const Names attrs = {"T: {float, bfloat16}", "num_angles: int >= 0",
                       "num_scales: int", "num_routers: int >= 0",
                       "num_kernels: int", "num_cache: int",
                       "memory_length: int", "rotaries: list(int)",
                       "windows: list(int)", "rotates_neighbours: list(int)",
                       "score_scale: float", "has_head_norms: bool",
                       "joins_heads: bool",
                       "has_output_norms: bool", "heads: int",
                       "key_heads: int", "d_kv: int",
                       "d_ffs: list(int)", "is_sparse: list(int)",
                       "experts: int", "experts_per_row: int",
                       "d_expert: int", "is_sigmoid: bool",
                       "normalizes: bool", "router_scale: float",
                       "has_router_bias: bool", "is_serial: bool", "is_centered: bool",
                       "epsilon: float", "activation: int",
                       "embedding_scale: float", "format: int", "logits_format: int",
                       "tile_rows: int", "threads: int"};
  register_operation(step,
                     append({"tokens: int32", "positions: int32"}, weights),
                     {"logits: float", "key: float",
                      "cache_after: num_cache * T"}, attrs,
                     true);
  register_operation(
    texts,
    append({"count: int32", "socket: int32", "ends: int32", "tokens: int32",
                 "positions: int32", "places: int32", "is_over: bool", "keys: int32",
                 "temperature: float", "top_k: int32", "top_p: float",
                 "limits: int32", "seen: num_seen * bool",
                 "history: num_history * int32", "masks: num_masks * int32",
                 "adapters: num_adapters * int32",
                 "drafts: num_drafts * int32"},
                weights),
    {"chosen: int32", "logits: float", "seen_after: num_seen * bool",
     "history_after: num_history * int32",
     "next_drafts: num_drafts * int32", "cache_after: num_cache * T"},
    append({"num_seen: int >= 0", "num_history: int >= 0",
                 "num_masks: int >= 0", "num_adapters: int >= 0",
                 "num_drafts: int >= 0", "most_greedy: float", "num_tokens: int",
                 "repetition_penalty: float", "keeps_logits: bool"},
                attrs),
    true);
  const char* experts = "PalmExperts";
  register_operation(experts,
                     {"x: T", "gates: float", "chosen: int32",
                      "in_kernels: uint8", "out_kernels: uint8"},
                     {"y: T"},
                     {"T: {float, bfloat16}", "experts: int", "d_expert: int",
                      "activation: int", "format: int", "tile_rows: int",
                      "threads: int"});
  register_kernels<ExpertsKernel>(experts);
  register_kernels<StepKernel>(step);
  register_kernels<TextKernel>(texts);
}

void register_product_operations() {
  const char *pack = "PalmPack", *unpack = "PalmUnpack",
             *product = "PalmProduct";
  register_operation(pack, {"ws: num_parts * T"}, {"panels: uint8"},
                     {"T: {float}", "num_parts: int", "format: int",
                      "joins_rows: bool", "is_transposed: bool",
                      "is_rounded: bool", "stack: int", "threads: int"});
  register_operation(unpack, {"kernel: uint8"}, {"w: T"},
                     {"T: {bfloat16}", "inner: int", "outer: int",
                      "threads: int"});
  register_operation(product, {"xs: num_parts * T", "kernel: uint8"},
                     {"y: Tout"},
                     {"T: {float, bfloat16}", "Tout: {float, bfloat16}",
                      "num_parts: int", "outer: int", "format: int",
                      "tile_rows: int", "threads: int"});
  register_kernel<PackKernel, float>(pack);
  register_kernel<UnpackKernel, uint16_t>(unpack);
  register_kernels<ProductKernel<float>>(product, TF_FLOAT);
  register_kernels<ProductKernel<uint16_t>>(product, TF_BFLOAT16);
}

__attribute__((constructor)) void register_packed() {
  register_product_operations();
  register_decode_operations();
}

}  // namespace
}  // namespace palm
