#include "binding/arguments.h"

#include <stdio.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace headwise {
namespace {

// Upper bounds of the sizes, because a tensor of stride 0 can have any length. Within them the sizes that kernels
// compute do not overflow.
constexpr int64_t kMaxLength = int64_t{1} << 30;
constexpr int64_t kMaxWidth = int64_t{1} << 20;

void take_segments(Call& p, const Tensors& ids) {
  if (ids.size() % 2 != 0 || ids.size() > 2 * kMaxSegments) fail("segments must be at most 4 pairs of tensors");
  for (size_t n = 0; n < ids.size(); n += 2) {
    SegmentRule& rule = p.segments[p.n_segments++];
    const View query = rows(read_view(ids[n], "segments"), "segments", p.B, p.T);
    const View key = rows(read_view(ids[n + 1], "segments"), "segments", p.B, p.S);
    require_int64(query, "segments");
    require_int64(key, "segments");
    rule.query_ids = static_cast<const int64_t*>(query.data);
    rule.key_ids = static_cast<const int64_t*>(key.data);
    std::copy(query.strides, query.strides + 2, rule.query_stride);
    std::copy(key.strides, key.strides + 2, rule.key_stride);
  }
}

void take_dense(Call& p, const Tensors& masks) {
  if (masks.size() > kMaxDense) fail("at most 8 dense masks");
  for (const Handle& mask : masks) {
    const View view = read_view(mask, "dense");
    if (view.int64) fail("dense masks must be bool or floating point");
    p.dense[p.n_dense++] = broadcast4(view, "dense", p.B, p.H, p.T, p.S);
  }
}

void take_alibi(Call& p, const Tensors& pairs) {
  if (pairs.size() % 2 != 0 || pairs.size() > 2 * kMaxAlibi) fail("alibi must be at most 4 pairs of tensors");
  for (size_t n = 0; n < pairs.size(); n += 2) {
    AlibiRule& rule = p.alibi[p.n_alibi++];
    const View slopes = rows(read_view(pairs[n], "alibi slopes"), "alibi slopes", p.B, p.H);
    const View offsets = read_view(pairs[n + 1], "alibi offsets");
    require_dtype(slopes, "alibi slopes", Dtype::f32);
    require_int64(offsets, "alibi offsets");
    require_axes(offsets, "alibi offsets", 1);
    if (offsets.sizes[0] != p.B && offsets.sizes[0] != 1)
      fail("alibi offsets must be (B) or (1), got " + shape(offsets));
    for (int64_t b = 0; b < offsets.sizes[0]; ++b) {
      const int64_t offset = static_cast<const int64_t*>(offsets.data)[b * offsets.strides[0]];
      if (offset < -kFar || offset > kFar) {
        fail("alibi offsets must lie from -2**40 to 2**40, got " + std::to_string(offset));
      }
    }
    rule.slopes = static_cast<const float*>(slopes.data);
    rule.offsets = static_cast<const int64_t*>(offsets.data);
    std::copy(slopes.strides, slopes.strides + 2, rule.slopes_stride);
    rule.offsets_stride = offsets.sizes[0] == 1 ? 0 : offsets.strides[0];
  }
}

void take_relative(Call& p, const Tensors& biases) {
  if (biases.size() + static_cast<size_t>(p.n_dense) > kMaxDense) fail("at most 8 dense masks and relative biases");
  for (const Handle& bias : biases) {
    const View view = read_view(bias, "relative");
    require_dtype(view, "relative", Dtype::f32);
    require_axes(view, "relative", 3);
    const bool fits = (view.sizes[0] == 1 || view.sizes[0] == p.B) && (view.sizes[1] == 1 || view.sizes[1] == p.H) &&
                      view.sizes[2] == p.T + p.S - 1;
    if (!fits) fail("relative biases must be (B or 1, H or 1, T + S - 1), got " + shape(view));
    p.diagonal[p.n_dense] = true;
    Tensor4& to = p.dense[p.n_dense++];
    const int64_t step = view.strides[2];
    to.data = const_cast<float*>(static_cast<const float*>(view.data) + (p.T - 1) * step);
    to.stride[0] = view.sizes[0] == 1 ? 0 : view.strides[0];
    to.stride[1] = view.sizes[1] == 1 ? 0 : view.strides[1];
    to.stride[2] = -step;
    to.stride[3] = step;
  }
}

// Reads pairs of an index and its blocks of bits. Each entry must name an existing block.
void take_maps(Call& p, const Tensors& pairs) {
  if (pairs.size() % 2 != 0 || pairs.size() > 2 * kMaxMaps) fail("maps must be at most 4 pairs of tensors");
  for (size_t n = 0; n < pairs.size(); n += 2) {
    const View index = read_view(pairs[n], "maps"), bits = read_view(pairs[n + 1], "maps");
    require_int64(index, "the index of maps");
    require_int64(bits, "the bits of maps");
    require_axes(index, "the index of maps", 4);
    require_axes(bits, "the bits of maps", 2);
    const int64_t side = MapRule::kSide, rows = (p.T + side - 1) / side, columns = (p.S + side - 1) / side;
    const bool fits = (index.sizes[0] == 1 || index.sizes[0] == p.B) &&
                      (index.sizes[1] == 1 || index.sizes[1] == p.H) && index.sizes[2] == rows &&
                      index.sizes[3] == columns;
    if (!fits) fail("the index of maps must be (B or 1, H or 1, T / 64, S / 64), rounded up, got " + shape(index));
    if (bits.sizes[1] != side || (bits.sizes[0] > 1 && bits.strides[0] != side) || bits.strides[1] != 1) {
      fail("the bits of maps must be (n, 64) and contiguous, got " + shape(bits));
    }
    MapRule& map = p.maps[p.n_maps++];
    map.index = static_cast<const int64_t*>(index.data);
    map.bits = static_cast<const uint64_t*>(bits.data);
    int64_t step = 1, entries = 1;
    for (int axis = 3; axis >= 0; --axis) {
      if (index.sizes[axis] > 1 && index.strides[axis] != step) fail("the index of maps must be contiguous");
      map.stride[axis] = axis < 2 && index.sizes[axis] == 1 ? 0 : step;
      step *= index.sizes[axis];
      entries *= index.sizes[axis];
    }
    for (int64_t i = 0; i < entries; ++i) {
      if (map.index[i] < 0 || map.index[i] >= MapRule::kBits + bits.sizes[0]) {
        fail("the index of maps names block " + std::to_string(map.index[i]) + " of " + shape(bits));
      }
    }
  }
}

void take_sinks(Call& p, const Handle& sinks) {
  if (!sinks) return;
  const View view = read_view(sinks, "sinks");
  require_dtype(view, "sinks", Dtype::f32);
  require_axes(view, "sinks", 1);
  if (view.sizes[0] != p.H) fail("sinks must be (H), got " + shape(view));
  if (view.strides[0] != 1 && p.H > 1) fail("sinks must be contiguous");
  p.sinks = static_cast<const float*>(view.data);
}

void take_bounds(Call& p, const Handle& bounds) {
  if (!bounds) return;
  const View tensor = read_view(bounds, "bounds");
  p.bounds_size = tensor.axes > 0 && tensor.sizes[tensor.axes - 1] == 5 ? 5 : 4;
  const View view = rows(tensor, "bounds", p.B, p.bounds_size);
  require_int64(view, "bounds");
  if (view.strides[1] != 1) fail("the rows of bounds must be contiguous");
  p.bounds = static_cast<const int64_t*>(view.data);
  p.bounds_stride = view.strides[0];
}

// Fills in the sizes of a call. If `length` > 0, keys and values are in pages and `length` is their number.
void fill_sizes(Call& p, const View& query, const View& key, const View& value, int64_t length = 0) {
  require_axes(query, "query", 4);
  require_axes(key, "key", 4);
  require_axes(value, "value", 4);
  p.B = query.sizes[0];
  p.H = query.sizes[1];
  p.T = query.sizes[2];
  p.D = query.sizes[3];
  p.K = key.sizes[1];
  p.S = length > 0 ? length : key.sizes[2];
  p.V = value.sizes[3];
  const bool fits = (length > 0 || key.sizes[0] == p.B) && value.sizes[0] == key.sizes[0] && value.sizes[1] == p.K &&
                    value.sizes[2] == key.sizes[2] && key.sizes[3] == p.D;
  if (!fits) {
    fail("query (B, H, T, D), key (B, K, S, D) and value (B, K, S, V) do not fit: " + shape(query) + ", " + shape(key) +
         ", " + shape(value));
  }
  if (std::min({p.B, p.H, p.K, p.T, p.S, p.D, p.V}) < 1) fail("empty query, key or value: " + shape(query));
  if (p.H % p.K != 0) fail("query heads must be a multiple of key heads, got " + shape(query) + ", " + shape(key));
  if (p.T >= kMaxLength || p.S >= kMaxLength) fail("more queries or keys than 2**30");
  if (p.D > kMaxWidth || p.V > kMaxWidth) fail("a head dim above 2**20");
  p.query = tensor4(query);
  p.key = tensor4(key);
  p.value = tensor4(value);
}

// Reads the pages of each batch row, all of which must exist.
void take_table(Call& p, const View& table, const View& key) {
  require_int64(table, "table");
  require_axes(table, "table", 2);
  p.page = key.sizes[2];
  if (p.page % kPageStep != 0 || p.page == 0) fail("pages hold a multiple of 128 keys, got " + shape(key));
  if (table.sizes[0] != p.B || table.sizes[1] * p.page < p.S) {
    fail("the table must be (B, N) with room for all keys in its N pages, got " + shape(table));
  }
  if (table.strides[1] != 1 && table.sizes[1] > 1) fail("the rows of the table must be contiguous");
  p.table = static_cast<const int64_t*>(table.data);
  p.table_stride = table.strides[0];
  const int64_t used = (p.S + p.page - 1) / p.page;
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t n = 0; n < used; ++n) {
      const int64_t page = p.table[b * p.table_stride + n];
      if (page < 0 || page >= key.sizes[0]) fail("the table names page " + std::to_string(page) + " of " + shape(key));
    }
  }
}

