// The fuzzer: drawn calls through the boxed operators, on every instruction set of this CPU.
//
//   headwise_fuzz SECONDS [FIRST_SEED]     many cases; the seed that fails is printed
//   headwise_fuzz case SEED                that one again
//
// Each case is checked against the definition in double, within an error derived from its own numbers (naive.cpp); for
// equal bits on any number of threads; for equal bits whatever lies in gaps, behind a tensor's end, or where nothing
// may look. Then its arguments are spoiled: nothing may crash, and no handle may leak. Buffers end where they must, so
// that AddressSanitizer sees one byte too far.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <chrono>
#include <map>

#include "cases.h"

namespace fuzz {
namespace {

struct Output {
  std::string error;
  std::vector<double> out, lse;  // in logical order
};

struct Worst {
  double share = 0;  // of the error allowed
  uint64_t seed = 0;
};

std::map<std::string, Worst> worst;
int64_t refused = 0, spoiled = 0;

// The tensors of one call. `dirty` fills what must not matter with NaN, else with zeros.
struct Tensors {
  fake::Tensor query, key, value, sinks, bounds, gate, seed;
  std::vector<fake::Tensor> segments, dense, alibi;

  Tensors(const Case& k, bool dirty) {
    const unsigned char fill = dirty ? 0xff : 0;
    const auto place = [&](const Drawn& t) { return t.present ? t.tensor(fill) : nullptr; };
    query = place(k.query), key = place(k.key), value = place(k.value);
    sinks = place(k.sinks), bounds = place(k.bounds), gate = place(k.gate);
    for (const Drawn& t : k.segments) segments.push_back(place(t));
    for (const Drawn& t : k.dense) dense.push_back(place(t));
    for (const Drawn& t : k.alibi) alibi.push_back(place(t));
    seed = fake::make(kLong, {1}, {1}, 0, 0);
    write(*seed, 0, static_cast<double>(k.seed));
    if (dirty) poison(k);
  }

  // Keys that no row may see, and biases where something else forbids.
  void poison(const Case& k) {
    const naive::Call& c = k.call;
    if (!k.key.aliased() && !k.value.aliased()) {
      for (int64_t row = 0; row < c.B * c.K * c.S; ++row) {
        if (seen(c, row)) continue;
        for (int64_t d = 0; d < c.D; ++d) write(*key, row * c.D + d, d % 2 == 0 ? NAN : HUGE_VAL);
        for (int64_t d = 0; d < c.V; ++d) write(*value, row * c.V + d, d % 2 == 0 ? -HUGE_VAL : NAN);
      }
    }
    for (size_t n = 0; n < dense.size(); ++n) {
      const bool full = k.dense[n].x.size() == static_cast<size_t>(c.B * c.H * c.T * c.S) && !k.dense[n].aliased();
      if (k.dense[n].dtype == kBool || !full) continue;
      for (int64_t at = 0; at < c.B * c.H * c.T * c.S; ++at) {
        const int64_t row = at / c.S;
        if (!naive::may_see(c, row / c.T / c.H, row / c.T % c.H, row % c.T, at % c.S)) write(*dense[n], at, NAN);
      }
    }
  }

  static bool seen(const naive::Call& c, int64_t row) {
    const int64_t j = row % c.S, head = row / c.S % c.K, b = row / c.S / c.K, G = c.H / c.K;
    for (int64_t h = head * G; h < (head + 1) * G; ++h) {
      for (int64_t i = 0; i < c.T; ++i) {
        bool on = naive::may_see(c, b, h, i, j);
        for (const naive::Dense& rule : c.dense) {
          on = on && (rule.boolean || rule.x[static_cast<size_t>(((b * c.H + h) * c.T + i) * c.S + j)] != -HUGE_VAL);
        }
        if (on) return true;
      }
    }
    return false;
  }

