// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// PalmDecodeStep runs one decoding step and returns logits, so that callers may
// choose tokens by any strategy. PalmTextSteps runs several steps and chooses
// the tokens, because in TensorFlow the loop and the sampling would each take a
// tenth to a quarter of a step's time.

#pragma once

#include <algorithm>
#include <chrono>
#include <mutex>
#include <vector>

#include "call.h"
#include "decode_step.h"
#include "huge_pages.h"
#include "lookup.h"
#include "sampling.h"
#include "shared.h"
#include "token_feed.h"

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
    model.tile_rows = attrs.number("tile_rows");
    threads = attrs.number("threads");
    num_kernels = attrs.number("num_kernels");
  }

  template <class T>
  void compute(Call& call) const {
    TF_Tensor* tokens = call.next();
    const int num_rows = TF_TensorElementCount(tokens);
    const int32_t* positions = call.next_data<int32_t>();
    Step<T> step = read<T>(call, num_rows, 2);
    step.tokens = static_cast<int32_t*>(TF_TensorData(tokens));
    step.positions = positions;
    if (!fits(call, step, nullptr, model.memory_length)) return;
    step.logits = call.allocate<float>(0, num_rows, step.model.vocab).data;
    step.key = call.allocate<float>(1, num_rows, step.model.d_model).data;
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

  // Returns whether all tokens are in the vocabulary, and `counts` tokens (null:
  // one) per row fit into `room` positions and into the cache. If not, the call
  // fails.
  template <class T>
  static bool fits(Call& call, const Step<T>& step, const int32_t* counts,
                   int room) {
    room = std::min(room, step.model.memory_length);
    for (int i = 0; i < step.num_rows; ++i) {
      const int count = counts ? counts[i] : 1;
      const int token = step.tokens[i], position = step.positions[i];
      if (token >= 0 && token < step.model.vocab && position >= 0 &&
          position + count <= room)
        continue;
      call.fail("a token or its position lies outside of the model");
      return false;
    }
    return true;
  }
};

struct TextKernel : StepKernel {
  float most_greedy, repetition_penalty;
  int num_tokens, num_seen, num_history, num_masks, num_adapters, num_drafts;
  bool keeps_logits;
  mutable StepCosts costs;  // guarded by the mutex of `shared`

  explicit TextKernel(const Attributes& attrs)
      : StepKernel(attrs),
        most_greedy(attrs.real("most_greedy")),
        repetition_penalty(attrs.real("repetition_penalty")),
        num_tokens(attrs.number("num_tokens")),
        num_seen(attrs.number("num_seen")),
        num_history(attrs.number("num_history")),
        num_masks(attrs.number("num_masks")),
        num_adapters(attrs.number("num_adapters")),
        num_drafts(attrs.number("num_drafts")),
        keeps_logits(attrs.flag("keeps_logits")) {}

