// The fuzzer: random calls of the boxed operators, forward, backward, statistics, appends and decode steps, on every
// instruction set of this CPU.
//
//   headwise_fuzz SECONDS [FIRST_SEED]     many cases; the seed that fails is printed
//   headwise_fuzz case SEED                one case
//   headwise_fuzz threads SECONDS [SEED]   larger cases on 64 threads, which only compares bits; for ThreadSanitizer
//   headwise_fuzz balance                  how evenly work is spread over 2 to 256 threads; computed, not measured
//
// Each case is compared with the definition in double, within an error bound from its own numbers (naive.cpp,
// naive_backward.cpp). Its bits must not depend on the number of threads, nor on the contents of gaps, of memory behind
// a tensor's end, and of keys that may not be attended. Then its arguments are corrupted: no call may crash, and no
// handle may leak. Storages have no spare bytes, and memory that may not be touched on one side or the other.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <chrono>
#include <thread>

#include "fuzz/calls.h"
#include "fuzz/load_balance.h"
#include "runtime/dispatch.h"

namespace fuzz {

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

namespace {

int64_t refused = 0, corrupted = 0;

std::vector<char> keep_of(const Case& k, const Tensors& t) {
  const naive::Call& c = k.call;
  std::vector<StableIValue> stack = {fake::give(t.seed), fake::give_number(c.dropout)};
  for (const int64_t n : {c.B, c.H, int64_t{0}, c.T, c.S}) stack.push_back(static_cast<StableIValue>(n));
  const std::string error = fake::call("dropout_keep", stack, 1);
  if (!error.empty()) return {};
  const std::vector<double> x = numbers(fake::take(stack[0]));
  return {x.begin(), x.end()};
}

// Two threads call at once. Then a call gets no memory for its scratch or its partial results, which must be an error.
std::string check_together(const Case& k, const Tensors& t, const Output& one) {
  const auto other = [&](const Output& x) { return !same_bits(one.out, x.out) || !same_bits(one.lse, x.lse); };
  if (k.seed % 4 == 0) {
    Output outs[2];
    std::thread beside([&] { outs[0] = run(k, t); });
    outs[1] = run(k, t);
    beside.join();
    if (other(outs[0]) || other(outs[1])) return ": other bits beside another call";
  }
  for (int64_t n = 0; n < 3 && k.seed % 4 == 1; ++n) {
    fake::fail_allocation(n);
    const Output without = run(k, t);
    fake::fail_allocation(-1);
    if (without.error.empty() && other(without)) return ": other bits where an allocation failed";
  }
  return k.seed % 4 == 1 && other(run(k, t)) ? ": other bits after an allocation had failed" : "";
}

std::string check(Case& k) {
  const Tensors dirty(k, true), clean(k, false);
  Tensors paged(k, true);
  if (k.paged) paged.move_to_pages(k);
  if (k.call.dropout > 0) k.call.keep = keep_of(k, clean);
  const naive::Result expected = k.unchecked ? naive::Result() : naive::attention(k.call, rounding(k.query.dtype));
  for (const std::string& isa : isas()) {
    use(isa);
    fake::set_threads(1);
    const Output one = run(k, dirty), other = run(k, clean);
    fake::set_threads(threads_of(k));
    headwise::set_l2_prefetch(true);
    const Output many = run(k, dirty);
    headwise::set_l2_prefetch(false);
    if (!one.error.empty()) return isa + " refuses: " + one.error;
    if (!same_bits(one.out, many.out) || !same_bits(one.lse, many.lse)) return isa + ": other bits on more threads";
    if (!same_bits(one.out, other.out) || !same_bits(one.lse, other.lse))
      return isa + ": what may not be attended changes the result";
    if (k.paged) {
      const Output pages = run(k, paged);
      if (!pages.error.empty()) return isa + " refuses pages: " + pages.error;
      if (!same_bits(one.out, pages.out) || !same_bits(one.lse, pages.lse)) return isa + ": other bits from pages";
    }
    if (const std::string wrong = check_together(k, dirty, one); !wrong.empty()) return isa + wrong;
    if (k.unchecked) continue;
    std::string wrong = compare("out", one.out, expected.out, expected.out_error, k, isa);
    if (wrong.empty() && !k.plain) wrong = compare("lse", one.lse, expected.lse, expected.lse_error, k, isa);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::string check_gradients(Case& k) {
  if (k.bytes || k.overflows) return "";  // no gradient, or one outside the range of the definition
  const Tensors dirty(k, true), clean(k, false);
  if (k.call.dropout > 0) k.call.keep = keep_of(k, clean);
  for (const std::string& isa : isas()) {
    use(isa);
    std::string wrong = check_backward(k, dirty, clean, isa);
    if (wrong.empty()) wrong = check_statistics(k, dirty, clean, isa);
    if (!wrong.empty()) return isa + ": " + wrong;
  }
  return "";
}

}  // namespace

// Huge sizes must be refused, not computed.
void corrupt(Draw& draw, AtenTensorOpaque& t) {
  const size_t axes = t.sizes.size();
  if (axes == 0) return;
  const auto axis = static_cast<size_t>(draw.below(static_cast<int64_t>(axes)));
  switch (draw.below(12)) {
    case 0: t.sizes[axis] += draw.between(-1, 1); break;
    case 1: t.sizes[axis] = draw.one_of<int64_t>({0, -1, int64_t{1} << 31, int64_t{1} << 62, INT64_MAX}); break;
    case 2: t.strides[axis] = draw.one_of<int64_t>({-1, int64_t{1} << 40, INT64_MAX, INT64_MIN}); break;
    case 3:
      t.sizes.pop_back();
      t.strides.pop_back();
      break;
    case 4:
      t.sizes.push_back(1);
      t.strides.push_back(1);
      break;
    case 5: t.dtype = draw.one_of<int32_t>({0, kHalf, kFloat, kDouble, kLong, kBool, kBfloat, 9}); break;
    case 6: t.offset = draw.one_of<int64_t>({-1, 1000000, INT64_MAX}); break;
    case 7: t.storage = nullptr; break;
    case 8: t.storage_bytes = draw.below(t.storage_bytes + 1); break;
    case 9: t.device = 1; break;
    case 10:
      t.storage += draw.between(0, 3);
      t.storage_bytes -= 3;
      break;
    default: t.layout = 1;
  }
}

namespace {

std::string check_corrupt(Case& k) {
  Draw draw(k.seed + 77);
  Tensors t(k, false);
  if (k.paged) {
    t.move_to_pages(k);
    const double page = draw.one_of<double>({-1, -0x1p62, 0x1p62, static_cast<double>(t.key->sizes[0])});
    if (draw.once_in(3)) write(*t.table, draw.below(t.table->numel()), page);
  }
  for (int times = static_cast<int>(draw.between(1, 2)); times > 0; --times) {
    const std::vector<fake::Tensor*> all = t.all();
    fake::Tensor& one = *all[static_cast<size_t>(draw.below(static_cast<int64_t>(all.size())))];
    if (one != nullptr) corrupt(draw, *one);
  }
  if (draw.once_in(8)) k.call.scale = draw.one_of<double>({NAN, HUGE_VAL, 1e300});
  if (draw.once_in(8)) k.call.softcap = draw.one_of<double>({NAN, -1, HUGE_VAL});
  if (draw.once_in(8)) k.call.dropout = draw.one_of<double>({NAN, -1, 2});
  if (draw.once_in(8) && !t.segments.empty()) t.segments.pop_back();
  if (draw.once_in(8) && !t.alibi.empty()) t.alibi.pop_back();
  if (draw.once_in(8)) t.seed = nullptr;
  ++corrupted;
  const int64_t which = k.bytes || k.paged ? 0 : draw.below(3);
  const std::string error = which == 0   ? run(k, t).error
                            : which == 1 ? run_backward(k, t, true).error
                                         : corrupt_statistics(k, t);
  if (!error.empty()) ++refused;
  return "";
}

bool one_case(uint64_t seed) {
  constexpr double kLarge = 2.5e6;  // multiply-adds: threads are woken from 1.5e6 on
  fake::place_storages(seed);
  Case k = draw_case(seed, fixed_threads > 0 ? kLarge : 0);
  k.unchecked |= fixed_threads > 0;
  std::string wrong = check(k);
  if (wrong.empty()) wrong = check_gradients(k);
  if (wrong.empty() && fake::live() != 0) wrong = "a handle leaked";
  if (wrong.empty()) wrong = check_corrupt(k);
  if (wrong.empty()) wrong = check_append(seed);
  if (wrong.empty()) wrong = check_step(seed);
  if (wrong.empty()) {
    ++corrupted;
    refused += !corrupt_append(seed).empty();
  }
  if (wrong.empty()) {
    ++corrupted;
    refused += !corrupt_step(seed).empty();
  }
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
  printf("%llu cases from seed %llu in %.0f s, %lld corrupted calls (%lld refused), %d failures\n",
         static_cast<unsigned long long>(seed - first), static_cast<unsigned long long>(first), passed(),
         static_cast<long long>(corrupted), static_cast<long long>(refused), failures);
  for (const auto& [name, most] : worst) {
    printf("  %-22s largest error %.2f of what is allowed (case %llu)\n", name.c_str(), most.share,
           static_cast<unsigned long long>(most.seed));
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace fuzz

int main(int argc, char** argv) {
  if (argc == 2 && strcmp(argv[1], "balance") == 0) return fuzz::check_load_balance();
  if (argc > 2 && strcmp(argv[1], "threads") == 0) {
    fuzz::fixed_threads = 64;
    --argc;
    ++argv;
  }
  headwise::set_parallel_threshold(0.0);  // small cases, too
  if (argc == 3 && strcmp(argv[1], "case") == 0) return fuzz::one_case(strtoull(argv[2], nullptr, 10)) ? 0 : 1;
  const double seconds = argc > 1 ? atof(argv[1]) : 600;
  return fuzz::many(seconds, argc > 2 ? strtoull(argv[2], nullptr, 10) : 1);
}
