// Products of a few rows of 8 bits with rows of a quantized weight, on one core (quantized.cc says how it lies).
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
// Bytes of a row of w that are asked for before they are read: for once, so that they displace nothing from the second
// cache, where a step's code and small arrays stay.
template <Form kForm> constexpr int64_t kFar = kForm == kInt8 ? 2048 : 8192;
constexpr int64_t kFarScales = 512;  // groups whose scales are asked for ahead

// Where the first half of a group lies in a row of x, and how far behind it the second: as q lies in vectors.
template <Form kForm> int64_t First(int64_t g) {
  return kForm == kInt8 ? g * kGroup : g / kOf<kForm> * kOf<kForm> * kGroup + g % kOf<kForm> * kHalf;
}
template <Form kForm> constexpr int64_t kSecond = kForm == kInt8 ? kHalf : kOf<kForm> * kHalf;

template <class Number> Number* Aligned(std::unique_ptr<char[]>& memory, int64_t count) {
  memory.reset(new char[count * sizeof(Number) + 64]);
  return reinterpret_cast<Number*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
}

// Rows of x in 8 bits, each filled up with zeros to whole blocks of groups.
template <Form kForm> class Rows {
 public:
  Rows(int64_t rows, int64_t groups)
      : groups(groups), padded_((groups + kBlock - 1) / kBlock * kBlock),
        apart(rows * padded_ * kOwn<kForm>) {
    q_ = Aligned<int8_t>(memory_[0], rows * padded_ * kGroup);
    scales_ = Aligned<float>(memory_[1], rows * padded_);
    offsets_ = Aligned<int32_t>(memory_[2], apart * kHalves<kForm>);
    shifts_ = Aligned<float>(memory_[3], rows * padded_ * kHalves<kForm>);
    for (int64_t t = 0; t < rows && groups < padded_; ++t) {
      const int64_t from = groups / kBlock * kBlock, rest = padded_ - from;
      std::fill_n(q_ + t * padded_ * kGroup + from * kGroup, rest * kGroup, int8_t(0));
      std::fill_n(scales_ + t * padded_ + from, rest, 0.0f);
      for (int h = 0; h < kHalves<kForm>; ++h) {
        std::fill_n(offsets_ + h * apart + (t * padded_ + from) * kOwn<kForm>, rest * kOwn<kForm>, 0);
        std::fill_n(shifts_ + (t * kHalves<kForm> + h) * padded_ + from, rest, 0.0f);
      }
    }
  }

  // Every loop does one thing, so that compilers make vectors of it.
  void Set(int64_t t, int64_t g, const Bf16* x) {
    constexpr float kRounder = 12582912;   // a number of this size has no digits behind the point
    constexpr int32_t kBits = 0x4b400000;  // the bits of kRounder: those of a sum say by how much it is larger
    constexpr int64_t kEach = kGroup / kHalves<kForm>;
    uint16_t most = 0;
    for (int64_t i = 0; i < kGroup; ++i) most = std::max<uint16_t>(most, x[i] & 0x7fff);
    const bool finite = most < 0x7f80;
    const float scale = Widen(most) / 127, by = finite && scale > 0 ? scale : std::numeric_limits<float>::infinity();
    float values[kGroup];
    int32_t whole[kGroup];
    int8_t own[kGroup];
    for (int64_t i = 0; i < kGroup; ++i) values[i] = Widen(x[i]) / by;
    for (int64_t i = 0; i < kGroup; ++i) values[i] = values[i] < -127 ? -127 : values[i];
    for (int64_t i = 0; i < kGroup; ++i) values[i] = (values[i] > 127 ? 127 : values[i]) + kRounder;
    std::memcpy(whole, values, sizeof whole);
    for (int64_t i = 0; i < kGroup; ++i) whole[i] = finite ? whole[i] - kBits : 0;
    for (int64_t i = 0; i < kGroup; ++i) own[i] = int8_t(whole[i]);
    int8_t* const to = q_ + t * padded_ * kGroup + First<kForm>(g);
    std::memcpy(to, own, kHalf);
    std::memcpy(to + kSecond<kForm>, own + kHalf, kHalf);
    const float factor = finite ? scale : std::numeric_limits<float>::quiet_NaN();
    scales_[t * padded_ + g] = factor;
    for (int h = 0; h < kHalves<kForm>; ++h) {
      int32_t sum = 0;
      for (int64_t i = 0; i < kEach; ++i) sum += whole[h * kEach + i];
      int32_t* const offset = offsets_ + h * apart + (t * padded_ + g) * kOwn<kForm>;
      std::fill_n(offset, kOwn<kForm>, 0);
      offset[0] = -kOffset<kForm> * sum;
      shifts_[(t * kHalves<kForm> + h) * padded_ + g] = float(offset[0]) * factor;
    }
  }

  const int8_t* q(int64_t t) const { return q_ + t * padded_ * kGroup; }
  const float* scales(int64_t t) const { return scales_ + t * padded_; }
  const int32_t* offsets(int64_t t) const { return offsets_ + t * padded_ * kOwn<kForm>; }  // of the first of its lanes

  const float* shifts(int64_t t, int h) const { return shifts_ + (t * kHalves<kForm> + h) * padded_; }  // scaled offsets

  const int64_t groups;

 private:
  const int64_t padded_;  // groups of a row

 public:
  const int64_t apart;  // numbers from the offset of a group's first half to that of the second

 private:
  std::unique_ptr<char[]> memory_[4];
  int8_t* q_;
  float* scales_;
  int32_t* offsets_;
  float* shifts_;
};

