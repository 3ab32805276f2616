// Products of a few rows of 8 bits with rows of a weight of 8 or 4 bits, on one core (quantized.cc has what is what).
#ifndef LING3_INTEGERS_H_
#define LING3_INTEGERS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

#include "shared.h"
#include "vectors.h"

namespace {

constexpr int64_t kStream = 5;   // rows of x up to which one row of w is read after the other
constexpr int64_t kLong = 256;   // most outputs of a task that adds up parts: what it reads of each follows itself
// Bytes of a row of w that the second cache is asked for before they are read.
template <int kBits> constexpr int64_t kFar = kBits == 8 ? 2048 : 8192;

// Where the first half of a group lies in a row of x, and how far behind it the second: as q lies in vectors.
template <int kBits> int64_t First(int64_t g) {
  return kBits == 8 ? g * kGroup : g / kOf<4> * kOf<4> * kGroup + g % kOf<4> * kHalf;
}
template <int kBits> constexpr int64_t kSecond = kBits == 8 ? kHalf : kOf<4> * kHalf;

template <class Number> Number* Aligned(std::unique_ptr<char[]>& memory, int64_t count) {
  memory.reset(new char[count * sizeof(Number) + 64]);
  return reinterpret_cast<Number*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
}

// Rows of x in 8 bits, each filled up with zeros to whole blocks of groups.
template <int kBits> class Rows {
 public:
  Rows(int64_t rows, int64_t groups) : groups(groups), padded_((groups + kBlock - 1) / kBlock * kBlock) {
    q_ = Aligned<int8_t>(memory_[0], rows * padded_ * kGroup);
    scales_ = Aligned<float>(memory_[1], rows * padded_);
    offsets_ = Aligned<int32_t>(memory_[2], rows * padded_ * kOwn<kBits>);
    for (int64_t t = 0; t < rows && groups < padded_; ++t) {
      const int64_t from = groups / kBlock * kBlock, rest = padded_ - from;
      std::fill_n(q_ + t * padded_ * kGroup + from * kGroup, rest * kGroup, int8_t(0));
      std::fill_n(scales_ + t * padded_ + from, rest, 0.0f);
      std::fill_n(offsets_ + (t * padded_ + from) * kOwn<kBits>, rest * kOwn<kBits>, 0);
    }
  }

  void Set(int64_t t, int64_t g, const Bf16* x) {
    constexpr float kRounder = 12582912;  // a number of this size has no digits behind the point
    uint16_t most = 0;
    for (int64_t i = 0; i < kGroup; ++i) most = std::max<uint16_t>(most, x[i] & 0x7fff);
    const bool finite = most < 0x7f80;
    const float scale = Widen(most) / 127, by = finite && scale > 0 ? scale : std::numeric_limits<float>::infinity();
    int8_t own[kGroup];
    int32_t sum = 0;
    for (int64_t i = 0; i < kGroup; ++i) {
      const float value = finite ? Widen(x[i]) / by : 0;
      own[i] = int8_t(std::min(std::max(value, -127.0f), 127.0f) + kRounder - kRounder);
      sum += own[i];
    }
    int8_t* const to = q_ + t * padded_ * kGroup + First<kBits>(g);
    std::memcpy(to, own, kHalf);
    std::memcpy(to + kSecond<kBits>, own + kHalf, kHalf);
    scales_[t * padded_ + g] = finite ? scale : std::numeric_limits<float>::quiet_NaN();
    int32_t* const offset = offsets_ + (t * padded_ + g) * kOwn<kBits>;
    std::fill_n(offset, kOwn<kBits>, 0);
    offset[0] = -kOffset<kBits> * sum;
  }

  const int8_t* q(int64_t t) const { return q_ + t * padded_ * kGroup; }
  const float* scales(int64_t t) const { return scales_ + t * padded_; }
  const int32_t* offsets(int64_t t) const { return offsets_ + t * padded_ * kOwn<kBits>; }  // of the first of its lanes

  const int64_t groups;

 private:
  const int64_t padded_;
  std::unique_ptr<char[]> memory_[3];
  int8_t* q_;
  float* scales_;
  int32_t* offsets_;
};

#ifdef LING3_VECTORS
// The next kStep bytes of q, or so many of them and zeros, as Multiply takes them.
template <int kBits> void Take(const uint8_t* from, int64_t bytes, Ints32* out) {
  const Ints32 bits = bytes < kPiece ? LoadSome(from, bytes) : Load(from);
  out[0] = kBits == 8 ? Unsigned(bits) : Low(bits);
  out[1] = kStep<kBits> > kPiece ? Load(from + kPiece) : High(bits);
}

// out[t * stride] += <x[rows[t]], w> for T rows of x and one row of a weight. Meanwhile what is `ahead` is asked for.
template <int kBits, int T>
void Stream(const uint8_t* q, const Bf16* scale, const uint8_t* ahead, const Rows<kBits>& x, const int32_t* rows,
            float* out, int64_t stride) {
  constexpr int64_t kPieces = kBlock / kOf<kBits>;
  const int8_t* own[T];
  const float* own_scales[T];
  const int32_t* offsets[T];
  Floats32 sums[T][2];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    own[t] = x.q(rows[t]), own_scales[t] = x.scales(rows[t]), offsets[t] = x.offsets(rows[t]);
    sums[t][0] = sums[t][1] = Spread(0.0f);
  }
  Floats32 scales[T];
  const auto scale_by = [&](int64_t g, Floats32 wide) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) scales[t] = wide * LoadFloats(own_scales[t] + g);
  };
  const auto piece = [&](int64_t g, int64_t i, const uint8_t* from, int64_t bytes) __attribute__((always_inline)) {
    Ints32 both[2];
    Take<kBits>(from, bytes, both);
    const int64_t at = g + i * kOf<kBits>;
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const Ints32 sum = Multiply<kBits>(both, own[t] + at * kGroup, offsets[t] + at * kOwn<kBits>);
      sums[t][i % 2] += Float(sum) * Each<kBits>(scales[t], i);
    }
  };
  int64_t g = 0;
  for (; g + kBlock <= x.groups; g += kBlock) {
    scale_by(g, Scales(scale + g));
    __builtin_prefetch(scale + g + 2 * kBlock, 0, 2);
#pragma GCC unroll 8
    for (int64_t i = 0; i < kPieces; ++i) {
      const int64_t at = g * kBytes<kBits> + i * kStep<kBits>;
      if (i * kStep<kBits> % 64 == 0) __builtin_prefetch(ahead + at, 0, 2);
      piece(g, i, q + at, kStep<kBits>);
    }
  }
  if (const int64_t rest = x.groups - g; rest) {
    scale_by(g, SomeScales(scale + g, rest));
    const uint8_t* const from = q + g * kBytes<kBits>;
    const int64_t bytes = rest * kBytes<kBits>;
    for (int64_t i = 0; i * kStep<kBits> < bytes; ++i) {
      piece(g, i, from + i * kStep<kBits>, std::min(kStep<kBits>, bytes - i * kStep<kBits>));
    }
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) out[t * stride] += Total(sums[t][0] + sums[t][1]);
}

