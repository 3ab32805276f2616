// Products of any number of rows of 8 bits with rows of a quantized weight, on one core. Few rows of x stream; more of
// them take panels of rows that are turned in the cache.
#ifndef LING3_PANELS_H_
#define LING3_PANELS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "integers.h"
#include "shared.h"
#include "vectors.h"

namespace {

#ifdef LING3_VECTORS
// Rows of a weight side by side: of each group 8 vectors with four numbers of every row, and kHalves of their scales.
struct Panel {
  uint8_t* q;
  float* scales;
};

// Bytes 4 j to 4 j + 3 at `at` of kLanes rows, for j from 0 to 3.
void Turn(const uint8_t* const* rows, int64_t at, Ints32* out) {
  const Ints32 a = Across(rows, 0, at), b = Across(rows, 1, at), c = Across(rows, 2, at), d = Across(rows, 3, at);
  const Ints32 ab = LING3_WIDE(unpacklo_epi32)(a, b), cd = LING3_WIDE(unpacklo_epi32)(c, d);
  const Ints32 more_ab = LING3_WIDE(unpackhi_epi32)(a, b), more_cd = LING3_WIDE(unpackhi_epi32)(c, d);
  out[0] = LING3_WIDE(unpacklo_epi64)(ab, cd), out[1] = LING3_WIDE(unpackhi_epi64)(ab, cd);
  out[2] = LING3_WIDE(unpacklo_epi64)(more_ab, more_cd), out[3] = LING3_WIDE(unpackhi_epi64)(more_ab, more_cd);
}

// Adds to turned rows of kCode6, at q, their bits 4 and 5: byte k of a group's 8 has those of numbers k, k + 8, k + 16
// and k + 24.
void AddFifths(const uint8_t* const* rows, int64_t groups, uint8_t* q) {
  for (int64_t g = 0; g < groups; g += 2) {  // 16 bytes
    const int64_t at = groups * kHalf + g * 8, own = std::min<int64_t>(2, groups - g);
    uint8_t last[kLanes][16];
    const uint8_t* copies[kLanes];
    for (int64_t r = 0; r < kLanes && own == 1; ++r) std::memcpy(last[r], rows[r] + at, 8), copies[r] = last[r];
    Ints32 parts[4];
    if (own == 2) Turn(rows, at, parts);
    else Turn(copies, 0, parts);
    for (int64_t i = 0; i < own; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        const Lanes32 bits = (Lanes32)parts[2 * i + j % 2];
        uint8_t* const to = q + ((g + i) * 8 + j) * kPiece;
        const Lanes32 own_bits = (j < 4 ? bits << (4 - j / 2 * 2) : bits >> (j / 2 * 2 - 4)) & 0x30303030;
        Store(to, (Ints32)((Lanes32)Load(to) | own_bits));
      }
    }
  }
}

// Turns up to kLanes rows of a weight; where there are fewer, the last one stands for the others.
template <Form kForm> void Turn(const uint8_t* q, const Bf16* scale, int64_t count, int64_t groups, Panel to) {
  const int64_t step = groups * kBytes<kForm>;
  const uint8_t *rows[kLanes], *scales[kLanes];
  for (int64_t r = 0; r < kLanes; ++r) {
    rows[r] = q + std::min(r, count - 1) * step;
    scales[r] = reinterpret_cast<const uint8_t*>(scale + std::min(r, count - 1) * groups);
  }
  Ints32 parts[4];
  for (int64_t at = 0; at < groups * kLow<kForm>; at += kHalf) {
    Turn(rows, at, parts);
    uint8_t* const out = to.q + at * (kGroup / kLow<kForm>) * kLanes;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Ints32 low = kForm == kInt8 ? Unsigned(parts[j]) : Low(parts[j]);
      Store(out + j * kPiece, kForm == kCode4 ? Lookup(low) : low);
      if (kForm != kInt8) Store(out + (4 + j) * kPiece, kForm == kCode4 ? Lookup(High(parts[j])) : High(parts[j]));
    }
  }
  if (kForm == kCode6) AddFifths(rows, groups, to.q);
  const auto store = [&](int64_t g, Ints32 words) __attribute__((always_inline)) {
    const Scales<kForm> own(words & Spread(0xffff));
    for (int h = 0; h < kHalves<kForm>; ++h) Store(to.scales + (g * kHalves<kForm> + h) * kLanes, own.half[h]);
  };
  int64_t g = 0;
  for (; g + 8 <= groups; g += 8) {
    Turn(scales, 2 * g, parts);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      store(g + 2 * j, parts[j]);
      store(g + 2 * j + 1, (Ints32)((Lanes32)parts[j] >> 16));
    }
  }
  for (; g < groups; ++g) {
    alignas(64) int32_t words[kLanes];
    for (int64_t r = 0; r < kLanes; ++r) words[r] = scale[std::min(r, count - 1) * groups + g];
    store(g, Load(words));
  }
}

