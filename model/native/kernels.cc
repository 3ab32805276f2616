// What a decode step does with one layer of the model's weights and state, for XLA's foreign function interface.
//
// A handler gets a whole stack of weights and the number of a layer, so nothing is sliced or copied before it. Weights
// are read once, in the order in which they lie in memory, by all cores; sums are fp32. One form is compiled, chosen by
// the compiler's flags: vectors of LING3_BYTES bytes, on processors with avx512_bf16 its dot products, on those with
// amx_bf16 also its tiles, or, without LING3_BYTES, plain loops, which are what the other forms are tested against.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "shared.h"

namespace {

constexpr int64_t kRows = 64;     // rows of x that stay in the second cache while a task's weights pass
constexpr int64_t kTokens = 64;   // cached tokens whose scores are held at once
constexpr int64_t kSpan = 512;    // cached tokens of a task
#ifdef __AVX512BF16__
constexpr int64_t kStream = 8;    // rows of x below which one row of w is read after the other, as memory is fastest
#else
constexpr int64_t kStream = 5;
#endif
constexpr int64_t kSums = 4096;   // numbers of a task that adds up parts
constexpr int64_t kNear = 4 << 20;  // bytes of the next call that idle threads read ahead
constexpr int64_t kFar = 1024;    // numbers of a single row of w that the second cache is asked for before they are read
constexpr int64_t kBlock = 512;   // logits between two looks at the largest
constexpr int64_t kLogits = 1 << 14;  // logits of a task
constexpr int64_t kScores = 16;   // experts of a task of the router
constexpr int64_t kLine = 16;     // numbers of fp32 in a line of the caches
constexpr int64_t kParts = 16;    // tasks of a product over rows of the weight, each with sums of its own

#ifdef LING3_BYTES
typedef float Vector __attribute__((vector_size(LING3_BYTES)));
typedef uint32_t Bits __attribute__((vector_size(LING3_BYTES)));
constexpr int kPairs = LING3_BYTES / 4;

Bits Load(const Bf16* from) {
  Bits bits;
  std::memcpy(&bits, from, LING3_BYTES);
  return bits;
}
// A 32 bit lane holds two neighbours; the lower address is the lower half.
Vector Even(Bits bits) { return (Vector)(bits << 16); }
Vector Odd(Bits bits) { return (Vector)(bits & 0xffff0000u); }
constexpr int64_t kWide = 2 * kPairs;  // numbers of bf16 in a vector
#endif

// <x, w> of fp32 numbers, in fp32.
float Product(const float* x, const float* w, int64_t depth) {
  float total = 0;
  int64_t d = 0;
#ifdef LING3_BYTES
  Vector sums[4] = {};
  for (; d + 4 * kPairs <= depth; d += 4 * kPairs) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      Vector one, two;
      std::memcpy(&one, x + d + u * kPairs, LING3_BYTES);
      std::memcpy(&two, w + d + u * kPairs, LING3_BYTES);
      sums[u] += one * two;
    }
  }
  for (int lane = 0; lane < 4 * kPairs; ++lane) total += sums[lane % 4][lane / 4];
#endif
  for (; d < depth; ++d) total += x[d] * w[d];
  return total;
}

// Outer gives out[t * stride + o] = <x[t], w[o]> for all `rows` rows of x and `outputs` rows of w.
#if defined(__AVX512BF16__)
// y[t][o] = sum over d of x[t][d] w[o][d], for O outputs and T rows at once, each as U sums side by side. Sums stay in
// registers only where the loops over t, o and u are unrolled. Of several outputs the next as many are asked for ahead,
// of one what lies a little behind.
template <int O, int T, int U>
void Dots(const Bf16* w, int64_t step, const Bf16* const* x, int64_t depth, float out[T][O]) {
  __m512 sum[T][O][U];
#pragma GCC unroll 16
  for (int i = 0; i < T * O * U; ++i) sum[i / (O * U)][i / U % O][i % U] = _mm512_setzero_ps();
  const Bf16* rows[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) rows[t] = x[t];
  const auto add = [&](int64_t d, int u, __mmask32 mask) __attribute__((always_inline)) {
    __m512bh wide[O];
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
      if (O > 1) __builtin_prefetch(w + (O + o) * step + d);
      else __builtin_prefetch(w + d + kFar, 0, 2);
      wide[o] = (__m512bh)_mm512_maskz_loadu_epi16(mask, w + o * step + d);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m512bh each = (__m512bh)_mm512_maskz_loadu_epi16(mask, rows[t] + d);
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o) sum[t][o][u] = _mm512_dpbf16_ps(sum[t][o][u], wide[o], each);
    }
  };
  int64_t d = 0;
  for (; d + 32 * U <= depth; d += 32 * U) {
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) add(d + 32 * u, u, ~__mmask32(0));
  }
  for (; d + 32 <= depth; d += 32) add(d, 0, ~__mmask32(0));
  if (d < depth) add(d, 0, (__mmask32(1) << (depth - d)) - 1);
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
      __m512 total = sum[t][o][0];
#pragma GCC unroll 8
      for (int u = 1; u < U; ++u) total = _mm512_add_ps(total, sum[t][o][u]);
      out[t][o] = _mm512_reduce_add_ps(total);
    }
  }
}

template <int O, int T, int U>
void Tile(const Bf16* w, int64_t depth, const Bf16* const* x, float* out, int64_t stride) {
  float tile[T][O];
  Dots<O, T, U>(w, depth, x, depth, tile);
  for (int t = 0; t < T; ++t) std::memcpy(out + t * stride, tile[t], sizeof(tile[t]));
}

void Outer(const Bf16* w, int64_t outputs, int64_t depth, const Bf16* const* x, int64_t rows, float* out,
           int64_t stride) {
  for (int64_t from = 0; from < rows; from += kRows) {
    const int64_t to = std::min(rows, from + kRows);
    int64_t o = 0;
    for (; to - from >= kStream && o + 4 <= outputs; o += 4) {
      int64_t t = from;
      for (; t + 4 <= to; t += 4) Tile<4, 4, 1>(w + o * depth, depth, x + t, out + t * stride + o, stride);
      for (; t < to; ++t) Tile<4, 1, 1>(w + o * depth, depth, x + t, out + t * stride + o, stride);
    }
    for (; o < outputs; ++o) {
      int64_t t = from;
      for (; t + 4 <= to; t += 4) Tile<1, 4, 2>(w + o * depth, depth, x + t, out + t * stride + o, stride);
      for (; t + 2 <= to; t += 2) Tile<1, 2, 2>(w + o * depth, depth, x + t, out + t * stride + o, stride);
      for (; t < to; ++t) Tile<1, 1, 4>(w + o * depth, depth, x + t, out + t * stride + o, stride);
    }
  }
}
#elif defined(LING3_BYTES)
constexpr int64_t kPart = 384;  // numbers of a row at a time: kBand rows of x in fp32 stay in the first cache
constexpr int64_t kBand = 16;   // rows of x for which a part of w is read once
constexpr int64_t kTall = 4;    // rows of x whose sums with two rows of w stay in registers
#ifdef __aarch64__
#define LING3_VECTOR "+w"
#else
#define LING3_VECTOR "+x"
#endif

