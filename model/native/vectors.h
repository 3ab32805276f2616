// Vectors of integers and floats as the kernels for quantized weights use them, and how a group of 32 numbers lies in
// them: one section for AVX-512 with VNNI, one for AVX2, with VNNI or without, one for NEON with sdot. Other processors
// have plain loops.
#ifndef LING3_VECTORS_H_
#define LING3_VECTORS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#define LING3_VECTORS
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define LING3_VECTORS
#endif

#include "shared.h"

namespace {

enum Form { kInt8, kInt4, kCode4, kCode6 };  // of weights; quantized.cc says how each lies

constexpr int64_t kGroup = 32;   // numbers that share a scale
constexpr int64_t kHalf = 16;    // numbers of a group in the low halves of its bytes, where it has 4 bits
constexpr int32_t kUnit = -48;   // the power of two of a scale of kCode4 or kCode6 whose exponent is 0

#if defined(__AVX512VNNI__)
constexpr int kLanes = 16;
constexpr int kPanels = 2;        // vectors of outputs whose sums stay in registers
constexpr int64_t kTall = 6;      // and rows of x
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kPanels = 1;
constexpr int64_t kTall = 4;
#else
constexpr int kLanes = 4;
constexpr int kPanels = 2;
constexpr int64_t kTall = 6;
#endif
constexpr int64_t kPiece = 4 * kLanes;  // bytes of a vector
constexpr int64_t kBlock = kLanes;      // groups whose scales fill a vector

// What is added to q so that it is not negative, as products of unsigned with signed bytes want it.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int32_t kOfBytes = 128;
#else
constexpr int32_t kOfBytes = 0;
#endif
template <Form kForm>
constexpr int32_t kOffset = kForm == kInt8 ? kOfBytes : kForm == kInt4 ? 8 : kForm == kCode4 ? 64 : 32;
// The values of kCode4, each with kOffset added: below 128, so that two products with bytes fit 16 bits.
alignas(16) constexpr uint8_t kCodes[] = {1, 12, 24, 34, 42, 49, 55, 60, 65, 70, 75, 81, 88, 95, 105, 119};

template <Form kForm> constexpr int kHalves = kForm == kCode4 || kForm == kCode6 ? 2 : 1;  // scales of a group
template <Form kForm> constexpr int64_t kLow = kForm == kInt8 ? 32 : 16;  // bytes of a group without those of bits 4, 5
template <Form kForm> constexpr int64_t kBytes = kLow<kForm> + (kForm == kCode6 ? 8 : 0);  // of a group
template <Form kForm> constexpr int64_t kOf = std::max<int64_t>(1, kPiece / kLow<kForm>);  // groups in a vector
template <Form kForm> constexpr int64_t kOwn = kLanes / kOf<kForm>;  // lanes of a vector that belong to one group
template <Form kForm> constexpr int64_t kStep = kOf<kForm> * kLow<kForm>;  // bytes of q that are multiplied at once

#ifdef LING3_VECTORS
#if defined(__AVX512VNNI__)
using Ints32 = __m512i;
using Floats32 = __m512;
Ints32 Load(const void* from) { return _mm512_loadu_si512(from); }
Floats32 LoadFloats(const float* from) { return _mm512_loadu_ps(from); }
void Store(void* to, Ints32 value) { _mm512_storeu_si512(to, value); }
void Store(float* to, Floats32 value) { _mm512_storeu_ps(to, value); }
Ints32 Spread(int32_t value) { return _mm512_set1_epi32(value); }
Floats32 Spread(float value) { return _mm512_set1_ps(value); }
Floats32 Float(Ints32 value) { return _mm512_cvtepi32_ps(value); }
float Total(Floats32 value) { return _mm512_reduce_add_ps(value); }
Ints32 Low(Ints32 value) { return _mm512_and_si512(value, _mm512_set1_epi8(15)); }
Ints32 High(Ints32 value) { return Low(_mm512_srli_epi16(value, 4)); }
// The numbers of kCodes at sixteenths.
Ints32 Lookup(Ints32 at) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kCodes))), at);
}
// Bits 4 and 5 of a vector's groups, of which each has 8 bytes: those of its first half, and of its second.
void Fifth(const uint8_t* from, int64_t bytes, Ints32* out) {
  const __m256i some = _mm256_maskz_loadu_epi8(__mmask32((uint64_t(1) << bytes) - 1), from);
  const __m512i at = _mm512_set_epi64(3, 3, 2, 2, 1, 1, 0, 0);
  const __m512i twice = _mm512_permutexvar_epi64(at, _mm512_castsi256_si512(some));
  const __m512i bits = _mm512_set1_epi8(0x30);
  out[0] = _mm512_and_si512(bits, _mm512_sllv_epi64(twice, _mm512_set_epi64(2, 4, 2, 4, 2, 4, 2, 4)));
  out[1] = _mm512_and_si512(bits, _mm512_srlv_epi64(twice, _mm512_set_epi64(2, 0, 2, 0, 2, 0, 2, 0)));
}
// For each group of vector `i` of a block, its scale in each of its lanes.
template <Form kForm> Floats32 Each(Floats32 scales, int64_t i) {
  alignas(64) static constexpr int32_t kFour[] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  const Ints32 at = kForm == kInt8 ? _mm512_srli_epi32(Load(kFour), 1) : Load(kFour);
  return _mm512_permutexvar_ps(_mm512_add_epi32(at, Spread(int32_t(i * kOf<kForm>))), scales);
}
// kBlock scales, each in the low half of an integer.
Ints32 Words(const Bf16* from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
// The first bytes of a vector, and zeros; and the first of its scales.
Ints32 LoadSome(const void* from, int64_t bytes) { return _mm512_maskz_loadu_epi8((__mmask64(1) << bytes) - 1, from); }
Ints32 SomeWords(const Bf16* from, int64_t count) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16((1 << count) - 1), from));
}
// q as the unsigned operand of products.
Ints32 Unsigned(Ints32 q) { return _mm512_xor_si512(q, _mm512_set1_epi8(-128)); }
// A sum, and products of a vector of q with one of x, added up in fours.
template <Form kForm> Ints32 Dot(Ints32 sum, Ints32 q, Ints32 x) { return _mm512_dpbusd_epi32(sum, q, x); }
// 16 bytes at `at` of rows i, i + 4, i + 8 and i + 12.
Ints32 Across(const uint8_t* const* rows, int i, int64_t at) {
  const auto load = [=](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + at)); };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(load(i)), load(i + 4), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(load(i + 8)), load(i + 12), 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
