// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// PalmDecodeStep runs one decoding step and returns logits, so that callers may
// choose tokens by any strategy. PalmTextSteps runs several steps and chooses
// the tokens, because in TensorFlow the loop and the sampling would each take a
// tenth to a quarter of a step's time.

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
  std::vector<int> rotates_neighbours;  // per way to rotate
  int threads, num_kernels;
  mutable bool has_huge_pages = false;  // whether weights are in huge pages

  explicit StepKernel(const Attributes& attrs) {
    model.memory_length = attrs.number("memory_length");
    model.rotaries = attrs.numbers("rotaries");
    model.windows = attrs.numbers("windows");
    rotates_neighbours = attrs.numbers("rotates_neighbours");
    model.score_scale = attrs.real("score_scale");
    model.has_head_norms = attrs.flag("has_head_norms");
    model.joins_heads = attrs.flag("joins_heads");
    model.has_output_norms = attrs.flag("has_output_norms");
    model.heads = attrs.number("heads");
    model.key_heads = attrs.number("key_heads");
    model.d_kv = attrs.number("d_kv");
    model.d_ffs = attrs.numbers("d_ffs");
    model.is_sparse = attrs.numbers("is_sparse");
    model.is_serial = attrs.flag("is_serial");
    model.norm = {attrs.flag("is_centered"), attrs.real("epsilon")};
    model.experts.activation = Activation(attrs.number("activation"));
    model.experts.count = attrs.number("experts");
    model.experts.per_row = attrs.number("experts_per_row");
    model.experts.d_expert = attrs.number("d_expert");
    model.router = {attrs.flag("is_sigmoid"), attrs.flag("normalizes"),
                    attrs.real("router_scale")};
    model.has_router_bias = attrs.flag("has_router_bias");
    model.embedding_scale = attrs.real("embedding_scale");
    model.format = model.experts.format = Format(attrs.number("format"));
    model.logits_format = Format(attrs.number("logits_format"));
    threads = attrs.number("threads");
    num_kernels = attrs.number("num_kernels");
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

  // Reads the embedding and all later inputs; the last inputs are the cache.
  // Steps write the cache in place, so it is also the outputs from `first` on.
  template <class T>
  Step<T> read(Call& call, int num_rows, int first) const {
    Shared& with = shared();
    std::lock_guard lock(with.mutex);
    const Matrix<const T> table = call.next_matrix<const T>();
    Team& team = with.team_of(threads);
    Step<T> step = {.model = model, .team = team, .x = with.x,
                    .inputs = with.inputs, .wide = with.wide,
                    .expert_rows = {team, with.copies, with.inputs, with.wide},
                    .num_rows = num_rows, .table = table.data};
    step.model.vocab = table.rows;
    step.model.d_model = step.model.experts.d_model = table.columns;
    step.expert_rows.experts = step.model.experts;
    for (bool neighbours : rotates_neighbours) {
      const Matrix<const float> sines = call.next_matrix<const float>();
      step.rotaries.push_back({neighbours, 2 * sines.columns, sines.data,
                               call.next_data<float>()});
    }
    const int layers = model.layers(), sums = model.is_serial ? 2 : 1;
    const int norms =  // per layer
      sums * (model.has_output_norms ? 2 : 1) + (model.has_head_norms ? 2 : 0);
    for (int i = 0; i < norms * layers + 1; ++i)
      step.scales.push_back(call.next_data<float>());
    const int sparse = model.count_sparse();
    for (int i = 0; i < sparse * (model.has_router_bias ? 2 : 1); ++i)
      step.routers.push_back(call.next_data<float>());
    for (int i = 0; i < num_kernels; ++i) {
      TF_Tensor* kernel = call.next();
      step.kernels.push_back(static_cast<uint8_t*>(TF_TensorData(kernel)));
      if (!has_huge_pages)
        use_huge_pages(step.kernels.back(), TF_TensorByteSize(kernel));
    }
    has_huge_pages = true;
    for (int i = 0; i < 2 * layers; ++i) {
      step.cache.push_back(call.next_data<T>());
      call.give_last(first + i);
    }
    return step;
  }

  // Returns whether all tokens are in the vocabulary and the cache has room for
  // `count` steps. If not, the call fails.
  template <class T>
  static bool fits(Call& call, const Step<T>& step, int count) {
    for (int i = 0; i < step.num_rows; ++i) {
      const int token = step.tokens[i], position = step.positions[i];
      if (token >= 0 && token < step.model.vocab && position >= 0 &&
          position + count <= step.model.memory_length)
        continue;
      call.fail("a token or its position lies outside of the model");
      return false;
    }
    return true;
  }
};

