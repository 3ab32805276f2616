// Products of rows of bf16 with weights of 8, 6 or 4 bits, for XLA's foreign function interface.
//
// A weight is its value in q times its scale, and both lie as artifacts/FORMAT.md says: scale [..., out, in / 32] has a
// bf16 number, or a word of 16 bits with the factors of both halves of a group. Of each row of x a
// group of 32 numbers becomes 8 bits, too: its largest magnitude / 127 in fp32 is its scale, and numbers are rounded to
// the nearest multiple, ties to even. Products within a group are exact, in int32; sums over groups are fp32. A group
// of x that is not finite makes its sums NaN.
//
// Weights are read once, in the order in which they lie. For few rows of x one row of the weight follows the other;
// for more, a panel of rows is turned in the cache so that a lane of a vector has an output of its own.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "integers.h"
#include "panels.h"
#include "shared.h"

namespace {

constexpr int64_t kRows = 64;    // rows of x whose sums a task of experts holds at once
constexpr int64_t kMany = 1 << 16;  // numbers of x from which on several threads bring them to 8 bits
constexpr int64_t kSome = 8;     // rows of x of such a task

// Rows x [count, groups * 32] in 8 bits, by all threads where they are many.
template <Form kForm> void Fill(ffi::ThreadPool pool, int32_t devices, const Bf16* x, int64_t count, Rows<kForm>* to) {
  const auto some = [=](int64_t from, int64_t end) {
    for (int64_t i = from * to->groups; i < end * to->groups; ++i) to->Set(i / to->groups, i % to->groups, x + i * kGroup);
  };
  if (count * to->groups * kGroup < kMany) return some(0, count);
  Parallel(pool, devices, (count + kSome - 1) / kSome, {}, [=](int64_t task) {
    some(task * kSome, std::min(count, (task + 1) * kSome));
  });
}

// A quantized stack, q [s, n, ..., Y, X bits / 8] and scale [s, n, ..., Y, X / 32], of which one layer n is taken: matrices
// of s (times the axes between) parts.
template <Form kForm, class Q, class S> struct Stack {
  const uint8_t* q;
  const Bf16* scale;
  int64_t shards, layers, heads, rows = 1, groups;
  bool fits;

  Stack(const Q& values, const S& scales, int64_t inner) : heads(inner) {
    const auto size = values.dimensions(), of = scales.dimensions();
    q = reinterpret_cast<const uint8_t*>(values.untyped_data());
    scale = reinterpret_cast<const Bf16*>(scales.untyped_data());
    shards = size[0], layers = size[1], groups = of[of.size() - 1];
    for (size_t axis = 2; axis + 1 < size.size(); ++axis) rows *= size[axis];
    rows /= heads;
    fits = size[size.size() - 1] == groups * kBytes<kForm> &&
           int64_t(scales.element_count()) == shards * layers * heads * rows * groups;
  }
  int64_t first_row(int64_t part, int64_t layer) const {
    return (((part / heads) * layers + layer) * heads + part % heads) * rows;
  }
  const uint8_t* values(int64_t row) const { return q + row * groups * kBytes<kForm>; }
  const Bf16* scales(int64_t row) const { return scale + row * groups; }
  Range range(int64_t layer) const {
    const int64_t bytes = heads * rows * groups * kBytes<kForm>;
    const uint8_t* end = values(first_row(shards * heads - 1, layer) + rows);
    return {reinterpret_cast<const char*>(end), bytes, layers * bytes, shards};
  }
  ffi::Error Check(int64_t layer, int64_t width) const {
    if (layer < 0 || layer >= layers) return ffi::Error::InvalidArgument("layer: expected one of the stack");
    if (fits && width == groups * kGroup) return ffi::Error::Success();
    return ffi::Error::InvalidArgument("q, scale: expected a scale for 32 numbers of x");
  }
};

// q [s, n, ..., X]: products over the last axis. x [T, X] -> y [T, s, Y], or, where `sum`, x [T, s, X] -> y [T, Y], the sum
// over s.
template <Form kForm, bool sum, class Q, class S>
ffi::Error Product(ffi::ThreadPool pool, Bf16s x, Q q, S scale, Ints layer_of, ffi::Result<Floats> y,
                   int32_t devices) {
  const Stack<kForm, Q, S> stack(q, scale, 1);
  const int64_t layer = layer_of.typed_data()[0], count = x.dimensions()[0], width = x.dimensions()[1];
  const int64_t each = sum ? stack.shards : 1, out_width = (sum ? 1 : stack.shards) * stack.rows;
  if (ffi::Error error = stack.Check(layer, width / each); error.failure()) return error;
  const Bf16* const from = reinterpret_cast<const Bf16*>(x.untyped_data());
  const int64_t used = Used(from, count, width);
#ifdef LING3_VECTORS
  const bool few = each > 1 && used <= kStream;
#else
  const bool few = false;
#endif
  // As long as every core has some tasks of them.
  const int64_t most = std::clamp(few ? stack.rows / (3 * Cores(devices)) / kOutputs * kOutputs : 0, kOutputs, kLong);
  const int64_t tasks = (stack.rows + most - 1) / most;
  float* const out = y->typed_data();
  std::fill_n(out + used * out_width, (count - used) * out_width, 0.0f);
  Rows<kForm> rows(used * each, stack.groups);
  Fill(pool, devices, from, used * each, &rows);
  std::vector<int32_t> at(used * each);  // of each s the rows of x one after the other
  for (int64_t i = 0; i < used * each; ++i) at[i] = int32_t(i % used * each + i / used);
  Parallel(pool, devices, out_width / stack.rows * tasks, stack.range(layer), [&](int64_t task) {
    const int64_t o = task % tasks * most, own = std::min(most, stack.rows - o);
    float* const to = out + task / tasks * stack.rows + o;
#ifdef LING3_VECTORS
    if constexpr (sum) if (few) {
      Parts<kForm> sums(own, stack.groups, used);
      for (int64_t part = 0; part < each; ++part) {
        const int64_t row = stack.first_row(part, layer) + o;
        const int64_t next = stack.first_row(std::min(part + 1, each - 1), layer) + o;
        sums.Add(stack.values(row), stack.scales(row), rows, at.data() + part * used, stack.values(next),
                 stack.scales(next));
      }
      return sums.Give(to, out_width);
    }
#endif
    for (int64_t t = 0; t < used; ++t) std::fill_n(to + t * out_width, own, 0.0f);
    for (int64_t part = 0; part < each; ++part) {
      const int64_t row = stack.first_row(task / tasks + part, layer) + o;
      Outer(stack.values(row), stack.scales(row), own, rows, at.data() + part * used, used, to, out_width);
    }
  });
  return ffi::Error::Success();
}

// The chosen experts of one layer: sum over a of share[t, a] down(min(silu(gate x_t), limit) * clip(up x_t, limit)).
// What lies between the two products is rounded to bf16, and then to 8 bits as x is.
//
// x [T, D], gate_up [s, n, e, 2, F, D], down [s, n, e, D, F], chosen [T, A] with numbers of 0 to s e - 1 (others choose
// nothing), share [T, A], limit [1], infinite for none -> y [T, D].
template <Form kForm, class Q, class S>
ffi::Error Experts(ffi::ThreadPool pool, Bf16s x, Q gate_up, S gate_up_scale, Q down, S down_scale,
                   Ints layer_of, Ints chosen, Floats share, Floats limit, ffi::Result<Floats> y, int32_t devices) {
  const int64_t each = gate_up.dimensions()[2], experts = gate_up.dimensions()[0] * each;
  const Stack<kForm, Q, S> up(gate_up, gate_up_scale, each), out_of(down, down_scale, each);
  const int64_t layer = layer_of.typed_data()[0], tokens = x.dimensions()[0], top = chosen.dimensions()[1];
  const int64_t dim = x.dimensions()[1], width = up.rows / 2;
  if (ffi::Error error = up.Check(layer, dim); error.failure()) return error;
  if (ffi::Error error = out_of.Check(layer, width); error.failure()) return error;
  const int32_t* const choice = chosen.typed_data();
  const auto here = [=](int64_t i) { return choice[i] >= 0 && choice[i] < experts; };
  std::vector<int64_t> start(experts + 1, 0), used;
  int64_t last = 0;  // one past the last token that has a choice
  for (int64_t i = 0; i < tokens * top; ++i) if (here(i)) ++start[choice[i] + 1], last = i / top + 1;
  for (int64_t e = 0; e < experts; ++e) {
    if (start[e + 1]) used.push_back(e);
    start[e + 1] += start[e];
  }
  const int64_t pairs = start[experts];
  std::vector<int32_t> token(pairs), number(pairs);
  std::vector<float> part(pairs);
  std::vector<int64_t> next(start.begin(), start.end() - 1);
  for (int64_t i = 0; i < tokens * top; ++i) {
    if (!here(i)) continue;
    const int64_t pair = next[choice[i]]++;
    token[pair] = int32_t(i / top), number[pair] = int32_t(pair), part[pair] = share.typed_data()[i];
  }
  Rows<kForm> rows(last, up.groups), hidden(pairs, out_of.groups);
  Fill(pool, devices, reinterpret_cast<const Bf16*>(x.untyped_data()), last, &rows);
  const int64_t parts = (width + kOutputs - 1) / kOutputs;
  const auto name = [](const uint8_t* weights) { return Range{reinterpret_cast<const char*>(weights), 0}; };
  Parallel(pool, devices, int64_t(used.size()) * parts, name(up.values(up.first_row(0, layer))), [&](int64_t task) {
    const int64_t e = used[task / parts], f = task % parts * kOutputs, count = std::min(kOutputs, width - f);
    float both[2][kRows * kOutputs];
    for (int64_t from = start[e]; from < start[e + 1]; from += kRows) {
      const int64_t own = std::min(kRows, start[e + 1] - from);
      for (int half = 0; half < 2; ++half) {
        const int64_t row = up.first_row(e, layer) + half * width + f;
        std::fill_n(both[half], own * kOutputs, 0.0f);
        const uint8_t* const next = half ? nullptr : up.values(row + width);
        Outer(up.values(row), up.scales(row), count, rows, token.data() + from, own, both[half], kOutputs, next);
      }
      for (int64_t t = 0; t < own; ++t) {
        Bf16 narrow[kOutputs];
        Swiglu(both[0] + t * kOutputs, both[1] + t * kOutputs, count, limit.typed_data()[0], narrow);
        for (int64_t o = 0; o < count; o += kGroup) hidden.Set(from + t, (f + o) / kGroup, narrow + o);
      }
    }
  });
  float* const out = y->typed_data();
  const Range second = name(out_of.values(out_of.first_row(0, layer)));
  Parallel(pool, devices, (dim + kOutputs - 1) / kOutputs, second, [&](int64_t task) {
    const int64_t d = task * kOutputs, count = std::min(kOutputs, dim - d);
    for (int64_t t = 0; t < tokens; ++t) std::fill_n(out + t * dim + d, count, 0.0f);
    float found[kRows * kOutputs];
    for (size_t i = 0; i < used.size(); ++i) {
      const int64_t e = used[i], row = out_of.first_row(e, layer) + d;
      const uint8_t* const next = i + 1 < used.size() ? out_of.values(out_of.first_row(used[i + 1], layer) + d) : nullptr;
      for (int64_t from = start[e]; from < start[e + 1]; from += kRows) {
        const int64_t own = std::min(kRows, start[e + 1] - from);
        std::fill_n(found, own * kOutputs, 0.0f);
        Outer(out_of.values(row), out_of.scales(row), count, hidden, number.data() + from, own, found, kOutputs, next);
        for (int64_t t = 0; t < own; ++t) {
          float* const to = out + token[from + t] * dim + d;
          for (int64_t o = 0; o < count; ++o) to[o] += part[from + t] * found[t * kOutputs + o];
        }
      }
    }
  });
  return ffi::Error::Success();
}

using Signed8 = ffi::Buffer<ffi::S8>;
using Packed = ffi::Buffer<ffi::U8>;
using Factors = ffi::Buffer<ffi::U16>;

}  // namespace

