// Products of a few rows with one layer of the model's bf16 weights, for XLA's foreign function interface.
//
// A handler gets a whole stack of weights and the number of a layer, so nothing is sliced or copied before it. Weights
// are read once, in the order in which they lie in memory, by all cores; sums are fp32. One form is compiled, chosen by
// the compiler's flags: vectors of LING3_BYTES bytes, on processors with avx512_bf16 its dot products, or, without
// LING3_BYTES, plain loops, which are what the other forms are tested against.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using Bf16 = uint16_t;
using Bf16s = ffi::Buffer<ffi::BF16>;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

namespace {

constexpr int64_t kOutputs = 64;  // outputs of a task: 200 kB of weights at Ling3-Tiny's width
constexpr int64_t kRows = 64;     // rows of x that stay in the second cache while a task's weights pass
constexpr int64_t kColumns = 128; // columns of a task of a product over rows of the weight

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
#endif

// y[t][o] = sum over d of x[t][d] w[o][d], for O outputs and T rows at once. Sums stay in registers only where the
// loops over t and o are unrolled.
#if defined(__AVX512BF16__)
template <int O, int T>
void Dots(const Bf16* w, int64_t step, const Bf16* const* x, int64_t depth, float out[T][O]) {
  __m512 sum[T][O];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) sum[t][o] = _mm512_setzero_ps();
  }
  const Bf16* rows[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) rows[t] = x[t];
  const auto add = [&](int64_t d, __mmask32 mask) __attribute__((always_inline)) {
    __m512bh wide[O];
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) wide[o] = (__m512bh)_mm512_maskz_loadu_epi16(mask, w + o * step + d);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m512bh each = (__m512bh)_mm512_maskz_loadu_epi16(mask, rows[t] + d);
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o) sum[t][o] = _mm512_dpbf16_ps(sum[t][o], wide[o], each);
    }
  };
  int64_t d = 0;
  for (; d + 32 <= depth; d += 32) add(d, ~__mmask32(0));
  if (d < depth) add(d, (__mmask32(1) << (depth - d)) - 1);
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) out[t][o] = _mm512_reduce_add_ps(sum[t][o]);
  }
}
#elif defined(LING3_BYTES)
template <int O, int T>
void Dots(const Bf16* w, int64_t step, const Bf16* const* x, int64_t depth, float out[T][O]) {
  Vector sum[T][O];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) sum[t][o] = Vector{};
  }
  int64_t d = 0;
  for (; d + 2 * kPairs <= depth; d += 2 * kPairs) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const Bits each = Load(x[t] + d);
      const Vector even = Even(each), odd = Odd(each);
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o) {
        const Bits bits = Load(w + o * step + d);
        sum[t][o] += Even(bits) * even;
        sum[t][o] += Odd(bits) * odd;
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
      float total = 0;
      for (int lane = 0; lane < kPairs; ++lane) total += sum[t][o][lane];
      for (int64_t rest = d; rest < depth; ++rest) total += Widen(x[t][rest]) * Widen(w[o * step + rest]);
      out[t][o] = total;
    }
  }
}
#else
template <int O, int T>
void Dots(const Bf16* w, int64_t step, const Bf16* const* x, int64_t depth, float out[T][O]) {
  for (int t = 0; t < T; ++t) {
    for (int o = 0; o < O; ++o) {
      out[t][o] = 0;
      for (int64_t d = 0; d < depth; ++d) out[t][o] += Widen(x[t][d]) * Widen(w[o * step + d]);
    }
  }
}
#endif

// out[t * stride + o] = <x[t], w[o]> for all `rows` rows of x and `outputs` rows of w.
template <int O, int T>
void Tile(const Bf16* w, int64_t depth, const Bf16* const* x, float* out, int64_t stride) {
  float tile[T][O];
  Dots<O, T>(w, depth, x, depth, tile);
  for (int t = 0; t < T; ++t) std::memcpy(out + t * stride, tile[t], sizeof(tile[t]));
}

void Outer(const Bf16* w, int64_t outputs, int64_t depth, const Bf16* const* x, int64_t rows, float* out,
           int64_t stride) {
  for (int64_t from = 0; from < rows; from += kRows) {
    const int64_t to = std::min(rows, from + kRows);
    int64_t o = 0;
    for (; o + 4 <= outputs; o += 4) {
      int64_t t = from;
      for (; t + 4 <= to; t += 4) Tile<4, 4>(w + o * depth, depth, x + t, out + t * stride + o, stride);
      for (; t < to; ++t) Tile<4, 1>(w + o * depth, depth, x + t, out + t * stride + o, stride);
    }
    for (; o < outputs; ++o) {
      for (int64_t t = from; t < to; ++t) Tile<1, 1>(w + o * depth, depth, x + t, out + t * stride + o, stride);
    }
  }
}

