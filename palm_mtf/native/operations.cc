// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Registers the operations without packed weights with TensorFlow, for CPUs.

#include "adapter_kernels.h"
#include "attention_kernels.h"
#include "blocks.h"
#include "registration.h"
#if defined(__AVX512BF16__)
#include "matmul_kernel.h"
#endif
#include "row_kernels.h"

// native/build.py finds this text in the library. Runs report the text, because
// other compilers or options may change the bits of results.
extern "C" const char palm_built_with[];
const char palm_built_with[] =
  "palm_mtf was built with " PALM_OPTIONS " (" __VERSION__ ")";

// Quantizes w, [rows, columns], to a type of `kBlockTypes`, for native/blocks.py,
// outside of TensorFlow. Writes rows of blocks.
extern "C" void palm_quantize(int type, const float* w, int64_t rows,
                              int64_t columns, const float* importance,
                              uint8_t* to, int threads) {
  using namespace palm;
  Shared& with = shared();
  std::lock_guard lock(with.mutex);
  WorkQueue queue;
  with.team_of(threads, kNoPatience).run([&](int) {
    queue.each((rows + kLanes - 1) / kLanes, [&](int i) {
      quantize_rows(kBlockTypes[type], w, int64_t(i) * kLanes, rows, columns,
                    importance, to);
    });
  });
}

namespace palm {
namespace {

void register_norm_operations() {
  const char *op = "PalmNorm", *back = "PalmNormGradient";
  const Names attrs = {"T: {float, bfloat16}", "is_centered: bool",
                       "epsilon: float", "threads: int"};
  register_operation(op, {"x: T", "scale: float"}, {"y: T"}, attrs);
  register_operation(back, {"x: T", "scale: float", "dy: T"},
                     {"dx: T", "dscale: float"}, attrs);
  register_kernels<NormKernel>(op);
  register_kernels<NormGradientKernel>(back);
}

void register_read_operations() {
  const char *op = "PalmReadProduct", *back = "PalmReadProductGradient";
  const Names attrs = {"T: {float, bfloat16}", "num_parts: int", "num_angles: int >= 0",
                 "sizes: list(int)", "is_gated: bool", "threads: int"};
  register_operation(op, {"wide: T", "angles: num_angles * float"},
                     {"parts: num_parts * T"}, attrs);
  register_operation(
    back, {"wide: T", "gradients: num_parts * T", "angles: num_angles * float"},
    {"gradient: T"}, attrs);
  register_kernels<ReadProductKernel>(op);
  register_kernels<ReadProductGradientKernel>(back);
}

void register_attention_operations() {
  const char *op = "PalmAttention", *back = "PalmAttentionGradient";
  const Names attrs = {"T: {float, bfloat16}", "num_masks: int >= 0",
                       "threads: int"};
  register_operation(op, {"q: T", "k: T", "v: T", "masks: num_masks * int32"},
                     {"out: T"}, attrs);
  register_operation(
    back,
    {"q: T", "k: T", "v: T", "out: T", "dout: T", "masks: num_masks * int32"},
    {"dq: T", "dk: T", "dv: T"}, attrs);
  const char* to_cache = "PalmAttendToCache";
  register_operation(to_cache,
                     {"q: T", "k: T", "v: T", "rows: int32", "positions: int32",
                      "count: int32", "keys: T", "values: T"},
                     {"out: T", "keys_after: T", "values_after: T"},
                     {"T: {float, bfloat16}", "threads: int"}, true);
  register_kernels<AttendToCacheKernel>(to_cache);
  register_kernels<AttentionKernel>(op);
  register_kernels<AttentionGradientKernel>(back);
}

void register_matmul_operations() {
  const char* product = "PalmMatmul";
  register_operation(product, {"a: T", "bs: num_bs * T"}, {"ys: num_ys * Tout"},
                     {"T: {bfloat16}", "Tout: {float, bfloat16}", "num_bs: int",
                      "num_ys: int", "sizes: list(int)", "transpose_a: bool",
                      "transpose_b: bool", "threads: int"});
#if defined(__AVX512BF16__)
  register_kernel<MatmulKernel<float>, uint16_t>(product, TF_FLOAT);
  register_kernel<MatmulKernel<uint16_t>, uint16_t>(product, TF_BFLOAT16);
#endif
}

void register_adapter_operations() {
  const char *keep = "PalmKeepAdapter", *add = "PalmAddAdapter";
  register_operation(keep, {"number: int32", "parts: int32", "numbers: float"},
                     {"kept: int32"}, {"T: {float, bfloat16}"}, true);
  register_operation(add, {"number: int32", "product_rows: T", "xs: num_parts * T"},
                     {"y: T"},
                     {"T: {float, bfloat16}", "num_parts: int", "product: int",
                      "threads: int"});
  register_kernels<KeepAdapterKernel>(keep);
  register_kernels<AddAdapterKernel>(add);
}

void register_logits_operations() {
  const char* sums = "PalmSumLogits";
  register_operation(sums, {"logits: T", "targets: int32"}, {"sums: float"},
                     {"T: {float, bfloat16}", "threads: int"});
  register_kernels<SumLogitsKernel>(sums);
}

__attribute__((constructor)) void register_all() {
  register_matmul_operations();
  register_norm_operations();
  register_read_operations();
  register_attention_operations();
  register_logits_operations();
  register_adapter_operations();
}

}  // namespace
}  // namespace palm