  std::vector<fake::Tensor*> all() {
    std::vector<fake::Tensor*> some = {&query, &key, &value, &sinks, &bounds, &gate, &seed};
    for (auto* list : {&segments, &dense, &alibi}) {
      for (fake::Tensor& t : *list) some.push_back(&t);
    }
    return some;
  }
};

std::vector<double> numbers(const fake::Tensor& t) {
  std::vector<double> x(static_cast<size_t>(t->numel()));
  for (size_t n = 0; n < x.size(); ++n) x[n] = read(*t, static_cast<int64_t>(n));
  return x;
}

const std::vector<fake::Tensor>* some(const std::vector<fake::Tensor>& list, bool empty_too) {
  return list.empty() && !empty_too ? nullptr : &list;
}

Output run(const Case& k, const Tensors& t) {
  using namespace fake;
  const naive::Call& c = k.call;
  const auto low = static_cast<StableIValue>(c.low), high = static_cast<StableIValue>(c.high);
  std::vector<StableIValue> stack = {give(t.query), give(t.key), give(t.value), give_number(c.scale)};
  Output result;
  if (k.plain) {
    stack.insert(stack.end(), {low, high});
    result.error = call("attend", stack, 1);
    if (result.error.empty()) result.out = numbers(take(stack[0]));
    return result;
  }
  const bool lists = k.seed % 2 == 0;
  stack.insert(stack.end(), {give_number(c.softcap), give_optional(t.sinks), low, high, give_optional(t.bounds),
                             give_list(some(t.segments, lists)), give_list(some(t.dense, lists)),
                             give_list(some(t.alibi, lists)), give_optional(t.gate), give_number(c.dropout),
                             give_optional(t.seed)});
  result.error = call("attend_full", stack, 2);
  if (result.error.empty()) result.out = numbers(take(stack[0])), result.lse = numbers(take(stack[1]));
  return result;
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

// Empty, or what is wrong with x. Remembers how much of the allowed error was used.
std::string compare(const char* what, const std::vector<double>& x, const std::vector<double>& expected,
                    const std::vector<double>& error, const Case& k, const std::string& isa) {
  const char* kind = k.query.dtype == kBfloat ? "bf16" : k.query.dtype == kHalf ? "f16" : "f32";
  for (size_t n = 0; n < x.size(); ++n) {
    if (std::isnan(x[n]) && std::isnan(expected[n])) continue;
    if (x[n] == expected[n]) continue;
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

std::vector<std::string> isas() {
  std::vector<StableIValue> stack(1);
  fake::call("isas", stack, 1);
  auto* names = reinterpret_cast<StringHandle>(stack[0]);
  const char* text = nullptr;
  torch_string_c_str(names, &text);
  std::vector<std::string> all;
  for (const char* name = text; *name != 0;) {
    const size_t length = strcspn(name, ",");
    all.emplace_back(name, length);
    name += length + (name[length] == ',');
  }
  torch_delete_string(names);
  return all;
}

void use(const std::string& isa) {
  StringHandle name;
  torch_new_string_handle(isa.data(), isa.size(), &name);
  std::vector<StableIValue> stack = {reinterpret_cast<StableIValue>(name)};
  fake::call("use_isa", stack, 1);
}

std::vector<char> drawn_keep(const Case& k, const Tensors& t) {
  const naive::Call& c = k.call;
  std::vector<StableIValue> stack = {fake::give(t.seed), fake::give_number(c.dropout)};
  for (const int64_t n : {c.B, c.H, int64_t{0}, c.T, c.S}) stack.push_back(static_cast<StableIValue>(n));
  const std::string error = fake::call("dropout_keep", stack, 1);
  if (!error.empty()) return {};
  const std::vector<double> x = numbers(fake::take(stack[0]));
  return {x.begin(), x.end()};
}

std::string check(Case& k) {
  const Tensors dirty(k, true), clean(k, false);
  if (k.call.dropout > 0) k.call.keep = drawn_keep(k, clean);
  const naive::Result expected = k.wild ? naive::Result() : naive::attention(k.call, rounding(k.query.dtype));
  for (const std::string& isa : isas()) {
    use(isa);
    fake::set_threads(1);
    const Output one = run(k, dirty), other = run(k, clean);
    fake::set_threads(static_cast<int>(2 + k.seed % 7));
    const Output many = run(k, dirty);
    if (!one.error.empty()) return isa + " refuses: " + one.error;
    if (!same_bits(one.out, many.out) || !same_bits(one.lse, many.lse)) return isa + ": other bits on more threads";
    if (!same_bits(one.out, other.out) || !same_bits(one.lse, other.lse)) return isa + ": what must not matter does";
    if (k.wild) continue;
    std::string wrong = compare("out", one.out, expected.out, expected.out_error, k, isa);
    if (wrong.empty() && !k.plain) wrong = compare("lse", one.lse, expected.lse, expected.lse_error, k, isa);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

// Turns one tensor into something it should not be. Sizes become huge enough to be refused, not to be computed.
void spoil(Draw& draw, AtenTensorOpaque& t) {
  const size_t axes = t.sizes.size();
  if (axes == 0) return;
  const auto axis = static_cast<size_t>(draw.below(static_cast<int64_t>(axes)));
  switch (draw.below(12)) {
    case 0: t.sizes[axis] += draw.between(-1, 1); break;
    case 1: t.sizes[axis] = draw.one_of<int64_t>({0, -1, int64_t{1} << 31, int64_t{1} << 62, INT64_MAX}); break;
    case 2: t.strides[axis] = draw.one_of<int64_t>({-1, int64_t{1} << 40, INT64_MAX, INT64_MIN}); break;
    case 3: t.sizes.pop_back(), t.strides.pop_back(); break;
    case 4: t.sizes.push_back(1), t.strides.push_back(1); break;
    case 5: t.dtype = draw.one_of<int32_t>({0, kHalf, kFloat, kDouble, kLong, kBool, kBfloat, 9}); break;
    case 6: t.offset = draw.one_of<int64_t>({-1, 1000000, INT64_MAX}); break;
    case 7: t.storage = nullptr; break;
    case 8: t.storage_bytes = draw.below(t.storage_bytes + 1); break;
    case 9: t.device = 1; break;
    case 10: t.storage += draw.between(0, 3), t.storage_bytes -= 3; break;
    default: t.layout = 1;
  }
}

std::string check_spoiled(Case& k) {
  Draw draw(k.seed + 77);
  Tensors t(k, false);
  for (int times = static_cast<int>(draw.between(1, 2)); times > 0; --times) {
    const std::vector<fake::Tensor*> all = t.all();
    fake::Tensor& one = *all[static_cast<size_t>(draw.below(static_cast<int64_t>(all.size())))];
    if (one != nullptr) spoil(draw, *one);
  }
  if (draw.once_in(8)) k.call.scale = draw.one_of<double>({NAN, HUGE_VAL, 1e300});
  if (draw.once_in(8)) k.call.softcap = draw.one_of<double>({NAN, -1, HUGE_VAL});
  if (draw.once_in(8)) k.call.dropout = draw.one_of<double>({NAN, -1, 2});
  if (draw.once_in(8) && !t.segments.empty()) t.segments.pop_back();
  if (draw.once_in(8) && !t.alibi.empty()) t.alibi.pop_back();
  if (draw.once_in(8)) t.seed = nullptr;
  ++spoiled;
  const Output result = run(k, t);
  if (!result.error.empty()) ++refused;
  return "";
}

bool one_case(uint64_t seed) {
  Case k = draw_case(seed);
  std::string wrong = check(k);
  if (wrong.empty() && fake::live() != 0) wrong = "a handle leaked";
  if (wrong.empty()) wrong = check_spoiled(k);
  if (wrong.empty() && fake::live() != 0) wrong = "a handle leaked from a refused call";
  if (wrong.empty()) return true;
  fprintf(stderr, "%s\n%s\n", k.describe().c_str(), wrong.c_str());
  return false;
}

int many(double seconds, uint64_t first) {
  const auto start = std::chrono::steady_clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  uint64_t seed = first;
  int failures = 0;
  for (; passed() < seconds && failures < 10; ++seed) failures += !one_case(seed);
  printf("%llu cases from seed %llu in %.0f s, %lld spoiled calls (%lld refused), %d failures\n",
         static_cast<unsigned long long>(seed - first), static_cast<unsigned long long>(first), passed(),
         static_cast<long long>(spoiled), static_cast<long long>(refused), failures);
  for (const auto& [name, most] : worst) {
    printf("  %-22s largest error %.2f of what is allowed (case %llu)\n", name.c_str(), most.share,
           static_cast<unsigned long long>(most.seed));
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fuzz

int main(int argc, char** argv) {
  if (argc == 3 && strcmp(argv[1], "case") == 0) return fuzz::one_case(strtoull(argv[2], nullptr, 10)) ? 0 : 1;
  const double seconds = argc > 1 ? atof(argv[1]) : 600;
  return fuzz::many(seconds, argc > 2 ? strtoull(argv[2], nullptr, 10) : 1);
}