// Sums over parts of products with a few rows of x. Every vector of sums belongs to fixed outputs until the last part is in.
// Rows of so few groups that a block holds several whole ones are read as if they were one row.
template <int kBits> class Parts {
 public:
  Parts(int64_t outputs, int64_t groups, int64_t count)
      : outputs_(outputs), groups_(groups), count_(count), joined_(groups < kBlock && kBlock % groups == 0),
        each_(joined_ ? std::max<int64_t>(1, groups / kOf<kBits>) : kVectors) {
    for (int64_t t = 0; t < count; ++t) std::fill_n(sums_[t], outputs, Spread(0.0f));
  }

  // Adds a part: all outputs' rows of the weight, which follow each other. Meanwhile those of the next part, which lie
  // elsewhere, are asked for.
  void Add(const uint8_t* q, const Bf16* scale, const Rows<kBits>& x, const int32_t* rows, const uint8_t* next,
           const Bf16* next_scale) {
    const int64_t step = joined_ ? outputs_ * groups_ : groups_;  // groups of a row that is read as one
    for (int64_t t = 0; t < count_ && joined_; ++t) Repeat(t, x, rows[t]);
    for (int64_t from = 0, sum = 0; from < outputs_ * groups_; from += step) {
      for (int64_t g = 0; g < step; g += kBlock) {
        const int64_t at = from + g, own = std::min(kBlock, step - g);
        for (int64_t byte = 0; byte < own * kBytes<kBits>; byte += 64) {
          __builtin_prefetch(next + at * kBytes<kBits> + byte, 0, 2);
        }
        __builtin_prefetch(next_scale + at, 0, 2);
        const Floats32 wide = own == kBlock ? Scales(scale + at) : SomeScales(scale + at, own);
        for (int64_t t = 0; t < count_; ++t) {
          const int8_t* const own_x = joined_ ? x_[t] : x.q(rows[t]) + g * kGroup;
          const int32_t* const offsets = joined_ ? offsets_[t] : x.offsets(rows[t]) + g * kOwn<kBits>;
          const Floats32 scales = wide * LoadFloats(joined_ ? scales_[t] : x.scales(rows[t]) + g);
          const auto take = [&](auto block) {
            block(q + at * kBytes<kBits>, own * kBytes<kBits>, scales, own_x, offsets, sums_[t] + sum);
          };
          if (each_ == 1) take(Block<1>);
          if (each_ == 2) take(Block<2>);
          if (each_ == 4) take(Block<4>);
          if (each_ == 8) take(Block<8>);
        }
        if (joined_) sum += kVectors / each_;
      }
      if (!joined_) ++sum;
    }
  }

  // out[t * stride + o] of all parts.
  void Give(float* out, int64_t stride) const {
    const int64_t own = joined_ ? std::min<int64_t>(kLanes, groups_ * kOwn<kBits>) : kLanes;  // lanes of an output
    for (int64_t t = 0; t < count_; ++t) {
      const auto lanes = reinterpret_cast<const float*>(sums_[t]);
      for (int64_t o = 0; o < outputs_; ++o) {
        float* const to = out + t * stride + o;
        if (own == 16) *to = Tree<16>(lanes + o * 16);
        if (own == 8) *to = Tree<8>(lanes + o * 8);
        if (own == 4) *to = Tree<4>(lanes + o * 4);
      }
    }
  }

 private:
  static constexpr int64_t kVectors = kBlock / kOf<kBits>;  // of a block

  // Adds the products of `bytes` of a weight, a block at most, to sums, kEach vectors to each.
  template <int kEach>
  static void Block(const uint8_t* q, int64_t bytes, Floats32 scales, const int8_t* x, const int32_t* offsets,
                    Floats32* sums) {
    const auto piece = [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      Ints32 both[2];
      Take<kBits>(q + i * kStep<kBits>, count, both);
      const int64_t g = i * kOf<kBits>;
      return Float(Multiply<kBits>(both, x + g * kGroup, offsets + g * kOwn<kBits>)) * Each<kBits>(scales, i);
    };
    if (bytes == kBlock * kBytes<kBits>) {
#pragma GCC unroll 8
      for (int64_t first = 0; first < kVectors; first += kEach) {
        Floats32 sum = sums[first / kEach];
#pragma GCC unroll 8
        for (int64_t i = first; i < std::min<int64_t>(kVectors, first + kEach); ++i) sum += piece(i, kStep<kBits>);
        sums[first / kEach] = sum;
      }
      return;
    }
    for (int64_t i = 0; i * kStep<kBits> < bytes; ++i) {
      sums[i / kEach] += piece(i, std::min(kStep<kBits>, bytes - i * kStep<kBits>));
    }
  }

  // A block in which a row of x stands again and again.
  void Repeat(int64_t t, const Rows<kBits>& x, int64_t row) {
    for (int64_t first = 0; first < kBlock; first += groups_) {
      for (int64_t g = 0; g < groups_; ++g) {
        const int64_t from = First<kBits>(g), to = First<kBits>(first + g);
        std::memcpy(x_[t] + to, x.q(row) + from, kHalf);
        std::memcpy(x_[t] + to + kSecond<kBits>, x.q(row) + from + kSecond<kBits>, kHalf);
        scales_[t][first + g] = x.scales(row)[g];
        std::memcpy(offsets_[t] + (first + g) * kOwn<kBits>, x.offsets(row) + g * kOwn<kBits>, kOwn<kBits> * 4);
      }
    }
  }

  template <int kCount> static float Tree(const float* from) {
    if constexpr (kCount == 1) return *from;
    else return Tree<kCount / 2>(from) + Tree<kCount / 2>(from + kCount / 2);
  }

  const int64_t outputs_, groups_, count_;
  const bool joined_;   // whether a block holds several rows of the weight
  const int64_t each_;  // vectors of a row in a block, whose products are added up in one
  Floats32 sums_[kStream][kLong];
  alignas(64) int8_t x_[kStream][kBlock * kGroup];
  alignas(64) float scales_[kStream][kBlock];
  alignas(64) int32_t offsets_[kStream][kBlock * kOwn<kBits>];
};

