// Shares the items of a call for statistics among torch's threads, and adds up what they have in common.
#include "call/statistics_call.h"

#include <memory>

#include "runtime/dispatch.h"
#include "runtime/repack.h"
#include "runtime/schedule.h"

namespace headwise {
namespace {

void add(double* to, const double* from, int64_t n, bool first) {
  for (int64_t i = 0; i < n; ++i) to[i] = first ? from[i] : to[i] + from[i];
}

// Adds the parts of the items of one key-value head, in order.
void merge_parts(const Problem& p, const Plan& plan, const Statistics& s, int64_t batch_and_kv_head) {
  const int64_t G = p.H / p.K;
  for (int64_t g = 0; g < G; ++g) {
    const int64_t head = batch_and_kv_head * G + g;
    double* map = s.map + head * s.query_bins * s.map_sums();
    int64_t done = -1;  // the last row of the map that has a part
    for (int64_t item = 0; item < plan.row_items; ++item) {
      const double* part = s.parts + ((batch_and_kv_head * plan.row_items + item) * G + g) * s.part_size();
      add(s.sums + head * s.sums_of_head(), part, s.sums_of_head(), item == 0);
      const int64_t first = item * plan.rows_per_item, end = first + plan.rows_per_item;
      const int64_t last = (end < plan.rows ? end : plan.rows) - 1;
      const int64_t ends[2] = {first / G * s.query_bins / p.T, last / G * s.query_bins / p.T};
      for (int i = 0; i < 2 && (i == 0 || ends[1] > ends[0]); ++i) {
        add(map + ends[i] * s.map_sums(), part + s.sums_of_head() + i * s.map_sums(), s.map_sums(), ends[i] != done);
        done = ends[i];
      }
    }
  }
}

}  // namespace

void attend_statistics(const Problem& call, Statistics s) {
  const Kernels& set = kernels();
  const int64_t workers = workers_for(estimate(call));
  const PackedKeys packed(call, workers);
  const Problem& p = packed.call();
  const Deal deal = deal_rows(p, set.plan_statistics(p, s), workers, false);  // parts are summed by item
  const Plan& plan = deal.plan;
  const int64_t items = plan.groups(p), heads = p.B * p.K;
  const std::unique_ptr<double[]> parts(new double[static_cast<size_t>(items * (p.H / p.K) * s.part_size())]);
  s.parts = parts.get();
  const auto item = [&](int64_t i, char* scratch) { set.run_statistics(p, plan, s, deal.item(i, items), scratch); };
  share(workers, items, deal.alike, plan.scratch_bytes, item, scratch_of);
  share(workers, heads, true, 0, [&](int64_t i, char*) { merge_parts(p, plan, s, i); }, scratch_of);
}

void attend_received(const Problem& p, const Received& received) {
  const Kernels& set = kernels();
  const int64_t workers = workers_for(estimate(p));
  const ReceivedDeal deal = deal_received(p, set.plan_received(p), workers);
  const auto item = [&](int64_t i, char* scratch) {
    const int64_t at = deal.order.empty() ? i : deal.order[static_cast<size_t>(i)];
    set.run_received(p, received, deal.plan, at, scratch);
  };
  share(workers, deal.plan.items, deal.alike, deal.plan.scratch_bytes, item, scratch_of);
}

}  // namespace headwise
