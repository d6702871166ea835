// torch.ops.headwise.attend_held attends to the keys and values of a cache in place: contiguous or in pages, in the
// query's dtype or in codes with a scale for each token and head. attend_stored is the same for a band without other
// rules: with few keys, reading fewer arguments saves a sixth of a call. append_codes quantises new tokens and writes
// them into such a cache.
#include <algorithm>
#include <string>
#include <vector>

#include "binding/arguments.h"
#include "binding/operators.h"
#include "binding/tensors.h"
#include "call/append_call.h"
#include "call/attention_call.h"

namespace headwise {
namespace {

// Query, keys and values: the first arguments of an operator on a cache.
struct Stored {
  static constexpr int kCount = 7;
  Handle query, key, key_scale, value, value_scale, table;
  int64_t length;

  explicit Stored(const StableIValue* stack)
      : query(stack[0]),
        key(stack[1]),
        key_scale(optional(stack[2])),
        value(stack[3]),
        value_scale(optional(stack[4])),
        table(optional(stack[5])),
        length(static_cast<int64_t>(stack[6])) {}

  // Returns the query's dtype.
  int32_t fill(Call& p) const {
    const View query_view = read_view(query, "query");
    fill_cache_problem(p, query_view, {key, key_scale}, {value, value_scale}, table, length);
    return query_view.torch_dtype;
  }
};

void attend_held_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Stored stored(stack);
  const Rules rules(stack + Stored::kCount);
  const StableIValue* rest = stack + Stored::kCount + kRuleCount;
  const Handle gate(optional(rest[0])), seed(optional(rest[2]));
  Call p;
  const int32_t torch_dtype = stored.fill(p);
  rules.fill(p);
  take_gate(p, gate);
  take_dropout(p, read_dropout(rest[1]), seed);
  attend(p, torch_dtype, stack);
}

void attend_stored_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Stored stored(stack);
  Call p;
  const int32_t torch_dtype = stored.fill(p);
  attend_band(p, torch_dtype, stack, Stored::kCount);
}

// The range of addresses of a tensor, from its first byte to behind its last; empty if it has no element.
struct Range {
  uintptr_t first = 0, end = 0;
  const char* name = "";
};

Range range_of(const Tensor4& x, const View& view, const char* name) {
  const int64_t size = x.dtype == Dtype::f32 ? 4 : x.dtype == Dtype::f64 ? 8 : is_code(x.dtype) ? 1 : 2;
  if (is_empty(view)) return {};  // the strides of an empty tensor may be anything
  int64_t last = 0;
  for (int axis = 0; axis < view.axes; ++axis) last += (view.sizes[axis] - 1) * view.strides[axis];
  const auto first = reinterpret_cast<uintptr_t>(x.data);
  return {first, first + static_cast<uintptr_t>((last + 1) * size), name};
}

// Reads keys or values: the source `from` (B, K, T, width), and the part of the cache to which it is written.
class Side {
 public:
  Side(AppendSide& side, const Handle& from, const Handle& data, const Handle& scale, const Handle& rotation,
       bool is_key) {
    const char* name = is_key ? "key" : "value";
    const char* data_name = is_key ? "key_data" : "value_data";
    const char* scale_name = is_key ? "key_scale" : "value_scale";
    source = read_view(from, name);
    target = read_view(data, data_name, true);
    const View scales = read_view(scale, scale_name);
    require_axes(source, name, 4);
    if (source.int64 || source.dtype == Dtype::boolean) fail(std::string(name) + " must be floating point");
    require_axes(target, data_name, 4);
    const View stored = target;  // of packed codes its rows are bytes
    const bool packed = !target.int64 && target.dtype == Dtype::i4;
    if (packed) target = unpacked(target, data_name, target.sizes[3] * 2 == source.sizes[3] ? Dtype::i4 : Dtype::i3);
    if (!packed) require_dtype(target, data_name, Dtype::i8);
    require_axes(scales, scale_name, 3);
    require_dtype(scales, scale_name, Dtype::f32);
    if (source.sizes[1] != target.sizes[1] || source.sizes[3] != target.sizes[3] || source.sizes[3] < 1) {
      fail(std::string(name) + " (B, K, T, n) and " + data_name + " (rows, K, places, n) do not fit: " + shape(source) +
           ", " + shape(target));
    }
    if (!std::equal(scales.sizes, scales.sizes + 3, target.sizes)) {
      fail(std::string(scale_name) + " must be (rows, K, places) of " + shape(target) + ", got " + shape(scales));
    }
    if (target.strides[3] != 1 && target.sizes[3] > 1) fail(std::string(data_name) + ": its rows must be contiguous");
    require_own_places(stored, data_name);
    require_own_places(scales, scale_name);
    side.from = tensor4(source);
    side.width = source.sizes[3];
    side.data = tensor4(target);
    side.data.data = written(data);
    side.scale = tensor4(scales);
    side.scale.data = written(scale);
    if (packed) side.rotation = read_rotation(rotation, is_key ? "key_rotation" : "value_rotation", side.width);
    read = range_of(side.from, source, name);
    writes[0] = range_of(side.data, stored, data_name);
    writes[1] = range_of(side.scale, scales, scale_name);
  }
  View source, target;
  Range read, writes[2];
};

