// Checks how evenly the items of a call are spread over threads, without running any. The costs of the items, which are
// counted here row by row from the masks, determine which thread takes which item.
#include "fuzz/load_balance.h"

#include <stdio.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "call/statistics_call.h"
#include "runtime/dispatch.h"
#include "runtime/schedule.h"

namespace fuzz {
namespace {

using headwise::kFar;

// Keys first <= j < last.
struct Keys {
  int64_t first, last;
};

struct Shape {
  std::string name;
  headwise::Call p;
  std::vector<int64_t> bounds, documents;  // bounds: (B, 4); documents: where each begins, and the end
  std::vector<int64_t> ids;                // the document of each token

  Shape(const char* called, int64_t B, int64_t H, int64_t K, int64_t T, int64_t S) : name(called) {
    p.B = B;
    p.H = H;
    p.K = K;
    p.T = T;
    p.S = S;
    p.D = p.V = 64;
    p.query.dtype = p.key.dtype = p.value.dtype = p.out.dtype = headwise::Dtype::bf16;
  }
  Shape causal() && {
    p.high = p.S - p.T + 1;
    return std::move(*this);
  }
  Shape window(int64_t keys) && {
    p.high = p.S - p.T + 1;
    p.low = p.high - keys;
    return std::move(*this);
  }
  Shape lengths(const std::vector<int64_t>& of_batch) && {
    for (const int64_t stop : of_batch) bounds.insert(bounds.end(), {-kFar, std::min(p.high, kFar), 0, stop});
    return std::move(*this);
  }
  Shape packed(const std::vector<int64_t>& sizes) && {
    documents = {0};
    for (size_t i = 0; documents.back() < p.S; ++i) documents.push_back(documents.back() + sizes[i % sizes.size()]);
    for (size_t i = 0; static_cast<int64_t>(ids.size()) < p.S; ++i) {
      ids.insert(ids.end(), static_cast<size_t>(documents[i + 1] - documents[i]), static_cast<int64_t>(i));
    }
    return std::move(*this);
  }

  // The call, with pointers to the rules of this shape.
  headwise::Call call() const {
    headwise::Call whole = p;
    if (!bounds.empty()) {
      whole.bounds = bounds.data();
      whole.bounds_stride = 4;
    }
    if (!ids.empty()) {
      whole.segments[0] = {ids.data(), ids.data(), {0, 1}, {0, 1}};
      whole.n_segments = 1;
    }
    return whole;
  }

