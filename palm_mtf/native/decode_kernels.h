// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// PalmDecodeStep, behind which any strategy chooses the next token, and
// PalmTextSteps, which chooses it itself: TensorFlow's loop between two steps
// lasts a tenth to a quarter as long as one, and its sampling as much again.

#pragma once

#include <algorithm>
#include <functional>
#include <mutex>
#include <vector>

#include "call.h"
#include "decode_step.h"
#include "huge_pages.h"
#include "sampling.h"
#include "shared.h"

namespace palm {

struct StepKernel {
  Model model;
  int threads;
  mutable bool has_huge_pages = false;  // its weights stay where they are

  explicit StepKernel(const Attributes& attrs) {
    model.layers = attrs.number("layers");
    model.heads = attrs.number("heads");
    model.key_heads = attrs.number("key_heads");
    model.d_kv = attrs.number("d_kv");
    model.d_ff = attrs.number("d_ff");
    model.is_serial = attrs.flag("is_serial");
    model.is_centered = attrs.flag("is_centered");
    model.format = Format(attrs.number("format"));
    model.logits_format = Format(attrs.number("logits_format"));
    threads = attrs.number("threads");
  }

  template <class T>
  void compute(Call& call) const {
    TF_Tensor* tokens = call.next();
    const int num_rows = TF_TensorElementCount(tokens);
    const int32_t* positions = call.next_data<int32_t>();
    Step<T> step = read<T>(call, num_rows, 1);
    step.tokens = static_cast<int32_t*>(TF_TensorData(tokens));
    step.positions = positions;
    if (!fits(call, step, 1)) return;
    step.logits = call.allocate<float>(0, num_rows, step.model.vocab).data;
    std::lock_guard lock(shared().mutex);
    step.run();
  }

  // Reads the inputs from the table on. The cache, which steps write to,
  // becomes the outputs from `first` on.
  template <class T>
  Step<T> read(Call& call, int num_rows, int first) const {
    Shared& with = shared();
    std::lock_guard lock(with.mutex);
    Step<T> step = {model,     with.team_of(threads), with.x, with.inputs,
                    with.wide, {},                    num_rows};
    const Matrix<const T> table = call.next_matrix<const T>();
    step.model.vocab = table.rows, step.model.d_model = table.columns;
    step.table = table.data;
    const Matrix<const float> sines = call.next_matrix<const float>();
    step.memory_length = sines.rows;
    step.sines = sines.data;
    step.cosines = call.next_data<float>();
    const int norms = model.is_serial ? 2 : 1;  // of a layer
    for (int i = 0; i < norms * model.layers + 1; ++i)
      step.scales.push_back(call.next_data<float>());
    for (int i = 0; i < 2 * norms * model.layers + 1; ++i) {
      TF_Tensor* kernel = call.next();
      step.kernels.push_back(static_cast<uint8_t*>(TF_TensorData(kernel)));
      if (!has_huge_pages)
        use_huge_pages(step.kernels.back(), TF_TensorByteSize(kernel));
    }
    has_huge_pages = true;
    for (int i = 0; i < 2 * model.layers; ++i) {
      step.cache.push_back(call.next_data<T>());
      call.give_last(first + i);
    }
    return step;
  }

  // Returns whether the model and its cache have room for `count` steps.
  template <class T>
  static bool fits(Call& call, const Step<T>& step, int count) {
    for (int i = 0; i < step.num_rows; ++i) {
      const int token = step.tokens[i], position = step.positions[i];
      if (token >= 0 && token < step.model.vocab && position >= 0 &&
          position + count <= step.memory_length)
        continue;
      call.fail("a token or its position lies outside of the model");
      return false;
    }
    return true;
  }
};

struct TextKernel : StepKernel {
  Sampling sampling;
  int eod, num_seen;

  explicit TextKernel(const Attributes& attrs)
      : StepKernel(attrs),
        sampling{attrs.flag("is_greedy"),
                 attrs.real("temperature"),
                 attrs.real("top_p"),
                 attrs.real("repetition_penalty"),
                 attrs.number("top_k"),
                 attrs.number("num_tokens")},
        eod(attrs.number("eod")),
        num_seen(attrs.number("num_seen")) {}

  template <class T>
  void compute(Call& call) const {
    const int limit = *call.next_data<int32_t>();
    // Steps write to none of these inputs: constants may share their memory.
    int32_t& place = *call.copy_next<int32_t>(0).data;
    const Matrix<int32_t> texts = call.copy_next<int32_t>(2);
    bool* is_over = call.copy_next<bool>(3).data;
    Matrix<bool> seen = {};
    if (num_seen) seen = call.copy_next<bool>(4);
    const int32_t* keys = call.next_data<int32_t>();
    int32_t* tokens = call.copy_next<int32_t>(1).data;
    const int32_t* first = call.next_data<int32_t>();
    const int num_rows = texts.rows;
    Step<T> step = read<T>(call, num_rows, 4 + num_seen);
    std::vector<int32_t> positions(first, first + num_rows), found(num_rows);
    std::vector<float> logits(size_t(num_rows) * step.model.vocab);
    step.tokens = tokens, step.positions = positions.data();
    step.logits = logits.data();
    step.choose = [&](int row, float* numbers) {
      const bool* has = num_seen ? seen.row(row) : nullptr;
      found[row] = next_token(sampling, numbers, has, keys + 2 * row, place);
    };
    if (sampling.num_tokens > step.model.vocab)
      return call.fail("the vocabulary has more tokens than the embedding");
    if (limit > texts.columns)
      return call.fail("texts have no room for so many tokens");
    if (!fits(call, step, limit - place)) return;
    for (; place < limit; ++place) {
      if (std::all_of(is_over, is_over + num_rows, std::identity())) return;
      // Others may come between two steps.
      std::unique_lock lock(shared().mutex);
      step.run();
      lock.unlock();
      for (int row = 0; row < num_rows; ++row) {
        tokens[row] = is_over[row] ? eod : found[row];
        is_over[row] |= tokens[row] == eod;
        texts.row(row)[place] = tokens[row];
        if (num_seen) seen.row(row)[tokens[row]] = true;
        ++positions[row];
      }
    }
  }
};

}  // namespace palm
