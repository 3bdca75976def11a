// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// The experts of a layer (model/router.py, model/experts.py), for rows of which
// each chooses some experts. Kernels of experts that no row chooses are not
// read. The result of a row does not depend on the other rows.

#pragma once

#include <algorithm>
#include <vector>

#include "activations.h"
#include "rows.h"
#include "team.h"

namespace palm {

struct Router {
  bool is_sigmoid;  // scores are sigmoids of products; otherwise their softmax
  bool normalizes;  // a row's scores are divided by their sum
  float scale;      // factor of the scores
};

struct Experts {
  int count = 0;  // 0 for a model without experts
  int per_row, d_model, d_expert;
  Activation activation;
  Format format;
};

// Chooses the experts of a row x, [d_model]: writes their numbers and factors.
// `kernel` is [d_model, count]; `bias`, [count], is null if there is none.
inline void choose_experts(const float* x, const float* kernel,
                           const float* bias, const Router& router,
                           const Experts& experts, int* chosen, float* gates) {
  const int count = experts.count;
  thread_local std::vector<float> scores, ranks;
  scores.assign(count, 0);
  float* products = scores.data();
  for (int i = 0; i < experts.d_model; ++i, kernel += count)
    for (int e = 0; e < count; ++e) products[e] += x[i] * kernel[e];
  if (router.is_sigmoid)
    for (float& score : scores) score = sigmoid(score);
  else
    softmax(scores.data(), count, 1);
  ranks = scores;
  if (bias)
    for (int e = 0; e < count; ++e) ranks[e] += bias[e];
  float sum = 1e-20f;  // not 0, because sigmoids may all be 0
  for (int i = 0; i < experts.per_row; ++i) {
    const int e = find_largest_place(ranks.data(), count);
    ranks[e] = -INFINITY;
    chosen[i] = e;
    gates[i] = scores[e];
    sum += scores[e];
  }
  const float factor = router.scale / (router.normalizes ? sum : 1);
  for (int i = 0; i < experts.per_row; ++i) gates[i] *= factor;
}

// Where the copies of rows are. A row is copied once per chosen expert. Copies
// are sorted by expert, so that one product multiplies all copies of an expert.
// The copy for choice i of row r is at places[r * per_row + i].
struct Choices {
  std::vector<int> places;
  std::vector<Group> in, out;  // copies and kernels of each chosen expert

  Choices(const Experts& experts, const int* chosen, int num_rows,
          const uint8_t* in_kernels, const uint8_t* out_kernels) {
    std::vector<int> begins(experts.count + 1);
    const int size = num_rows * experts.per_row;
    for (int i = 0; i < size; ++i) ++begins[chosen[i] + 1];
    for (int e = 0; e < experts.count; ++e) {
      const int first = begins[e], count = begins[e + 1];
      begins[e + 1] += first;
      if (!count) continue;
      auto add = [&](std::vector<Group>& to, const uint8_t* kernels, int inner,
                     int outer) {
        const size_t panels = (outer + kColumns - 1) / kColumns;
        to.push_back({first, count, kernels + e * panels * panel_bytes(
                                                  experts.format, inner)});
      };
      add(in, in_kernels, experts.d_model, 2 * experts.d_expert);
      add(out, out_kernels, experts.d_expert, experts.d_model);
    }
    places.resize(size);
    for (int i = 0; i < size; ++i) places[i] = begins[chosen[i]]++;
  }
};

// Computes the experts of some rows. Each thread of a team calls `take`, then
// `run`, then `add` for its share of the rows.
struct ExpertRows {
  Team& team;
  // All three are indexed by place: copies of rows, hidden layers, and products
  // with wi_gate and wi, which the products with wo then overwrite.
  PreparedRows &copies, &hidden;
  std::vector<float>& wide;
  Experts experts = {};

  void resize(int num_rows) {
    const int size = num_rows * experts.per_row;
    copies.resize(size, experts.d_model);
    hidden.resize(size, experts.d_expert);
    const size_t most = std::max(2 * experts.d_expert, experts.d_model);
    if (wide.size() < size * most) wide.resize(size * most);
  }

  // Copies rows to their places. write(row, to) writes one row.
  template <class Write>
  void take(int thread, const Choices& choices, Write write) {
    each_choice(thread, choices, [&](int i, int place) {
      write(i / experts.per_row, copies.row(place, experts.d_model));
      copies.prepare(place, experts.d_model, experts.format);
    });
  }

  void run(int thread, const Choices& choices, WorkQueue* queues) {
    const int d_expert = experts.d_expert, d_model = experts.d_model;
    team.meet();
    multiply(queues[0], copies, choices.in, d_model, 2 * d_expert);
    team.meet();
    each_choice(thread, choices, [&](int, int place) {
      const float* gates = &wide[size_t(place) * 2 * d_expert];
      gate_row(experts.activation, gates, gates + d_expert, d_expert,
               hidden.row(place, d_expert));
      hidden.prepare(place, d_expert, experts.format);
    });
    team.meet();
    multiply(queues[1], hidden, choices.out, d_expert, d_model);
    team.meet();
  }

  // Adds the results of a row's experts to `to`, [d_model], each multiplied by
  // its gate. `gates` is [per_row].
  void add(const Choices& choices, int row, const float* gates, float* to) {
    for (int i = 0; i < experts.per_row; ++i) {
      const int place = choices.places[size_t(row) * experts.per_row + i];
      const float* from = &wide[size_t(place) * experts.d_model];
      for (int j = 0; j < experts.d_model; ++j) to[j] += gates[i] * from[j];
    }
  }

 private:
  template <class Use>
  void each_choice(int thread, const Choices& choices, Use use) {
    const int size = choices.places.size();
    for (int i = thread; i < size; i += team.size()) use(i, choices.places[i]);
  }

  void multiply(WorkQueue& queue, const PreparedRows& rows,
                const std::vector<Group>& groups, int inner, int outer) {
    rows.multiply(queue, team.size(), groups, experts.format, inner, outer,
                  [&](int row, int column, int count, const float* y) {
                    std::copy_n(y, count, &wide[size_t(row) * outer + column]);
                  });
  }
};

}  // namespace palm