#define LING3_WIDE(name) _mm512_##name
#elif defined(__AVX2__)
using Ints32 = __m256i;
using Floats32 = __m256;
Ints32 Load(const void* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
Floats32 LoadFloats(const float* from) { return _mm256_loadu_ps(from); }
void Store(void* to, Ints32 value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value); }
void Store(float* to, Floats32 value) { _mm256_storeu_ps(to, value); }
Ints32 Spread(int32_t value) { return _mm256_set1_epi32(value); }
Floats32 Spread(float value) { return _mm256_set1_ps(value); }
Floats32 Float(Ints32 value) { return _mm256_cvtepi32_ps(value); }
float Total(Floats32 value) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  const __m128 two = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
Ints32 Low(Ints32 value) { return _mm256_and_si256(value, _mm256_set1_epi8(15)); }
Ints32 High(Ints32 value) { return Low(_mm256_srli_epi16(value, 4)); }
Ints32 Lookup(Ints32 at) {
  const __m128i codes = _mm_load_si128(reinterpret_cast<const __m128i*>(kCodes));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(codes), at);
}
void Fifth(const uint8_t* from, int64_t bytes, Ints32* out) {
  alignas(16) uint8_t all[16] = {};
  if (bytes < 16) std::memcpy(all, from, bytes), from = all;
  const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m256i twice = _mm256_permute4x64_epi64(_mm256_castsi128_si256(some), 0x50), bits = _mm256_set1_epi8(0x30);
  out[0] = _mm256_and_si256(bits, _mm256_sllv_epi64(twice, _mm256_set_epi64x(2, 4, 2, 4)));
  out[1] = _mm256_and_si256(bits, _mm256_srlv_epi64(twice, _mm256_set_epi64x(2, 0, 2, 0)));
}
template <Form kForm> Floats32 Each(Floats32 scales, int64_t i) {
  const Ints32 at = kForm == kInt8 ? Spread(0) : _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
  return _mm256_permutevar8x32_ps(scales, _mm256_add_epi32(at, Spread(int32_t(i * kOf<kForm>))));
}
Ints32 Words(const Bf16* from) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
Ints32 LoadSome(const void* from, int64_t bytes) {
  alignas(32) uint8_t all[32] = {};
  std::memcpy(all, from, bytes);
  return Load(all);
}
#ifdef __AVXVNNI__
Ints32 Unsigned(Ints32 q) { return _mm256_xor_si256(q, _mm256_set1_epi8(-128)); }
template <Form kForm> Ints32 Dot(Ints32 sum, Ints32 q, Ints32 x) { return _mm256_dpbusd_avx_epi32(sum, q, x); }
#else
Ints32 Unsigned(Ints32 q) { return q; }
Ints32 Pairs(Ints32 sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
// Magnitudes times x with the sign of q: two products, 2 * 128 * 127, fit 16 bits, as do four of 15 * 127.
Ints32 Signed(Ints32 q, Ints32 x) { return Pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(x, q))); }
// Of 4 bits all 16 products of a pair of bytes in a group, 15 * 127 each, fit 16 bits: the sum is of 16 bits until it is whole.
template <Form kForm> Ints32 Dot(Ints32 sum, Ints32 q, Ints32 x) {
  if (kForm == kInt8) return _mm256_add_epi32(sum, Signed(q, x));
  if (kForm == kInt4) return _mm256_add_epi16(sum, _mm256_maddubs_epi16(q, x));
  return _mm256_add_epi32(sum, Pairs(_mm256_maddubs_epi16(q, x)));
}
template <Form kForm> Ints32 Begin(int32_t offset) { return Spread(kHalves<kForm> == 2 ? offset : 0); }
template <Form kForm> Ints32 Whole(Ints32 sum, int32_t offset) {
  return kForm == kInt4 ? _mm256_add_epi32(Pairs(sum), Spread(offset)) : sum;
}
template <Form kForm> Ints32 Multiply(Ints32 begin, const Ints32* q, const int8_t* x) {
  if (kForm == kInt8) return Signed(q[0], Load(x));
  const Ints32 sum = Dot<kForm>(_mm256_maddubs_epi16(q[0], Load(x)), q[1], Load(x + kPiece));
  return _mm256_add_epi32(begin, Pairs(sum));
}
#endif
Ints32 Across(const uint8_t* const* rows, int i, int64_t at) {
  const auto load = [=](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + at)); };
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load(i)), load(i + 4), 1);
}
#define LING3_WIDE(name) _mm256_##name
#else
using Ints32 = int32x4_t;
using Floats32 = float32x4_t;
Ints32 Load(const void* from) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(from))); }
Floats32 LoadFloats(const float* from) { return vld1q_f32(from); }
void Store(void* to, Ints32 value) { vst1q_u8(static_cast<uint8_t*>(to), vreinterpretq_u8_s32(value)); }
void Store(float* to, Floats32 value) { vst1q_f32(to, value); }
Ints32 Spread(int32_t value) { return vdupq_n_s32(value); }
Floats32 Spread(float value) { return vdupq_n_f32(value); }
Floats32 Float(Ints32 value) { return vcvtq_f32_s32(value); }
float Total(Floats32 value) { return vaddvq_f32(value); }
Ints32 Low(Ints32 value) { return value & Spread(0x0f0f0f0f); }
Ints32 High(Ints32 value) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(value), 4)); }
Ints32 Lookup(Ints32 at) { return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(kCodes), vreinterpretq_u8_s32(at))); }
void Fifth(const uint8_t* from, int64_t, Ints32* out) {
  const uint8x16_t twice = vcombine_u8(vld1_u8(from), vld1_u8(from));
  const auto by = [](int8_t first, int8_t second) { return vcombine_s8(vdup_n_s8(first), vdup_n_s8(second)); };
  out[0] = vreinterpretq_s32_u8(vshlq_u8(twice, by(4, 2))) & Spread(0x30303030);
  out[1] = vreinterpretq_s32_u8(vshlq_u8(twice, by(0, -2))) & Spread(0x30303030);
}
template <Form kForm> Floats32 Each(Floats32 scales, int64_t i) { return Spread(scales[i]); }
Ints32 LoadSome(const void* from, int64_t) { return Load(from); }  // a vector holds one group at most
Ints32 Words(const Bf16* from) { return vreinterpretq_s32_u32(vmovl_u16(vld1_u16(from))); }
Ints32 Unsigned(Ints32 q) { return q; }
template <Form kForm> Ints32 Dot(Ints32 sum, Ints32 q, Ints32 x) {
  return vdotq_s32(sum, vreinterpretq_s8_s32(q), vreinterpretq_s8_s32(x));
}
template <Form kForm> Ints32 Begin(int32_t offset) { return Spread(kForm == kInt8 ? 0 : offset); }
template <Form kForm> Ints32 Whole(Ints32 sum, int32_t offset) { return sum; }
template <Form kForm> Ints32 Multiply(Ints32 begin, const Ints32* q, const int8_t* x) {
  return Dot<kForm>(Dot<kForm>(kForm == kInt8 ? Spread(0) : begin, q[0], Load(x)), q[1], Load(x + kPiece));
}
Ints32 Across(const uint8_t* const* rows, int i, int64_t at) { return Load(rows[i] + at); }
int64x2_t Wide(Ints32 value) { return vreinterpretq_s64_s32(value); }
#define LING3_WIDE(name) Neon_##name
Ints32 Neon_unpacklo_epi32(Ints32 a, Ints32 b) { return vzip1q_s32(a, b); }
Ints32 Neon_unpackhi_epi32(Ints32 a, Ints32 b) { return vzip2q_s32(a, b); }
Ints32 Neon_unpacklo_epi64(Ints32 a, Ints32 b) { return vreinterpretq_s32_s64(vzip1q_s64(Wide(a), Wide(b))); }
Ints32 Neon_unpackhi_epi64(Ints32 a, Ints32 b) { return vreinterpretq_s32_s64(vzip2q_s64(Wide(a), Wide(b))); }
Ints32 Neon_slli_epi32(Ints32 value, int bits) { return value << bits; }
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// The beginning of a group's sum, and its end: products take offsets as they are. Other processors have their own above.
template <Form kForm> Ints32 Begin(int32_t offset) { return Spread(offset); }
template <Form kForm> Ints32 Whole(Ints32 sum, int32_t offset) { return sum; }
template <Form kForm> Ints32 Multiply(Ints32 begin, const Ints32* q, const int8_t* x) {
  const Ints32 sum = Dot<kForm>(begin, q[0], Load(x));
  return kForm == kInt8 ? sum : Dot<kForm>(sum, q[1], Load(x + kPiece));
}
#endif

