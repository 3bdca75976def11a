// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Prompt lookup (Saxena 2023): where the last tokens of a text stand in the
// text before, the tokens that follow there are a draft of the next tokens. A
// step reads a draft together with the last token, and chooses the next token
// after each of them. A drafted token that was not chosen is read in vain.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace palm {

constexpr int kMostDrafted = 8;  // tokens per text and step
constexpr int kMostMatched = 4;  // longer matches are not looked for
// Numbers at the beginning of a row of the history (`Texts.history`): per length
// of a match, how many predicted tokens were right, and how many were compared.
constexpr int kCounts = 2 * kMostMatched;
constexpr int kMostCompared = 32;  // counts of older tokens are halved

// A text in a call of several steps, with the draft for the next step.
struct LookedUp {
  int row;          // in the call's inputs and in the cache
  int32_t* counts;  // [kCounts]
  int32_t* tokens;  // of the text; the predicted tokens follow
  int size;         // tokens of the text
  int limit;        // tokens that the call may still choose
  int matched = 0, predicted = 0, drafted = 0;  // how many tokens
  double chance = 1;  // that all drafted tokens are chosen
  int first_row = 0;  // of the step: the row of the text's last token
  int chosen = 0;     // tokens that the step chose

  // Returns how likely predicted token `i` is chosen if those before it are.
  double chance_of(int i) const {
    const int32_t* counted = counts_of(i);
    return (counted[0] + 1.0) / (counted[1] + 2.0);
  }

  // Predicts at most `most` tokens: those after the longest match, or after the
  // latest of equally long matches.
  void predict(int most) {
    const int last = size - 1;
    int after = 0;
    matched = predicted = drafted = 0, chance = 1;
    for (int end = last; end > 0 && matched < kMostMatched;) {
      // Blocks without the last token are skipped by vector instructions.
      const int begin = std::max(0, end - 64);
      int found = 0;
      for (int i = begin; i < end; ++i) found |= tokens[i] == tokens[last];
      for (int i = end - 1; found && i >= begin; --i) {
        int length = 0;
        while (length < kMostMatched && length <= i &&
               tokens[i - length] == tokens[last - length])
          ++length;
        if (length > matched) matched = length, after = i + 1;
      }
      end = begin;
    }
    if (matched == 0) return;
    // The source may overlap the predicted tokens, if a text repeats itself.
    for (; predicted < most; ++predicted)
      tokens[size + predicted] = tokens[after + predicted];
  }

  // Adds the tokens that the step chose, and compares them with the prediction.
  void take(const int32_t* found) {
    for (int i = 0; i < std::min(chosen, predicted); ++i) {
      int32_t* counted = counts_of(i);
      counted[0] += tokens[size + i] == found[i];
      if (++counted[1] >= kMostCompared) counted[0] /= 2, counted[1] /= 2;
    }
    std::copy_n(found, chosen, tokens + size);
    size += chosen, limit -= chosen;
  }

 private:
  int32_t* counts_of(int i) const {
    return counts + 2 * (std::min(matched + i, kMostMatched) - 1);
  }
};

// The rows of a step: the last token of each text, then the drafted tokens.
struct StepRows {
  std::vector<int32_t> tokens, positions, cache_rows;
  std::vector<int32_t> chosen;  // the token after each row's token

  void fill(std::vector<LookedUp>& texts) {
    tokens.clear(), positions.clear(), cache_rows.clear();
    for (LookedUp& each : texts) {
      each.first_row = tokens.size();
      for (int at = each.size - 1; at < each.size + each.drafted; ++at) {
        tokens.push_back(each.tokens[at]);
        positions.push_back(at);
        cache_rows.push_back(each.row);
      }
    }
    chosen.resize(tokens.size());
  }
};

// Measured seconds of steps, by their number of rows.
class StepCosts {
 public:
  void add(int rows, double secs) {
    if (costs_.size() <= size_t(rows)) costs_.resize(rows + 1);
    ++now_;
    Cost& cost = costs_[rows];
    if (!cost.when) cost.secs = of(rows);
    // The first number is a measurement. Later ones change by at most a half,
    // because other programs may have interrupted the step.
    cost.secs = cost.secs ? cost.secs + (std::min(secs, 2 * cost.secs) -
                                         cost.secs) / 2
                          : secs;
    cost.when = now_;
  }

  // Returns the estimated seconds of a step; 0 if no step has had at most this
  // many rows. An old estimate sinks, so that each number of rows is measured
  // again. A number of rows that was not measured costs as much as fewer rows.
  double of(int rows) const {
    for (int i = std::min(rows, int(costs_.size()) - 1); i > 0; --i)
      if (const Cost& cost = costs_[i]; cost.when)
        return cost.secs * std::max(0.5, 1 - 0.0005 * (now_ - cost.when));
    return 0;
  }

 private:
  struct Cost {
    double secs = 0;
    int64_t when = 0;  // number of the step that was measured; 0 for none
  };
  std::vector<Cost> costs_;
  int64_t now_ = 0;
};

// Sets how many tokens to draft for each text, so that the expected number of
// chosen tokens per second is largest.
inline void draft(std::vector<LookedUp>& texts, const StepCosts& costs) {
  const int rows = texts.size();
  if (!costs.of(rows)) return;
  std::vector<LookedUp*> drafts;  // the text of each drafted token
  double expected = rows, best = expected / costs.of(rows);
  size_t kept = 0;
  while (true) {
    LookedUp* likeliest = nullptr;
    double most = 0.02;  // a lesser chance is not worth the search
    for (LookedUp& each : texts) {
      if (each.drafted >= std::min({each.predicted, each.limit - 1, kMostDrafted}))
        continue;
      const double chance = each.chance * each.chance_of(each.drafted);
      if (chance > most) likeliest = &each, most = chance;
    }
    if (!likeliest) break;
    likeliest->chance = most;
    ++likeliest->drafted;
    drafts.push_back(likeliest);
    expected += most;
    const double rate = expected / costs.of(rows + int(drafts.size()));
    if (rate > best) best = rate, kept = drafts.size();
  }
  for (size_t i = kept; i < drafts.size(); ++i) --drafts[i]->drafted;
}

}  // namespace palm