struct TextKernel : StepKernel {
  float most_greedy, repetition_penalty;
  int num_tokens, num_seen, num_masks;
  bool keeps_logits;

  explicit TextKernel(const Attributes& attrs)
      : StepKernel(attrs),
        most_greedy(attrs.real("most_greedy")),
        repetition_penalty(attrs.real("repetition_penalty")),
        num_tokens(attrs.number("num_tokens")),
        num_seen(attrs.number("num_seen")),
        num_masks(attrs.number("num_masks")),
        keeps_logits(attrs.flag("keeps_logits")) {}

  template <class T>
  void compute(Call& call) const {
    const int count = *call.next_data<int32_t>();
    const std::vector<int32_t> ends = call.next_values<int32_t>();
    std::vector<int32_t> tokens = call.next_values<int32_t>();
    std::vector<int32_t> positions = call.next_values<int32_t>();
    std::vector<int32_t> places = call.next_values<int32_t>();
    std::vector<bool> is_over = call.next_values<bool>();
    const int32_t* keys = call.next_data<int32_t>();
    const float* temperatures = call.next_data<float>();
    const int32_t* top_ks = call.next_data<int32_t>();
    const float* top_ps = call.next_data<float>();
    const int num_rows = tokens.size();
    // Steps write to a copy of `seen`, because the input may be a constant.
    Matrix<bool> seen = {};
    if (num_seen) seen = call.copy_next<bool>(2);
    Matrix<int32_t> masks = {};
    if (num_masks) masks = call.next_matrix<int32_t>();
    Step<T> step = read<T>(call, num_rows, 2 + num_seen);
    const int vocab = step.model.vocab;
    if (num_tokens > vocab)
      return call.fail("the vocabulary has more tokens than the embedding");
    step.tokens = tokens.data(), step.positions = positions.data();
    if (!fits(call, step, count)) return;
    if (num_masks && masks.columns < (num_tokens + 31) / 32)
      return call.fail("a mask has fewer bits than there are tokens");
    std::vector<float> own(keeps_logits ? 0 : size_t(num_rows) * vocab);
    const Matrix<float> kept =
      call.allocate<float>(1, keeps_logits ? num_rows : 0, vocab);
    step.logits = keeps_logits ? kept.data : own.data();
    std::vector<int32_t> found(num_rows), chosen;
    step.choose = [&](int row, float* numbers) {
      thread_local std::vector<float> copy;  // sampling overwrites its input
      if (keeps_logits) {
        copy.assign(numbers, numbers + num_tokens);
        numbers = copy.data();
      }
      const Sampling how = {temperatures[row] <= most_greedy, temperatures[row],
                            top_ps[row], repetition_penalty, top_ks[row],
                            num_tokens};
      bool* row_seen = num_seen ? seen.row(row) : nullptr;
      found[row] =
        choose_token(how, numbers, row_seen, num_masks ? masks.row(row) : nullptr,
                     keys + 2 * row, places[row]);
    };
    int done = 0;
    for (; done < count; ++done) {
      if (std::all_of(is_over.begin(), is_over.end(), std::identity())) break;
      // The lock is free between steps, so that other sessions' calls can run.
      std::unique_lock lock(shared().mutex);
      step.run();
      lock.unlock();
      for (int row = 0; row < num_rows; ++row) {
        tokens[row] = is_over[row] ? ends[0] : found[row];
        is_over[row] = is_over[row] || std::ranges::count(ends, tokens[row]);
        if (num_seen) seen.row(row)[tokens[row]] = true;
        ++positions[row], ++places[row];
      }
      chosen.insert(chosen.end(), tokens.begin(), tokens.end());
    }
    const Matrix<int32_t> texts = call.allocate<int32_t>(0, num_rows, done);
    for (int row = 0; row < num_rows; ++row)
      for (int i = 0; i < done; ++i)
        texts.row(row)[i] = chosen[size_t(i) * num_rows + row];
  }
};

}  // namespace palm
