// Products of a few rows of bf16 with a weight of bf16, on one core. One form is compiled, chosen by the compiler's flags:
// vectors of LING3_BYTES bytes, on processors with avx512_bf16 its dot products (those with amx_bf16 have tiles, too:
// tiles.h), or, without LING3_BYTES, plain loops, which are what the other forms are tested against.
#ifndef LING3_PRODUCTS_H_
#define LING3_PRODUCTS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "shared.h"

namespace {

constexpr int64_t kRows = 64;     // rows of x that stay in the second cache while a task's weights pass
#ifdef __AVX512BF16__
constexpr int64_t kStream = 8;    // rows of x below which one row of w is read after the other, as memory is fastest
#else
constexpr int64_t kStream = 5;
#endif
constexpr int64_t kFar = 1024;    // numbers of a single row of w that the second cache is asked for before they are read
constexpr int64_t kLine = 16;     // numbers of fp32 in a line of the caches

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

}  // namespace

#endif  // LING3_PRODUCTS_H_
