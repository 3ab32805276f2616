// What a decode step does between its large products, for XLA's foreign function interface: a token of KDA, the router,
// attention over pages, and the best of many logits.
//
// A handler gets the whole stack of weights or state, and the number of a layer, as those of products.cc.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "products.h"
#include "shared.h"

namespace {

constexpr int64_t kTokens = 64;   // cached tokens whose scores are held at once
constexpr int64_t kSpan = 512;    // cached tokens of a task
constexpr int64_t kBlock = 512;   // logits between two looks at the largest
constexpr int64_t kLogits = 1 << 14;  // logits of a task
constexpr int64_t kScores = 16;   // experts of a task of the router
constexpr int64_t kAhead = 16;    // rows of a state that are asked for before they are read

// <x, w> of fp32 numbers, in fp32.
float Product(const float* x, const float* w, int64_t depth) {
  float total = 0;
  int64_t d = 0;
#ifdef LING3_BYTES
  Vector sums[4] = {};
  for (; d + 4 * kPairs <= depth; d += 4 * kPairs) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      Vector one, two;
      std::memcpy(&one, x + d + u * kPairs, LING3_BYTES);
      std::memcpy(&two, w + d + u * kPairs, LING3_BYTES);
      sums[u] += one * two;
    }
  }
  for (int lane = 0; lane < 4 * kPairs; ++lane) total += sums[lane % 4][lane / 4];
#endif
  for (; d < depth; ++d) total += x[d] * w[d];
  return total;
}

// e to the power of each of `count` numbers up to 0, to 3e-7 of it down to -3 and to 4e-6 anywhere; 0 below -87.
void Exponentials(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = values[i], high = (x < -87 ? -87.0f : x) * 1.44269504f;
    const int32_t whole = int32_t(high - 0.5f);  // so that what is left lies between -0.5 and 0.5
    const float f = (high - float(whole)) * 0.693147181f;
    const float power = 1 + f * (1 + f * (0.5f + f * (1 / 6.0f + f * (1 / 24.0f + f * (1 / 120.0f + f / 720)))));
    const uint32_t bits = uint32_t(whole + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    values[i] = power * scale * float(x >= -87);  // a product, since a choice would keep gcc from making vectors
  }
}

// 1 / (1 + e^-x) of each of `count` numbers.
void Sigmoids(const float* x, int64_t count, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] = -std::abs(x[i]);
  Exponentials(out, count);
  for (int64_t i = 0; i < count; ++i) out[i] = (x[i] < 0 ? out[i] : 1.0f) / (1 + out[i]);
}

}  // namespace

void Swiglu(const float* gate, const float* up, int64_t count, float limit, Bf16* out) {
  float open[kOutputs];
  Sigmoids(gate, count, open);
  for (int64_t o = 0; o < count; ++o) {
    out[o] = Round(std::min(gate[o] * open[o], limit) * std::clamp(up[o], -limit, limit));
  }
}