// out[t][c] += sum over f of x[t][f] w[f][c], for `columns` columns of w and T rows of x.
#ifdef LING3_BYTES
// V vectors side by side, so that what is read of a row of w is long enough for the memory.
template <int T, int V>
void Sums(const Bf16* w, int64_t step, int64_t depth, const Bf16* const* x, float* const* out, int64_t c) {
  Vector even[T][V], odd[T][V];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) even[t][v] = odd[t][v] = Vector{};
  }
  for (int64_t f = 0; f < depth; ++f) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      __builtin_prefetch(w + (f + 8) * step + v * 2 * kPairs);
      const Bits bits = Load(w + f * step + v * 2 * kPairs);
      const Vector low = Even(bits), high = Odd(bits);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const float each = Widen(x[t][f]);
        even[t][v] += low * each;
        odd[t][v] += high * each;
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* to = out[t] + c + v * 2 * kPairs;
      for (int lane = 0; lane < kPairs; ++lane) {
        to[2 * lane] += even[t][v][lane];
        to[2 * lane + 1] += odd[t][v][lane];
      }
    }
  }
}

template <int V>
int64_t Blocks(const Bf16* w, int64_t step, int64_t depth, int64_t c, int64_t columns, const Bf16* const* x,
                int64_t rows, float* const* out) {
  for (; c + V * 2 * kPairs <= columns; c += V * 2 * kPairs) {
    int64_t t = 0;
    for (; V <= 2 && t + 4 <= rows; t += 4) Sums<4, V>(w + c, step, depth, x + t, out + t, c);
    for (; t < rows; ++t) Sums<1, V>(w + c, step, depth, x + t, out + t, c);
  }
  return c;
}
#endif

void Inner(const Bf16* w, int64_t step, int64_t depth, int64_t columns, const Bf16* const* x, int64_t rows,
           float* const* out) {
  int64_t c = 0;
#ifdef LING3_BYTES
  if (rows < 4) c = Blocks<4>(w, step, depth, c, columns, x, rows, out);
  c = Blocks<2>(w, step, depth, c, columns, x, rows, out);
  c = Blocks<1>(w, step, depth, c, columns, x, rows, out);
#endif
  for (; c < columns; ++c) {
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t f = 0; f < depth; ++f) out[t][c] += Widen(x[t][f]) * Widen(w[f * step + c]);
    }
  }
}

// Calls run(0) … run(count - 1), by this thread and by others of XLA's pool where cores are left over.
//
// Tasks are claimed one by one, by this thread too, and it waits only for tasks that a running thread has claimed: so
// it cannot wait for a pool whose threads all wait.
struct Work {
  std::function<void(int64_t)> run;
  int64_t count;
  std::atomic<int64_t> next{0}, done{0};