bool is_supported(const View& query) {
  return !query.int64 && (query.dtype == Dtype::f32 || query.dtype == Dtype::bf16 || query.dtype == Dtype::f16);
}

std::string to_text(double x) {
  char text[32];
  snprintf(text, sizeof text, "%.6g", x);
  return text;
}

// Scale and softcap must stay away from the limits of float32, so that no product with them overflows or underflows.
bool is_factor(double x) { return x >= kMinFactor && x <= kMaxFactor; }

float read_softcap(double softcap) {
  if (softcap != 0.0 && !is_factor(softcap)) {
    fail("softcap must be 0, for none, or from 2**-100 to 2**100, got " + to_text(softcap));
  }
  return static_cast<float>(softcap);
}

Tensor4 take_scale(const View& scale, const char* name, const View& of) {
  require_dtype(scale, name, Dtype::f32);
  require_axes(scale, name, 3);
  if (!std::equal(scale.sizes, scale.sizes + 3, of.sizes)) {
    fail(std::string(name) + " must be (B, K, S), got " + shape(scale));
  }
  return tensor4(scale);
}

}  // namespace

float read_scale(double scale) {
  if (scale != 0.0 && !is_factor(std::abs(scale))) {
    fail("scale must be 0 or in size from 2**-100 to 2**100, got " + to_text(scale));
  }
  return static_cast<float>(scale);
}

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
      alibi_(optional(stack[8])),
      maps_(optional(stack[9])),
      relative_(optional(stack[10])) {}