// Rows of a weight side by side: of each group 8 vectors with four numbers of every row, and one of the rows' scales.
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

// Turns up to kLanes rows of a weight; where there are fewer, the last one stands for the others.
template <int kBits> void Turn(const uint8_t* q, const Bf16* scale, int64_t count, int64_t groups, Panel to) {
  const int64_t step = groups * kBytes<kBits>;
  const uint8_t *rows[kLanes], *scales[kLanes];
  for (int64_t r = 0; r < kLanes; ++r) {
    rows[r] = q + std::min(r, count - 1) * step;
    scales[r] = reinterpret_cast<const uint8_t*>(scale + std::min(r, count - 1) * groups);
  }
  Ints32 parts[4];
  for (int64_t at = 0; at < step; at += kHalf) {
    Turn(rows, at, parts);
    uint8_t* const out = to.q + at * (8 / kBits) * kLanes;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      Store(out + j * kPiece, kBits == 8 ? Unsigned(parts[j]) : Low(parts[j]));
      if (kBits == 4) Store(out + (4 + j) * kPiece, High(parts[j]));
    }
  }
  int64_t g = 0;
  for (; g + 8 <= groups; g += 8) {
    Turn(scales, 2 * g, parts);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      Store(to.scales + (g + 2 * j) * kLanes, (Floats32)LING3_WIDE(slli_epi32)(parts[j], 16));
      Store(to.scales + (g + 2 * j + 1) * kLanes, (Floats32)(parts[j] & Ints32(Spread(int32_t(0xffff0000)))));
    }
  }
  for (; g < groups; ++g) {
    for (int64_t r = 0; r < kLanes; ++r) {
      to.scales[g * kLanes + r] = Widen(scale[std::min(r, count - 1) * groups + g]);
    }
  }
}