  Keys of_query(int64_t b, int64_t t) const {
    Keys keys = {std::max<int64_t>(0, t + p.low), std::min(p.S, t + p.high)};
    if (!bounds.empty()) keys.last = std::min(keys.last, bounds[static_cast<size_t>(b * 4 + 3)]);
    if (documents.empty()) return keys;
    const auto next = std::upper_bound(documents.begin(), documents.end(), t);
    return {std::max(keys.first, next[-1]), std::min(keys.last, *next)};
  }
  // The number of keys from <= j < to that some of the rows may attend.
  int64_t of_rows(int64_t b, int64_t first, int64_t last, int64_t from, int64_t to) const {
    Keys keys = {p.S, 0};
    for (int64_t t = first / (p.H / p.K); t <= (last - 1) / (p.H / p.K); ++t) {
      const Keys its = of_query(b, t);
      if (its.first < its.last) keys = {std::min(keys.first, its.first), std::max(keys.last, its.last)};
    }
    return std::max<int64_t>(0, std::min(keys.last, to) - std::max(keys.first, from));
  }
  // The cost of a range of rows in blocks: `pair` for each row and key, `row` for each row that reaches a key, and 1
  // for the item.
  float cost(int64_t b, headwise::RowRange rows, int64_t block, Keys keys, float pair, float row) const {
    float sum = 1.0f;
    for (int64_t first = rows.first; first < rows.last; first += block) {
      const int64_t last = std::min(first + block, rows.last), n = of_rows(b, first, last, keys.first, keys.last);
      const auto padded = static_cast<float>((last - first + 15) / 16 * 16);
      if (n > 0) sum += padded * (pair * static_cast<float>(n) + row);
    }
    return sum;
  }
};

// The costs of the items in the order of the schedule, and the largest cost of an item in the finest cut.
struct Load {
  std::vector<float> costs;
  float finest = 1.0f;
  bool uniform = true;     // all costs are about the same
  double otherwise = 0.0;  // the total work in the only finer cut, if that computes more
};
using Kind = std::function<Load(const Shape&, int64_t workers)>;

Load rows_of(const Shape& shape, const headwise::Plan& plan, int64_t workers, bool finer) {
  const headwise::Call p = shape.call();
  const auto cost = [&](const headwise::Plan& cut, int64_t item) {
    const int64_t group = item / cut.splits, from = item % cut.splits * cut.keys_per_split;
    const int64_t first = group % cut.row_items * cut.rows_per_item;
    return shape.cost(group / cut.row_items / p.K, {first, std::min(first + cut.rows_per_item, cut.rows)},
                      cut.rows_per_block, {from, from + cut.keys_per_split}, 1.0f, 16.0f);
  };
  const headwise::Schedule schedule = headwise::schedule_rows(p, plan, workers, finer);
  Load load;
  load.uniform = schedule.uniform;
  const int64_t items = schedule.plan.groups(p) * schedule.plan.splits;
  for (int64_t i = 0; i < items; ++i) load.costs.push_back(cost(schedule.plan, schedule.item(i)));
  headwise::Plan finest = plan;
  if (finer) finest.cut(plan.rows_per_block);
  const int64_t of_heads = finest.groups(p) * finest.splits;
  for (int64_t i = 0; i < of_heads; i += i / (finest.row_items * finest.splits) % p.K == 0 ? 1 : 7) {
    load.finest = std::max(load.finest, cost(finest, i));
  }
  return load;
}

Load forward(const Shape& shape, int64_t workers) {
  return rows_of(shape, headwise::kernels().plan(shape.call()), workers, true);
}

Load statistics(const Shape& shape, int64_t workers) {
  return rows_of(shape, headwise::kernels().plan_statistics(shape.call(), headwise::Statistics()), workers, false);
}

Load key_mass(const Shape& shape, int64_t workers) {
  const headwise::Call p = shape.call();
  const headwise::KeyMassSchedule schedule =
      headwise::schedule_key_mass(p, headwise::kernels().plan_key_mass(p), workers);
  Shape by_head = shape;
  by_head.p.K = p.H;
  Load load;
  load.uniform = schedule.uniform;
  const auto cost = [&](int64_t item, int64_t keys) {
    const int64_t ranges = (p.S + keys - 1) / keys, from = item % ranges * keys;
    return by_head.cost(item / ranges / p.H, {0, p.T}, schedule.plan.rows_per_block, {from, from + keys}, 1.0f, 16.0f);
  };
  for (int64_t i = 0; i < schedule.plan.items; ++i) {
    load.costs.push_back(
        cost(schedule.order.empty() ? i : schedule.order[static_cast<size_t>(i)], schedule.plan.keys_per_item));
  }
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t ranges = (p.S + 127) / 128;
    for (int64_t i = 0; i < ranges; ++i) load.finest = std::max(load.finest, cost(b * p.H * ranges + i, 128));
  }
  return load;
}

Load backward(const Shape& shape, int64_t workers) {
  const headwise::Call p = shape.call();
  const headwise::BackwardPlan plan = headwise::kernels().plan_backward(p);
  const auto cost = [&](const headwise::BackwardItem& item) {
    const int64_t b = item.head / p.K;
    if (item.kind == headwise::BackwardItem::queries) {
      return shape.cost(b, {item.first, item.last}, plan.rows_per_block, {0, p.S}, 3.0f, 40.0f);
    }
    const bool all = item.kind == headwise::BackwardItem::chunk_rows;
    float sum = 0.0f;
    for (int64_t i = 0; i < 2 * item.chunks; ++i) {
      const headwise::RowRange rows = plan.range(item.chunk + i / 2, static_cast<int>(i % 2));
      sum += shape.cost(b, rows, plan.rows_per_block, {item.first, item.last}, all ? 5.0f : 4.0f, all ? 40.0f : 30.0f);
    }
    return sum;
  };
  Load load;
  const headwise::BackwardSchedule schedule = headwise::schedule_backward(p, plan, workers);
  load.uniform = schedule.uniform;
  for (const headwise::BackwardItem& item : schedule.items) load.costs.push_back(cost(item));
  for (int64_t head = 0; head < p.B * p.K; head += p.K) {
    for (int64_t row = 0; row < plan.rows; row += plan.rows_per_block) {
      const int64_t end = std::min(row + plan.rows_per_block, plan.rows);
      const float its = cost({headwise::BackwardItem::queries, head, 0, row, end});
      load.finest = std::max(load.finest, its);
      load.otherwise += static_cast<double>(its) * static_cast<double>(p.K);
    }
    for (int64_t key = 0; key < p.S; key += headwise::kBackwardKeys) {
      for (int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
        const int64_t end = std::min(key + headwise::kBackwardKeys, p.S);
        const float its = cost({headwise::BackwardItem::keys, head, chunk, key, end});
        load.finest = std::max(load.finest, its);
        load.otherwise += static_cast<double>(its) * static_cast<double>(p.K);
      }
    }
  }
  return load;
}

std::vector<Shape> shapes_of_rows() {
  const std::vector<int64_t> ragged = {8192, 7001, 5003, 3001, 900, 401, 97, 31};
  std::vector<Shape> all;
  all.push_back(Shape("full, 12 heads x 2048", 1, 12, 12, 2048, 2048));
  all.push_back(Shape("full, 1 head x 8192", 1, 1, 1, 8192, 8192));
  all.push_back(Shape("causal, 12 heads x 512", 1, 12, 12, 512, 512).causal());
  all.push_back(Shape("causal, 3 heads x 2048", 1, 3, 3, 2048, 2048).causal());
  all.push_back(Shape("causal, 32 on 8 heads x 2048", 1, 32, 8, 2048, 2048).causal());
  all.push_back(Shape("causal, 1 head x 8192", 1, 1, 1, 8192, 8192).causal());
  all.push_back(Shape("causal, 2 x 5 heads x 4096", 2, 5, 5, 4096, 4096).causal());
  all.push_back(Shape("window of 1024, 8 heads x 16384", 1, 8, 8, 16384, 16384).window(1024));
  all.push_back(Shape("ragged lengths, 8 x 2 heads x 8192", 8, 2, 2, 8192, 8192).causal().lengths(ragged));
  std::vector<int64_t> short_but_one(256, 16);
  short_but_one[100] = 2048;
  all.push_back(Shape("a long text and 255 short ones, 2 heads", 256, 2, 2, 2048, 2048).lengths(short_but_one));
  all.push_back(Shape("packed, 4 heads x 8192", 1, 4, 4, 8192, 8192).causal().packed({300, 1500, 701, 97, 1100}));
  all.push_back(Shape("packed, a long one first, 4 heads x 8192", 1, 4, 4, 8192, 8192).packed({6000, 200}));
  all.push_back(Shape("256 queries on 131072 keys, 1 head", 1, 1, 1, 256, 131072).causal());
  all.push_back(Shape("512 queries on 65536 keys, 8 on 2 heads", 1, 8, 2, 512, 65536).causal());
  return all;
}

std::vector<Shape> decoding() {
  std::vector<Shape> all;
  for (const int64_t rows : {1, 2, 4, 8, 16, 32, 64}) {
    all.push_back(Shape("decoding on 8 heads of 131072 keys", 1, 8 * rows, 8, 1, 131072));
    all.back().name += ", " + std::to_string(rows) + " rows";
  }
  const std::vector<int64_t> ragged = {32768, 30011, 16411, 8209, 4099, 2053, 1031, 17};
  all.push_back(Shape("decoding, ragged lengths, 8 x 32 on 8 heads", 8, 32, 8, 1, 32768).lengths(ragged));
  return all;
}

int faults = 0;

// Checks some numbers of threads. If there is enough work, it must be spread evenly. For the numbers of threads in
// `wanted` any work counts as enough.
void check(const char* what, const Kind& kind, const Shape& shape, const std::vector<int64_t>& wanted) {
  std::string line;
  for (const int64_t workers : {2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256}) {
    const Load load = kind(shape, workers);
    double sum = 0.0;
    for (const float cost : load.costs) sum += static_cast<double>(cost);
    const double least = static_cast<double>(load.finest) * static_cast<double>(headwise::kEnoughItems * workers);
    const double imbalance = headwise::load_imbalance(load.costs, workers, load.uniform);
    const bool enough = sum >= least || std::count(wanted.begin(), wanted.end(), workers) > 0;
    const bool uneven = imbalance > headwise::kMaxImbalance, slower = imbalance * sum > load.otherwise;
    const bool wrong = enough && uneven && slower;
    faults += wrong;
    char text[40];
    snprintf(text, sizeof(text), " %d:%.2f%s", static_cast<int>(workers), imbalance,
             wrong     ? "!"
             : !enough ? "~"
             : uneven  ? "-"
                       : "");
    line += text;
  }
  printf("%-10s %-46s%s\n", what, shape.name.c_str(), line.c_str());
}

}  // namespace

int check_load_balance() {
  printf(
      "the busiest thread's share over the mean, by threads; ~ too little work, - quicker than an even share in two "
      "passes, ! above %.2f\n",
      headwise::kMaxImbalance);
  for (const Shape& shape : shapes_of_rows()) {
    const bool head = shape.name == "causal, 1 head x 8192";
    check("forward", forward, shape, {2});
    check("backward", backward, shape, head ? std::vector<int64_t>{2, 64} : std::vector<int64_t>{2});
    check("statistics", statistics, shape, {});
    check("received", key_mass, shape, {});
  }
  for (const Shape& shape : decoding()) check("decoding", forward, shape, {2});
  return faults == 0 ? 0 : 1;
}

}  // namespace fuzz
