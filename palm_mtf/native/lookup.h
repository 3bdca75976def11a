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
constexpr int kMostDraftedInAll = 64;  // per step; each has logits in memory
constexpr int kMostMatched = 4;  // longer matches are not looked for
constexpr int kGiven = kMostMatched + 1;  // `matched` of drafts of the caller
// Numbers at the beginning of a row of the history (`Texts.history`): for each
// value of `matched`, how many predicted tokens were right and were compared.
constexpr int kCounts = 2 * kGiven;
constexpr int kMostCompared = 32;  // counts of older tokens are halved
constexpr double kLeastGain = 1.06;  // a lesser gain may be an error

// A text in a call of several steps, with the draft for the next step.
struct LookedUp {
  int row;          // in the call's inputs and in the cache
  int32_t* counts;  // [kCounts]
  int32_t* tokens;  // of the text; the predicted tokens follow
  int size;         // tokens of the text
  int limit;        // tokens that the call may still choose
  int matched = 0, predicted = 0, drafted = 0;  // how many tokens
  int allowed = 0;  // how many predicted tokens may be drafted
  double chance = 1;  // that all drafted tokens are chosen
  int first_row = 0;  // of the step: the row of the text's last token
  int chosen = 0;     // tokens that the step chose

  // Returns how likely predicted token `i` is chosen if those before it are.
  double chance_of(int i) const {
    const int32_t* counted = counts_of(i);
    return (counted[0] + 0.2 * length_of(i)) / (counted[1] + 2);
  }

  // Predicts at most `most` tokens: those after the longest match, or after the
  // latest of equally long matches.
  void predict(int most) {
    const int last = size - 1;
    int after = 0;
    matched = predicted = allowed = drafted = 0, chance = 1;
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
    allowed = predicted;
  }

  // Allows only the tokens of `given`, up to -1, as a draft. If they are not
  // those predicted, they replace the prediction, and have their own counts.
  void restrict(const int32_t* given, int most, int vocab) {
    allowed = 0;
    while (allowed < most && given[allowed] >= 0 && given[allowed] < vocab)
      ++allowed;
    if (allowed <= predicted && std::equal(given, given + allowed, tokens + size))
      return;
    matched = kGiven, predicted = allowed;
    std::copy_n(given, allowed, tokens + size);
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
  int length_of(int i) const {
    return matched == kGiven ? kGiven : std::min(matched + i, kMostMatched);
  }
  int32_t* counts_of(int i) const { return counts + 2 * (length_of(i) - 1); }
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

// Estimates the seconds of a step as a linear function of its number of rows,
// by least squares over the last hundred steps or so.
class StepCosts {
 public:
  void add(int rows, double secs) {
    // Other programs may have interrupted the step.
    if (weight_ > 4) secs = std::min(secs, 2 * of(rows));
    for (double* each : {&weight_, &squares_, &products_}) *each *= 0.99;
    weight_ += 1;
    const double dx = rows - rows_, dy = secs - secs_;
    rows_ += dx / weight_, secs_ += dy / weight_;
    squares_ += dx * (rows - rows_), products_ += dx * (secs - secs_);
  }

  bool has_any() const { return weight_ > 0; }

  double of(int rows) const {
    // If almost all steps had equally many rows, assume that a further row
    // costs a quarter of the mean row, so that larger steps are tried again.
    const double mean = secs_ / rows_;
    const double slope = (products_ + mean) / (squares_ + 4);
    return secs_ + std::clamp(slope, 0.0, mean) * (rows - rows_);
  }

 private:
  double weight_ = 0, rows_ = 0, secs_ = 0;  // sum of weights, and means
  double squares_ = 0, products_ = 0;        // sums of products of differences
};

// Sets how many tokens to draft for each text, so that the expected number of
// chosen tokens per second is largest.
inline void draft(std::vector<LookedUp>& texts, const StepCosts& costs) {
  const int rows = texts.size();
  if (!costs.has_any()) return;
  std::vector<LookedUp*> drafts;  // the text of each drafted token
  double expected = rows, best = kLeastGain * expected / costs.of(rows);
  size_t kept = 0;
  while (drafts.size() < kMostDraftedInAll) {
    LookedUp* likeliest = nullptr;
    double best_chance = 0.02;  // a lesser one is not worth the search
    for (LookedUp& each : texts) {
      const int most = std::min(each.limit - 1, kMostDrafted);
      if (each.drafted >= std::min(each.allowed, most)) continue;
      const double chance = each.chance * each.chance_of(each.drafted);
      if (chance > best_chance) likeliest = &each, best_chance = chance;
    }
    if (!likeliest) break;
    likeliest->chance = best_chance;
    ++likeliest->drafted;
    drafts.push_back(likeliest);
    expected += best_chance;
    const double rate = expected / costs.of(rows + int(drafts.size()));
    if (rate > best) best = rate, kept = drafts.size();
  }
  for (size_t i = kept; i < drafts.size(); ++i) --drafts[i]->drafted;
}

}  // namespace palm
