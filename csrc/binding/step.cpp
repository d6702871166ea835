// torch.ops.headwise.decode_step is a layer's decode step, with one new token for each row. Queries and keys are
// rotated, keys and values are written into a cache in place, and the queries attend to everything that the cache then
// holds.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "binding/arguments.h"
#include "binding/operators.h"
#include "binding/tensors.h"
#include "call/attention_call.h"
#include "call/step_call.h"

namespace headwise {
namespace {

// The tensors of a call, in the order of the schema.
struct Arguments {
  const Handle query, key, value, cos, sin;
  const int64_t first, rotated;
  const bool interleaved;
  const Handle keys, values, key_scale, value_scale, table;
  const std::vector<int64_t> places;
  const int64_t value_dim;
  const Rules rules;
  const Handle gate, key_rotation, value_rotation, output_rotation;

  explicit Arguments(const StableIValue* stack)
      : query(stack[0]),
        key(stack[1]),
        value(optional(stack[2])),
        cos(optional(stack[3])),
        sin(optional(stack[4])),
        first(static_cast<int64_t>(stack[5])),
        rotated(static_cast<int64_t>(stack[6])),
        interleaved(stack[7] != 0),
        keys(stack[8]),
        values(optional(stack[9])),
        key_scale(optional(stack[10])),
        value_scale(optional(stack[11])),
        table(optional(stack[12])),
        places(take_integers(stack[13])),
        value_dim(static_cast<int64_t>(stack[14])),
        rules(stack + 15),
        gate(optional(stack[15 + kRuleCount])),
        key_rotation(optional(stack[16 + kRuleCount])),
        value_rotation(optional(stack[17 + kRuleCount])),
        output_rotation(optional(stack[18 + kRuleCount])) {}
};

// Reads angles of the shape (n), (B|1, n) or (B|1, 1, n), where n is size or size / 2.
View read_angles(const Handle& angles, const char* name, int64_t B, int64_t size, int32_t of) {
  View view = read_view(angles, name);
  const int last = view.axes - 1;
  const bool fits = last >= 0 && last <= 2 && (last < 2 || view.sizes[1] == 1) &&
                    (last < 1 || view.sizes[0] == 1 || view.sizes[0] == B) &&
                    (view.sizes[last] == size || view.sizes[last] == size / 2);
  if (!fits) {
    fail(std::string(name) + " must be (n), (B or 1, n) or (B or 1, 1, n), n = " + std::to_string(size) +
         " or half of it; got " + shape(view));
  }
  const bool wide = !view.int64 && view.dtype == Dtype::f32;
  if (!wide && view.torch_dtype != of) fail(std::string(name) + " must be float32 or have the query's dtype");
  return view;
}

void take_rotary(Rotary& rotary, const Arguments& call, int64_t B, int64_t D, int32_t of) {
  if (static_cast<bool>(call.cos) != static_cast<bool>(call.sin)) fail("cos and sin come together, or neither");
  if (!call.cos) return;
  if (call.rotated < 2 || call.rotated % 2 != 0 || call.first < 0 || call.rotated > D ||
      call.first > D - call.rotated) {
    fail("the rotated part of a head must have an even size, at least 2, and lie within the head; got " +
         std::to_string(call.rotated) + " at " + std::to_string(call.first) + " of " + std::to_string(D));
  }
  const View cos = read_angles(call.cos, "cos", B, call.rotated, of);
  const View sin = read_angles(call.sin, "sin", B, call.rotated, of);
  const int last = cos.axes - 1;
  if (sin.axes != cos.axes || sin.torch_dtype != cos.torch_dtype || sin.sizes[last] != cos.sizes[last]) {
    fail("cos and sin must have one shape and one dtype, got " + shape(cos) + ", " + shape(sin));
  }
  rotary.cos = cos.data;
  rotary.sin = sin.data;
  rotary.dtype = cos.dtype;
  rotary.first = call.first;
  rotary.size = call.rotated;
  rotary.interleaved = call.interleaved;
  rotary.by_number = cos.sizes[last] == call.rotated;
  const auto strides = [&](const View& view, int64_t* to) {
    to[0] = last == 0 || view.sizes[0] == 1 ? 0 : view.strides[0];
    to[1] = view.strides[last];
  };
  strides(cos, rotary.cos_stride);
  strides(sin, rotary.sin_stride);
}

// Reads the new key or value: (B, heads, 1, width) in the query's dtype.
Tensor4 take_new(const View& view, const char* name, const Call& p, int64_t width, int32_t of) {
  require_axes(view, name, 4);
  if (view.sizes[0] != p.B || view.sizes[1] != p.K || view.sizes[2] != 1 || view.sizes[3] != width) {
    fail(std::string(name) + " must be (B, K, 1, n) as in the cache, got " + shape(view));
  }
  if (view.torch_dtype != of) fail(std::string(name) + " must have the query's dtype");
  return tensor4(view);
}

// Reads the index of each row's new key, and the number of keys including it.
int64_t take_places(std::vector<int64_t>& places, const Arguments& call, int64_t B) {
  const View keys = read_view(call.keys, "keys", true);
  require_axes(keys, "keys", 4);
  int64_t room = keys.sizes[2];
  if (call.table) {
    const View table = read_view(call.table, "table");
    require_axes(table, "table", 2);
    room = multiply(room, table.sizes[1]);
  }
  if (call.places.size() != 1 && call.places.size() != static_cast<size_t>(B)) {
    fail("places must be one for all rows or one for each, got " + std::to_string(call.places.size()));
  }
  int64_t last = 0;
  for (size_t b = 0; b < static_cast<size_t>(B); ++b) {
    places[b] = call.places[call.places.size() == 1 ? 0 : b];
    if (places[b] < 0 || places[b] >= room) {
      fail("place " + std::to_string(places[b]) + " lies outside of a cache of " + std::to_string(room));
    }
    last = std::max(last, places[b]);
  }
  return last + 1;
}

void require_rows(const Tensor4& x, int64_t width, const char* name) {
  if (x.stride[3] != 1 && width > 1) fail(std::string(name) + ": its rows must be contiguous");
}

// Threads write to the cache. So no two of its elements may have one address, and no two new keys may go to one place
// of a page.
void require_own_cache(const Call& p, const Arguments& call, const std::vector<int64_t>& places) {
  const auto require = [](const Handle& tensor, const char* name) {
    if (tensor) require_own_places(read_view(tensor, name, true), name);
  };
  require(call.keys, "keys");
  require(call.key_scale, "key_scale");
  require(call.values, "values");
  require(call.value_scale, "value_scale");
  if (p.table == nullptr || p.B == 1) return;
  std::vector<std::pair<int64_t, int64_t>> own;
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t place = places[static_cast<size_t>(b)];
    own.emplace_back(p.table[b * p.table_stride + place / p.page], place % p.page);
  }
  std::sort(own.begin(), own.end());
  const auto twice = std::adjacent_find(own.begin(), own.end());
  if (twice == own.end()) return;
  fail("two rows write place " + std::to_string(twice->second) + " of page " + std::to_string(twice->first));
}

void decode_step_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Arguments call(stack);
  const View query = read_view(call.query, "query");
  require_axes(query, "query", 4);
  const int64_t B = query.sizes[0];
  if (query.sizes[2] != 1 || B < 1) fail("a step has one query a row, (B, H, 1, D), got " + shape(query));
  std::vector<int64_t> places(static_cast<size_t>(B));
  const int64_t length = take_places(places, call, B);
  Call p;
  const Handle &values = call.values ? call.values : call.keys,
               &scale = call.values ? call.value_scale : call.key_scale;
  fill_cache_problem(p, query, {call.keys, call.key_scale}, {values, scale}, call.table, length);
  if (call.values ? call.value_dim != p.V : call.value_dim < 1 || call.value_dim > p.D) {
    fail("value_dim must be that of the values, or of the keys' columns that are values; got " +
         std::to_string(call.value_dim));
  }
  p.V = call.value_dim;
  call.rules.fill(p);
  take_gate(p, call.gate);
  Step step;
  step.query = tensor4(query);
  step.places = places.data();
  step.key = take_new(read_view(call.key, "key"), "key", p, p.D, query.torch_dtype);
  if (static_cast<bool>(call.value) != static_cast<bool>(call.values)) fail("value and values come together");
  if (call.value) {
    step.value = take_new(read_view(call.value, "value"), "value", p, p.V, query.torch_dtype);
    step.value_width = p.V;
  }
  const bool packed = p.bytes() && p.key.dtype != Dtype::i8;
  RotatedOutput back;
  if (packed) {
    if (!call.values) fail("values that are columns of the keys have no packed codes");
    step.key_rotation = read_rotation(call.key_rotation, "key_rotation", p.D);
    step.value_rotation = read_rotation(call.value_rotation, "value_rotation", p.V);
    back.rotation = read_rotation(call.output_rotation, "output_rotation", p.V);
  }
  take_rotary(step.rotary, call, B, p.D, query.torch_dtype);
  require_rows(p.key, p.D, "keys");
  require_rows(p.value, p.V, "values");
  require_own_cache(p, call, places);
  p.key.data = written(call.keys);
  p.value.data = call.values ? written(call.values) : p.key.data;
  if (p.bytes()) {
    p.key_scale.data = written(call.key_scale);
    p.value_scale.data = call.values ? written(call.value_scale) : p.key_scale.data;
  }
  const int64_t size = p.dtype() == Dtype::f32 ? 4 : 2;
  const std::unique_ptr<char[]> rotated(new char[static_cast<size_t>(multiply(multiply(B * size, p.H), p.D))]);
  step.rotated = rotated.get();
  Handle out = empty_heads(B, p.H, 1, p.V, query.torch_dtype, p.out);
  p.out.dtype = p.query.dtype;
  place_step(p, step);
  const int64_t strides[4] = {p.H * p.D, p.D, p.D, 1};
  p.query.data = step.rotated;
  std::copy(strides, strides + 4, p.query.stride);
  if (!packed) {
    attend(p);
  } else {
    const Tensor4 result = p.out, gate = p.gate;
    const int64_t pitch = back.rotation.pitch;
    const std::unique_ptr<float[]> rows(new float[static_cast<size_t>(multiply(multiply(B, p.H), pitch))]);
    p.out = {rows.get(), {p.H * pitch, pitch, pitch, 1}, Dtype::f32};
    p.gate.data = nullptr;  // it multiplies the output as it is rotated back
    attend(p);
    p.out = result;
    p.gate = gate;
    back.rows = rows.get();
    rotate_output(p, back);
  }
  stack[0] = out.release();
}

}  // namespace

const Operator kStep = {
    "decode_step",
    "decode_step(Tensor query, Tensor key, Tensor? value, Tensor? cos, Tensor? sin, int first, int turned, "
    "bool interleaved, Tensor(a!) keys, Tensor(b!)? values, Tensor(c!)? key_scale, Tensor(d!)? value_scale, "
    "Tensor? table, SymInt[] places, SymInt value_dim, " HEADWISE_RULES
    ", Tensor? gate=None, Tensor? key_rotation=None, Tensor? value_rotation=None, Tensor? output_rotation=None) -> "
    "Tensor",
    "CPU", decode_step_boxed};

}  // namespace headwise