void Rules::fill(Call& p) const {
  p.scale = read_scale(scale_);
  p.softcap = read_softcap(softcap_);
  take_sinks(p, sinks_);
  p.low = clamp_far(low_);
  p.high = clamp_far(high_);
  take_bounds(p, bounds_);
  take_segments(p, segments_);
  take_dense(p, dense_);
  take_alibi(p, alibi_);
  take_maps(p, maps_);
  take_relative(p, relative_);
}

void fill_problem(Call& p, const View& query, const View& key, const View& value) {
  fill_sizes(p, query, key, value);
  if (key.torch_dtype != query.torch_dtype || value.torch_dtype != query.torch_dtype) {
    fail("query, key and value must have one dtype");
  }
  if (!is_supported(query)) fail("query, key and value must be float32, bfloat16 or float16");
}

void fill_cache_problem(Call& p, const View& query, const CacheTensor& key, const CacheTensor& value,
                        const Handle& table, int64_t length) {
  View key_view = read_view(key.data, "key", true), value_view = read_view(value.data, "value", true);
  const Dtype packed = key_view.sizes[3] * 2 == query.sizes[3] ? Dtype::i4 : Dtype::i3;
  key_view = unpacked(key_view, "key", packed);
  value_view = unpacked(value_view, "value", packed);
  if (table && length < 1) fail("pages hold at least one key, got a length of " + std::to_string(length));
  fill_sizes(p, query, key_view, value_view, table ? length : 0);
  if (!table && length > p.S) {
    fail("a length of " + std::to_string(length) + " is more than there are keys, " + std::to_string(p.S));
  }
  if (!table && length > 0) p.S = length;
  if (!is_supported(query)) fail("the query must be float32, bfloat16 or float16");
  const bool bytes = !key_view.int64 && is_code(key_view.dtype);
  if (value_view.torch_dtype != key_view.torch_dtype || (!bytes && key_view.torch_dtype != query.torch_dtype)) {
    fail("key and value must have one dtype: the query's, int8, or uint8 for packed codes");
  }
  if (bytes != static_cast<bool>(key.scale) || bytes != static_cast<bool>(value.scale)) {
    fail("key and value have scales if they are int8 or packed, and only then");
  }
  if (bytes) {
    p.key_scale = take_scale(read_view(key.scale, "key_scale"), "key_scale", key_view);
    p.value_scale = take_scale(read_view(value.scale, "value_scale"), "value_scale", value_view);
  }
  if (table) take_table(p, read_view(table, "table"), key_view);
}

