// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Tiles of AMX in plain C++, for tests on CPUs without AMX: the operations of
// native/tiles.h as Intel's manual defines them (Intel 64 and IA-32 Architectures
// Software Developer's Manual, volume 2: TDPBF16PS, TDPBUSD, LDTILECFG). Compile
// with `-include` of this file.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define PALM_EMULATES_TILES

namespace palm {

struct EmulatedTiles {
  bool is_configured = false;
  int rows[8] = {}, words[8] = {};  // a word has 4 bytes
  uint32_t data[8][16][16] = {};
};

inline thread_local EmulatedTiles emulated_tiles;

// A CPU raises an exception where this ends the process.
inline void require(bool is_allowed) {
  if (!is_allowed) abort();
}

inline void configure_tiles(const uint8_t* config) {
  require(config[0] == 1);  // the palette
  for (int i = 1; i < 16; ++i) require(!config[i]);
  emulated_tiles = {};
  emulated_tiles.is_configured = true;
  for (int tile = 0; tile < 8; ++tile) {
    uint16_t bytes;
    memcpy(&bytes, config + 16 + 2 * tile, 2);
    emulated_tiles.rows[tile] = config[48 + tile];
    emulated_tiles.words[tile] = bytes / 4;
    require(bytes && bytes <= 64 && bytes % 4 == 0);
    require(config[48 + tile] && config[48 + tile] <= 16);
  }
}

inline void release_tiles() {
  require(emulated_tiles.is_configured);
  emulated_tiles = {};
}

template <int kTile>
inline void clear_tile() {
  require(emulated_tiles.is_configured);
  memset(emulated_tiles.data[kTile], 0, sizeof(emulated_tiles.data[kTile]));
}

template <int kTile>
inline void load_tile(const void* at, size_t stride) {
  clear_tile<kTile>();
  for (int r = 0; r < emulated_tiles.rows[kTile]; ++r)
    memcpy(emulated_tiles.data[kTile][r],
           static_cast<const char*>(at) + r * stride,
           4 * emulated_tiles.words[kTile]);
}

template <int kTile>
inline void store_tile(void* at, size_t stride) {
  require(emulated_tiles.is_configured);
  for (int r = 0; r < emulated_tiles.rows[kTile]; ++r)
    memcpy(static_cast<char*>(at) + r * stride, emulated_tiles.data[kTile][r],
           4 * emulated_tiles.words[kTile]);
}

// Denormals count as 0, and results that would be denormal become 0.
inline float flushed(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}
inline float half_of(uint32_t word, int half) {
  const uint32_t bits = half ? word & 0xffff0000 : word << 16;
  float x;
  memcpy(&x, &bits, 4);
  return flushed(x);
}

template <bool kIsBytes, int kTo, int kX, int kW>
inline void add_tile_product() {
  EmulatedTiles& all = emulated_tiles;
  require(all.is_configured && all.rows[kTo] == all.rows[kX] &&
          all.words[kX] == all.rows[kW] && all.words[kTo] == all.words[kW]);
  for (int m = 0; m < all.rows[kTo]; ++m) {
    float sums[2][16] = {};  // of the products of lower and of upper halves
    for (int k = 0; k < all.words[kX]; ++k) {
      const uint32_t x = all.data[kX][m][k];
      for (int n = 0; n < all.words[kTo]; ++n) {
        const uint32_t w = all.data[kW][k][n];
        if constexpr (kIsBytes) {
          for (int i = 0; i < 32; i += 8)
            all.data[kTo][m][n] += int32_t(uint8_t(x >> i)) * int8_t(w >> i);
        } else {
          for (int half = 0; half < 2; ++half)
            sums[half][n] = flushed(
              std::fmaf(half_of(x, half), half_of(w, half), sums[half][n]));
        }
      }
    }
    if constexpr (kIsBytes) continue;
    for (int n = 0; n < all.words[kTo]; ++n) {
      float sum;
      memcpy(&sum, &all.data[kTo][m][n], 4);
      sum = flushed(flushed(sum) + flushed(sums[0][n] + sums[1][n]));
      memcpy(&all.data[kTo][m][n], &sum, 4);
    }
  }
}

}  // namespace palm