#ifdef LING3_VECTORS
// The next kStep bytes of q, or so many of them and zeros, as products take them. Their bits 4 and 5 are at `more`.
template <Form kForm> void Take(const uint8_t* from, const uint8_t* more, int64_t bytes, Ints32* out) {
  const Ints32 bits = bytes < kPiece ? LoadSome(from, bytes) : Load(from);
  out[0] = kForm == kInt8 ? Unsigned(bits) : Low(bits);
  out[1] = kStep<kForm> > kPiece ? Load(from + kPiece) : High(bits);
  if constexpr (kForm == kCode4) out[0] = Lookup(out[0]), out[1] = Lookup(out[1]);
  if constexpr (kForm == kCode6) {
    Ints32 high[2];
    Fifth(more, bytes / 2, high);
    out[0] |= high[0], out[1] |= high[1];
  }
}

// out[t * stride] += <x[rows[t]], w> for T rows of x and one row of a weight. Meanwhile what is `ahead` is asked for.
template <Form kForm, int T>
void Stream(const uint8_t* q, const Bf16* scale, const uint8_t* ahead, const Rows<kForm>& x, const int32_t* rows,
            float* out, int64_t stride) {
  constexpr int64_t kPieces = kBlock / kOf<kForm>;
  const int8_t* own[T];
  const float* own_scales[T];
  const float* shifts[T][kHalves<kForm>];
  Floats32 sums[T][2];
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    own[t] = x.q(rows[t]), own_scales[t] = x.scales(rows[t]);
    for (int h = 0; h < kHalves<kForm>; ++h) shifts[t][h] = x.shifts(rows[t], h);
    sums[t][0] = sums[t][1] = Spread(0.0f);
  }
  Scales<kForm> scales[T];
  const auto scale_by = [&](int64_t g, Ints32 words) __attribute__((always_inline)) {
    const Scales<kForm> wide(words);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      scales[t] = wide.By(LoadFloats(own_scales[t] + g));
      for (int h = 0; h < kHalves<kForm> && kOffset<kForm>; ++h) sums[t][h] += wide.half[h] * LoadFloats(shifts[t][h] + g);
    }
  };
  const Ints32 none[] = {Spread(0), Spread(0)};
  const auto piece = [&](int64_t g, int64_t i, int64_t bytes) __attribute__((always_inline)) {
    const int64_t at = g + i * kOf<kForm>;
    Ints32 both[2];
    Take<kForm>(q + at * kLow<kForm>, q + x.groups * kLow<kForm> + at * (kBytes<kForm> - kLow<kForm>), bytes, both);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      AddProducts<kForm>(none, both, own[t] + at * kGroup, scales[t], i, sums[t][kHalves<kForm> == 2 ? 0 : i % 2],
                         sums[t][1]);
    }
  };
  int64_t g = 0;
  for (; g + kBlock <= x.groups; g += kBlock) {
    scale_by(g, Words(scale + g));
    __builtin_prefetch(scale + g + kFarScales, 0, 0);
#pragma GCC unroll 8
    for (int64_t i = 0; i < kPieces; ++i) {
      if (i * kStep<kForm> % 64 == 0) __builtin_prefetch(ahead + g * kBytes<kForm> + i * kStep<kForm>, 0, 0);
      piece(g, i, kStep<kForm>);
    }
    for (int64_t at = kBlock * kLow<kForm>; at < kBlock * kBytes<kForm>; at += 64) {
      __builtin_prefetch(ahead + g * kBytes<kForm> + at, 0, 0);
    }
  }
  if (const int64_t rest = x.groups - g; rest) {
    scale_by(g, SomeWords(scale + g, rest));
    const int64_t bytes = rest * kLow<kForm>;
    for (int64_t i = 0; i * kStep<kForm> < bytes; ++i) piece(g, i, std::min(kStep<kForm>, bytes - i * kStep<kForm>));
  }
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) out[t * stride] += Total(sums[t][0] + sums[t][1]);
}