namespace {

// One token of the delta rule: state [K, V] <- decay * state, r = v - k^T state, state += written r^T, o = q^T state.
void Delta(float* __restrict state, int64_t keys, int64_t values, const float* decay, const float* written,
           const float* q, const float* k, const float* v, float* __restrict rest, float* __restrict o) {
  std::copy_n(v, values, rest);
  for (int64_t i = 0; i < keys; ++i) {
    float* __restrict row = state + i * values;
    const float kept = decay[i], key = k[i];
    for (int64_t j = 0; j < values; j += 16) __builtin_prefetch(row + kAhead * values + j, 1, 3);
    for (int64_t j = 0; j < values; ++j) {
      const float each = row[j] * kept;
      row[j] = each;
      rest[j] -= key * each;
    }
  }
  std::fill_n(o, values, 0.0f);
  for (int64_t i = 0; i < keys; ++i) {
    float* __restrict row = state + i * values;
    const float strength = written[i], query = q[i];
    for (int64_t j = 0; j < values; ++j) {
      const float each = row[j] + strength * rest[j];
      row[j] = each;
      o[j] += query * each;
    }
  }
}

// <x, x>, in fp32.
float Squares(const float* x, int64_t count) {
  float sums[16] = {}, total = 0;
  for (int64_t i = 0; i < count; ++i) sums[i % 16] += x[i] * x[i];
  for (float each : sums) total += each;
  return total;
}

// The causal convolution of one token's `channels` inputs, which go to the end of the window of the inputs before it.
void Convolve(const float* __restrict input, const Bf16* __restrict filter, int64_t taps, int64_t channels,
              Bf16* __restrict window, float* __restrict sums, float* __restrict tap) {
  std::fill_n(sums, channels, 0.0f);
  for (int64_t w = 0; w < taps; ++w) {
    Bf16* __restrict own = window + w * channels;
    for (int64_t c = 0; c < channels; ++c) tap[c] = Widen(filter[c * taps + w]);
    if (w + 1 < taps) {
      for (int64_t c = 0; c < channels; ++c) sums[c] += tap[c] * Widen(own[c]);
      continue;
    }
    std::memmove(window, window + channels, std::max<int64_t>(0, taps - 2) * channels * sizeof(Bf16));
    for (int64_t c = 0; c < channels; ++c) {
      const Bf16 rounded = Round(input[c]);
      sums[c] += tap[c] * Widen(rounded);
      if (taps > 1) own[c - channels] = rounded;
    }
  }
}

// A layer's part of KDA between its two large products, of a token of each of the first `used` of B sequences: write
// strength, convolution, gates, the recurrence on the states where they lie, norm and output gate.
//
// y [B, H, 5 K] has q, k, v, the decay's and the output gate's input of each head, x [B, D] the layer's input; weights
// b_proj [s, n, h, D], filters [s, n, h, 3, K, W], rate [s, n, h], bias [s, n, h, K], norm [n, K] -> pool
// [n, slots, H, K, K] and windows [n, slots, H, (W - 1) 3 K], changed in place, and out [B, H, K], zeros beyond `used`.
// The logarithm of a decay is lower_bound sigmoid(e^rate (f + bias)), or, for a bound of 0, -e^rate softplus(f + bias).
ffi::Error Token(ffi::ThreadPool threads, Floats, Bf16s, Floats y, Bf16s x, Bf16s b_proj, Bf16s filters, Floats rates,
                 Floats biases, Bf16s norms, Ints layer_of, Ints slots, Ints used_of, ffi::Result<Floats> pool,
                 ffi::Result<Bf16s> windows, ffi::Result<Bf16s> out, int32_t devices, float lower_bound, float l2_eps,
                 float eps) {
  const auto size = pool->dimensions();
  const int64_t heads = size[2], keys = size[3], layer = layer_of.typed_data()[0], rows = slots.dimensions()[0];
  const int64_t used = std::clamp<int64_t>(used_of.typed_data()[0], 0, rows), dim = x.dimensions()[1];
  const int64_t each = filters.dimensions()[2], taps = filters.dimensions()[5], channels = 3 * keys;
  const int32_t* slot = slots.typed_data();
  if (ffi::Error error = CheckLayer(layer, size[0]); error.failure()) return error;
  for (int64_t b = 0; b < used; ++b) {
    if (slot[b] < 0 || slot[b] >= size[1]) return ffi::Error::InvalidArgument("slot: expected one of the pool");
  }
  const int64_t state = keys * keys, window = (taps - 1) * channels, last = used ? slot[used - 1] : 0;
  float* const states = pool->typed_data() + layer * size[1] * heads * state;
  Bf16* const inputs = reinterpret_cast<Bf16*>(windows->untyped_data()) + layer * size[1] * heads * window;
  Bf16* const to = reinterpret_cast<Bf16*>(out->untyped_data());
  const Range range = {reinterpret_cast<const char*>(states + (last + 1) * heads * state), heads * state * 4};
  Parallel(threads, devices, used * heads, range, [=](int64_t task) {
    const int64_t b = task / heads, h = task % heads, place = slot[b] * heads + h;
    const int64_t head = (h / each * size[0] + layer) * each + h % each;  // of the weights that are split over devices
    const float* from = y.typed_data() + task * 5 * keys;
    std::vector<float> buffer(2 * channels + 4 * keys);
    float *conv = buffer.data(), *gates = conv + channels, *q = conv, *k = q + keys, *v = k + keys;
    float *decay = gates + channels, *written = decay + keys, *rest = written + keys, *o = rest + keys;
    Convolve(from, Data(filters) + head * channels * taps, taps, channels, inputs + place * window, conv, gates);
    Sigmoids(conv, channels, gates);
    for (int64_t c = 0; c < channels; ++c) conv[c] *= gates[c];
    const float of_q = 1 / std::sqrt(Squares(q, keys) + l2_eps) / std::sqrt(float(keys));
    const float of_k = 1 / std::sqrt(Squares(k, keys) + l2_eps);
    for (int64_t i = 0; i < keys; ++i) q[i] *= of_q, k[i] *= of_k;
    // How much of the state stays, and how strongly the token is written.
    const float rate = std::exp(rates.typed_data()[head]), *bias = biases.typed_data() + head * keys;
    for (int64_t i = 0; i < keys; ++i) gates[i] = rate * (from[channels + i] + bias[i]);
    if (lower_bound < 0) {
      Sigmoids(gates, keys, decay);
      for (int64_t i = 0; i < keys; ++i) decay[i] *= lower_bound;
    } else {
      for (int64_t i = 0; i < keys; ++i) {
        const float f = from[channels + i] + bias[i];
        decay[i] = -rate * (std::max(f, 0.0f) + std::log1p(std::exp(-std::abs(f))));
      }
    }
    Exponentials(decay, keys);
    const Bf16* own_x = Data(x) + b * dim;
    float beta;
    Outer(Data(b_proj) + head * dim, 1, dim, &own_x, 1, &beta, 1);
    Sigmoids(&beta, 1, gates);
    for (int64_t i = 0; i < keys; ++i) written[i] = gates[0] * k[i];
    Delta(states + place * state, keys, keys, decay, written, q, k, v, rest, o);
    const float scale = 1 / std::sqrt(Squares(o, keys) / float(keys) + eps);
    Sigmoids(from + channels + keys, keys, gates);
    for (int64_t i = 0; i < keys; ++i) {
      to[task * keys + i] = Round(o[i] * scale * Widen(Data(norms)[layer * keys + i]) * gates[i]);
    }
  });
  std::fill(to + used * heads * keys, to + rows * heads * keys, Bf16(0));
  return ffi::Error::Success();
}

// The router of one layer: of sigmoid(x gate^T) the `top` best experts, by score and bias, of the `open` best groups, a
// group being as good as its two best; of equal ones the first. Weights are scores without the bias, times `scale`. Rows
// of padding choose -1.
//
// x [T, D], gate [n, E, D], bias [n, E] -> chosen [T, top], share [T, top].
ffi::Error Route(ffi::ThreadPool pool, Floats x, Floats gate, Floats bias, Ints layer_of, ffi::Result<Ints> chosen,
                 ffi::Result<Floats> share, int32_t devices, int32_t groups, int32_t open, float scale) {
  const auto size = gate.dimensions();
  const int64_t layer = layer_of.typed_data()[0], experts = size[1], dim = size[2], tokens = x.dimensions()[0];
  const int64_t top = chosen->dimensions()[1], each = experts / groups;
  if (ffi::Error error = CheckLayer(layer, size[0]); error.failure()) return error;
  const float *weights = gate.typed_data() + layer * experts * dim, *own = bias.typed_data() + layer * experts;
  const Range range = {reinterpret_cast<const char*>(weights + experts * dim), experts * dim * 4};
  const int64_t used = Used(x.typed_data(), tokens, dim);
  std::fill_n(chosen->typed_data() + used * top, (tokens - used) * top, -1);
  std::fill_n(share->typed_data() + used * top, (tokens - used) * top, 0.0f);
  std::vector<float> scores(used * experts);
  Parallel(pool, devices, (experts + kScores - 1) / kScores, range, [&](int64_t task) {
    for (int64_t e = task * kScores; e < std::min(experts, (task + 1) * kScores); ++e) {
      for (int64_t t = 0; t < used; ++t) {
        scores[t * experts + e] = Product(x.typed_data() + t * dim, weights + e * dim, dim);
      }
    }
  });
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  std::vector<float> biased(experts), best(groups);
  for (int64_t t = 0; t < used; ++t) {
    float* const score = scores.data() + t * experts;
    for (int64_t e = 0; e < experts; ++e) score[e] = 1 / (1 + std::exp(-score[e])), biased[e] = score[e] + own[e];
    for (int64_t g = 0; g < groups; ++g) {
      float first = kNone, second = kNone;
      for (int64_t e = g * each; e < (g + 1) * each; ++e) {
        if (biased[e] > first) second = first, first = biased[e];
        else second = std::max(second, biased[e]);
      }
      best[g] = each > 1 ? first + second : first;
    }
    std::vector<bool> closed(groups, true);
    for (int32_t i = 0; i < open; ++i) {
      const int64_t g = std::max_element(best.begin(), best.end()) - best.begin();
      closed[g] = false, best[g] = kNone;
    }
    for (int64_t e = 0; e < experts; ++e) if (closed[e / each]) biased[e] = kNone;
    float total = 0;
    for (int64_t a = 0; a < top; ++a) {
      const int64_t e = std::max_element(biased.begin(), biased.end()) - biased.begin();
      chosen->typed_data()[t * top + a] = int32_t(e);
      share->typed_data()[t * top + a] = score[e];
      total += score[e], biased[e] = kNone;
    }
    for (int64_t a = 0; a < top; ++a) share->typed_data()[t * top + a] *= scale / (total + 1e-20f);
  }
  return ffi::Error::Success();
}

bool AreZeros(const float* x, int64_t count) {
  uint32_t any = 0;
  for (int64_t from = 0; from < count && !any; from += kBlock) {
    for (int64_t i = from; i < std::min(count, from + kBlock); ++i) {
      uint32_t bits;
      std::memcpy(&bits, x + i, sizeof bits);
      any |= bits;
    }
  }
  return !any;
}

// What a part of a row of logits says: the largest number, where it is first found, and the sum of e^(x - largest).
struct Best {
  float most = -std::numeric_limits<float>::infinity(), total = 0;
  int64_t at = 0;

