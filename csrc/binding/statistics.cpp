// The operators of statistics. As in attention.cpp, every argument is checked here, even if Python has checked it
// before.
#include <algorithm>
#include <string>

#include "binding/arguments.h"
#include "binding/operators.h"
#include "binding/tensors.h"
#include "call/statistics_call.h"
#include "torch_abi/torch_abi.h"

namespace headwise {
namespace {

// the most columns of picks, slots, features and bins, so that the size of the scratch does not overflow
constexpr int64_t kMaxPicks = int64_t{1} << 20;

// A contiguous result of up to four axes.
template <class T>
Handle results(int axes, const int64_t* sizes, int32_t torch_dtype, T*& data) {
  int64_t strides[4], step = 1;
  for (int axis = axes; axis-- > 0; step = multiply(step, std::max<int64_t>(sizes[axis], 1))) strides[axis] = step;
  void* place = nullptr;
  Handle result = empty(axes, sizes, strides, torch_dtype, &place);
  data = static_cast<T*>(place);
  return result;
}

void fill_keys(Call& p, const View& query, const Handle& key) {
  const View keys = read_view(key, "key");
  fill_problem(p, query, keys, keys);
  p.V = 0;
}

void take_picks(Statistics& s, const Call& p, const Handle& picks, const Handle& slots) {
  if (!picks) return;
  if (!slots) fail("picks need slots");
  const View keys = read_view(picks, "picks"), places = read_view(slots, "slots");
  require_int64(keys, "picks");
  require_axes(keys, "picks", 3);
  const bool fits = (keys.sizes[0] == p.B || keys.sizes[0] == 1) && keys.sizes[1] == p.T;
  if (!fits || keys.sizes[2] > kMaxPicks) fail("picks must be (B or 1, T, n), got " + shape(keys));
  require_int64(places, "slots");
  require_axes(places, "slots", 1);
  if (places.sizes[0] != keys.sizes[2] || places.strides[0] != 1) {
    fail("slots must be contiguous, one for each column of picks, got " + shape(places));
  }
  s.picks = static_cast<const int64_t*>(keys.data);
  s.slots = static_cast<const int64_t*>(places.data);
  s.n_picks = keys.sizes[2];
  std::copy(keys.strides, keys.strides + 3, s.picks_stride);
  if (keys.sizes[0] == 1) s.picks_stride[0] = 0;
  for (int64_t n = 0; n < s.n_picks; ++n) {
    if (s.slots[n] < 0 || s.slots[n] >= s.n_slots) fail("slots must lie between 0 and sums - 1");
  }
}

void take_features(Statistics& s, const Call& p, const Handle& features) {
  if (!features) return;
  const View view = read_view(features, "features");
  require_dtype(view, "features", Dtype::f32);
  require_axes(view, "features", 3);
  const bool fits = (view.sizes[0] == p.B || view.sizes[0] == 1) && view.sizes[1] == p.S;
  if (!fits || view.sizes[2] > kMaxPicks) fail("features must be (B or 1, S, F), got " + shape(view));
  if (view.strides[2] != 1 && view.sizes[2] > 1) fail("the rows of features must be contiguous");
  s.features = static_cast<const float*>(view.data);
  s.F = view.sizes[2];
  s.features_stride[0] = view.sizes[0] == 1 ? 0 : view.strides[0];
  s.features_stride[1] = view.strides[1];
}

void attend_statistics_boxed(StableIValue* stack, uint64_t, uint64_t) {
  Handle query(stack[0]), key(stack[1]);
  const Handle value(optional(stack[2]));
  const Rules rules(stack + 3);
  const StableIValue* rest = stack + 3 + kRuleCount;
  const Handle picks(optional(rest[0])), slots(optional(rest[1])), features(optional(rest[3]));
  Call p;
  const View query_view = read_view(query, "query");
  if (value) {
    fill_problem(p, query_view, read_view(key, "key"), read_view(value, "value"));
  } else {
    fill_keys(p, query_view, key);
  }
  rules.fill(p);
  Statistics s;
  s.n_slots = static_cast<int64_t>(rest[2]);
  if (s.n_slots < 0 || s.n_slots > kMaxPicks) fail("sums must lie between 0 and 2**20");
  take_picks(s, p, picks, slots);
  take_features(s, p, features);
  s.bins = static_cast<int64_t>(rest[4]);
  if (s.bins < 0 || s.bins > std::min(p.S, kMaxPicks)) fail("bins must lie between 0 and the number of keys");

  s.query_bins = static_cast<int64_t>(rest[5]);
  if (s.query_bins < 1 || s.query_bins > p.T) fail("query_bins must lie between 1 and the number of queries");

  const int32_t f32 = aoti_torch_dtype_float32(), f64 = aoti_torch_dtype_float64();
  Handle out = empty_heads(p.B, p.H, p.T, p.V, query_view.torch_dtype, p.out);
  p.out.dtype = p.query.dtype;
  const int64_t rows[3] = {p.B, p.H, p.T}, numbers[4] = {kNumbers, p.B, p.H, p.T}, places[4] = {2, p.B, p.H, p.T};
  const int64_t sums[3] = {p.B, p.H, s.sums_of_head()}, map[4] = {p.B, p.H, s.query_bins, s.map_sums()};
  Handle tensors[5] = {results(3, rows, f32, s.lse), results(4, numbers, f32, s.numbers),
                       results(4, places, aoti_torch_dtype_int64(), s.places), results(3, sums, f64, s.sums),
                       results(4, map, f64, s.map)};
  attend_statistics(p, s);
  stack[0] = out.release();
  for (int n = 0; n < 5; ++n) stack[1 + n] = tensors[n].release();
}

void attend_received_boxed(StableIValue* stack, uint64_t, uint64_t) {
  Handle query(stack[0]), key(stack[1]), top(stack[2]), largest(stack[3]);
  const Rules rules(stack + 4);
  Call p;
  fill_keys(p, read_view(query, "query"), key);
  rules.fill(p);
  KeyMass r;
  const auto of_rows = [&](const Handle& tensor, const char* name) {
    const View view = read_view(tensor, name);
    require_dtype(view, name, Dtype::f32);
    require_axes(view, name, 3);
    const int64_t strides[3] = {multiply(p.H, p.T), p.T, 1}, sizes[3] = {p.B, p.H, p.T};
    for (int axis = 0; axis < 3; ++axis) {
      if (view.sizes[axis] != sizes[axis] || (view.strides[axis] != strides[axis] && sizes[axis] > 1)) {
        fail(std::string(name) + " must be (B, H, T) and contiguous, got " + shape(view));
      }
    }
    return static_cast<const float*>(view.data);
  };
  r.row_max = of_rows(top, "top");
  r.largest = of_rows(largest, "largest");
  const int64_t keys[3] = {p.B, p.H, p.S};
  Handle mass = results(3, keys, aoti_torch_dtype_float64(), r.mass);
  Handle rows = results(3, keys, aoti_torch_dtype_int64(), r.rows);
  attend_key_mass(p, r);
  stack[0] = mass.release();
  stack[1] = rows.release();
}

}  // namespace

extern const Operator kStatistics[2] = {
    {"attend_statistics",
     "attend_statistics(Tensor query, Tensor key, Tensor? value, " HEADWISE_RULES
     ", Tensor? picks, Tensor? slots, SymInt sums, Tensor? features, SymInt bins, SymInt query_bins) -> "
     "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
     "CPU", attend_statistics_boxed},
    {"attend_received",
     "attend_received(Tensor query, Tensor key, Tensor top, Tensor largest, " HEADWISE_RULES ") -> (Tensor, Tensor)",
     "CPU", attend_received_boxed},
};

}  // namespace headwise
