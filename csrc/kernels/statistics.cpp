// Shares the items of a call for statistics among torch's threads.
#include "statistics_call.h"

#include "driver.h"

namespace headwise {

void attend_statistics(const Problem& p, const Statistics& statistics) {
  const Kernels& set = kernels();
  const Plan plan = set.plan_statistics(p, statistics);
  const int64_t items = plan.groups(p);
  // The last rows first: under a causal mask they have the most keys.
  const auto item = [&](int64_t i, char* scratch) { set.run_statistics(p, plan, statistics, items - 1 - i, scratch); };
  share(workers_for(estimate(p)), items, plan.scratch_bytes, item, scratch_of);
}

void attend_received(const Problem& p, const Received& received) {
  const Kernels& set = kernels();
  const ItemPlan plan = set.plan_received(p);
  const auto item = [&](int64_t i, char* scratch) { set.run_received(p, received, i, scratch); };
  share(workers_for(estimate(p)), plan.items, plan.scratch_bytes, item, scratch_of);
}

}  // namespace headwise
