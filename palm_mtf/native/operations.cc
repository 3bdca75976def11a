// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Registers the operations with TensorFlow, for CPUs.

#include <vector>

#include "adapter_kernels.h"
#include "attention_kernels.h"
#include "blocks.h"
#include "decode_kernels.h"
#include "experts_kernel.h"
#include "product_kernel.h"
#if defined(__AVX512BF16__)
#include "matmul_kernel.h"
#endif
#include "row_kernels.h"
#include "tensorflow/c/ops.h"

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

template <class Kernel, class T>
void register_kernel(const char* op, TF_DataType out = TF_DataType(0)) {
  TF_Status* status = TF_NewStatus();
  TF_KernelBuilder* builder = TF_NewKernelBuilder(
    op, "CPU",
    [](TF_OpKernelConstruction* context) -> void* {
      return new Kernel(Attributes(context));
    },
    [](void* kernel, TF_OpKernelContext* context) {
      Call call(context);
      static_cast<Kernel*>(kernel)->template compute<T>(call);
    },
    [](void* kernel) { delete static_cast<Kernel*>(kernel); });
  TF_KernelBuilder_TypeConstraint(builder, "T", type_of<T>(), status);
  if (out) TF_KernelBuilder_TypeConstraint(builder, "Tout", out, status);
  TF_RegisterKernelBuilder(op, builder, status);
  TF_DeleteStatus(status);
}

template <class Kernel>
void register_kernels(const char* op, TF_DataType out = TF_DataType(0)) {
  register_kernel<Kernel, float>(op, out);
  register_kernel<Kernel, uint16_t>(op, out);
}

using Names = std::vector<const char*>;

void register_operation(const char* name, const Names& inputs,
                        const Names& outputs, const Names& attrs,
                        bool writes_to_inputs = false) {
  TF_OpDefinitionBuilder* op = TF_NewOpDefinitionBuilder(name);
  for (auto each : inputs) TF_OpDefinitionBuilderAddInput(op, each);
  for (auto each : outputs) TF_OpDefinitionBuilderAddOutput(op, each);
  for (auto each : attrs) TF_OpDefinitionBuilderAddAttr(op, each);
  TF_OpDefinitionBuilderSetIsStateful(op, writes_to_inputs);
  // Without a shape function, the C library cannot import a graph with this
  // operation.
  TF_OpDefinitionBuilderSetShapeInferenceFunction(
    op, &TF_ShapeInferenceContextSetUnknownShape);
  TF_Status* status = TF_NewStatus();
  TF_RegisterOpDefinition(op, status);
  TF_DeleteStatus(status);
}

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
  register_product_operations();
  register_matmul_operations();
  register_norm_operations();
  register_read_operations();
  register_attention_operations();
  register_logits_operations();
  register_adapter_operations();
  register_decode_operations();
}

}  // namespace
}  // namespace palm