// out[t * stride + o] += <x[rows[t]], w[o]> for T rows of x and the first `outputs` rows of P panels. Meanwhile what the
// next panels read is asked for, `lines` of it for each group.
template <int kBits, int T, int P>
void Tile(const Panel* panels, const Rows<kBits>& x, const int32_t* rows, float* out, int64_t stride,
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
    const int64_t first = First<kBits>(g);
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(next + (g * lines + i) * 64, 0, 2);
    Ints32 sum[T][P];
#pragma GCC unroll 16
    for (int i = 0; i < T * P; ++i) sum[i / P][i % P] = Begin<kBits>(offsets[i / P][g * kOwn<kBits>]);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      Ints32 q[P];
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) q[p] = Load(panels[p].q + (g * 8 + j) * kPiece);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        int32_t four;
        std::memcpy(&four, own[t] + first + j / 4 * kSecond<kBits> + j % 4 * 4, 4);
        const Ints32 each = Spread(four);
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) sum[t][p] = Dot<kBits>(sum[t][p], q[p], each);
      }
    }
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      const Floats32 scales = LoadFloats(panels[p].scales + g * kLanes);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const Ints32 whole = Whole<kBits>(sum[t][p], offsets[t][g * kOwn<kBits>]);
        total[t][p] += Float(whole) * (scales * Spread(own_scales[t][g]));
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
template <int kBits, int P>
void Tiles(const Panel* panels, const Rows<kBits>& x, const int32_t* rows, int64_t count, float* out, int64_t stride,
           int64_t outputs, const uint8_t* next) {
  for (int64_t t = 0, own; t < count; t += own) {
    const int64_t lines = t ? 0 : P * kLanes * kBytes<kBits> / 64, groups = (count - t + kTall - 1) / kTall;
    own = (count - t + groups - 1) / groups;
    const auto take = [&](auto tile) { tile(panels, x, rows + t, out + t * stride, stride, outputs, next, lines); };
    if constexpr (kTall == 6) {
      if (own == 6) take(Tile<kBits, 6, P>);
      if (own == 5) take(Tile<kBits, 5, P>);
    }
    if (own == 4) take(Tile<kBits, 4, P>);
    if (own == 3) take(Tile<kBits, 3, P>);
    if (own == 2) take(Tile<kBits, 2, P>);
    if (own == 1) take(Tile<kBits, 1, P>);
  }
}

