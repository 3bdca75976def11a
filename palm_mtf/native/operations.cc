// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Operations of TensorFlow on CPUs: PalmDecodeStep and PalmGreedySteps,
// PalmProduct, PalmReadProduct and PalmReadProductGradient, PalmSumLogits.

#include <vector>

#include "decode_kernels.h"
#include "loss.h"
#include "projection.h"
#include "shared.h"
#include "tensorflow/c/ops.h"

namespace palm {
namespace {

// --- PalmProduct -------------------------------------------------------------

template <class Out>
struct ProductKernel {
  int outer, threads;
  Format format;

  explicit ProductKernel(const Attributes& attrs)
      : outer(attrs.number("outer")),
        threads(attrs.number("threads")),
        format(Format(attrs.number("format"))) {}

  // Rows are many, as of a prompt: a part of them at a time, whose readied
  // numbers stay near the cores.
  template <class T>
  void compute(Call& call) const {
    constexpr int kRows = 192;
    Shared& with = shared();
    std::lock_guard lock(with.mutex);
    Team& team = with.team_of(threads);
    std::vector<Matrix<const T>> parts;
    int num_rows = 0, inner = 0;
    for (int i = 0; i < call.num_inputs() - 1; ++i) {
      parts.push_back(call.next_matrix<const T>());
      num_rows = parts.back().rows, inner += parts.back().columns;
    }
    const uint8_t* kernel = call.next_data<uint8_t>();
    const Matrix<Out> y = call.allocate<Out>(0, num_rows, outer);
    PreparedRows& inputs = with.inputs;
    Shares shares;
    for (int first = 0; first < num_rows; first += kRows) {
      const int count = std::min(kRows, num_rows - first);
      inputs.resize(count, inner);
      shares.begin_again();
      team.run([&](int thread) {
        for (int row = thread; row < count; row += team.size()) {
          float* to = inputs.row(row, inner);
          for (const Matrix<const T>& x : parts) {
            const T* from = x.row(first + row);
            for (int j = 0; j < x.columns; ++j) *to++ = to_float(from[j]);
          }
          inputs.prepare(row, inner, format);
        }
        team.meet();
        inputs.multiply(
          shares, team.size(), kernel, format, inner, outer,
          [&](int row, int column, int size, const float* numbers) {
            Out* to = y.row(first + row) + column;
            for (int i = 0; i < size; ++i) put(to + i, numbers[i]);
          });
      });
    }
  }
};

// --- Operations on each row --------------------------------------------------

// Calls use(row) for each row of a matrix, by at most so many threads.
template <class T, class Use>
void for_rows(Matrix<const T> x, int threads, Use use) {
  // To wake a thread takes the time to write some 250 kB.
  const size_t bytes = sizeof(T) * x.rows * x.columns;
  const int size = std::clamp<int>(bytes / 250'000, 1, threads);
  Shared& with = shared();
  std::lock_guard lock(with.mutex);
  const int share = std::max(1, x.rows / (8 * size));
  Shares shares;
  with.team_of(size, kNoPatience).run([&](int) {
    for (int at = shares.take(share); at < x.rows; at = shares.take(share))
      for (int row = at; row < std::min(at + share, x.rows); ++row) use(row);
  });
}

// --- PalmReadProduct and its gradient ----------------------------------------

struct ReadKernel {
  Columns columns;
  int threads;

  explicit ReadKernel(const Attributes& attrs) : threads(attrs.number("threads")) {
    columns.sizes = attrs.numbers("sizes");
    columns.is_gated = attrs.flag("is_gated");
  }

  // Reads the last inputs, the angles of a call, if it has any.
  Columns with_angles(Call& call, int num_inputs) const {
    Columns found = columns;
    if (call.num_inputs() == num_inputs) return found;
    TF_Tensor* sines = call.next();
    found.length = TF_Dim(sines, 0), found.d_kv = 2 * TF_Dim(sines, 1);
    found.sines = static_cast<float*>(TF_TensorData(sines));
    found.cosines = call.next_data<float>();
    return found;
  }
};

struct ReadProductKernel : ReadKernel {
  using ReadKernel::ReadKernel;

  template <class T>
  void compute(Call& call) const {
    const Matrix<const T> wide = call.next_matrix<const T>();
    const Columns with = with_angles(call, 1);
    std::vector<T*> parts;
    for (int i = 0; i < columns.num_parts(); ++i)
      parts.push_back(
        call.allocate<T>(i, wide.rows, columns.sizes[i]).data);
    for_rows(wide, threads, [&](int row) {
      read_row(wide.row(row), with, row, parts);
    });
  }
};

struct ReadProductGradientKernel : ReadKernel {
  using ReadKernel::ReadKernel;

  template <class T>
  void compute(Call& call) const {
    const Matrix<const T> wide = call.next_matrix<const T>();
    std::vector<const T*> gradients;
    for (int i = 0; i < columns.num_parts(); ++i)
      gradients.push_back(call.next_data<T>());
    const Columns with = with_angles(call, 1 + columns.num_parts());
    const Matrix<T> gradient = call.allocate<T>(0, wide.rows, wide.columns);
    for_rows(wide, threads, [&](int row) {
      read_row_gradient(wide.row(row), with, row, gradients, gradient.row(row));
    });
  }
};

// --- PalmSumLogits -----------------------------------------------------------

struct SumLogitsKernel {
  int threads;

  explicit SumLogitsKernel(const Attributes& attrs)
      : threads(attrs.number("threads")) {}

  template <class T>
  void compute(Call& call) const {
    const Matrix<const T> logits = call.next_matrix<const T>();
    const int32_t* targets = call.next_data<int32_t>();
    for (int row = 0; row < logits.rows; ++row)
      if (targets[row] >= logits.columns)
        return call.fail("a target lies outside of the logits");
    const Matrix<float> sums = call.allocate<float>(0, logits.rows, 3);
    for_rows(logits, threads, [&](int row) {
      sum_row(logits.row(row), logits.columns, targets[row], sums.row(row));
    });
  }
};

// --- Registration ------------------------------------------------------------

template <class Kernel, class T>
void register_kernel(const char* op, const char* name, TF_DataType type,
                     TF_DataType out = TF_DataType(0)) {
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
  TF_KernelBuilder_TypeConstraint(builder, "T", type, status);
  if (out) TF_KernelBuilder_TypeConstraint(builder, "Tout", out, status);
  TF_RegisterKernelBuilder(name, builder, status);
  TF_DeleteStatus(status);
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
  TF_Status* status = TF_NewStatus();
  TF_RegisterOpDefinition(op, status);
  TF_DeleteStatus(status);
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
  register_kernel<ReadProductKernel, float>(op, "read_f", TF_FLOAT);
  register_kernel<ReadProductKernel, uint16_t>(op, "read_b", TF_BFLOAT16);
  register_kernel<ReadProductGradientKernel, float>(back, "back_f", TF_FLOAT);
  register_kernel<ReadProductGradientKernel, uint16_t>(back, "back_b",
                                                       TF_BFLOAT16);
}

// Returns names with those that both decoding operations have behind them.
Names followed_by(Names names, const Names& common) {
  names.insert(names.end(), common.begin(), common.end());
  return names;
}

void register_decode_operations() {
  const char *step = "PalmDecodeStep", *greedy = "PalmGreedySteps";
  const Names rows = {"tokens: int32", "positions: int32", "table: T",
                      "sines: float", "cosines: float",
                      "scales: num_scales * float",
                      "kernels: num_kernels * uint8", "cache: num_cache * T"};
  const Names attrs = {"T: {float, bfloat16}", "num_scales: int",
                       "num_kernels: int", "num_cache: int", "layers: int",
                       "heads: int", "key_heads: int", "d_kv: int", "d_ff: int",
                       "is_serial: bool", "is_centered: bool", "format: int",
                       "logits_format: int", "threads: int"};
  register_operation(step, rows, {"logits: float", "cache_after: num_cache * T"},
                     attrs, true);
  register_operation(
    greedy,
    followed_by({"limit: int32", "place: int32", "texts: int32",
                 "is_over: bool"}, rows),
    {"place_after: int32", "tokens_after: int32", "texts_after: int32",
     "is_over_after: bool", "cache_after: num_cache * T"},
    followed_by({"num_tokens: int", "eod: int"}, attrs), true);
  register_kernel<StepKernel, float>(step, "step_f", TF_FLOAT);
  register_kernel<StepKernel, uint16_t>(step, "step_b", TF_BFLOAT16);
  register_kernel<GreedyKernel, float>(greedy, "greedy_f", TF_FLOAT);
  register_kernel<GreedyKernel, uint16_t>(greedy, "greedy_b", TF_BFLOAT16);
}

__attribute__((constructor)) void register_all() {
  register_decode_operations();
  register_operation("PalmProduct", {"xs: num_parts * T", "kernel: uint8"},
                     {"y: Tout"},
                     {"T: {float, bfloat16}", "Tout: {float, bfloat16}",
                      "num_parts: int", "outer: int", "format: int",
                      "threads: int"});
  using OfFloats = ProductKernel<float>;
  using OfHalves = ProductKernel<uint16_t>;
  const char* op = "PalmProduct";
  register_kernel<OfFloats, float>(op, "ff", TF_FLOAT, TF_FLOAT);
  register_kernel<OfHalves, float>(op, "fb", TF_FLOAT, TF_BFLOAT16);
  register_kernel<OfFloats, uint16_t>(op, "bf", TF_BFLOAT16, TF_FLOAT);
  register_kernel<OfHalves, uint16_t>(op, "bb", TF_BFLOAT16, TF_BFLOAT16);
  register_read_operations();
  const char* sums = "PalmSumLogits";
  register_operation(sums, {"logits: T", "targets: int32"}, {"sums: float"},
                     {"T: {float, bfloat16}", "threads: int"});
  register_kernel<SumLogitsKernel, float>(sums, "sums_f", TF_FLOAT);
  register_kernel<SumLogitsKernel, uint16_t>(sums, "sums_b", TF_BFLOAT16);
}

}  // namespace
}  // namespace palm