View unpacked(View rows, const char* name, Dtype dtype) {
  if (rows.axes != 4 || rows.dtype != Dtype::i4 || rows.int64) return rows;
  const int64_t bytes = rows.sizes[3], of_eight = row_elements(dtype, 8);
  if (bytes % of_eight != 0 || (bytes > 1 && rows.strides[3] != 1)) {
    fail(std::string(name) + ": packed rows are contiguous and have " + std::to_string(of_eight) +
         " bytes for 8 codes, got " + shape(rows));
  }
  rows.dtype = dtype;
  rows.sizes[3] = bytes / of_eight * 8;
  return rows;
}

Rotation read_rotation(const Handle& rotation, const char* name, int64_t width) {
  if (!rotation) fail(std::string("packed codes are those of rotated tokens, so the call needs ") + name);
  const View view = read_view(rotation, name);
  require_dtype(view, name, Dtype::f32);
  require_axes(view, name, 2);
  const int64_t pitch = view.sizes[1];
  if (view.sizes[0] != width || pitch < width || pitch % 16 != 0 || view.strides[1] != 1 || view.strides[0] != pitch) {
    fail(std::string(name) + " must be contiguous, (" + std::to_string(width) +
         ", n), n at least as many and a multiple of 16; got " + shape(view));
  }
  return {static_cast<const float*>(view.data), pitch};
}

void take_gate(Call& p, const Handle& gate) {
  if (!gate) return;
  const View view = read_view(gate, "gate");
  if (view.int64 || view.dtype == Dtype::boolean) fail("the gate must be floating point");
  p.gate = broadcast4(view, "gate", p.B, p.H, p.T, p.V);
}

DropoutSeed read_seed(const Handle& seed) {
  const View view = read_view(seed, "seed");
  require_int64(view, "seed");
  int64_t count = 1;
  for (int axis = 0; axis < view.axes; ++axis) count *= view.sizes[axis];
  if (count != 1 && (count != 5 || view.axes != 1 || view.strides[0] != 1)) {
    fail("the seed must have one element, or five: seed, heads, first head, query, key; got " + shape(view));
  }
  const auto* numbers = static_cast<const int64_t*>(view.data);
  DropoutSeed read;
  read.value = static_cast<uint64_t>(numbers[0]);
  if (count == 1) return read;
  for (int i = 1; i < 5; ++i) {
    if (numbers[i] < 0 || numbers[i] > kFar) fail("the places of a seed must lie between 0 and 2**40");
  }
  read.heads = numbers[1];
  read.head = numbers[2];
  read.query = numbers[3];
  read.key = numbers[4];
  return read;
}

void take_dropout(Call& p, float dropout, const Handle& seed) {
  p.dropout = dropout;
  if (dropout <= 0.0f) return;
  if (!seed) fail("dropout needs a seed");
  p.seed = read_seed(seed);
  multiply(p.B, p.seed.heads);
}

float read_dropout(StableIValue value) {
  const double dropout = number(value);
  if (!(dropout >= 0.0 && dropout <= 1.0)) fail("dropout must lie between 0 and 1");
  return static_cast<float>(dropout);
}

}  // namespace headwise
