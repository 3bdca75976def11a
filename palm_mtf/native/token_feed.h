// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Sends the tokens of each step while a call runs, because to return from a call
// and to begin the next one takes longer than a step of a small model.

#pragma once

#include <unistd.h>

#include <cstdint>
#include <string>

namespace palm {

class TokenFeed {
 public:
  // `socket` does not block; the caller holds the other end. -1: no feed.
  explicit TokenFeed(int socket) : socket_(socket) {}

  // Adds a token to what `send` sends: three numbers, int32.
  void add(int32_t row, int32_t place, int32_t token) {
    const int32_t numbers[] = {row, place, token};
    if (socket_ >= 0)
      unsent_.append(reinterpret_cast<const char*>(numbers), sizeof(numbers));
  }

  // Sends as much as the socket has room for; the next `send` sends the rest.
  void send() {
    if (unsent_.empty()) return;
    const ssize_t sent = write(socket_, unsent_.data(), unsent_.size());
    if (sent > 0) unsent_.erase(0, sent);
  }

  // Returns whether the caller has sent anything, to end the call of steps.
  bool is_ended() const {
    char received[64];
    return socket_ >= 0 && read(socket_, received, sizeof(received)) > 0;
  }

 private:
  int socket_;
  std::string unsent_;
};

}  // namespace palm