#define LING3_PRODUCT(name, form, sum, Q, S)                                                                     \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (Product<form, sum, Q, S>),                                                \
      ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bf16s>().Arg<Q>().Arg<S>().Arg<Ints>().Ret<Floats>()            \
          .Attr<int32_t>("devices"))
#define LING3_EXPERTS(name, form, Q, S)                                                                          \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (Experts<form, Q, S>),                                                     \
      ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bf16s>().Arg<Q>().Arg<S>().Arg<Q>().Arg<S>().Arg<Ints>()        \
          .Arg<Ints>().Arg<Floats>().Arg<Floats>().Ret<Floats>().Attr<int32_t>("devices"))

LING3_PRODUCT(ling3_columns_int8, kInt8, false, Signed8, Bf16s);
LING3_PRODUCT(ling3_columns_int4, kInt4, false, Packed, Bf16s);
LING3_PRODUCT(ling3_columns_code4, kCode4, false, Packed, Factors);
LING3_PRODUCT(ling3_columns_code6, kCode6, false, Packed, Factors);
LING3_PRODUCT(ling3_rows_int8, kInt8, true, Signed8, Bf16s);
LING3_PRODUCT(ling3_rows_int4, kInt4, true, Packed, Bf16s);
LING3_PRODUCT(ling3_rows_code4, kCode4, true, Packed, Factors);
LING3_EXPERTS(ling3_experts_int8, kInt8, Signed8, Bf16s);
LING3_EXPERTS(ling3_experts_int4, kInt4, Packed, Bf16s);
LING3_EXPERTS(ling3_experts_code4, kCode4, Packed, Factors);