// The sum of each of four vectors.
void Totals(Vector one, Vector two, Vector three, Vector four, float* out) {
#ifdef __AVX2__
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(one, two), _mm256_hadd_ps(three, four));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
  const Vector each[] = {one, two, three, four};
  for (int i = 0; i < 4; ++i) {
    out[i] = 0;
    for (int lane = 0; lane < kPairs; ++lane) out[i] += each[i][lane];
  }
#endif
}

// `count` numbers of x in fp32, in the order in which Even and Odd take those of a vector; kWide divides `count`.
void Spread(const Bf16* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += kWide) {
    const Bits bits = Load(x + i);
    const Vector even = Even(bits), odd = Odd(bits);
    std::memcpy(out + i, &even, LING3_BYTES);
    std::memcpy(out + i + kPairs, &odd, LING3_BYTES);
  }
}

// Products of `depth` numbers of T spread rows of x and O rows of w, each as U sums side by side; `more` adds them to
// what is there. Of several rows of w the next as many are asked for ahead, of one what lies a little behind.
template <int O, int T, int U>
void Tile(const Bf16* w, int64_t step, const float* x, int64_t depth, float* out, int64_t stride, bool more) {
  constexpr int kFours = (T * O + 3) / 4;
  Vector sum[kFours * 4][U];
#pragma GCC unroll 16
  for (int i = 0; i < kFours * 4 * U; ++i) sum[i / U][i % U] = Vector{};
  const auto add = [&](int64_t d, int u) __attribute__((always_inline)) {
    Vector wide[2][O];
#pragma GCC unroll 2
    for (int o = 0; o < O; ++o) {
      if (O > 1) __builtin_prefetch(w + (O + o) * step + d);
      else __builtin_prefetch(w + d + kFar, 0, 2);
      const Bits bits = Load(w + o * step + d);
      wide[0][o] = Even(bits), wide[1][o] = Odd(bits);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        Vector each;
        std::memcpy(&each, x + t * depth + d + half * kPairs, LING3_BYTES);
        if (O > 1) asm("" : LING3_VECTOR(each));  // in a register: it would be loaded once for each row of w
#pragma GCC unroll 2
        for (int o = 0; o < O; ++o) sum[t * O + o][u] += wide[half][o] * each;
      }
    }
  };
  int64_t d = 0;
  for (; d + kWide * U <= depth; d += kWide * U) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) add(d + kWide * u, u);
  }
  for (; d < depth; d += kWide) add(d, 0);
  float totals[kFours * 4];
#pragma GCC unroll 16
  for (int i = 0; i < T * O; ++i) {
#pragma GCC unroll 4
    for (int u = 1; u < U; ++u) sum[i][0] += sum[i][u];
  }
#pragma GCC unroll 4
  for (int i = 0; i < kFours * 4; i += 4) Totals(sum[i][0], sum[i + 1][0], sum[i + 2][0], sum[i + 3][0], totals + i);
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    float* const to = out + t * stride;
#pragma GCC unroll 2
    for (int o = 0; o < O; ++o) to[o] = more ? to[o] + totals[t * O + o] : totals[t * O + o];
  }
}

// Tile for `rows` rows of x, in groups of nearly the same size.
template <int O>
void Tiles(const Bf16* w, int64_t step, const float* x, int64_t depth, int64_t rows, float* out, int64_t stride,
           bool more) {
  for (int64_t t = 0, count; t < rows; t += count) {
    const int64_t groups = (rows - t + kTall - 1) / kTall;
    count = (rows - t + groups - 1) / groups;
    const auto take = [&](auto tile) { tile(w, step, x + t * depth, depth, out + t * stride, stride, more); };
    if (count == 4) take(Tile<O, 4, O == 1 ? 2 : 1>);
    if (count == 3) take(Tile<O, 3, O == 1 ? 2 : 1>);
    if (count == 2) take(Tile<O, 2, 2>);
    if (count == 1) take(Tile<O, 1, O == 1 ? 4 : 2>);
  }
}

void Outer(const Bf16* w, int64_t outputs, int64_t depth, const Bf16* const* x, int64_t rows, float* out,
           int64_t stride) {
  alignas(64) float wide[kRows * kPart];
  const int64_t whole = depth / kWide * kWide;
  for (int64_t from = 0; from < rows; from += kRows) {
    const int64_t own = std::min(kRows, rows - from);
    const bool few = own < kStream;
    const int64_t part = few ? kRows * kPart / kStream / kWide * kWide : kPart;
    float* const to = out + from * stride;
    for (int64_t d = 0; d < whole; d += part) {
      const int64_t count = std::min(part, whole - d);
      for (int64_t t = 0; t < own; ++t) Spread(x[from + t] + d, count, wide + t * count);
      for (int64_t t = 0; t < own; t += kBand) {
        const int64_t band = std::min(kBand, own - t);
        const auto take = [&](auto tiles, int64_t o) {
          tiles(w + o * depth + d, depth, wide + t * count, count, band, to + t * stride + o, stride, d > 0);
        };
        int64_t o = 0;
        for (; !few && o + 2 <= outputs; o += 2) take(Tiles<2>, o);
        for (; o < outputs; ++o) take(Tiles<1>, o);
      }
    }
    for (int64_t t = 0; t < own && whole < depth; ++t) {
      for (int64_t o = 0; o < outputs; ++o) {
        float total = whole ? to[t * stride + o] : 0;
        for (int64_t d = whole; d < depth; ++d) total += Widen(x[from + t][d]) * Widen(w[o * depth + d]);
        to[t * stride + o] = total;
      }
    }
  }
}
#else
void Outer(const Bf16* w, int64_t outputs, int64_t depth, const Bf16* const* x, int64_t rows, float* out,
           int64_t stride) {
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t o = 0; o < outputs; ++o) {
      float total = 0;
      for (int64_t d = 0; d < depth; ++d) total += Widen(x[t][d]) * Widen(w[o * depth + d]);
      out[t * stride + o] = total;
    }
  }
}
#endif

#ifdef __AMX_BF16__
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
#endif

#ifdef LING3_BYTES
#ifdef __AVX512BF16__
constexpr int kDeep = 8;  // rows of w between which sums stay in registers
#else
constexpr int kDeep = 4;
#endif

