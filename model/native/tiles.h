// Products of up to 16 rows of bf16 with a weight of bf16 by AMX's tiles, on one core.
#ifndef LING3_TILES_H_
#define LING3_TILES_H_

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "shared.h"

namespace {

constexpr int64_t kTile = 16;   // rows of a tile, and its 32-bit columns
constexpr int64_t kDepth = 32;  // bf16 numbers in a row of a tile
constexpr int64_t kAhead = 256; // numbers of a row of w that are asked for before they are read
constexpr int64_t kFewest = 3;  // rows of x from which on tiles are faster than dot products

// Whether the operating system lets this process use tiles, which it must be asked for once.
bool MayUseTiles() {
  static const bool may = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
  return may;
}

// Up to 16 rows of x as the right operands of products of tiles: [depth / 32][16 pairs of neighbours][16 rows][2].
std::vector<Bf16> Paired(const Bf16* x, int64_t rows, int64_t depth) {
  std::vector<Bf16> out(depth * kTile);
  for (int64_t pair = 0; pair < depth / 2; ++pair) {
    for (int64_t t = 0; t < rows; ++t) std::memcpy(&out[(pair * kTile + t) * 2], x + t * depth + pair * 2, 4);
  }
  return out;
}

// Tiles 0 to 4, each of so many rows of 64 bytes, until the end of the block.
struct Tiles {
  explicit Tiles(std::initializer_list<uint8_t> rows) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    std::copy(rows.begin(), rows.end(), shape.rows);
    std::fill_n(shape.bytes, rows.size(), uint16_t(64));
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
};

// Outer, for `outputs` and `depth` that tiles divide. The left operand is w as it lies, so the sums come transposed.
void TiledOuter(const Bf16* w, int64_t outputs, int64_t depth, const Bf16* paired, int64_t rows, float* out,
                int64_t stride) {
  const Tiles tiles({kTile, kTile, kTile});
  alignas(64) float sums[kTile][kTile];
  for (int64_t o = 0; o < outputs; o += kTile) {
    const Bf16 *own = w + o * depth, *next = own + kTile * depth;
    _tile_zero(0);
    for (int64_t d = 0; d < depth; d += kDepth) {
      // What the next tiles read, in the order of the addresses; tiles themselves jump from row to row.
      for (int64_t line = 0; line < kTile; ++line) __builtin_prefetch(next + d * kTile + line * kDepth, 0, 2);
      _tile_loadd(1, own + d, depth * sizeof(Bf16));
      _tile_loadd(2, paired + d * kTile, 64);
      _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, sums, 64);
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t each = 0; each < kTile; ++each) out[t * stride + o + each] = sums[each][t];
    }
  }
}

// What Inner adds, for `depth` and `columns` that kDepth divides: neighbouring rows of w are brought side by side for the tiles.
void TiledInner(const Bf16* w, int64_t depth, int64_t columns, const Bf16* x, int64_t stride, int64_t rows,
                float* out) {
  alignas(64) uint16_t order[2][kDepth];
  for (int i = 0; i < kDepth; ++i) {
    order[0][i] = uint16_t(i / 2 + i % 2 * kDepth);
    order[1][i] = uint16_t(order[0][i] + kTile);
  }
  const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
  const uint8_t used = uint8_t(rows);
  const Tiles tiles({used, used, used, kTile, kTile});
  alignas(64) Bf16 pairs[2][kTile][kDepth];
  for (int64_t f = 0; f < depth; f += kDepth) {
    _tile_loadd(2, x + f, stride * sizeof(Bf16));
    for (int64_t c = 0; c < columns; c += kDepth) {
      for (int64_t p = 0; p < kTile; ++p) {
        const Bf16* at = w + (f + 2 * p) * columns + c;
        __builtin_prefetch(at + kAhead);
        __builtin_prefetch(at + columns + kAhead);
        const __m512i one = _mm512_loadu_si512(at), two = _mm512_loadu_si512(at + columns);
        _mm512_store_si512(pairs[0][p], _mm512_permutex2var_epi16(one, low, two));
        _mm512_store_si512(pairs[1][p], _mm512_permutex2var_epi16(one, high, two));
      }
      _tile_loadd(0, out + c, columns * sizeof(float));
      _tile_loadd(1, out + c + kTile, columns * sizeof(float));
      _tile_loadd(3, pairs[0], 64);
      _tile_loadd(4, pairs[1], 64);
      _tile_dpbf16ps(0, 2, 3);
      _tile_dpbf16ps(1, 2, 4);
      _tile_stored(0, out + c, columns * sizeof(float));
      _tile_stored(1, out + c + kTile, columns * sizeof(float));
    }
  }
}

}  // namespace
#endif

#endif  // LING3_TILES_H_