  template <class T>
  void compute(Call& call) const {
    const int count = *call.next_data<int32_t>();
    TokenFeed feed(*call.next_data<int32_t>());
    const std::vector<int32_t> ends = call.next_values<int32_t>();
    const std::vector<int32_t> tokens = call.next_values<int32_t>();
    const std::vector<int32_t> positions = call.next_values<int32_t>();
    const int32_t* places = call.next_data<int32_t>();
    const bool* is_over = call.next_data<bool>();
    const int32_t* keys = call.next_data<int32_t>();
    const float* temperatures = call.next_data<float>();
    const int32_t* top_ks = call.next_data<int32_t>();
    const float* top_ps = call.next_data<float>();
    const int32_t* limits = call.next_data<int32_t>();
    const int num_rows = tokens.size();
    // Steps write to a copy of `seen`, because the input may be a constant.
    Matrix<bool> seen = {};
    if (num_seen) seen = call.copy_next<bool>(2);
    std::vector<int32_t> own_history;
    Matrix<int32_t> history = {nullptr, num_rows,
                               kCounts + model.memory_length + 1};
    if (num_history) {
      history = call.next_matrix<int32_t>();
      call.give_last(2 + num_seen);
    } else {
      own_history.resize(size_t(num_rows) * history.columns);
      history.data = own_history.data();
    }
    Matrix<int32_t> masks = {};
    if (num_masks) masks = call.next_matrix<int32_t>();
    const int32_t* adapters = num_adapters ? call.next_data<int32_t>() : nullptr;
    Matrix<int32_t> drafts = {};
    if (num_drafts) drafts = call.next_matrix<int32_t>();
    const int masks_per_row = num_masks ? masks.rows / num_rows : 0;
    if (num_masks && masks_per_row <= drafts.columns)
      return call.fail("a drafted token has no mask");
    Step<T> step = read<T>(call, num_rows, 2 + num_seen + num_history + num_drafts);
    const int vocab = step.model.vocab;
    if (num_tokens > vocab)
      return call.fail("the vocabulary has more tokens than the embedding");
    step.tokens = tokens.data(), step.positions = positions.data();
    const int most_tokens = history.columns - kCounts;
    if (!fits(call, step, limits, most_tokens - 1)) return;
    if (num_masks && masks.columns < (num_tokens + 31) / 32)
      return call.fail("a mask has fewer bits than there are tokens");
    const Matrix<float> kept =
      call.allocate<float>(1, keeps_logits ? num_rows : 0, vocab);
    std::fill_n(kept.data, size_t(kept.rows) * vocab, 0.0f);

    std::vector<std::vector<int32_t>> chosen(num_rows);
    std::vector<LookedUp> texts;  // those that have not ended
    for (int row = 0; row < num_rows; ++row) {
      if (is_over[row] || limits[row] <= 0) continue;
      int32_t* counts = history.row(row);
      counts[kCounts + positions[row]] = tokens[row];
      texts.push_back(
        {row, counts, counts + kCounts, positions[row] + 1, limits[row]});
    }
    std::vector<float> logits;
    StepRows rows;
    step.choose = [&](int i) {
      LookedUp& text = texts[i];
      const int row = text.row, place = places[row] + int(chosen[row].size());
      const Sampling how = {temperatures[row] <= most_greedy, temperatures[row],
                            top_ps[row], repetition_penalty, top_ks[row],
                            num_tokens};
      bool* row_seen = num_seen ? seen.row(row) : nullptr;
      bool is_right = true;
      for (int j = 0; is_right && j <= text.drafted; ++j) {
        float* numbers = &logits[size_t(text.first_row + j) * vocab];
        // Sampling overwrites its input.
        if (keeps_logits) std::copy_n(numbers, vocab, kept.row(row));
        const int32_t* mask =
          num_masks ? masks.row(row * masks_per_row + j) : nullptr;
        const int token = choose_token(how, numbers, row_seen, mask,
                                       keys + 2 * row, place + j);
        rows.chosen[text.first_row + j] = token;
        if (row_seen) row_seen[token] = true;
        text.chosen = j + 1;
        is_right = token == text.tokens[text.size + j] &&
                   !std::ranges::count(ends, token);
      }
    };
    auto predict = [&] {
      for (LookedUp& each : texts)
        if (num_history)
          each.predict(std::min(kMostDrafted + 1, most_tokens - each.size));
    };
    for (int done = 0; done < count && !texts.empty(); ++done) {
      // The lock is free between steps, so that other sessions' calls can run.
      std::unique_lock lock(shared().mutex);
      predict();
      for (LookedUp& each : texts)
        if (num_masks)
          each.restrict(drafts.row(each.row),
                        std::min(drafts.columns, each.limit - 1), vocab);
      draft(texts, costs);
      rows.fill(texts);
      step.num_rows = rows.tokens.size(), step.num_texts = texts.size();
      step.tokens = rows.tokens.data(), step.positions = rows.positions.data();
      step.cache_rows = rows.cache_rows.data();
      std::vector<int> numbers;  // adapter of each row of the step
      for (int row : rows.cache_rows)
        numbers.push_back(adapters ? adapters[row] : 0);
      if (!step.low_rank.begin(numbers, num_kernels))
        return call.fail(kNoAdapter);
      logits.resize(std::max(logits.size(), size_t(step.num_rows) * vocab));
      step.logits = logits.data();
      const auto begin = std::chrono::steady_clock::now();
      step.run();
      const std::chrono::duration<double> passed =
        std::chrono::steady_clock::now() - begin;
      costs.add(step.num_rows, passed.count());
      lock.unlock();
      for (LookedUp& each : texts) {
        const int32_t* found = &rows.chosen[each.first_row];
        each.take(found);
        auto& all = chosen[each.row];
        for (int i = 0; i < each.chosen; ++i) {
          feed.add(each.row, places[each.row] + int(all.size()), found[i]);
          all.push_back(found[i]);
        }
      }
      feed.send();
      if (feed.is_ended()) break;
      std::erase_if(texts, [&](const LookedUp& x) {
        return !x.limit || std::ranges::count(ends, x.tokens[x.size - 1]);
      });
    }
    if (num_drafts) {  // for the next call
      const Matrix<int32_t> next = call.allocate<int32_t>(
        2 + num_seen + num_history, num_rows, drafts.columns);
      std::fill_n(next.data, size_t(num_rows) * drafts.columns, -1);
      predict();
      draft(texts, costs);
      for (const LookedUp& each : texts)
        std::copy_n(each.tokens + each.size,
                    std::min(each.drafted, drafts.columns), next.row(each.row));
    }
    size_t most = 0;
    for (const auto& each : chosen) most = std::max(most, each.size());
    const Matrix<int32_t> out = call.allocate<int32_t>(0, num_rows, most);
    for (int row = 0; row < num_rows; ++row) {
      std::fill_n(out.row(row), most, ends[0]);
      std::ranges::copy(chosen[row], out.row(row));
    }
  }
};

}  // namespace palm
