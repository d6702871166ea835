// Runs the items of a call for statistics on torch's threads, and adds up what several items contribute to.
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

// Adds up, in order, the parts that the items of one key-value head have computed.
void merge_parts(const Call& p, const Plan& plan, const Statistics& s, int64_t batch_and_kv_head) {
  const int64_t G = p.H / p.K;
  for (int64_t g = 0; g < G; ++g) {
    const int64_t head = batch_and_kv_head * G + g;
    double* map = s.map + head * s.query_bins * s.map_sums();
    int64_t done = -1;  // the last row of the map that has got a part
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

void attend_statistics(const Call& call, Statistics s) {
  const Kernels& set = kernels();
  const int64_t workers = workers_for(estimate(call));
  const RepackedKeys packed(call, workers);
  const Call& p = packed.call();
  // not finer, because parts are summed by item
  const Schedule schedule = schedule_rows(p, set.plan_statistics(p, s), workers, false);
  const Plan& plan = schedule.plan;
  const int64_t items = plan.groups(p), heads = p.B * p.K;
  const std::unique_ptr<double[]> parts(new double[static_cast<size_t>(items * (p.H / p.K) * s.part_size())]);
  s.parts = parts.get();
  const auto item = [&](int64_t i, char* scratch) { set.run_statistics(p, plan, s, schedule.item(i), scratch); };
  for_each_item(workers, items, schedule.uniform, plan.scratch_bytes, item, scratch_of);
  for_each_item(workers, heads, true, 0, [&](int64_t i, char*) { merge_parts(p, plan, s, i); }, scratch_of);
}

void attend_key_mass(const Call& p, const KeyMass& key_mass) {
  const Kernels& set = kernels();
  const int64_t workers = workers_for(estimate(p));
  const KeyMassSchedule schedule = schedule_key_mass(p, set.plan_key_mass(p), workers);
  const auto item = [&](int64_t i, char* scratch) {
    const int64_t at = schedule.order.empty() ? i : schedule.order[static_cast<size_t>(i)];
    set.run_key_mass(p, key_mass, schedule.plan, at, scratch);
  };
  for_each_item(workers, schedule.plan.items, schedule.uniform, schedule.plan.scratch_bytes, item, scratch_of);
}

}  // namespace headwise