// out[t * stride + o] += <x[rows[t]], w[o]> for T rows of x and the first `outputs` rows of P panels. Meanwhile what the
// next panels read is asked for, `lines` of it for each group.
template <Form kForm, int T, int P>
void Tile(const Panel* panels, const Rows<kForm>& x, const int32_t* rows, float* out, int64_t stride,
          int64_t outputs, const uint8_t* next, int64_t lines) {
  const int8_t* own[T];
  const float* own_scales[T];
  const int32_t* offsets[T];
  Floats32 total[T][P];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    own[t] = x.q(rows[t]), own_scales[t] = x.scales(rows[t]), offsets[t] = x.offsets(rows[t]);
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) total[t][p] = Spread(0.0f);
  }
  for (int64_t g = 0; g < x.groups; ++g) {
    const int64_t first = First<kForm>(g);
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(next + (g * lines + i) * 64, 0, 2);
#pragma GCC unroll 2
    for (int h = 0; h < kHalves<kForm>; ++h) {
      Ints32 sum[T][P];
#pragma GCC unroll 16
      for (int i = 0; i < T * P; ++i) {
        sum[i / P][i % P] = Begin<kForm>(offsets[i / P][h * x.apart + g * kOwn<kForm>]);
      }
#pragma GCC unroll 8
      for (int j = h * 4; j < (h ? 8 : 8 / kHalves<kForm>); ++j) {
        Ints32 q[P];
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) q[p] = Load(panels[p].q + (g * 8 + j) * kPiece);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          int32_t four;
          std::memcpy(&four, own[t] + first + j / 4 * kSecond<kForm> + j % 4 * 4, 4);
          const Ints32 each = Spread(four);
#pragma GCC unroll 2
          for (int p = 0; p < P; ++p) sum[t][p] = Dot<kForm>(sum[t][p], q[p], each);
        }
      }
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        const Floats32 scales = LoadFloats(panels[p].scales + (g * kHalves<kForm> + h) * kLanes);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          const Ints32 whole = Whole<kForm>(sum[t][p], offsets[t][g * kOwn<kForm>]);
          total[t][p] += Float(whole) * (scales * Spread(own_scales[t][g]));
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    float each[P * kLanes];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) Store(each + p * kLanes, total[t][p]);
    for (int64_t o = 0; o < outputs; ++o) out[t * stride + o] += each[o];
  }
}

// Tile for `count` rows of x, in groups of nearly one size.
template <Form kForm, int P>
void Tiles(const Panel* panels, const Rows<kForm>& x, const int32_t* rows, int64_t count, float* out, int64_t stride,
           int64_t outputs, const uint8_t* next) {
  for (int64_t t = 0, own; t < count; t += own) {
    const int64_t lines = t ? 0 : P * kLanes * kBytes<kForm> / 64, groups = (count - t + kTall - 1) / kTall;
    own = (count - t + groups - 1) / groups;
    const auto take = [&](auto tile) { tile(panels, x, rows + t, out + t * stride, stride, outputs, next, lines); };
    if constexpr (kTall == 6) {
      if (own == 6) take(Tile<kForm, 6, P>);
      if (own == 5) take(Tile<kForm, 5, P>);
    }
    if (own == 4) take(Tile<kForm, 4, P>);
    if (own == 3) take(Tile<kForm, 3, P>);
    if (own == 2) take(Tile<kForm, 2, P>);
    if (own == 1) take(Tile<kForm, 1, P>);
  }
}

