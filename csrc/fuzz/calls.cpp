#include "fuzz/calls.h"

#include <stdio.h>
#include <string.h>

namespace fuzz {

std::map<std::string, Worst> worst;
int fixed_threads = 0;
int threads_of(const Case& k) { return fixed_threads > 0 ? fixed_threads : static_cast<int>(2 + k.seed % 7); }

namespace {

bool attends(const naive::Call& c, int64_t b, int64_t h, int64_t i, int64_t j) {
  bool on = naive::may_attend(c, b, h, i, j);
  for (const naive::Dense& rule : c.dense) {
    on = on && (rule.boolean || rule.x[static_cast<size_t>(((b * c.H + h) * c.T + i) * c.S + j)] != -HUGE_VAL);
  }
  return on;
}

bool attended_by_any(const naive::Call& c, int64_t row) {
  const int64_t j = row % c.S, head = row / c.S % c.K, b = row / c.S / c.K, G = c.H / c.K;
  for (int64_t h = head * G; h < (head + 1) * G; ++h) {
    for (int64_t i = 0; i < c.T; ++i) {
      if (attends(c, b, h, i, j)) return true;
    }
  }
  return false;
}

const std::vector<fake::Tensor>* list_or_null(const std::vector<fake::Tensor>& list, bool empty_too) {
  return list.empty() && !empty_too ? nullptr : &list;
}

}  // namespace

Tensors::Tensors(const Case& k, bool dirty) {
  const unsigned char fill = dirty ? 0xff : 0;
  const auto place = [&](const DrawnTensor& t) { return t.present ? t.tensor(fill) : nullptr; };
  query = place(k.query);
  key = place(k.key);
  value = place(k.value);
  key_scale = place(k.key_scale);
  value_scale = place(k.value_scale);
  sinks = place(k.sinks);
  bounds = place(k.bounds);
  gate = place(k.gate);
  grad_out = place(k.grad_out);
  grad_lse = place(k.grad_lse);
  for (const DrawnTensor& t : k.segments) segments.push_back(place(t));
  for (const DrawnTensor& t : k.dense) dense.push_back(place(t));
  for (const DrawnTensor& t : k.alibi) alibi.push_back(place(t));
  for (const DrawnTensor& t : k.relative) relative.push_back(place(t));
  for (const DrawnMap& t : k.maps) {
    maps.push_back(place(t.index));
    maps.push_back(t.bits());
  }
  const auto negate = [&](std::vector<fake::Tensor>& list) {
    for (fake::Tensor& t : list) {
      if (dirty && k.seed % 3 == 0 && t->dtype != kBool) t = fake::negated(*t);
    }
  };
  negate(segments);
  negate(dense);
  negate(alibi);
  negate(maps);
  negate(relative);
  seed = fake::make(kLong, {static_cast<int64_t>(k.places.size()) + 1}, {1}, 0, 0);
  write(*seed, 0, static_cast<double>(k.seed));
  for (size_t n = 0; n < k.places.size(); ++n)
    write(*seed, static_cast<int64_t>(n) + 1, static_cast<double>(k.places[n]));
  if (dirty) poison(k);
}

// Writes NaN and Inf to keys that no row may attend, and to biases where another rule forbids the pair.
void Tensors::poison(const Case& k) {
  const naive::Call& c = k.call;
  for (int64_t row = 0; row < c.B * c.K * c.S && k.bytes; ++row) {
    if (attended_by_any(c, row)) continue;
    const double bad[] = {NAN, HUGE_VAL, 3e38, -HUGE_VAL};  // 3e38 is finite, but its product with an int8 is not
    if (!k.key_scale.aliased()) write(*key_scale, row, bad[row % 4]);
    if (!k.value_scale.aliased()) write(*value_scale, row, bad[(row + 3) % 4]);
    const int64_t keys = c.D * k.bits / 8, values = c.V * k.bits / 8;
    for (int64_t d = 0; d < keys && !k.key.aliased(); ++d) write(*key, row * keys + d, k.bits < 8 ? 255 : -128);
    for (int64_t d = 0; d < values && !k.value.aliased(); ++d) write(*value, row * values + d, 127);
  }
  if (!k.bytes && !k.key.aliased() && !k.value.aliased()) {
    for (int64_t row = 0; row < c.B * c.K * c.S; ++row) {
      if (attended_by_any(c, row)) continue;
      for (int64_t d = 0; d < c.D; ++d) write(*key, row * c.D + d, d % 2 == 0 ? NAN : HUGE_VAL);
      for (int64_t d = 0; d < c.V; ++d) write(*value, row * c.V + d, d % 2 == 0 ? -HUGE_VAL : NAN);
    }
  }
  for (size_t n = 0; n < dense.size(); ++n) {
    const bool full = k.dense[n].x.size() == static_cast<size_t>(c.B * c.H * c.T * c.S) && !k.dense[n].aliased();
    if (k.dense[n].dtype == kBool || !full) continue;
    for (int64_t at = 0; at < c.B * c.H * c.T * c.S; ++at) {
      const int64_t row = at / c.S;
      if (!naive::may_attend(c, row / c.T / c.H, row / c.T % c.H, row % c.T, at % c.S)) write(*dense[n], at, NAN);
    }
  }
  // Does the same to the upstream gradient of rows that attend nothing.
  for (int64_t row = 0; row < c.B * c.H * c.T; ++row) {
    bool alive = false;
    for (int64_t j = 0; j < c.S && !alive; ++j) alive = attends(c, row / c.T / c.H, row / c.T % c.H, row % c.T, j);
    for (int64_t d = 0; d < c.V && !alive && !k.grad_out.aliased(); ++d) write(*grad_out, row * c.V + d, NAN);
    if (!alive && k.grad_lse.present && !k.grad_lse.aliased()) write(*grad_lse, row, HUGE_VAL);
  }
}

std::vector<fake::Tensor*> Tensors::all() {
  std::vector<fake::Tensor*> some = {&query, &key,    &value, &key_scale, &value_scale, &table,
                                     &sinks, &bounds, &gate,  &seed,      &grad_out,    &grad_lse};
  for (auto* list : {&segments, &dense, &alibi, &maps, &relative}) {
    for (fake::Tensor& t : *list) some.push_back(&t);
  }
  return some;
}

void Tensors::move_to_pages(const Case& k) {
  Draw draw(k.seed + 9);
  const naive::Call& c = k.call;
  const int64_t page = draw.one_of<int64_t>({128, 128, 256}), used = (c.S + page - 1) / page;
  const int64_t pages = c.B * used + draw.between(0, 2), wide = used + draw.between(0, 2);
  std::vector<int64_t> order(static_cast<size_t>(pages));
  for (int64_t n = 0; n < pages; ++n) order[static_cast<size_t>(n)] = n;
  for (int64_t n = pages - 1; n > 0; --n)
    std::swap(order[static_cast<size_t>(n)], order[static_cast<size_t>(draw.below(n + 1))]);
  table = fake::make(kLong, {c.B, wide}, {wide, 1}, 0, 0);
  for (int64_t n = 0; n < c.B * wide; ++n) {  // entries that no key needs may be arbitrary
    const int64_t b = n / wide, at = n % wide;
    write(*table, n, at < used ? static_cast<double>(order[static_cast<size_t>(b * used + at)]) : -0x1p62);
  }
  for (fake::Tensor* t : {&key, &value, &key_scale, &value_scale}) {
    if (*t == nullptr) continue;
    const bool scales = (*t)->sizes.size() == 3;
    const int64_t width = scales ? 1 : (*t)->sizes[3];
    std::vector<int64_t> sizes = {pages, c.K, page, width}, strides = {c.K * page * width, page * width, width, 1};
    if (scales) {
      sizes.pop_back();
      strides.pop_back();
    }
    fake::Tensor laid = fake::make((*t)->dtype, sizes, strides, 0, 0xff);
    for (int64_t row = 0; row < c.B * c.K * c.S; ++row) {
      const int64_t j = row % c.S, head = row / c.S % c.K, b = row / c.S / c.K;
      const int64_t at = order[static_cast<size_t>(b * used + j / page)];
      for (int64_t d = 0; d < width; ++d) {
        write(*laid, ((at * c.K + head) * page + j % page) * width + d, read(**t, row * width + d));
      }
    }
    *t = laid;
  }
}

std::vector<double> numbers(const fake::Tensor& t) {
  std::vector<double> x(static_cast<size_t>(t->numel()));
  for (size_t n = 0; n < x.size(); ++n) x[n] = read(*t, static_cast<int64_t>(n));
  return x;
}

Output run(const Case& k, const Tensors& t) {
  using namespace fake;
  const naive::Call& c = k.call;
  const auto low = static_cast<StableIValue>(c.low), high = static_cast<StableIValue>(c.high);
  std::vector<StableIValue> stack;
  const bool cached = k.bytes || t.table != nullptr;
  if (cached) {
    stack = {give(t.query),
             give(t.key),
             give_optional(t.key_scale),
             give(t.value),
             give_optional(t.value_scale),
             give_optional(t.table),
             static_cast<StableIValue>(c.S),
             give_number(c.scale)};
  } else {
    stack = {give(t.query), give(t.key), give(t.value), give_number(c.scale)};
  }
  Output result;
  if (k.plain) {
    stack.insert(stack.end(), {low, high});
    result.error = call(cached ? "attend_stored" : "attend", stack, 1);
    if (result.error.empty()) result.out = numbers(take(stack[0]));
    return result;
  }
  const bool lists = k.seed % 2 == 0;
  stack.insert(stack.end(), {give_number(c.softcap), give_optional(t.sinks), low, high, give_optional(t.bounds),
                             give_list(list_or_null(t.segments, lists)), give_list(list_or_null(t.dense, lists)),
                             give_list(list_or_null(t.alibi, lists)), give_list(list_or_null(t.maps, lists)),
                             give_list(list_or_null(t.relative, lists)), give_optional(t.gate), give_number(c.dropout),
                             give_optional(t.seed)});
  result.error = call(cached ? "attend_held" : "attend_full", stack, 2);
  if (result.error.empty()) {
    result.out = numbers(take(stack[0]));
    result.lse = numbers(take(stack[1]));
  }
  return result;
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

std::string compare(const char* what, const std::vector<double>& x, const std::vector<double>& expected,
                    const std::vector<double>& error, const Case& k, const std::string& isa, int32_t dtype) {
  const char* kind = k.query.dtype == kBfloat ? "bf16" : k.query.dtype == kHalf ? "f16" : "f32";
  for (size_t n = 0; n < x.size(); ++n) {
    if (std::isnan(x[n]) && std::isnan(expected[n])) continue;
    if (x[n] == expected[n]) continue;
    const bool half = k.query.dtype == kHalf || dtype == kHalf;
    const bool beyond = half && fabs(expected[n]) + error[n] >= 65504;  // the range of the dtype
    if (beyond && std::isinf(x[n])) continue;
    const double off = fabs(x[n] - expected[n]);
    if (!(off <= error[n])) {
      char text[200];
      snprintf(text, sizeof text, "%s[%zu] on %s is %.9g, expected %.9g within %.3g", what, n, isa.c_str(), x[n],
               expected[n], error[n]);
      return text;
    }
    Worst& most = worst[isa + " " + what + " " + kind];
    if (off / error[n] > most.share) most = {off / error[n], k.seed};
  }
  return "";
}

naive::Rounding rounding(int32_t dtype) {
  if (dtype == kBfloat) return {0x1p-8, 0x1p-8, 0x1p-17, 0x1p-126};
  if (dtype == kHalf) return {0x1p-11, 0, 0x1p-21, 0x1p-25};
  return {0x1p-24, 0, 0x1p-21, 0x1p-126};
}

Back run_backward(const Case& k, const Tensors& t, bool corrupt, bool part) {
  using namespace fake;
  const naive::Call& c = k.call;
  const auto low = static_cast<StableIValue>(c.low), high = static_cast<StableIValue>(c.high);
  const bool lists = k.seed % 2 == 0;
  const auto rules = [&](std::vector<StableIValue>& stack) {
    stack.insert(stack.end(), {give(t.query), give(t.key), give(t.value), give_number(c.scale), give_number(c.softcap),
                               give_optional(t.sinks), low, high, give_optional(t.bounds),
                               give_list(list_or_null(t.segments, lists)), give_list(list_or_null(t.dense, lists)),
                               give_list(list_or_null(t.alibi, lists)), give_list(list_or_null(t.maps, lists)),
                               give_list(list_or_null(t.relative, lists))});
  };
  std::vector<StableIValue> stack;
  rules(stack);
  stack.insert(stack.end(), {give_number(c.dropout), give_optional(t.seed)});
  Back result;
  fake::Tensor out, ends;
  result.error = call("attend_kept", stack, 3);
  if (!result.error.empty() && !corrupt) return result;
  if (result.error.empty()) {
    out = take(stack[0]);
    ends = take(stack[2]);
    take(stack[1]);
  } else {  // the backward must refuse what the forward refuses
    out = t.grad_out;
    ends = t.grad_lse != nullptr ? t.grad_lse : t.grad_out;
  }
  stack = {give(t.grad_out), give_optional(t.grad_lse), give(out), give(ends), static_cast<StableIValue>(k.biases)};
  rules(stack);
  stack.insert(stack.end(), {give_number(c.dropout), give_optional(t.seed)});
  result.error = call(part ? "attend_part_backward" : "attend_backward", stack, 1);
  if (!result.error.empty()) return result;
  for (const fake::Tensor& grad : take_list(stack[0])) result.grads.push_back(numbers(grad));
  return result;
}

}  // namespace fuzz