// Sums over parts of products with a few rows of x. Every vector of sums belongs to fixed outputs until the last part is
// in. Rows of so few groups that a block holds several whole ones are read as if they were one row.
template <Form kForm> class Parts {
 public:
  Parts(int64_t outputs, int64_t groups, int64_t count)
      : outputs_(outputs), groups_(groups), count_(count), joined_(groups < kBlock && kBlock % groups == 0),
        each_(joined_ ? std::max<int64_t>(1, groups / kOf<kForm>) : kVectors) {
    for (int64_t t = 0; t < count; ++t) std::fill_n(sums_[t], outputs, Spread(0.0f));
  }

  // Adds a part: all outputs' rows of the weight, which follow each other. Meanwhile those of the next part, which lie
  // elsewhere, are asked for.
  void Add(const uint8_t* q, const Bf16* scale, const Rows<kForm>& x, const int32_t* rows, const uint8_t* next,
           const Bf16* next_scale) {
    const int64_t step = joined_ ? outputs_ * groups_ : groups_;  // groups of a row that is read as one
    for (int64_t t = 0; t < count_ && joined_; ++t) Repeat(t, x, rows[t]);
    for (int64_t from = 0, sum = 0; from < outputs_ * groups_; from += step) {
      for (int64_t g = 0; g < step; g += kBlock) {
        const int64_t at = from + g, own = std::min(kBlock, step - g);
        for (int64_t byte = 0; byte < own * kBytes<kForm>; byte += 64) {
          __builtin_prefetch(next + at * kBytes<kForm> + byte, 0, 0);
        }
        __builtin_prefetch(next_scale + at, 0, 0);
        const Scales<kForm> wide(own == kBlock ? Words(scale + at) : SomeWords(scale + at, own));
        for (int64_t t = 0; t < count_; ++t) {
          const int8_t* const own_x = joined_ ? x_[t] : x.q(rows[t]) + g * kGroup;
          const int32_t* const offsets = joined_ ? offsets_[t] : x.offsets(rows[t]) + g * kOwn<kForm>;
          const Scales<kForm> scales = wide.By(LoadFloats(joined_ ? scales_[t] : x.scales(rows[t]) + g));
          const int64_t apart = joined_ ? kBlock * kOwn<kForm> : x.apart;
          const auto take = [&](auto block) {
            block(q + at * kBytes<kForm>, own * kBytes<kForm>, scales, own_x, offsets, apart, sums_[t] + sum);
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
    const int64_t own = joined_ ? std::min<int64_t>(kLanes, groups_ * kOwn<kForm>) : kLanes;  // lanes of an output
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
  static constexpr int64_t kVectors = kBlock / kOf<kForm>;  // of a block

  // Adds the products of `bytes` of a weight, a block at most, to sums, kEach vectors to each.
  template <int kEach>
  static void Block(const uint8_t* q, int64_t bytes, const Scales<kForm>& scales, const int8_t* x,
                    const int32_t* offsets, int64_t apart, Floats32* sums) {
    const auto piece = [&](int64_t i, int64_t count, Floats32& sum) __attribute__((always_inline)) {
      Ints32 both[2];
      Take<kForm>(q + i * kStep<kForm>, nullptr, count, both);
      const int64_t g = i * kOf<kForm>;
      const int32_t* const own = offsets + g * kOwn<kForm>;
      const Ints32 begin[] = {Load(own), Load(kHalves<kForm> == 2 ? own + apart : own)};
      AddProducts<kForm>(begin, both, x + g * kGroup, scales, i, sum, sum);
    };
    if (bytes == kBlock * kBytes<kForm>) {
#pragma GCC unroll 8
      for (int64_t first = 0; first < kVectors; first += kEach) {
        Floats32 sum = sums[first / kEach];
#pragma GCC unroll 8
        for (int64_t i = first; i < std::min<int64_t>(kVectors, first + kEach); ++i) piece(i, kStep<kForm>, sum);
        sums[first / kEach] = sum;
      }
      return;
    }
    for (int64_t i = 0; i * kStep<kForm> < bytes; ++i) {
      piece(i, std::min(kStep<kForm>, bytes - i * kStep<kForm>), sums[i / kEach]);
    }
  }

  // A block in which a row of x stands again and again.
  void Repeat(int64_t t, const Rows<kForm>& x, int64_t row) {
    for (int64_t first = 0; first < kBlock; first += groups_) {
      for (int64_t g = 0; g < groups_; ++g) {
        const int64_t from = First<kForm>(g), to = First<kForm>(first + g);
        std::memcpy(x_[t] + to, x.q(row) + from, kHalf);
        std::memcpy(x_[t] + to + kSecond<kForm>, x.q(row) + from + kSecond<kForm>, kHalf);
        scales_[t][first + g] = x.scales(row)[g];
        for (int h = 0; h < kHalves<kForm>; ++h) {
          int32_t* const to = offsets_[t] + (h * kBlock + first + g) * kOwn<kForm>;
          std::memcpy(to, x.offsets(row) + h * x.apart + g * kOwn<kForm>, kOwn<kForm> * 4);
        }
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
  alignas(64) int32_t offsets_[kStream][kBlock * kOwn<kForm> * kHalves<kForm>];
};
#endif

}  // namespace

#endif  // LING3_INTEGERS_H_
