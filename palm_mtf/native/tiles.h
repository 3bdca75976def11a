// Copyright 2026 The palm_mtf authors.
// SPDX-License-Identifier: Apache-2.0
//
// Products by AMX, whose registers are tiles: 16 rows of 16 words each. A word
// of a row of x, and one of a panel, are two bfloat16 numbers or four bytes.
//
// A panel has the layout that tiles read: 16 of its rows and 16 of its columns
// are one tile. Each of 16 x 16 sums depends on one row and one column only, so
// a row has the same bits in any tile. No CPU with AMX has run this file yet:
// tests emulate the tiles, and read the instructions in the machine code.

#pragma once

#include <algorithm>

#include "panels.h"

namespace palm {

constexpr int kTileSize = 16;               // rows, and words in a row
constexpr int kTileBytes = 4 * kTileSize;   // of a row
constexpr int kPanelStride = 4 * kColumns;  // bytes of a panel's row

// Operations on the tiles of this thread. `configure_tiles` reads 64 bytes: the
// shapes of all tiles. `add_tile_product` adds the product of tiles kX and kW
// to tile kTo; bytes of kX are unsigned, those of kW signed.
void configure_tiles(const uint8_t* config);
void release_tiles();
template <int kTile>
void clear_tile();
template <int kTile>
void load_tile(const void* at, size_t stride);
template <int kTile>
void store_tile(void* at, size_t stride);
template <bool kIsBytes, int kTo, int kX, int kW>
void add_tile_product();

#if defined(PALM_EMULATES_TILES)
constexpr bool kHasTiles = true;  // tests define the operations
#elif defined(__AMX_BF16__) && defined(__AMX_INT8__) && \
  defined(__AVX512BF16__) && defined(__AVX512VNNI__)
constexpr bool kHasTiles = true;

// Assembly, because GCC's intrinsics take no template arguments.
inline void configure_tiles(const uint8_t* config) {
  asm volatile("ldtilecfg (%0)" ::"r"(config) : "memory");
}
inline void release_tiles() { asm volatile("tilerelease"); }
template <int kTile>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
inline void load_tile(const void* at, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(stride),
               "i"(kTile)
               : "memory");
}
template <int kTile>
inline void store_tile(void* at, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(stride),
               "i"(kTile)
               : "memory");
}
template <bool kIsBytes, int kTo, int kX, int kW>
inline void add_tile_product() {
  if constexpr (kIsBytes)
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kTo), "i"(kX),
                 "i"(kW));
  else
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kTo), "i"(kX),
                 "i"(kW));
}
#else
constexpr bool kHasTiles = false;
#endif

// Configures the tiles of this thread for products of `rows` rows; at its end,
// releases them, so that Linux need not save them when threads take turns.
// Tiles 0 to 3 are sums, 4 is rows of x, and 5 to 7 are parts of a panel.
class Tiles {
 public:
  explicit Tiles(int rows) {
    alignas(64) uint8_t config[64] = {1};
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = kTileBytes;
      config[48 + tile] = tile < 5 ? std::min(rows, kTileSize) : kTileSize;
    }
    configure_tiles(config);
  }
  Tiles(const Tiles&) = delete;
  ~Tiles() { release_tiles(); }

  // Multiplies rows of x, `stride` bytes apart, by a panel. If `begins`, writes
  // the products to the sums, [rows, kColumns]; else adds them. Rows of x and
  // columns of the panel have `steps` times kTileSize words.
  template <bool kIsBytes>
  void multiply(const void* x, size_t stride, const void* panel, int steps,
                bool begins, Part ahead, void* sums) const {
    auto row = static_cast<const uint8_t*>(x);
    auto w = static_cast<const uint8_t*>(panel);
    auto to = static_cast<uint8_t*>(sums);
    if (begins) {
      clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    } else {
      load_tile<0>(to, kPanelStride);
      load_tile<1>(to + kTileBytes, kPanelStride);
      load_tile<2>(to + 2 * kTileBytes, kPanelStride);
      load_tile<3>(to + 3 * kTileBytes, kPanelStride);
    }
    for (int i = 0; i < steps;
         ++i, row += kTileBytes, w += kTileSize * kPanelStride) {
      ahead.prefetch();
      load_tile<4>(row, stride);
      load_tile<5>(w, kPanelStride);
      load_tile<6>(w + kTileBytes, kPanelStride);
      add_tile_product<kIsBytes, 0, 4, 5>();
      load_tile<7>(w + 2 * kTileBytes, kPanelStride);
      add_tile_product<kIsBytes, 1, 4, 6>();
      load_tile<5>(w + 3 * kTileBytes, kPanelStride);
      add_tile_product<kIsBytes, 2, 4, 7>();
      add_tile_product<kIsBytes, 3, 4, 5>();
    }
    store_tile<0>(to, kPanelStride);
    store_tile<1>(to + kTileBytes, kPanelStride);
    store_tile<2>(to + 2 * kTileBytes, kPanelStride);
    store_tile<3>(to + 3 * kTileBytes, kPanelStride);
  }
};

// The sums of one tile's rows with a panel.
struct alignas(64) TileSums {
  float rows[kTileSize][kColumns];
};

// Calls use(first row of a tile, its first row that no earlier tile has, its
// end). The last tile ends at the last row, and may repeat rows of the tile
// before, so that all tiles have the same size and need one configuration.
template <class Use>
inline void for_tiles(int num_rows, Use use) {
  for (int row = 0; row < num_rows; row += kTileSize)
    use(std::max(0, std::min(row, num_rows - kTileSize)), row,
        std::min(row + kTileSize, num_rows));
}

}  // namespace palm