// sums[t] += sum over F rows of w, from row f on, of x[t][f] w[f], for T rows of x and whole vectors of columns.
#ifdef __AVX512BF16__
// Two neighbouring rows are brought side by side for the dot products, so sums lie as the columns do.
template <int F, int T>
void Sums(const Bf16* w, int64_t step, int64_t f, int64_t columns, const Bf16* const* x, float* const* sums) {
  constexpr int kTwos = (F + 1) / 2;
  alignas(64) uint16_t order[2][32];
  for (int i = 0; i < 32; ++i) order[0][i] = uint16_t(i / 2 + i % 2 * 32), order[1][i] = uint16_t(order[0][i] + 16);
  const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
  __m512bh each[T][kTwos];
#pragma GCC unroll 16
  for (int i = 0; i < T * kTwos; ++i) {
    const Bf16* at = x[i / kTwos] + f + i % kTwos * 2;
    each[i / kTwos][i % kTwos] = (__m512bh)_mm512_set1_epi32(int(at[0] | (F > 1 ? uint32_t(at[1]) << 16 : 0)));
  }
  float* to[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) to[t] = sums[t];
  for (int64_t c = 0; c < columns; c += kWide) {
    __m512bh pairs[kTwos][2];
#pragma GCC unroll 8
    for (int i = 0; i < kTwos; ++i) {
      const Bf16* at = w + (f + 2 * i) * step + c;
      const __m512i one = _mm512_loadu_si512(at), two = F > 1 ? _mm512_loadu_si512(at + step) : _mm512_setzero_si512();
      pairs[i][0] = (__m512bh)_mm512_permutex2var_epi16(one, low, two);
      pairs[i][1] = (__m512bh)_mm512_permutex2var_epi16(one, high, two);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m512 sum = _mm512_loadu_ps(to[t] + c + half * kPairs);
#pragma GCC unroll 8
        for (int i = 0; i < kTwos; ++i) sum = _mm512_dpbf16_ps(sum, pairs[i][half], each[t][i]);
        _mm512_storeu_ps(to[t] + c + half * kPairs, sum);
      }
    }
  }
}
#else
// Of each vector of w the even columns' sums lie before the odd ones'.
template <int F, int T>
void Sums(const Bf16* w, int64_t step, int64_t f, int64_t columns, const Bf16* const* x, float* const* sums) {
  Vector each[T][F];
#pragma GCC unroll 16
  for (int i = 0; i < T * F; ++i) each[i / F][i % F] = Vector{} + Widen(x[i / F][f + i % F]);
  float* to[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) to[t] = sums[t];
  for (int64_t c = 0; c < columns; c += kWide) {
    Vector wide[2][F];
#pragma GCC unroll 8
    for (int i = 0; i < F; ++i) {
      const Bits bits = Load(w + (f + i) * step + c);
      wide[0][i] = Even(bits), wide[1][i] = Odd(bits);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Vector sum;
        std::memcpy(&sum, to[t] + c + half * kPairs, LING3_BYTES);
#pragma GCC unroll 8
        for (int i = 0; i < F; ++i) sum += wide[half][i] * each[t][i];
        std::memcpy(to[t] + c + half * kPairs, &sum, LING3_BYTES);
      }
    }
  }
}
#endif
#endif

// out[t][c] += sum over f of x[t][f] w[f][c], for `columns` columns of w. Ranges of rows of w may come one after the
// other; the sums are in `out` at the end of the last one, of columns that fill no vector at once.
class Inner {
 public:
  Inner(int64_t columns, int64_t rows, float* const* out) : columns_(columns), rows_(rows), out_(out) {
#ifdef LING3_BYTES
    whole_ = columns / kWide * kWide;
    sums_.resize(rows * whole_ + kLine);
    float* first = sums_.data();
    while (reinterpret_cast<uintptr_t>(first) % (kLine * sizeof(float))) ++first;
    for (int64_t t = 0; t < rows; ++t) at_.push_back(first + t * whole_);
#endif
  }

  void Add(const Bf16* w, int64_t step, int64_t depth, const Bf16* const* x) {
#ifdef LING3_BYTES
    int64_t t = 0;
    for (; t + 4 <= rows_; t += 4) All<4>(w, step, depth, x + t, &at_[t]);
    for (; t + 2 <= rows_; t += 2) All<2>(w, step, depth, x + t, &at_[t]);
    for (; t < rows_; ++t) All<1>(w, step, depth, x + t, &at_[t]);
#endif
    for (int64_t c = whole_; c < columns_; ++c) {
      for (int64_t t = 0; t < rows_; ++t) {
        for (int64_t f = 0; f < depth; ++f) out_[t][c] += Widen(x[t][f]) * Widen(w[f * step + c]);
      }
    }
  }

  ~Inner() {
#ifdef LING3_BYTES
    for (int64_t t = 0; t < rows_; ++t) {
      for (int64_t c = 0; c < whole_; ++c) {
#ifdef __AVX512BF16__
        out_[t][c] += at_[t][c];
#else
        out_[t][c] += at_[t][c / kWide * kWide + c % 2 * kPairs + c % kWide / 2];
#endif
      }
    }
#endif
  }

 private:
#ifdef LING3_BYTES
  template <int T>
  void All(const Bf16* w, int64_t step, int64_t depth, const Bf16* const* x, float* const* sums) const {
    int64_t f = 0;
    for (; f + kDeep <= depth; f += kDeep) Sums<kDeep, T>(w, step, f, whole_, x, sums);
    for (; f < depth; ++f) Sums<1, T>(w, step, f, whole_, x, sums);
  }
#endif

  const int64_t columns_, rows_;
  float* const* out_;
  int64_t whole_ = 0;          // columns that fill vectors
  std::vector<float> sums_;
  std::vector<float*> at_;
};

#ifdef __AMX_BF16__
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
#endif

// What Parallel gives to the threads.
//
// Tasks are claimed one by one, by this thread too, and it waits only for tasks that a running thread has claimed: so
// it cannot wait for a pool whose threads all wait. It takes the first ones, the others take the last ones.
struct Work {
  std::function<void(int64_t)> run;
  int64_t count;
  Range next_read;  // of the call that came after this one the last time
  std::atomic<int64_t> claimed{0}, front{0}, back{0}, done{0};

