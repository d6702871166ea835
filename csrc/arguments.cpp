#include "arguments.h"

#include <algorithm>
#include <string>

namespace headwise {
namespace {

// Far beyond what computes in a lifetime, but a tensor of stride 0 can have it; the kernels' sizes must not overflow.
constexpr int64_t kMaxLength = int64_t{1} << 30;
constexpr int64_t kMaxWidth = int64_t{1} << 20;

void take_segments(Problem& p, const Tensors& ids) {
  if (ids.size() % 2 != 0 || ids.size() > 2 * kMaxSegments) fail("segments must be at most 4 pairs of tensors");
  for (size_t n = 0; n < ids.size(); n += 2) {
    SegmentRule& rule = p.segments[p.n_segments++];
    const View query = rows(look(ids[n], "segments"), "segments", p.B, p.T);
    const View key = rows(look(ids[n + 1], "segments"), "segments", p.B, p.S);
    require_int64(query, "segments");
    require_int64(key, "segments");
    rule.query_ids = static_cast<const int64_t*>(query.data);
    rule.key_ids = static_cast<const int64_t*>(key.data);
    std::copy(query.strides, query.strides + 2, rule.query_stride);
    std::copy(key.strides, key.strides + 2, rule.key_stride);
  }
}

void take_dense(Problem& p, const Tensors& masks) {
  if (masks.size() > kMaxDense) fail("at most 8 dense masks");
  for (const Owned& mask : masks) {
    const View view = look(mask, "dense");
    if (view.int64) fail("dense masks must be bool or floating point");
    p.dense[p.n_dense++] = broadcast4(view, "dense", p.B, p.H, p.T, p.S);
  }
}

void take_alibi(Problem& p, const Tensors& pairs) {
  if (pairs.size() % 2 != 0 || pairs.size() > 2 * kMaxAlibi) fail("alibi must be at most 4 pairs of tensors");
  for (size_t n = 0; n < pairs.size(); n += 2) {
    AlibiRule& rule = p.alibi[p.n_alibi++];
    const View slopes = rows(look(pairs[n], "alibi slopes"), "alibi slopes", p.B, p.H);
    const View offsets = look(pairs[n + 1], "alibi offsets");
    require_dtype(slopes, "alibi slopes", Dtype::f32);
    require_int64(offsets, "alibi offsets");
    require_axes(offsets, "alibi offsets", 1);
    if (offsets.sizes[0] != p.B && offsets.sizes[0] != 1) fail("alibi offsets must be (B) or (1), got " + shape(offsets));
    rule.slopes = static_cast<const float*>(slopes.data);
    rule.offsets = static_cast<const int64_t*>(offsets.data);
    std::copy(slopes.strides, slopes.strides + 2, rule.slopes_stride);
    rule.offsets_stride = offsets.sizes[0] == 1 ? 0 : offsets.strides[0];
  }
}

void take_sinks(Problem& p, const Owned& sinks) {
  if (!sinks) return;
  const View view = look(sinks, "sinks");
  require_dtype(view, "sinks", Dtype::f32);
  require_axes(view, "sinks", 1);
  if (view.sizes[0] != p.H) fail("sinks must be (H), got " + shape(view));
  if (view.strides[0] != 1 && p.H > 1) fail("sinks must be contiguous");
  p.sinks = static_cast<const float*>(view.data);
}

void take_bounds(Problem& p, const Owned& bounds) {
  if (!bounds) return;
  const View given = look(bounds, "bounds");
  p.bounds_size = given.axes > 0 && given.sizes[given.axes - 1] == 5 ? 5 : 4;
  const View view = rows(given, "bounds", p.B, p.bounds_size);
  require_int64(view, "bounds");
  if (view.strides[1] != 1) fail("the rows of bounds must be contiguous");
  p.bounds = static_cast<const int64_t*>(view.data);
  p.bounds_stride = view.strides[0];
}

void fill_sizes(Problem& p, const View& query, const View& key, const View& value) {
  require_axes(query, "query", 4);
  require_axes(key, "key", 4);
  require_axes(value, "value", 4);
  p.B = query.sizes[0], p.H = query.sizes[1], p.T = query.sizes[2], p.D = query.sizes[3];
  p.K = key.sizes[1], p.S = key.sizes[2], p.V = value.sizes[3];
  const bool fits = key.sizes[0] == p.B && value.sizes[0] == p.B && value.sizes[1] == p.K && value.sizes[2] == p.S &&
                    key.sizes[3] == p.D;
  if (!fits) {
    fail("query (B, H, T, D), key (B, K, S, D) and value (B, K, S, V) do not fit: " + shape(query) + ", " +
         shape(key) + ", " + shape(value));
  }
  if (std::min({p.B, p.H, p.K, p.T, p.S, p.D, p.V}) < 1) fail("empty query, key or value: " + shape(query));
  if (p.H % p.K != 0) fail("query heads must be a multiple of key heads, got " + shape(query) + ", " + shape(key));
  if (p.T >= kMaxLength || p.S >= kMaxLength) fail("more queries or keys than 2**30");
  if (p.D > kMaxWidth || p.V > kMaxWidth) fail("a head dim above 2**20");
  p.query = tensor4(query);
  p.key = tensor4(key);
  p.value = tensor4(value);
}

bool is_served(const View& query) {
  return !query.int64 && (query.dtype == Dtype::f32 || query.dtype == Dtype::bf16 || query.dtype == Dtype::f16);
}

Tensor4 take_scale(const Problem& p, const View& scale, const char* name) {
  require_dtype(scale, name, Dtype::f32);
  require_axes(scale, name, 3);
  if (scale.sizes[0] != p.B || scale.sizes[1] != p.K || scale.sizes[2] != p.S) {
    fail(std::string(name) + " must be (B, K, S), got " + shape(scale));
  }
  return tensor4(scale);
}

}  // namespace

int64_t clamp_far(int64_t offset) { return std::min(std::max(offset, -kFar), kFar); }

Rules::Rules(const StableIValue* stack)
    : scale_(number(stack[0])),
      softcap_(number(stack[1])),
      low_(static_cast<int64_t>(stack[3])),
      high_(static_cast<int64_t>(stack[4])),
      sinks_(optional(stack[2])),
      bounds_(optional(stack[5])),
      segments_(optional(stack[6])),
      dense_(optional(stack[7])),
      alibi_(optional(stack[8])) {}

void Rules::fill(Problem& p) const {
  p.scale = static_cast<float>(scale_);
  p.softcap = static_cast<float>(softcap_);
  if (!(p.softcap >= 0.0f)) fail("softcap must not be negative");
  take_sinks(p, sinks_);
  p.low = clamp_far(low_);
  p.high = clamp_far(high_);
  take_bounds(p, bounds_);
  take_segments(p, segments_);
  take_dense(p, dense_);
  take_alibi(p, alibi_);
}

void fill_problem(Problem& p, const View& query, const View& key, const View& value) {
  fill_sizes(p, query, key, value);
  if (key.torch_dtype != query.torch_dtype || value.torch_dtype != query.torch_dtype) {
    fail("query, key and value must have one dtype");
  }
  if (!is_served(query)) fail("query, key and value must be float32, bfloat16 or float16");
}

void fill_int8(Problem& p, const View& query, const View (&key)[2], const View (&value)[2]) {
  fill_sizes(p, query, key[0], value[0]);
  if (!is_served(query)) fail("the query must be float32, bfloat16 or float16");
  if (key[0].dtype != Dtype::i8 || value[0].dtype != Dtype::i8) fail("key and value must be int8");
  p.key_scale = take_scale(p, key[1], "key_scale");
  p.value_scale = take_scale(p, value[1], "value_scale");
}

void take_gate(Problem& p, const Owned& gate) {
  if (!gate) return;
  const View view = look(gate, "gate");
  if (view.int64 || view.dtype == Dtype::boolean) fail("the gate must be floating point");
  p.gate = broadcast4(view, "gate", p.B, p.H, p.T, p.V);
}

uint64_t read_seed(const Owned& seed) {
  const View view = look(seed, "seed");
  require_int64(view, "seed");
  int64_t count = 1;
  for (int axis = 0; axis < view.axes; ++axis) count *= view.sizes[axis];
  if (count != 1) fail("the seed must have one element, got " + shape(view));
  return static_cast<uint64_t>(*static_cast<const int64_t*>(view.data));
}

void take_dropout(Problem& p, float dropout, const Owned& seed) {
  p.dropout = dropout;
  if (dropout <= 0.0f) return;
  if (!seed) fail("dropout needs a seed");
  p.seed = read_seed(seed);
}

float read_dropout(StableIValue value) {
  const double dropout = number(value);
  if (!(dropout >= 0.0 && dropout <= 1.0)) fail("dropout must lie between 0 and 1");
  return static_cast<float>(dropout);
}

}  // namespace headwise