  // e^0 is the largest: of numbers that are all -inf the sum is 0.
  float base() const { return std::max(most, std::numeric_limits<float>::lowest()); }

  // A NaN is in no maximum, but in the sum. Rows of padding are zeros, whose powers need not be computed.
  void Look(const float* x, int64_t count) {
    if (AreZeros(x, count)) return void((most = 0, total = float(count)));
    int64_t block = 0;
    for (int64_t from = 0; from < count; from += kBlock) {
      const int64_t size = std::min(kBlock, count - from);
      float lanes[kLine];
      std::fill_n(lanes, kLine, most);
      int64_t i = 0;
      for (; i + kLine <= size; i += kLine) {
        for (int64_t j = 0; j < kLine; ++j) lanes[j] = x[from + i + j] > lanes[j] ? x[from + i + j] : lanes[j];
      }
      for (; i < size; ++i) lanes[0] = x[from + i] > lanes[0] ? x[from + i] : lanes[0];
      const float found = *std::max_element(lanes, lanes + kLine);
      if (found > most) most = found, block = from;
    }
    at = std::find(x + block, x + std::min(count, block + kBlock), most) - x;
    float powers[kBlock], sums[kLine] = {};
    for (int64_t from = 0; from < count; from += kBlock) {
      const int64_t size = std::min(kBlock, count - from);
      for (int64_t i = 0; i < size; ++i) powers[i] = x[from + i] - base();
      Exponentials(powers, size);
      int64_t i = 0;
      for (; i + kLine <= size; i += kLine) {
        for (int64_t j = 0; j < kLine; ++j) sums[j] += powers[i + j];
      }
      for (; i < size; ++i) sums[0] += powers[i];
    }
    for (float each : sums) total += each;
  }
};

// Of each row of logits [R, V]: the largest, the sum of e^(x - largest), and the number of the first that is the
// largest, plus `offset`, as a float -> y [3, R].
ffi::Error BestOf(ffi::ThreadPool pool, Floats logits, Ints offset, ffi::Result<Floats> y, int32_t devices) {
  const int64_t rows = logits.dimensions()[0], width = logits.dimensions()[1], each = (width + kLogits - 1) / kLogits;
  std::vector<Best> parts(rows * each);
  Parallel(pool, devices, rows * each, {}, [&](int64_t task) {
    const int64_t from = task % each * kLogits;
    parts[task].Look(logits.typed_data() + task / each * width + from, std::min(kLogits, width - from));
  });
  float* const out = y->typed_data();
  for (int64_t r = 0; r < rows; ++r) {
    const Best *own = &parts[r * each], *best = std::max_element(own, own + each, [](const Best& a, const Best& b) {
      return a.most < b.most;
    });
    float total = 0;
    for (int64_t i = 0; i < each; ++i) total += own[i].total * std::exp(own[i].base() - best->base());
    out[r] = best->most, out[rows + r] = total;
    out[2 * rows + r] = float(offset.typed_data()[0] + (best - own) * kLogits + best->at);
  }
  return ffi::Error::Success();
}

// A softmax over a part of a sequence's tokens, not yet normalized: of each head the largest score, the sum of the
// weights and the weighted sum of the latents.
struct Part {
  std::vector<float> most, sum, values;