#ifndef __AVX512VNNI__
Ints32 SomeWords(const Bf16* from, int64_t count) {
  Bf16 all[kBlock] = {};
  std::copy_n(from, count, all);
  return Words(all);
}
#endif

// The scales of groups: one of each, or those of its halves.
typedef int32_t Lanes32 __attribute__((vector_size(kPiece)));  // which has shifts, whatever the processor

template <Form kForm> struct Scales {
  Floats32 half[kHalves<kForm>];

  Scales() = default;
  // From kBlock numbers as they are stored, each in the low half of an integer.
  explicit Scales(Ints32 words) {
    const Lanes32 bits = (Lanes32)words;
    if constexpr (kHalves<kForm> == 1) {
      half[0] = (Floats32)(bits << 16);
    } else {
      const Floats32 unit = (Floats32)(((bits >> 10) + (127 + kUnit)) << 23);
      half[0] = unit * Float((Ints32)(bits << 22 >> 27)), half[1] = unit * Float((Ints32)(bits << 27 >> 27));
    }
  }
  Scales By(Floats32 factors) const {
    Scales out;
    for (int h = 0; h < kHalves<kForm>; ++h) out.half[h] = half[h] * factors;
    return out;
  }
};

// Adds products of a vector of groups, scaled, to two sums. `begin` has the integers that sums of products begin with,
// those of each half where a group has two scales.
template <Form kForm>
void AddProducts(const Ints32* begin, const Ints32* q, const int8_t* x, const Scales<kForm>& scales, int64_t i,
                 Floats32& first, Floats32& second) {
  if constexpr (kHalves<kForm> == 1) {
    first += Float(Multiply<kForm>(begin[0], q, x)) * Each<kForm>(scales.half[0], i);
  } else {
    first += Float(Dot<kForm>(begin[0], q[0], Load(x))) * Each<kForm>(scales.half[0], i);
    second += Float(Dot<kForm>(begin[1], q[1], Load(x + kPiece))) * Each<kForm>(scales.half[1], i);
  }
}
#endif  // LING3_VECTORS

}  // namespace

#endif  // LING3_VECTORS_H_