  void Drain() {
    for (int64_t task; (task = next.fetch_add(1)) < count;) {
      run(task);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

void Parallel(ffi::ThreadPool pool, int32_t devices, int64_t count, std::function<void(int64_t)> run) {
  const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency() / devices);
  const int64_t helpers = std::min({cores, pool.num_threads(), count}) - 1;
  auto work = std::make_shared<Work>();
  work->run = std::move(run);
  work->count = count;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->Drain(); });
  work->Drain();
  while (work->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

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
};

ffi::Error CheckLayer(int64_t layer, int64_t layers) {
  if (layer >= 0 && layer < layers) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("layer: expected one of the stack");
}

// x [T, X] or [T, groups, X], w [s, n, ..., X] -> y [T, groups, Y]: products over the last axis of the weights.
ffi::Error Columns(ffi::ThreadPool pool, Bf16s x, Bf16s w, Ints layer_of, ffi::Result<Floats> y, int32_t devices) {
  const bool own = x.dimensions().size() == 3;
  const Stack stack(w, own ? w.dimensions()[2] : 1);
  const int64_t layer = layer_of.typed_data()[0], rows = x.dimensions()[0], depth = stack.columns;
  if (ffi::Error error = CheckLayer(layer, stack.layers); error.failure()) return error;
  const int64_t width = stack.groups() * stack.rows, tasks = (stack.rows + kOutputs - 1) / kOutputs;
  const Bf16* from = Data(x);
  float* out = y->typed_data();
  Parallel(pool, devices, stack.groups() * tasks, [=](int64_t task) {
    const int64_t g = task / tasks, o = task % tasks * kOutputs;
    const auto at = Pointers(from + (own ? g * depth : 0), rows, own ? stack.groups() * depth : depth);
    Outer(stack.group(g, layer) + o * depth, std::min(kOutputs, stack.rows - o), depth, at.data(), rows,
          out + g * stack.rows + o, width);
  });
  return ffi::Error::Success();
}

// x [T, groups, Y], w [s, n, ..., Y, X] -> y [T, X], the sum over all groups, or y [T, groups, X]: products over Y.
ffi::Error Rows(ffi::ThreadPool pool, Bf16s x, Bf16s w, Ints layer_of, ffi::Result<Floats> y, int32_t devices) {
  const bool own = y->dimensions().size() == 3;
  const Stack stack(w, own ? w.dimensions()[2] : 1);
  const int64_t layer = layer_of.typed_data()[0], rows = x.dimensions()[0];
  if (ffi::Error error = CheckLayer(layer, stack.layers); error.failure()) return error;
  const int64_t groups = stack.groups(), width = own ? groups * stack.columns : stack.columns;
  const int64_t tasks = (stack.columns + kColumns - 1) / kColumns;
  const Bf16* from = Data(x);
  float* out = y->typed_data();
  Parallel(pool, devices, (own ? groups : 1) * tasks, [=](int64_t task) {
    const int64_t first = task / tasks, c = task % tasks * kColumns, columns = std::min(kColumns, stack.columns - c);
    std::vector<float*> to(rows);
    for (int64_t t = 0; t < rows; ++t) {
      to[t] = out + t * width + first * stack.columns + c;
      std::fill_n(to[t], columns, 0.0f);
    }
    for (int64_t g = first; g < (own ? first + 1 : groups); ++g) {
      for (int64_t f = 0; f < stack.rows; f += kRows) {
        const auto at = Pointers(from + g * stack.rows + f, rows, groups * stack.rows);
        Inner(stack.group(g, layer) + f * stack.columns + c, stack.columns, std::min(kRows, stack.rows - f), columns,
              at.data(), rows, to.data());
      }
    }
  });
  return ffi::Error::Success();
}

// The chosen experts of one layer: sum over a of share[t, a] down(silu(gate x_t) * up x_t).
//
// x [T, D], gate_up [s, n, e, 2, F, D], down [s, n, e, D, F], chosen [T, A] with numbers of 0 to s e - 1 (others choose
// nothing), share [T, A] -> y [T, D].
ffi::Error Experts(ffi::ThreadPool pool, Bf16s x, Bf16s gate_up, Bf16s down, Ints layer_of, Ints chosen, Floats share,
                   ffi::Result<Floats> y, int32_t devices) {
  const int64_t each = gate_up.dimensions()[2], experts = gate_up.dimensions()[0] * each;
  const Stack up(gate_up, each), out_of(down, each);
  const int64_t layer = layer_of.typed_data()[0], tokens = x.dimensions()[0], top = chosen.dimensions()[1];
  if (ffi::Error error = CheckLayer(layer, up.layers); error.failure()) return error;
  const int64_t dim = up.columns, width = out_of.columns;
  struct Pair { const Bf16* x; float share; int64_t token; };
  std::vector<int64_t> start(experts + 1, 0);
  const int32_t* choice = chosen.typed_data();
  const float* weight = share.typed_data();
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
  Parallel(pool, devices, int64_t(used.size()) * parts, [&](int64_t task) {
    const int64_t e = used[task / parts], f = task % parts * kOutputs, count = std::min(kOutputs, width - f);
    const Bf16* gate = up.group(e, layer) + f * dim;
    float both[2][kRows * kOutputs];
    for (int64_t from = start[e]; from < start[e + 1]; from += kRows) {
      const int64_t own = std::min(kRows, start[e + 1] - from);
      for (int half = 0; half < 2; ++half) {
        Outer(gate + half * width * dim, count, dim, rows.data() + from, own, both[half], kOutputs);
      }
      for (int64_t t = 0; t < own; ++t) {
        for (int64_t o = 0; o < count; ++o) {
          const float g = both[0][t * kOutputs + o];
          hidden[(from + t) * width + f + o] = Round(g / (1 + std::exp(-g)) * both[1][t * kOutputs + o]);
        }
      }
    }
  });
  float* out = y->typed_data();
  Parallel(pool, devices, (dim + kOutputs - 1) / kOutputs, [&](int64_t task) {
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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_columns, Columns,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bf16s>().Arg<Bf16s>().Arg<Ints>().Ret<Floats>().Attr<int32_t>("devices"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_rows, Rows,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bf16s>().Arg<Bf16s>().Arg<Ints>().Ret<Floats>().Attr<int32_t>("devices"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_experts, Experts,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bf16s>().Arg<Bf16s>().Arg<Bf16s>().Arg<Ints>().Arg<Ints>().Arg<Floats>()
        .Ret<Floats>().Attr<int32_t>("devices"));