  void Attend(const Bf16* tokens, int64_t count, int64_t width, const Bf16* const* query, int64_t heads, int64_t rank) {
    float scores[kRows * kTokens];
    Bf16 weights[kRows * kTokens];
    for (int64_t from = 0; from < heads; from += kRows) {
      const int64_t own = std::min(kRows, heads - from);
      Outer(tokens, count, width, query + from, own, scores, kTokens);
      std::vector<float*> to(own);
      for (int64_t h = 0; h < own; ++h) {
        float *score = scores + h * kTokens, *value = to[h] = values.data() + (from + h) * rank;
        const float before = most[from + h], now = std::max(before, *std::max_element(score, score + count));
        float kept = before - now, total = 0;
        Exponentials(&kept, 1);
        for (int64_t i = 0; i < count; ++i) score[i] -= now;
        Exponentials(score, count);
        for (int64_t i = 0; i < count; ++i) total += score[i], weights[h * kTokens + i] = Round(score[i]);
        for (int64_t i = 0; i < rank; ++i) value[i] *= kept;
        most[from + h] = now;
        sum[from + h] = sum[from + h] * kept + total;
      }
      const auto at = Pointers(weights, own, kTokens);
      Inner(rank, own, to.data()).Add(tokens, width, count, at.data());
    }
  }
};

// Absorbed attention of each sequence over its first length[b] cached tokens, on the pages of its row of the table.
//
// query [B, H, W], pool [n, pages, page, W], table [B, M], length [B] -> y [B, H, R], R <= W; zeros where the length is 0.
ffi::Error Attention(ffi::ThreadPool threads, Bf16s query, Bf16s pool, Ints layer_of, Ints table_of, Ints length_of,
                     ffi::Result<Floats> y, int32_t devices) {
  const auto size = pool.dimensions();
  const int64_t pages = size[1], page = size[2], width = size[3], layer = layer_of.typed_data()[0];
  const int64_t rows = query.dimensions()[0], heads = query.dimensions()[1], rank = y->dimensions()[2];
  const int64_t columns = table_of.dimensions()[1];
  const int32_t *table = table_of.typed_data(), *length = length_of.typed_data();
  if (ffi::Error error = CheckLayer(layer, size[0]); error.failure()) return error;
  struct Task { int64_t row, from, to; };  // tokens
  std::vector<Task> tasks;
  for (int64_t b = 0; b < rows; ++b) {
    if (length[b] > columns * page) return ffi::Error::InvalidArgument("length: expected no more than its pages hold");
    for (int64_t from = 0; from < length[b]; from += kSpan) {
      tasks.push_back({b, from, std::min<int64_t>(length[b], from + kSpan)});
    }
    for (int64_t j = 0; j * page < length[b]; ++j) {
      const int32_t number = table[b * columns + j];
      if (number < 0 || number >= pages) return ffi::Error::InvalidArgument("table: expected pages of the pool");
    }
  }
  std::vector<Part> parts(tasks.size());
  const Bf16 *own = Data(pool) + layer * pages * page * width, *from = Data(query);
  const Range range = {reinterpret_cast<const char*>(own), 0};
  Parallel(threads, devices, int64_t(tasks.size()), range, [&](int64_t number) {
    const Task& task = tasks[number];
    Part& part = parts[number];
    part.most.assign(heads, -std::numeric_limits<float>::infinity());
    part.sum.assign(heads, 0.0f);
    part.values.assign(heads * rank, 0.0f);
    const auto at = Pointers(from + task.row * heads * width, heads, width);
    for (int64_t token = task.from; token < task.to;) {
      const int64_t place = token % page, count = std::min({kTokens, page - place, task.to - token});
      const Bf16* tokens = own + (table[task.row * columns + token / page] * page + place) * width;
      part.Attend(tokens, count, width, at.data(), heads, rank);
      token += count;
    }
  });
  float* out = y->typed_data();
  std::fill_n(out, rows * heads * rank, 0.0f);
  for (size_t first = 0, end; first < tasks.size(); first = end) {
    for (end = first + 1; end < tasks.size() && tasks[end].row == tasks[first].row;) ++end;
    for (int64_t h = 0; h < heads; ++h) {
      float most = parts[first].most[h], total = 0;
      for (size_t i = first; i < end; ++i) most = std::max(most, parts[i].most[h]);
      float* to = out + (tasks[first].row * heads + h) * rank;
      for (size_t i = first; i < end; ++i) {
        const float share = std::exp(parts[i].most[h] - most), *values = parts[i].values.data() + h * rank;
        total += parts[i].sum[h] * share;
        for (int64_t r = 0; r < rank; ++r) to[r] += values[r] * share;
      }
      for (int64_t r = 0; r < rank; ++r) to[r] /= total;
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_token, Token,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Bf16s>().Arg<Floats>().Arg<Bf16s>().Arg<Bf16s>()
        .Arg<Bf16s>().Arg<Floats>().Arg<Floats>().Arg<Bf16s>().Arg<Ints>().Arg<Ints>().Arg<Ints>().Ret<Floats>()
        .Ret<Bf16s>().Ret<Bf16s>().Attr<int32_t>("devices").Attr<float>("lower_bound").Attr<float>("l2_eps")
        .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_route, Route,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Ints>().Ret<Ints>()
        .Ret<Floats>().Attr<int32_t>("devices").Attr<int32_t>("groups").Attr<int32_t>("open").Attr<float>("scale"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_best, BestOf,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Floats>().Arg<Ints>().Ret<Floats>().Attr<int32_t>("devices"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(ling3_attention, Attention,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bf16s>().Arg<Bf16s>().Arg<Ints>().Arg<Ints>().Arg<Ints>().Ret<Floats>()
        .Attr<int32_t>("devices"));
