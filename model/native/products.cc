// Products of rows of bf16 with one layer of a stack of weights of bf16, for XLA's foreign function interface.
//
// A handler gets a whole stack of weights and the number of a layer, so nothing is sliced or copied before it. Weights
// are read once, in the order in which they lie in memory, by all cores; sums are fp32.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "products.h"
#include "shared.h"
#include "tiles.h"

namespace {

constexpr int64_t kSums = 4096;   // numbers of a task that adds up parts
constexpr int64_t kParts = 16;    // tasks of a product over rows of the weight, each with sums of its own

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

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_columns, Columns,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bf16s>().Arg<Bf16s>().Arg<Ints>().Ret<Floats>().Attr<int32_t>("devices"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_rows, Rows,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bf16s>().Arg<Bf16s>().Arg<Ints>().Ret<Floats>().Attr<int32_t>("devices"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_experts, Experts,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bf16s>().Arg<Bf16s>().Arg<Bf16s>().Arg<Ints>().Arg<Ints>().Arg<Floats>()
        .Arg<Floats>().Ret<Floats>().Attr<int32_t>("devices"));