// What is written must not share memory with any other argument.
void require_apart(const std::vector<Range>& written, const std::vector<Range>& read) {
  for (size_t n = 0; n < written.size(); ++n) {
    std::vector<Range> others(written.begin(), written.begin() + static_cast<std::ptrdiff_t>(n));
    others.insert(others.end(), read.begin(), read.end());
    for (const Range& other : others) {
      if (written[n].first < other.end && other.first < written[n].end) {
        fail(std::string(written[n].name) + " and " + other.name + " share memory");
      }
    }
  }
}

// Reads five numbers for each span. Spans must lie within the tensors, and no two may write to one place.
std::vector<AppendSpan> take_spans(const std::vector<int64_t>& numbers, const View& from, const View& to) {
  if (numbers.size() % 5 != 0) {
    fail("spans have five numbers each: row and place in the tokens, row and place in the cache, and how many tokens");
  }
  std::vector<AppendSpan> spans;
  const auto within = [](int64_t first, int64_t count, int64_t size) {
    return first >= 0 && count >= 0 && count <= size && first <= size - count;
  };
  for (size_t n = 0; n < numbers.size(); n += 5) {
    const AppendSpan span = {numbers[n], numbers[n + 1], numbers[n + 2], numbers[n + 3], numbers[n + 4]};
    const bool fits = within(span.from_row, 1, from.sizes[0]) && within(span.to_row, 1, to.sizes[0]) &&
                      within(span.from_place, span.count, from.sizes[2]) &&
                      within(span.to_place, span.count, to.sizes[2]);
    if (!fits) {
      fail("a span lies outside: row " + std::to_string(span.from_row) + ", " + std::to_string(span.count) +
           " tokens from " + std::to_string(span.from_place) + " on of " + shape(from) + " to row " +
           std::to_string(span.to_row) + " from " + std::to_string(span.to_place) + " on of " + shape(to));
    }
    if (span.count > 0) spans.push_back(span);
  }
  const auto before = [](const AppendSpan& a, const AppendSpan& b) {
    return a.to_row != b.to_row ? a.to_row < b.to_row : a.to_place < b.to_place;
  };
  std::sort(spans.begin(), spans.end(), before);
  for (size_t n = 1; n < spans.size(); ++n) {
    const AppendSpan &a = spans[n - 1], &b = spans[n];
    if (a.to_row == b.to_row && a.to_place + a.count > b.to_place) {
      fail("two spans write place " + std::to_string(b.to_place) + " of row " + std::to_string(b.to_row));
    }
  }
  return spans;
}

void append_codes_boxed(StableIValue* stack, uint64_t, uint64_t) {
  const Handle key(stack[0]), value(optional(stack[1])), key_data(stack[2]), key_scale(stack[3]);
  const Handle value_data(optional(stack[4])), value_scale(optional(stack[5]));
  const std::vector<int64_t> numbers = take_integers(stack[6]);
  const Handle key_rotation(optional(stack[7])), value_rotation(optional(stack[8]));
  if (static_cast<bool>(value) != static_cast<bool>(value_data) ||
      static_cast<bool>(value) != static_cast<bool>(value_scale)) {
    fail("value, value_data and value_scale come together, or none of them");
  }
  Append append;
  const Side keys(append.key, key, key_data, key_scale, key_rotation, true);
  std::vector<Range> written(keys.writes, keys.writes + 2), read = {keys.read};
  if (value) {
    const Side values(append.value, value, value_data, value_scale, value_rotation, false);
    const auto fits = [](const View& a, const View& b) { return std::equal(a.sizes, a.sizes + 3, b.sizes); };
    if (!fits(keys.source, values.source) || !fits(keys.target, values.target)) {
      fail("key and value have one batch, heads and length, before and in the cache; got " + shape(keys.source) + ", " +
           shape(values.source) + ", " + shape(keys.target) + ", " + shape(values.target));
    }
    written.insert(written.end(), values.writes, values.writes + 2);
    read.push_back(values.read);
    append.has_value = true;
  }
  append.K = keys.source.sizes[1];
  const std::vector<AppendSpan> spans = take_spans(numbers, keys.source, keys.target);
  if (spans.empty() || append.K == 0) return;
  require_apart(written, read);
  append_codes(append, spans.data(), spans.size());
}

}  // namespace

const Operator kCache[3] = {
    {"attend_held",
     "attend_held(Tensor query, Tensor key, Tensor? key_scale, Tensor value, Tensor? value_scale, Tensor? table, "
     "SymInt length, " HEADWISE_RULES ", Tensor? gate, float dropout, Tensor? seed) -> (Tensor, Tensor)",
     "CPU", attend_held_boxed},
    {"attend_stored",
     "attend_stored(Tensor query, Tensor key, Tensor? key_scale, Tensor value, Tensor? value_scale, Tensor? table, "
     "SymInt length, float scale, SymInt low, SymInt high) -> Tensor",
     "CPU", attend_stored_boxed},
    {"append_codes",
     "append_codes(Tensor key, Tensor? value, Tensor(a!) key_data, Tensor(b!) key_scale, Tensor(c!)? value_data, "
     "Tensor(d!)? value_scale, SymInt[] spans, Tensor? key_rotation=None, Tensor? value_rotation=None) -> ()",
     "CPU", append_codes_boxed},
};

}  // namespace headwise