  void Drain(bool from_front) {
    while (claimed.fetch_add(1) < count) {
      run(from_front ? front.fetch_add(1) : count - 1 - back.fetch_add(1));
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Threads of the pool that have drained their work and look for more for a moment: to wake one that sleeps takes as long
// as to read a megabyte. Meanwhile they bring what the next call reads into the caches: a decode step has the same
// calls as the one before it. Then they yield all the time, so whatever else can run goes first.
class Crew {
 public:
  // Gives work, which reads `own`, to threads that look for some, at most so many; returns how many they are.
  int64_t Offer(const std::shared_ptr<Work>& work, Range own, int64_t most) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (after_.size() > kKnown) after_.clear();
    after_[last_] = own;
    last_ = own.end;
    if (const auto found = after_.find(last_); found != after_.end()) work->next_read = found->second;
    const int64_t there = std::min(most, looking_.load() - int64_t(offers_.size()));
    for (int64_t i = 0; i < there; ++i) offers_.push_back(work);
    offered_.store(offers_.size(), std::memory_order_release);
    return std::max<int64_t>(0, there);
  }

  // Drains work, and then what is offered, until nothing was for kLook.
  void Serve(std::shared_ptr<Work> work) {
    for (work->Drain(false); (work = Look(work->next_read)); work->Drain(false)) {
    }
  }

 private:
  static constexpr auto kLook = std::chrono::microseconds(200);
  static constexpr int64_t kAtOnce = 4096;  // bytes that are asked for before a look for work
  static constexpr size_t kKnown = 1 << 14;  // calls whose successor is known: those of dozens of artifacts

  std::shared_ptr<Work> Look(Range ahead) {
    const auto end = std::chrono::steady_clock::now() + kLook;
    std::shared_ptr<Work> found;
    int64_t read = 0;
    // One core is the caller's: more threads than there are others would look instead of it.
    if (looking_.load() + 1 >= int64_t(std::thread::hardware_concurrency())) return nullptr;
    looking_.fetch_add(1);
    while (!found && std::chrono::steady_clock::now() < end) {
      if (!offered_.load(std::memory_order_acquire)) {
        if (read >= kNear || read >= ahead.bytes * ahead.groups) {
          std::this_thread::yield();
          continue;
        }
        const char* at = ahead.end - read / ahead.bytes * ahead.step - read % ahead.bytes;
        for (int64_t i = 64; i <= kAtOnce; i += 64) __builtin_prefetch(at - i, 0, 2);
        read += kAtOnce;
        continue;
      }
      const std::lock_guard<std::mutex> held(mutex_);
      if (offers_.empty()) continue;
      found = offers_.back().lock();  // none of a call that is over
      offers_.pop_back();
      offered_.store(offers_.size(), std::memory_order_release);
    }
    looking_.fetch_sub(1);
    return found;
  }

  std::mutex mutex_;
  std::vector<std::weak_ptr<Work>> offers_;
  std::unordered_map<const char*, Range> after_;
  const char* last_ = nullptr;
  std::atomic<int64_t> offered_{0}, looking_{0};
};

}  // namespace

void Parallel(ffi::ThreadPool pool, int32_t devices, int64_t count, Range own, std::function<void(int64_t)> run) {
  static Crew* const crew = new Crew;  // threads of the pool may outlive everything that is static
  const int64_t helpers = std::min({Cores(devices), pool.num_threads(), count}) - 1;
  auto work = std::make_shared<Work>();
  work->run = std::move(run);
  work->count = count;
  if (helpers > 0) {
    for (int64_t i = crew->Offer(work, own, helpers); i < helpers; ++i) pool.Schedule([work] { crew->Serve(work); });
  }
  work->Drain(true);
  while (work->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

namespace {

std::vector<const Bf16*> Pointers(const Bf16* from, int64_t rows, int64_t stride) {
  std::vector<const Bf16*> out(rows);
  for (int64_t t = 0; t < rows; ++t) out[t] = from + t * stride;
  return out;
}

const Bf16* Data(const Bf16s& buffer) { return reinterpret_cast<const Bf16*>(buffer.untyped_data()); }

// Weights [s, n, ..., Y, X], of which one layer n is taken: matrices of s (times the axes between) groups.
struct Stack {
  const Bf16* data;
  int64_t shards, layers, heads, rows, columns;

  Stack(const Bf16s& w, int64_t inner) : data(Data(w)) {
    const auto size = w.dimensions();
    shards = size[0], layers = size[1], heads = inner, columns = size[size.size() - 1];
    rows = 1;
    for (size_t axis = 2; axis + 1 < size.size(); ++axis) rows *= size[axis];
    rows /= heads;
  }
  int64_t groups() const { return shards * heads; }
  const Bf16* group(int64_t g, int64_t layer) const {
    return data + (((g / heads) * layers + layer) * heads + g % heads) * rows * columns;
  }
  Range range(int64_t layer) const {
    const int64_t bytes = heads * rows * columns * int64_t(sizeof(Bf16));
    return {reinterpret_cast<const char*>(group(groups() - 1, layer) + rows * columns), bytes, layers * bytes, shards};
  }
};

// x [T, X] or [T, groups, X], w [s, n, ..., X] -> y [T, groups, Y]: products over the last axis of the weights.
ffi::Error Columns(ffi::ThreadPool pool, Bf16s x, Bf16s w, Ints layer_of, ffi::Result<Floats> y, int32_t devices) {
  const bool own = x.dimensions().size() == 3;
  const Stack stack(w, own ? w.dimensions()[2] : 1);
  const int64_t layer = layer_of.typed_data()[0], rows = x.dimensions()[0], depth = stack.columns;
  if (ffi::Error error = CheckLayer(layer, stack.layers); error.failure()) return error;
  const int64_t width = stack.groups() * stack.rows, tasks = (stack.rows + kOutputs - 1) / kOutputs;
  const Bf16* from = Data(x);
  const int64_t step = own ? stack.groups() * depth : depth, used = Used(from, rows, step);
  float* out = y->typed_data();
#ifdef __AMX_BF16__
  const bool tiled = !own && used >= kFewest && used <= kTile && depth % kDepth == 0 && MayUseTiles();
  const auto paired = std::make_shared<std::vector<Bf16>>(tiled ? Paired(from, used, depth) : std::vector<Bf16>());
#endif
  Parallel(pool, devices, rows - used + stack.groups() * tasks, stack.range(layer), [=](int64_t task) {
    if (task < rows - used) return void(std::fill_n(out + (used + task) * width, width, 0.0f));
    task -= rows - used;
    const int64_t g = task / tasks, o = task % tasks * kOutputs, count = std::min(kOutputs, stack.rows - o);
    const Bf16* weights = stack.group(g, layer) + o * depth;
    float* to = out + g * stack.rows + o;
    int64_t done = 0;
#ifdef __AMX_BF16__
    if (tiled) TiledOuter(weights, done = count / kTile * kTile, depth, paired->data(), used, to, width);
#endif
    const auto at = Pointers(from + (own ? g * depth : 0), used, step);
    Outer(weights + done * depth, count - done, depth, at.data(), used, to + done, width);
  });
  return ffi::Error::Success();
}

// x [T, groups, Y], w [s, n, ..., Y, X] -> y [T, X], the sum over all groups, or y [T, groups, X]: products over Y.
ffi::Error Rows(ffi::ThreadPool pool, Bf16s x, Bf16s w, Ints layer_of, ffi::Result<Floats> y, int32_t devices) {
  const bool own = y->dimensions().size() == 3;
  const Stack stack(w, own ? w.dimensions()[2] : 1);
  const int64_t layer = layer_of.typed_data()[0], rows = x.dimensions()[0];
  if (ffi::Error error = CheckLayer(layer, stack.layers); error.failure()) return error;
  const int64_t groups = stack.groups(), columns = stack.columns, width = own ? groups * columns : columns;
  const int64_t depth = own ? stack.rows : groups * stack.rows;  // rows of the weight that meet in one sum
  const int64_t part = own ? depth : std::max(kRows, (depth + kParts - 1) / kParts), parts = (depth + part - 1) / part;
  const Bf16* from = Data(x);
  const int64_t xs = groups * stack.rows, used = Used(from, rows, xs);
  float* out = y->typed_data();
#ifdef __AMX_BF16__
  const bool tiled = !own && used >= kFewest && used <= kTile && columns % kDepth == 0 && MayUseTiles();
#endif
  // Of all parts but the first, which has its sums in y.
  const std::unique_ptr<float[]> others(new float[(parts - 1) * used * columns]);
  Parallel(pool, devices, (own ? groups : 1) * parts, stack.range(layer), [=, &others](int64_t task) {
    const int64_t group = task / parts, number = task % parts;
    const int64_t first = group * depth + number * part, end = std::min(first + part, (group + 1) * depth);
    std::vector<float*> to(used);
    for (int64_t t = 0; t < used; ++t) {
      to[t] = number ? &others[((number - 1) * used + t) * columns] : out + t * width + group * columns;
      std::fill_n(to[t], columns, 0.0f);
    }
    Inner inner(columns, used, to.data());
    for (int64_t f = first; f < end;) {
      const int64_t g = f / stack.rows, row = f % stack.rows, count = std::min({kRows, stack.rows - row, end - f});
      const Bf16 *weights = stack.group(g, layer) + row * columns, *own_x = from + f;
      int64_t done = 0;
#ifdef __AMX_BF16__
      if (tiled && (done = count / kDepth * kDepth)) TiledInner(weights, done, columns, own_x, xs, used, to[0]);
#endif
      const auto at = Pointers(own_x + done, used, xs);
      inner.Add(weights + done * columns, columns, count - done, at.data());
      f += count;
    }
  });
  const int64_t sums = parts > 1 ? used * columns : 0;
  Parallel(pool, devices, (sums + kSums - 1) / kSums, {}, [=, &others](int64_t task) {
    for (int64_t each = 0; each < parts - 1; ++each) {
      for (int64_t i = task * kSums; i < std::min(sums, (task + 1) * kSums); ++i) out[i] += others[each * sums + i];
    }
  });
  std::fill_n(out + used * width, (rows - used) * width, 0.0f);
  return ffi::Error::Success();
}

// e to the power of each of `count` numbers up to 0, to 3e-7 of it down to -3 and to 4e-6 anywhere; 0 below -87.
void Exponentials(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = values[i], high = (x < -87 ? -87.0f : x) * 1.44269504f;
    const int32_t whole = int32_t(high - 0.5f);  // so that what is left lies between -0.5 and 0.5
    const float f = (high - float(whole)) * 0.693147181f;
    const float power = 1 + f * (1 + f * (0.5f + f * (1 / 6.0f + f * (1 / 24.0f + f * (1 / 120.0f + f / 720)))));
    const uint32_t bits = uint32_t(whole + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    values[i] = power * scale * float(x >= -87);  // a product, since a choice would keep gcc from making vectors
  }
}

// 1 / (1 + e^-x) of each of `count` numbers.
void Sigmoids(const float* x, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] = -std::abs(x[i]);
  Exponentials(out, count);
  for (int64_t i = 0; i < count; ++i) out[i] = (x[i] < 0 ? out[i] : 1.0f) / (1 + out[i]);
}

}  // namespace

void Swiglu(const float* gate, const float* up, int64_t count, float limit, Bf16* out) {
  float open[kOutputs];
  Sigmoids(gate, count, open);
  for (int64_t o = 0; o < count; ++o) {
    out[o] = Round(std::min(gate[o] * open[o], limit) * std::clamp(up[o], -limit, limit));
  }
}

namespace {

// The chosen experts of one layer: sum over a of share[t, a] down(min(silu(gate x_t), limit) * clip(up x_t, limit)).
//
// x [T, D], gate_up [s, n, e, 2, F, D], down [s, n, e, D, F], chosen [T, A] with numbers of 0 to s e - 1 (others choose
// nothing), share [T, A], limit [1], infinite for none -> y [T, D].
ffi::Error Experts(ffi::ThreadPool pool, Bf16s x, Bf16s gate_up, Bf16s down, Ints layer_of, Ints chosen, Floats share,
                   Floats limit_of, ffi::Result<Floats> y, int32_t devices) {
  const int64_t each = gate_up.dimensions()[2], experts = gate_up.dimensions()[0] * each;
  const Stack up(gate_up, each), out_of(down, each);
  const int64_t layer = layer_of.typed_data()[0], tokens = x.dimensions()[0], top = chosen.dimensions()[1];
  if (ffi::Error error = CheckLayer(layer, up.layers); error.failure()) return error;
  const int64_t dim = up.columns, width = out_of.columns;
  struct Pair { const Bf16* x; float share; int64_t token; };
  std::vector<int64_t> start(experts + 1, 0);
  const int32_t* choice = chosen.typed_data();
  const float *weight = share.typed_data(), limit = limit_of.typed_data()[0];
  for (int64_t i = 0; i < tokens * top; ++i) if (choice[i] >= 0 && choice[i] < experts) ++start[choice[i] + 1];
  std::vector<int64_t> used;
  for (int64_t e = 0; e < experts; ++e) {
    if (start[e + 1]) used.push_back(e);
    start[e + 1] += start[e];
  }
  std::vector<Pair> pairs(start[experts]);
  std::vector<int64_t> next(start.begin(), start.end() - 1);
  for (int64_t i = 0; i < tokens * top; ++i) {
    if (choice[i] >= 0 && choice[i] < experts) pairs[next[choice[i]]++] = {Data(x) + i / top * dim, weight[i], i / top};
  }
  std::vector<const Bf16*> rows(pairs.size()), hidden_at(pairs.size());
  std::vector<Bf16> hidden(pairs.size() * width);
  for (size_t i = 0; i < pairs.size(); ++i) rows[i] = pairs[i].x, hidden_at[i] = hidden.data() + i * width;
  const int64_t parts = (width + kOutputs - 1) / kOutputs;
  const auto name = [](const Bf16* weights) { return Range{reinterpret_cast<const char*>(weights), 0}; };
  Parallel(pool, devices, int64_t(used.size()) * parts, name(up.group(0, layer)), [&](int64_t task) {
    const int64_t e = used[task / parts], f = task % parts * kOutputs, count = std::min(kOutputs, width - f);
    const Bf16* gate = up.group(e, layer) + f * dim;
    float both[2][kRows * kOutputs];
    for (int64_t from = start[e]; from < start[e + 1]; from += kRows) {
      const int64_t own = std::min(kRows, start[e + 1] - from);
      for (int half = 0; half < 2; ++half) {
        Outer(gate + half * width * dim, count, dim, rows.data() + from, own, both[half], kOutputs);
      }
      for (int64_t t = 0; t < own; ++t) {
        Bf16* const to = &hidden[(from + t) * width + f];
        Swiglu(both[0] + t * kOutputs, both[1] + t * kOutputs, count, limit, to);
      }
    }
  });
  float* out = y->typed_data();
  Parallel(pool, devices, (dim + kOutputs - 1) / kOutputs, name(out_of.group(0, layer)), [&](int64_t task) {
    const int64_t d = task * kOutputs, count = std::min(kOutputs, dim - d);
    for (int64_t t = 0; t < tokens; ++t) std::fill_n(out + t * dim + d, count, 0.0f);
    float part[kRows * kOutputs];
    for (int64_t e : used) {
      for (int64_t from = start[e]; from < start[e + 1]; from += kRows) {
        const int64_t own = std::min(kRows, start[e + 1] - from);
        Outer(out_of.group(e, layer) + d * width, count, width, hidden_at.data() + from, own, part, kOutputs);
        for (int64_t t = 0; t < own; ++t) {
          float* to = out + pairs[from + t].token * dim + d;
          for (int64_t o = 0; o < count; ++o) to[o] += pairs[from + t].share * part[t * kOutputs + o];
        }
      }
    }
  });
  return ffi::Error::Success();
}

// One token of the delta rule: state [K, V] <- decay * state, r = v - k^T state, state += written r^T, o = q^T state.
void Delta(float* __restrict state, int64_t keys, int64_t values, const float* decay, const float* written,
           const float* q, const float* k, const float* v, float* __restrict rest, float* __restrict o) {
  std::copy_n(v, values, rest);
  for (int64_t i = 0; i < keys; ++i) {
    float* __restrict row = state + i * values;
    const float kept = decay[i], key = k[i];
    for (int64_t j = 0; j < values; ++j) {
      const float each = row[j] * kept;
      row[j] = each;
      rest[j] -= key * each;
    }
  }
  std::fill_n(o, values, 0.0f);
  for (int64_t i = 0; i < keys; ++i) {
    float* __restrict row = state + i * values;
    const float strength = written[i], query = q[i];
    for (int64_t j = 0; j < values; ++j) {
      const float each = row[j] + strength * rest[j];
      row[j] = each;
      o[j] += query * each;
    }
  }
}

// <x, x>, in fp32.
float Squares(const float* x, int64_t count) {
  float sums[16] = {}, total = 0;
  for (int64_t i = 0; i < count; ++i) sums[i % 16] += x[i] * x[i];
  for (float each : sums) total += each;
  return total;
}

// The causal convolution of one token's `channels` inputs, which go to the end of the window of the inputs before it.
void Convolve(const float* __restrict input, const Bf16* __restrict filter, int64_t taps, int64_t channels,
              Bf16* __restrict window, float* __restrict sums, float* __restrict tap) {
  std::fill_n(sums, channels, 0.0f);
  for (int64_t w = 0; w < taps; ++w) {
    Bf16* __restrict own = window + w * channels;
    for (int64_t c = 0; c < channels; ++c) tap[c] = Widen(filter[c * taps + w]);
    if (w + 1 < taps) {
      for (int64_t c = 0; c < channels; ++c) sums[c] += tap[c] * Widen(own[c]);
      continue;
    }
    std::memmove(window, window + channels, std::max<int64_t>(0, taps - 2) * channels * sizeof(Bf16));
    for (int64_t c = 0; c < channels; ++c) {
      const Bf16 rounded = Round(input[c]);
      sums[c] += tap[c] * Widen(rounded);
      if (taps > 1) own[c - channels] = rounded;
    }
  }
}

// A layer's part of KDA between its two large products, of a token of each of the first `used` of B sequences: write
// strength, convolution, gates, the recurrence on the states where they lie, norm and output gate.
//
// y [B, H, 5 K] has q, k, v, the decay's and the output gate's input of each head, x [B, D] the layer's input; weights
// b_proj [s, n, h, D], filters [s, n, h, 3, K, W], rate [s, n, h], bias [s, n, h, K], norm [n, K] -> pool
// [n, slots, H, K, K] and windows [n, slots, H, (W - 1) 3 K], changed in place, and out [B, H, K], zeros beyond `used`.
// The logarithm of a decay is lower_bound sigmoid(e^rate (f + bias)), or, for a bound of 0, -e^rate softplus(f + bias).
ffi::Error Token(ffi::ThreadPool threads, Floats, Bf16s, Floats y, Bf16s x, Bf16s b_proj, Bf16s filters, Floats rates,
                 Floats biases, Bf16s norms, Ints layer_of, Ints slots, Ints used_of, ffi::Result<Floats> pool,
                 ffi::Result<Bf16s> windows, ffi::Result<Bf16s> out, int32_t devices, float lower_bound, float l2_eps,
                 float eps) {
  const auto size = pool->dimensions();
  const int64_t heads = size[2], keys = size[3], layer = layer_of.typed_data()[0], rows = slots.dimensions()[0];
  const int64_t used = std::clamp<int64_t>(used_of.typed_data()[0], 0, rows), dim = x.dimensions()[1];
  const int64_t each = filters.dimensions()[2], taps = filters.dimensions()[5], channels = 3 * keys;
  const int32_t* slot = slots.typed_data();
  if (ffi::Error error = CheckLayer(layer, size[0]); error.failure()) return error;
  for (int64_t b = 0; b < used; ++b) {
    if (slot[b] < 0 || slot[b] >= size[1]) return ffi::Error::InvalidArgument("slot: expected one of the pool");
  }
  const int64_t state = keys * keys, window = (taps - 1) * channels, last = used ? slot[used - 1] : 0;
  float* const states = pool->typed_data() + layer * size[1] * heads * state;
  Bf16* const inputs = reinterpret_cast<Bf16*>(windows->untyped_data()) + layer * size[1] * heads * window;
  Bf16* const to = reinterpret_cast<Bf16*>(out->untyped_data());
  const Range range = {reinterpret_cast<const char*>(states + (last + 1) * heads * state), heads * state * 4};
  Parallel(threads, devices, used * heads, range, [=](int64_t task) {
    const int64_t b = task / heads, h = task % heads, place = slot[b] * heads + h;
    const int64_t head = (h / each * size[0] + layer) * each + h % each;  // of the weights that are split over devices
    const float* from = y.typed_data() + task * 5 * keys;
    std::vector<float> buffer(2 * channels + 4 * keys);
    float *conv = buffer.data(), *gates = conv + channels, *q = conv, *k = q + keys, *v = k + keys;
    float *decay = gates + channels, *written = decay + keys, *rest = written + keys, *o = rest + keys;
    Convolve(from, Data(filters) + head * channels * taps, taps, channels, inputs + place * window, conv, gates);
    Sigmoids(conv, channels, gates);
    for (int64_t c = 0; c < channels; ++c) conv[c] *= gates[c];
    const float of_q = 1 / std::sqrt(Squares(q, keys) + l2_eps) / std::sqrt(float(keys));
    const float of_k = 1 / std::sqrt(Squares(k, keys) + l2_eps);
    for (int64_t i = 0; i < keys; ++i) q[i] *= of_q, k[i] *= of_k;
    // How much of the state stays, and how strongly the token is written.
    const float rate = std::exp(rates.typed_data()[head]), *bias = biases.typed_data() + head * keys;
    for (int64_t i = 0; i < keys; ++i) gates[i] = rate * (from[channels + i] + bias[i]);
    if (lower_bound < 0) {
      Sigmoids(gates, keys, decay);
      for (int64_t i = 0; i < keys; ++i) decay[i] *= lower_bound;
    } else {
      for (int64_t i = 0; i < keys; ++i) {
        const float f = from[channels + i] + bias[i];
        decay[i] = -rate * (std::max(f, 0.0f) + std::log1p(std::exp(-std::abs(f))));
      }
    }
    Exponentials(decay, keys);
    const Bf16* own_x = Data(x) + b * dim;
    float beta;
    Outer(Data(b_proj) + head * dim, 1, dim, &own_x, 1, &beta, 1);
    Sigmoids(&beta, 1, gates);
    for (int64_t i = 0; i < keys; ++i) written[i] = gates[0] * k[i];
    Delta(states + place * state, keys, keys, decay, written, q, k, v, rest, o);
    const float scale = 1 / std::sqrt(Squares(o, keys) / float(keys) + eps);
    Sigmoids(from + channels + keys, keys, gates);
    for (int64_t i = 0; i < keys; ++i) {
      to[task * keys + i] = Round(o[i] * scale * Widen(Data(norms)[layer * keys + i]) * gates[i]);
    }
  });
  std::fill(to + used * heads * keys, to + rows * heads * keys, Bf16(0));
  return ffi::Error::Success();
}

// The router of one layer: of sigmoid(x gate^T) the `top` best experts, by score and bias, of the `open` best groups, a
// group being as good as its two best; of equal ones the first. Weights are scores without the bias, times `scale`. Rows
// of padding choose -1.
//
// x [T, D], gate [n, E, D], bias [n, E] -> chosen [T, top], share [T, top].
ffi::Error Route(ffi::ThreadPool pool, Floats x, Floats gate, Floats bias, Ints layer_of, ffi::Result<Ints> chosen,
                 ffi::Result<Floats> share, int32_t devices, int32_t groups, int32_t open, float scale) {
  const auto size = gate.dimensions();
  const int64_t layer = layer_of.typed_data()[0], experts = size[1], dim = size[2], tokens = x.dimensions()[0];
  const int64_t top = chosen->dimensions()[1], each = experts / groups;
  if (ffi::Error error = CheckLayer(layer, size[0]); error.failure()) return error;
  const float *weights = gate.typed_data() + layer * experts * dim, *own = bias.typed_data() + layer * experts;
  const Range range = {reinterpret_cast<const char*>(weights + experts * dim), experts * dim * 4};
  const int64_t used = Used(x.typed_data(), tokens, dim);
  std::fill_n(chosen->typed_data() + used * top, (tokens - used) * top, -1);
  std::fill_n(share->typed_data() + used * top, (tokens - used) * top, 0.0f);
  std::vector<float> scores(used * experts);
  Parallel(pool, devices, (experts + kScores - 1) / kScores, range, [&](int64_t task) {
    for (int64_t e = task * kScores; e < std::min(experts, (task + 1) * kScores); ++e) {
      for (int64_t t = 0; t < used; ++t) {
        scores[t * experts + e] = Product(x.typed_data() + t * dim, weights + e * dim, dim);
      }
    }
  });
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  std::vector<float> biased(experts), best(groups);
  for (int64_t t = 0; t < used; ++t) {
    float* const score = scores.data() + t * experts;
    for (int64_t e = 0; e < experts; ++e) score[e] = 1 / (1 + std::exp(-score[e])), biased[e] = score[e] + own[e];
    for (int64_t g = 0; g < groups; ++g) {
      float first = kNone, second = kNone;
      for (int64_t e = g * each; e < (g + 1) * each; ++e) {
        if (biased[e] > first) second = first, first = biased[e];
        else second = std::max(second, biased[e]);
      }
      best[g] = each > 1 ? first + second : first;
    }
    std::vector<bool> closed(groups, true);
    for (int32_t i = 0; i < open; ++i) {
      const int64_t g = std::max_element(best.begin(), best.end()) - best.begin();
      closed[g] = false, best[g] = kNone;
    }
    for (int64_t e = 0; e < experts; ++e) if (closed[e / each]) biased[e] = kNone;
    float total = 0;
    for (int64_t a = 0; a < top; ++a) {
      const int64_t e = std::max_element(biased.begin(), biased.end()) - biased.begin();
      chosen->typed_data()[t * top + a] = int32_t(e);
      share->typed_data()[t * top + a] = score[e];
      total += score[e], biased[e] = kNone;
    }
    for (int64_t a = 0; a < top; ++a) share->typed_data()[t * top + a] *= scale / (total + 1e-20f);
  }
  return ffi::Error::Success();
}

bool AreZeros(const float* x, int64_t count) {
  uint32_t any = 0;
  for (int64_t from = 0; from < count && !any; from += kBlock) {
    for (int64_t i = from; i < std::min(count, from + kBlock); ++i) {
      uint32_t bits;
      std::memcpy(&bits, x + i, sizeof bits);
      any |= bits;
    }
  }
  return !any;
}

// What a part of a row of logits says: the largest number, where it is first found, and the sum of e^(x - largest).
struct Best {
  float most = -std::numeric_limits<float>::infinity(), total = 0;
  int64_t at = 0;

  // e^0 is the largest: of numbers that are all -inf the sum is 0.
  float base() const { return std::max(most, std::numeric_limits<float>::lowest()); }

  // A NaN is in no maximum, but in the sum. Rows of padding are zeros, whose powers need not be computed.
  void Look(const float* x, int64_t count) {
    if (AreZeros(x, count)) return void((most = 0, total = float(count)));
    int64_t block = 0;
    for (int64_t from = 0; from < count; from += kBlock) {
      const int64_t size = std::min(kBlock, count - from);
      float lanes[kLine];
      std::fill_n(lanes, kLine, most);
      int64_t i = 0;
      for (; i + kLine <= size; i += kLine) {
        for (int64_t j = 0; j < kLine; ++j) lanes[j] = x[from + i + j] > lanes[j] ? x[from + i + j] : lanes[j];
      }
      for (; i < size; ++i) lanes[0] = x[from + i] > lanes[0] ? x[from + i] : lanes[0];
      const float found = *std::max_element(lanes, lanes + kLine);
      if (found > most) most = found, block = from;
    }
    at = std::find(x + block, x + std::min(count, block + kBlock), most) - x;
    float powers[kBlock], sums[kLine] = {};
    for (int64_t from = 0; from < count; from += kBlock) {
      const int64_t size = std::min(kBlock, count - from);
      for (int64_t i = 0; i < size; ++i) powers[i] = x[from + i] - base();
      Exponentials(powers, size);
      int64_t i = 0;
      for (; i + kLine <= size; i += kLine) {
        for (int64_t j = 0; j < kLine; ++j) sums[j] += powers[i + j];
      }
      for (; i < size; ++i) sums[0] += powers[i];
    }
    for (float each : sums) total += each;
  }
};

// Of each row of logits [R, V]: the largest, the sum of e^(x - largest), and the number of the first that is the
// largest, plus `offset`, as a float -> y [3, R].
ffi::Error BestOf(ffi::ThreadPool pool, Floats logits, Ints offset, ffi::Result<Floats> y, int32_t devices) {
  const int64_t rows = logits.dimensions()[0], width = logits.dimensions()[1], each = (width + kLogits - 1) / kLogits;
  std::vector<Best> parts(rows * each);
  Parallel(pool, devices, rows * each, {}, [&](int64_t task) {
    const int64_t from = task % each * kLogits;
    parts[task].Look(logits.typed_data() + task / each * width + from, std::min(kLogits, width - from));
  });
  float* const out = y->typed_data();
  for (int64_t r = 0; r < rows; ++r) {
    const Best *own = &parts[r * each], *best = std::max_element(own, own + each, [](const Best& a, const Best& b) {
      return a.most < b.most;
    });
    float total = 0;
    for (int64_t i = 0; i < each; ++i) total += own[i].total * std::exp(own[i].base() - best->base());
    out[r] = best->most, out[rows + r] = total;
    out[2 * rows + r] = float(offset.typed_data()[0] + (best - own) * kLogits + best->at);
  }
  return ffi::Error::Success();
}

// A softmax over a part of a sequence's tokens, not yet normalized: of each head the largest score, the sum of the
// weights and the weighted sum of the latents.
struct Part {
  std::vector<float> most, sum, values;

  void Attend(const Bf16* tokens, int64_t count, int64_t width, const Bf16* const* query, int64_t heads, int64_t rank) {
    float scores[kRows * kTokens];
    Bf16 weights[kRows * kTokens];
    for (int64_t from = 0; from < heads; from += kRows) {
      const int64_t own = std::min(kRows, heads - from);
      Outer(tokens, count, width, query + from, own, scores, kTokens);
      std::vector<float*> to(own);
      for (int64_t h = 0; h < own; ++h) {
        float *score = scores + h * kTokens, *value = to[h] = values.data() + (from + h) * rank;
        const float before = most[from + h], now = std::max(before, *std::max_element(score, score + count));
        float kept = before - now, total = 0;
        Exponentials(&kept, 1);
        for (int64_t i = 0; i < count; ++i) score[i] -= now;
        Exponentials(score, count);
        for (int64_t i = 0; i < count; ++i) total += score[i], weights[h * kTokens + i] = Round(score[i]);
        for (int64_t i = 0; i < rank; ++i) value[i] *= kept;
        most[from + h] = now;
        sum[from + h] = sum[from + h] * kept + total;
      }
      const auto at = Pointers(weights, own, kTokens);
      Inner(rank, own, to.data()).Add(tokens, width, count, at.data());
    }
  }
};

// Absorbed attention of each sequence over its first length[b] cached tokens, on the pages of its row of the table.
//
// query [B, H, W], pool [n, pages, page, W], table [B, M], length [B] -> y [B, H, R], R <= W; zeros where the length is 0.
ffi::Error Attention(ffi::ThreadPool threads, Bf16s query, Bf16s pool, Ints layer_of, Ints table_of, Ints length_of,
                     ffi::Result<Floats> y, int32_t devices) {
  const auto size = pool.dimensions();
  const int64_t pages = size[1], page = size[2], width = size[3], layer = layer_of.typed_data()[0];
  const int64_t rows = query.dimensions()[0], heads = query.dimensions()[1], rank = y->dimensions()[2];
  const int64_t columns = table_of.dimensions()[1];
  const int32_t *table = table_of.typed_data(), *length = length_of.typed_data();
  if (ffi::Error error = CheckLayer(layer, size[0]); error.failure()) return error;
  struct Task { int64_t row, from, to; };  // tokens
  std::vector<Task> tasks;
  for (int64_t b = 0; b < rows; ++b) {
    if (length[b] > columns * page) return ffi::Error::InvalidArgument("length: expected no more than its pages hold");
    for (int64_t from = 0; from < length[b]; from += kSpan) {
      tasks.push_back({b, from, std::min<int64_t>(length[b], from + kSpan)});
    }
    for (int64_t j = 0; j * page < length[b]; ++j) {
      const int32_t number = table[b * columns + j];
      if (number < 0 || number >= pages) return ffi::Error::InvalidArgument("table: expected pages of the pool");
    }
  }
  std::vector<Part> parts(tasks.size());
  const Bf16 *own = Data(pool) + layer * pages * page * width, *from = Data(query);
  const Range range = {reinterpret_cast<const char*>(own), 0};
  Parallel(threads, devices, int64_t(tasks.size()), range, [&](int64_t number) {
    const Task& task = tasks[number];
    Part& part = parts[number];
    part.most.assign(heads, -std::numeric_limits<float>::infinity());
    part.sum.assign(heads, 0.0f);
    part.values.assign(heads * rank, 0.0f);
    const auto at = Pointers(from + task.row * heads * width, heads, width);
    for (int64_t token = task.from; token < task.to;) {
      const int64_t place = token % page, count = std::min({kTokens, page - place, task.to - token});
      const Bf16* tokens = own + (table[task.row * columns + token / page] * page + place) * width;
      part.Attend(tokens, count, width, at.data(), heads, rank);
      token += count;
    }
  });
  float* out = y->typed_data();
  std::fill_n(out, rows * heads * rank, 0.0f);
  for (size_t first = 0, end; first < tasks.size(); first = end) {
    for (end = first + 1; end < tasks.size() && tasks[end].row == tasks[first].row;) ++end;
    for (int64_t h = 0; h < heads; ++h) {
      float most = parts[first].most[h], total = 0;
      for (size_t i = first; i < end; ++i) most = std::max(most, parts[i].most[h]);
      float* to = out + (tasks[first].row * heads + h) * rank;
      for (size_t i = first; i < end; ++i) {
        const float share = std::exp(parts[i].most[h] - most), *values = parts[i].values.data() + h * rank;
        total += parts[i].sum[h] * share;
        for (int64_t r = 0; r < rank; ++r) to[r] += values[r] * share;
      }
      for (int64_t r = 0; r < rank; ++r) to[r] /= total;
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_columns, Columns,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bf16s>().Arg<Bf16s>().Arg<Ints>().Ret<Floats>().Attr<int32_t>("devices"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_rows, Rows,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bf16s>().Arg<Bf16s>().Arg<Ints>().Ret<Floats>().Attr<int32_t>("devices"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_experts, Experts,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bf16s>().Arg<Bf16s>().Arg<Bf16s>().Arg<Ints>().Arg<Ints>().Arg<Floats>()
        .Arg<Floats>().Ret<Floats>().Attr<int32_t>("devices"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_token, Token,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Bf16s>().Arg<Floats>().Arg<Bf16s>().Arg<Bf16s>()
        .Arg<Bf16s>().Arg<Floats>().Arg<Floats>().Arg<Bf16s>().Arg<Ints>().Arg<Ints>().Arg<Ints>().Ret<Floats>()
        .Ret<Bf16s>().Ret<Bf16s>().Attr<int32_t>("devices").Attr<float>("lower_bound").Attr<float>("l2_eps")
        .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_route, Route,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Ints>().Ret<Ints>()
        .Ret<Floats>().Attr<int32_t>("devices").Attr<int32_t>("groups").Attr<int32_t>("open").Attr<float>("scale"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_best, BestOf,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Ints>().Ret<Floats>().Attr<int32_t>("devices"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_attention, Attention,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bf16s>().Arg<Bf16s>().Arg<Ints>().Arg<Ints>().Arg<Ints>().Ret<Floats>()
        .Attr<int32_t>("devices"));
