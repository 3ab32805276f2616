// What the sources of the kernels share: numbers of bf16, tasks over all cores, and functions of a few numbers.
#ifndef LING3_SHARED_H_
#define LING3_SHARED_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

// Several libraries of kernels run in one process, and none may call what another one has.
#define LING3_OWN __attribute__((visibility("hidden")))

namespace ffi = xla::ffi;
using Bf16 = uint16_t;
using Bf16s = ffi::Buffer<ffi::BF16>;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

// What a call reads, from its end on: so many groups of `bytes`, each `step` before the last one. The end names the call.
struct Range {
  const char* end = nullptr;
  int64_t bytes = 0, step = 0, groups = 1;
};

// How many cores each of so many devices has.
inline int64_t Cores(int32_t devices) { return std::max<int64_t>(1, std::thread::hardware_concurrency() / devices); }

// Calls run(0) … run(count - 1), by this thread and by others of XLA's pool where cores are left over.
LING3_OWN void Parallel(ffi::ThreadPool pool, int32_t devices, int64_t count, Range own,
                        std::function<void(int64_t)> run);

// min(silu(gate), limit) * clip(up, limit) of each of up to kOutputs numbers, in bf16.
LING3_OWN void Swiglu(const float* gate, const float* up, int64_t count, float limit, Bf16* out);

namespace {

constexpr int64_t kOutputs = 64;  // outputs of a task: 200 kB of weights at Ling3-Tiny's width

float Widen(Bf16 value) {
  uint32_t bits = uint32_t(value) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

Bf16 Round(float value) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return 0x7fc0;
  return Bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// One past the last row of x that is not all zeros: rows of padding are, stand last, and cost nothing.
template <class Number>
int64_t Used(const Number* x, int64_t rows, int64_t width) {
  const auto zero = [](Number value) { return value == 0; };
  while (rows && std::all_of(x + (rows - 1) * width, x + rows * width, zero)) --rows;
  return rows;
}

std::vector<const Bf16*> Pointers(const Bf16* from, int64_t rows, int64_t stride) {
  std::vector<const Bf16*> out(rows);
  for (int64_t t = 0; t < rows; ++t) out[t] = from + t * stride;
  return out;
}

const Bf16* Data(const Bf16s& buffer) { return reinterpret_cast<const Bf16*>(buffer.untyped_data()); }

ffi::Error CheckLayer(int64_t layer, int64_t layers) {
  if (layer >= 0 && layer < layers) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("layer: expected one of the stack");
}

}  // namespace

#endif  // LING3_SHARED_H_