// out[t * stride + o] += <x[rows[t]], w[o]> for `count` rows of x and `outputs` rows of a weight. The caller reads `next`
// then, or what follows.
template <int kBits>
void Outer(const uint8_t* q, const Bf16* scale, int64_t outputs, const Rows<kBits>& x, const int32_t* rows,
           int64_t count, float* out, int64_t stride, const uint8_t* next = nullptr) {
  const int64_t groups = x.groups, step = groups * kBytes<kBits>;
  if (count <= kStream) {
    const int64_t last = outputs * step - kFar<kBits>;
    for (int64_t o = 0; o < outputs; ++o) {
      const int64_t at = o * step;
      const uint8_t* const ahead = next && at >= last ? next + (at - last) : q + at + kFar<kBits>;
      for (int64_t t = 0, own; t < count; t += own) {
        const int64_t parts = (count - t + 3) / 4;
        own = (count - t + parts - 1) / parts;
        const auto take = [&](auto stream) {
          stream(q + at, scale + o * groups, ahead, x, rows + t, out + t * stride + o, stride);
        };
        if (own == 4) take(Stream<kBits, 4>);
        if (own == 3) take(Stream<kBits, 3>);
        if (own == 2) take(Stream<kBits, 2>);
        if (own == 1) take(Stream<kBits, 1>);
      }
    }
    return;
  }
  thread_local std::unique_ptr<char[]> memory;
  thread_local int64_t had = 0;
  const int64_t bytes = groups * kGroup * kLanes, need = kPanels * (bytes + groups * kLanes * int64_t(sizeof(float)));
  if (had < need) Aligned<char>(memory, had = need);
  char* const first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
  Panel panels[kPanels];
  for (int p = 0; p < kPanels; ++p) {
    panels[p].q = reinterpret_cast<uint8_t*>(first + p * bytes);
    panels[p].scales = reinterpret_cast<float*>(first + kPanels * bytes) + p * groups * kLanes;
  }
  for (int64_t o = 0; o < outputs; o += kPanels * kLanes) {
    const int64_t own = std::min<int64_t>(kPanels * kLanes, outputs - o);
    for (int64_t p = 0; p * kLanes < own; ++p) {
      const int64_t at = o + p * kLanes;
      Turn<kBits>(q + at * step, scale + at * groups, std::min<int64_t>(kLanes, own - p * kLanes), groups, panels[p]);
    }
    const uint8_t* next = q + (o + own) * step;
    if (own > kLanes) Tiles<kBits, kPanels>(panels, x, rows, count, out + o, stride, own, next);
    else Tiles<kBits, 1>(panels, x, rows, count, out + o, stride, own, next);
  }
}
#else
template <int kBits>
void Outer(const uint8_t* q, const Bf16* scale, int64_t outputs, const Rows<kBits>& x, const int32_t* rows,
           int64_t count, float* out, int64_t stride, const uint8_t* = nullptr) {
  for (int64_t o = 0; o < outputs; ++o) {
    const uint8_t* const weights = q + o * x.groups * kBytes<kBits>;
    for (int64_t t = 0; t < count; ++t) {
      float total = 0;
      for (int64_t g = 0; g < x.groups; ++g) {
        const int8_t* const own = x.q(rows[t]) + g * kGroup;
        const uint8_t* const from = weights + g * kBytes<kBits>;
        int32_t sum = x.offsets(rows[t])[g * kOwn<kBits>], more = 0;
        if (kBits == 8) {
          for (int64_t i = 0; i < kGroup; ++i) sum += int8_t(from[i]) * own[i];
        } else {
          for (int64_t i = 0; i < kHalf; ++i) sum += int8_t(from[i] & 15) * own[i];
          for (int64_t i = 0; i < kHalf; ++i) more += int8_t(from[i] >> 4) * own[i + kHalf];
        }
        total += float(sum + more) * (Widen(scale[o * x.groups + g]) * x.scales(rows[t])[g]);
      }
      out[t * stride + o] += total;
    }
  }
}
#endif

}  // namespace

#endif  // LING3_INTEGERS_H_
