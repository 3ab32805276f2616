// Vectors of integers and floats as the kernels of 8 and 4 bits use them, and what a group of 32 numbers is in them: one
// section for AVX-512 with VNNI, one for AVX2, one for NEON with sdot. Without any of them there are plain loops alone.
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

constexpr int64_t kGroup = 32;   // numbers that share a scale
constexpr int64_t kHalf = 16;    // numbers of a group in the low halves of its bytes, where it has 4 bits

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
#ifdef __AVX512VNNI__
template <int kBits> constexpr int32_t kOffset = kBits == 8 ? 128 : 8;
#else
template <int kBits> constexpr int32_t kOffset = kBits == 8 ? 0 : 8;
#endif
template <int kBits> constexpr int64_t kBytes = kBits * 4;  // of a group
template <int kBits> constexpr int64_t kOf = std::max<int64_t>(1, kPiece / kBytes<kBits>);  // groups in a vector
template <int kBits> constexpr int64_t kOwn = kLanes / kOf<kBits>;  // lanes of a vector that belong to one group
template <int kBits> constexpr int64_t kStep = kOf<kBits> * kBytes<kBits>;  // bytes of q that are multiplied at once

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
// For each group of vector `i` of a block, its scale in each of its lanes.
template <int kBits> Floats32 Each(Floats32 scales, int64_t i) {
  alignas(64) static constexpr int32_t kFour[] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  const Ints32 at = kBits == 8 ? _mm512_srli_epi32(Load(kFour), 1) : Load(kFour);
  return _mm512_permutexvar_ps(_mm512_add_epi32(at, Spread(int32_t(i * kOf<kBits>))), scales);
}
// kBlock scales in fp32.
Floats32 Scales(const Bf16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Floats32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}
// The first bytes of a vector, and zeros; and the first of its scales.
Ints32 LoadSome(const void* from, int64_t bytes) { return _mm512_maskz_loadu_epi8((__mmask64(1) << bytes) - 1, from); }
Floats32 SomeScales(const Bf16* from, int64_t count) {
  const __m256i bits = _mm256_maskz_loadu_epi16(__mmask16((1 << count) - 1), from);
  return (Floats32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}
// q as the unsigned operand of products.
Ints32 Unsigned(Ints32 q) { return _mm512_xor_si512(q, _mm512_set1_epi8(-128)); }
// A sum, and products of a vector of q with one of x, added up in fours.
template <int kBits> Ints32 Dot(Ints32 sum, Ints32 q, Ints32 x) { return _mm512_dpbusd_epi32(sum, q, x); }
// What the sum of a group begins with, and what it is at the end.
template <int kBits> Ints32 Begin(int32_t offset) { return Spread(offset); }
template <int kBits> Ints32 Whole(Ints32 sum, int32_t offset) { return sum; }
template <int kBits> Ints32 Multiply(const Ints32* q, const int8_t* x, const int32_t* offsets) {
  const Ints32 sum = Dot<kBits>(Load(offsets), q[0], Load(x));
  return kBits == 8 ? sum : Dot<kBits>(sum, q[1], Load(x + kPiece));
}
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
template <int kBits> Floats32 Each(Floats32 scales, int64_t i) {
  const Ints32 at = kBits == 8 ? Spread(0) : _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
  return _mm256_permutevar8x32_ps(scales, _mm256_add_epi32(at, Spread(int32_t(i * kOf<kBits>))));
}
Floats32 Scales(const Bf16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (Floats32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
}
Ints32 LoadSome(const void* from, int64_t bytes) {
  alignas(32) uint8_t all[32] = {};
  std::memcpy(all, from, bytes);
  return Load(all);
}
Ints32 Unsigned(Ints32 q) { return q; }
Ints32 Pairs(Ints32 sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
// Magnitudes times x with the sign of q: two products, 2 * 128 * 127, fit 16 bits, as do four of 15 * 127.
Ints32 Signed(Ints32 q, Ints32 x) { return Pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(x, q))); }
// Of 4 bits all 16 products of a pair of bytes in a group, 15 * 127 each, fit 16 bits: the sum is of 16 bits until it is whole.
template <int kBits> Ints32 Dot(Ints32 sum, Ints32 q, Ints32 x) {
  if (kBits == 8) return _mm256_add_epi32(sum, Signed(q, x));
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(q, x));
}
template <int kBits> Ints32 Begin(int32_t offset) { return Spread(0); }
template <int kBits> Ints32 Whole(Ints32 sum, int32_t offset) {
  return kBits == 8 ? sum : _mm256_add_epi32(Pairs(sum), Spread(offset));
}
template <int kBits> Ints32 Multiply(const Ints32* q, const int8_t* x, const int32_t* offsets) {
  if (kBits == 8) return Signed(q[0], Load(x));
  const Ints32 sum = Dot<kBits>(_mm256_maddubs_epi16(q[0], Load(x)), q[1], Load(x + kPiece));
  return _mm256_add_epi32(Load(offsets), Pairs(sum));
}
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
template <int kBits> Floats32 Each(Floats32 scales, int64_t i) { return Spread(scales[i]); }
Ints32 LoadSome(const void* from, int64_t) { return Load(from); }  // a vector holds one group at most
Floats32 Scales(const Bf16* from) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from), 16)); }
Ints32 Unsigned(Ints32 q) { return q; }
template <int kBits> Ints32 Dot(Ints32 sum, Ints32 q, Ints32 x) {
  return vdotq_s32(sum, vreinterpretq_s8_s32(q), vreinterpretq_s8_s32(x));
}
template <int kBits> Ints32 Begin(int32_t offset) { return Spread(kBits == 8 ? 0 : offset); }
template <int kBits> Ints32 Whole(Ints32 sum, int32_t offset) { return sum; }
template <int kBits> Ints32 Multiply(const Ints32* q, const int8_t* x, const int32_t* offsets) {
  const Ints32 sum = kBits == 8 ? Spread(0) : Load(offsets);
  return Dot<kBits>(Dot<kBits>(sum, q[0], Load(x)), q[1], Load(x + kPiece));
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

#ifndef __AVX512VNNI__
Floats32 SomeScales(const Bf16* from, int64_t count) {
  Bf16 all[kBlock] = {};
  std::copy_n(from, count, all);
  return Scales(all);
}
#endif
#endif  // LING3_VECTORS

}  // namespace

#endif  // LING3_VECTORS_H_