// out[t * stride + o] += <x[rows[t]], w[o]> for `count` rows of x and `outputs` rows of a weight. The caller reads `next`
// then, or what follows.
template <Form kForm>
void Outer(const uint8_t* q, const Bf16* scale, int64_t outputs, const Rows<kForm>& x, const int32_t* rows,
           int64_t count, float* out, int64_t stride, const uint8_t* next = nullptr) {
  const int64_t groups = x.groups, step = groups * kBytes<kForm>;
  if (count <= kStream) {
    const int64_t last = outputs * step - kFar<kForm>;
    for (int64_t o = 0; o < outputs; ++o) {
      const int64_t at = o * step;
      const uint8_t* const ahead = next && at >= last ? next + (at - last) : q + at + kFar<kForm>;
      for (int64_t t = 0, own; t < count; t += own) {
        const int64_t parts = (count - t + 3) / 4;
        own = (count - t + parts - 1) / parts;
        const auto take = [&](auto stream) {
          stream(q + at, scale + o * groups, ahead, x, rows + t, out + t * stride + o, stride);
        };
        if (own == 4) take(Stream<kForm, 4>);
        if (own == 3) take(Stream<kForm, 3>);
        if (own == 2) take(Stream<kForm, 2>);
        if (own == 1) take(Stream<kForm, 1>);
      }
    }
    return;
  }
  thread_local std::unique_ptr<char[]> memory;
  thread_local int64_t had = 0;
  const int64_t bytes = groups * kGroup * kLanes, numbers = groups * kHalves<kForm> * kLanes;
  const int64_t need = kPanels * (bytes + numbers * int64_t(sizeof(float)));
  if (had < need) Aligned<char>(memory, had = need);
  char* const first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
  Panel panels[kPanels];
  for (int p = 0; p < kPanels; ++p) {
    panels[p].q = reinterpret_cast<uint8_t*>(first + p * bytes);
    panels[p].scales = reinterpret_cast<float*>(first + kPanels * bytes) + p * numbers;
  }
  for (int64_t o = 0; o < outputs; o += kPanels * kLanes) {
    const int64_t own = std::min<int64_t>(kPanels * kLanes, outputs - o);
    for (int64_t p = 0; p * kLanes < own; ++p) {
      const int64_t at = o + p * kLanes;
      Turn<kForm>(q + at * step, scale + at * groups, std::min<int64_t>(kLanes, own - p * kLanes), groups, panels[p]);
    }
    const uint8_t* next = q + (o + own) * step;
    if (own > kLanes) Tiles<kForm, kPanels>(panels, x, rows, count, out + o, stride, own, next);
    else Tiles<kForm, 1>(panels, x, rows, count, out + o, stride, own, next);
  }
}
#else
// Number i of a group whose bytes begin at `from`, as it is multiplied; its bits 4 and 5 are at `more`.
template <Form kForm> int32_t Value(const uint8_t* from, const uint8_t* more, int64_t i) {
  if (kForm == kInt8) return int8_t(from[i]);
  const int32_t low = from[i % kHalf] >> (i / kHalf * 4) & 15;
  if (kForm == kCode4) return kCodes[low];
  return kForm == kCode6 ? low | (more[i % 8] >> (i / 8 * 2) & 3) << 4 : low;
}

template <Form kForm>
void Outer(const uint8_t* q, const Bf16* scale, int64_t outputs, const Rows<kForm>& x, const int32_t* rows,
           int64_t count, float* out, int64_t stride, const uint8_t* = nullptr) {
  for (int64_t o = 0; o < outputs; ++o) {
    const uint8_t* const weights = q + o * x.groups * kBytes<kForm>;
    for (int64_t t = 0; t < count; ++t) {
      float total = 0;
      for (int64_t g = 0; g < x.groups; ++g) {
        const int8_t* const own = x.q(rows[t]) + g * kGroup;
        const uint8_t* const from = weights + g * kLow<kForm>;
        const uint8_t* const more = weights + x.groups * kLow<kForm> + g * (kBytes<kForm> - kLow<kForm>);
        int32_t sums[2] = {x.offsets(rows[t])[g * kOwn<kForm>], 0};
        if (kHalves<kForm> == 2) sums[1] = x.offsets(rows[t])[x.apart + g * kOwn<kForm>];
        for (int64_t i = 0; i < kGroup; ++i) sums[i / kHalf] += Value<kForm>(from, more, i) * own[i];
        const float by = x.scales(rows[t])[g];
        const uint16_t word = scale[o * x.groups + g];
        if (kHalves<kForm> == 1) {
          total += float(sums[0] + sums[1]) * (Widen(word) * by);
        } else {
          const float unit = Widen(((word >> 10) + 127 + kUnit) << 7);
          for (int h = 0; h < 2; ++h) {
            const int32_t five = word >> (5 - 5 * h) & 31;
            total += float(sums[h]) * (unit * float(five < 16 ? five : five - 32) * by);
          }
        }
      }
      out[t * stride + o] += total;
    }
  }
}
#endif

}  // namespace

#endif  // LING3_PANELS_H_
